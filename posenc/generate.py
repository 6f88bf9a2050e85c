"""Greedy decoding on the cache."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from posenc.encodings.sampling import sequential_positions
from posenc.errors import UserError
from posenc.placing import Placer, readers, start_streams, step_streams
from posenc.training import split
from posenc.transformer import Transformer


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Align prompts on the right: tokens and segments, int32 ``[B, T]``, padding being 0."""
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    segments = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = prompt
        segments[row, longest - len(prompt) :] = 1
    return tokens, segments


def generate(
    model: Transformer, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Int[np.ndarray, "B N"]:
    """Continue every prompt with the likeliest tokens, on a cache.

    Prompts may differ in length: they are padded on the left, and every one counts its positions
    from 0.

    Args:
        model: to be decoded with.
        prompts: token ids, each at least one.
        new_tokens: N, how many to add.

    Returns:
        The new tokens, int32 ``[B, N]``.

    Raises:
        UserError: an empty prompt, or nothing to add.
        PositionOutOfRange: the last token would stand where the encoding has no representation, or
            a token has a value in another stream that it cannot represent.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: give every one at least one token, such as BOS")
    if new_tokens < 1:
        raise UserError(f"{new_tokens} new tokens: it must be at least 1")
    tokens, segments = left_padded(prompts)
    positions = sequential_positions(segments)
    # The last new token is never fed back, so its own position is not needed.
    ends = positions[:, -1] + new_tokens - 1
    model.check_positions(np.concatenate([positions[segments != 0], ends]))

    placer = Placer(model.encoding)
    placer.check(placer.streams(tokens, segments), segments)

    merge, parameters = split(model)
    batch, length = tokens.shape
    read = dict.fromkeys(readers(model.encoding), jnp.int32)
    cache = model.start_cache(batch, length + new_tokens - 1, streams=read)

    @jax.jit
    def decode(parameters, tokens, positions, segments, cache):
        model = merge(parameters)

        def choose(hidden: Array) -> Array:
            return jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)

        states = start_streams(model.encoding, batch)
        streams, states = step_streams(model.encoding, tokens, segments, states)
        hidden, cache = model.hidden(tokens, positions, segments, streams, cache)
        ones = jnp.ones((batch, 1), jnp.int32)

        def step(carry, _):
            token, position, states, cache = carry
            streams, states = step_streams(model.encoding, token[:, None], ones, states)
            hidden, cache = model.hidden(token[:, None], position, ones, streams, cache)
            following = choose(hidden)
            return (following, position + 1, states, cache), following

        first = choose(hidden)
        start = (first, positions[:, -1:] + 1, states, cache)
        _, others = jax.lax.scan(step, start, length=new_tokens - 1)
        return jnp.concatenate([first[:, None], others.T], axis=1)

    new = np.asarray(decode(parameters, *map(jnp.asarray, (tokens, positions, segments)), cache))
    # What was fed back, too: on the device, what a table lacks makes NaN, and its argmax token 0.
    fed = np.concatenate([tokens, new[:, :-1]], axis=1)
    owners = np.concatenate([segments, np.ones_like(new[:, :-1])], axis=1)
    placer.check(placer.streams(fed, owners), owners)
    return new
