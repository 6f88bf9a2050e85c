"""Biases of the logits by distance: a_ij = q_i.k_j / sqrt(D) + B_ij, and the window."""

from __future__ import annotations

import math

import numpy as np

from .case import Case, distance, scaled_product


def alibi_slopes(heads: int) -> np.ndarray:
    """m_h = 2^(-8h/H) for H a power of two; else those of c = 2^floor(log2 H), then every other
    one of the slopes for 2c. Press et al. 2022 (arXiv 2108.12409), released ``get_slopes``.
    """
    power = 2 ** int(math.log2(heads))
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    finer = [2.0 ** (-8.0 * h / (2 * power)) for h in range(1, 2 * power + 1)]
    return np.array((slopes + finer[0::2])[:heads])


def alibi(case: Case, slopes: np.ndarray | None = None) -> np.ndarray:
    """B_ij = -m_h (p_i - p_j). Press et al. 2022, section 3."""
    if slopes is None:
        slopes = case.parameters.get("slopes", alibi_slopes(case.heads))
    slopes = np.asarray(slopes, np.float64)
    return scaled_product(case) - slopes[:, None, None] * distance(case)


def t5_bucket(distance: np.ndarray, buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """With e = buckets / 2: n if n < e, else
    min(buckets - 1, e + floor(ln(n/e) / ln(max_distance/e) * (buckets - e))).
    Raffel et al. 2020 (arXiv 1910.10683), released causal form (``bidirectional=False``).
    """
    distance = np.asarray(distance)
    exact = buckets // 2
    # As released, the logarithm is taken in float32: another width could move a boundary.
    ratio = np.maximum(distance, exact).astype(np.float32) / np.float32(exact)
    step = np.log(ratio) / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + step.astype(np.int64), buckets - 1)
    return np.where(distance < exact, distance, far).astype(np.int64)


def t5(case: Case, buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """B_ij = table[bucket(p_i - p_j), h]. Raffel et al. 2020, with 1/sqrt(D) as in GPT ports."""
    bucket = t5_bucket(distance(case), buckets, max_distance)
    return scaled_product(case) + np.moveaxis(case.parameters["table"][bucket], -1, 0)


def kerple_log(case: Case) -> np.ndarray:
    """B = -r1 ln(1 + r2 delta). Chi et al. 2022 (arXiv 2205.09921), clamps of the released code."""
    r1 = np.maximum(case.parameters["r1"], 1e-2)[:, None, None]
    r2 = np.maximum(case.parameters["r2"], 1e-2)[:, None, None]
    return scaled_product(case) - r1 * np.log(1.0 + r2 * distance(case))


def kerple_power(case: Case) -> np.ndarray:
    """B = -r1 delta^r2. Chi et al. 2022 (arXiv 2205.09921), clamps of the released code."""
    r1 = np.maximum(case.parameters["r1"], 1e-2)[:, None, None]
    r2 = np.clip(case.parameters["r2"], 1e-2, 2.0)[:, None, None]
    return scaled_product(case) - r1 * distance(case) ** r2


def fire_ratio(
    distance: np.ndarray,
    query: np.ndarray,
    c: float = 0.1,
    threshold: float = 512.0,
    eps: float = 1e-6,
) -> np.ndarray:
    """psi(delta) / (psi(max(p_i, threshold)) + eps), psi(x) = ln(|c x| + 1). Li et al. 2024."""

    def psi(x: np.ndarray) -> np.ndarray:
        return np.log(np.abs(c * x) + 1.0)

    return psi(distance) / (psi(np.maximum(query, threshold)) + eps)


def fire(case: Case, threshold: float = 512.0, eps: float = 1e-6) -> np.ndarray:
    """B_ij = MLP(psi(delta) / (psi(max(p_i, |multiplier threshold|)) + eps)), a hidden ReLU layer.
    Li et al. 2024 (arXiv 2310.04418).
    """
    parameters = case.parameters
    query = np.asarray(case.positions, np.float64)[:, None]
    learned = np.abs(parameters["multiplier"] * threshold)
    ratio = fire_ratio(distance(case), query, parameters["c"], learned, eps)
    hidden = ratio[..., None] @ parameters["hidden.kernel"] + parameters["hidden.bias"]
    out = np.maximum(hidden, 0.0) @ parameters["out.kernel"] + parameters["out.bias"]
    return scaled_product(case) + np.moveaxis(out, -1, 0)


def sandwich_bias(distance: np.ndarray, heads: int, width: int = 128) -> np.ndarray:
    """B^h = (sum_{m=1..w/2} cos(delta / 10000^(2m/w)) - w/2) / (8h/H), h = 1..H, [H, ...].
    Chi et al. 2023 (arXiv 2212.10356).
    """
    distance = np.asarray(distance, np.float64)
    total = np.full(distance.shape, -width / 2)
    for m in range(1, width // 2 + 1):
        total += np.cos(distance / 10000.0 ** (2 * m / width))
    return np.stack([total / (8.0 * h / heads) for h in range(1, heads + 1)])


def sandwich(case: Case, width: int = 128) -> np.ndarray:
    """The bias of ``sandwich_bias`` at every distance."""
    return scaled_product(case) + sandwich_bias(distance(case), case.heads, width)


def window(case: Case, size: int, sinks: int = 0) -> np.ndarray:
    """-inf unless i - j < size or j < sinks, by slots."""
    i, j = np.indices((case.length, case.length))
    return np.where((i - j < size) | (j < sinks), scaled_product(case), -np.inf)
