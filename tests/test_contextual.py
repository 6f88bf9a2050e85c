"""Encodings from content where a definition of twelve tokens does not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import forgetting, path
from test_definitions import POSITIONS, Entry, Ours, check_values, path_fox

from posenc import conformance
from posenc.attention import attend
from posenc.encodings import Dimensions, EncodingError, Side, build
from posenc.encodings.forgetting import sums_between

DIMS = Dimensions(32, 4, 8, 64)


def layer(spec):
    return build(spec, 1, DIMS, jax.random.key(0)).at(0)


def side(x, features=None, segments=None, start=0):
    batch, length = x.shape[:2]
    slots = start + jnp.arange(length, dtype=jnp.int32)[None]
    segments = jnp.ones((batch, length), jnp.int32) if segments is None else segments
    return Side(x, x, slots, {}, slots, segments, features)


@pytest.mark.fast
@pytest.mark.parametrize("width", [1.0, 0.02 * 768**0.5])
def test_sums_of_gates_are_as_precise_at_token_100000_as_at_the_first(width):
    length, first, rows = 131_072, 100_000, 128
    gates = np.random.default_rng(0).standard_normal((1, length, 2)).astype(np.float32)
    steps = np.asarray(jax.nn.log_sigmoid(width * gates))
    keys = side(steps)
    queries = side(steps[:, first : first + rows], start=first)
    got = np.asarray(jax.jit(sums_between)(steps, queries, keys))[0]
    total = np.cumsum(steps[0].astype(np.float64), axis=0)
    at = np.arange(rows)
    for back in (0, 1, 2, 50):
        wanted = (total[first + at] - total[first + at - back]).T
        error = np.abs(got[:, at, first + at - back] - wanted)
        assert error.max() < 1e-6 * (1 + np.abs(wanted).max())
    # Far back what counts is the error beside the sum.
    far = np.arange(0, first, 997)
    wanted = total[first + at][:, None] - total[far][None]
    np.testing.assert_allclose(got[:, :, far], np.moveaxis(wanted, 2, 0), rtol=1e-6)


@pytest.mark.fast
def test_sums_of_gates_do_not_see_padding_other_segments_or_what_comes_later():
    random = np.random.default_rng(0)
    steps = -random.random((1, 40, 2)).astype(np.float32)
    segments = np.repeat([0, 1, 2, 0], [3, 14, 19, 4])[None].astype(np.int32)
    between = forgetting.between(steps[0].T.astype(np.float64))
    run = jax.jit(sums_between)
    for low, high in ((0, 40), (5, 9), (16, 25), (35, 40)):
        rows = np.s_[:, low:high]
        seen = (segments[0, low:high, None] == segments[0]) & (segments[0] != 0)
        seen &= np.arange(low, high)[:, None] >= np.arange(40)
        changed = steps.copy()
        changed[segments == 0] = np.nan
        changed[:, high:] += 1
        some, other = (
            np.asarray(run(each, side(each[rows], None, segments[rows], low), keys))[0]
            for each, keys in ((s, side(s, None, segments)) for s in (steps, changed))
        )
        np.testing.assert_array_equal(some[:, seen], other[:, seen])
        np.testing.assert_allclose(some[:, seen], between[:, low:high][:, seen], atol=1e-5)


# Each with a window, or with parameters that are nought at first.
LAWFUL = [
    "cope(positions=5)",
    "path+fox+window(size=9)",
    "dape(base=fox, version=2)+window(size=9)",
    "cope(positions=5)+selective+window(size=9, sinks=2)",
    "alibi+stick_breaking(attend_current=true)+window(size=9, sinks=2)",
    "grape_ap+window(size=9)",
    "fox(gate=bias),fox(gate=fixed),cable(scaled=false)",
]


@pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=() if i < 2 else pytest.mark.slow) for i, s in enumerate(LAWFUL)]
)
def test_laws_hold_at_other_parameters_in_windows_and_over_many_chunks(spec, monkeypatch):
    monkeypatch.setattr("posenc.encodings.path.CHUNK", 8)
    subject = conformance.Subject(spec)
    random = np.random.default_rng(3)
    for name, value in subject.parameters.items():
        if name.startswith("encoding."):
            noise = 0.2 * random.standard_normal(value.shape)
            subject.parameters[name] = value + noise.astype(np.float32)
    for check in (
        conformance.cached_equals_full,
        conformance.packed_equals_separate,
        conformance.left_padded_equals_unpadded,
        conformance.later_tokens_change_nothing,
        conformance.blocks_equal_dense,
    ):
        check(subject)


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_path_is_its_definition_over_chunks_of_any_size(chunk, monkeypatch):
    monkeypatch.setattr("posenc.encodings.path.CHUNK", chunk)
    for spec, definition in (("path", path.path), ("path+fox", path_fox)):
        check_values(Ours(Entry(spec, definition)), POSITIONS["ordinary"])


@pytest.mark.fast
def test_a_short_convolution_reads_nothing_across_a_border_of_segments():
    encoding = layer("path(conv=4)")
    x = jax.random.normal(jax.random.key(1), (1, 12, 32))
    segments = jnp.repeat(jnp.asarray([0, 1, 2]), jnp.asarray([2, 3, 7]))[None]
    positions = jnp.arange(12)[None]
    (w, beta), _ = encoding.features(x, positions, segments, encoding.start_state(1))
    for low, high in ((2, 5), (5, 12)):
        own = np.s_[:, low:high]
        ones = jnp.ones((1, high - low), jnp.int32)
        (alone, beside), _ = encoding.features(
            x[own], positions[own], ones, encoding.start_state(1)
        )
        np.testing.assert_allclose(w[own], alone, atol=1e-6)
        np.testing.assert_allclose(beta[own], beside, atol=1e-6)


@pytest.mark.fast
@pytest.mark.parametrize(
    "spec", ["fox", "cable", "grape_ap", "path", "selective_rope(gate=true)", "asentmax"]
)
def test_features_of_bfloat16_are_those_of_the_same_numbers_in_float32(spec):
    encoding = layer(spec)
    x = jax.random.normal(jax.random.key(1), (2, 9, 32)).astype(jnp.bfloat16)
    positions, ones = jnp.arange(9)[None], jnp.ones((2, 9), jnp.int32)
    low, high = (
        encoding.features(each, positions, ones, encoding.start_state(2))[0]
        for each in (x, x.astype(jnp.float32))
    )
    jax.tree.map(np.testing.assert_array_equal, low, high)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(low))


@pytest.mark.parametrize(
    "spec",
    [
        *("stick_breaking", "cope+selective", "dape(base=fox, version=2)", "path+fox"),
        *("selective_rope", "asentmax", "asentmax(adaptive=false)", "p_rope+scale_invariant"),
    ],
)
def test_rows_that_see_nothing_give_zeros_and_gradients_are_finite(spec):
    encoding = layer(spec)
    x = jax.random.normal(jax.random.key(1), (2, 20, 32)).at[:, 7].set(0.0)  # of no direction
    segments = jnp.asarray(np.repeat([[0, 1, 0], [2, 3, 0]], [5, 8, 7], axis=1), jnp.int32)

    def attended(x):
        features, _ = encoding.features(x, segments, segments, encoding.start_state(2))
        some = side(x.reshape(2, 20, 4, 8), features, segments)
        carry = encoding.start_carry(2, 20)
        return attend(encoding, some, some, some.x, carry, block=6, aligned=True)[0]

    out, gradient = attended(x), jax.grad(lambda x: jnp.sum(attended(x) ** 2))(x)
    padding = np.asarray(segments == 0)
    assert not np.asarray(out)[padding].any()
    assert np.isfinite(out).all()
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[padding].any()


@pytest.mark.parametrize(
    "what", ["fox", "cable", "path", "grape_ap", "dape(version=2)", "heads(of=[fox, nope])"]
)
def test_what_reads_all_slots_between_takes_a_window_and_no_sinks(what):
    layer(f"{what}+window(size=4)")
    name = what.split("(")[0]
    with pytest.raises(EncodingError, match=f"{name} reads every slot.*window leaves out") as error:
        layer(f"alibi+window(size=4, sinks=1)+{what}")
    assert "\n" not in str(error.value)


@pytest.mark.fast
def test_what_reads_only_what_is_seen_takes_sinks():
    layer("cope+selective+stick_breaking+dape+window(size=4, sinks=1)")
    layer("dape(base=window(size=4, sinks=1))")
    with pytest.raises(EncodingError, match=r"dape reads every slot.*dape leaves out"):
        layer("dape(base=window(size=4, sinks=1), version=2)")


@pytest.mark.fast
def test_an_adapted_encoding_keeps_what_its_base_says():
    rotary, fox = layer("dape(base=rope)"), layer("dape(base=fox)")
    assert rotary.shift_invariant == "rounding"
    assert "yarn" in rotary.extensions
    assert rotary.pointwise
    assert rotary.extended("yarn", 99, factor=2).base.scaling.name == "yarn"
    assert rotary.base.scaling is None
    assert not fox.pointwise
    assert fox.between
    assert layer("dape(base=path)").replaces("scores")
    assert not layer("dape(base=fox)").replaces("scores")
    with pytest.raises(EncodingError, match="cannot be added in one layer"):
        layer("dape(base=stick_breaking)+stick_breaking")


@pytest.mark.fast
def test_initial_values_are_the_released_ones():
    for name, spans in (("bias", [2, 8, 32, 128]), ("fixed", [2, 8, 32, 128])):
        encoding = layer(f"fox(gate={name}, longest=128)")
        steps, _ = encoding.features(jnp.zeros((1, 3, 32)), None, None, None)
        np.testing.assert_allclose(-1 / steps[0, 1], spans, rtol=1e-6)
    steps, _ = layer("fox").features(jnp.zeros((1, 3, 32)), None, None, None)
    np.testing.assert_allclose(steps, np.log(0.5))
    assert not layer("cope").table[...].any()
    dape = layer("dape(version=2)")
    for weights, inputs in ((dape.hidden, 24), (dape.out, 96)):
        for leaf in (weights.kernel[...], weights.bias[...]):
            assert 0.5 < np.abs(leaf).max() * inputs**0.5 <= 1
    grape = layer("grape_a")
    np.testing.assert_allclose(jax.nn.softplus(grape.omega[...]), 1.0, rtol=1e-6)
    np.testing.assert_allclose(layer("grape_ap").alpha[...], 2.0 ** -np.arange(2, 9, 2))
    path_layer, ones = layer("path"), jnp.ones((1, 3), jnp.int32)
    (_, beta), _ = path_layer.features(jnp.zeros((1, 3, 32)), None, ones, path_layer.start_state(1))
    np.testing.assert_array_equal(beta, 1.0)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        ("fox", 9_228),
        ("cable", 9_228),
        ("cope", 4_096),
        ("dape(base=alibi)", 1_196),
        ("dape(base=alibi, version=2)", 3_500),
        ("path", 60_684),
        ("stick_breaking", 0),
        ("selective", 0),
        ("fox(gate=fixed)", 0),
    ],
)
def test_a_layer_of_gpt2_small_has_as_many_parameters_as_known(spec, parameters):
    from flax import nnx

    dims = Dimensions(768, 12, 64, 1024)
    made = nnx.eval_shape(lambda: build(spec, 1, dims, jax.random.key(0)))
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(made, nnx.Param))]
    assert sum(sizes) == parameters


@pytest.mark.fast
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fox(gate=open)", "no gate 'open': content, bias, fixed"),
        ("fox(gate=bias, shortest=0)", "spans are above 0"),
        ("fox(gate=fixed, longest=4, shortest=8)", "shortest=8, longest=4"),
        ("cope(positions=0)", "positions=0.: it must be at least 1"),
        ("cope(scale=full)", "no scale 'full': ram, paper"),
        ("dape(version=3)", "version=3.: it is 1 or 2"),
        ("dape(width=0)", "width=0.: it must be at least 1"),
        ("dape(remask=false)", "remask=false. is of version 2"),
        ("dape(base=wpe)", "base=wpe.: it acts on the token embeddings.* wpe.dape"),
        ("grape_a(variant=v)", "no variant 'v': qk, q, k"),
        ("grape_ap(width=3)", "width=3.: .*an even one"),
        ("path(rank=0)", "rank=0.: it must be at least 1"),
        ("path(conv=0)", "conv=0.: it must be at least 1"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(spec, message):
    with pytest.raises(EncodingError, match=message) as caught:
        layer(spec)
    assert "\n" not in str(caught.value)
