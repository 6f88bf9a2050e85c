"""Encodings that act on the token embeddings, once, before the first block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding


class LearnedAbsolute(PositionalEncoding):
    """A learned vector for every position, added to the token embedding (GPT-2's ``wpe``).

    Radford et al., 2019: ``h_p = wte[token] + wpe[p]``. The table is the only weight of GPT-2 that
    has a position axis, and beyond its rows there is nothing to add.

    Args:
        dims: of the model; the table has ``dims.context_length`` rows unless told otherwise.
        rngs: where the initial rows come from.
        max_position: rows of the table.
        init_std: of the initial rows, 0.01 as in the released GPT-2 code.
    """

    name = "wpe"
    extensions = ("clamp", "interpolate", "wrap", "fresh")
    reference = """@techreport{radford2019language,
  title={Language Models are Unsupervised Multitask Learners},
  author={Radford, Alec and Wu, Jeffrey and Child, Rewon and Luan, David and Amodei, Dario and
          Sutskever, Ilya},
  institution={OpenAI},
  year={2019}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        max_position: int | None = None,
        init_std: float = 0.01,
    ):
        super().__init__(dims, rngs)
        rows = dims.context_length if max_position is None else max_position
        if rows < 1:
            raise EncodingError(f"wpe(max_position={rows}) has no row: it needs at least 1")
        self.max_position = rows
        self.init_std = init_std
        self.table = nnx.Param(init_std * jax.random.normal(rngs.params(), (rows, dims.width)))

    def embed(self, x, positions, streams):
        """Add ``table[p]``; an unrepresentable p reads a clamped row and is made NaN at the end."""
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise EncodingError(
                f"wpe has rows at whole positions only, and got positions of {positions.dtype}"
            )
        rows = self.table[...][jnp.clip(positions, 0, self.table.shape[0] - 1)]
        return (x.astype(jnp.float32) + rows).astype(x.dtype)

    def representable(self, positions):
        """Say which positions are rows of the table; fractions are not."""
        within = super().representable(positions)
        return within & (positions == positions // 1)

    def extended(self, policy: str, length: int, /, **options: Any) -> LearnedAbsolute:
        """Give a table of ``length`` rows made from the trained one.

        Args:
            policy: ``clamp`` repeats the last row; ``wrap`` starts again at row 0;
                ``interpolate`` stretches the whole table linearly over the new length;
                ``fresh`` appends new random rows, drawn as at initialisation.
            length: rows of the new table; a length that the table has is given back as it is.
            **options: ``seed`` for ``fresh`` (default 0).

        Raises:
            EncodingError: an unknown policy or option.
        """
        if policy not in self.extensions:
            return super().extended(policy, length)  # type: ignore[return-value]  # raises
        unknown = set(options) - ({"seed"} if policy == "fresh" else set())
        if unknown:
            raise EncodingError(f"extension policy {policy} has no option {sorted(unknown)[0]!r}")
        seed = options.get("seed", 0)
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise EncodingError(
                f"extension policy fresh takes a whole number as seed, not {seed!r}"
            )
        table, rows = self.table[...], self.table.shape[0]
        if length <= rows:
            return self
        wanted = jnp.arange(length)
        if policy == "clamp":
            longer = table[jnp.minimum(wanted, rows - 1)]
        elif policy == "wrap":
            longer = table[wanted % rows]
        elif policy == "interpolate":
            # Ends meet ends: row 0 stays row 0 and the last row becomes the last row.
            place = np.arange(length) * ((rows - 1) / (length - 1))
            below = np.minimum(place.astype(np.int64), max(rows - 2, 0))
            share = jnp.asarray(place - below, jnp.float32)[:, None]
            longer = (1 - share) * table[below] + share * table[np.minimum(below + 1, rows - 1)]
        else:
            key = jax.random.key(seed)
            new = self.init_std * jax.random.normal(key, (length - rows, table.shape[1]))
            longer = jnp.concatenate([table, new])
        grown = type(self)(self.dims, nnx.Rngs(0), max_position=length, init_std=self.init_std)
        grown.table[...] = longer
        return grown


class Sinusoidal(PositionalEncoding):
    """Fixed sines and cosines added to the token embedding (Vaswani et al., 2017, section 3.5).

    ``PE(p, 2m) = sin(p w_m)``, ``PE(p, 2m+1) = cos(p w_m)``, ``w_m = theta^(-2m/M)``.

    Vaswani et al. multiply the token embedding by ``sqrt(M)`` before the sum. Here models differ in
    nothing but the encoding, so the token embedding stays and the sinusoid is divided by
    ``sqrt(M)`` instead: for one token embedding the same sum, up to that factor.

    Args:
        dims: of the model.
        rngs: unused.
        theta: the base of the frequencies.
        layout: ``interleaved`` as in the paper, or ``concatenated`` (all sines, then all cosines).
        scale: amplitude; ``M ** -0.5`` unless told otherwise.
    """

    name = "sinusoidal"
    reference = """@inproceedings{vaswani2017attention,
  title={Attention Is All You Need},
  author={Vaswani, Ashish and Shazeer, Noam and Parmar, Niki and Uszkoreit, Jakob and
          Jones, Llion and Gomez, Aidan N. and Kaiser, Lukasz and Polosukhin, Illia},
  booktitle={Advances in Neural Information Processing Systems},
  year={2017}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        theta: float = 10_000.0,
        layout: str = "interleaved",
        scale: float | None = None,
    ):
        super().__init__(dims, rngs)
        if dims.width % 2:
            raise EncodingError(f"sinusoidal needs an even model width, and got {dims.width}")
        if layout not in ("interleaved", "concatenated"):
            raise EncodingError(f"sinusoidal has no layout {layout!r}: interleaved, concatenated")
        if theta <= 0:
            raise EncodingError(f"sinusoidal needs theta > 0, and got {theta}")
        self.theta = theta
        self.layout = layout
        self.scale = dims.width**-0.5 if scale is None else scale

    def embed(self, x, positions, streams):
        """Add the sinusoid of each position, computed in float32 and cast once."""
        # Built by NumPy in float64 and rounded once: constants, so no rounding of a power remains.
        inv_freq = self.theta ** (-2 * np.arange(self.dims.width // 2) / self.dims.width)
        angles = positions.astype(jnp.float32)[..., None] * inv_freq.astype(np.float32)
        sines, cosines = jnp.sin(angles), jnp.cos(angles)
        if self.layout == "interleaved":
            waves = jnp.stack([sines, cosines], axis=-1).reshape(*positions.shape, -1)
        else:
            waves = jnp.concatenate([sines, cosines], axis=-1)
        return (x.astype(jnp.float32) + self.scale * waves).astype(x.dtype)
