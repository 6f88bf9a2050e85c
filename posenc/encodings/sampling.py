"""Which positions the tokens of a window get."""

from __future__ import annotations

import numpy as np


def sequential_positions(segments: np.ndarray) -> np.ndarray:
    """Count from 0 at the first slot of each segment.

    Args:
        segments: integers ``[..., T]``; equal neighbours belong together, 0 is padding.

    Returns:
        int32 ``[..., T]``; padding gets 0.
    """
    segments = np.asarray(segments)
    places = np.broadcast_to(np.arange(segments.shape[-1], dtype=np.int32), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    start = np.maximum.accumulate(np.where(begins, places, 0), axis=-1)
    return np.where(segments == 0, 0, places - start).astype(np.int32)
