"""A short convolution over the tokens before, for features of a layer's input.

Let B denote the batch, n the tokens, s the tokens kept between calls and C the channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class ShortConvolution(nnx.Module):
    """A causal convolution of every channel over the last tokens of a segment.

    Args:
        taps: how many tokens it reads; the last tap is the current one's.
        channels: C.
        rngs: for the taps.
    """

    def __init__(self, taps: int, channels: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(0.02 * jax.random.normal(rngs.params(), (taps, channels)))

    def start(self, batch: int) -> tuple[Float[Array, "B s C"], Int[Array, "B s"]]:
        """Give the inputs before the first token, which are of no segment, and their segments."""
        taps, channels = self.kernel.shape
        return jnp.zeros((batch, taps - 1, channels)), jnp.zeros((batch, taps - 1), jnp.int32)

    def __call__(self, x: Float[Array, "B n C"], segments: Int[Array, "#B n"], state):
        """Give the outputs, and the last inputs and their segments to go on from."""
        tokens = x.shape[1]
        segments = jnp.broadcast_to(segments, x.shape[:2])
        x, owners = (
            jnp.concatenate(both, axis=1) for both in zip(state, (x, segments), strict=True)
        )
        mixed = jnp.zeros(())
        for tap, weights in enumerate(self.kernel[...]):
            own = owners[:, tap : tap + tokens] == segments
            mixed = mixed + weights * jnp.where(own[..., None], x[:, tap : tap + tokens], 0.0)
        return mixed, (x[:, tokens:], owners[:, tokens:])
