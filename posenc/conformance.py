"""The laws, as checks of one encoding; the tests and ``python -m posenc check`` run them.

Each check compares numbers of one computation done in two ways. All of an encoding's checks share
one small model, its weights scaled up so that position matters, and few compiled functions: what
differs between offset, packed, padded and appended tokens is data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.attention import visibility
from posenc.encodings.base import PositionalEncoding, PositionOutOfRange, Side
from posenc.encodings.sampling import sequential_positions
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

LENGTH = 48
# Logits of these models are about 1 in size and a few thousand float32 operations deep.
TOLERANCE = 2e-5


class NotConforming(AssertionError):
    """A law that an encoding breaks, with the numbers."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one check.

    Attributes:
        check: its name.
        law: the law of the design that it belongs to.
        error: what was found, or None where the encoding conforms.
        applies: whether the law says anything about this encoding.
    """

    check: str
    law: int
    error: str | None = None
    applies: bool = True


def close(what: str, got: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    """Raise ``NotConforming`` where two arrays differ by more than ``tolerance``, or in NaN."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    if np.array_equal(got, wanted, equal_nan=True):
        return
    worst = np.max(np.abs(got - wanted)) if np.isfinite(got - wanted).all() else np.inf
    if not worst <= tolerance:
        raise NotConforming(f"{what}: differ by {worst:.3g}, more than {tolerance:.3g}")


class Subject:
    """A small model with one encoding, and the compiled functions that the checks share."""

    def __init__(self, encoding: str):
        config = TransformerConfig(
            vocab_size=31, layers=2, width=32, heads=4, kv_heads=2, qk_norm=True, init_std=0.2
        )
        self.config, self.spec = config, encoding
        self.model = Transformer(config, encoding, 2 * LENGTH, seed=1)
        self.merge, self.parameters = split(self.model)
        self.encoding = self.model.encoding
        self.tokens = np.asarray(jax.random.randint(jax.random.key(2), (2, LENGTH), 0, 31))
        self.positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH))
        self.ones = np.ones((2, LENGTH), np.int32)
        self.forward = jax.jit(
            lambda parameters, tokens, positions, segments: self.merge(parameters)(
                tokens, positions, segments
            )
        )
        self.cached = jax.jit(
            lambda parameters, tokens, positions, segments, cache: self.merge(parameters)(
                tokens, positions, segments, cache=cache
            )
        )

    def logits(self, tokens=None, positions=None, segments=None) -> jax.Array:
        """Run the whole model, ``[B, T, V]``."""
        return self.forward(
            self.parameters,
            self.tokens if tokens is None else tokens,
            self.positions if positions is None else positions,
            self.ones if segments is None else segments,
        )

    def decode(self, cuts: list[int], segments=None, positions=None) -> jax.Array:
        """Run the model on a cache, in chunks between ``cuts``."""
        segments = self.ones if segments is None else segments
        positions = self.positions if positions is None else positions
        cache, parts = self.model.start_cache(2, LENGTH), []
        for low, high in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            part = np.s_[:, low:high]
            logits, cache = self.cached(
                self.parameters, self.tokens[part], positions[part], segments[part], cache
            )
            parts.append(logits)
        return jnp.concatenate(parts, axis=1)


def only_encodings_know_the_length(subject: Subject) -> bool:
    """Law 1: between two context lengths, only an encoding's parameters change their shapes."""

    def shapes(length: int) -> dict[str, tuple[int, ...]]:
        model = nnx.eval_shape(lambda: Transformer(subject.config, subject.spec, length))
        return {name: leaf.shape for name, leaf in split(model)[1].items()}

    short, long = shapes(LENGTH), shapes(3 * LENGTH)
    changed = [name for name in short | long if short.get(name) != long.get(name)]
    if any(not name.startswith("encoding.") for name in changed):
        raise NotConforming(f"parameters outside the encoding depend on the length: {changed}")
    return True


def cached_equals_full(subject: Subject) -> bool:
    """Law 4: decoding on the cache, token by token and in ragged chunks, equals one full pass."""
    full = subject.logits()
    close("token by token", subject.decode(list(range(1, LENGTH))), full)
    close("in chunks of 7, 1, 19 and 21", subject.decode([7, 8, 27]), full)
    return True


def later_tokens_change_nothing(subject: Subject) -> bool:
    """Causality, by appending: what comes later leaves earlier outputs as they are."""
    full = subject.logits()
    for length in (1, LENGTH // 3, LENGTH - 1):
        changed = subject.tokens.copy()
        changed[:, length:] = (changed[:, length:] + 7) % subject.config.vocab_size
        close(f"first {length} rows", subject.logits(changed)[:, :length], full[:, :length], 0.0)
    return True


def no_gradient_from_the_future(subject: Subject) -> bool:
    """Causality, by gradient: an output depends on the embeddings at its own and earlier slots.

    The gradient of one row's output by the input embeddings is exactly zero behind the row, and not
    zero at it; where the encoding lets everything be seen, not zero before it either.
    """
    at = LENGTH // 2

    @jax.jit
    def gradient(parameters, inputs):
        def one_row(inputs):
            # An embedding table with a row a slot: its rows are the inputs.
            model = subject.merge({**parameters, "embedding.embedding": inputs})
            hidden, _ = model.hidden(jnp.arange(LENGTH)[None], jnp.asarray(subject.positions[:1]))
            return jnp.sum(hidden[0, at] * jnp.arange(1.0, subject.config.width + 1))

        return jax.grad(one_row)(inputs)

    inputs = jax.random.normal(jax.random.key(3), (LENGTH, subject.config.width))
    size = np.abs(np.asarray(gradient(subject.parameters, inputs))).max(axis=-1)
    if size[at + 1 :].any():
        raise NotConforming(f"row {at} depends on later slots {np.flatnonzero(size[at + 1 :])}")
    if not size[at] > 0:
        raise NotConforming(f"row {at} does not depend on its own token")
    windowed = any(part.reach is not None for part in subject.encoding.parts)
    if not windowed and not (size[:at] > 0).all():
        raise NotConforming(f"row {at} does not depend on slots {np.flatnonzero(size[:at] == 0)}")
    return True


def packed_equals_separate(subject: Subject) -> bool:
    """Law 2: sequences packed into one array give what each gives alone."""
    cut = LENGTH // 3
    segments = np.ones((2, LENGTH), np.int32)
    segments[:, cut:] = 2
    packed = subject.logits(positions=sequential_positions(segments), segments=segments)
    close("first", packed[:, :cut], subject.logits()[:, :cut])
    second = np.concatenate([subject.tokens[:, cut:], subject.tokens[:, :cut]], axis=1)
    close("second", packed[:, cut:], subject.logits(second)[:, : LENGTH - cut])
    return True


def left_padded_equals_unpadded(subject: Subject) -> bool:
    """Law 2: padding on the left changes nothing, on the cache neither."""
    pad = 11
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, :pad] = 0
    positions = sequential_positions(segments)
    padded = subject.logits(positions=positions, segments=segments)
    alone = np.roll(subject.tokens, -pad, axis=1)
    close("padded row", padded[0, pad:], subject.logits(alone)[0, : LENGTH - pad])
    close("the row beside it", padded[1], subject.logits()[1])
    if not np.isfinite(np.asarray(padded)).all():
        raise NotConforming("padding made a number that is not finite")
    cached = subject.decode([5, 20], segments, positions)
    close("on the cache", cached[0, pad:], padded[0, pad:])
    return True


def shift_changes_what_is_said(subject: Subject) -> bool:
    """Law 6: a constant added to all positions does to the outputs what the encoding says.

    Those that are exactly invariant give the same bits from the whole model, and those that are not
    invariant give others. For those that are up to rounding, each logit of one attention is held
    against its bound: phases at position p err by ``4 p 2^-24`` radians, and a scaled score is a
    sum over channels of ``q k / sqrt(D)``, so that it errs by no more than that times
    ``|q| |k| / sqrt(D)``, beside the rounding of a sum of D terms.
    """
    claims = {part.shift_invariant for part in subject.encoding.parts}
    shift = 1000
    if "no" in claims:
        limit = subject.encoding.max_position
        shift = shift if limit is None else limit - LENGTH
        shifted = subject.logits(positions=subject.positions + shift)
        changed = float(jnp.max(jnp.abs(shifted - subject.logits())))
        if not changed > 100 * TOLERANCE:
            raise NotConforming(
                f"says that a shift changes outputs, and {shift} positions change them by "
                f"{changed:.3g}: say shift_invariant"
            )
        return True
    if claims == {"exact"}:
        shifted = subject.logits(positions=subject.positions + shift)
        close("shifted by 1000", shifted, subject.logits(), 0.0)
        return True
    encoding, config = subject.encoding.at(0), subject.config
    shape = (2, LENGTH, config.heads, config.head_width)
    q, k = jax.random.normal(jax.random.key(5), (2, *shape))
    x = jax.random.normal(jax.random.key(6), (2, LENGTH, config.width))
    slots = jnp.arange(LENGTH, dtype=jnp.int32)[None]

    @jax.jit
    def logits(positions):
        positions, ones = positions.astype(jnp.int32), jnp.ones((2, LENGTH), jnp.int32)
        features, _ = encoding.features(x, positions, ones, encoding.start_state(2))
        shared = {
            "positions": positions,
            "streams": {},
            "slots": slots,
            "segments": ones,
            "features": features,
            "prepared": encoding.prepare(positions, {}),
        }
        queries, keys = (Side(x=side, rotated=None, **shared) for side in (q, k))
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        visible = visibility(queries, keys, causal=True)
        scores = encoding.scores(queries, keys, visible)
        carry = encoding.start_carry(2, LENGTH)
        changed, _ = encoding.logits(scores, scores, queries, keys, visible, carry)
        return jnp.where(visible, changed, 0.0)

    sizes = jnp.einsum("bth,bsh->bhts", *(jnp.linalg.norm(side, axis=-1) for side in (q, k)))
    unit = np.asarray(sizes, np.float64) / config.head_width**0.5
    at = jnp.asarray(subject.positions)
    difference = np.abs(np.asarray(logits(at + shift), np.float64) - np.asarray(logits(at)))
    bound = unit * (4 * (shift + LENGTH) + 4 * LENGTH + 2 * config.head_width) * 2.0**-24
    worst = np.max(difference / bound)
    if not worst <= 1:
        raise NotConforming(f"shifted by {shift}: a logit errs by {worst:.3g} times its bound")
    return True


def out_of_range_is_loud(subject: Subject) -> bool:
    """Law 5: an unrepresentable position raises on the host, and on the device is NaN downstream.

    Downstream is every row whose visible prefix holds it; other rows and padding stay as they are.
    """
    limit = subject.encoding.max_position
    if limit is None:
        return False
    positions = np.array(subject.positions)
    at = LENGTH // 2
    positions[0, at] = limit
    try:
        subject.model(subject.tokens, positions)
    except PositionOutOfRange as error:
        if str(limit) not in str(error):
            raise NotConforming(f"the error does not name position {limit}: {error}") from None
    else:
        raise NotConforming(f"position {limit} of 0..{limit - 1} raised nothing on the host")
    logits = np.asarray(subject.logits(positions=positions))
    if not np.isnan(logits[0, at:]).all():
        raise NotConforming("a row whose prefix holds the position is not NaN")
    close("rows before it", logits[0, :at], subject.logits()[0, :at])
    close("the other sequence", logits[1], subject.logits()[1])
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, : at + 1] = 0
    if np.isnan(np.asarray(subject.logits(positions=positions, segments=segments))).any():
        raise NotConforming("a position of padding poisoned a row")
    return True


def blocks_equal_dense(subject: Subject) -> bool:
    """Law 10's path equals the readable one, in values and gradients, at a ragged length."""
    from posenc import attention

    length = 29
    tokens, positions = subject.tokens[:, :length], subject.positions[:, :length]
    target = jax.random.normal(jax.random.key(4), (2, length, subject.config.vocab_size))

    def loss(parameters, dense: bool):
        logits = subject.merge(parameters)(tokens, positions, dense=dense)
        return jnp.sum(logits * target), logits

    both = {}
    block, attention.BLOCK = attention.BLOCK, 4  # several groups of blocks, the last one ragged
    try:
        for dense in (False, True):
            run = jax.jit(jax.grad(lambda p, dense=dense: loss(p, dense), has_aux=True))
            both[dense] = run(subject.parameters)
    finally:
        attention.BLOCK = block
    close("values", both[False][1], both[True][1])
    for name, gradient in both[True][0].items():
        size = float(jnp.max(jnp.abs(gradient))) + 1.0
        close(f"gradient of {name}", both[False][0][name] / size, gradient / size)
    return True


def shared_parameters_are_the_same(subject: Subject) -> bool:
    """Law 7: parameters outside the encoding are the same bits as beside any other encoding."""
    identity = f"{PositionalEncoding.__module__}:{PositionalEncoding.__name__}"
    other = split(Transformer(subject.config, identity, LENGTH, seed=1))[1]
    for name, value in other.items():
        if not np.array_equal(np.asarray(value), np.asarray(subject.parameters[name])):
            raise NotConforming(f"initial {name} depends on the encoding")
    return True


CHECKS: dict[Callable[[Subject], bool], int] = {
    only_encodings_know_the_length: 1,
    packed_equals_separate: 2,
    left_padded_equals_unpadded: 2,
    later_tokens_change_nothing: 2,
    no_gradient_from_the_future: 2,
    cached_equals_full: 4,
    out_of_range_is_loud: 5,
    shift_changes_what_is_said: 6,
    shared_parameters_are_the_same: 7,
    blocks_equal_dense: 10,
}


def conformance(encoding: str) -> Iterator[Result]:
    """Check an encoding against the laws, one result a check."""
    subject = Subject(encoding)
    for check, law in CHECKS.items():
        try:
            yield Result(check.__name__, law, applies=check(subject))
        except NotConforming as error:
            yield Result(check.__name__, law, str(error))
