"""One sequence and one attention layer, as every definition takes them."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """What a definition may read, all in float64.

    ``x [T, M]`` is the layer's normed input, ``q``, ``k``, ``v`` ``[H, T, D]`` are as projected,
    ``positions [T]`` any numbers; ``parameters`` are the encoding's, by name.
    """

    x: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    positions: np.ndarray
    parameters: dict[str, np.ndarray]
    context_length: int

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def head_width(self) -> int:
        return self.q.shape[2]

    @property
    def width(self) -> int:
        return self.x.shape[1]


def scaled_product(case: Case) -> np.ndarray:
    """q_i . k_j / sqrt(D), [H, T, T]."""
    return np.einsum("htd,hsd->hts", case.q, case.k) / np.sqrt(case.head_width)


def distance(case: Case) -> np.ndarray:
    """max(p_i - p_j, 0), [T, T]."""
    positions = np.asarray(case.positions, np.float64)
    return np.maximum(positions[:, None] - positions[None, :], 0.0)
