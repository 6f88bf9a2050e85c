"""Rotary frequencies and their rescalings, ``(inv_freq [width // 2], attention factor)``.

theta_m = b^(-2m/D), m = 0..D/2-1; s is the factor, L the original length, lambda_m = 2 pi/theta_m.
The attention factor multiplies cos and sin, of q and of k, so that logits take its square.
"""

from __future__ import annotations

import math

import numpy as np

Scaled = tuple[np.ndarray, float]


def default(width: int, theta: float) -> Scaled:
    """theta_m = b^(-2m/D) (RoFormer, eq. 15)."""
    return np.array([theta ** (-2 * m / width) for m in range(width // 2)], np.float64), 1.0


def linear(width: int, theta: float, factor: float) -> Scaled:
    """theta_m / s (Position Interpolation, eq. 4)."""
    return default(width, theta)[0] / factor, 1.0


def ntk(width: int, theta: float, factor: float) -> Scaled:
    """Base b s^(D/(D-2)): the last pair is divided by s, the first kept (YaRN paper, eq. 16)."""
    return default(width, theta * factor ** (width / (width - 2)))


def dynamic_ntk(width: int, theta: float, factor: float, original: float, length: float) -> Scaled:
    """NTK with s = f n/L - (f - 1), n = max(length, L) (Transformers, ``dynamic``)."""
    n = max(length, original)
    return ntk(width, theta, factor * n / original - (factor - 1))


def kept_by_rotations(
    width: int, theta: float, original: float, slow: float, fast: float
) -> np.ndarray:
    """gamma_m = clip((r - slow)/(fast - slow), 0, 1), r = L/lambda_m (YaRN paper, eq. 17-18)."""
    rotations = original * default(width, theta)[0] / (2 * math.pi)
    return np.clip((rotations - slow) / (fast - slow), 0.0, 1.0)


def index_ends(
    width: int, theta: float, original: float, slow: float, fast: float, truncate: bool = True
) -> tuple[float, float]:
    """Pair indices of ``fast`` and ``slow`` rotations in L: m(r) = D ln(L/(2 pi r)) / (2 ln b)."""
    low, high = (
        width * math.log(original / (2 * math.pi * r)) / (2 * math.log(theta)) for r in (fast, slow)
    )
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, width - 1)  # width - 1, not width/2 - 1: as released


def kept_by_index(
    width: int, theta: float, original: float, slow: float, fast: float, truncate: bool = True
) -> np.ndarray:
    """1 - clip((m - low)/(high - low), 0, 1) (YaRN's released code)."""
    low, high = index_ends(width, theta, original, slow, fast, truncate)
    if low == high:
        high += 0.001
    return 1.0 - np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)


def ntk_by_parts(
    width: int,
    theta: float,
    factor: float,
    original: float,
    alpha: float = 1.0,
    beta: float = 32.0,
    ramp: str = "rotations",
    truncate: bool = True,
) -> Scaled:
    """(1 - gamma) theta_m/s + gamma theta_m (YaRN paper, eq. 19-20)."""
    if ramp == "rotations":
        kept = kept_by_rotations(width, theta, original, alpha, beta)
    elif ramp == "index":
        kept = kept_by_index(width, theta, original, alpha, beta, truncate)
    else:
        raise ValueError(ramp)
    plain = default(width, theta)[0]
    return (1.0 - kept) * plain / factor + kept * plain, 1.0


def yarn(
    width: int,
    theta: float,
    factor: float,
    original: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    ramp: str = "index",
    attention_factor: float | None = None,
    truncate: bool = True,
) -> Scaled:
    """NTK-by-parts and sqrt(1/t) = 0.1 ln s + 1, 1 for s <= 1 (YaRN paper, eq. 21-22)."""
    frequencies, _ = ntk_by_parts(
        width, theta, factor, original, beta_slow, beta_fast, ramp, truncate
    )
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return frequencies, attention_factor


def longrope(
    width: int,
    theta: float,
    factors: np.ndarray,
    factor: float,
    original: float,
    attention_factor: float | None = None,
) -> Scaled:
    """theta_m / lambda_m, sqrt(1 + ln s/ln L) (LongRoPE, eq. 3; Transformers, ``longrope``)."""
    if attention_factor is None:
        attention_factor = (
            math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        )
    return default(width, theta)[0] / np.asarray(factors, np.float64), attention_factor


def llama3(
    width: int,
    theta: float,
    factor: float = 8.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original: float = 8192,
) -> Scaled:
    """theta_m for lambda < L/high, theta_m/s for lambda > L/low, a blend between (Llama 3.1)."""
    out = []
    for frequency in default(width, theta)[0]:
        rotations = original * frequency / (2 * math.pi)  # L/lambda
        if rotations > high_freq_factor:
            out.append(frequency)
        elif rotations < low_freq_factor:
            out.append(frequency / factor)
        else:
            smooth = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append((1.0 - smooth) * frequency / factor + smooth * frequency)
    return np.array(out, np.float64), 1.0
