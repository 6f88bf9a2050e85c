"""Running sums of gates: FoX and Cable."""

from __future__ import annotations

import numpy as np

from .case import Case, scaled_product


def log_sigmoid(z: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0.0, -z)


def softplus(z: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, z)


def between(steps: np.ndarray) -> np.ndarray:
    """B_ij = sum_{l=j+1..i} steps_l, [H, T, T] of steps [H, T]; zero where j >= i."""
    heads, length = steps.shape
    total = np.zeros((heads, length, length))
    for i in range(length):
        for j in range(i):
            total[:, i, j] = steps[:, j + 1 : i + 1].sum(axis=1)
    return total


def gate_logits(case: Case) -> np.ndarray:
    """x_t W + b, [H, T]."""
    return (case.x @ case.parameters["gate.kernel"] + case.parameters["gate.bias"]).T


def forget_bias(case: Case, gate: str = "content", slopes: np.ndarray | None = None) -> np.ndarray:
    """sum_{l=j+1..i} ln f_l, f = sigmoid(x W + b), sigmoid(b), or exp(-slope)."""
    if gate == "content":
        log_f = log_sigmoid(gate_logits(case))
    else:
        constant = -np.asarray(slopes) if gate == "fixed" else log_sigmoid(case.parameters["bias"])
        log_f = np.repeat(constant[:, None], case.length, axis=1)
    return between(log_f)


def fox(case: Case, gate: str = "content", slopes: np.ndarray | None = None) -> np.ndarray:
    """a_ij = q_i.k_j/sqrt(D) + sum_{l=j+1..i} ln f_l (Lin et al. 2025, arXiv 2503.02130)."""
    return scaled_product(case) + forget_bias(case, gate, slopes)


def fox_slopes(heads: int, shortest: float, longest: float) -> np.ndarray:
    """1/T_h, T_h log-spaced over the heads, both ends included (FoX's fixed gates)."""
    return 1.0 / np.geomspace(shortest, longest, heads)


def cable(case: Case, scaled: bool = True) -> np.ndarray:
    """a_ij = q_i.k_j/sqrt(D) - sum_{l=j+1..i} softplus(x_l W + b) (arXiv 2503.08067).

    The released code has no 1/sqrt(D): ``scaled=False``.
    """
    product = scaled_product(case) * (1.0 if scaled else np.sqrt(case.head_width))
    return product + between(-softplus(gate_logits(case)))
