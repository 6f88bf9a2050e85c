"""Encodings that read a stream computed from the tokens: digits of numbers.

Let B denote the batch. A stream is made token by token, outside the model, by a small machine whose
state is carried on when decoding (``posenc.placing``).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding, PositionOutOfRange


class TokenStream(PositionalEncoding):
    """A learned vector for every value of a stream, added to the token embedding.

    Args:
        dims: of the model.
        rngs: where the initial rows come from.
        rows: of the table; the values that it has vectors for.
        zero: the token of the digit 0, which those of 1 to 9 follow; 48 as bytes.
        per: whether training moves the values of a ``batch`` alike, or of each ``example``.
        init_std: of the initial rows.
    """

    stream: str
    shift_invariant = "exact"

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        rows: int,
        zero: int = 48,
        per: str = "batch",
        init_std: float = 0.02,
    ):
        super().__init__(dims, rngs)
        if per not in ("batch", "example"):
            raise EncodingError(f"{self.name} has no per {per!r}: batch, example")
        self.rows, self.zero, self.per = rows, zero, per
        self.table = nnx.Param(init_std * jax.random.normal(rngs.params(), (rows, dims.width)))

    def embed(self, x, positions, streams):
        """Add the row of each token's value; one that is not there is NaN at the end."""
        if self.stream not in streams:
            raise EncodingError(
                f"{self.name} reads the stream {self.stream!r} beside positions, and it is not "
                "given: streams=posenc.token_streams(model, tokens)"
            )
        rows = self.table[...][jnp.clip(streams[self.stream], 0, self.rows - 1)]
        return (x.astype(jnp.float32) + rows).astype(x.dtype)

    def representable(self, positions):
        """Say which values of the stream are rows of the table."""
        return (positions >= 0) & (positions < self.rows)

    def check_positions(self, positions: np.ndarray) -> None:
        """Raise ``PositionOutOfRange`` for the first value of the stream that is no row."""
        values = np.asarray(positions)
        outside = values[~np.asarray(self.representable(values))]
        if outside.size:
            raise PositionOutOfRange(
                f"{self.name} has {self.rows} rows, and a number needs row {outside.flat[0]}: "
                f"give shorter numbers, or build the model with {self.room}"
            )

    room: str

    def is_digit(self, tokens: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Say which tokens are digits."""
        return (tokens >= self.zero) & (tokens < self.zero + 10)

    def start_stream(self, batch: int) -> Any:
        """Give the state before the first token."""
        raise NotImplementedError

    def step_stream(
        self, state: Any, tokens: Int[Array, " B"], fresh: Bool[Array, " B"]
    ) -> tuple[Any, Int[Array, " B"]]:
        """Give the values of the next tokens; ``fresh`` where another sequence begins."""
        raise NotImplementedError

    def move(self, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Give the values of training windows ``[rows, T]``, moved at random, 0 staying 0."""
        raise NotImplementedError


class Abacus(TokenStream):
    """Abacus embeddings: each digit's place in its number (McLeish et al., 2024).

    The digits of every run of digits count from 1; all else is 0. Numbers are written with the
    least significant digit first, so that equal counts are equal significance. Training adds a
    number drawn from ``0 .. max_k`` to all counts, so that larger ones are known as well.

    It is meant beside another encoding (``abacus+fire``), or none.

    Args:
        dims: of the model.
        rngs: where the initial rows come from.
        rows: of the table, 1,024 in the released code.
        max_k: of the number that training adds.
        zero: the token of the digit 0, which those of 1 to 9 follow; 48 as bytes.
        per: one number for a ``batch``, as in the released code, or for each ``example``.
    """

    name = "abacus"
    stream = "digit_place"
    room = "more rows"
    reference = """@inproceedings{mcleish2024transformers,
  title={Transformers Can Do Arithmetic with the Right Embeddings},
  author={McLeish, Sean and Bansal, Arpit and Stein, Alex and Jain, Neel and Kirchenbauer, John and
          Bartoldson, Brian R. and Kailkhura, Bhavya and Bhatele, Abhinav and Geiping, Jonas and
          Schwarzschild, Avi and Goldstein, Tom},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        rows: int = 1024,
        max_k: int = 99,
        zero: int = 48,
        per: str = "batch",
    ):
        if not 0 <= max_k < rows - 1:
            raise EncodingError(f"abacus(max_k={max_k}): from 0 to {rows - 2}, for {rows} rows")
        self.max_k = max_k
        super().__init__(dims, rngs, rows=rows, zero=zero, per=per)

    def start_stream(self, batch):
        """Give the digits of the number so far: none."""
        return jnp.zeros(batch, jnp.int32)

    def step_stream(self, state, tokens, fresh):
        """Count on, or start again."""
        count = jnp.where(self.is_digit(tokens), jnp.where(fresh, 0, state) + 1, 0)
        return count, count

    def move(self, values, rng):
        """Add one number to all."""
        return np.where(values > 0, values + rng.integers(self.max_k + 1), 0)


class Coupled(TokenStream):
    """Position coupling: one number for all digits of one significance (Cho et al., 2024).

    For text as ``065+137=2020``: the operands of one length, padded with zeros, the most
    significant digit first; the sum after ``=``, the least significant one first. A digit of an
    operand of W digits counts 2 to W + 1 from the left, the sign behind it is W + 2, and the sum
    counts W + 1, W, ... down, so that digits that are added, and their sum, have one number; all
    else is 0. Training moves all numbers by one draw, as far as the rows go.

    Args:
        dims: of the model.
        rngs: where the initial rows come from.
        max_position: the largest number, 102 in the paper for operands of up to 100 digits.
        zero: the token of the digit 0, which those of 1 to 9 follow; 48 as bytes.
        equals: the token after which the answer comes; ``=`` as a byte.
        per: ``example``, as in the released code, or ``batch``.
    """

    name = "coupled"
    stream = "significance"
    room = "a larger max_position"
    reference = """@inproceedings{cho2024position,
  title={Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task
         Structure},
  author={Cho, Hanseul and Cha, Jaeyoung and Awasthi, Pranjal and Bhojanapalli, Srinadh and
          Gupta, Anupam and Yun, Chulhee},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        max_position: int = 102,
        zero: int = 48,
        equals: int = 61,
        per: str = "example",
    ):
        if max_position < 3:
            raise EncodingError(f"coupled(max_position={max_position}): it must be at least 3")
        self.equals = equals
        super().__init__(dims, rngs, rows=max_position + 1, zero=zero, per=per)

    def start_stream(self, batch):
        """Give the digits of the number so far, and what the answer counts down from, or -1."""
        return jnp.zeros(batch, jnp.int32), jnp.full(batch, -1, jnp.int32)

    def step_stream(self, state, tokens, fresh):
        """Count up in an operand, down in an answer."""
        count, top = (
            jnp.where(fresh, start, old) for start, old in zip((0, -1), state, strict=True)
        )
        digit, answering = self.is_digit(tokens), top >= 0
        # An answer longer than its operands by more than the carry has no number left.
        down = jnp.where(top > count, top - count, 0)
        sign = jnp.where((count > 0) & ~answering, count + 2, 0)
        value = jnp.where(digit, jnp.where(answering, down, count + 2), sign)
        begins = (tokens == self.equals) & (sign > 0)
        ends = ~digit & ~begins
        top = jnp.where(begins, count + 1, jnp.where(ends, -1, top))
        return (jnp.where(digit, count + 1, 0), top), value

    def move(self, values, rng):
        """Draw where the numbers of each window begin, all of them staying below the last row."""
        room = np.maximum(self.rows - 1 - values.max(axis=-1, keepdims=True), 0)
        return np.where(values > 0, values + rng.integers(room + 1), 0)
