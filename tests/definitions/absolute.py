"""Positions added to the token embedding: [T, M], where ``case.x`` is that embedding."""

from __future__ import annotations

import numpy as np

from .case import Case


def wpe(case: Case, offset: int = 0) -> np.ndarray:
    """x_t + table[p_t + offset]: GPT-2 with offset 0, OPT (Zhang et al. 2022) with offset 2."""
    rows = np.asarray(case.positions).astype(np.int64) + offset
    return case.x + case.parameters["table"][rows]


def sinusoids(
    positions: np.ndarray,
    width: int,
    theta: float = 10000.0,
    layout: str = "interleaved",
    spacing: str = "vaswani",
) -> np.ndarray:
    """sin(p w_m) and cos(p w_m), m = 0..d/2-1, [..., d]. Vaswani et al. 2017 (arXiv 1706.03762).

    ``vaswani``: w_m = theta^(-2m/d); ``tensor2tensor``: w_m = theta^(-m/(d/2 - 1)).
    ``interleaved``: sines at the even channels; ``concatenated``: all sines, then all cosines.
    """
    half = width // 2
    exponent = {
        "vaswani": 2.0 * np.arange(half) / width,
        "tensor2tensor": np.arange(half) / max(half - 1, 1),
    }[spacing]
    angle = np.asarray(positions, np.float64)[..., None] * theta**-exponent
    out = np.empty((*angle.shape[:-1], width))
    if layout == "interleaved":
        out[..., 0::2], out[..., 1::2] = np.sin(angle), np.cos(angle)
    elif layout == "concatenated":
        out[..., :half], out[..., half:] = np.sin(angle), np.cos(angle)
    else:
        raise ValueError(layout)
    return out


def sinusoidal(
    case: Case,
    theta: float = 10000.0,
    layout: str = "interleaved",
    spacing: str = "vaswani",
    scale: float = 1.0,
    embedding_scale: float = 1.0,
) -> np.ndarray:
    """embedding_scale x + scale PE(p)."""
    table = sinusoids(case.positions, case.width, theta, layout, spacing)
    return embedding_scale * case.x + scale * table
