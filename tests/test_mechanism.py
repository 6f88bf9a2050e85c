"""Read-outs of attention against a NumPy forward pass of one layer, row by row."""

import math

import numpy as np
import pytest

from eval.mechanism import edges_of, read_out
from posenc.attention import watched
from posenc.encodings.bias import alibi_slopes
from posenc.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=17, layers=1, width=8, heads=2, norm="rms")
T, K = 11, 3


def naive(model, window, slopes):
    """Weights and logits of the one layer, float64, by loops over queries and keys."""
    block = model.blocks[0]

    def kernel(module):
        return np.asarray(module.kernel[...], np.float64)

    x = np.asarray(model.embedding.embedding[...], np.float64)[window]
    scale = np.asarray(block.attention_norm.scale[...], np.float64)
    eps = block.attention_norm.epsilon
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    q, k = (
        (normed @ kernel(part)).reshape(len(window), 2, 4)
        for part in (block.attention.query, block.attention.key)
    )
    weights = np.zeros((2, len(window), len(window)))
    logits = np.full(weights.shape, np.nan)
    for head in range(2):
        for row in range(len(window)):
            for key in range(row + 1):
                product = float(q[row, head] @ k[key, head]) / 2
                logits[head, row, key] = product - slopes[head] * (row - key)
            own = np.exp(logits[head, row, : row + 1])
            weights[head, row, : row + 1] = own / own.sum()
    return weights, logits


@pytest.mark.fast
@pytest.mark.parametrize("encoding", ["nope", "alibi"])
def test_read_outs_equal_a_naive_forward_pass(encoding):
    model = Transformer(CONFIG, encoding, T, seed=3)
    slopes = alibi_slopes(2) if encoding == "alibi" else np.zeros(2)
    windows = np.random.default_rng(0).integers(0, 17, (2, T))
    got = read_out(model, windows, K)
    assert got.edges.tolist() == [0, 1, 2, 4, 8, 11]
    every = [naive(model, window, slopes) for window in windows]
    for head in range(2):
        scale = np.mean([np.nanstd(o[head, row]) for _, o in every for row in range(T - K, T)])
        assert got.scale[0, head] == pytest.approx(scale, rel=1e-5)
        for bucket, (low, high) in enumerate(zip(got.edges, got.edges[1:], strict=False)):
            mass = entropy = rows = 0.0
            for weights, _ in every:
                for row in range(T):
                    own = weights[head, row, : row + 1]
                    if low <= row < high:
                        entropy -= sum(w * math.log(w) for w in own)
                        rows += 1
                    if row >= T - K:
                        near = [key for key in range(row + 1) if low <= row - key < high]
                        mass += own[near].sum() / K / len(every)
            assert got.mass[0, head, bucket] == pytest.approx(mass, abs=1e-6)
            assert got.entropy[0, head, bucket] == pytest.approx(entropy / rows, abs=1e-5)
    np.testing.assert_allclose(got.mass.sum(-1), 1, rtol=1e-6)


@pytest.mark.fast
def test_edges_are_powers_of_two_up_to_the_length():
    assert edges_of(8).tolist() == [0, 1, 2, 4, 8]
    assert edges_of(9).tolist() == [0, 1, 2, 4, 8, 9]
    assert edges_of(1).tolist() == [0, 1]


@pytest.mark.fast
@pytest.mark.parametrize(
    "encoding", ["selective", "xpos", "path", "stick_breaking", "dape(base=alibi)"]
)
def test_watching_changes_nothing_and_sees_every_layer(encoding):
    config = TransformerConfig(vocab_size=17, layers=2, width=16, heads=2)
    model = Transformer(config, encoding, T, seed=1)
    tokens, positions = np.arange(T)[None] % 17, np.arange(T, dtype=np.int32)[None]
    plain = np.asarray(model(tokens, positions))
    seen = []
    with watched(lambda encoding, queries, keys, carry: seen.append(queries.x.shape)):
        np.testing.assert_array_equal(np.asarray(model(tokens, positions)), plain)
    assert seen == [(1, T, 2, 8)] * 2
    np.testing.assert_array_equal(np.asarray(model(tokens, positions)), plain)
    assert len(seen) == 2
    # A query gives away no more than it has: stick-breaking may keep some.
    mass = read_out(model, tokens, K).mass.sum(-1)
    assert np.all(mass <= 1 + 1e-6)
    if encoding != "stick_breaking":
        np.testing.assert_allclose(mass, 1, rtol=1e-5)
