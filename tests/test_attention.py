"""Blocks, windows and the cache against the dense path and against naive loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posenc.attention import attend, attend_dense, poisoned_rows, segment_ranks
from posenc.encodings import Dimensions, PositionalEncoding, Side, build
from posenc.transformer import Transformer, TransformerConfig

HEADS, WIDTH = 3, 8


class Window(PositionalEncoding):
    """Sees a few slots back, and the first ones of its own segment."""

    def __init__(self, dims, rngs, *, reach: int, sinks: int = 0):
        super().__init__(dims, rngs)
        self.reach, self.sinks = reach, sinks


class Carried(PositionalEncoding):
    """Takes from a key's logit what all earlier rows gave it: order of the rows matters."""

    def start_carry(self, batch, slots):
        return jnp.zeros((batch, slots), jnp.float32)

    def logits(self, logits, scores, queries, keys, visible, carry):
        keys_here = logits.shape[-1]
        given = jnp.where(visible[:, 0], jax.nn.sigmoid(scores[:, 0]), 0.0)
        before = carry[:, None, :keys_here] + jnp.cumsum(given, axis=1) - given
        carry = carry.at[:, :keys_here].add(jnp.sum(given, axis=1))
        return logits - before[:, None], carry


class Gated(PositionalEncoding):
    """A bias from per-token features: what a token holds, weighed by distance in slots."""

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.gate = nnx.Linear(dims.width, dims.heads, rngs=rngs)

    def features(self, x, positions, segments, state):
        return jax.nn.log_sigmoid(self.gate(x)), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits + jnp.moveaxis(keys.features, 1, 2)[:, :, None, :], carry


class Summed(PositionalEncoding):
    """A state that runs along: the mean of the two last tokens, within a segment."""

    def start_state(self, batch):
        return {"x": jnp.zeros((batch, 1, self.dims.width)), "segment": jnp.zeros((batch, 1), int)}

    def features(self, x, positions, segments, state):
        segments = jnp.broadcast_to(segments, x.shape[:2])
        before = jnp.concatenate([state["x"], x], axis=1)[:, :-1]
        own = jnp.concatenate([state["segment"], segments], axis=1)[:, :-1] == segments
        mixed = x + jnp.where(own[..., None], before, 0.0)
        return mixed.mean(axis=-1), {"x": x[:, -1:], "segment": segments[:, -1:]}

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits + keys.features[:, None, None, :], carry


def sides(encoding, length, batch=2, segments=None, seed=0):
    q, k, v = jax.random.normal(jax.random.key(seed), (3, batch, length, HEADS, WIDTH))
    segments = np.ones((1, length), np.int32) if segments is None else segments
    positions = np.arange(length, dtype=np.int32)[None]
    shared = {
        "positions": jnp.asarray(positions),
        "streams": {},
        "slots": jnp.arange(length, dtype=jnp.int32)[None],
        "segments": jnp.asarray(segments),
        "prepared": encoding.prepare(jnp.asarray(positions), {}),
    }
    queries, keys = (Side(x=x, rotated=x, **shared) for x in (q, k))
    queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
    keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
    return queries, keys, v


def made(spec, length=64):
    dims = Dimensions(HEADS * WIDTH, HEADS, WIDTH, length)
    return build(spec, 1, dims, jax.random.key(0)).at(0)


RAGGED = np.repeat([1, 2, 3, 0, 4], [5, 20, 1, 4, 23])[None].astype(np.int32)


@pytest.mark.parametrize("spec", ["alibi", "rope", f"{__name__}:Carried"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("block", "groups"), [(8, 2), (7, 8)])
def test_blocks_equal_dense_in_values_and_gradients(spec, causal, block, groups):
    if spec.endswith("Carried") and not causal:
        return  # a carry goes in slot order, which means something under the causal mask alone
    encoding = made(spec)
    queries, keys, values = sides(encoding, 53, segments=RAGGED)

    def run(how, q, k, v, **options):
        out, _ = how(
            encoding,
            dataclasses.replace(queries, rotated=q),
            dataclasses.replace(keys, rotated=k),
            v,
            encoding.start_carry(2, 53),
            causal=causal,
            **options,
        )
        return out

    arguments = queries.rotated, keys.rotated, values
    weight = jax.random.normal(jax.random.key(9), values.shape)

    def with_gradients(how, **options):
        def loss(*a):
            out = run(how, *a, **options)
            return jnp.vdot(out, weight), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arguments)

    dense = with_gradients(attend_dense)
    blocks = with_gradients(attend, block=block, groups=groups, aligned=True)
    for one, other in zip(*map(jax.tree.leaves, (blocks, dense)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.fast
def test_dense_equals_the_definition():
    encoding = made("nope")
    queries, keys, values = sides(encoding, 53, segments=RAGGED)
    out, _ = attend_dense(encoding, queries, keys, values)
    q, k, v = (np.asarray(x, np.float64) for x in (queries.x, keys.x, values))
    for row in range(2):
        for i in range(53):
            seen = [j for j in range(i + 1) if RAGGED[0, j] == RAGGED[0, i] and RAGGED[0, i] != 0]
            for h in range(HEADS):
                expected = np.zeros(WIDTH)
                if seen:
                    logits = np.array([q[row, i, h] @ k[row, j, h] for j in seen]) / WIDTH**0.5
                    weights = np.exp(logits - logits.max())
                    expected = (weights / weights.sum()) @ v[row, seen, h]
                np.testing.assert_allclose(out[row, i, h], expected, atol=1e-5)


@pytest.mark.parametrize(("reach", "sinks"), [(0, 0), (3, 0), (6, 2), (9, 1), (70, 2)])
def test_a_window_with_sinks_equals_the_definition(reach, sinks):
    encoding = made(f"{__name__}:Window(reach={reach}, sinks={sinks})")
    queries, keys, values = sides(encoding, 53, segments=RAGGED)
    dense, _ = jax.jit(lambda: attend_dense(encoding, queries, keys, values))()
    for block in (4, 53):
        blocks, _ = jax.jit(
            lambda block=block: attend(encoding, queries, keys, values, block=block, aligned=True)
        )()
        np.testing.assert_allclose(blocks, dense, atol=1e-5)
    q, k, v = (np.asarray(x, np.float64) for x in (queries.x, keys.x, values))
    for i in range(53):
        own = [j for j in range(i + 1) if RAGGED[0, j] == RAGGED[0, i] != 0]
        seen = [j for j in own if i - j <= reach or j in own[:sinks]]
        if not seen:
            np.testing.assert_array_equal(dense[:, i], 0)
            continue
        logits = np.einsum("bhd,bjhd->bhj", q[:, i], k[:, seen]) / WIDTH**0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("bhj,bjhd->bhd", weights, v[:, seen])
        np.testing.assert_allclose(dense[:, i], expected, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}:Window(reach=5, sinks=2)",
        f"{__name__}:Carried",
        f"{__name__}:Gated",
        f"{__name__}:Summed",
        f"{__name__}:Gated+alibi+{__name__}:Summed",
    ],
)
def test_features_states_carries_and_windows_live_in_the_cache(spec):
    config = TransformerConfig(vocab_size=31, layers=2, width=24, heads=3, init_std=0.2)
    model = Transformer(config, spec, 64, seed=1)
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 31)
    segments = jnp.asarray(np.repeat([0, 1, 2], [3, 12, 15])[None].astype(np.int32))
    positions = jnp.arange(30)[None]
    full, dense = jax.jit(
        lambda: tuple(model(tokens, positions, segments, dense=dense) for dense in (False, True))
    )()
    np.testing.assert_allclose(full, dense, atol=2e-5)
    cached = jax.jit(lambda *a, cache: model(*a, cache=cache))
    for size in (1, 10):
        cache, parts = model.start_cache(2, 33), []
        for low in range(0, 30, size):
            part = np.s_[:, low : low + size]
            out, cache = cached(tokens[part], positions[part], segments[part], cache=cache)
            parts.append(out)
        # Padding rows see nothing and mean nothing.
        np.testing.assert_allclose(jnp.concatenate(parts, 1)[:, 3:], full[:, 3:], atol=2e-5)


@pytest.mark.fast
def test_ranks_and_poison_equal_naive_loops():
    rng = np.random.default_rng(0)
    segments = rng.integers(0, 4, (5, 40)).astype(np.int32)
    bad = rng.random((5, 40)) < 0.1
    ranks = [[int(np.sum(row[:i] == row[i])) for i in range(40)] for row in segments]
    np.testing.assert_array_equal(segment_ranks(jnp.asarray(segments)), ranks)
    for causal in (True, False):
        expected = [
            [
                s[i] != 0 and any(b[j] and s[j] == s[i] for j in range(i + 1 if causal else 40))
                for i in range(40)
            ]
            for s, b in zip(segments, bad, strict=True)
        ]
        got = poisoned_rows(jnp.asarray(bad), jnp.asarray(segments), causal)
        np.testing.assert_array_equal(got, expected)


def temporary_bytes(length, dense, gradient):
    encoding = made("alibi", length)

    def loss(q, k, v):
        shared = {
            "positions": jnp.arange(length, dtype=jnp.int32)[None],
            "streams": {},
            "slots": jnp.arange(length, dtype=jnp.int32)[None],
            "segments": jnp.ones((1, length), jnp.int32),
        }
        queries, keys = (Side(x=x, rotated=x, **shared) for x in (q, k))
        how = attend_dense if dense else attend
        options = {} if dense else {"aligned": True}
        return jnp.sum(how(encoding, queries, keys, v, **options)[0] ** 2)

    shape = jax.ShapeDtypeStruct((1, length, HEADS, WIDTH), jnp.float32)
    function = jax.grad(loss, (0, 1, 2)) if gradient else loss
    compiled = jax.jit(function).lower(shape, shape, shape).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("gradient", [False, True])
def test_memory_grows_with_the_length_and_not_with_its_square(gradient):
    lengths = (2048, 4096, 8192)
    blocks = [temporary_bytes(length, False, gradient) for length in lengths]
    # Doubling the length at most doubles the memory, but for what does not grow at all.
    assert blocks[1] <= 2.1 * blocks[0]
    assert blocks[2] <= 2.1 * blocks[1]
    dense = temporary_bytes(8192, True, gradient)
    assert dense > 3.5 * temporary_bytes(4096, True, gradient)  # the compiler's account can tell
    assert blocks[2] * 8 < dense
