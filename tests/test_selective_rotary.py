"""Rotations from content where a definition of twelve tokens does not reach."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions.accumulated import turn
from test_contextual import DIMS, layer, side

from posenc import conformance
from posenc.encodings import Dimensions, EncodingError, build


def scored(encoding, q, k, angles, segments, low, high):
    """Give the scores of some rows, by all keys."""
    q, k, angles, segments = map(jnp.asarray, (q, k, angles, segments))
    keys = side(k, angles, segments)
    rows = np.s_[:, low:high]
    queries = side(q[rows], angles[rows], segments[rows], low)
    return np.asarray(encoding.scores(queries, keys, None))[0]


def test_angles_are_as_precise_at_token_100000_as_at_the_first():
    length, first, rows = 131_072, 100_000, 128
    random = np.random.default_rng(0)
    angles = random.standard_normal((1, length, 1, 2)).astype(np.float32)
    angles += 0.3  # in sum 30,000 radians there, of which a float32 keeps 2e-3
    q, k = random.standard_normal((2, 1, length, 1, 4)).astype(np.float32)
    one = Dimensions(4, 1, 4, 64)
    encoding = build("selective_rope", 1, one, jax.random.key(0)).at(0)
    ones = jnp.ones((1, length), jnp.int32)
    got = scored(encoding, q, k, angles, ones, first, first + rows)[0]
    total = np.cumsum(angles[0, :, 0].astype(np.float64), axis=0)
    sides = [turn(x[0, :, 0].astype(np.float64), total) for x in (q, k)]
    at = np.arange(rows)
    for back in (0, 1, 5, 50):
        wanted = np.sum(sides[0][first + at] * sides[1][first + at - back], axis=-1) / 2
        assert np.abs(got[at, first + at - back] - wanted).max() < 1e-4
    # A single sum in float32 is off by far.
    off = np.cumsum(angles[0, :, 0], axis=0) - total
    assert np.abs(np.diff(off, axis=0)[first : first + rows]).max() > 5e-4


@pytest.mark.fast
def test_what_padding_other_segments_and_later_tokens_turn_does_not_count():
    random = np.random.default_rng(0)
    encoding = layer("selective_rope")
    q, k = random.standard_normal((2, 1, 40, 4, 8)).astype(np.float32)
    angles = random.standard_normal((1, 40, 4, 4)).astype(np.float32)
    segments = np.repeat([0, 1, 2, 0], [3, 14, 19, 4])[None].astype(np.int32)
    for low, high in ((0, 40), (5, 9), (16, 25), (35, 40)):
        seen = (segments[0, low:high, None] == segments[0]) & (segments[0] != 0)
        seen &= np.arange(low, high)[:, None] >= np.arange(40)
        changed = angles.copy()
        changed[segments == 0] = np.nan
        changed[:, high:] += 1
        some, other = (
            scored(encoding, q, k, each, segments, low, high) for each in (angles, changed)
        )
        np.testing.assert_array_equal(some[:, seen], other[:, seen])
        for segment in (1, 2):
            own = np.flatnonzero(segments[0] == segment)
            total = np.cumsum(angles[0, own].astype(np.float64), axis=0)
            turned = [turn(x[0, own].astype(np.float64), total) for x in (q, k)]
            wanted = np.einsum("thd,shd->hts", *turned) / 8**0.5
            here = own[(own >= low) & (own < high)]
            got = some[:, here - low][:, :, own]
            before = here[:, None] >= own[None]
            np.testing.assert_allclose(
                got[:, before], wanted[:, here - own[0]][:, before], atol=2e-5
            )


@pytest.mark.parametrize(
    "spec",
    [
        "selective_rope",
        pytest.param("selective_rope(gate=true)+fox+window(size=9)", marks=pytest.mark.slow),
    ],
)
def test_laws_hold_at_other_parameters_and_in_windows(spec):
    subject = conformance.Subject(spec)
    random = np.random.default_rng(3)
    for name, value in subject.parameters.items():
        if name.startswith("encoding."):
            noise = 0.3 * random.standard_normal(value.shape)
            subject.parameters[name] = value + noise.astype(np.float32)
    for check in (
        conformance.cached_equals_full,
        conformance.packed_equals_separate,
        conformance.left_padded_equals_unpadded,
        conformance.later_tokens_change_nothing,
        conformance.blocks_equal_dense,
    ):
        check(subject)


@pytest.mark.parametrize(
    ("spec", "message", "dims"),
    [
        ("selective_rope(rank=0)", "rank=0.: it must be at least 1", DIMS),
        ("selective_rope(conv=0)", "conv=0.: it must be at least 1", DIMS),
        ("selective_rope(theta=0)", "needs theta > 0, and got 0", DIMS),
        ("selective_rope", "head width is 3, the width 12", Dimensions(12, 4, 3, 64)),
        ("selective_rope", "the width 30, for 4 heads", dataclasses.replace(DIMS, width=30)),
        ("selective_rope+path", "selective_rope and path cannot be added in one layer", DIMS),
        (
            "heads(of=[selective_rope, nope])+window(size=4, sinks=1)",
            "heads reads every slot between .*window leaves out",
            DIMS,
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(spec, message, dims):
    with pytest.raises(EncodingError, match=message) as caught:
        build(spec, 1, dims, jax.random.key(0))
    assert "\n" not in str(caught.value)


def test_channels_that_another_part_widens_are_refused():
    with pytest.raises(EncodingError, match="pope makes more channels than are projected"):
        layer("pope+selective_rope")
    # By a plug-in that does not say so, too.
    encoding = layer("selective_rope")
    wide = dataclasses.replace(side(jnp.ones((1, 5, 4, 8))), rotated=jnp.ones((1, 5, 4, 16)))
    with pytest.raises(EncodingError, match="8 a head, and here are 16: leave out what widens"):
        encoding.scores(wide, wide, None)
