"""Encodings that rotate queries and keys."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Num

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding, Side


def rope_inv_freq(width: int, theta: float) -> np.ndarray:
    """Give RoPE's angular frequencies ``theta^(-2m/width)``, float64 ``[width / 2]``."""
    return theta ** (-2 * np.arange(width // 2) / width)


def rope_angles(
    positions: Num[Array, "B n"], inv_freq: np.ndarray
) -> tuple[Float[Array, "B n F"], Float[Array, "B n F"]]:
    """Give cosine and sine of ``position * inv_freq`` in float32.

    The product is elementwise, never a matrix product that a lower default precision would round;
    float32 phases err by at most ``p * 2^-23`` radians at position p.
    """
    angles = positions.astype(jnp.float32)[..., None] * inv_freq.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B n H D"],
    cos: Float[Array, "#B n F"],
    sin: Float[Array, "#B n F"],
    pairing: str,
) -> Float[Array, "B n H D"]:
    """Rotate channel pairs of ``x`` by the given angles, in float32, cast once at the end.

    ``half`` pairs channel m with m + D/2 (GPT-NeoX); ``interleaved`` pairs 2m with 2m + 1
    (RoFormer). The two are one function under a fixed permutation of the channels.
    """
    wide = x.astype(jnp.float32)
    cos, sin = cos[..., None, :], sin[..., None, :]
    if pairing == "half":
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(x.shape)
    return turned.astype(x.dtype)


class RoPE(PositionalEncoding):
    """Rotary position embedding (Su et al., 2021, equations 14 to 16).

    Channel pair m of every query and key is rotated by ``p * theta^(-2m/D)``, so that their product
    depends on the difference of their positions.

    Args:
        dims: of the model; the head width must be even.
        rngs: unused.
        theta: the base of the frequencies (``rope_theta``).
        pairing: which channels make a pair, ``half`` or ``interleaved``.
    """

    name = "rope"
    shift_invariant = "rounding"
    reference = """@article{su2021roformer,
  title={RoFormer: Enhanced Transformer with Rotary Position Embedding},
  author={Su, Jianlin and Lu, Yu and Pan, Shengfeng and Murtadha, Ahmed and Wen, Bo and
          Liu, Yunfeng},
  journal={arXiv preprint arXiv:2104.09864},
  year={2021}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        pairing: str = "half",
    ):
        super().__init__(dims, rngs)
        if dims.head_width % 2:
            raise EncodingError(
                f"rope rotates channels in pairs, and the head width is {dims.head_width} "
                f"(width {dims.width} / {dims.heads} heads): choose an even one"
            )
        if pairing not in ("half", "interleaved"):
            raise EncodingError(f"rope has no pairing {pairing!r}: half, interleaved")
        if theta <= 0:
            raise EncodingError(f"rope needs theta > 0, and got {theta}")
        self.theta = theta
        self.pairing = pairing

    def prepare(self, positions, streams):
        """Give cosine and sine of every angle, shared by all layers."""
        return rope_angles(positions, rope_inv_freq(self.dims.head_width, self.theta))

    def rotate_queries(self, queries: Side):
        """Rotate by the queries' positions."""
        cos, sin = queries.prepared
        return rotate(queries.x, cos, sin, self.pairing)

    def rotate_keys(self, keys: Side):
        """Rotate by the keys' positions."""
        cos, sin = keys.prepared
        return rotate(keys.x, cos, sin, self.pairing)
