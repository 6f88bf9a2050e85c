"""The laws, as checks of one encoding; the tests and ``python -m posenc check`` run them.

Each check compares numbers of one computation done in two ways. All of an encoding's checks share
one small model, its weights scaled up so that position matters, and few compiled functions: what
differs between offset, packed, padded and appended tokens is data.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.attention import visibility
from posenc.checkpoints import Checkpoints, abstract
from posenc.encodings.base import PositionalEncoding, PositionOutOfRange, Side
from posenc.encodings.registry import parse_spec
from posenc.encodings.sampling import sequential_positions
from posenc.placing import Placer
from posenc.runs import without_parameters
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

LENGTH = 48
# Where chunks that are decoded on a cache begin, beside the first.
CUTS = [15, 16, 31, 32, 47]


def compiled_quickly(function: Callable) -> Any:
    """Compile a function that runs a few times: on a CPU without the last effort."""
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(function, compiler_options=QUICKLY if on_cpu else None)


QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
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
            vocab_size=62, layers=2, width=32, heads=4, kv_heads=2, qk_norm=True, init_std=0.2
        )
        self.config, self.spec = config, encoding
        self.model = self.make()
        self.merge, self.parameters = split(self.model)
        self.encoding = self.model.encoding
        # Among them many digits, which some encodings read.
        self.tokens = np.asarray(jax.random.randint(jax.random.key(2), (2, LENGTH), 38, 62))
        self.positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH))
        self.ones = np.ones((2, LENGTH), np.int32)
        self.placer = Placer(self.encoding)
        self.forward = compiled_quickly(lambda parameters, *given: self.merge(parameters)(*given))

    def make(self, layers: int = 2) -> Transformer:
        """Make the model, or one of another depth."""
        config = dataclasses.replace(self.config, layers=layers)
        return Transformer(config, self.spec, 2 * LENGTH, seed=1)

    def logits(self, tokens=None, positions=None, segments=None) -> jax.Array:
        """Run the whole model, ``[B, T, V]``."""
        tokens = self.tokens if tokens is None else tokens
        positions = self.positions if positions is None else positions
        segments = self.ones if segments is None else segments
        streams = self.placer.streams(tokens, segments)
        return self.forward(self.parameters, tokens, positions, segments, streams)

    def decode(self, cuts: list[int], segments=None, positions=None) -> jax.Array:
        """Run the model on a cache, in chunks between ``cuts``."""
        segments = self.ones if segments is None else segments
        positions = self.positions if positions is None else positions
        streams = self.placer.streams(self.tokens, segments)
        kinds = {name: stream.dtype for name, stream in streams.items()}
        cache, parts = self.model.start_cache(2, LENGTH, streams=kinds), []
        for low, high in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            part = np.s_[:, low:high]
            own = {name: stream[part] for name, stream in streams.items()}
            logits, cache = self.forward(
                self.parameters, self.tokens[part], positions[part], segments[part], own, cache
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
    close("a full pass and decoding token by token", subject.decode(list(range(1, LENGTH))), full)
    close("a full pass and decoding in chunks of 15 and 1", subject.decode(CUTS), full)
    return True


def positions_are_data(subject: Subject) -> bool:
    """Law 2: positions that jump, repeat and fall are taken as they are, on the cache too.

    Some lie beyond the length that the model is built for. An encoding whose outputs are the same
    at any positions tells of the order alone: nothing is said of it.
    """
    limit = subject.encoding.max_position or 4 * LENGTH
    random = np.random.default_rng(7)
    positions = random.integers(0, limit, (2, LENGTH)).astype(np.int32)
    positions[:, : LENGTH // 2].sort()
    positions[:, LENGTH // 4] = positions[:, LENGTH // 4 + 1]
    full = subject.logits(positions=positions)
    cached = subject.decode(CUTS, positions=positions)
    close("a full pass at positions that jump, and the same on the cache", cached, full)
    for length in (LENGTH // 3, LENGTH - 1):
        other = positions.copy()
        other[:, length:] = (other[:, length:] + 7) % limit
        what = f"the first {length} rows, with other positions after them"
        close(what, subject.logits(positions=other)[:, :length], full[:, :length], 0.0)
    return bool(np.any(np.asarray(full) != np.asarray(subject.logits())))


def later_tokens_change_nothing(subject: Subject) -> bool:
    """Causality, by appending: what comes later leaves earlier outputs as they are."""
    full = subject.logits()
    for length in (1, LENGTH // 3, LENGTH - 1):
        changed = subject.tokens.copy()
        changed[:, length:] = (changed[:, length:] + 7) % subject.config.vocab_size
        what = f"the first {length} rows, with other tokens after them"
        close(what, subject.logits(changed)[:, :length], full[:, :length], 0.0)
    return True


def no_gradient_from_the_future(subject: Subject) -> bool:
    """Causality, by gradient: an output depends on the embeddings at its own and earlier slots.

    The gradient of one row's output by the input embeddings is exactly zero behind the row, and not
    zero at it; where the encoding lets everything be seen, and gives it weight, not zero before it
    either.
    """
    at = LENGTH // 2

    @compiled_quickly
    def gradient(parameters, inputs):
        def one_row(inputs):
            # An embedding table with a row a slot: its rows are the inputs.
            model = subject.merge({**parameters, "embedding.embedding": inputs})
            slots, positions = jnp.arange(LENGTH)[None], jnp.asarray(subject.positions[:1])
            hidden, _ = model.hidden(slots, positions, streams=streams)
            return jnp.sum(hidden[0, at] * jnp.arange(1.0, subject.config.width + 1))

        return jax.grad(one_row)(inputs)

    streams = subject.placer.streams(subject.tokens[:1], subject.ones[:1])
    inputs = jax.random.normal(jax.random.key(3), (LENGTH, subject.config.width))
    size = np.abs(np.asarray(gradient(subject.parameters, inputs))).max(axis=-1)
    if not np.isfinite(size).all():
        slots = np.flatnonzero(~np.isfinite(size)).tolist()
        raise NotConforming(f"the gradient of row {at} is not finite at slots {slots}")
    if size[at + 1 :].any():
        later = (at + 1 + np.flatnonzero(size[at + 1 :])).tolist()
        raise NotConforming(f"row {at} depends on later slots {later}")
    if not size[at] > 0:
        raise NotConforming(f"row {at} does not depend on its own token")
    parts = subject.encoding.parts
    everything = not any(part.reach is not None or part.sparse for part in parts)
    if everything and not (size[:at] > 0).all():
        unseen = np.flatnonzero(size[:at] == 0).tolist()
        raise NotConforming(f"row {at} does not depend on slots {unseen}")
    return True


def packed_equals_separate(subject: Subject) -> bool:
    """Law 2: sequences packed into one array give what each gives alone."""
    cut = CUTS[1]  # so that on the cache, what is carried on crosses the border
    segments = np.ones((2, LENGTH), np.int32)
    segments[:, cut:] = 2
    positions = sequential_positions(segments)
    packed = subject.logits(positions=positions, segments=segments)
    close("the first of two packed sequences", packed[:, :cut], subject.logits()[:, :cut])
    second = np.concatenate([subject.tokens[:, cut:], subject.tokens[:, :cut]], axis=1)
    alone = subject.logits(second)[:, : LENGTH - cut]
    close("the second of two packed sequences, and alone", packed[:, cut:], alone)
    cached = subject.decode(CUTS, segments, positions)
    close("two packed sequences and the same on the cache", cached, packed)
    return True


def left_padded_equals_unpadded(subject: Subject) -> bool:
    """Law 2: padding on the left changes nothing, on the cache neither."""
    pad = CUTS[1]
    segments = np.ones((2, LENGTH), np.int32)
    segments[0, :pad] = 0
    positions = sequential_positions(segments)
    padded = subject.logits(positions=positions, segments=segments)
    alone = np.roll(subject.tokens, -pad, axis=1)
    wanted = subject.logits(alone)[0, : LENGTH - pad]
    close("a row with padding on its left, and without", padded[0, pad:], wanted)
    close("the row beside a padded one", padded[1], subject.logits()[1])
    if not np.isfinite(np.asarray(padded)).all():
        raise NotConforming("padding made a number that is not finite")
    cached = subject.decode(CUTS, segments, positions)
    close("a padded row and the same on the cache", cached[0, pad:], padded[0, pad:])
    return True


def one_attention(encoding, subject, x, q, k, positions):
    """Give the rotated sides, the features and the logits of one layer, 0 where nothing is seen."""
    ones, slots = jnp.ones((2, LENGTH), jnp.int32), jnp.arange(LENGTH, dtype=jnp.int32)[None]
    positions = positions.astype(jnp.int32)
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
    logits, _ = encoding.logits(scores, scores, queries, keys, visible, carry)
    return (queries.rotated, keys.rotated), features, jnp.where(visible, logits, 0.0)


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
        close("at 0 and at 1000, said to be exactly invariant", shifted, subject.logits(), 0.0)
        return True
    encoding, config = subject.encoding.at(0), subject.config
    shape = (2, LENGTH, config.heads, config.head_width)
    q, k = jax.random.normal(jax.random.key(5), (2, *shape))
    x = jax.random.normal(jax.random.key(6), (2, LENGTH, config.width))

    @compiled_quickly
    def logits(positions):
        return one_attention(encoding, subject, x, q, k, positions)[2]

    sizes = jnp.einsum("bth,bsh->bhts", *(jnp.linalg.norm(side, axis=-1) for side in (q, k)))
    unit = np.asarray(sizes, np.float64) / config.head_width**0.5
    at = jnp.asarray(subject.positions)
    difference = np.abs(np.asarray(logits(at + shift), np.float64) - np.asarray(logits(at)))
    bound = unit * (4 * (shift + LENGTH) + 4 * LENGTH + 2 * config.head_width) * 2.0**-24
    worst = np.max(difference / bound)
    if not worst <= 1:
        raise NotConforming(
            f"shifted by {shift}: a logit changes by {worst:.3g} times what float32 phases round by"
        )
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
        subject.model(
            subject.tokens, positions, streams=subject.placer.streams(subject.tokens, None)
        )
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
    streams = subject.placer.streams(tokens, subject.ones[:, :length])
    # One layer is enough to tell, and quicker to compile.
    merge, parameters = split(subject.make(layers=1))
    target = jax.random.normal(jax.random.key(4), (2, length, subject.config.vocab_size))

    def loss(parameters, dense: bool):
        logits = merge(parameters)(tokens, positions, streams=streams, dense=dense)
        return jnp.sum(logits * target), logits

    both = {}
    block, attention.BLOCK = attention.BLOCK, 8  # several groups of blocks, the last one ragged
    try:
        for dense in (False, True):
            run = compiled_quickly(jax.grad(lambda p, dense=dense: loss(p, dense), has_aux=True))
            both[dense] = run(parameters)
    finally:
        attention.BLOCK = block
    close("attention in blocks and at once", both[False][1], both[True][1])
    for name, gradient in both[True][0].items():
        if not np.isfinite(np.asarray(gradient)).all():
            raise NotConforming(f"the gradient of {name} is not finite")
        size = float(jnp.max(jnp.abs(gradient))) + 1.0
        close(
            f"the gradient of {name}, in blocks and at once",
            both[False][0][name] / size,
            gradient / size,
        )
    return True


def shared_parameters_are_the_same(subject: Subject) -> bool:
    """Law 7: parameters outside the encoding are the same bits as beside any other encoding."""
    identity = f"{PositionalEncoding.__module__}:{PositionalEncoding.__name__}"
    other = split(Transformer(subject.config, identity, LENGTH, seed=1))[1]
    for name, value in other.items():
        if not np.array_equal(np.asarray(value), np.asarray(subject.parameters[name])):
            raise NotConforming(f"initial {name} depends on the encoding")
    return True


def layers_share_or_do_not_as_is_said(subject: Subject) -> bool:
    """Law 7: a part has parameters once for all layers, or once for every layer that it is in."""
    config = _of_layers(subject, 1)
    one = split(nnx.eval_shape(lambda: Transformer(config, subject.spec, 2 * LENGTH)))
    two = split(subject.model)
    counts = [
        sum(value.size for name, value in parameters.items() if name.startswith("encoding."))
        for _, parameters in (one, two)
    ]
    if len(parse_spec(subject.spec)) > 1:
        return False  # the two layers are not alike
    per_layer = {part.per_layer for part in subject.encoding.parts}
    if len(per_layer) > 1 or not counts[0]:
        return False
    wanted = 2 * counts[0] if per_layer.pop() else counts[0]
    if counts[1] != wanted:
        raise NotConforming(
            f"two layers have {counts[1]} parameters in all, and one {counts[0]}: by per_layer "
            f"there would be {wanted}"
        )
    return True


def _of_layers(subject: Subject, layers: int) -> TransformerConfig:
    return dataclasses.replace(subject.config, layers=layers)


def bfloat16_rounds_once(subject: Subject) -> bool:
    """Law 6: with bfloat16 activations, what an encoding adds is that of float32, rounded once.

    The same numbers are given in both types. What is embedded, rotated or kept as a feature may
    then differ by the rounding of the result alone, and a logit by that of the two sides of its
    product: ``2 * 2^-8 |q| |k| / sqrt(D)``, and of its bias, ``2^-8`` of it.
    """
    config, encoding = subject.config, subject.encoding.at(0)
    low = [
        jax.random.normal(jax.random.key(index), shape).astype(jnp.bfloat16)
        for index, shape in enumerate(
            [(2, LENGTH, config.width), *[(2, LENGTH, config.heads, config.head_width)] * 2]
        )
    ]
    # Beyond the whole numbers that bfloat16 can tell apart, where there is room.
    limit = subject.encoding.max_position
    positions = jnp.asarray(subject.positions + (limit - LENGTH if limit else 1000))
    made = subject.placer.streams(subject.tokens, subject.ones)
    streams = {name: jnp.asarray(values) for name, values in made.items()}

    @compiled_quickly
    def hooks(x, q, k):
        embedded = subject.encoding.embed(x, positions, streams)
        rotated, features, logits = one_attention(encoding, subject, x, q, k, positions)
        return embedded, rotated, features, logits

    narrow, wide = hooks(*low), hooks(*(value.astype(jnp.float32) for value in low))
    for what, index in (("what is embedded", 0), ("what is rotated", 1), ("a feature", 2)):
        pairs = zip(jax.tree.leaves(narrow[index]), jax.tree.leaves(wide[index]), strict=True)
        for got, wanted in pairs:
            rounding = 2.0**-8 * jnp.abs(wanted) + 2.0**-14
            _within(what, got, wanted, rounding)
    size = jnp.einsum(
        "bth,bsh->bhts", *(jnp.linalg.norm(side.astype(jnp.float32), axis=-1) for side in low[1:])
    )
    stretch = max(
        1.0,
        *(
            float(jnp.max(jnp.linalg.norm(rotated, axis=-1) / jnp.linalg.norm(side, axis=-1)))
            for rotated, side in zip(wide[1], (low[1], low[2]), strict=True)
        ),
    )
    unit = size * stretch**2 / config.head_width**0.5
    _within("a logit", narrow[3], wide[3], 2.0**-8 * (2 * unit + jnp.abs(wide[3]) + 1))
    return True


def _within(what: str, got: Any, wanted: Any, bound: Any) -> None:
    error = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))
    worst = float(np.max(error / np.asarray(bound, np.float64)))
    if not worst <= 1:
        raise NotConforming(
            f"{what} in bfloat16 is off by {worst:.3g} times what rounding the result once allows"
        )


def restored_equals_saved(subject: Subject) -> bool:
    """A model that is saved, and made again from its spec, seed and file, gives the same bits.

    All its parameters are there from the beginning: a forward pass makes no more of them.
    """
    streams = subject.placer.streams(subject.tokens, subject.ones)

    def after_a_pass() -> Transformer:
        model = subject.make()
        model(subject.tokens, subject.positions, streams=streams)
        return model

    late = sorted(set(split(nnx.eval_shape(after_a_pass))[1]) - set(subject.parameters))
    if late:
        raise NotConforming(f"a forward pass makes {late}, which are never trained and not saved")
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        nothing = jnp.zeros(1)
        state = {"parameters": subject.parameters, "optimizer": nothing, "step": nothing}
        checkpoints.save(1, state)
        checkpoints.finish()
        merge, shapes = split(without_parameters(subject.make))
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        read = checkpoints.restore(1, {"parameters": abstract(shapes, device)})["parameters"]
    for name, value in subject.parameters.items():
        if not np.array_equal(np.asarray(value), np.asarray(read[name])):
            raise NotConforming(f"{name} came back as other numbers")
    drawn = [nnx.state(m, nnx.Not(nnx.Param)) for m in (merge(read), subject.model)]
    for got, kept in zip(*map(jax.tree.leaves, drawn), strict=True):
        if not np.array_equal(np.asarray(got), np.asarray(kept)):
            raise NotConforming("what the encoding drew, and does not train, is not drawn again")
    return True


def memory_grows_with_the_length(subject: Subject) -> bool:
    """Law 10: by the compiler's account, training needs memory that is linear in the length.

    From 1,024 tokens to 2,048 and from there to 4,096 it grows by something and by twice as much;
    by four times as much if anything has the square of the length. Compiled, and not run.
    """
    model = without_parameters(lambda: Transformer(_of_layers(subject, 1), subject.spec, 4096))
    if model.encoding.max_position is not None and model.encoding.max_position < 4096:
        return False
    merge, parameters = split(model)

    def need(length: int) -> int:
        tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
        names = subject.placer.streams(subject.tokens, None)
        streams = dict.fromkeys(names, tokens)

        def loss(parameters, tokens, positions, segments, streams):
            model = merge(parameters)
            return jnp.sum(model.hidden(tokens, positions, segments, streams)[0])

        lowered = compiled_quickly(jax.grad(loss)).lower(
            parameters, tokens, tokens, tokens, streams
        )
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    needs = [need(length) for length in (1024, 2048, 4096)]
    growth = (needs[2] - needs[1]) / max(needs[1] - needs[0], 1)
    if not growth <= 2.6:
        raise NotConforming(
            f"training on 1,024, 2,048 and 4,096 tokens needs {needs[0]:,}, {needs[1]:,} and "
            f"{needs[2]:,} bytes: more than twice as much more"
        )
    return True


CHECKS: dict[Callable[[Subject], bool], int] = {
    only_encodings_know_the_length: 1,
    packed_equals_separate: 2,
    left_padded_equals_unpadded: 2,
    positions_are_data: 2,
    later_tokens_change_nothing: 2,
    no_gradient_from_the_future: 2,
    cached_equals_full: 4,
    out_of_range_is_loud: 5,
    shift_changes_what_is_said: 6,
    shared_parameters_are_the_same: 7,
    layers_share_or_do_not_as_is_said: 7,
    bfloat16_rounds_once: 6,
    restored_equals_saved: 8,
    blocks_equal_dense: 10,
    memory_grows_with_the_length: 10,
}


def conformance(
    encoding: str, checks: Iterable[Callable[[Subject], bool]] = tuple(CHECKS)
) -> Iterator[Result]:
    """Check an encoding against the laws, one result a check."""
    subject = Subject(encoding)
    for check in checks:
        law = CHECKS[check]
        try:
            yield Result(check.__name__, law, applies=check(subject))
        except NotConforming as error:
            yield Result(check.__name__, law, str(error))
