"""Encodings made of the attention logits themselves."""

from __future__ import annotations

import math

import numpy as np

from .case import Case, scaled_product


def sigmoid(z: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -z))


def cope(case: Case, positions: int = 64, scale: str = "ram") -> np.ndarray:
    """Contextual positions (Golovneva et al. 2024, arXiv 2405.18719).

    g_ik = sigmoid(q_i.k_k/sqrt(D)), p_ij = min(sum_{k=j..i} g_ik, positions - 1), and q_i.e[p_ij]
    by linear interpolation of q_i.e[n]. ``scale="ram"``: (q_i.k_j + q_i.e)/sqrt(D), as Meta's
    released code; ``"paper"``: q_i.k_j/sqrt(D) + q_i.e, as the paper's listing.
    """
    table = case.parameters["table"]  # [D, positions], shared by the heads
    product = scaled_product(case)
    logits = product.copy()
    for h in range(case.heads):
        for i in range(case.length):
            at = case.q[h, i] @ table  # q_i . e[n]
            count = 0.0
            for j in range(i, -1, -1):  # the gates of j and of all that follow it, i included
                count += sigmoid(product[h, i, j])
                p = min(count, positions - 1)
                low, high = math.floor(p), math.ceil(p)
                term = (p - low) * at[high] + (1 - (p - low)) * at[low]
                logits[h, i, j] += term / math.sqrt(case.head_width) if scale == "ram" else term
    return logits


def leaky(z: np.ndarray) -> np.ndarray:
    """LeakyReLU of slope 0.01."""
    return np.where(z > 0, z, 0.01 * z)


def along_keys(features: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """out[i, j] = sum_{tap=0..2} features[i, j - 1 + tap] kernel[tap], zeros outside [0, T)."""
    length = features.shape[1]
    out = np.zeros((*features.shape[:2], kernel.shape[2]))
    for j in range(length):
        for tap in range(3):
            if 0 <= j - 1 + tap < length:
                out[:, j] += features[:, j - 1 + tap] @ kernel[tap]
    return out


def dape(
    case: Case, bias: np.ndarray, version: int = 1, residual: bool = True, remask: bool = True
) -> np.ndarray:
    """a = qk + b + f([qk; b]), qk scaled (Zheng et al. 2024, arXiv 2405.14722 and 2410.04798).

    f mixes the heads: Linear(2H, W), LeakyReLU, Linear(W, H) at every (i, j); in version 2 both
    linear maps are 1x3 convolutions along the keys, of an input that is zero where j > i.
    ``residual=False`` omits + b. The release does not mask between the two (``remask=False``).
    """
    kernel, out = case.parameters["hidden.kernel"], case.parameters["out.kernel"]
    qk = scaled_product(case)
    features = np.concatenate([qk, bias]).transpose(1, 2, 0)  # [T, T, 2H]: qk, then the bias
    visible = np.tri(case.length)[:, :, None]  # j <= i
    if version == 1:
        hidden = leaky(features @ kernel + case.parameters["hidden.bias"])
        f = hidden @ out + case.parameters["out.bias"]
    else:
        features = np.where(visible > 0, features, 0.0)  # a bias may be nan above the diagonal
        hidden = leaky(along_keys(features, kernel) + case.parameters["hidden.bias"])
        if remask:
            hidden = hidden * visible
        f = along_keys(hidden, out) + case.parameters["out.bias"]
    return qk + f.transpose(2, 0, 1) + (bias if residual else 0.0)


def selective(case: Case, logits: np.ndarray | None = None) -> np.ndarray:
    """a_ij - F_ij, F_ij = sum_{k<i} S_kj (Leviathan et al. 2025, arXiv 2410.02703).

    S = relu of head 0's logits where j < k, zero on the diagonal (no token masks itself) and in
    column 0 (none masks BOS). Token k masks j for later queries only. All heads share F.
    """
    logits = scaled_product(case) if logits is None else logits
    masked = logits.copy()
    for i in range(case.length):
        for j in range(1, i):
            masked[:, i, j] -= sum(max(logits[0, k, j], 0.0) for k in range(j + 1, i))
    return masked


def stick_breaking(case: Case, attend_current: bool = False) -> np.ndarray:
    """WEIGHTS A_ij = s_ij prod_{j<k<i} (1 - s_ik), s = sigmoid(q.k/sqrt(D)) (arXiv 2410.17980).

    A query breaks what is left of a stick at each key, the nearest first; j < i strictly, or
    j <= i with ``attend_current``.
    """
    share = sigmoid(scaled_product(case))
    weights = np.zeros_like(share)
    for h in range(case.heads):
        for i in range(case.length):
            left = 1.0
            for j in range(i if attend_current else i - 1, -1, -1):
                weights[h, i, j] = share[h, i, j] * left
                left *= 1.0 - share[h, i, j]
    return weights
