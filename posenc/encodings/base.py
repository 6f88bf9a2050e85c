"""The contract between attention and whatever tells it where a token stands.

Let B denote the batch, t the query rows of one block, T all queries, S the keys, H the heads,
D the head width and M the model width. An axis written ``#B`` is B or 1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Num

Streams = dict[str, Array]

# Of products that encodings make in float32: a lower default precision would round them.
HIGHEST = jax.lax.Precision.HIGHEST


class EncodingError(ValueError):
    """Something that a user asked of an encoding and that it cannot do, in one line."""


class PositionOutOfRange(EncodingError):
    """A position that an encoding has no representation for."""


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """What an encoding may know of the model that it is built for.

    ``context_length`` is the number of tokens that the model is built for (in training, the
    training length); only an encoding ever sees it.
    """

    width: int
    heads: int
    head_width: int
    context_length: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """The queries or the keys of an attention; every array has the slots on axis 1.

    Attributes:
        x: ``[B, n, H, D]`` as projected (after QK-norm), key-value heads repeated to H.
        rotated: ``[B, n, H, D']``, what ``rotate_queries`` or ``rotate_keys`` made of it.
        positions: ``[#B, n]``, int32 or float32.
        streams: other per-token numbers by name, each ``[#B, n]``.
        slots: ``[1, n]`` int32, places in the array or cache: they alone decide the order.
        segments: ``[#B, n]`` int32, runs of slots that may see each other; 0 is padding.
        features: what ``features`` gave for these tokens, leaves ``[B, n, ...]``, or None.
        prepared: what ``prepare`` gave for these positions, leaves ``[#B, n, ...]``, or None.
    """

    x: Any
    rotated: Any
    positions: Any
    streams: Any
    slots: Any
    segments: Any
    features: Any = None
    prepared: Any = None


def scaled_product(
    queries: Float[Array, "B t H E"], keys: Float[Array, "B S H E"], width: int
) -> Float[Array, "B H t S"]:
    """Give ``q . k / sqrt(width)`` in float32; ``width`` is the projected one."""
    product = jnp.einsum("bthd,bshd->bhts", queries, keys, preferred_element_type=jnp.float32)
    return product * width**-0.5


class PositionalEncoding(nnx.Module):
    """No positional information at all: every hook is the identity; methods override some.

    Attributes:
        name: how messages call it.
        max_position: positions ``0 .. max_position - 1`` are representable; None is no limit.
        shift_invariant: whether adding a constant to all positions changes nothing: ``exact``
            (not a bit), ``rounding`` (no more than float32 phases round), or ``no``.
        pointwise: a logit depends only on its score and on its two sides' features and
            positions.
        reach: a query sees the keys at most this many slots back; None is all of them.
        sinks: beyond ``reach``, the first so many real slots of the query's own segment.
        between: a logit depends on every slot between its key and its query, so that there may be
            no sinks beside it.
        sparse: a key that is seen may have no weight at all.
        widens: its rotated sides are wider than those projected.
        bidirectional: has a form without the causal mask.
        per_layer: each layer has parameters of its own (otherwise all layers share them).
        decayed: names of the parameters that weight decay applies to.
        modifier: changes attention without telling where a token stands.
        extensions: names of the policies by which ``extended`` can pass ``max_position``.
        reference: a BibTeX entry.
    """

    name: ClassVar[str] = "encoding"
    modifier: ClassVar[bool] = False
    decayed: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str] = ""

    pointwise: bool = True
    bidirectional: bool = True
    extensions: tuple[str, ...] = ()
    per_layer: bool = False
    shift_invariant: Literal["exact", "rounding", "no"] = "no"
    max_position: int | None = None
    reach: int | None = None
    sinks: int = 0
    between: bool = False
    sparse: bool = False
    widens: bool = False

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs):
        self.dims = dims

    def prepare(self, positions: Num[Array, "#B n"], streams: Streams) -> Any:
        """Give whatever all layers share, once a forward pass; leaves ``[#B, n, ...]``."""
        return None

    def embed(
        self, x: Float[Array, "B T M"], positions: Num[Array, "#B T"], streams: Streams
    ) -> Float[Array, "B T M"]:
        """Act on the token embeddings, once, before the first block."""
        return x

    def start_state(self, batch: int) -> Any:
        """Give the state that ``features`` starts from."""
        return None

    def features(
        self,
        x: Float[Array, "B T M"],
        positions: Num[Array, "#B T"],
        segments: Num[Array, "#B T"],
        state: Any,
    ) -> tuple[Any, Any]:
        """Give per-token values ``[B, T, ...]`` of a layer's input, and the state to go on from.

        The values are per token, never a running sum; nothing is read across a segment's border.
        """
        return None, state

    def rotate_queries(self, queries: Side) -> Float[Array, "B n H E"]:
        """Transform the queries of a layer; the scale stays that of the projected width."""
        return queries.x

    def rotate_keys(self, keys: Side) -> Float[Array, "B n H E"]:
        """Transform the keys of a layer."""
        return keys.x

    def scores(
        self, queries: Side, keys: Side, visible: Bool[Array, "#B 1 t S"]
    ) -> Float[Array, "B H t S"]:
        """Give the scaled product of the rotated sides, in float32."""
        return scaled_product(queries.rotated, keys.rotated, queries.x.shape[-1])

    def start_carry(self, batch: int, slots: int) -> Any:
        """Give the carry that the first block of rows gets, made for all ``slots`` keys."""
        return None

    def logits(
        self,
        logits: Float[Array, "B H t S"],
        scores: Float[Array, "B H t S"],
        queries: Side,
        keys: Side,
        visible: Bool[Array, "#B 1 t S"],
        carry: Any,
    ) -> tuple[Float[Array, "B H t S"], Any]:
        """Act on the logits; ``logits - scores`` is the bias so far, in a sum of encodings.

        ``carry`` passes from block to block in slot order and lives in the cache.
        """
        return logits, carry

    def weights(
        self, logits: Float[Array, "B H t S"], visible: Bool[Array, "#B 1 t S"]
    ) -> Float[Array, "B H t S"]:
        """Give the softmax over the visible keys, in float32; a row that sees nothing is zero."""
        masked = jnp.where(visible, logits.astype(jnp.float32), -jnp.inf)
        top = jax.lax.stop_gradient(jnp.max(masked, axis=-1, keepdims=True))
        unnormalised = jnp.exp(masked - jnp.where(jnp.isneginf(top), 0.0, top))
        total = jnp.sum(unnormalised, axis=-1, keepdims=True)
        return unnormalised / jnp.where(total == 0, 1.0, total)

    def mix(
        self,
        weights: Float[Array, "B H t S"],
        values: Float[Array, "B S H D"],
        queries: Side,
        keys: Side,
    ) -> Float[Array, "B t H D"]:
        """Give the weighted sum of the values, accumulated in float32."""
        mixed = jnp.einsum(
            "bhts,bshd->bthd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return mixed.astype(values.dtype)

    def representable(
        self, positions: Num[Array | np.ndarray, "*n"]
    ) -> Bool[Array | np.ndarray, "*n"] | None:
        """Say which positions have a representation; None when all have, known beforehand."""
        if self.max_position is None:
            return None
        return (positions >= 0) & (positions < self.max_position)

    def check_positions(self, positions: np.ndarray) -> None:
        """Raise ``PositionOutOfRange`` for the first unrepresentable one of ``positions``.

        For positions that are known on the host; padding must have been taken out.
        """
        representable = self.representable(np.asarray(positions))
        if representable is None or bool(np.all(representable)):
            return
        limit = self.max_position
        assert limit is not None
        culprit = np.asarray(positions)[~np.asarray(representable)].flat[0]
        ways = [f"give whole positions from 0 to {limit - 1}"]
        if culprit >= limit:
            ways = [
                f"stay below {limit}",
                f"build the model with a larger max_position ({self.name})",
            ]
            if self.extensions:
                ways.append(
                    "evaluate by an extension policy (--extend " + ", ".join(self.extensions) + ")"
                )
        raise PositionOutOfRange(
            f"position {culprit} has no representation in {self.name}, which knows positions 0 to "
            f"{limit - 1}: " + ", or ".join(ways)
        )

    def replaces(self, hook: str) -> bool:
        """Say whether ``hook`` is its own, which one part of a layer's sum may have at the most."""
        return getattr(type(self), hook) is not getattr(PositionalEncoding, hook)

    @property
    def turns(self) -> bool:
        """Whether it rotates: policies for rotations act on all that do, or on none."""
        return self.replaces("rotate_queries") or self.replaces("rotate_keys")

    def modifiers(self) -> PositionalEncoding | None:
        """Give what of it tells nothing of position, or None."""
        return self if self.modifier else None

    def extended(self, policy: str, length: int, /, **options: Any) -> PositionalEncoding:
        """Give this encoding, made to represent ``length`` positions by a named policy.

        Raises:
            EncodingError: the encoding has no such policy.
        """
        offered = ", ".join(self.extensions) or "none"
        raise EncodingError(f"{self.name} has no extension policy {policy!r}; it has: {offered}")


class Several(PositionalEncoding):
    """Several encodings in one layer, ``parts``: what each of them makes is kept in their order."""

    parts: nnx.List

    def prepare(self, positions, streams):
        """Prepare every part."""
        return tuple(part.prepare(positions, streams) for part in self.parts)

    def start_state(self, batch):
        """Start every part."""
        return tuple(part.start_state(batch) for part in self.parts)

    def start_carry(self, batch, slots):
        """Start every part."""
        return tuple(part.start_carry(batch, slots) for part in self.parts)

    def features(self, x, positions, segments, state):
        """Give every part's features."""
        made = [
            part.features(x, positions, segments, own)
            for part, own in zip(self.parts, state, strict=True)
        ]
        return tuple(values for values, _ in made), tuple(own for _, own in made)


class Sum(Several):
    """Several encodings in one layer, each hook applied in order.

    At most one part may replace ``scores``, ``weights`` or ``mix``. This is a view that a forward
    pass makes of parts that live elsewhere; it holds no parameters of its own.
    """

    name = "sum"

    def __init__(self, parts: tuple[PositionalEncoding, ...]):
        self.parts = nnx.List(parts)
        reaches = [part.reach for part in parts if part.reach is not None]
        self.reach = min(reaches) if reaches else None
        self.sinks = max((part.sinks for part in parts if part.reach == self.reach), default=0)

    def _one_side(self, side: Side, index: int) -> Side:
        return dataclasses.replace(
            side,
            features=None if side.features is None else side.features[index],
            prepared=None if side.prepared is None else side.prepared[index],
        )

    def _only(self, hook: str) -> tuple[int, PositionalEncoding] | None:
        chosen = [(i, part) for i, part in enumerate(self.parts) if part.replaces(hook)]
        return chosen[0] if chosen else None

    def rotate_queries(self, queries):
        """Rotate by each part in turn."""
        for index, part in enumerate(self.parts):
            rotated = part.rotate_queries(self._one_side(queries, index))
            queries = dataclasses.replace(queries, x=rotated)
        return queries.x

    def rotate_keys(self, keys):
        """Rotate by each part in turn."""
        for index, part in enumerate(self.parts):
            keys = dataclasses.replace(keys, x=part.rotate_keys(self._one_side(keys, index)))
        return keys.x

    def scores(self, queries, keys, visible):
        """Score as the one part does that has scores of its own."""
        only = self._only("scores")
        if only is None:
            return super().scores(queries, keys, visible)
        index, part = only
        return part.scores(self._one_side(queries, index), self._one_side(keys, index), visible)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Pass the logits through every part."""
        carries = []
        for index, part in enumerate(self.parts):
            sides = self._one_side(queries, index), self._one_side(keys, index)
            logits, own = part.logits(logits, scores, *sides, visible, carry[index])
            carries.append(own)
        return logits, tuple(carries)

    def weights(self, logits, visible):
        """Weigh as the one part does that has weights of its own."""
        only = self._only("weights")
        if only is None:
            return super().weights(logits, visible)
        return only[1].weights(logits, visible)

    def mix(self, weights, values, queries, keys):
        """Mix as the one part does that has a mix of its own."""
        only = self._only("mix")
        if only is None:
            return super().mix(weights, values, queries, keys)
        index, part = only
        sides = self._one_side(queries, index), self._one_side(keys, index)
        return part.mix(weights, values, *sides)
