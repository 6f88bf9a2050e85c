"""Rotations whose angles add up what every token between a key and its query turns.

Let B denote the batch, n the tokens of a side, H the heads, D the head width and F the pairs of
channels, D/2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.encodings.base import (
    HIGHEST,
    Dimensions,
    EncodingError,
    PositionalEncoding,
    Side,
    scaled_product,
)
from posenc.encodings.convolution import ShortConvolution
from posenc.encodings.forgetting import at_rows, sums_from_first_row
from posenc.encodings.rotary import rotate


class SelectiveRoPE(PositionalEncoding):
    """Selective RoPE (Movahedi et al., 2026), rotations by angles from content, as released.

    Every token t turns pair m (channels m and m + D/2) of all queries and keys from itself on by
    ``theta^(-2m/D) phi_m(t)``, so that a score depends on the sum of these angles over the tokens
    after the key, up to the query. phi is the layer's input, each head's share of its channels
    scaled to length 1, through a map of low rank and a short causal convolution. Position is read
    from slots; position values have no part in it.

    All weights start small, and phi with them: at first it is nearly NoPE. In the released code
    queries and keys get their norm, where there is one, after the rotation; here as always before.

    Args:
        dims: of the model; the head width must be even, the width a multiple of the heads.
        rngs: for the weights.
        rank: of the map from the layer's input to phi.
        conv: how many tokens the convolution reads.
        theta: the base of the temperatures, 500,000 as in the released configurations.
        gate: whether phi is multiplied by a sigmoid of the same input for every head; not so in the
            released configurations.
    """

    name = "selective_rope"
    pointwise = False
    bidirectional = False
    between = True
    per_layer = True
    shift_invariant = "exact"
    reference = """@inproceedings{movahedi2026selective,
  title={Selective Rotary Position Embedding},
  author={Movahedi, Sajad and Carstensen, Timur and Afzal, Arshia and Hutter, Frank and
          Orvieto, Antonio and Cevher, Volkan},
  booktitle={International Conference on Learning Representations},
  year={2026}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        rank: int = 32,
        conv: int = 4,
        theta: float = 500_000.0,
        gate: bool = False,
    ):
        super().__init__(dims, rngs)
        for option, value in (("rank", rank), ("conv", conv)):
            if value < 1:
                raise EncodingError(f"selective_rope({option}={value}): it must be at least 1")
        if theta <= 0:
            raise EncodingError(f"selective_rope needs theta > 0, and got {theta}")
        if dims.head_width % 2 or dims.width % dims.heads:
            raise EncodingError(
                f"selective_rope turns pairs of channels by shares of the layer's input, and the "
                f"head width is {dims.head_width}, the width {dims.width}, for {dims.heads} heads: "
                "choose an even head width and a width that the heads divide"
            )
        self.theta = theta

        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=bias,
                kernel_init=nnx.initializers.normal(0.02),
                dtype=jnp.float32,
                precision=HIGHEST,
                rngs=rngs,
            )

        angles = dims.heads * (dims.head_width // 2)
        self.down = linear(dims.width, rank, bias=False)
        self.up = linear(rank, angles, bias=False)
        self.conv = ShortConvolution(conv, angles, rngs)
        self.gate = linear(dims.width, dims.heads, bias=True) if gate else None

    @property
    def turns(self) -> bool:
        """Whether it rotates: it does, when scores are made."""
        return True

    def start_state(self, batch):
        """Start the convolution."""
        return self.conv.start(batch)

    def features(self, x, positions, segments, state):
        """Give by what angles each token turns, ``[B, n, H, F]``."""
        shares = x.astype(jnp.float32).reshape(*x.shape[:2], self.dims.heads, -1)
        squares = jnp.sum(shares**2, axis=-1, keepdims=True)
        unit = (shares * jax.lax.rsqrt(squares + 1e-6)).reshape(x.shape)
        phi, state = self.conv(self.up(self.down(unit)), segments, state)
        pairs = self.dims.head_width // 2
        phi = phi.reshape(*x.shape[:2], self.dims.heads, pairs)
        if self.gate is not None:
            phi = phi * jax.nn.sigmoid(self.gate(unit))[..., None]
        return phi * (self.theta ** (-np.arange(pairs) / pairs)).astype(np.float32), state

    def scores(self, queries: Side, keys: Side, visible):
        """Turn both sides by the sums of angles from the block's first row on."""
        width = queries.rotated.shape[-1]
        if width != self.dims.head_width:
            raise EncodingError(
                f"selective_rope turns channels as projected, {self.dims.head_width} a head, and "
                f"here are {width}: leave out what widens them"
            )
        angles = sums_from_first_row(keys.features, queries, keys)
        turned = [
            rotate(side.rotated, jnp.cos(own), jnp.sin(own), "half")
            for side, own in ((queries, at_rows(angles, queries, keys)), (keys, angles))
        ]
        return scaled_product(turned[0], turned[1], width)
