"""Rotations accumulated from token to token, Selective RoPE among them."""

from __future__ import annotations

import math

import numpy as np

from .case import Case
from .contextual import sigmoid
from .path import short_convolution


def turn(vectors: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Rotate the planes (m, m + D/2) of [..., D] by angle [..., D/2]."""
    first, second = np.split(vectors, 2, axis=-1)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ],
        axis=-1,
    )


def rotated_logits(case: Case, angles: np.ndarray) -> np.ndarray:
    """q_i^T R(-(a_{j+1} + ... + a_i)) k_j / sqrt(D), angles [H, T, D/2]."""
    logits = np.zeros((case.heads, case.length, case.length))
    for i in range(case.length):
        for j in range(i + 1):
            path = angles[:, j + 1 : i + 1].sum(axis=1)
            logits[:, i, j] = (case.q[:, i] * turn(case.k[:, j], -path)).sum(axis=-1)
    return logits / math.sqrt(case.head_width)


def transported(case: Case, angles: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """OUTPUTS o_i = sum_{j<=i} w_ij R(-(a_{j+1} + ... + a_i)) v_j, [T, H, D]."""
    outputs = np.zeros((case.length, case.heads, case.head_width))
    for i in range(case.length):
        for j in range(i + 1):
            path = angles[:, j + 1 : i + 1].sum(axis=1)
            outputs[i] += weights[:, i, j, None] * turn(case.v[:, j], -path)
    return outputs


def selective_angles(
    case: Case, base: float = 500_000.0, gate: bool = False, epsilon: float = 1e-6
) -> np.ndarray:
    """theta_m phi_m(t), [H, T, D/2]: phi a convolved low-rank map of the input, unit by head."""
    chunks = case.x.reshape(case.length, case.heads, -1)
    chunks = chunks / np.sqrt((chunks**2).sum(axis=-1, keepdims=True) + epsilon)
    x = chunks.reshape(case.length, case.width)
    phi = x @ case.parameters["down.kernel"] @ case.parameters["up.kernel"]
    phi = short_convolution(phi, case.parameters["conv.kernel"])
    phi = phi.reshape(case.length, case.heads, -1).transpose(1, 0, 2)
    if gate:
        logits = x @ case.parameters["gate.kernel"] + case.parameters["gate.bias"]
        phi = phi * sigmoid(logits).T[:, :, None]
    return phi * base ** (-2.0 * np.arange(case.head_width // 2) / case.head_width)


def selective_rope(
    case: Case, base: float = 500_000.0, gate: bool = False, epsilon: float = 1e-6
) -> np.ndarray:
    """Selective RoPE (Movahedi et al., ICLR 2026, arXiv 2511.17388), as its authors released it."""
    return rotated_logits(case, selective_angles(case, base, gate, epsilon))
