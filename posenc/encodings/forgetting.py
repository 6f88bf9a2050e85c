"""Encodings that let every token between a key and its query lower their logit, by a running sum.

Let B denote the batch, t the query rows of one block, S the keys and H the heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding, Side
from posenc.encodings.running import sums_after, sums_before

GATES = ("content", "bias", "fixed")


def sums_from_first_row(
    steps: Float[Array, "#B S *C"], queries: Side, keys: Side
) -> Float[Array, "#B S *C"]:
    """Give the sum of steps over the slots after a block's first row, up to each slot.

    For a slot before that row it is minus the sum of those after the slot, up to the row. So the
    difference of two slots is as precise at token 100,000 as at the first (one float32 sum over all
    slots is off by 1e-2 there), and what comes later, padding and the array's length change
    nothing.
    """

    def over_channels(mask: Bool[Array, "#B S"]) -> Bool[Array, "#B S ..."]:
        return jnp.expand_dims(mask, tuple(range(2, steps.ndim)))

    steps = jnp.where(over_channels(keys.segments != 0), steps, 0.0)
    later = over_channels(keys.slots > queries.slots[:, :1])
    ahead, behind = (jnp.moveaxis(jnp.where(mask, steps, 0.0), 1, -1) for mask in (later, ~later))
    sums = sums_before(ahead) + ahead - sums_after(behind)
    return jnp.moveaxis(sums, -1, 1)


def at_rows(sums: Float[Array, "#B S *C"], queries: Side, keys: Side) -> Float[Array, "#B t *C"]:
    """Pick the rows of a block from a number for every key."""
    # Keys are a run of slots that ends at the last row or later; padded rows lie behind it.
    places = jnp.minimum(queries.slots[0] - keys.slots[0, 0], keys.slots.shape[1] - 1)
    return jnp.take(sums, places, axis=1)


def sums_between(
    steps: Float[Array, "#B S H"], queries: Side, keys: Side
) -> Float[Array, "B H t S"]:
    """Give ``sum_{l=j+1..i} steps_l``, over slots, for row i and key j of one segment, j before i.

    It is a difference of two sums from the block's first row on. What neighbours differ by would
    be rounded as the sums are; so whole 256ths, whose sums are exact up to 65,536, are summed apart
    from the rest, which is small.
    """
    whole = jax.lax.stop_gradient(jnp.round(256 * steps) / 256)

    def differences(part):
        sums = sums_from_first_row(part, queries, keys)
        rows = jnp.moveaxis(at_rows(sums, queries, keys), 1, 2)
        return rows[..., None] - jnp.moveaxis(sums, 1, 2)[:, :, None]

    return differences(whole) + differences(steps - whole)


class Forgetting(PositionalEncoding):
    """What encodings share that add up a number of every token and head between key and query."""

    pointwise = False
    bidirectional = False
    shift_invariant = "exact"
    between = True
    per_layer = True

    def steps(self, x: Float[Array, "B T M"]) -> Float[Array, "B T H"]:
        """Give what each token adds to the logits of all earlier keys, from the layer's input."""
        raise NotImplementedError

    def features(self, x, positions, segments, state):
        """Give each token's step."""
        return self.steps(x.astype(jnp.float32)), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the steps after the key, the query's own included."""
        return logits + sums_between(keys.features, queries, keys), carry


def _gate(dims: Dimensions, rngs: nnx.Rngs) -> nnx.Linear:
    """Make a number for each head of a layer's input, as FoX's and Cable's released code does."""
    return nnx.Linear(
        dims.width,
        dims.heads,
        kernel_init=nnx.initializers.normal(0.02),
        dtype=jnp.float32,
        precision=HIGHEST,
        rngs=rngs,
    )


class FoX(Forgetting):
    """The forgetting transformer's gates (Lin et al., 2025, section 3).

    Every head weighs a key by the product of the forget gates of all later tokens up to the query:
    the logit falls by ``-ln f`` with each of them, ``f = sigmoid(x W + b)`` of the layer's input x.
    Position is read from slots; position values have no part in it.

    At first f is 1/2: half of what a head remembers is gone with each token, as released. Gates
    that do not look at the content (the paper's baselines) span ``T_h = -1/ln f_h`` tokens at first
    (``bias``) or for good (``fixed``), T log-spaced over the heads from ``shortest`` to
    ``longest``, for which the released code has no values. With fixed gates, ``T_h`` one over
    ALiBi's slopes, FoX is ALiBi.

    The block that the paper calls Pro (QK-norm, output gate and norm, shifted keys and values)
    belongs to the model and not to this.

    Args:
        dims: of the model.
        rngs: for the gates' weights.
        gate: what a gate depends on: ``content``, ``bias`` (learned for each head) or ``fixed``.
        shortest: span of the first head, in tokens, with ``bias`` and ``fixed``.
        longest: span of the last head; the length that the model is built for unless told
            otherwise.
    """

    name = "fox"
    reference = """@inproceedings{lin2025forgetting,
  title={Forgetting Transformer: Softmax Attention with a Forget Gate},
  author={Lin, Zhixuan and Nikishin, Evgenii and He, Xu Owen and Courville, Aaron},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        gate: str = "content",
        shortest: float = 2.0,
        longest: float | None = None,
    ):
        super().__init__(dims, rngs)
        if gate not in GATES:
            raise EncodingError(f"fox has no gate {gate!r}: {', '.join(GATES)}")
        if longest is None:
            longest = max(float(dims.context_length), shortest)
        if not 0 < shortest <= longest:
            raise EncodingError(
                f"fox(shortest={shortest:g}, longest={longest:g}): spans are above 0, and the "
                "longest is no shorter than the shortest"
            )
        slopes = 1 / np.geomspace(shortest, longest, dims.heads)
        self.per_layer = gate != "fixed"
        self.slopes = tuple(slopes.tolist()) if gate == "fixed" else None
        self.gate = _gate(dims, rngs) if gate == "content" else None
        # The b of which ln sigmoid(b) is -slope, -ln(e^slope - 1), where e^slope may overflow.
        bias = -slopes - np.log(-np.expm1(-slopes))
        self.bias = nnx.Param(jnp.asarray(bias, jnp.float32)) if gate == "bias" else None

    def steps(self, x):
        """Give ``ln f``."""
        if self.gate is not None:
            return jax.nn.log_sigmoid(self.gate(x))
        if self.bias is not None:
            constant = jax.nn.log_sigmoid(self.bias[...])
        else:
            constant = -jnp.asarray(self.slopes, jnp.float32)
        return jnp.broadcast_to(constant, (*x.shape[:2], self.dims.heads))


class Cable(Forgetting):
    """Context-aware biases (Veisi, Amirzadeh and Mansourian, 2025).

    The logit falls by ``softplus(x W + b)`` with every token after the key, up to the query, x the
    layer's input. As ``softplus(z) = -ln sigmoid(-z)``, this is FoX with W and b of the other sign.

    The released code lacks the scaling of scores by ``1/sqrt(D)`` (it divides by 1).

    Args:
        dims: of the model.
        rngs: for the weights.
        scaled: whether scores are scaled by ``1/sqrt(D)``; not so in the released code.
    """

    name = "cable"
    reference = """@article{veisi2025context,
  title={Context-aware Biases for Length Extrapolation},
  author={Veisi, Ali and Amirzadeh, Hamidreza and Mansourian, Amir},
  journal={arXiv preprint arXiv:2503.08067},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, scaled: bool = True):
        super().__init__(dims, rngs)
        self.scaled = scaled
        self.gate = _gate(dims, rngs)

    def steps(self, x):
        """Give the negative biases."""
        return -jax.nn.softplus(self.gate(x))

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the biases, and what the released code's scores are larger by."""
        if not self.scaled:
            logits = logits + (queries.x.shape[-1] ** 0.5 - 1) * scores
        return super().logits(logits, scores, queries, keys, visible, carry)
