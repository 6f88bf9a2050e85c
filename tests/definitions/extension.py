"""RoPE at evaluation beyond its training length, by other relative positions: logits [H, T, T]."""

from __future__ import annotations

import numpy as np

from . import scaling
from .case import Case, distance
from .rotary import turned


def at_distance(
    case: Case, relative: np.ndarray, theta: float = 10000.0, pairing: str = "half"
) -> np.ndarray:
    """RoPE logits with ``relative [T, T]`` for p_i - p_j."""
    inv_freq, _ = scaling.default(case.head_width, theta)
    return turned(case, relative[..., None] * inv_freq, pairing)


def self_extend(
    case: Case, group: int, window: int, theta: float = 10000.0, pairing: str = "half"
) -> np.ndarray:
    """p_i - p_j within W, else (floor(p_i/G) + W - W/G) - floor(p_j/G) (Jin et al. 2024).

    W/G is real (``self_extend_patch/Llama.py``, the prompt's path), not floored.
    """
    near = distance(case)
    grouped = np.floor(np.asarray(case.positions, np.float64) / group)
    far = (grouped[:, None] + window - window / group) - grouped[None, :]
    return at_distance(case, np.where(near < window, near, far), theta, pairing)


def rerope(case: Case, window: float, theta: float = 10000.0, pairing: str = "half") -> np.ndarray:
    """min(p_i - p_j, w) (Su 2023)."""
    return at_distance(case, np.minimum(distance(case), window), theta, pairing)


def leaky_rerope(
    case: Case, window: float, k: float, theta: float = 10000.0, pairing: str = "half"
) -> np.ndarray:
    """p_i - p_j up to w, then w + (p_i - p_j - w)/k (Su 2023)."""
    gap = distance(case)
    return at_distance(
        case, np.where(gap < window, gap, window + (gap - window) / k), theta, pairing
    )


def lm_infinite(
    case: Case,
    n_global: int,
    n_local: int,
    limit: float | None = None,
    theta: float = 10000.0,
    pairing: str = "half",
) -> np.ndarray:
    """min(p_i - p_j, limit) where j < n_global or p_i - p_j < n_local, else -inf (Han et al. 2023).

    j is the slot: the first tokens of the sequence, wherever its positions begin.
    """
    gap = distance(case)
    capped = np.minimum(gap, n_local if limit is None else limit)
    seen = (np.arange(case.length)[None, :] < n_global) | (gap < n_local)
    return np.where(seen, at_distance(case, capped, theta, pairing), -np.inf)
