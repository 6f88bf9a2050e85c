"""GRAPE's additive forms: a slope of position told by content, and a sum along the path.

Let B denote the batch, t the query rows of one block, S the keys, H the heads, D the head width and
R the width of a probe.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding
from posenc.encodings.bias import alibi_slopes, distances
from posenc.encodings.rotary import rope_angles, rotate
from posenc.encodings.running import sums_after

VARIANTS = ("qk", "q", "k")
REFERENCE = """@inproceedings{zhang2026group,
  title={Group Representational Position Encoding},
  author={Zhang, Yifan and Chen, Zixiang and Liu, Yifeng and Qin, Zhen and Yuan, Huizhuo and
          Xu, Kangping and Yuan, Yang and Gu, Quanquan and Yao, Andrew Chi-Chih},
  booktitle={International Conference on Learning Representations},
  year={2026}
}"""


class GrapeA(PositionalEncoding):
    """GRAPE-A, ALiBi with slopes that content opens and shuts (Zhang et al., 2026, equation 4.6).

    With every position between them the logit falls by ``w_h`` times
    ``softplus(v_h . q / sqrt(D)) + softplus(u_h . k / sqrt(D))``. As released, v and u count by
    their direction alone, and ``w_h`` is a softplus, at first 1, times ALiBi's slope; the paper
    writes neither (``released=false``). With v and u nought it is ALiBi, 2 ln 2 times as steep.

    Args:
        dims: of the model.
        rngs: for v and u.
        variant: whose gates there are, the query's and the key's (``qk``) or one of them.
        released: whether v and u are normalised and ALiBi's slopes are there.
    """

    name = "grape_a"
    per_layer = True
    bidirectional = False
    shift_invariant = "exact"
    reference = REFERENCE

    def __init__(
        self, dims: Dimensions, rngs: nnx.Rngs, *, variant: str = "qk", released: bool = True
    ):
        super().__init__(dims, rngs)
        if variant not in VARIANTS:
            raise EncodingError(f"grape_a has no variant {variant!r}: {', '.join(VARIANTS)}")
        self.released = released
        self.omega = nnx.Param(jnp.full((dims.heads,), np.log(np.expm1(1.0)), jnp.float32))
        shape = (dims.heads, dims.head_width)

        def direction() -> nnx.Param:
            return nnx.Param(dims.head_width**-0.5 * jax.random.normal(rngs.params(), shape))

        self.v = direction() if "q" in variant else None
        self.u = direction() if "k" in variant else None

    def _gate(self, direction: nnx.Param, x: Float[Array, "B n H D"]) -> Float[Array, "B H n"]:
        towards = direction[...]
        if self.released:
            squares = jnp.sum(towards**2, axis=-1, keepdims=True)
            towards = towards * jax.lax.rsqrt(jnp.maximum(squares, 1e-12))
        product = jnp.einsum("hd,bnhd->bhn", towards, x.astype(jnp.float32), precision=HIGHEST)
        return jax.nn.softplus(product * x.shape[-1] ** -0.5)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract distance times slope times gates."""
        slopes = jax.nn.softplus(self.omega[...])
        if self.released:
            slopes = slopes * alibi_slopes(self.dims.heads).astype(np.float32)
        gates = jnp.zeros(())
        if self.v is not None:
            gates = gates + self._gate(self.v, queries.x)[:, :, :, None]
        if self.u is not None:
            gates = gates + self._gate(self.u, keys.x)[:, :, None, :]
        away = distances(queries.positions, keys.positions)
        return logits - away * (slopes[None, :, None, None] * gates), carry


class GrapeAP(PositionalEncoding):
    """GRAPE-AP, a bias that is summed along the path (Zhang et al., 2026, equations 5.1 to 5.3).

    Every token l after the key, up to the query t, adds ``a_h ln sigmoid(p_t . R_l p_l / R)``. The
    probes p, R wide in every head, are a projection of the layer's input, scaled to a root mean
    square of 1; ``R_l`` turns every pair of their channels, m and m + R/2, by l radians, l being
    the position of the token itself: so a shift of all positions changes the bias.

    In the released code the query's probe is not scaled, pairs turn the other way, and a stays at
    ALiBi's slopes, where it starts here (``released=true``). Nothing keeps a learned a above 0.

    Args:
        dims: of the model.
        rngs: for the projection.
        width: R, even.
        released: whether it is as in the released code.
    """

    name = "grape_ap"
    per_layer = True
    pointwise = False
    bidirectional = False
    between = True
    reference = REFERENCE

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, width: int = 8, released: bool = False):
        super().__init__(dims, rngs)
        if width < 2 or width % 2:
            raise EncodingError(f"grape_ap(width={width}): it turns pairs of channels; an even one")
        self.width, self.released = width, released
        self.project = nnx.Linear(
            dims.width,
            dims.heads * width,
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.5 * dims.width**-0.5),
            dtype=jnp.float32,
            precision=HIGHEST,
            rngs=rngs,
        )
        slopes = jnp.asarray(alibi_slopes(dims.heads), jnp.float32)
        self.alpha = None if released else nnx.Param(slopes)

    def prepare(self, positions, streams):
        """Give cosine and sine of every position in radians."""
        cos, sin = rope_angles(positions, np.ones(self.width // 2))
        return cos[..., None, :], (-sin if self.released else sin)[..., None, :]

    def features(self, x, positions, segments, state):
        """Give the probes as projected."""
        probes = self.project(x.astype(jnp.float32))
        return probes.reshape(*x.shape[:2], self.dims.heads, self.width), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add what all tokens after the key add, the query's own included."""

        def scaled(probes):
            squares = jnp.mean(probes**2, axis=-1, keepdims=True)
            return probes * jax.lax.rsqrt(squares + 1e-6)

        cos, sin = keys.prepared
        turned = rotate(scaled(keys.features), cos, sin, "half")
        ends = queries.features if self.released else scaled(queries.features)
        product = jnp.einsum("bthr,bshr->bhts", ends, turned, precision=HIGHEST) / self.width
        slopes = alibi_slopes(self.dims.heads).astype(np.float32)
        alpha = slopes if self.alpha is None else self.alpha[...]
        steps = alpha[None, :, None, None] * jax.nn.log_sigmoid(product)
        return logits + sums_after(jnp.where(visible, steps, 0.0)), carry
