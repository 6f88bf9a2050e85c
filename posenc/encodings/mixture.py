"""Different encodings for different heads of one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding, Several, Side
from posenc.encodings.options import Recipe

_STRENGTH = ("no", "rounding", "exact")


def concerned(policy: str, parts: Iterable[PositionalEncoding]) -> list[int]:
    """Give the indices of the parts that a policy has to do with, whether they have it or not.

    One that acts on rotations acts on all of them: one without it would go on unsaid beside others.
    """
    parts = list(parts)
    turning = any(part.turns for part in parts if policy in part.extensions)
    return [
        index
        for index, part in enumerate(parts)
        if policy in part.extensions or (turning and part.turns)
    ]


class _Nothing(PositionalEncoding):
    shift_invariant = "exact"


class Heads(Several):
    """Each of several encodings on heads of its own: ``heads(of=[rope, nope], sizes=[2, 6])``.

    An encoding that acts on the token embeddings, or whose window is narrower than the sequence,
    cannot be one of them: what it does, it does to all heads. Where one of them has parameters for
    every layer, so have all.

    Args:
        dims: of the model.
        rngs: passed on.
        of: the encodings, for the first heads, the next ones, and so on.
        sizes: how many heads each has; as many each unless told otherwise.
    """

    name = "heads"

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        of: tuple[Recipe, ...],
        sizes: tuple[int, ...] | None = None,
    ):
        super().__init__(dims, rngs)
        if sizes is None and len(of) and dims.heads % len(of) == 0:
            sizes = (dims.heads // len(of),) * len(of)
        numbers = sizes is not None and all(isinstance(n, int) and n > 0 for n in sizes)
        if not numbers or len(sizes) != len(of) or sum(sizes) != dims.heads:  # type: ignore[arg-type]
            raise EncodingError(
                f"heads(sizes={list(sizes or ())}): give {len(of)} whole numbers above 0, one an "
                f"encoding, that add up to the {dims.heads} heads of the model"
            )
        assert sizes is not None
        parts = [
            recipe(dataclasses.replace(dims, heads=size))
            for recipe, size in zip(of, sizes, strict=True)
        ]
        ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        self.borders = tuple(zip([0, *ends[:-1]], ends, strict=True))
        self.per_layer = any(part.per_layer for part in parts)
        self._hold(parts)

    def _hold(self, parts: list[PositionalEncoding]) -> None:
        """Take encodings in, and whatever follows from what they are."""
        for part in parts:
            if part.replaces("embed") or part.reach is not None:
                what = "the token embeddings" if part.replaces("embed") else "which slots are seen"
                raise EncodingError(f"{part.name} acts on {what} and not on single heads")
        self.parts = nnx.List(parts)
        self.shift_invariant: Literal["exact", "rounding", "no"] = min(
            (part.shift_invariant for part in parts), key=_STRENGTH.index
        )
        self.bidirectional = all(part.bidirectional for part in parts)
        self.pointwise = all(part.pointwise for part in parts)
        self.sparse = any(part.sparse for part in parts)
        self.between = any(part.between for part in parts)
        self.widens = any(part.widens for part in parts)
        self.extensions = tuple(dict.fromkeys(name for p in parts for name in p.extensions))
        limits = [part.max_position for part in parts if part.max_position is not None]
        self.max_position = min(limits, default=None)

    def replaces(self, hook: str) -> bool:
        """Say whether one of its encodings has the hook."""
        return any(part.replaces(hook) for part in self.parts)

    def _each(self, *sides: Side):
        """Give each encoding with its heads and its share of every side."""
        for index, (part, (low, high)) in enumerate(zip(self.parts, self.borders, strict=True)):
            shares = []
            for side in sides:
                rotated = side.rotated
                if rotated is not None:
                    rotated = rotated[:, :, low:high]
                    if not part.widens:  # less the nought that others' width has added
                        rotated = rotated[..., : self.dims.head_width]
                shares.append(
                    dataclasses.replace(
                        side,
                        x=side.x[:, :, low:high],
                        rotated=rotated,
                        features=None if side.features is None else side.features[index],
                        prepared=None if side.prepared is None else side.prepared[index],
                    )
                )
            yield index, part, slice(low, high), shares

    def _rotate(self, side: Side, hook: str):
        turned = [getattr(part, hook)(share) for _, part, _, (share,) in self._each(side)]
        # Channels that are nought change no product.
        width = max(x.shape[-1] for x in turned)
        pad = [jnp.pad(x, ((0, 0),) * 3 + ((0, width - x.shape[-1]),)) for x in turned]
        return jnp.concatenate(pad, axis=2)

    def rotate_queries(self, queries):
        """Rotate each encoding's heads."""
        return self._rotate(queries, "rotate_queries")

    def rotate_keys(self, keys):
        """Rotate each encoding's heads."""
        return self._rotate(keys, "rotate_keys")

    def scores(self, queries, keys, visible):
        """Score each encoding's heads."""
        return jnp.concatenate(
            [part.scores(q, k, visible) for _, part, _, (q, k) in self._each(queries, keys)], axis=1
        )

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Pass each encoding's heads through it."""
        made = [
            part.logits(logits[:, at], scores[:, at], q, k, visible, carry[index])
            for index, part, at, (q, k) in self._each(queries, keys)
        ]
        return jnp.concatenate([own for own, _ in made], axis=1), tuple(own for _, own in made)

    def weights(self, logits, visible):
        """Weigh each encoding's heads."""
        return jnp.concatenate(
            [
                part.weights(logits[:, low:high], visible)
                for part, (low, high) in zip(self.parts, self.borders, strict=True)
            ],
            axis=1,
        )

    def mix(self, weights, values, queries, keys):
        """Mix each encoding's heads."""
        return jnp.concatenate(
            [
                part.mix(weights[:, at], values[:, :, at], q, k)
                for _, part, at, (q, k) in self._each(queries, keys)
            ],
            axis=2,
        )

    def representable(self, positions: Any) -> Any:
        """Say which positions every encoding can represent."""
        made = [part.representable(positions) for part in self.parts]
        made = [own for own in made if own is not None]
        return None if not made else jax.tree.reduce(lambda a, b: a & b, made)

    def extended(self, policy: str, length: int, /, **options: Any) -> PositionalEncoding:
        """Give this mixture, with every encoding extended that the policy has to do with."""
        if policy not in self.extensions:
            return super().extended(policy, length, **options)
        extended = nnx.clone(self)
        chosen = concerned(policy, extended.parts)
        extended._hold(
            [
                part.extended(policy, length, **options) if index in chosen else part
                for index, part in enumerate(extended.parts)
            ]
        )
        return extended

    def modifiers(self) -> PositionalEncoding | None:
        """Give this mixture with nothing but modifiers in it, or None."""
        kept = [part.modifiers() for part in self.parts]
        if not any(kept):
            return None
        mixture = nnx.clone(self)
        mixture._hold(
            [
                _Nothing(part.dims, nnx.Rngs(0)) if own is None else own
                for part, own in zip(self.parts, kept, strict=True)
            ]
        )
        return mixture
