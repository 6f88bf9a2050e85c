"""GRAPE's additive forms (Zhang et al., ICLR 2026, arXiv 2512.07805)."""

from __future__ import annotations

import math

import numpy as np

from .case import Case, distance, scaled_product
from .forgetting import log_sigmoid, softplus


def alibi_slopes(heads: int) -> np.ndarray:
    """2^(-8 (h+1)/H) for H a power of two, else filled with every other slope of the next one."""
    if heads & (heads - 1) == 0:
        return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    below = 2 ** int(math.log2(heads))
    return np.concatenate([alibi_slopes(below), alibi_slopes(2 * below)[::2][: heads - below]])


def grape_a(
    case: Case,
    variant: str = "qk",
    normalize: bool = True,
    slopes: np.ndarray | None = None,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """q.k/sqrt(D) - dist rate_h (softplus(v.q_i/sqrt(D)) + softplus(u.k_j/sqrt(D))), eq. 4.6.

    rate_h = softplus(omega_h) slope_h with ALiBi's slopes, and u, v of unit length, as released;
    variants "q" and "k" keep one gate.
    """
    slopes = alibi_slopes(case.heads) if slopes is None else slopes
    rate = softplus(case.parameters["omega"]) * slopes

    def gate(direction: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        if normalize:
            length = np.linalg.norm(direction, axis=-1, keepdims=True)
            direction = direction / np.maximum(length, epsilon)
        return softplus(np.einsum("hd,htd->ht", direction, vectors) / math.sqrt(case.head_width))

    gates = np.zeros((case.heads, case.length, case.length))
    if "q" in variant:
        gates += gate(case.parameters["v"], case.q)[:, :, None]
    if "k" in variant:
        gates += gate(case.parameters["u"], case.k)[:, None, :]
    return scaled_product(case) - rate[:, None, None] * distance(case) * gates


def grape_ap(case: Case, released: bool = False, epsilon: float = 1e-6) -> np.ndarray:
    """q.k/sqrt(D) + sum_{l=j+1..t} psi(t, l), eq. 5.1 to 5.3.

    psi(t, l) = alpha_h ln sigmoid(p_t . R_l p_l / R), p = RMSNorm(x P) of width R a head, without
    a scale. R_l turns every plane (m, m + R/2) by l radians, the key's absolute position. The
    released code leaves p_t as projected and turns the other way.
    """
    kernel, alpha = case.parameters["project.kernel"], case.parameters["alpha"]
    raw = (case.x @ kernel).reshape(case.length, case.heads, -1).transpose(1, 0, 2)
    width = raw.shape[-1]
    normed = raw / np.sqrt((raw**2).mean(axis=-1, keepdims=True) + epsilon)
    angle = np.asarray(case.positions, np.float64)[:, None] * (-1.0 if released else 1.0)
    first, second = normed[..., : width // 2], normed[..., width // 2 :]
    turned = np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            first * np.sin(angle) + second * np.cos(angle),
        ],
        axis=-1,
    )
    ends = raw if released else normed
    psi = alpha[:, None, None] * log_sigmoid(np.einsum("htr,hlr->htl", ends, turned) / width)
    bias = np.zeros_like(psi)
    for t in range(case.length):
        for j in range(t):
            bias[:, t, j] = psi[:, t, j + 1 : t + 1].sum(axis=1)
    return scaled_product(case) + bias
