"""Relative positions as vectors inside the product of query and key."""

from __future__ import annotations

import numpy as np

from .absolute import sinusoids
from .case import Case


def shaw_row(case: Case, clip: int, i: int, j: int) -> int:
    """clip(p_j - p_i, -k, k) + k; a fraction is cut towards the query."""
    return int(np.clip(case.positions[j] - case.positions[i], -clip, clip)) + clip


def shaw(case: Case, clip: int = 16, values: bool = False) -> np.ndarray:
    """a_ij = q_i.(k_j + a^K_{clip(j-i)}) / sqrt(D). Shaw et al. 2018 (arXiv 1803.02155), eq. 4.

    ``values`` is an option of the layer that does not reach the logits: see ``shaw_outputs``.
    """
    del values
    table = case.parameters["key_table"]
    logits = np.empty((case.heads, case.length, case.length))
    for i in range(case.length):
        for j in range(case.length):
            key = case.k[:, j] + table[shaw_row(case, clip, i, j)]
            logits[:, i, j] = np.sum(case.q[:, i] * key, axis=-1)
    return logits / np.sqrt(case.head_width)


def shaw_outputs(case: Case, clip: int = 16) -> np.ndarray:
    """o_i = sum_{j<=i} w_ij (v_j + a^V_{clip(j-i)}), w the softmax, [T, H, D]. Shaw, eq. 3."""
    table = case.parameters.get("value_table", np.zeros((2 * clip + 1, case.head_width)))
    logits = shaw(case, clip)
    out = np.zeros((case.length, case.heads, case.head_width))
    for h in range(case.heads):
        for i in range(case.length):
            row = np.exp(logits[h, i, : i + 1] - logits[h, i, : i + 1].max())
            for j, weight in enumerate(row / row.sum()):
                out[i, h] += weight * (case.v[h, j] + table[shaw_row(case, clip, i, j)])
    return out


def transformer_xl(case: Case, theta: float = 10000.0) -> np.ndarray:
    """a_ij = [(q_i + u).k_j + (q_i + v).(W r_{p_i - p_j})] / sqrt(D), r sines, then cosines.
    Dai et al. 2019 (arXiv 1901.02860), section 3.3.
    """
    u, v = case.parameters["u"], case.parameters["v"]
    kernel = case.parameters["position.kernel"]
    positions = np.asarray(case.positions, np.float64)
    logits = np.empty((case.heads, case.length, case.length))
    for i in range(case.length):
        r = sinusoids(positions[i] - positions, case.width, theta, "concatenated")
        relative = (r @ kernel).reshape(case.length, case.heads, case.head_width)
        for h in range(case.heads):
            content = case.k[h] @ (case.q[h, i] + u[h])
            logits[h, i] = content + relative[:, h] @ (case.q[h, i] + v[h])
    return logits / np.sqrt(case.head_width)
