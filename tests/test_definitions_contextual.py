"""Hand-made checks of the contextual definitions, by numbers found another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from definitions.accumulated import (
    rotated_logits,
    selective_angles,
    selective_rope,
    transported,
    turn,
)
from definitions.case import Case, scaled_product
from definitions.contextual import cope, dape, selective, stick_breaking
from definitions.forgetting import cable, fox, fox_slopes
from definitions.grape import alibi_slopes, grape_a, grape_ap
from definitions.path import directions, path, path_fox, strengths, transported_logits

pytestmark = pytest.mark.fast

HEADS, LENGTH, WIDTH, MODEL = 2, 6, 4, 8
LN2 = math.log(2.0)
CAUSAL = np.tri(LENGTH, dtype=bool)


def make_case(content: float = 1.0, start: int = 0, **parameters: np.ndarray) -> Case:
    """Random vectors, scaled by ``content``; parameter names have _ for the dot."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(LENGTH, MODEL))
    q, k, v = content * rng.normal(size=(3, HEADS, LENGTH, WIDTH))
    named = {name.replace("_", "."): value for name, value in parameters.items()}
    return Case(x, q, k, v, np.arange(start, start + LENGTH), named, LENGTH)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


def steps(slopes: float | np.ndarray) -> np.ndarray:
    """-slope * (i - j), [H, T, T]."""
    index = np.arange(LENGTH)
    return -np.broadcast_to(slopes, HEADS)[:, None, None] * (index[:, None] - index[None, :])


def assert_same(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    """Equal where j <= i."""
    np.testing.assert_allclose(actual[:, CAUSAL], expected[:, CAUSAL], atol=tolerance, rtol=0)


def test_fox_of_half_open_gates() -> None:
    case = make_case(gate_kernel=np.zeros((MODEL, HEADS)), gate_bias=np.zeros(HEADS))
    assert_same(fox(case), scaled_product(case) + steps(LN2))
    case = make_case(bias=np.log([1.0, 3.0]))  # f = 1/2, 3/4
    assert_same(fox(case, "bias"), scaled_product(case) + steps(np.log([2.0, 4.0 / 3.0])))


def test_fox_fixed_is_alibi_and_its_bias_form() -> None:
    slopes = fox_slopes(HEADS, 2.0, 16.0)
    np.testing.assert_allclose(1 / slopes, [2.0, 16.0])
    case = make_case(bias=-np.log(np.expm1(slopes)))  # the released initial bias
    assert_same(fox(case, "fixed", slopes), scaled_product(case) + steps(slopes))
    assert_same(fox(case, "bias"), fox(case, "fixed", slopes))
    np.testing.assert_allclose(fox_slopes(3, 1.0, 100.0), [1.0, 0.1, 0.01])


def test_fox_by_products_of_gates() -> None:
    case = make_case(gate_kernel=random(MODEL, HEADS), gate_bias=random(HEADS))
    kernel, bias = case.parameters["gate.kernel"], case.parameters["gate.bias"]
    gates = 1 / (1 + np.exp(-(case.x @ kernel + bias)))
    weight = np.exp(fox(case) - scaled_product(case))
    np.testing.assert_allclose(weight[1, 4, 2], gates[3, 1] * gates[4, 1])
    np.testing.assert_allclose(weight[0, 5, 0], gates[1:, 0].prod())
    np.testing.assert_allclose(weight[:, 3, 3], 1.0)


def test_cable_is_fox_of_the_opposite_gate() -> None:
    kernel, bias = random(MODEL, HEADS), random(HEADS)
    case = make_case(gate_kernel=kernel, gate_bias=bias)
    assert_same(cable(case), fox(make_case(gate_kernel=-kernel, gate_bias=-bias)))
    gap = cable(case, scaled=False) - cable(case)  # D = 4: the product doubles
    assert_same(gap, scaled_product(case))


@pytest.mark.parametrize(("scale", "divisor"), [("ram", 2.0), ("paper", 1.0)])
def test_cope_of_open_gates_is_a_clipped_relative_table(scale: str, divisor: float) -> None:
    case = make_case(table=random(WIDTH, 4))
    q, k = np.abs(case.q) + 1, 100 * (np.abs(case.k) + 1)  # every gate is 1
    case = Case(case.x, q, k, case.v, case.positions, case.parameters, LENGTH)
    index = np.arange(LENGTH)
    clipped = np.clip(index[:, None] - index[None, :] + 1, 0, 3)  # the token itself counts
    expected = np.stack([(head @ case.parameters["table"]) for head in case.q])
    expected = np.take_along_axis(expected, np.broadcast_to(clipped, (HEADS, LENGTH, LENGTH)), 2)
    assert_same(cope(case, 4, scale) - scaled_product(case), expected / divisor, 1e-9)


def test_cope_interpolates_between_half_open_gates() -> None:
    table = np.stack([np.arange(4.0) ** 2, *np.zeros((3, 4))])  # e[n] = n^2 on axis 0
    case = make_case(content=0.0, table=table)
    case.q[..., 0] = 1.0  # the keys are 0: every gate is 1/2
    row = cope(case, 4, "paper")[0, 5]
    np.testing.assert_allclose(row, [9.0, 6.5, 4.0, 2.5, 1.0, 0.5])
    np.testing.assert_allclose(cope(case, 4, "ram")[0, 5], row / 2)


def dape_parameters(*taps: int) -> dict[str, np.ndarray]:
    width = 3
    return {
        "hidden_kernel": random(*taps, 2 * HEADS, width),
        "hidden_bias": random(width),
        "out_kernel": random(*taps, width, HEADS),
        "out_bias": random(HEADS),
    }


def test_dape_one_pair_by_hand() -> None:
    case = make_case(**dape_parameters())
    bias = steps(0.5)
    hidden_kernel, hidden_bias, out_kernel, out_bias = case.parameters.values()
    qk = scaled_product(case)
    inputs = np.array([qk[0, 4, 1], qk[1, 4, 1], -1.5, -1.5])
    hidden = inputs @ hidden_kernel + hidden_bias
    f = np.maximum(hidden, 0.01 * hidden) @ out_kernel + out_bias
    np.testing.assert_allclose(dape(case, bias)[:, 4, 1], qk[:, 4, 1] - 1.5 + f)
    np.testing.assert_allclose(dape(case, bias, residual=False)[:, 4, 1], qk[:, 4, 1] + f)


def test_dape_of_the_middle_tap_is_version_one() -> None:
    one, two = dape_parameters(), dape_parameters(3)
    for name in ("hidden_kernel", "out_kernel"):
        two[name] = np.zeros_like(two[name])
        two[name][1] = one[name]
    two["hidden_bias"], two["out_bias"] = one["hidden_bias"], one["out_bias"]
    bias = steps(0.25)
    expected = dape(make_case(**one), bias)
    for remask in (True, False):
        assert_same(dape(make_case(**two), bias, version=2, remask=remask), expected)


def test_dape_convolutions_by_numpy_and_where_they_end() -> None:
    parameters = dape_parameters(3)
    case = make_case(**parameters)
    bias = np.where(CAUSAL, steps(0.25), np.nan)
    logits = dape(case, bias, version=2)
    features = np.concatenate([scaled_product(case), steps(0.25)])[:, 4].T * CAUSAL[4, :, None]

    def correlate(rows: np.ndarray, kernel: np.ndarray, shift: np.ndarray) -> np.ndarray:
        columns = [
            sum(np.convolve(rows[:, a], kernel[::-1, a, b], "same") for a in range(rows.shape[1]))
            for b in range(kernel.shape[2])
        ]
        return np.stack(columns, axis=1) + shift

    hidden = correlate(features, parameters["hidden_kernel"], parameters["hidden_bias"])
    hidden = np.where(hidden > 0, hidden, 0.01 * hidden)
    f = correlate(hidden * CAUSAL[4, :, None], parameters["out_kernel"], parameters["out_bias"])
    expected = scaled_product(case)[:, 4, :5] + steps(0.25)[:, 4, :5] + f[:5].T
    np.testing.assert_allclose(logits[:, 4, :5], expected)

    # Row i of a masked hidden map does not feel how far the array goes on; the released form does.
    short = Case(case.x[:5], *(a[:, :5] for a in (case.q, case.k, case.v)), np.arange(5), {}, 6)
    short.parameters.update(case.parameters)
    np.testing.assert_allclose(dape(short, bias[:, :5, :5], 2)[:, 4], logits[:, 4, :5])
    released = dape(case, bias, 2, remask=False)[:, 4, :5]
    assert abs(dape(short, bias[:, :5, :5], 2, remask=False)[:, 4] - released).max() > 1e-3


def test_selective_masks_only_later_queries() -> None:
    case = make_case(content=0.0)
    logits = np.zeros((HEADS, LENGTH, LENGTH))
    logits[0, 3] = [7.0, 2.0, -5.0, 9.0, 0.0, 0.0]  # token 3 masks 1; never BOS, 2 nor itself
    logits[0, 4, 1] = 0.5
    logits[1] = 100.0  # only head 0 selects
    removed = logits - selective(case, logits)
    expected = np.zeros((LENGTH, LENGTH))
    expected[4, 1], expected[5, 1] = 2.0, 2.5
    assert_same(removed, np.broadcast_to(expected, removed.shape))


def test_stick_breaking_of_even_sticks() -> None:
    weights = stick_breaking(make_case(content=0.0))
    np.testing.assert_allclose(weights[0, 5], [1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 0])
    weights = stick_breaking(make_case())
    assert (weights[:, 0] == 0).all()
    assert (weights >= 0).all()
    assert (weights.sum(axis=-1) <= 1).all()
    case = make_case()
    for attend_current in (False, True):
        own = 0 if attend_current else 1
        broken = 1 / (1 + np.exp(-scaled_product(case)))
        left = 1 - stick_breaking(case, attend_current).sum(axis=-1)
        for i in range(LENGTH):  # what no key broke off
            expected = (1 - broken[:, i, : i + 1 - own]).prod(axis=-1)
            np.testing.assert_allclose(left[:, i], expected)


def test_grape_a_of_constant_gates_is_alibi() -> None:
    one = np.full(HEADS, math.log(math.expm1(1.0)))  # the initial omega
    case = make_case(0.0, 100_000, omega=one, u=random(HEADS, WIDTH), v=random(HEADS, WIDTH))
    slopes = np.array([2.0**-4, 2.0**-8])
    assert_same(grape_a(case), steps(2 * LN2 * slopes))
    assert_same(grape_a(case, "q"), steps(LN2 * slopes))
    assert_same(grape_a(case, "k", slopes=np.ones(HEADS)), steps(LN2))
    np.testing.assert_allclose(alibi_slopes(3), [2.0**-4, 2.0**-8, 2.0**-2])


def test_grape_a_one_pair_by_hand() -> None:
    case = make_case(omega=np.zeros(HEADS), u=np.eye(2, 4) * 3, v=np.eye(2, 4) * 5)
    q, k = case.q[1, 4], case.k[1, 2]
    gates = np.log1p(np.exp(q[1] / 2)) + np.log1p(np.exp(k[1] / 2))  # the lengths 3, 5 drop out
    expected = q @ k / 2 - 2 * LN2 * 2.0**-8 * gates
    np.testing.assert_allclose(grape_a(case)[1, 4, 2], expected)
    only = np.log1p(np.exp(3 * k[1] / 2))
    expected = q @ k / 2 - 2 * LN2 * 2.0**-8 * only
    np.testing.assert_allclose(grape_a(case, "k", normalize=False)[1, 4, 2], expected)


def test_grape_ap_of_no_probe_is_alibi() -> None:
    alpha = np.array([0.5, 0.125])
    case = make_case(project_kernel=np.zeros((MODEL, HEADS * 2)), alpha=alpha)
    assert_same(grape_ap(case), scaled_product(case) + steps(LN2 * alpha))


def test_grape_ap_of_one_plane_is_a_sum_of_cosines() -> None:
    kernel = np.zeros((MODEL, HEADS * 2))
    kernel[0, :] = [1.0, 0.0, 0.0, 1.0]  # head 0 along the first axis, head 1 along the second
    case = make_case(0.0, project_kernel=kernel, alpha=np.array([1.0, 2.0]))
    case.x[:, 0] = 3.0  # p = (sqrt 2, 0) normed, of width 2
    angles = np.arange(LENGTH)
    psi = -np.log1p(np.exp(-np.cos(angles)))  # <p, R_l p> / 2 = cos l
    raw = -np.log1p(np.exp(-3 / math.sqrt(2) * np.cos(angles)))  # the query 3 long, not sqrt 2
    for logits, edges in ((grape_ap(case), psi), (grape_ap(case, released=True), raw)):
        expected = [[edges[j + 1 : t + 1].sum() for j in range(LENGTH)] for t in range(LENGTH)]
        assert_same(logits, np.array([1.0, 2.0])[:, None, None] * np.array(expected), 1e-6)


def test_grape_ap_turns_by_the_key_position() -> None:
    kernel = np.zeros((MODEL, HEADS * 2))
    kernel[0, ::2], kernel[1, 1::2] = 1.0, 1.0
    case = make_case(0.0, 1, project_kernel=kernel, alpha=np.ones(HEADS))
    case.x[:] = 0.0
    case.x[0, 0] = case.x[1, 1] = 1.0  # p_0 = (s, 0), p_1 = (0, s) with s = sqrt 2
    case.x[2:, 0] = 1.0
    got = grape_ap(case, epsilon=0.0)[0, 1, 0]  # R_2 p_1 . p_1 / 2 = cos 2
    np.testing.assert_allclose(got, -math.log1p(math.exp(-math.cos(2))))
    for released, sign in ((False, -1), (True, 1)):  # p_2 . R_2 p_1 / 2 = -sin 2
        length = 1 / math.sqrt(2) if released else 1.0
        edges = [sign * length * math.sin(2), length * math.cos(3)]
        expected = -sum(math.log1p(math.exp(-edge)) for edge in edges)
        got = grape_ap(case, released, epsilon=0.0)[0, 2, 0]
        np.testing.assert_allclose(got, expected)


def path_parameters() -> dict[str, np.ndarray]:
    return {
        "down_kernel": random(MODEL, 3),
        "up_kernel": random(3, HEADS * WIDTH),
        "conv_kernel": random(3, HEADS * WIDTH),
        "beta_kernel": random(MODEL, HEADS),
        "beta_bias": random(HEADS),
    }


def test_path_of_zero_strength_and_of_one_mirror() -> None:
    case = make_case()
    w = np.zeros((HEADS, LENGTH, WIDTH))
    w[..., 0] = 1.0
    assert_same(transported_logits(case, w, np.zeros((HEADS, LENGTH))), scaled_product(case))
    logits = transported_logits(case, w, np.full((HEADS, LENGTH), 2.0))
    mirrored = scaled_product(case) - np.einsum("ht,hs->hts", case.q[..., 0], case.k[..., 0])
    odd = np.add.outer(np.arange(LENGTH), np.arange(LENGTH)) % 2 == 1
    assert_same(logits, np.where(odd, mirrored, scaled_product(case)))  # 2 q0 k0 / sqrt(4)


def test_path_is_a_cache_of_updated_keys() -> None:
    case = make_case(**path_parameters())
    w, beta = directions(case), strengths(case)
    expected = np.zeros((HEADS, LENGTH, LENGTH))
    keys = np.zeros((HEADS, 0, WIDTH))
    for t in range(LENGTH):  # each token updates all the keys before it, then adds its own
        along = np.einsum("hsd,hd->hs", keys, w[:, t])
        keys = keys - beta[:, t, None, None] * along[..., None] * w[:, t, None, :]
        keys = np.concatenate([keys, case.k[:, t : t + 1]], axis=1)
        expected[:, t, : t + 1] = np.einsum("hd,hsd->hs", case.q[:, t], keys) / 2
    assert_same(path(case), expected)


def test_path_directions_and_strengths_by_hand() -> None:
    parameters = path_parameters()
    case = make_case(**parameters)
    line = case.x @ parameters["down_kernel"] @ parameters["up_kernel"]
    taps = parameters["conv_kernel"]
    for t in (0, 3):
        mixed = taps[2] * line[t]
        if t:
            mixed = mixed + taps[1] * line[t - 1] + taps[0] * line[t - 2]
        head = (mixed / (1 + np.exp(-mixed)))[WIDTH:]
        np.testing.assert_allclose(directions(case, 0.0)[1, t], head / np.linalg.norm(head))
    logit = case.x[3] @ parameters["beta_kernel"][:, 1] + parameters["beta_bias"][1]
    np.testing.assert_allclose(strengths(case)[1, 3], 1 + math.tanh(logit / 2))


def test_path_fox_adds_the_gates() -> None:
    gates = {"gate_kernel": np.zeros((MODEL, HEADS)), "gate_bias": np.zeros(HEADS)}
    case = make_case(**path_parameters(), **gates)
    assert_same(path_fox(case), path(case) + steps(LN2))
    assert_same(path_fox(case, gate_scale=0.5), path(case) + steps(LN2 / 2))


def test_accumulated_constant_angles_are_rope() -> None:
    case = make_case()
    frequencies = np.array([1.0, 0.25])
    angles = np.broadcast_to(frequencies, (HEADS, LENGTH, 2))
    positions = np.arange(LENGTH)[:, None] * frequencies
    q, k = ((a[..., :2] + 1j * a[..., 2:]) * np.exp(1j * positions) for a in (case.q, case.k))
    assert_same(rotated_logits(case, angles), np.einsum("htm,hsm->hts", q, k.conj()).real / 2)


def test_accumulated_values_are_turned_and_turned_back() -> None:
    case = make_case()
    angles = random(HEADS, LENGTH, 2)
    total = angles.cumsum(axis=1)
    weights = np.tril(np.abs(random(HEADS, LENGTH, LENGTH)))
    back = turn(np.einsum("hts,hsd->htd", weights, turn(case.v, total)), -total)
    np.testing.assert_allclose(transported(case, angles, weights), back.transpose(1, 0, 2))
    turned = np.einsum("htd,hsd->hts", turn(case.q, total), turn(case.k, total)) / 2
    assert_same(rotated_logits(case, angles), turned)


def test_selective_rope_special_cases() -> None:
    parameters = {
        "down_kernel": random(MODEL, 3),
        "up_kernel": random(3, HEADS * 2),
        "conv_kernel": random(4, HEADS * 2),
        "gate_kernel": np.zeros((MODEL, HEADS)),
        "gate_bias": np.array([0.0, math.log(3.0)]),
    }
    case = make_case(**parameters)
    plain, gated = selective_angles(case), selective_angles(case, gate=True)
    np.testing.assert_allclose(gated, np.array([0.5, 0.75])[:, None, None] * plain)
    unit = np.concatenate([part / np.linalg.norm(part) for part in np.split(case.x[0], 2)])
    phi = parameters["conv_kernel"][3] * (
        unit @ parameters["down_kernel"] @ parameters["up_kernel"]
    )
    expected = phi[2:] * [1.0, 500_000.0**-0.5]
    np.testing.assert_allclose(selective_angles(case, epsilon=0.0)[1, 0], expected)
    still = make_case(**{**parameters, "up_kernel": np.zeros((3, HEADS * 2))})
    assert_same(selective_rope(still), scaled_product(still))
