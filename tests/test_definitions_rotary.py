"""The rotary definitions against numbers and forms that were worked out apart from them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.definitions import extension, polar, rotary, scaling
from tests.definitions.case import Case, scaled_product

pytestmark = pytest.mark.fast


def make_case(positions: np.ndarray | None = None, heads: int = 2, width: int = 8) -> Case:
    rng = np.random.default_rng(0)
    positions = np.arange(12) if positions is None else positions
    shape = (heads, len(positions), width)
    q, k, v = (rng.normal(size=shape) for _ in range(3))
    x = rng.normal(size=(len(positions), heads * width))
    return Case(x=x, q=q, k=k, v=v, positions=positions, parameters={}, context_length=8)


def same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal where j <= i."""
    lower = np.tril(np.ones(actual.shape[-2:], bool))
    np.testing.assert_allclose(actual[:, lower], expected[:, lower], rtol=1e-9, atol=1e-9)


def by_matrices(case: Case, pairs: list[tuple[int, int]], angles: list[float]) -> np.ndarray:
    """(R_i q_i) . (R_j k_j) / sqrt(D) with R_p written out as a D x D matrix."""
    width = case.head_width
    q, k = np.zeros_like(case.q), np.zeros_like(case.k)
    for t, position in enumerate(case.positions):
        matrix = np.eye(width)
        for (a, b), angle in zip(pairs, angles, strict=True):
            c, s = math.cos(position * angle), math.sin(position * angle)
            matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
        q[:, t], k[:, t] = case.q[:, t] @ matrix.T, case.k[:, t] @ matrix.T
    return np.einsum("htd,hsd->hts", q, k) / math.sqrt(width)


def test_frequencies() -> None:
    frequencies, factor = scaling.default(64, 1e4)
    assert factor == 1.0
    assert frequencies[0] == 1.0
    assert frequencies[1] == pytest.approx(0.749894, rel=1e-6)
    assert frequencies[15] == pytest.approx(0.0133352, rel=1e-5)
    assert frequencies[31] == pytest.approx(1.33352e-4, rel=1e-5)
    assert 2 * math.pi / frequencies[31] == pytest.approx(47117.24, rel=1e-7)
    rotations = 1024 * frequencies / (2 * math.pi)
    assert (rotations < 1).sum() == 14
    assert (rotations > 32).sum() == 6


@pytest.mark.parametrize(("factor", "base"), [(2, 20452.23), (4, 41829.37), (8, 85550.38)])
def test_ntk_base(factor: int, base: float) -> None:
    np.testing.assert_allclose(
        scaling.ntk(64, 1e4, factor)[0], scaling.default(64, base)[0], rtol=1e-6
    )
    # Dynamic NTK with f = 1 has s = n/L, and none up to L.
    np.testing.assert_allclose(
        scaling.dynamic_ntk(64, 1e4, 1.0, 1024, 1024 * factor)[0],
        scaling.ntk(64, 1e4, factor)[0],
        rtol=1e-12,
    )
    for length in (1, 1024):
        np.testing.assert_array_equal(
            scaling.dynamic_ntk(64, 1e4, factor, 1024, length)[0], scaling.default(64, 1e4)[0]
        )


def test_ntk_ends() -> None:
    """The highest frequency stays and the lowest is divided by s."""
    ratio = scaling.default(64, 1e4)[0] / scaling.ntk(64, 1e4, 4.0)[0]
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("factor", "scale", "square"),
    [(2, 1.0693, 1.1434), (4, 1.1386, 1.2965), (8, 1.2079, 1.4591), (16, 1.2773, 1.6314)],
)
def test_yarn_attention_factor(factor: int, scale: float, square: float) -> None:
    _, attention_factor = scaling.yarn(64, 1e4, factor, 1024)
    assert attention_factor == pytest.approx(scale, abs=5e-5)
    assert attention_factor**2 == pytest.approx(square, abs=5e-5)


def test_yarn_ramps() -> None:
    assert scaling.index_ends(64, 1e4, 1024, slow=1, fast=32) == (5, 18)
    index = scaling.kept_by_index(64, 1e4, 1024, slow=1, fast=32)
    rotations = scaling.kept_by_rotations(64, 1e4, 1024, slow=1, fast=32)
    assert np.abs(index - rotations).max() == pytest.approx(0.352, abs=5e-4)
    plain = scaling.default(64, 1e4)[0]
    for ramp in ("index", "rotations"):
        out = scaling.yarn(64, 1e4, 4, 1024, ramp=ramp)[0]
        np.testing.assert_allclose(out[:6], plain[:6], rtol=1e-12)
        np.testing.assert_allclose(out[18:], plain[18:] / 4, rtol=1e-12)
        np.testing.assert_array_equal(out, scaling.ntk_by_parts(64, 1e4, 4, 1024, ramp=ramp)[0])


def test_llama3_counts() -> None:
    ratio = scaling.default(128, 5e5)[0] / scaling.llama3(128, 5e5)[0]
    unchanged, divided = np.isclose(ratio, 1, rtol=1e-12), np.isclose(ratio, 8, rtol=1e-12)
    blended = ~(unchanged | divided)
    assert (unchanged.sum(), blended.sum(), divided.sum()) == (29, 6, 29)


def test_unit_factor_is_plain() -> None:
    plain = scaling.default(64, 1e4)[0]
    for out, attention_factor in (
        scaling.linear(64, 1e4, 1.0),
        scaling.ntk(64, 1e4, 1.0),
        scaling.yarn(64, 1e4, 1.0, 1024),
        scaling.longrope(64, 1e4, np.ones(32), 1.0, 1024),
        scaling.llama3(64, 1e4, 1.0),
    ):
        np.testing.assert_allclose(out, plain, rtol=1e-12)
        assert attention_factor == 1.0


def test_longrope_attention_factor() -> None:
    out, attention_factor = scaling.longrope(64, 1e4, np.full(32, 2.0), 32.0, 1024)
    assert attention_factor == pytest.approx(math.sqrt(1.5))  # ln 2^5 / ln 2^10 = 1/2
    np.testing.assert_allclose(out, scaling.linear(64, 1e4, 2.0)[0])


def test_xpos_decay() -> None:
    decay = rotary.xpos_decay(64)
    np.testing.assert_allclose(decay[[0, 15, 31]], [0.2857, 0.6205, 0.9777], atol=5e-5)


def test_rope_by_matrices() -> None:
    case = make_case(np.array([0, 1, 2, 5, 7, 40, 41.5]))
    angles = [1.0, 0.1, 0.01, 0.001]
    half = [(m, m + 4) for m in range(4)]
    interleaved = [(2 * m, 2 * m + 1) for m in range(4)]
    same(rotary.rope(case), by_matrices(case, half, angles))
    same(rotary.rope(case, pairing="interleaved"), by_matrices(case, interleaved, angles))
    same(rotary.rope(case, partial=0.5), by_matrices(case, [(0, 2), (1, 3)], [1.0, 0.01]))
    same(
        rotary.rope(case, partial=0.5, pairing="interleaved"),
        by_matrices(case, [(0, 1), (2, 3)], [1.0, 0.01]),
    )
    same(rotary.p_rope(case, 0.75), by_matrices(case, half, [1.0, 0.1, 0.01, 0.0]))
    same(rotary.rope(case, attention_factor=3.0), 9.0 * rotary.rope(case))


def test_p_rope_ends() -> None:
    case = make_case()
    same(rotary.p_rope(case, 1.0), rotary.rope(case))
    same(rotary.p_rope(case, 0.0), scaled_product(case))


def test_learned_rope() -> None:
    case = make_case()
    case.parameters["inv_freq"] = np.array([[1.0, 0.1, 0.01, 0.001], [2.0, 3.0, 0.5, 0.0]])
    half = [(m, m + 4) for m in range(4)]
    out = rotary.learned_rope(case)
    for h in range(2):
        expected = by_matrices(case, half, list(case.parameters["inv_freq"][h]))
        same(out[h : h + 1], expected[h : h + 1])


def test_xpos_by_scaled_queries_and_keys() -> None:
    case = make_case()
    decay = np.tile(rotary.xpos_decay(8), 2)
    power = decay ** (case.positions[:, None] / 512)
    scaled = Case(case.x, case.q * power, case.k / power, case.v, case.positions, {}, 8)
    same(rotary.xpos(case), rotary.rope(scaled))


def test_fope_with_identity_mixes() -> None:
    case = make_case()
    kept = 2  # of 1, 0.1, 0.01, 0.001 with a floor of 2 pi/64 = 0.098
    for name in ("cos_mix", "sin_mix"):
        case.parameters[name] = np.stack([np.eye(kept)] * case.heads)
    same(rotary.fope(case, length=64), rotary.hope(case, length=64))
    same(rotary.hope(case, length=64), rotary.p_rope(case, 0.5))
    # Both 1: the dropped channels' product counts twice.
    double = rotary.fope(case, length=64, zero_freq_sin=1.0) - rotary.fope(case, length=64)
    dropped = [2, 3, 6, 7]
    same(double, np.einsum("htd,hsd->hts", case.q[..., dropped], case.k[..., dropped]) / 8**0.5)


def test_dynamic_rope() -> None:
    case = make_case(np.arange(12))
    out = rotary.dynamic_rope(case, 1e4, 2.0, 8, chunk=4)
    for i, length in ((0, 4), (7, 8), (8, 12), (11, 12)):
        inv_freq = scaling.dynamic_ntk(8, 1e4, 2.0, 8, length)[0]
        np.testing.assert_allclose(out[:, i], rotary.rope(case, inv_freq=inv_freq)[:, i])
    same(out[:, :8, :8], rotary.rope(case)[:, :8, :8])


def test_longrope_switch() -> None:
    case = make_case(np.arange(12))
    short, long = np.full(4, 1.5), np.full(4, 3.0)
    out = rotary.longrope_switch(case, 1e4, short, long, 4.0, 8)
    for rows, factors in ((slice(0, 8), short), (slice(8, 12), long)):
        inv_freq, attention_factor = scaling.longrope(8, 1e4, factors, 4.0, 8)
        expected = rotary.rope(case, inv_freq=inv_freq, attention_factor=attention_factor)
        np.testing.assert_allclose(out[:, rows], expected[:, rows])


def test_pope_by_complex_numbers() -> None:
    case = make_case()
    case.parameters["phase"] = np.random.default_rng(1).uniform(-8, 1, size=(2, 8))
    phase = np.clip(case.parameters["phase"], -2 * np.pi, 0)
    turn = np.exp(1j * case.positions[:, None] * 10000.0 ** (-np.arange(8) / 8))
    q = np.log1p(np.exp(case.q)) * turn
    k = np.log1p(np.exp(case.k)) * turn * np.exp(1j * phase)[:, None, :]
    same(polar.pope(case), np.einsum("htd,hsd->hts", q, k.conj()).real / math.sqrt(8))


def test_relative() -> None:
    """All but FoPE, Self-Extend and those with a length are functions of p_i - p_j."""
    at_zero, moved = make_case(np.arange(12)), make_case(100_000 + np.arange(12))
    for logits in (
        rotary.rope,
        rotary.p_rope,
        rotary.xpos,
        lambda case: extension.rerope(case, 4),
        lambda case: extension.leaky_rerope(case, 4, 8),
        lambda case: extension.lm_infinite(case, 2, 4),
    ):
        same(logits(moved), logits(at_zero))


def test_extensions_are_rope_inside_the_window() -> None:
    case = make_case()
    plain = rotary.rope(case)
    for out in (
        extension.self_extend(case, group=4, window=12),
        extension.rerope(case, 11),
        extension.leaky_rerope(case, 11, 8),
        extension.leaky_rerope(case, 4, 1),
        extension.self_extend(case, group=1, window=4),
        extension.lm_infinite(case, 0, 12),
    ):
        same(out, plain)


def test_extensions_beyond_the_window() -> None:
    case = make_case()

    def one(relative: float) -> np.ndarray:
        turn = [relative * 10.0**-m for m in range(4)]
        at = Case(case.x, case.q[:, [11]], case.k[:, [1]], case.v, np.array([1]), {}, 8)
        logits = np.zeros(2)
        for m in range(4):
            a, b = at.q[:, 0, m] + 1j * at.q[:, 0, m + 4], at.k[:, 0, m] + 1j * at.k[:, 0, m + 4]
            logits += (a * b.conj() * np.exp(1j * turn[m])).real
        return logits / math.sqrt(8)

    # Query 11, key 1.
    grouped = extension.self_extend(case, group=4, window=6)  # floor(11/4) + 6 - 6/4 - floor(1/4)
    np.testing.assert_allclose(grouped[:, 11, 1], one(2 + 6 - 1.5))
    np.testing.assert_allclose(extension.rerope(case, 4)[:, 11, 1], one(4))
    np.testing.assert_allclose(extension.leaky_rerope(case, 4, 3)[:, 11, 1], one(6))
    masked = extension.lm_infinite(case, 2, 4)
    np.testing.assert_allclose(masked[:, 11, 1], one(4))
    assert np.all(np.isneginf(masked[:, 11, 2:8]))
    assert np.all(np.isfinite(masked[:, 11, 8:]))
