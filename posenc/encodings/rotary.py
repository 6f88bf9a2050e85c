"""Encodings that rotate queries and keys.

Let B denote the batch, n the tokens of a side, H the heads, D the head width, r the channels that
are rotated and F their pairs.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from posenc.encodings.base import (
    HIGHEST,
    Dimensions,
    EncodingError,
    PositionalEncoding,
    Side,
    scaled_product,
)
from posenc.encodings.options import checked
from posenc.encodings.remapping import REMAPS, Remap
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


def from_first_row(side: Side, rows: Side) -> Float[Array, "B n"]:
    """Give every token's position counted from the lowest that its segment has among some rows.

    Subtracted exactly and then cast to float32; 0 for a segment that none of the rows is of.
    """
    # Rows of other segments do not count: their positions may lie anywhere.
    same = side.segments[:, :, None] == rows.segments[:, None, :]
    apart = side.positions[:, :, None] - rows.positions[:, None, :]
    furthest = jnp.max(jnp.where(same, apart.astype(jnp.float32), -jnp.inf), -1)
    return jnp.where(jnp.isinf(furthest), 0.0, furthest)


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
    extensions = (*SCALINGS, *REMAPS)
    scales_by_query: ClassVar[bool] = True  # whether angles may depend on both query and key

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
        self.remap: Remap | None = None
        self._scale(scaling)

    def _scale(self, scaling: Scaling | None) -> None:
        self.scaling = scaling
        if scaling is None:
            return
        if self._by_query and not self.scales_by_query:
            raise EncodingError(
                f"{self.name}({scaling.name}) by position has no definition here: "
                "scale_from=total, or another scaling"
            )
        self.original = scaling.original or self.dims.context_length
        self.frequencies()  # whatever cannot be made is refused here
        if scaling.dynamic:
            self.shift_invariant = "no"  # the rule asks where a query stands

    @property
    def _by_query(self) -> bool:
        """Whether a key's rotation depends on the query that looks at it."""
        scaling = self.scaling
        dynamic = scaling is not None and scaling.dynamic and scaling.scale_from == "position"
        return dynamic or self.remap is not None

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
        # Each row's own: windows that are scored beside each other do not change each other.
        longest = jnp.max(positions, axis=-1, keepdims=True) + 1
        inv_freq = self._frequencies_at(longest) if total else fixed
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
        if self.remap is not None:
            return self._remapped(queries, keys, self.remap)
        assert self.scaling is not None
        chunk = self.scaling.chunk or _chunk(self.original)
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

    def _remapped(self, queries: Side, keys: Side, remap: Remap):
        """Score near keys at their own distance, and the others at the remapped one."""
        inv_freq, factor = self.frequencies()

        def score(positions):
            turned = []
            for side, at in zip((queries, keys), positions, strict=True):
                cos, sin = rope_angles(at, inv_freq, factor)
                turned.append(
                    rotate(side.rotated, cos[..., None, :], sin[..., None, :], self.pairing)
                )
            return scaled_product(turned[0], turned[1], self.dims.head_width)

        both = queries.positions, keys.positions
        origin = queries.positions[:, :1]
        near = tuple(p - origin for p in both)
        distance = jnp.maximum(both[0][:, None, :, None] - both[1][:, None, None, :], 0)
        scores = jnp.where(distance < remap.window, score(near), score(remap.far(*both)))
        if remap.logn:
            place = jnp.maximum(queries.positions.astype(jnp.float32) + 1, 1)
            longer = jnp.log(place) / np.float32(math.log(max(self.dims.context_length, 2)))
            scores *= jnp.maximum(longer, 1.0)[:, None, :, None]
        return scores

    def extended(self, policy: str, length: int, /, **options: Any) -> PositionalEncoding:
        """Give this encoding with its frequencies rescaled, or its far distances replaced.

        Raises:
            EncodingError: an unknown policy or option, or another one is at work already.
        """
        if policy not in self.extensions or policy not in (*SCALINGS, *REMAPS):
            return super().extended(policy, length, **options)
        before = self.scaling or self.remap
        if before is not None:
            raise EncodingError(
                f"{self.name} has {before.name} already: {policy} on top of it has no definition"
            )
        extended = nnx.clone(self)
        if policy in SCALINGS:
            extended._scale(SCALINGS[policy](**checked(SCALINGS[policy], policy, options)))
            return extended
        remap = REMAPS[policy](**checked(REMAPS[policy], policy, options))
        extended.remap = remap
        extended.reach, extended.sinks = remap.reach, remap.sinks
        extended.shift_invariant = "no"
        return extended


def _chunk(original: int) -> int:
    """Give the largest divisor of a length up to 256."""
    return next(chunk for chunk in range(min(original, 256), 0, -1) if original % chunk == 0)


def _partial(dims: Dimensions, partial: float, name: str) -> int:
    if not 0 < partial <= 1:
        raise EncodingError(f"{name}(partial={partial}): it is a share of channels, above 0, to 1")
    rotated = int(dims.head_width * partial)
    if not rotated:
        raise EncodingError(
            f"{name}(partial={partial}): of {dims.head_width} channels it leaves none to rotate"
        )
    return rotated


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
        learned: whether the frequencies are parameters, those of each head and layer its own,
            which begin as RoPE's.
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
        learned: bool = False,
    ):
        rotated = _partial(dims, partial, self.name)
        self.learned = self.per_layer = learned
        if learned:
            self.extensions = tuple(SCALINGS)
        super().__init__(dims, rngs, theta=theta, pairing=pairing, rotated=rotated, scaling=scaling)
        if learned:
            inv_freq = jnp.asarray(self.spectrum(), jnp.float32)
            self.inv_freq = nnx.Param(jnp.tile(inv_freq, (dims.heads, 1)))

    def _scale(self, scaling):
        if scaling is not None and scaling.dynamic and self.learned:
            raise EncodingError(
                f"rope(learned=true) has no frequencies that {scaling.name} could make anew for "
                "every length: take another scaling"
            )
        super()._scale(scaling)

    def prepare(self, positions, streams):
        """Give cosine and sine of every angle; nothing where each layer has its own."""
        return None if self.learned else super().prepare(positions, streams)

    def _rotate(self, side: Side):
        if not self.learned:
            return super()._rotate(side)
        inv_freq, factor = self.inv_freq[...], 1.0
        if self.scaling is not None:
            ratios, factor = self.scaling.ratios(self.rotated, self.theta, self.original)
            inv_freq = inv_freq * ratios.astype(np.float32)
        positions = jnp.repeat(side.positions[..., None], self.dims.heads, axis=-1)
        cos, sin = rope_angles(positions, inv_freq, factor)
        return rotate(side.x, cos, sin, self.pairing)


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
    scales_by_query = False
    extensions = tuple(SCALINGS)
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

    def replaces(self, hook: str) -> bool:
        """Say that scores are its own."""
        return hook == "scores" or super().replaces(hook)

    def scores(self, queries: Side, keys: Side, visible):
        """Scale both sides from the first position that their segment has in this block."""
        pairs = self.rotated // 2
        zeta = (np.arange(pairs) / pairs + self.gamma) / (1 + self.gamma)
        rates = (np.log(zeta) / self.scale_base).astype(np.float32)

        def score(some: Side):
            turned = []
            for side, sign in ((some, 1), (keys, -1)):
                # A key so far back that it would underflow has decayed to nothing.
                since = from_first_row(side, some)[..., None]
                decay = jnp.exp(jnp.minimum(sign * since * rates, RANGE))
                halves = self.pairing == "half"
                decay = jnp.concatenate([decay] * 2, -1) if halves else jnp.repeat(decay, 2, -1)
                turned.append(side.rotated.astype(jnp.float32) * decay[:, :, None, :])
            return scaled_product(turned[0], turned[1], self.dims.head_width)

        # Where positions jump by tens of thousands within a block, each row is an origin.
        span = jnp.max(from_first_row(queries, queries)) * np.max(-rates)
        return jax.lax.cond(
            span < RANGE, lambda: score(queries), lambda: row_by_row(score, queries)
        )


def _length(length: int | None, dims: Dimensions, name: str) -> int:
    if length is not None and length < 1:
        raise EncodingError(f"{name}(length={length}): it must be at least 1")
    return dims.context_length if length is None else length


class HoPE(Rotary):
    """RoPE without the frequencies too low for one turn in training (Chen et al., 2025).

    Channel pairs whose frequency is below ``2 pi / length`` do not turn: they carry no position.
    The cut is that of reimplementations; it was not held against the paper's own text, by which
    more may be dropped.

    Args:
        dims: of the model; the head width must be even.
        rngs: unused.
        theta: the base of the frequencies.
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        length: within which a frequency has to turn once; the length that the model is built for
            unless told otherwise.
        scaling: a way to rescale the frequencies that are kept.
    """

    name = "hope"
    reference = """@inproceedings{chen2025hope,
  title={{HoPE}: A Novel Positional Encoding Without Long-Term Decay for Enhanced Context Awareness
         and Extrapolation},
  author={Chen, Yuhan and Lv, Ang and Luan, Jian and Wang, Bin and Liu, Wei},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
        length: int | None = None,
        scaling: Scaling | None = None,
    ):
        self.length = _length(length, dims, self.name)
        super().__init__(dims, rngs, theta=theta, pairing=pairing, scaling=scaling)

    def spectrum(self):
        """Give RoPE's frequencies, those that do not turn once replaced by 0."""
        every = super().spectrum()
        return np.where(every < 2 * math.pi / self.length, 0.0, every)


class Constant(nnx.Variable):
    """Drawn when a model is made, and never trained: the seed makes it again."""


class FoPE(HoPE):
    """RoPE with a mixture of frequencies in each channel (Hua et al., 2025, eq. 11 to 13).

    The K frequencies of at least ``2 pi / length`` are kept, and every head of every layer has two
    fixed random matrices, one for cosines and one for sines: ``cos(p w) C`` and ``sin(p w) S``
    stand for the cosine and sine of the first n channel pairs, ``C`` and ``S`` being the identity
    and noise. The other pairs do not turn. The mixtures are no rotations, so that a score depends
    on more than the difference of two positions.

    The paper's noise is ``N(0, gain)``; this is the released code's, Xavier-normal as torch draws
    it for all heads at once, with deviation ``gain sqrt(2 / (n (K + H)))``. That code has n no more
    than a quarter of the head width, which is K at the paper's length of 512. Where n is less, a
    pair's own frequency is every ``ceil(K/n)``-th, and pairs for which none is left have noise
    alone.

    Args:
        dims: of the model; the head width must be even.
        rngs: where the mixtures come from.
        theta: the base of the frequencies.
        pairing: which channels make a pair, ``half`` or ``interleaved``.
        length: as in HoPE.
        gain: of the noise: 0.3, 0.4 and 0.6 for the paper's 60M, 180M and 1.2B parameters.
        mixed: n; K unless told otherwise.
        zero_freq_sin: the sine of the pairs that do not turn. The released code has 1, by which
            they weigh twice as much in a score as with 0.
        scaling: a way to rescale the frequencies that are kept.
    """

    name = "fope"
    scales_by_query = False
    extensions = tuple(SCALINGS)
    per_layer = True
    reference = """@inproceedings{hua2025fourier,
  title={Fourier Position Embedding: Enhancing Attention's Periodic Extension for Length
         Generalization},
  author={Hua, Ermo and Jiang, Che and Lv, Xingtai and Zhang, Kaiyan and Sun, Youbang and
          Fan, Yuchen and Zhu, Xuekai and Qi, Biqing and Ding, Ning and Zhou, Bowen},
  booktitle={International Conference on Machine Learning},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
        length: int | None = None,
        gain: float = 0.3,
        mixed: int | None = None,
        zero_freq_sin: float = 0.0,
        scaling: Scaling | None = None,
    ):
        super().__init__(dims, rngs, theta=theta, pairing=pairing, length=length, scaling=scaling)
        self.kept = int(np.count_nonzero(self.spectrum()))
        self.mixed = self.kept if mixed is None else mixed
        if not 0 <= self.mixed <= self.kept:
            raise EncodingError(
                f"fope(mixed={mixed}): of the {self.kept} frequencies that turn once within "
                f"{self.length} positions, at least 0 and at most all can be mixed"
            )
        if gain < 0:
            raise EncodingError(f"fope(gain={gain}): it must be at least 0")
        self.zero_freq_sin = zero_freq_sin
        if gain:
            self.shift_invariant = "no"
        shape = (dims.heads, self.kept, self.mixed)
        own = np.zeros(shape[1:], np.float32)
        places = np.arange(self.mixed) * -(-self.kept // max(self.mixed, 1))
        within = places < self.kept
        own[places[within], np.flatnonzero(within)] = 1
        deviation = gain * math.sqrt(2 / max(self.mixed * (self.kept + dims.heads), 1))

        def mixture() -> Constant:
            return Constant(own + deviation * jax.random.normal(rngs.params(), shape))

        self.cos_mix, self.sin_mix = mixture(), mixture()

    def _rotate(self, side: Side):
        _, factor = self.frequencies()
        turned = []
        for waves, mix, rest in zip(
            side.prepared, (self.cos_mix, self.sin_mix), (1.0, self.zero_freq_sin), strict=True
        ):
            mixed = jnp.einsum(
                "bnk,hkf->bnhf",
                waves[:, :, 0, : self.kept],
                mix[...],
                precision=HIGHEST,
            )
            pad = ((0, 0), (0, 0), (0, 0), (0, self.rotated // 2 - self.mixed))
            turned.append(jnp.pad(mixed, pad, constant_values=factor * rest))
        return rotate(side.x, turned[0], turned[1], self.pairing)
