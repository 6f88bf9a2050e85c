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
        max_position: positions that the table has rows for.
        init_std: of the initial rows, 0.01 as in the released GPT-2 code.
        offset: so many rows are reserved in front: position p reads row ``p + offset``. OPT
            (Zhang et al., 2022) has 2, its padding being read from the reserved ones.
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
        offset: int = 0,
    ):
        super().__init__(dims, rngs)
        rows = dims.context_length if max_position is None else max_position
        if rows < 1:
            raise EncodingError(f"wpe(max_position={rows}) has no row: it needs at least 1")
        if offset < 0:
            raise EncodingError(f"wpe(offset={offset}): it must be at least 0")
        self.max_position = rows
        self.init_std = init_std
        self.offset = offset
        shape = (rows + offset, dims.width)
        self.table = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))

    def embed(self, x, positions, streams):
        """Add row ``p + offset``; an unrepresentable p reads a clamped one, made NaN at the end."""
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise EncodingError(
                f"wpe has rows at whole positions only, and got positions of {positions.dtype}"
            )
        # Clamped before the sum, which could pass the largest integer.
        within = jnp.clip(positions, -self.offset, self.table.shape[0] - 1 - self.offset)
        rows = self.table[...][within + self.offset]
        return (x.astype(jnp.float32) + rows).astype(x.dtype)

    def representable(self, positions):
        """Say which positions are rows of the table; fractions are not."""
        within = super().representable(positions)
        return within & (positions == positions // 1)

    def extended(self, policy: str, length: int, /, **options: Any) -> LearnedAbsolute:
        """Give a table for ``length`` positions made from the trained one.

        Reserved rows stay as they are, in front.

        Args:
            policy: ``clamp`` repeats the last row; ``wrap`` starts again at row 0;
                ``interpolate`` stretches the whole table linearly over the new length;
                ``fresh`` appends new random rows, drawn as at initialisation.
            length: of the new table; a length that the table has is given back as it is.
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
        reserved, table = self.table[: self.offset], self.table[self.offset :]
        rows = table.shape[0]
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
        options = {"max_position": length, "init_std": self.init_std, "offset": self.offset}
        grown = type(self)(self.dims, nnx.Rngs(0), **options)
        grown.table[...] = jnp.concatenate([reserved, longer])
        return grown


class Sinusoidal(PositionalEncoding):
    """Fixed sines and cosines added to the token embedding (Vaswani et al., 2017, section 3.5).

    ``PE(p, 2m) = sin(p w_m)``, ``PE(p, 2m+1) = cos(p w_m)``, ``w_m = theta^(-2m/M)``.

    Vaswani et al. multiply the token embedding by ``sqrt(M)`` before the sum. Here models differ in
    nothing but the encoding, so the token embedding stays and the sinusoid is divided by
    ``sqrt(M)`` instead: for one token embedding the same sum, up to that factor. The paper's own
    sum is ``scale=1`` with ``embedding_scale`` the square root of M.

    Args:
        dims: of the model.
        rngs: unused.
        theta: the base of the frequencies.
        layout: ``interleaved`` as in the paper, or ``concatenated`` (all sines, then all cosines).
        scale: amplitude; ``M ** -0.5`` unless told otherwise.
        spacing: ``vaswani``, or ``tensor2tensor`` as in that library and in fairseq:
            ``w_m = theta^(-m/(M/2 - 1))``, so that the longest wavelength is ``2 pi theta``.
        embedding_scale: what the token embedding is multiplied by.
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
        spacing: str = "vaswani",
        embedding_scale: float = 1.0,
    ):
        super().__init__(dims, rngs)
        if dims.width % 2:
            raise EncodingError(f"sinusoidal needs an even model width, and got {dims.width}")
        if layout not in ("interleaved", "concatenated"):
            raise EncodingError(f"sinusoidal has no layout {layout!r}: interleaved, concatenated")
        if theta <= 0:
            raise EncodingError(f"sinusoidal needs theta > 0, and got {theta}")
        if spacing not in ("vaswani", "tensor2tensor"):
            raise EncodingError(f"sinusoidal has no spacing {spacing!r}: vaswani, tensor2tensor")
        if embedding_scale <= 0:
            raise EncodingError(
                f"sinusoidal(embedding_scale={embedding_scale}): it must be above 0"
            )
        self.theta = theta
        self.layout = layout
        self.spacing = spacing
        self.embedding_scale = embedding_scale
        self.scale = dims.width**-0.5 if scale is None else scale

    def embed(self, x, positions, streams):
        """Add the sinusoid of each position, computed in float32 and cast once."""
        # Built by NumPy in float64 and rounded once: constants, so no rounding of a power remains.
        half = self.dims.width // 2
        steps = self.dims.width if self.spacing == "vaswani" else 2 * max(half - 1, 1)
        inv_freq = self.theta ** (-2 * np.arange(half) / steps)
        angles = positions.astype(jnp.float32)[..., None] * inv_freq.astype(np.float32)
        sines, cosines = jnp.sin(angles), jnp.cos(angles)
        if self.layout == "interleaved":
            waves = jnp.stack([sines, cosines], axis=-1).reshape(*positions.shape, -1)
        else:
            waves = jnp.concatenate([sines, cosines], axis=-1)
        tokens = x.astype(jnp.float32)
        if self.embedding_scale != 1:
            tokens = self.embedding_scale * tokens
        return (tokens + self.scale * waves).astype(x.dtype)
