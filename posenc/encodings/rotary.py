"""Encodings that rotate queries and keys.

Let B denote the batch, n the tokens of a side, H the heads, D the head width, r the channels that
are rotated and F their pairs.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from posenc.encodings.base import (
    Dimensions,
    EncodingError,
    PositionalEncoding,
    Side,
    scaled_product,
)
from posenc.encodings.options import checked
from posenc.encodings.scaling import SCALINGS, Scaling, spectrum

PAIRINGS = ("half", "interleaved")
RANGE = 80.0  # e^80 and e^-80 are still float32


def rope_angles(
    positions: Num[Array, "*n"], inv_freq: np.ndarray | Array, factor: float = 1.0
) -> tuple[Float[Array, "*n F"], Float[Array, "*n F"]]:
    """Give ``factor`` times cosine and sine of ``position * inv_freq`` in float32.

    The product is elementwise, never a matrix product that a lower default precision would round;
    float32 phases err by at most ``p * 2^-23`` radians at position p.
    """
    angles = positions.astype(jnp.float32)[..., None] * inv_freq.astype(jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1 else (factor * cos, factor * sin)


def rotate(
    x: Float[Array, "B n H D"],
    cos: Float[Array, "#B n #H F"],
    sin: Float[Array, "#B n #H F"],
    pairing: str,
) -> Float[Array, "B n H D"]:
    """Rotate the first 2F channels of ``x`` by the given angles, in float32, cast once at the end.

    ``half`` pairs channel m with m + F (GPT-NeoX); ``interleaved`` pairs 2m with 2m + 1
    (RoFormer). The two are one function under a fixed permutation of the channels.
    """
    rotated, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    wide = rotated.astype(jnp.float32)
    if pairing == "half":
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(rotated.shape)
    turned = turned.astype(x.dtype)
    return turned if not rest.shape[-1] else jnp.concatenate([turned, rest], axis=-1)


def row_by_row(score: Any, *sides: Any) -> Float[Array, "B H t S"]:
    """Give ``score(*row)`` of one row of the sides after another, which takes longer."""

    def at(index):
        def one(leaf):
            # What all rows share has one slot.
            index_ = jnp.minimum(index, leaf.shape[1] - 1)
            return jax.lax.dynamic_slice_in_dim(leaf, index_, 1, axis=1)

        return score(*jax.tree.map(one, sides))

    rows = jax.lax.map(at, jnp.arange(sides[0].x.shape[1]))
    return jnp.moveaxis(rows[:, :, :, 0], 0, 2)


class Rotary(PositionalEncoding):
    """What encodings share that turn pair m of queries and keys by position times frequency.

    Args:
        dims: of the model.
        rngs: unused.
        theta: the base of the frequencies (``rope_theta``).
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        rotated: how many channels are rotated, r; all unless told otherwise.
        scaling: a way to rescale the frequencies.
    """

    shift_invariant: Literal["exact", "rounding", "no"] = "rounding"
    extensions = tuple(SCALINGS)

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
        rotated: int | None = None,
        scaling: Scaling | None = None,
    ):
        super().__init__(dims, rngs)
        self.rotated = dims.head_width if rotated is None else rotated
        if self.rotated % 2:
            raise EncodingError(
                f"{self.name} rotates channels in pairs, and the head width is {dims.head_width} "
                f"(width {dims.width} / {dims.heads} heads), {self.rotated} of it rotated: choose "
                "an even one"
            )
        if pairing not in PAIRINGS:
            raise EncodingError(f"{self.name} has no pairing {pairing!r}: {', '.join(PAIRINGS)}")
        if theta <= 0:
            raise EncodingError(f"{self.name} needs theta > 0, and got {theta}")
        self.theta = theta
        self.pairing = pairing
        self._scale(scaling)

    def _scale(self, scaling: Scaling | None) -> None:
        self.scaling = scaling
        if scaling is None:
            return
        self.original = scaling.original or self.dims.context_length
        self.frequencies()  # whatever cannot be made is refused here
        if scaling.dynamic:
            self.shift_invariant = "no"  # the rule asks where a query stands

    @property
    def _by_query(self) -> bool:
        """Whether a key's rotation depends on the query that looks at it."""
        dynamic = self.scaling is not None and self.scaling.dynamic
        return dynamic and self.scaling.scale_from == "position"  # type: ignore[union-attr]

    def replaces(self, hook: str) -> bool:
        """Say whether scores are its own: where keys turn as the query's position says."""
        return self._by_query if hook == "scores" else super().replaces(hook)

    def spectrum(self) -> np.ndarray:
        """Give the angular frequencies before any rescaling, float64 ``[F]``."""
        return spectrum(self.rotated, self.theta)

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Give the angular frequencies, float64 ``[F]``, and the attention factor."""
        if self.scaling is None:
            return self.spectrum(), 1.0
        ratios, factor = self.scaling.ratios(self.rotated, self.theta, self.original)
        return self.spectrum() * ratios, factor

    def _frequencies_at(self, length: Num[Array, "*n"]) -> Float[Array, "*n F"]:
        assert self.scaling is not None
        ratios = self.scaling.ratios_at(length, self.rotated, self.theta, self.original)
        return jnp.asarray(self.spectrum(), jnp.float32) * ratios

    def prepare(self, positions, streams):
        """Give cosine and sine of every angle, shared by all layers."""
        if self._by_query:
            return None
        fixed, factor = self.frequencies()
        total = self.scaling is not None and self.scaling.dynamic
        inv_freq = self._frequencies_at(jnp.max(positions) + 1) if total else fixed
        cos, sin = rope_angles(positions, inv_freq, factor)
        return cos[..., None, :], sin[..., None, :]

    def _rotate(self, side: Side):
        if self._by_query:
            return side.x
        cos, sin = side.prepared
        return rotate(side.x, cos, sin, self.pairing)

    def rotate_queries(self, queries: Side):
        """Rotate by the queries' positions."""
        return self._rotate(queries)

    def rotate_keys(self, keys: Side):
        """Rotate by the keys' positions."""
        return self._rotate(keys)

    def scores(self, queries: Side, keys: Side, visible):
        """Score each row at its own query's length, where the frequencies depend on it.

        Most blocks hold one or two lengths, for each of which all keys are turned once; where there
        are more (positions that jump), they are turned for each row.
        """
        if not self._by_query:
            return super().scores(queries, keys, visible)
        assert self.scaling is not None
        chunk = self.scaling.chunk
        length = (jnp.floor_divide(queries.positions, chunk).astype(jnp.int32) + 1) * chunk
        length = jnp.maximum(length, self.original)  # all below are one
        real = queries.segments != 0
        first = jnp.min(jnp.where(real, length, jnp.iinfo(jnp.int32).max), -1, keepdims=True)
        last = jnp.max(jnp.where(real, length, 0), -1, keepdims=True)
        # Counted from the block's first row: exact for integers, and phases stay small.
        origin = queries.positions[:, :1]
        _, factor = self.frequencies()

        def score(some: Side, length):
            inv_freq = self._frequencies_at(length)  # [B, 1, F]
            turned = []
            for side in (some, keys):
                cos, sin = rope_angles(side.positions - origin, inv_freq, factor)
                x = rotate(side.rotated, cos[..., None, :], sin[..., None, :], self.pairing)
                turned.append(x)
            return scaled_product(turned[0], turned[1], self.dims.head_width)

        def two_lengths():
            at_first = jnp.broadcast_to(length == first, length.shape)[:, None, :, None]
            return jnp.where(at_first, score(queries, first), score(queries, last))

        few = jnp.all(~real | (length == first) | (length == last))
        return jax.lax.cond(few, two_lengths, lambda: row_by_row(score, queries, length))

    def extended(self, policy: str, length: int, /, **options: Any) -> PositionalEncoding:
        """Give this encoding with its frequencies rescaled.

        Raises:
            EncodingError: an unknown policy or option, or a scaling is at work already.
        """
        if policy not in SCALINGS:
            return super().extended(policy, length, **options)
        if self.scaling is not None:
            raise EncodingError(
                f"{self.name} is scaled by {self.scaling.name} already: {policy} on top of it has "
                "no definition"
            )
        cls = SCALINGS[policy]
        scaled = nnx.clone(self)
        scaled._scale(cls(**checked(cls, policy, options)))
        return scaled


def _partial(dims: Dimensions, partial: float, name: str) -> int:
    if not 0 < partial <= 1:
        raise EncodingError(f"{name}(partial={partial}): it is a share of channels, above 0, to 1")
    return int(dims.head_width * partial)


class RoPE(Rotary):
    """Rotary position embedding (Su et al., 2021, equations 14 to 16).

    Channel pair m of every query and key is rotated by ``p * theta^(-2m/r)``, so that their product
    depends on the difference of their positions.

    Args:
        dims: of the model; the number r of rotated channels must be even.
        rngs: unused.
        theta: the base of the frequencies (``rope_theta``).
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        partial: the share of channels that are rotated, the first ones, with frequencies of their
            own number r (GPT-NeoX's ``rotary_pct``); the rest pass.
        scaling: a way to rescale the frequencies, such as ``yarn(factor=4)``.
    """

    name = "rope"
    reference = """@article{su2021roformer,
  title={RoFormer: Enhanced Transformer with Rotary Position Embedding},
  author={Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and
          Liu, Yunfeng},
  journal={arXiv preprint arXiv:2104.09864},
  year={2021}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
        partial: float = 1.0,
        scaling: Scaling | None = None,
    ):
        rotated = _partial(dims, partial, self.name)
        super().__init__(dims, rngs, theta=theta, pairing=pairing, rotated=rotated, scaling=scaling)


class PRoPE(Rotary):
    """RoPE without its lowest frequencies (Barbero et al., 2025, section 6.1).

    The ``int(p D/2)`` highest frequencies of the whole spectrum are kept; channels of the others do
    not turn. ``p=1`` is RoPE and ``p=0`` is none. (RoPE on a share of the channels is another
    function: there the spectrum is compressed, here it is cut.)

    Args:
        dims: of the model; the head width must be even.
        rngs: unused.
        p: the share of frequencies that are kept.
        theta: the base of the frequencies.
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        scaling: a way to rescale the frequencies that are kept.
    """

    name = "p_rope"
    reference = """@inproceedings{barbero2025round,
  title={Round and Round We Go! What Makes Rotary Positional Encodings Useful?},
  author={Barbero, Federico and Vitvitskyi, Alex and Perivolaropoulos, Christos and
          Pascanu, Razvan and Veli{\\v{c}}kovi{\\'c}, Petar},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        p: float = 0.75,
        theta: float = 10_000.0,
        pairing: str = "half",
        scaling: Scaling | None = None,
    ):
        if not 0 <= p <= 1:
            raise EncodingError(f"p_rope(p={p}): it is a share of frequencies, from 0 to 1")
        self.kept = int(p * (dims.head_width // 2))
        super().__init__(dims, rngs, theta=theta, pairing=pairing, scaling=scaling)

    def spectrum(self):
        """Give RoPE's frequencies, the lowest ones replaced by 0."""
        every = super().spectrum()
        return np.where(np.arange(len(every)) < self.kept, every, 0.0)


class XPos(Rotary):
    """RoPE whose products fall with the distance (Sun et al., 2022, eq. 9 and 10, algorithm 1).

    The product of channel pair m is multiplied by ``zeta_m^((p_i - p_j) / scale_base)``,
    ``zeta_m = (2m/D + gamma) / (1 + gamma)``. The released code has ``scale_base`` 512 where the
    paper writes none, and so has this.

    Queries and keys cannot be scaled once for a whole sequence without overflow (at 131,072
    tokens); each block of rows scales both from its own first position.

    Args:
        dims: of the model; the head width must be even.
        rngs: unused.
        theta: the base of the frequencies.
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        gamma: the decay of the highest frequencies; larger is slower.
        scale_base: the distance over which a pair falls by ``zeta_m``.
        scaling: a way to rescale the frequencies.
    """

    name = "xpos"
    bidirectional = False
    reference = """@inproceedings{sun2023length,
  title={A Length-Extrapolatable Transformer},
  author={Sun, Yutao and Dong, Li and Patra, Barun and Ma, Shuming and Huang, Shaohan and
          Benhaim, Alon and Chaudhary, Vishrav and Song, Xia and Wei, Furu},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2023}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
        gamma: float = 0.4,
        scale_base: float = 512.0,
        scaling: Scaling | None = None,
    ):
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            if value <= 0:
                raise EncodingError(f"xpos({name}={value}): it must be above 0")
        self.gamma, self.scale_base = gamma, scale_base
        super().__init__(dims, rngs, theta=theta, pairing=pairing, scaling=scaling)
        if self._by_query:
            raise EncodingError(
                f"xpos({self.scaling.name}) by position has no definition here: "  # type: ignore[union-attr]
                "scale_from=total, or another scaling"
            )

    def replaces(self, hook: str) -> bool:
        """Say that scores are its own."""
        return hook == "scores" or super().replaces(hook)

    def scores(self, queries: Side, keys: Side, visible):
        """Scale both sides from the first position that their segment has in this block."""
        pairs = self.rotated // 2
        zeta = (np.arange(pairs) / pairs + self.gamma) / (1 + self.gamma)
        rates = (np.log(zeta) / self.scale_base).astype(np.float32)

        def origin(some: Side, side: Side):
            """Give the distance from a token's position to the first of its segment's rows."""
            # Rows of other segments do not count: their positions may lie anywhere.
            same = side.segments[:, :, None] == some.segments[:, None, :]
            apart = some.positions[:, None, :] - side.positions[:, :, None]
            first = jnp.min(jnp.where(same, apart.astype(jnp.float32), jnp.inf), -1, keepdims=True)
            return jnp.where(jnp.isinf(first), 0.0, first)  # of a segment that no row is of

        def score(some: Side):
            turned = []
            for side, sign in ((some, -1), (keys, 1)):
                # A key so far back that it would underflow has decayed to nothing.
                decay = jnp.exp(jnp.minimum(sign * origin(some, side) * rates, RANGE))
                halves = self.pairing == "half"
                decay = jnp.concatenate([decay] * 2, -1) if halves else jnp.repeat(decay, 2, -1)
                turned.append(side.rotated.astype(jnp.float32) * decay[:, :, None, :])
            return scaled_product(turned[0], turned[1], self.dims.head_width)

        # Where positions jump by tens of thousands within a block, each row is an origin.
        span = jnp.max(-origin(queries, queries)) * np.max(-rates)
        return jax.lax.cond(
            span < RANGE, lambda: score(queries), lambda: row_by_row(score, queries)
        )
