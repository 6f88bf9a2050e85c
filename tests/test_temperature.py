"""Factors on logits and sparse weights, where a definition of twelve tokens does not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions.temperature import entmax15 as defined
from test_contextual import layer
from test_definitions import EPS

from posenc import conformance
from posenc.encodings import EncodingError
from posenc.encodings.temperature import entmax15

RUN = jax.jit(lambda rows: entmax15(rows[None, None], jnp.ones_like(rows, bool)[None, None])[0, 0])


@pytest.mark.fast
def test_entmax_of_three_numbers_is_what_its_authors_print():
    given = np.asarray(RUN(jnp.asarray([[-2.0, 0.0, 0.5], [0.5, -2.0, 0.0]])))
    np.testing.assert_allclose(given[0], [0, 0.3260, 0.6740], atol=5e-5)
    assert given[0, 0] == 0
    np.testing.assert_array_equal(given[1], given[0, [2, 0, 1]])


def hard_rows(length):
    random = np.random.default_rng(0)
    rows = [scale * random.standard_normal(length) for scale in (0.01, 1, 5, 100)]
    rows += [random.standard_cauchy(length), -random.exponential(size=length)]
    rows += [-2 * (np.arange(length) / length) ** power for power in (0.05, 0.5, 4)]
    for below in (1e-4, 0.6, 1.8, 2.5):  # one above all the others
        rows.append(np.where(np.arange(length) == length // 2, 0.0, -below))
    # Ever more keys on ever lower steps: the threshold passes one step after another.
    steps, counts = [0.0, -0.2, -0.7, -0.8, -0.9, -1.1, -1.6], 17 ** np.arange(7)
    rows.append(np.repeat(steps, counts)[:length] if length > 17 else np.zeros(length))
    rows.append(np.zeros(length))
    rows.append(1e4 * np.sin(np.arange(length)))
    return np.asarray(np.stack(rows), np.float32)


@pytest.mark.parametrize("length", [1, 2, 17, 4096, 100_000])
def test_entmax_is_exact_for_rows_of_any_kind_and_length(length):
    rows = hard_rows(length)
    given, wanted = np.asarray(RUN(rows), np.float64), defined(rows.astype(np.float64))
    assert np.abs(given - wanted).max() < 8 * EPS
    # Beside its largest weight, too, where all of them are small.
    assert (np.abs(given - wanted).max(axis=1) / wanted.max(axis=1)).max() < 2e-5
    np.testing.assert_allclose(given.sum(axis=1), 1, atol=1e-5)
    far = rows.max(axis=1, keepdims=True) - rows > 2
    assert not given[far].any()


@pytest.mark.fast
def test_a_row_of_weights_depends_on_no_other_row():
    rows = hard_rows(64)
    alone = np.concatenate([np.asarray(RUN(jnp.tile(row, (len(rows), 1))))[:1] for row in rows])
    np.testing.assert_array_equal(np.asarray(RUN(rows)), alone)


def test_hidden_logits_may_be_anything_and_no_gradient_comes_from_them():
    visible = jnp.asarray(np.tri(4, dtype=bool) & (np.arange(4) != 1)[:, None])[None, None]
    logits = jax.random.normal(jax.random.key(0), (1, 2, 4, 4))
    hidden = jnp.where(visible, logits, jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 1e30]))

    def loss(logits):
        return jnp.sum(entmax15(logits, visible) * jnp.arange(4.0))

    np.testing.assert_array_equal(entmax15(hidden, visible), entmax15(logits, visible))
    for order in (jax.grad(loss), jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))):
        gradient = np.asarray(order(hidden))
        np.testing.assert_array_equal(gradient, order(logits))
        assert np.isfinite(gradient).all()
        assert not gradient[:, :, 1].any()  # a row that sees nothing
        assert not gradient[:, :, 0].any()  # its one key has all the weight
        assert gradient[:, :, 2:].any()


def test_second_derivatives_of_entmax_are_those_of_its_first():
    visible = jnp.ones((1, 1, 1, 6), bool)
    z = jnp.asarray(np.random.default_rng(0).standard_normal(6), jnp.float32)

    def first(z):
        return jax.grad(lambda z: jnp.sum(entmax15(z[None, None, None], visible)[0, 0, 0] ** 2))(z)

    given = np.asarray(jax.jacobian(first)(z))
    step = 1e-3
    wanted = [(first(z.at[i].add(step)) - first(z.at[i].add(-step))) / (2 * step) for i in range(6)]
    np.testing.assert_allclose(given, np.stack(wanted, axis=1), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["asentmax+alibi+window(size=9, sinks=2)", "p_rope+scale_invariant+window(size=9)"]
)
def test_laws_hold_in_windows(spec):
    subject = conformance.Subject(spec)
    for check in (
        conformance.cached_equals_full,
        conformance.packed_equals_separate,
        conformance.left_padded_equals_unpadded,
        conformance.blocks_equal_dense,
    ):
        check(subject)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("scale_invariant(tau=0)", "scale_invariant.tau=0.*: it must be above 0"),
        ("asentmax+sink", "asentmax and sink cannot be added in one layer"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(spec, message):
    with pytest.raises(EncodingError, match=message) as caught:
        layer(spec)
    assert "\n" not in str(caught.value)
