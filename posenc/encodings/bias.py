"""Encodings that add a bias to the logits, from positions alone."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from posenc.encodings.base import Dimensions, PositionalEncoding


def distances(queries: Num[Array, "#B t"], keys: Num[Array, "#B S"]) -> Float[Array, "#B 1 t S"]:
    """Give ``max(p_i - p_j, 0)``, subtracted exactly and then cast to float32."""
    difference = queries[:, None, :, None] - keys[:, None, None, :]
    return jnp.maximum(difference, 0).astype(jnp.float32)


def alibi_slopes(heads: int) -> np.ndarray:
    """Give ALiBi's slope for each head, float64 ``[H]``.

    For a power of two ``2^(-8h/H)``, h = 1..H; otherwise the slopes of the next lower power of two,
    then every second one of the next higher's (Press et al., 2022, released code, ``get_slopes``).
    The list is not sorted, and that is as released.
    """
    lower = 2 ** int(np.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower + 1) / (2 * lower))[::2]
    return np.concatenate([slopes, between[: heads - lower]])


class ALiBi(PositionalEncoding):
    """Attention with linear biases (Press, Smith and Lewis, 2022, section 3).

    The logit falls by ``slope_h`` with every position between query and key; the bias is added
    after the scaling by ``1/sqrt(D)`` and never learned.

    Args:
        dims: of the model.
        rngs: unused.
    """

    name = "alibi"
    shift_invariant = "exact"
    bidirectional = False
    reference = """@inproceedings{press2022train,
  title={Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation},
  author={Press, Ofir and Smith, Noah A. and Lewis, Mike},
  booktitle={International Conference on Learning Representations},
  year={2022}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs):
        super().__init__(dims, rngs)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract slope times distance."""
        slopes = alibi_slopes(self.dims.heads).astype(np.float32)[None, :, None, None]
        return logits - slopes * distances(queries.positions, keys.positions), carry
