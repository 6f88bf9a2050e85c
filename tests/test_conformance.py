"""Every registered encoding, and some sums and lists of them, hold the laws."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posenc.conformance import (
    CHECKS,
    NotConforming,
    Subject,
    close,
    conformance,
    memory_grows_with_the_length,
)
from posenc.encodings import Dimensions, PositionalEncoding, RoPE, build
from posenc.encodings.registry import examples
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

MIXED = [
    "wpe(max_position=96)",
    "rope+alibi,nope",
    "rope(scaling=dynamic_ntk(chunk=8, original=16), partial=0.5, pairing=interleaved)",
]


def silent_checks(encoding):
    """What the laws say nothing about, known beforehand: no check is passed by absence."""
    silent = {"memory_grows_with_the_length"} if encoding in SHORT else set()
    if re.sub(r"\(.*", "", encoding) in BY_ORDER:
        silent.add("positions_are_data")
    if encoding not in ("wpe", *SHORT):
        silent.add("out_of_range_is_loud")
    parameters = split(nnx.eval_shape(lambda: build(encoding, 1, DIMS, jax.random.key(0))))[1]
    alike = "," not in re.sub(r"\(.*?\)", "", encoding)
    if not parameters or not alike:
        silent.add("layers_share_or_do_not_as_is_said")
    return silent


DIMS = Dimensions(32, 4, 8, 96)
# What reads the order of tokens, or tokens themselves, and no positions.
BY_ORDER = {
    "path",
    "selective_rope",
    "cope",
    "dape",
    "fox",
    "cable",
    "stick_breaking",
    "selective",
    "window",
    "nope",
    "abacus",
    "coupled",
    "ssmax",
    "asentmax",
    "temperature",
    "sink",
}
SHORT: tuple[str, ...] = ("wpe(max_position=96)",)
# Takes ten times as long as any other check.
SLOW = {memory_grows_with_the_length}


@pytest.mark.parametrize("encoding", [*examples().values(), *MIXED])
def test_an_encoding_holds_the_laws(encoding):
    results = list(conformance(encoding, [check for check in CHECKS if check not in SLOW]))
    assert not {result.check: result.error for result in results if result.error}
    silent = {result.check for result in results if not result.applies}
    assert silent == silent_checks(encoding) - {check.__name__ for check in SLOW}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", [*examples().values(), *MIXED])
def test_training_an_encoding_takes_memory_that_is_linear_in_the_length(encoding):
    (result,) = conformance(encoding, [memory_grows_with_the_length])
    assert result.error is None
    assert result.applies == (encoding not in SHORT)


class LooksAhead(PositionalEncoding):
    """Moves a little of each token's embedding to the one before it."""

    def embed(self, x, positions, streams):
        return x + 0.1 * jnp.roll(x, -1, axis=1)


class ByPlace(PositionalEncoding):
    """Counts places of the array it is given instead of reading positions."""

    shift_invariant = "exact"

    def embed(self, x, positions, streams):
        return x + 0.1 * jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]


class RotatesTooLow(RoPE):
    """Phases in bfloat16: right at short range, wrong further out."""

    def prepare(self, positions, streams):
        cos, sin = super().prepare(positions.astype(jnp.bfloat16), streams)
        return cos.astype(jnp.bfloat16).astype(jnp.float32), sin


class Clamps(PositionalEncoding):
    """Says that it ends, and lets a table's last row stand in, silently."""

    max_position = 96

    def representable(self, positions):
        return np.ones(np.shape(positions), bool)


class Widens(PositionalEncoding):
    """Draws from the stream that all other parameters come from."""

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.scale = nnx.Param(jnp.ones((dims.context_length,)))


@pytest.mark.parametrize(
    ("cls", "broken"),
    [
        (LooksAhead, "later_tokens_change_nothing"),
        (LooksAhead, "no_gradient_from_the_future"),
        (ByPlace, "cached_equals_full"),
        (ByPlace, "packed_equals_separate"),
        (RotatesTooLow, "shift_changes_what_is_said"),
        (Clamps, "out_of_range_is_loud"),
    ],
)
def test_a_check_notices_what_it_is_for(cls, broken):
    from posenc import conformance as checks

    with pytest.raises(NotConforming):
        getattr(checks, broken)(Subject(f"{__name__}:{cls.__name__}"))


def test_close_refuses_nan_and_passes_equal_nan():
    close("same", [np.nan, 1.0], [np.nan, 1.0])
    with pytest.raises(NotConforming, match="what: differ by inf"):
        close("what", [np.nan, 1.0], [0.0, 1.0])


@pytest.mark.fast
def test_without_encoding_and_mask_permuting_inputs_permutes_outputs():
    config = TransformerConfig(vocab_size=31, layers=2, width=32, heads=4, init_std=0.2)
    model = Transformer(config, "nope", 24, seed=3)
    tokens = jax.random.randint(jax.random.key(0), (2, 24), 0, 31)
    positions = jnp.arange(24)[None]
    permutation = np.asarray(jax.random.permutation(jax.random.key(1), 24))
    plain = model(tokens, positions, causal=False)
    permuted = model(tokens[:, permutation], positions, causal=False)
    np.testing.assert_allclose(permuted, plain[:, permutation], atol=2e-5)
    # The mask alone breaks the symmetry: the same comparison under it fails by far.
    causal = model(tokens[:, permutation], positions) - model(tokens, positions)[:, permutation]
    assert np.abs(causal).max() > 0.1
