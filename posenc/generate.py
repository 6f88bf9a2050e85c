"""Decoding on the cache: the likeliest token, or one drawn from the model's distribution."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from posenc.encodings.sampling import sequential_positions
from posenc.errors import UserError
from posenc.placing import Placer, readers, start_streams, step_streams
from posenc.training import split
from posenc.transformer import Transformer

# Below it, float32 has no room left between a temperature and none.
LOWEST_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from a model's logits.

    Temperature acts first, then top-k, then top-p on what top-k left, as in most libraries.

    Attributes:
        temperature: what logits are divided by; 0 is greedy: the likeliest token, without chance.
        top_k: the number of likeliest tokens that are left (Fan et al., 2018); None leaves all.
        top_p: the smallest set of likeliest tokens with so much of the probability is left
            (nucleus sampling; Holtzman et al., 2020); 1 leaves all.
        seed: of the draws.

    Tokens that are exactly as likely as the last one that is left are left too.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise UserError(
                f"--temperature is {self.temperature}: give 0 (greedy), or a finite number of at "
                f"least {LOWEST_TEMPERATURE}"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k is {self.top_k}: it must be at least 1, or be left out")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}: it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed {self.seed} is outside 0 <= seed < 2**32: give one inside")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError(
                "--top-k and --top-p choose what is drawn from, and nothing is drawn at "
                "--temperature 0: give a temperature above 0, such as 1, or leave them out"
            )


def filtered(logits: Float[Array, "*B V"], sampling: Sampling) -> Float[Array, "*B V"]:
    """Give the logits of the distribution that is drawn from: -inf where a token is left out."""
    # The largest becomes 0, so that no temperature overflows.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        last = jax.lax.top_k(scaled, sampling.top_k)[0][..., -1:]
        scaled = jnp.where(scaled >= last, scaled, -jnp.inf)
    if sampling.top_p < 1:
        # A token is left if all that are likelier do not have the probability yet.
        falling = jnp.sort(scaled, axis=-1, descending=True)
        shares = jnp.cumsum(jax.nn.softmax(falling, axis=-1), axis=-1)
        likelier = jnp.concatenate([jnp.zeros_like(shares[..., :1]), shares[..., :-1]], axis=-1)
        left = jnp.where(likelier < sampling.top_p, falling, jnp.inf)
        scaled = jnp.where(scaled >= jnp.min(left, axis=-1, keepdims=True), scaled, -jnp.inf)
    return scaled


def row_keys(prompts: Sequence[Sequence[int]], seed: int) -> Key[Array, " B"]:
    """Give every row a key that is a function of the seed, its prompt, and how often that came.

    So a row's draws do not depend on the rows beside it, and a prompt that is given twice is
    continued in two ways.
    """
    came: Counter[bytes] = Counter()
    numbers = []
    for prompt in prompts:
        content = np.asarray(prompt, "<i4").tobytes()
        numbers.append((zlib.crc32(content), came[content]))
        came[content] += 1
    contents, times = jnp.asarray(numbers, jnp.uint32).T
    fold = jax.vmap(jax.random.fold_in)
    return fold(jax.vmap(lambda n: jax.random.fold_in(jax.random.key(seed), n))(contents), times)


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
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    sampling: Sampling | None = None,
    *,
    stop: int | None = None,
) -> Int[np.ndarray, "B N"]:
    """Continue every prompt, on a cache: greedily, or by draws.

    Prompts may differ in length: they are padded on the left, and every one counts its positions
    from 0. What a row draws is a function of the seed, its prompt and the step, whatever the rows
    beside it are; equal prompts draw apart.

    Args:
        model: to be decoded with.
        prompts: token ids, each at least one.
        new_tokens: N, how many to add.
        sampling: how a token is chosen; greedily unless told otherwise.
        stop: a token that ends a row; the rest of the row is filled with it.

    Returns:
        The new tokens, int32 ``[B, N]``.

    Raises:
        UserError: an empty prompt, nothing to add, or a stop token that the vocabulary lacks.
        PositionOutOfRange: the last token would stand where the encoding has no representation, or
            a token has a value in another stream that it cannot represent.
    """
    sampling = sampling or Sampling()
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("a prompt is empty: give every one at least one token, such as BOS")
    if new_tokens < 1:
        raise UserError(f"{new_tokens} new tokens: it must be at least 1")
    if stop is not None and not 0 <= stop < model.config.vocab_size:
        raise UserError(
            f"stop token {stop} is none of the {model.config.vocab_size} of the vocabulary: "
            "give one, or None"
        )
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
    def decode(parameters, tokens, positions, segments, cache, keys):
        model = merge(parameters)

        def choose(hidden: Array, index: int | Array) -> Array:
            logits = model.logits(hidden[:, -1])
            if sampling.temperature == 0:
                return jnp.argmax(logits, axis=-1).astype(jnp.int32)
            now = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
            drawn = jax.vmap(jax.random.categorical)(now, filtered(logits, sampling))
            return drawn.astype(jnp.int32)

        states = start_streams(model.encoding, batch)
        streams, states = step_streams(model.encoding, tokens, segments, states)
        hidden, cache = model.hidden(tokens, positions, segments, streams, cache)
        ones = jnp.ones((batch, 1), jnp.int32)
        token = choose(hidden, 0)
        new = jnp.full((batch, new_tokens), -1 if stop is None else stop, jnp.int32)

        def ended(token: Array) -> Array:
            return jnp.zeros(batch, bool) if stop is None else token == stop

        def unfinished(carry):
            index, _, token, *_ = carry
            return (index < new_tokens) & ~jnp.all(ended(token))

        def step(carry):
            index, new, token, position, states, cache = carry
            streams, states = step_streams(model.encoding, token[:, None], ones, states)
            hidden, cache = model.hidden(token[:, None], position, ones, streams, cache)
            following = jnp.where(ended(token), token, choose(hidden, index))
            new = new.at[:, index].set(following)
            return index + 1, new, following, position + 1, states, cache

        start = (jnp.int32(1), new.at[:, 0].set(token), token, positions[:, -1:] + 1, states, cache)
        return jax.lax.while_loop(unfinished, step, start)[1]

    placed = map(jnp.asarray, (tokens, positions, segments))
    new = np.asarray(decode(parameters, *placed, cache, row_keys(prompts, sampling.seed)))
    # What was fed back, too: on the device, what a table lacks makes NaN, and its argmax token 0.
    fed = np.concatenate([tokens, new[:, :-1]], axis=1)
    before_end = np.ones_like(new) if stop is None else np.cumsum(new == stop, axis=1) == 0
    owners = np.concatenate([segments, before_end[:, :-1].astype(np.int32)], axis=1)
    placer.check(placer.streams(fed, owners), owners)
    return new
