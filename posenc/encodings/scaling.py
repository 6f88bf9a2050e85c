"""Ways to rescale rotary frequencies for longer contexts, each ``(ratios, attention factor)``.

Let F denote the channel pairs of a spectrum ``theta^(-2m/width)``, m = 0..F-1, and L the original
context length. Every way multiplies frequency m by a ratio and cosines and sines by one attention
factor. Those that depend on the length give their ratios for any number of lengths at once.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from posenc.encodings.base import EncodingError


def spectrum(width: int, theta: float) -> np.ndarray:
    """Give RoPE's angular frequencies ``theta^(-2m/width)``, float64 ``[width / 2]``."""
    return theta ** (-2 * np.arange(width // 2) / width)


class Scaling:
    """A way to rescale; itself, it changes nothing.

    Attributes:
        name: how specs call it.
        dynamic: whether the ratios depend on the length (``ratios_at``).
        original: L, or None for the length that the model is built for.
        chunk: a query at position p counts as one of length ``(p // chunk + 1) * chunk``; None for
            the largest divisor of L up to 256, so that no length within L counts as one beyond it.
        scale_from: ``position`` of each query, so that later tokens change nothing; or ``total``,
            the released rule: the largest position of the whole pass.
        reference: a BibTeX entry.
    """

    name: ClassVar[str] = "scaling"
    dynamic: ClassVar[bool] = False
    reference: ClassVar[str] = ""

    original: int | None = None
    chunk: int | None = None
    scale_from: str = "position"

    def ratios(self, width: int, theta: float, original: int) -> tuple[np.ndarray, float]:
        """Give the ratios, float64 ``[F]``, and the attention factor."""
        return np.ones(width // 2), 1.0

    def ratios_at(
        self, length: Num[Array, "*n"], width: int, theta: float, original: int
    ) -> Float[Array, "*n F"]:
        """Give the ratios for every one of some lengths, float32."""
        fixed = jnp.asarray(self.ratios(width, theta, original)[0], jnp.float32)
        return jnp.broadcast_to(fixed, (*length.shape, *fixed.shape))

    def _require(self, **least: tuple[Any, float]) -> None:
        for option, (value, limit) in least.items():
            if value is not None and not value >= limit:
                raise EncodingError(f"{self.name}({option}={value}): it must be at least {limit:g}")

    def _dynamic_options(self, chunk: int | None, scale_from: str) -> None:
        self._require(chunk=(chunk, 1))
        if scale_from not in ("position", "total"):
            raise EncodingError(f"{self.name} has no scale_from {scale_from!r}: position, total")
        self.chunk, self.scale_from = chunk, scale_from


class Linear(Scaling):
    """Position interpolation: every frequency divided by the factor (Chen et al., 2023, eq. 4).

    Args:
        factor: how many times longer the context becomes.
    """

    name = "linear"
    reference = """@article{chen2023extending,
  title={Extending Context Window of Large Language Models via Positional Interpolation},
  author={Chen, Shouyuan and Wong, Sherman and Chen, Liangjian and Tian, Yuandong},
  journal={arXiv preprint arXiv:2306.15595},
  year={2023}
}"""

    def __init__(self, *, factor: float):
        self._require(factor=(factor, 1))
        self.factor = factor

    def ratios(self, width, theta, original):
        """Divide all alike."""
        return np.full(width // 2, 1 / self.factor), 1.0


_YARN_REFERENCE = """@inproceedings{peng2024yarn,
  title={{YaRN}: Efficient Context Window Extension of Large Language Models},
  author={Peng, Bowen and Quesnelle, Jeffrey and Fan, Honglu and Shippole, Enrico},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""


def _ntk_exponents(width: int) -> np.ndarray:
    """Give e of ``ratio_m = s^e_m`` when the base becomes ``theta s^(width / (width - 2))``."""
    # A single pair turns by 1 radian a position whatever the base is.
    return -2 * np.arange(width // 2) / max(width - 2, 1)


class NTK(Scaling):
    """NTK-aware scaling: the base becomes ``theta s^(width/(width-2))`` (Peng et al., eq. 16).

    Some channels extrapolate, so that the factor is set above the true one.

    Args:
        factor: s.
    """

    name = "ntk"
    reference = _YARN_REFERENCE

    def __init__(self, *, factor: float):
        self._require(factor=(factor, 1))
        self.factor = factor

    def ratios(self, width, theta, original):
        """Leave the highest frequency, and divide the lowest by s."""
        return self.factor ** _ntk_exponents(width), 1.0


class DynamicNTK(Scaling):
    """NTK-aware scaling with ``s = factor n/L - (factor - 1)`` for n > L (Peng et al., 3.3).

    The released rule takes n from the whole pass, so that later tokens change earlier outputs and
    decoding differs from a full pass; here n is the length at each query's own position, unless
    ``scale_from`` is ``total``.

    Args:
        factor: of the formula; 1 gives ``s = n / L``.
        original: L; the length that the model is built for unless told otherwise.
        chunk: n is rounded up to a multiple of it; unless told otherwise the largest divisor of L
            up to 256, so that within L nothing changes.
        scale_from: ``position`` or ``total``.
    """

    name = "dynamic_ntk"
    dynamic = True
    reference = _YARN_REFERENCE

    def __init__(
        self,
        *,
        factor: float = 1.0,
        original: int | None = None,
        chunk: int | None = None,
        scale_from: str = "position",
    ):
        self._require(factor=(factor, 1), original=(original, 1))
        self._dynamic_options(chunk, scale_from)
        self.factor, self.original = factor, original

    def ratios_at(self, length, width, theta, original):
        """Give ``s^e`` of the length's own s."""
        over = jnp.maximum(length.astype(jnp.float32) / original, 1.0)
        scale = self.factor * over - (self.factor - 1)
        return scale[..., None] ** _ntk_exponents(width).astype(np.float32)


def _rotations_ramp(width, theta, original, low, high):
    """Give gamma by rotations within L: 0 up to ``low``, 1 from ``high`` on (eq. 18)."""
    rotations = original * spectrum(width, theta) / (2 * math.pi)
    if low == high:
        return (rotations >= high).astype(np.float64)
    return np.clip((rotations - low) / (high - low), 0, 1)


def _index_ramp(width, theta, original, low, high, truncate):
    """Give gamma by the channel's index, as released: linear from ``high``'s place to ``low``'s."""
    if theta <= 1:
        raise EncodingError(
            f"a ramp by index needs theta above 1, and got {theta:g}: take ramp=rotations"
        )

    def place(rotations: float) -> float:
        return width * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    first, last = place(high), place(low)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    # Clipped to [0, width - 1], not to the last pair: as released.
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    return 1 - np.clip((np.arange(width // 2) - first) / (last - first), 0, 1)


class NTKByParts(Scaling):
    """High frequencies left, low ones interpolated, blended between (Peng et al., eq. 17 to 20).

    Args:
        factor: s.
        original: L; the length that the model is built for unless told otherwise.
        low: rotations within L at and below which a frequency is divided by s (alpha).
        high: rotations at and above which it is left (beta).
        ramp: ``rotations``, the paper's: linear in rotations; ``index``, that of the released code
            and of published checkpoints: linear in the channel's index.
        truncate: whether the ends of the ramp by index are whole channels.
    """

    name = "ntk_by_parts"
    reference = _YARN_REFERENCE

    def __init__(
        self,
        *,
        factor: float,
        original: int | None = None,
        low: float = 1.0,
        high: float = 32.0,
        ramp: str = "index",
        truncate: bool = True,
    ):
        self._require(factor=(factor, 1), original=(original, 1))
        if not 0 < low <= high:
            raise EncodingError(f"{self.name}(low={low}, high={high}): needs 0 < low <= high")
        if ramp not in ("index", "rotations"):
            raise EncodingError(f"{self.name} has no ramp {ramp!r}: index, rotations")
        self.factor, self.original = factor, original
        self.low, self.high, self.ramp, self.truncate = low, high, ramp, truncate

    def ratios(self, width, theta, original):
        """Blend ``1 / s`` and 1 by the ramp."""
        ends = (width, theta, original, self.low, self.high)
        by_index = self.ramp == "index"
        gamma = _index_ramp(*ends, self.truncate) if by_index else _rotations_ramp(*ends)
        return (1 - gamma) / self.factor + gamma, 1.0


class YaRN(NTKByParts):
    """NTK by parts, and logits made sharper (Peng et al., 2024, eq. 21 and 22).

    Cosines and sines are multiplied by ``0.1 ln s + 1``, hence logits by its square.

    Args:
        factor: s.
        original: L; the length that the model is built for unless told otherwise.
        low: as in NTK by parts (the released ``beta_slow``).
        high: as in NTK by parts (the released ``beta_fast``).
        ramp: ``index``, as released and as published checkpoints use; or ``rotations``, the
            paper's. The two differ by up to 0.35 in gamma.
        truncate: whether the ends of the ramp by index are whole channels.
        attention_factor: instead of ``0.1 ln s + 1``.
    """

    name = "yarn"

    def __init__(
        self,
        *,
        factor: float,
        original: int | None = None,
        low: float = 1.0,
        high: float = 32.0,
        ramp: str = "index",
        truncate: bool = True,
        attention_factor: float | None = None,
    ):
        super().__init__(
            factor=factor, original=original, low=low, high=high, ramp=ramp, truncate=truncate
        )
        self.attention_factor = attention_factor

    def ratios(self, width, theta, original):
        """Blend, and give the temperature."""
        ratios, _ = super().ratios(width, theta, original)
        given = self.attention_factor
        return ratios, 0.1 * math.log(self.factor) + 1 if given is None else given


class LongRoPE(Scaling):
    """A divisor for every frequency, found by search (Ding et al., 2024, eq. 3).

    As published models use it: queries within L take the short divisors and those beyond it the
    long ones; cosines and sines are multiplied by ``sqrt(1 + ln s / ln L)``.

    Args:
        factors: the long divisors, one a channel pair.
        short: the divisors within L; all 1 unless told otherwise.
        factor: s, for the attention factor alone, which is 1 unless told what s is.
        original: L; the length that the model is built for unless told otherwise.
        attention_factor: instead of the formula's.
        chunk: of the switch: a query's length is rounded up to a multiple of it, unless told
            otherwise the largest divisor of L up to 256.
        scale_from: ``position`` or, as released, ``total``.
    """

    name = "longrope"
    dynamic = True
    reference = """@inproceedings{ding2024longrope,
  title={{LongRoPE}: Extending {LLM} Context Window Beyond 2 Million Tokens},
  author={Ding, Yiran and Zhang, Li Lyna and Zhang, Chengruidong and Xu, Yuanyuan and Shang, Ning
          and Xu, Jiahang and Yang, Fan and Yang, Mao},
  booktitle={International Conference on Machine Learning},
  year={2024}
}"""

    def __init__(
        self,
        *,
        factors: tuple,
        short: tuple | None = None,
        factor: float = 1.0,
        original: int | None = None,
        attention_factor: float | None = None,
        chunk: int | None = None,
        scale_from: str = "position",
    ):
        self._require(factor=(factor, 1), original=(original, 1))
        self._dynamic_options(chunk, scale_from)
        for name, given in (("factors", factors), ("short", short or ())):
            if not all(isinstance(f, int | float) and f > 0 for f in given):
                raise EncodingError(f"longrope({name}=...): give positive numbers")
        self.factors, self.short = factors, short
        self.factor, self.original = factor, original
        self.attention_factor = attention_factor

    def _divisors(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        short = self.short or (1,) * (width // 2)
        for name, given in (("factors", self.factors), ("short", short)):
            if len(given) != width // 2:
                raise EncodingError(
                    f"longrope({name}=...) has {len(given)} numbers, and {width} rotated channels "
                    f"have {width // 2} pairs: give one a pair"
                )
        return np.array(short, np.float64), np.array(self.factors, np.float64)

    def ratios(self, width, theta, original):
        """Give the short ratios, and the attention factor of all lengths."""
        short, _ = self._divisors(width)
        factor = self.attention_factor
        if factor is None:
            within = self.factor <= 1 or original <= 1
            factor = 1.0 if within else math.sqrt(1 + math.log(self.factor) / math.log(original))
        return 1 / short, factor

    def ratios_at(self, length, width, theta, original):
        """Switch between the two."""
        short, long = (1 / d.astype(np.float32) for d in self._divisors(width))
        return jnp.where((length > original)[..., None], long, short)


class Llama3(Scaling):
    """Llama 3.1's: wavelengths above ``L / low`` divided, below ``L / high`` left, blended between.

    Dubey et al., 2024, and the released code.

    Args:
        factor: s.
        low_freq_factor: low.
        high_freq_factor: high.
        original: L, 8192 in Llama 3.1; the length that the model is built for unless told
            otherwise.
    """

    name = "llama3"
    reference = """@article{dubey2024llama,
  title={The {Llama} 3 Herd of Models},
  author={Dubey, Abhimanyu and others},
  journal={arXiv preprint arXiv:2407.21783},
  year={2024}
}"""

    def __init__(
        self,
        *,
        factor: float = 8.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        original: int | None = None,
    ):
        self._require(factor=(factor, 1), original=(original, 1))
        if not 0 < low_freq_factor <= high_freq_factor:
            raise EncodingError(
                f"llama3(low_freq_factor={low_freq_factor}, high_freq_factor={high_freq_factor}): "
                "needs 0 < low <= high"
            )
        self.factor, self.original = factor, original
        self.low, self.high = low_freq_factor, high_freq_factor

    def ratios(self, width, theta, original):
        """Blend ``1 / s`` and 1 linearly in rotations between low and high."""
        smooth = _rotations_ramp(width, theta, original, self.low, self.high)
        return (1 - smooth) / self.factor + smooth, 1.0


SCALINGS: dict[str, type[Scaling]] = {
    cls.name: cls for cls in (Linear, NTK, DynamicNTK, NTKByParts, YaRN, LongRoPE, Llama3)
}
