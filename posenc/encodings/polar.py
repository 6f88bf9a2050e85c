"""Encodings that keep content in magnitudes and position in phases.

Let B denote the batch, n the tokens of a side, H the heads and D the head width.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.encodings.base import Dimensions, EncodingError, Side
from posenc.encodings.bias import held
from posenc.encodings.rotary import Rotary
from posenc.encodings.scaling import Scaling

INITS = ("zeros", "uniform")


class PoPE(Rotary):
    """Polar coordinate position embedding (Gopalakrishnan et al., 2025).

    Each of the D channels becomes a complex number: its magnitude is the channel's softplus, its
    phase the position times ``theta^(-c/D)``, and for keys a learned phase besides. A score is the
    sum over channels of ``softplus(q_c) softplus(k_c) cos((p_j - p_i) theta^(-c/D) + phase_c)``
    over ``sqrt(D)``. Magnitudes are above 0, so that scores at distance 0 are too.

    The sign of the phase is that of the public reimplementation, which adds it to the key's angle.
    It is held within ``[-2 pi, 0]``; its gradient passes as though it were not, so that a phase
    that has left comes back.

    Args:
        dims: of the model.
        rngs: where the initial phases come from.
        theta: the base of the frequencies.
        init: of the phases of each layer, ``[H, D]``: ``zeros``, or ``uniform`` over their range.
        scaling: a way to rescale the frequencies, whose spectrum is of width 2D.
    """

    name = "pope"
    per_layer = True
    widens = True
    reference = """@article{gopalakrishnan2025decoupling,
  title={Decoupling the ``What'' and ``Where'' With Polar Coordinate Positional Embeddings},
  author={Gopalakrishnan, Anand and Csord{\\'a}s, R{\\'o}bert and Schmidhuber, J{\\"u}rgen and
          Mozer, Michael C.},
  journal={arXiv preprint arXiv:2509.10534},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        init: str = "zeros",
        scaling: Scaling | None = None,
    ):
        super().__init__(dims, rngs, theta=theta, rotated=2 * dims.head_width, scaling=scaling)
        if init not in INITS:
            raise EncodingError(f"pope has no init {init!r}: {', '.join(INITS)}")
        shape = (dims.heads, dims.head_width)
        phase = jnp.zeros(shape)
        if init == "uniform":
            phase = jax.random.uniform(rngs.params(), shape, minval=-2 * math.pi, maxval=0.0)
        self.phase = nnx.Param(phase)

    def _polar(self, side: Side, phase):
        """Rotate complex numbers of given phases, all real parts and then all imaginary ones."""
        magnitude = jax.nn.softplus(side.x.astype(jnp.float32))
        parts = [magnitude * jnp.cos(phase), magnitude * jnp.sin(phase)]
        turned = self._rotate(dataclasses.replace(side, x=jnp.concatenate(parts, axis=-1)))
        # Those that are yet to be turned, as the query's length says, are cast by no one.
        return turned if self._by_query else turned.astype(side.x.dtype)

    def rotate_queries(self, queries: Side):
        """Give complex numbers whose phases are the queries' positions, 2D wide."""
        return self._polar(queries, jnp.zeros((self.dims.heads, self.dims.head_width)))

    def rotate_keys(self, keys: Side):
        """Give complex numbers whose phases are the keys' positions and the learned phases."""
        return self._polar(keys, held(self.phase[...], -2 * math.pi, 0.0))
