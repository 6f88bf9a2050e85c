"""Where the tokens of a batch stand: their positions, and the streams that encodings read.

Let B denote the windows of a batch and T their tokens. All of it is made outside the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posenc.encodings.registry import Encodings
from posenc.encodings.sampling import Sampler, Sequential
from posenc.encodings.tokenwise import TokenStream

State = dict[str, Any]

# What draws of streams are a function of beside their seed: not what those of positions are.
MOVES = 0x6D6F7665


def readers(encodings: Encodings) -> dict[str, TokenStream]:
    """Give the parts that read a stream made from tokens, by the stream's name."""
    return {part.stream: part for part in encodings.parts if isinstance(part, TokenStream)}


def start_streams(encodings: Encodings, batch: int) -> State:
    """Give the state of all streams before the first token."""
    starts = {name: part.start_stream(batch) for name, part in readers(encodings).items()}
    # No segment is -1: the first token begins one.
    return {"segment": jnp.full(batch, -1, jnp.int32), "of": starts} if starts else {}


def step_streams(
    encodings: Encodings,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    state: State,
) -> tuple[dict[str, Int[Array, "B T"]], State]:
    """Give the streams of the next tokens, and the state to go on from; empty if none is read."""
    parts = readers(encodings)
    if not parts:
        return {}, state

    def step(state: State, now: tuple[Array, Array]) -> tuple[State, dict[str, Array]]:
        token, segment = now
        fresh = segment != state["segment"]
        made = {n: part.step_stream(state["of"][n], token, fresh) for n, part in parts.items()}
        after = {"segment": segment, "of": {n: own for n, (own, _) in made.items()}}
        return after, {n: value for n, (_, value) in made.items()}

    state, values = jax.lax.scan(step, state, (tokens.T, segments.T))
    return {name: value.T for name, value in values.items()}, state


def token_streams(
    model: Any, tokens: np.ndarray, segments: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Give the streams that a model's encodings read, for whole sequences.

    Args:
        model: with an ``encoding``.
        tokens: ids ``[B, T]``.
        segments: ``[B, T]``; all one if left out.

    Returns:
        Each int32 ``[B, T]``, by name: to be given to the model as ``streams``.
    """
    return Placer(model.encoding).streams(np.asarray(tokens), segments)


class Placer:
    """Gives batches positions and streams, in training and in evaluation.

    Args:
        encodings: of the model that reads them.
        sampler: of positions; one after another unless told otherwise.
    """

    def __init__(self, encodings: Encodings, sampler: Sampler | None = None):
        self.sampler = sampler or Sequential()
        self.layers = len(encodings.used)
        self._readers = readers(encodings)

        @jax.jit
        def run(tokens: Array, segments: Array) -> dict[str, Array]:
            return step_streams(
                encodings, tokens, segments, start_streams(encodings, tokens.shape[0])
            )[0]

        self._run = run

    def streams(self, tokens: np.ndarray, segments: np.ndarray | None) -> dict[str, np.ndarray]:
        """Give the streams of whole windows, as they are in evaluation."""
        if not self._readers:
            return {}
        owners = np.ones_like(tokens) if segments is None else segments
        made = self._run(jnp.asarray(tokens, jnp.int32), jnp.asarray(owners, jnp.int32))
        return {name: np.asarray(values) for name, values in made.items()}

    def check(self, streams: dict[str, np.ndarray], segments: np.ndarray) -> None:
        """Raise ``PositionOutOfRange`` for a value that the part that reads it has nothing for."""
        for name, part in self._readers.items():
            part.check_positions(streams[name][np.asarray(segments) != 0])

    def place(
        self,
        tokens: np.ndarray,
        segments: np.ndarray,
        rows: Sequence[int],
        seed: tuple[int, ...],
        *,
        training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Give the positions of windows, and all their streams.

        Args:
            tokens: ids ``[B, T]``.
            segments: ``[B, T]``.
            rows: a number for each window, of which its draws are a function.
            seed: what else they are a function of, such as (seed, step).
            training: or evaluation.

        Raises:
            PositionOutOfRange: a stream has a value that its part cannot represent.
        """
        positions, streams = self.sampler.place(
            segments, rows, seed, self.layers, training=training
        )
        made = self.streams(tokens, segments)
        moved = sorted(self._readers.items()) if training else ()
        for index, (name, part) in enumerate(moved):
            keys = [[*seed, index, 0 if part.per == "batch" else 1 + row, MOVES] for row in rows]
            made[name] = np.concatenate(
                [
                    part.move(values[None], np.random.default_rng(key))
                    for key, values in zip(keys, made[name], strict=True)
                ]
            ).astype(np.int32)
        self.check(made, segments)
        return positions, {**streams, **made}
