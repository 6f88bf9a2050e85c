"""PaTH: products of data-dependent Householder-like matrices."""

from __future__ import annotations

import math

import numpy as np

from .case import Case
from .contextual import sigmoid
from .forgetting import forget_bias


def short_convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """y_t = sum_s kernel[s] x_{t - (S - 1) + s} a channel; the last tap is the current token."""
    taps = len(kernel)
    y = np.zeros_like(x)
    for t in range(len(x)):
        for s in range(taps):
            if t - (taps - 1) + s >= 0:
                y[t] += kernel[s] * x[t - (taps - 1) + s]
    return y


def directions(case: Case, epsilon: float = 1e-6) -> np.ndarray:
    """w_t, [H, T, D]: low-rank map, causal convolution, SiLU, L2 norm in each head."""
    low_rank = case.x @ case.parameters["down.kernel"] @ case.parameters["up.kernel"]
    mixed = short_convolution(low_rank, case.parameters["conv.kernel"])
    w = (mixed * sigmoid(mixed)).reshape(case.length, case.heads, case.head_width)
    w = w / np.sqrt((w**2).sum(axis=-1, keepdims=True) + epsilon)
    return w.transpose(1, 0, 2)


def strengths(case: Case) -> np.ndarray:
    """beta_t = 2 sigmoid(x_t U + b), [H, T]; 2 is a full reflection."""
    return 2 * sigmoid((case.x @ case.parameters["beta.kernel"] + case.parameters["beta.bias"]).T)


def transported_logits(case: Case, w: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """q_i^T H_i H_{i-1} ... H_{j+1} k_j / sqrt(D), H_t = I - beta_t w_t w_t^T."""
    logits = np.zeros((case.heads, case.length, case.length))
    for h in range(case.heads):
        for i in range(case.length):
            product = np.eye(case.head_width)
            for j in range(i, -1, -1):
                logits[h, i, j] = case.q[h, i] @ product @ case.k[h, j]
                reflection = np.eye(case.head_width) - beta[h, j] * np.outer(w[h, j], w[h, j])
                product = product @ reflection  # H_j comes in for the keys before j
    return logits / math.sqrt(case.head_width)


def path(case: Case, epsilon: float = 1e-6) -> np.ndarray:
    """PaTH attention (Yang et al. 2025, arXiv 2505.16381); projections as in its release, fla."""
    return transported_logits(case, directions(case, epsilon), strengths(case))


def path_fox(case: Case, epsilon: float = 1e-6, gate_scale: float = 1.0) -> np.ndarray:
    """PaTH plus FoX's content bias; fla also scales the bias, by 1/sqrt(D)."""
    return path(case, epsilon) + gate_scale * forget_bias(case)
