"""Encodings that give relative positions as vectors inside the product of query and key.

Let B denote the batch, t the query rows of one block, S the keys, H the heads, D the head width and
M the model width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding, Side
from posenc.encodings.rotary import from_first_row, rope_angles
from posenc.encodings.scaling import spectrum


class Shaw(PositionalEncoding):
    """A learned vector for every clipped distance, added to keys (Shaw et al., 2018, eq. 3 and 4).

    ``q_i . (k_j + a_r) / sqrt(D)`` with ``r = clip(p_j - p_i, -clip, clip)``, a fraction being cut
    towards the query; and with ``values`` the weighted sum is of ``v_j + b_r``. The vectors are
    shared by the heads of a layer. Under the causal mask half of them are for keys that come later
    and are not seen, unless positions fall.

    Args:
        dims: of the model.
        rngs: where the initial vectors come from.
        clip: the longest distance that is told from longer ones (k in the paper).
        values: whether values have vectors too.
        init_std: of the initial vectors.
    """

    name = "shaw"
    shift_invariant = "exact"
    per_layer = True
    reference = """@inproceedings{shaw2018self,
  title={Self-Attention with Relative Position Representations},
  author={Shaw, Peter and Uszkoreit, Jakob and Vaswani, Ashish},
  booktitle={Conference of the North American Chapter of the Association for Computational
             Linguistics: Human Language Technologies},
  year={2018}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        clip: int = 16,
        values: bool = False,
        init_std: float = 0.02,
    ):
        super().__init__(dims, rngs)
        if clip < 0:
            raise EncodingError(f"shaw(clip={clip}): it must be at least 0")
        self.clip = clip
        self.values = values
        shape = (2 * clip + 1, dims.head_width)
        self.key_table = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))
        if values:
            self.value_table = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))

    def replaces(self, hook: str) -> bool:
        """Say which hooks are its own: the mix only with vectors for values."""
        return self.values if hook == "mix" else super().replaces(hook)

    def _rows(self, queries: Side, keys: Side) -> Int[Array, "#B 1 t S"]:
        apart = keys.positions[:, None, None, :] - queries.positions[:, None, :, None]
        # The cast cuts a fraction off, towards 0.
        return jnp.clip(apart, -self.clip, self.clip).astype(jnp.int32) + self.clip

    def scores(self, queries, keys, visible):
        """Add the product of query and vector, made for every row of the table and then picked."""
        products = jnp.einsum(
            "bthd,rd->bhtr",
            queries.x.astype(jnp.float32),
            self.key_table[...],
            precision=HIGHEST,
        )
        picked = jnp.take_along_axis(products, self._rows(queries, keys), axis=-1)
        return super().scores(queries, keys, visible) + picked * queries.x.shape[-1] ** -0.5

    def mix(self, weights, values, queries, keys):
        """Add each row of the table times the weight of all keys at its distance."""
        if not self.values:
            return super().mix(weights, values, queries, keys)
        rows = jnp.broadcast_to(self._rows(queries, keys), weights.shape)
        batch, heads, length, _ = weights.shape
        index = jnp.ogrid[:batch, :heads, :length]
        summed = jnp.zeros((batch, heads, length, len(self.value_table)), jnp.float32)
        summed = summed.at[*(axis[..., None] for axis in index), rows].add(weights)
        mixed = jnp.einsum(
            "bhts,bshd->bthd",
            weights.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        mixed += jnp.einsum("bhtr,rd->bthd", summed, self.value_table[...], precision=HIGHEST)
        return mixed.astype(values.dtype)


class TransformerXL(PositionalEncoding):
    """A projected sinusoid of the distance as a second key (Dai et al., 2019, section 3.3).

    ``[(q_i + u) . k_j + (q_i + v) . (W r)] / sqrt(D)``, r being sines and then cosines of ``p_i -
    p_j``, which has a sign; M of them. ``u`` and ``v`` are each head's own, and all three are each
    layer's.

    The released code makes ``W r`` for every distance in turn, and shifts rows into place, which
    needs positions that follow one another. Here sines and cosines of a difference are split into
    those of its two positions, so that positions may be any and memory grows with S.

    Args:
        dims: of the model; the width must be even.
        rngs: where the initial parameters come from.
        theta: the base of the frequencies.
        init_std: of the initial parameters.
    """

    name = "transformer_xl"
    shift_invariant = "exact"
    per_layer = True
    decayed = ("position.kernel",)
    reference = """@inproceedings{dai2019transformer,
  title={{Transformer-XL}: Attentive Language Models beyond a Fixed-Length Context},
  author={Dai, Zihang and Yang, Zhilin and Yang, Yiming and Carbonell, Jaime and Le, Quoc V. and
          Salakhutdinov, Ruslan},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2019}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        init_std: float = 0.02,
    ):
        super().__init__(dims, rngs)
        if dims.width % 2:
            raise EncodingError(f"transformer_xl needs an even model width, and got {dims.width}")
        if theta <= 0:
            raise EncodingError(f"transformer_xl needs theta > 0, and got {theta}")
        self.theta = theta
        shape = (dims.heads, dims.head_width)
        self.u = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))
        self.v = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))
        self.position = nnx.Linear(
            dims.width,
            dims.heads * dims.head_width,
            use_bias=False,
            kernel_init=nnx.initializers.normal(init_std),
            rngs=rngs,
        )

    def scores(self, queries, keys, visible):
        """Add the products of both biases and of the distance, in float32."""
        scale = queries.x.shape[-1] ** -0.5
        by_key = jnp.einsum(
            "hd,bshd->bhs", self.u[...], keys.x.astype(jnp.float32), precision=HIGHEST
        )
        # What a query has for the sine and for the cosine of every frequency.
        shape = (self.dims.width, self.dims.heads, self.dims.head_width)
        sines, cosines = jnp.split(
            jnp.einsum(
                "bthd,mhd->bthm",
                queries.x.astype(jnp.float32) + self.v[...],
                self.position.kernel[...].reshape(shape),
                precision=HIGHEST,
            ),
            2,
            axis=-1,
        )
        inv_freq = spectrum(self.dims.width, self.theta)
        # Counted from the block's first rows: exact for integers, and phases stay small.
        own_cos, own_sin = (
            wave[:, :, None, :] for wave in rope_angles(from_first_row(queries, queries), inv_freq)
        )
        their_cos, their_sin = rope_angles(from_first_row(keys, queries), inv_freq)
        # sin(a - b) and cos(a - b), by the sine and cosine of b, which all heads share.
        for_cos = sines * own_sin + cosines * own_cos
        for_sin = cosines * own_sin - sines * own_cos
        by_distance = jnp.einsum(
            "bthm,bsm->bhts",
            jnp.concatenate([for_cos, for_sin], axis=-1),
            jnp.concatenate([their_cos, their_sin], axis=-1),
            precision=HIGHEST,
        )
        added = (by_key[:, :, None, :] + by_distance) * scale
        return super().scores(queries, keys, visible) + added
