"""Biases from positions where a definition of twelve whole positions does not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import bias
from flax import nnx
from test_definitions import EPS, LENGTH, POSITIONS, Entry, Ours, check_values, with_

from posenc.encodings import Dimensions, EncodingError, build
from posenc.encodings.bias import FIRE, LEAST, T5, KerpleLog, KerplePower, Sandwich, t5_buckets
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

DIMS = Dimensions(32, 4, 8, 64)


def made(entry, **parameters):
    ours = Ours(entry)
    given = {f"parts.0.{name}": np.asarray(p, np.float32) for name, p in parameters.items()}
    ours.variables = ours.variables | given
    return ours


# Positions of other kinds.

FRACTIONS = np.array([0, 0.25, 0.5, 3.125, 2, 7.75, 30.5, 31, 31.25, 99.875, 999.5, 1e3], "f4")
FALLING = np.array([900, 7, 7, 6, 5, 1000, 2, 3, 1, 0, 0, 50], np.int32)
POSITIVE = (("r1", 0.02, 5.0), ("r2", 0.02, 1.98))


@pytest.mark.parametrize("positions", [FRACTIONS, FALLING], ids=["fractions", "falling"])
@pytest.mark.parametrize(
    "entry",
    [
        Entry("alibi(learned=true)", bias.alibi),
        Entry("kerple_log", bias.kerple_log, within=POSITIVE),
        Entry("kerple_power", bias.kerple_power, within=POSITIVE),
        Entry("fire(threshold=50)", with_(bias.fire, threshold=50.0)),
        Entry("sandwich", bias.sandwich),
    ],
    ids=str,
)
def test_biases_are_those_of_the_definition_between_whole_positions_and_backwards(entry, positions):
    check_values(made(entry), positions)


def test_t5_rounds_distances_down():
    ours = made(Entry("t5", bias.t5))
    got = np.asarray(ours.run(ours.variables, FRACTIONS))
    case = ours.case(ours.variables, FRACTIONS)
    bucket = bias.t5_bucket(np.floor(bias.distance(case)))
    wanted = bias.scaled_product(case) + np.moveaxis(case.parameters["table"][bucket], -1, 0)
    seen = np.tri(LENGTH, dtype=bool)
    np.testing.assert_allclose(got[:, seen], wanted[:, seen], atol=64 * EPS, rtol=64 * EPS)


def test_sandwich_is_as_precise_at_position_a_million_as_at_the_first():
    # Phases in float32 alone would err by 0.05 there, and a sum of 64 cosines by some of that.
    ours = made(Entry("sandwich", bias.sandwich))
    far = [0, 1, 2, 3, 5, 1000, 10**5, 10**6, 10**6 + 1, 2**20, 2**22, 2**23]
    check_values(ours, np.array(far, np.int32))
    check_values(ours, POSITIONS["ordinary"] + 10**6)
    check_values(ours, (POSITIONS["ordinary"] / 4 + 2**16).astype(np.float32))


@pytest.mark.parametrize(
    ("head", "distance", "value"),
    [
        (1, 1, -2.170),
        (1, 16, -33.51),
        (1, 1024, -76.36),
        (12, 1, -0.181),
        (12, 128, -5.126),
        (12, 1024, -6.364),
    ],
)
def test_sandwich_by_hand(head, distance, value):
    ours = made(Entry("sandwich", bias.sandwich, heads=12, head_width=2))
    queries = {**ours.variables, "q": np.zeros((LENGTH, 12, 2), np.float32)}
    positions = np.full(LENGTH, distance, np.int32)
    positions[0] = 0
    got = np.asarray(ours.run(queries, positions))
    np.testing.assert_allclose(got[head - 1, 1, 0], value, rtol=3e-4, atol=5e-4)
    assert got[head - 1, 2, 1] == 0  # at distance 0 nothing, and not a rounding


# T5's buckets.


@pytest.mark.fast
@pytest.mark.parametrize("longest", [17, 40, 128, 129, 1024, 2048, 100_000])
@pytest.mark.parametrize("buckets", [2, 3, 7, 16, 32, 33])
def test_t5_buckets_are_those_of_the_definition_at_every_distance(buckets, longest):
    bucket = t5_buckets(buckets, longest)
    every = np.arange(200_000)
    wanted = bias.t5_bucket(every, buckets, longest)
    np.testing.assert_array_equal(bucket[np.minimum(every, len(bucket) - 1)], wanted)
    assert bucket[-1] == buckets - 1
    assert len(bucket) <= longest + 1


@pytest.mark.fast
def test_t5_looks_up_by_distance_or_by_bucket_and_gives_the_same():
    table = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    positions = np.array([0, 1, 5, 300, 999, 1000, 1500, 2000, 2500, 3000, 9000, 90_000], np.int32)
    entry = Entry("t5(max_distance=1000)", with_(bias.t5, max_distance=1000))
    check_values(made(entry, table=table), positions)
    entry = Entry("t5(max_distance=3000)", with_(bias.t5, max_distance=3000))
    check_values(made(entry, table=table), positions)


# KERPLE's parameters, where they are held.


@pytest.mark.parametrize(
    ("spec", "definition", "outside", "inside"),
    [
        ("kerple_log", bias.kerple_log, ([-1, 0.5, 0], [0.5, -3, 0]), ([LEAST, 0.5], [0.5, LEAST])),
        ("kerple_power", bias.kerple_power, ([-1, 0.5, 2], [0.5, 7, 0]), ([LEAST, 0.5], [0.5, 2])),
    ],
)
def test_a_parameter_that_left_its_range_is_held_and_comes_back(spec, definition, outside, inside):
    entry, positions = Entry(spec, definition, heads=3), POSITIONS["jumping"]
    out = made(entry, r1=outside[0], r2=outside[1])
    check_values(out, positions)
    held = made(entry, r1=[*inside[0], max(outside[0][2], LEAST)], r2=[*inside[1], LEAST])
    np.testing.assert_array_equal(
        out.run(out.variables, positions), held.run(held.variables, positions)
    )
    free, kept = (o.gradient(o.variables, jnp.asarray(positions)) for o in (out, held))
    for name in ("parts.0.r1", "parts.0.r2"):
        np.testing.assert_array_equal(free[name], kept[name])
        assert np.abs(np.asarray(free[name])).min() > 0
    # Those that start outside find the value that another layer has inside.
    target = held.run({**held.variables, "parts.0.r1": jnp.full(3, 0.7)}, positions)
    seen = np.tri(LENGTH, dtype=bool)
    others = jax.tree.map(jnp.asarray, held.variables)

    @jax.jit
    def gradient(r1):
        def loss(r1):
            given = held.compute({**others, "parts.0.r1": r1}, jnp.asarray(positions))
            return jnp.sum(jnp.where(seen, given - target, 0.0) ** 2)

        return jax.grad(loss)(r1)

    r1 = jnp.asarray([-1.0, -0.3, 0.0])
    for _ in range(50):
        r1 -= 0.05 * jnp.sign(gradient(r1))
    np.testing.assert_allclose(r1, 0.7, atol=0.051)


# FIRE's pieces.


def plain(parameters, share):
    """The MLP as it is written, in float64."""
    wide = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    hidden = share[:, None] @ wide["hidden.kernel"] + wide["hidden.bias"]
    return np.maximum(hidden, 0) @ wide["out.kernel"] + wide["out.bias"]


@pytest.mark.parametrize("kind", ["as drawn", "flat", "alike", "at 0", "far", "all fall"])
def test_pieces_of_an_mlp_are_the_mlp(kind):
    encodings = build("fire", 1, DIMS, jax.random.key(3))
    merge, parameters = split(encodings)
    own = {name.removeprefix("parts.0."): np.array(value) for name, value in parameters.items()}
    kernel, bias_ = own["hidden.kernel"], own["hidden.bias"]
    if kind == "flat":
        kernel[0, ::3] = 0
        bias_[0] = 0
    elif kind == "alike":
        kernel[0, 1::2], bias_[1::2] = -kernel[0, ::2], -bias_[::2]
    elif kind == "at 0":
        bias_[:] = 0
    elif kind == "far":
        kernel[0] *= 1e-30
    elif kind == "all fall":
        kernel[0] = -np.abs(kernel[0])
    encoding = merge({f"parts.0.{name}": jnp.asarray(v) for name, v in own.items()}).at(0)
    kinks, base, slope = (np.asarray(x, np.float64) for x in encoding._pieces())
    at = np.concatenate([np.linspace(0, 1.5, 301), kinks[np.abs(kinks) < 2]])
    passed = np.sum(at[:, None] > kinks, axis=1)
    got = base[passed] + slope[passed] * at[:, None]
    # Sums of 32 products of at most 1, 1.5 and 0.18.
    np.testing.assert_allclose(got, plain(own, at), atol=64 * EPS)


def test_fire_starts_as_published():
    encoding = build("fire", 1, DIMS, jax.random.key(0)).at(0)
    assert (float(encoding.c[...]), float(encoding.multiplier[...])) == (np.float32(0.1), 1.0)
    for array, limit in [
        (encoding.hidden.kernel, 1.0),
        (encoding.hidden.bias, 1.0),
        (encoding.out.kernel, 32**-0.5),
        (encoding.out.bias, 32**-0.5),
    ]:
        values = np.abs(np.asarray(array[...]))
        assert 0.5 * limit < values.max() <= limit
    sizes = [p.size for p in split(build("fire", 1, DIMS, jax.random.key(0)))[1].values()]
    assert sum(sizes) == 2 * 32 + 32 * 4 + 4 + 2


@pytest.mark.parametrize(("spec", "parts"), [("fire", 3), ("fire(shared=true)", 1)])
def test_layers_have_functions_of_their_own_unless_shared(spec, parts):
    assert len(build(spec, 3, DIMS, jax.random.key(0)).parts) == parts


@pytest.mark.parametrize(
    ("spec", "highest"),
    [("kerple_log", {"r1": 2.0, "r2": 1.0}), ("kerple_power", {"r1": 1.0, "r2": 2.0})],
)
def test_kerple_starts_uniform_as_published(spec, highest):
    encoding = build(spec, 1, Dimensions(4096, 4096, 1, 8), jax.random.key(0)).at(0)
    for name, high in highest.items():
        values = np.asarray(getattr(encoding, name)[...])
        assert LEAST <= values.min() < 2 * LEAST
        assert 0.99 * high < values.max() <= high
        assert abs(values.mean() / high - 0.5) < 4 / np.sqrt(12 * 4096)
    r1, r2 = (np.asarray(getattr(encoding, name)[...]) for name in ("r1", "r2"))
    assert abs(np.corrcoef(r1, r2)[0, 1]) < 4 / np.sqrt(4096)


# What is seen by none.


@pytest.mark.parametrize(
    "spec", ["alibi(learned=true)", "t5", "kerple_log", "kerple_power", "fire", "fire(threshold=3)"]
)
def test_gradients_are_finite_with_padding_on_either_side_and_repeated_positions(spec, monkeypatch):
    from posenc import attention

    monkeypatch.setattr(attention, "BLOCK", 4)
    config = TransformerConfig(vocab_size=13, layers=1, width=8, heads=2)
    model = Transformer(config, spec, 16)
    merge, parameters = split(model)
    tokens = np.arange(2 * 15).reshape(2, 15) % 13
    segments = np.array([[0] * 4 + [1] * 5 + [2] * 6, [1] * 9 + [0] * 6], np.int32)
    positions = np.array([[0] * 4 + [0, 0, 5, 5, 3] + [9] * 6, [*range(9)] + [0] * 6], np.int32)

    @jax.jit
    def gradient(parameters):
        def loss(parameters):
            return jnp.sum(jnp.sin(merge(parameters)(tokens, positions, segments)))

        return jax.grad(loss)(parameters)

    for name, value in gradient(parameters).items():
        assert np.isfinite(np.asarray(value)).all(), name


@pytest.mark.fast
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("t5(buckets=1)", "buckets=1.: .*at least 2"),
        ("t5(max_distance=16)", "max_distance=16.: 16 buckets .*at least 17"),
        ("t5(init_std=-1)", "init_std=-1.0.: it must be at least 0"),
        ("fire(threshold=0)", "threshold=0.0.: it must be above 0"),
        ("fire(width=0)", "width=0.: it must be above 0"),
        ("fire(eps=0)", "eps=0.0.: it must be above 0"),
        ("sandwich(width=7)", "width=7.: .*an even number"),
        ("sandwich(width=0)", "width=0.: .*an even number"),
        ("window(size=0)", "size=0.: .*at least 1"),
        ("window(size=4, sinks=-1)", "sinks=-1.: it must be at least 0"),
        ("window", "window lacks an option: window.size="),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(spec, message):
    with pytest.raises(EncodingError, match=message) as caught:
        build(spec, 1, DIMS, jax.random.key(0))
    assert "\n" not in str(caught.value)


@pytest.mark.fast
@pytest.mark.parametrize("cls", [T5, KerpleLog, KerplePower, FIRE, Sandwich])
def test_causal_forms_say_so(cls):
    encoding = cls(DIMS, nnx.Rngs(0))
    assert not encoding.bidirectional
    assert encoding.reference.count("{") == encoding.reference.count("}")
