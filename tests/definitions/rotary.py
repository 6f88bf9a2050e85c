"""Rotary encodings: logits ``[H, T, T]`` of queries and keys turned by their positions.

With a pair of channels as a complex number, <R_i q, R_j k> = Re sum_m q_m conj(k_m) e^(i D_ij,m),
D_ij,m = (p_i - p_j) theta_m, the angle from key to query. Channels past the pairs are not turned.
"""

from __future__ import annotations

import math

import numpy as np

from . import scaling
from .case import Case


def as_complex(x: np.ndarray, pairing: str) -> np.ndarray:
    """Pairs (m, m + r/2) for "half", (2m, 2m + 1) for "interleaved", [..., r] to [..., r/2]."""
    if pairing == "half":
        middle = x.shape[-1] // 2
        return x[..., :middle] + 1j * x[..., middle:]
    if pairing == "interleaved":
        return x[..., 0::2] + 1j * x[..., 1::2]
    raise ValueError(pairing)


def difference(case: Case) -> np.ndarray:
    """p_i - p_j, signed, [T, T]."""
    positions = np.asarray(case.positions, np.float64)
    return positions[:, None] - positions[None, :]


def turned(
    case: Case, angle: np.ndarray, pairing: str = "half", scale: np.ndarray | float = 1.0
) -> np.ndarray:
    """Logits with pair m turned by ``angle [(H,) T, T, F]`` and multiplied by ``scale``."""
    width = 2 * angle.shape[-1]
    q = as_complex(case.q[..., :width], pairing)
    k = as_complex(case.k[..., :width], pairing)
    products = q[:, :, None, :] * np.conj(k)[:, None, :, :] * np.exp(1j * angle) * scale
    rest = np.einsum("htd,hsd->hts", case.q[..., width:], case.k[..., width:])
    return (products.real.sum(-1) + rest) / np.sqrt(case.head_width)


def rope(
    case: Case,
    theta: float = 10000.0,
    pairing: str = "half",
    partial: float = 1.0,
    inv_freq: np.ndarray | None = None,
    attention_factor: float = 1.0,
) -> np.ndarray:
    """<R_i q_i, R_j k_j> / sqrt(D) (RoFormer, eq. 13-16), of the first int(D partial) channels.

    theta_m = b^(-2m/r) with the rotated width r; ``inv_freq`` is [r/2] or [H, r/2] instead. The
    attention factor multiplies cos and sin of both sides, so the turned part takes its square.
    """
    if inv_freq is None:
        inv_freq, _ = scaling.default(int(case.head_width * partial), theta)
    inv_freq = np.asarray(inv_freq, np.float64)
    angle = difference(case)[..., None] * inv_freq[..., None, None, :]
    return turned(case, angle, pairing, attention_factor**2)


def p_rope(
    case: Case, p: float = 0.75, theta: float = 10000.0, pairing: str = "half"
) -> np.ndarray:
    """RoPE with all but the int(p D/2) highest frequencies 0 (Barbero et al. 2025, sec. 6.1)."""
    inv_freq, _ = scaling.default(case.head_width, theta)
    inv_freq[int(p * case.head_width / 2) :] = 0.0
    return rope(case, pairing=pairing, inv_freq=inv_freq)


def xpos(
    case: Case,
    theta: float = 10000.0,
    pairing: str = "half",
    gamma: float = 0.4,
    scale_base: float = 512.0,
) -> np.ndarray:
    """RoPE, pair m times zeta_m^((p_i - p_j)/scale_base), zeta_m = (2m/D + gamma)/(1 + gamma).

    Sun et al. 2022, eq. 9-10; torchscale's ``XPOS`` has the scale base.
    """
    inv_freq, _ = scaling.default(case.head_width, theta)
    gap = difference(case)[..., None]
    return turned(
        case, gap * inv_freq, pairing, xpos_decay(case.head_width, gamma) ** (gap / scale_base)
    )


def xpos_decay(width: int, gamma: float = 0.4) -> np.ndarray:
    """zeta_m = (m/(D/2) + gamma)/(1 + gamma), [D/2]."""
    return (np.arange(width // 2) / (width // 2) + gamma) / (1.0 + gamma)


def learned_rope(case: Case, pairing: str = "half") -> np.ndarray:
    """RoPE with the frequencies of ``inv_freq [H, F]``, learned for every head."""
    return rope(case, pairing=pairing, inv_freq=case.parameters["inv_freq"])


def seen_length(position: float, chunk: int) -> float:
    """The context at a position, n = (floor(p/chunk) + 1) chunk: p + 1 rounded up to chunks."""
    return (math.floor(position / chunk) + 1) * chunk


def dynamic_rope(
    case: Case,
    theta: float,
    factor: float,
    original: int,
    pairing: str = "half",
    chunk: int = 1,
) -> np.ndarray:
    """Dynamic NTK where query i turns itself and all its keys by the frequencies of n(p_i).

    Base b (f n/L - (f - 1))^(D/(D-2)) beyond L (YaRN paper, sec. 3.3; keys cached unturned).
    """
    frequencies = np.stack(
        [
            scaling.dynamic_ntk(case.head_width, theta, factor, original, seen_length(p, chunk))[0]
            for p in case.positions
        ]
    )
    return turned(case, difference(case)[..., None] * frequencies[:, None, :], pairing)


def longrope_switch(
    case: Case,
    theta: float,
    short_factors: np.ndarray,
    long_factors: np.ndarray,
    factor: float,
    original: int,
    pairing: str = "half",
    chunk: int = 1,
) -> np.ndarray:
    """LongRoPE: query i takes the long lambdas, for itself and its keys, if n(p_i) > L.

    The attention factor sqrt(1 + ln s/ln L) is on both sides at all lengths (Transformers).
    """
    rows, attention_factor = [], 1.0
    for p in case.positions:
        factors = long_factors if seen_length(p, chunk) > original else short_factors
        inv_freq, attention_factor = scaling.longrope(
            case.head_width, theta, factors, factor, original
        )
        rows.append(inv_freq)
    angle = difference(case)[..., None] * np.stack(rows)[:, None, :]
    return turned(case, angle, pairing, attention_factor**2)


def fope(
    case: Case,
    theta: float = 10000.0,
    pairing: str = "half",
    length: int | None = None,
    zero_freq_sin: float = 0.0,
) -> np.ndarray:
    """RoPE with cos(p theta) C for cos, sin(p theta) S for sin, of each head (Hua et al. 2024).

    Only the K frequencies of at least 2 pi/L are kept; ``cos_mix`` and ``sin_mix [H, K, n]`` make
    the first n pairs of them. The other pairs have cos 1 and sin ``zero_freq_sin``. The released
    code has n = min(K, D/4), and pads both with 1.
    """
    inv_freq, _ = scaling.default(case.head_width, theta)
    kept = inv_freq[inv_freq >= 2 * math.pi / (length or case.context_length)]
    angle = np.asarray(case.positions, np.float64)[:, None] * kept
    cos_mix, sin_mix = case.parameters["cos_mix"], case.parameters["sin_mix"]
    shape = (case.heads, case.length, len(inv_freq))
    cos, sin = np.full(shape, 1.0), np.full(shape, float(zero_freq_sin))
    cos[..., : cos_mix.shape[-1]] = np.cos(angle) @ cos_mix
    sin[..., : sin_mix.shape[-1]] = np.sin(angle) @ sin_mix
    q = as_complex(case.q, pairing) * (cos + 1j * sin)
    k = as_complex(case.k, pairing) * (cos + 1j * sin)
    return np.einsum("htf,hsf->hts", q, np.conj(k)).real / np.sqrt(case.head_width)


def hope(
    case: Case, theta: float = 10000.0, pairing: str = "half", length: int | None = None
) -> np.ndarray:
    """RoPE with frequencies below 2 pi/L set to 0 (Chen et al. 2024, arXiv 2410.21216)."""
    inv_freq, _ = scaling.default(case.head_width, theta)
    inv_freq[inv_freq < 2 * math.pi / (length or case.context_length)] = 0.0
    return rope(case, pairing=pairing, inv_freq=inv_freq)
