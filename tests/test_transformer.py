"""The model's own rules: cache limits, devices' NaN, generation, shapes of its presets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from posenc.encodings import EncodingError
from posenc.errors import UserError
from posenc.training import mean_nll, split
from posenc.transformer import PRESETS, Transformer, TransformerConfig, count_parameters

CONFIG = TransformerConfig(vocab_size=31, layers=2, width=16, heads=2, init_std=0.3)


@pytest.mark.fast
def test_a_full_cache_is_refused_on_the_host_and_nan_on_the_device():
    model = Transformer(CONFIG, "nope", 8)
    tokens, positions = jnp.ones((1, 6), jnp.int32), jnp.arange(6)[None]
    cache = model.start_cache(1, 8)
    _, cache = model(tokens, positions, cache=cache)
    with pytest.raises(UserError, match=r"6 cached tokens and 6 new ones .* of 8 slots"):
        model(tokens, positions, cache=cache)
    logits, _ = jax.jit(lambda cache: model(tokens, positions, cache=cache))(cache)
    assert np.isnan(np.asarray(logits)).all()


@pytest.mark.fast
def test_without_the_mask_an_encoding_that_needs_it_is_refused():
    model = Transformer(CONFIG, "nope+alibi", 8)
    tokens, positions = jnp.ones((1, 6), jnp.int32), jnp.arange(6)[None]
    with pytest.raises(EncodingError, match="alibi is defined under the causal mask only"):
        model(tokens, positions, causal=False)


@pytest.mark.fast
def test_fractional_positions_go_through_the_cache_as_they_are():
    model = Transformer(CONFIG, "rope", 8, seed=1)
    tokens = jax.random.randint(jax.random.key(0), (1, 6), 0, 31)
    positions = jnp.arange(6, dtype=jnp.float32)[None] / 2
    full = jax.jit(lambda: model(tokens, positions))()
    cache = model.start_cache(1, 8, positions=jnp.float32)
    step = jax.jit(lambda t, p, cache: model(t, p, cache=cache))
    for place in range(6):
        one = np.s_[:, place : place + 1]
        logits, cache = step(tokens[one], positions[one], cache)
        np.testing.assert_allclose(logits, full[one], atol=1e-5)
    with pytest.raises(UserError, match="positions of float32 do not go into a cache of int32"):
        model(tokens, positions, cache=model.start_cache(1, 8))


@pytest.mark.fast
def test_a_cache_loses_no_stream():
    model = Transformer(CONFIG, "nope", 8)
    tokens, positions = jnp.ones((1, 2), jnp.int32), jnp.arange(2)[None]
    half = {"digit": jnp.full((1, 2), 0.5)}
    for held in ({}, {"digit": jnp.int32}, {"other": jnp.float32}):
        with pytest.raises(UserError, match=r"streams .* do not go into a cache that holds"):
            model(tokens, positions, streams=half, cache=model.start_cache(1, 8, streams=held))
    cache = model.start_cache(1, 8, streams={"digit": jnp.float32})
    _, cache = model(tokens, positions, streams=half, cache=cache)
    np.testing.assert_array_equal(cache.streams["digit"], [[0.5, 0.5, 0, 0, 0, 0, 0, 0]])


@pytest.mark.fast
def test_poison_reaches_cached_decoding():
    model = Transformer(CONFIG, "wpe", 4)
    step = jax.jit(lambda t, p, c: model(t, p, cache=c))
    cache, seen = model.start_cache(1, 8), []
    for position in (0, 3, 4, 1):  # the third has no row, and the fourth sees it
        logits, cache = step(jnp.ones((1, 1), jnp.int32), jnp.full((1, 1), position), cache)
        seen.append(bool(np.isnan(np.asarray(logits)).all()))
    assert seen == [False, False, True, True]


@pytest.mark.fast
def test_activations_in_bfloat16_keep_float32_parameters_and_logits():
    config = TransformerConfig(vocab_size=31, layers=1, width=16, heads=2, dtype="bfloat16")
    model = Transformer(config, "rope+alibi", 8)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
    tokens, positions = jnp.ones((1, 8), jnp.int32), jnp.arange(8)[None]
    hidden, _ = model.hidden(tokens, positions)
    assert hidden.dtype == jnp.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == jnp.float32
    table = model.embedding.embedding[...].astype(jnp.bfloat16)
    expected = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if shape.layers > 12 else pytest.mark.fast)
        for name, shape in sorted(PRESETS.items())
    ],
)
def test_presets_count_as_their_shapes_say(name):
    shape = PRESETS[name]
    model = nnx.eval_shape(lambda: Transformer(shape, "nope", 16))
    m, inner, bias = shape.width, shape.inner_width, shape.bias
    norm = m * (2 if bias else 1)
    attention = 4 * (m * m + m * bias)
    mlp = (3 if shape.activation == "swiglu" else 2) * m * inner + (inner + m) * bias
    expected = shape.layers * (attention + mlp + 2 * norm) + norm + shape.vocab_size * m
    assert count_parameters(model) == expected


@pytest.mark.fast
def test_of_gpt2_small_only_the_table_knows_the_context_length():
    def shapes(length):
        model = nnx.eval_shape(lambda: Transformer(PRESETS["gpt2-small"], "wpe", length))
        return {name: leaf.shape for name, leaf in split(model)[1].items()}

    short, long = shapes(1024), shapes(4096)
    changed = {name: (short[name], long[name]) for name in short if short[name] != long[name]}
    assert changed == {"encoding.parts.0.table": ((1024, 768), (4096, 768))}
    assert sum(np.prod(s) for s in short.values()) == 124_439_808
    assert sum(np.prod(s) for s in long.values()) == 124_439_808 + 2_359_296
    # And it is the one parameter that has the length among its axes at all.
    assert [name for name, shape in short.items() if 1024 in shape] == ["encoding.parts.0.table"]


@pytest.mark.fast
def test_a_context_length_below_one_is_refused():
    with pytest.raises(UserError, match="context length 0: it must be at least 1"):
        posenc.Transformer(CONFIG, "nope", 0)


def test_memory_of_the_whole_model_grows_with_the_length():
    """Law 10 for a forward pass and a training step, by the compiler's account; nothing runs."""
    model = Transformer(CONFIG, "alibi", 64)
    merge, parameters = split(model)

    def bytes_at(length, train):
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        mask = jax.ShapeDtypeStruct((1, length), bool)
        batch = dict.fromkeys(("inputs", "targets", "positions", "segments"), tokens)

        def loss(parameters, batch):
            return mean_nll(merge(parameters), batch)

        function = jax.grad(loss) if train else loss
        lowered = jax.jit(function).lower(parameters, {**batch, "mask": mask})
        return lowered.compile().memory_analysis().temp_size_in_bytes

    for train in (False, True):
        sizes = [bytes_at(length, train) for length in (4096, 8192, 16384)]
        assert sizes[1] <= 2.01 * sizes[0]
        assert sizes[2] <= 2.01 * sizes[1]
