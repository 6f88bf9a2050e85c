"""PoPE: content in the magnitudes, position in the phases."""

from __future__ import annotations

import math

import numpy as np

from .case import Case


def softplus(x: np.ndarray) -> np.ndarray:
    """ln(1 + e^x)."""
    return np.logaddexp(0.0, x)


def pope(case: Case, theta: float = 10000.0) -> np.ndarray:
    """sum_c softplus(q_c) softplus(k_c) cos((p_j - p_i) theta_c + phase_c) / sqrt(D).

    theta_c = b^(-c/D) for all D channels, ``phase [H, D]`` held in [-2 pi, 0] (arXiv 2509.10534;
    the sign, with the phase added to the key's angle, as in lucidrains' PoPE-pytorch).
    """
    width = case.head_width
    frequencies = theta ** (-np.arange(width) / width)
    phase = np.clip(case.parameters["phase"], -2.0 * math.pi, 0.0)
    positions = np.asarray(case.positions, np.float64)
    angle = (positions[None, :] - positions[:, None])[..., None] * frequencies
    logits = np.zeros((case.heads, case.length, case.length))
    for h in range(case.heads):
        magnitude = softplus(case.q[h])[:, None, :] * softplus(case.k[h])[None, :, :]
        logits[h] = (magnitude * np.cos(angle + phase[h])).sum(-1) / math.sqrt(width)
    return logits
