"""Encodings that are wrong, each in one way that happens, for the checks to notice."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc import PositionalEncoding
from posenc.encodings import RoPE
from posenc.encodings.rotary import rotate


def distances(queries, keys):
    apart = queries.positions[:, None, :, None] - keys.positions[:, None, None, :]
    return jnp.maximum(apart, 0).astype(jnp.float32)


class LeaksTheFuture(PositionalEncoding):
    """Smooths a layer's input over both neighbours, one of which comes later."""

    shift_invariant = "exact"

    def features(self, x, positions, segments, state):
        return (jnp.roll(x, 1, axis=1) + x + jnp.roll(x, -1, axis=1)).mean(-1), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits + keys.features[:, None, None, :], carry


class ForgetsTheOffset(RoPE):
    """Counts from 0 in every call, so that a token that is decoded alone stands at 0."""

    def prepare(self, positions, streams):
        return super().prepare(jnp.arange(positions.shape[1])[None], streams)


class RoundsPositions(RoPE):
    """Makes phases in the activations' type: right in float32, and wrong in bfloat16."""

    def prepare(self, positions, streams):
        return positions

    def _rotate(self, side):
        cos, sin = super().prepare(side.prepared.astype(side.x.dtype), side.streams)
        return rotate(side.x, cos, sin, self.pairing)


class RoundsAllPositions(RoPE):
    """Makes phases of rounded positions, whatever the activations' type."""

    def prepare(self, positions, streams):
        return super().prepare(positions.astype(jnp.bfloat16), streams)


class CountsFromTheEnd(PositionalEncoding):
    """Gives every token its share of the way to the array's last position."""

    def embed(self, x, positions, streams):
        share = positions / jnp.maximum(positions[:, -1:], 1)
        return x + share[..., None].astype(x.dtype)


class DividesByTheLength(PositionalEncoding):
    """Measures distances by the number of keys that it happens to be given."""

    shift_invariant = "exact"
    bidirectional = False

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits - distances(queries, keys) / keys.slots.shape[1], carry


class KeepsAcrossBorders(PositionalEncoding):
    """Reads the token before, and when decoding takes the last call's for one of this sequence."""

    shift_invariant = "exact"
    bidirectional = False
    pointwise = False

    def start_state(self, batch):
        return jnp.zeros(batch)

    def features(self, x, positions, segments, state):
        own = x.mean(-1)
        before = jnp.concatenate([state[:, None], own[:, :-1]], axis=1)
        within = segments[:, 1:] == segments[:, :-1]
        within = jnp.concatenate([jnp.ones_like(within[:, :1]), within], axis=1)
        return own + jnp.where(within, before, 0.0), own[:, -1]

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits + keys.features[:, None, None, :], carry


class GrowsWithTheLastPosition(PositionalEncoding):
    """Sharpens all rows as the last one needs it, beyond the length that the model is built for."""

    def logits(self, logits, scores, queries, keys, visible, carry):
        last = jnp.max(keys.positions) + 1
        factor = jnp.log(last) / jnp.log(self.dims.context_length)
        return logits * jnp.maximum(factor, 1.0), carry


class ReadsSlots(PositionalEncoding):
    """Measures distances in slots: right where positions follow one another, and nowhere else."""

    shift_invariant = "exact"
    bidirectional = False

    def logits(self, logits, scores, queries, keys, visible, carry):
        apart = queries.slots[:, None, :, None] - keys.slots[:, None, None, :]
        return logits - apart.astype(jnp.float32), carry


class SumsInTheFeatures(PositionalEncoding):
    """Keeps the running sum of a call instead of each token's own number."""

    shift_invariant = "exact"
    bidirectional = False
    pointwise = False
    per_layer = True

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.gate = nnx.Linear(dims.width, dims.heads, rngs=rngs)

    def features(self, x, positions, segments, state):
        return jnp.cumsum(jax.nn.log_sigmoid(self.gate(x)), axis=1), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        own, past = (jnp.moveaxis(side.features, 1, 2) for side in (queries, keys))
        return logits + own[..., None] - past[:, :, None], carry


class SumsForever(SumsInTheFeatures):
    """Carries that sum on when decoding: lawful among few tokens, and lost among many."""

    def start_state(self, batch):
        return jnp.zeros((batch, self.dims.heads))

    def features(self, x, positions, segments, state):
        sums, _ = super().features(x, positions, segments, None)
        sums = sums + state[:, None]
        return sums, sums[:, -1]


class MakesParametersLate(PositionalEncoding):
    """Makes its weights in a hook: new ones for every pass, that nothing trains."""

    shift_invariant = "exact"

    def prepare(self, positions, streams):
        self.slopes = nnx.Param(jnp.ones(self.dims.heads))
        return None

    def logits(self, logits, scores, queries, keys, visible, carry):
        return logits - distances(queries, keys), carry


class RootOfZero(PositionalEncoding):
    """Learns under a root, whose slope at distance 0 is infinite."""

    shift_invariant = "exact"
    bidirectional = False

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.scale = nnx.Param(jnp.ones(dims.heads))

    def logits(self, logits, scores, queries, keys, visible, carry):
        scaled = self.scale[...][None, :, None, None] * distances(queries, keys)
        return logits - jnp.sqrt(scaled), carry


class LogOfZero(RootOfZero):
    """Learns a power by way of the logarithm, which is infinite at distance 0."""

    def logits(self, logits, scores, queries, keys, visible, carry):
        power = self.scale[...][None, :, None, None]
        return logits - jnp.exp(power * jnp.log(distances(queries, keys))), carry


class EndsInSilence(PositionalEncoding):
    """Has a table of 64 rows, repeats the last one, and says that it has no end."""

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (64, dims.width)))

    def embed(self, x, positions, streams):
        rows = self.table[...][jnp.clip(positions, 0, 63)]
        return (x.astype(jnp.float32) + rows).astype(x.dtype)
