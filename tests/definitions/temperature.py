"""Factors on the logits, by row or by distance, and what stands in for the softmax."""

from __future__ import annotations

import math

import numpy as np

from .case import Case, distance
from .forgetting import softplus


def logn(logits: np.ndarray, case: Case, length: float | None = None) -> np.ndarray:
    """Row i times max(1, ln(p_i + 1) / ln(length)). Su 2021; ``bojone/rerope``."""
    length = case.context_length if length is None else length
    positions = np.asarray(case.positions, np.float64)
    factor = np.maximum(1.0, np.log(positions + 1.0) / math.log(length))
    return logits * factor[None, :, None]


def ssmax(logits: np.ndarray, case: Case) -> np.ndarray:
    """Row i times s_h ln(n_i), n_i = i + 1 visible keys. Nakanishi 2025 (arXiv 2501.19399)."""
    visible = np.arange(1, case.length + 1)
    return logits * case.parameters["s"][:, None, None] * np.log(visible)[None, :, None]


def yarn_temperature(logits: np.ndarray, factor: float) -> np.ndarray:
    """Times (0.1 ln s + 1)^2, the square of YaRN's mscale. Peng et al. 2024 (arXiv 2309.00071)."""
    return logits * (0.1 * math.log(factor) + 1.0) ** 2


def learned_sink(logits: np.ndarray, case: Case) -> np.ndarray:
    """w_ij = exp(a_ij) / (exp(sink_h) + sum_{k<=i} exp(a_ik)), weights [H, T, T], 0 for j > i.
    As gpt-oss (OpenAI 2025): one more key of logit sink_h and no value.
    """
    weights = np.zeros_like(logits)
    for h, sink in enumerate(case.parameters["sink"]):
        for i in range(case.length):
            row = logits[h, i, : i + 1]
            top = max(row.max(), sink)
            weights[h, i, : i + 1] = np.exp(row - top)
            weights[h, i] /= np.exp(sink - top) + weights[h, i].sum()
    return weights


def scale_invariant(logits: np.ndarray, case: Case, tau: float = 10.0) -> np.ndarray:
    """a_t S + m_t, a_t^2 = 2 (ln(t/tau + 1) - ln alpha + beta/alpha), m_t = -a_t^2 + beta/alpha,
    t = p_i - p_j, where a_0 = 1 and m_0 = 0, so that alpha = beta = e^0.5.
    Anson et al. 2025 (arXiv 2505.17083), eq. 16.
    """
    alpha = beta = math.exp(0.5)
    squared = 2 * (np.log(distance(case) / tau + 1) - math.log(alpha) + beta / alpha)
    return np.sqrt(squared) * logits - squared + beta / alpha


def entmax15(rows: np.ndarray) -> np.ndarray:
    """max(z/2 - theta, 0)^2 with the theta that makes rows add up to 1, found by halving.
    Peters et al. 2019 (arXiv 1905.05702), alpha = 1.5. What is -inf has no weight.
    """
    half = rows / 2
    low = half.max(axis=-1, keepdims=True) - 1  # the largest alone then weighs 1
    high = low + 1
    for _ in range(60):
        middle = (low + high) / 2
        above = (np.maximum(half - middle, 0) ** 2).sum(axis=-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.maximum(half - low, 0) ** 2


def causal_entmax15(logits: np.ndarray, case: Case) -> np.ndarray:
    """1.5-entmax over j <= i, weights [H, T, T]."""
    return entmax15(np.where(np.tri(case.length, dtype=bool), logits, -np.inf))


def adaptive_scale(logits: np.ndarray, case: Case) -> np.ndarray:
    """Row i times 1 + beta_i (ln(n_i + 1))^gamma_i, n_i = i + 1 visible keys,
    beta = softplus(x W_beta), gamma = 2 tanh(x W_gamma). Vasylenko et al. 2026 (arXiv 2506.16640);
    ``deep-spin/asentmax``, where the log begins at ln 2, for ln 1 = 0.
    """
    beta = softplus(case.x @ case.parameters["beta.kernel"]).T
    gamma = 2 * np.tanh(case.x @ case.parameters["gamma.kernel"]).T
    log_length = np.log(np.arange(1, case.length + 1) + 1.0)
    return logits * (1 + beta * log_length**gamma)[:, :, None]


def asentmax(logits: np.ndarray, case: Case) -> np.ndarray:
    """1.5-entmax of the scaled logits, weights [H, T, T]."""
    return causal_entmax15(adaptive_scale(logits, case), case)
