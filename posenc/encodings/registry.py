"""Specs of encodings: read, written, and turned into modules.

    spec  := layer (',' layer)*          the list of layers repeats over the depth
    layer := sum ['*' count]
    sum   := part ('+' part)*
    part  := name ['(' key '=' value, ... ')']

A name is a registered one or ``module:Class``; a value is a literal (number, quoted or bare word,
true, false, none, ``[list]``) or a part. Specs are parsed, never evaluated.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import typing
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from posenc.encodings.absolute import LearnedAbsolute, Sinusoidal
from posenc.encodings.base import (
    Dimensions,
    EncodingError,
    PositionalEncoding,
    Streams,
    Sum,
)
from posenc.encodings.bias import FIRE, T5, ALiBi, KerpleLog, KerplePower, Sandwich
from posenc.encodings.contextual import DAPE, CoPE, Selective, StickBreaking
from posenc.encodings.extension import POLICIES
from posenc.encodings.forgetting import Cable, FoX
from posenc.encodings.grape import GrapeA, GrapeAP
from posenc.encodings.mixture import Heads, concerned
from posenc.encodings.nope import NoPE
from posenc.encodings.options import Recipe, SpecError, checked, fits, nearest, options_of
from posenc.encodings.path import PaTH
from posenc.encodings.polar import PoPE
from posenc.encodings.relative import Shaw, TransformerXL
from posenc.encodings.remapping import REMAPS
from posenc.encodings.rotary import FoPE, HoPE, PRoPE, RoPE, XPos
from posenc.encodings.sampling import LAYER_POSITIONS, SAMPLERS, Sampler
from posenc.encodings.scaling import SCALINGS, Scaling
from posenc.encodings.selective_rotary import SelectiveRoPE
from posenc.encodings.temperature import (
    ASEntmax,
    LogN,
    ScaleInvariant,
    Sink,
    SSMax,
    Temperature,
)
from posenc.encodings.tokenwise import Abacus, Coupled, TokenStream
from posenc.encodings.window import Window

REGISTRY: dict[str, type[PositionalEncoding]] = {
    "wpe": LearnedAbsolute,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "p_rope": PRoPE,
    "xpos": XPos,
    "pope": PoPE,
    "fope": FoPE,
    "hope": HoPE,
    "alibi": ALiBi,
    "t5": T5,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "fire": FIRE,
    "sandwich": Sandwich,
    "scale_invariant": ScaleInvariant,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "grape_a": GrapeA,
    "grape_ap": GrapeAP,
    "path": PaTH,
    "selective_rope": SelectiveRoPE,
    "cope": CoPE,
    "dape": DAPE,
    "fox": FoX,
    "cable": Cable,
    "stick_breaking": StickBreaking,
    "selective": Selective,
    "window": Window,
    "nope": NoPE,
    "abacus": Abacus,
    "coupled": Coupled,
    "heads": Heads,
    "logn": LogN,
    "ssmax": SSMax,
    "asentmax": ASEntmax,
    "temperature": Temperature,
    "sink": Sink,
}


# Specs to show those by whose name alone is none.
_EXAMPLES = {
    "window": "window(size=24)",
    "heads": "heads(of=[rope, nope])",
    "temperature": "temperature(factor=4)",
}


def examples() -> dict[str, str]:
    """Give a spec of every registered encoding: its name, with what it cannot be without."""
    return {name: _EXAMPLES.get(name, name) for name in REGISTRY}


MAX_NESTING = 16
MAX_LAYERS = 1024
MAX_DIGITS = 40


@dataclasses.dataclass(frozen=True)
class Part:
    """One named thing with its options, as written in a spec."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{key}={_write(value)}' for key, value in self.options)})"


Layer = tuple[Part, ...]
Spec = tuple[Layer, ...]


def _write(value: Any) -> str:
    if isinstance(value, Part):
        return str(value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_write, value)) + "]"
    if isinstance(value, str):
        # Quoted wherever a bare word would be read as something else.
        word = re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII)
        bare = word and value not in REGISTRY and value.lower() not in _WORDS
        return value if bare else json.dumps(value)
    return repr(value)


_WORDS = {"true": True, "false": False, "none": None}
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.:])
      | (?P<name>[A-Za-z_][\w.]*(?::[A-Za-z_]\w*)?)
      | (?P<string>"(?:[^"\\]|\\.)*"|'[^'\\]*')
      | (?P<mark>[(),=+*\[\]])
    )""",
    re.VERBOSE | re.ASCII,
)


class _Reader:
    """A recursive-descent reader over the tokens of one spec."""

    def __init__(self, text: str):
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        end = len(text.rstrip())
        place = 0
        while place < end:
            match = _TOKEN.match(text, place)
            if not match:
                raise self.error("cannot read on", place)
            kind = str(match.lastgroup)
            self.tokens.append((kind, match.group(kind), match.start(kind)))
            place = match.end()
        self.next = 0

    def error(self, what: str, place: int | None = None) -> SpecError:
        if place is None:
            place = self.tokens[self.next][2] if self.next < len(self.tokens) else len(self.text)
        return SpecError(
            f"spec {self.text!r}: {what} at character {place + 1} "
            "(the form is name(key=value, ...), joined by '+', '*n' and ',')"
        )

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.next][:2] if self.next < len(self.tokens) else ("end", "")

    def take(self, mark: str) -> bool:
        if self.peek() == ("mark", mark):
            self.next += 1
            return True
        return False

    def need(self, mark: str) -> None:
        if not self.take(mark):
            raise self.error(f"expected {mark!r}")

    def spec(self) -> Spec:
        layers: list[Layer] = []
        while True:
            parts = [self.part(0)]
            while self.take("+"):
                parts.append(self.part(0))
            count = 1
            if self.take("*"):
                text = self.peek()[1]
                if not re.fullmatch(r"\d{1,4}", text) or not 1 <= int(text) <= MAX_LAYERS:
                    raise self.error(f"expected a count from 1 to {MAX_LAYERS} after '*'")
                count = int(text)
                self.next += 1
            layers += [tuple(parts)] * count
            if len(layers) > MAX_LAYERS:
                raise self.error(f"more than {MAX_LAYERS} layers")
            if not self.take(","):
                return tuple(layers)

    def part(self, depth: int) -> Part:
        kind, name = self.peek()
        if kind != "name":
            raise self.error("expected a name")
        self.next += 1
        return Part(name, self.options(depth) if self.take("(") else ())

    def options(self, depth: int) -> tuple[tuple[str, Any], ...]:
        options: dict[str, Any] = {}
        if self.take(")"):
            return ()
        while True:
            kind, key = self.peek()
            if kind != "name" or not key.isidentifier():
                raise self.error("expected an option's name")
            if key in options:
                raise self.error(f"option {key!r} given twice")
            self.next += 1
            self.need("=")
            options[key] = self.value(depth + 1)
            if self.take(")"):
                # Sorted, so that one thing has one spec in whatever order it was written.
                return tuple(sorted(options.items()))
            self.need(",")

    def value(self, depth: int) -> Any:
        if depth > MAX_NESTING:
            raise self.error(f"nested more than {MAX_NESTING} deep")
        kind, text = self.peek()
        if self.take("["):
            items: list[Any] = []
            while not self.take("]"):
                if items:
                    self.need(",")
                items.append(self.value(depth + 1))
            return tuple(items)
        if kind not in ("number", "string", "name"):
            raise self.error("expected a value")
        if kind == "name":
            if text.lower() in _WORDS:
                self.next += 1
                return _WORDS[text.lower()]
            part = self.part(depth)
            is_part = part.options or text in REGISTRY or ":" in text
            return part if is_part else text
        self.next += 1
        if kind == "number":
            if len(text) > MAX_DIGITS:
                raise self.error(f"a number of more than {MAX_DIGITS} characters, just before")
            if re.fullmatch(r"[+-]?\d+", text):
                return int(text)
            if not math.isfinite(float(text)):
                raise self.error("a number beyond float64, just before")
            return float(text)
        if text[0] == "'":
            return text[1:-1]
        try:
            return json.loads(text)
        except ValueError:
            raise self.error("a string that cannot be read, just before") from None


def _closed(reader: _Reader, result: Any) -> Any:
    if reader.peek()[0] != "end":
        raise reader.error(f"unexpected {reader.peek()[1]!r}")
    return result


def parse_spec(text: str) -> Spec:
    """Read a spec into its layers, each a tuple of parts.

    Raises:
        SpecError: with the place and the expected form.
    """
    if not text.strip():
        raise SpecError("an empty spec: name an encoding (" + ", ".join(REGISTRY) + ")")
    reader = _Reader(text)
    return _closed(reader, reader.spec())


def parse_part(text: str) -> Part:
    """Read a single ``name(key=value, ...)``, as extension policies are written."""
    reader = _Reader(text)
    return _closed(reader, reader.part(0))


def format_spec(spec: Spec) -> str:
    """Write a spec in its one canonical form; ``parse_spec`` reads back the same layers."""
    written: list[tuple[str, int]] = []
    for layer in spec:
        text = "+".join(map(str, layer))
        if written and written[-1][0] == text:
            written[-1] = (text, written[-1][1] + 1)
        else:
            written.append((text, 1))
    if len(written) == 1:  # the list repeats anyway
        return written[0][0]
    return ",".join(text if count == 1 else f"{text}*{count}" for text, count in written)


def canonical_part(part: Part) -> Part:
    """Give the one way to write a part, of all that mean the same to what is registered.

    ``theta=10000.0`` and ``theta=10000`` are one where a float is meant.
    """
    known: dict[str, Any] = {**SCALINGS, **SAMPLERS, **REMAPS, **REGISTRY, "drop": Temperature}
    hints = typing.get_type_hints(known[part.name].__init__) if part.name in known else {}
    options = []
    for key, value in part.options:
        if isinstance(value, Part):
            value = canonical_part(value)
        is_float = isinstance(value, float) and fits(1.0, hints.get(key, str))
        whole = is_float and value.is_integer() and abs(value) < 2**53
        options.append((key, int(value) if whole else value))
    return Part(part.name, tuple(options))


def canonical_spec(text: str) -> str:
    """Give the one spec of all that mean the same to the registered encodings."""
    return format_spec(tuple(tuple(map(canonical_part, layer)) for layer in parse_spec(text)))


def find_class(name: str, *, allow_plugins: bool = True) -> type[PositionalEncoding]:
    """Give the class that a spec's name stands for.

    Raises:
        SpecError: an unknown name (with the nearest ones), a plug-in that is not allowed, cannot
            be imported or is no encoding.
    """
    if ":" not in name:
        if name not in REGISTRY:
            raise SpecError(f"unknown encoding {name!r}: {nearest(name, REGISTRY)}")
        return REGISTRY[name]
    if not allow_plugins:
        raise SpecError(
            f"{name} names code outside posenc, which runs only where you say so: "
            "--allow-plugins, if you trust it"
        )
    module_name, class_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(
            f"cannot import {module_name!r} of plug-in {name}: {error}; "
            "it must lie on Python's path (PYTHONPATH)"
        ) from None
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, PositionalEncoding)):
        raise SpecError(f"plug-in {name} is no subclass of posenc.PositionalEncoding")
    return cls


def make(
    part: Part, dims: Dimensions, rngs: nnx.Rngs, *, allow_plugins: bool = True
) -> PositionalEncoding:
    """Make the module of one part.

    Raises:
        SpecError: an unknown name or option.
        EncodingError: the encoding cannot be made for these dimensions.
    """
    cls = find_class(part.name, allow_plugins=allow_plugins)
    hints = typing.get_type_hints(cls.__init__)
    given = {
        key: _made(value, hints.get(key, Any), dims, rngs, allow_plugins)
        for key, value in part.options
        if key in options_of(cls)
    }
    written = {key: _write(value) for key, value in part.options}
    return cls(dims, rngs, **checked(cls, part.name, {**dict(part.options), **given}, written))


def make_scaling(part: Part | str) -> Scaling:
    """Make a way to rescale rotary frequencies from how a spec or a policy names it."""
    part = Part(part) if isinstance(part, str) else part
    if part.name not in SCALINGS:
        raise SpecError(f"unknown scaling {part.name!r}: {nearest(part.name, SCALINGS)}")
    cls = SCALINGS[part.name]
    return cls(**checked(cls, part.name, dict(part.options)))


def make_sampler(text: str) -> Sampler:
    """Make a sampler of positions from how ``--positions`` names it."""
    part = parse_part(text)
    if part.name not in SAMPLERS:
        raise SpecError(
            f"unknown way to give positions {part.name!r}: {nearest(part.name, SAMPLERS)}"
        )
    cls = SAMPLERS[part.name]
    return cls(**checked(cls, part.name, dict(part.options)))


def _made(value: Any, hint: Any, dims: Dimensions, rngs: nnx.Rngs, allow_plugins: bool) -> Any:
    """Make the parts among an option's values."""
    if isinstance(value, tuple):
        inner = (*typing.get_args(hint), Any)[0]
        return tuple(_made(item, inner, dims, rngs, allow_plugins) for item in value)
    if isinstance(value, Part) and hint is Recipe:
        find_class(value.name, allow_plugins=allow_plugins)
        return Recipe(str(value), lambda own: make(value, own, rngs, allow_plugins=allow_plugins))
    if isinstance(value, Part | str) and Scaling in typing.get_args(hint):
        return make_scaling(value)
    if isinstance(value, Part):
        return make(value, dims, rngs, allow_plugins=allow_plugins)
    return value


class Encodings(nnx.Module):
    """The encodings of a model: distinct parts, and which of them each layer uses.

    Args:
        spec: parsed; its list of layers repeats over the depth.
        layers: depth of the model.
        dims: of the model.
        key: the stream of randomness that belongs to the encodings alone.
        allow_plugins: whether ``module:Class`` may be imported.
    """

    def __init__(
        self,
        spec: Spec,
        layers: int,
        dims: Dimensions,
        key: jax.Array,
        *,
        allow_plugins: bool = True,
    ):
        parts: list[PositionalEncoding] = []
        shared: dict[str, int] = {}  # by how a part is written: 1, 1.0 and true are equal
        used: list[tuple[int, ...]] = []
        for layer in spec:
            written = [str(part) for part in layer]
            if len(set(written)) < len(written):
                twice = max(written, key=written.count)
                raise SpecError(f"{twice} twice in one layer: write it once")
        for depth in range(layers):
            indices = []
            for part in spec[depth % len(spec)]:
                if str(part) not in shared:
                    rngs = nnx.Rngs(jax.random.fold_in(key, len(parts)))
                    parts.append(make(part, dims, rngs, allow_plugins=allow_plugins))
                    indices.append(len(parts) - 1)
                    if not parts[-1].per_layer:
                        shared[str(part)] = len(parts) - 1
                else:
                    indices.append(shared[str(part)])
            used.append(tuple(indices))
        self.dims = dims
        self.parts = nnx.List(parts)
        self.used = tuple(used)
        self._check_layers()

    def _check_layers(self) -> None:
        """Raise ``SpecError`` for parts that cannot be added."""
        parts = self.parts
        for indices in dict.fromkeys(self.used):
            turning = [parts[i] for i in indices if parts[i].turns]
            wide = [part.name for part in turning if part.widens]
            if wide and len(turning) > 1:
                other = next(part.name for part in turning if part.name != wide[0])
                raise SpecError(
                    f"{wide[0]} and {other} cannot be added in one layer: {wide[0]} makes more "
                    "channels than are projected, and what they turn by is not defined"
                )
        read = [part.name for part in parts if isinstance(part, TokenStream)]
        if len(set(read)) < len(read):
            raise SpecError(f"{max(read, key=read.count)} twice: its stream is one for a model")
        for indices in dict.fromkeys(self.used):
            for hook in ("scores", "weights", "mix"):
                rivals = [parts[i].name for i in indices if parts[i].replaces(hook)]
                if len(rivals) > 1:
                    raise SpecError(
                        f"{' and '.join(rivals)} cannot be added in one layer: "
                        f"each has {hook} of its own"
                    )
            reading = [parts[i].name for i in indices if parts[i].between]
            sinking = [parts[i].name for i in indices if parts[i].sinks]
            if reading and sinking:
                raise SpecError(
                    f"{reading[0]} reads every slot between a key and its query, and "
                    f"{sinking[0]} leaves out those between sinks and window: use a window "
                    "without sinks"
                )

    def at(self, layer: int) -> PositionalEncoding:
        """Give the encoding of one layer."""
        chosen = tuple(self.parts[index] for index in self.used[layer])
        return chosen[0] if len(chosen) == 1 else Sum(chosen)

    @property
    def max_position(self) -> int | None:
        """The smallest limit of the parts, or None."""
        limits = [part.max_position for part in self.parts if part.max_position is not None]
        return min(limits) if limits else None

    def prepare(self, positions: jax.Array, streams: Streams) -> tuple[Any, ...]:
        """Prepare every distinct part, once a forward pass."""
        return tuple(part.prepare(positions, streams) for part in self.parts)

    def prepared_at(self, prepared: tuple[Any, ...], layer: int) -> Any:
        """Pick a layer's share of what ``prepare`` gave."""
        chosen = tuple(prepared[index] for index in self.used[layer])
        return chosen[0] if len(chosen) == 1 else chosen

    def prepared_in(
        self,
        prepared: tuple[Any, ...],
        layers: Sequence[int],
        encoding: PositionalEncoding,
        positions: jax.Array,
        streams: Streams,
    ) -> Any:
        """Pick the share of any of several layers, and prepare what is not the same in all.

        Args:
            prepared: what ``prepare`` gave.
            layers: that it may be; of one, nothing is prepared again.
            encoding: of that layer, as ``at`` gives it.
            positions: as they were.
            streams: likewise.
        """
        parts = encoding.parts if isinstance(encoding, Sum) else [encoding]
        places = zip(*(self.used[layer] for layer in layers), strict=True)
        chosen = tuple(
            prepared[indices[0]] if len(set(indices)) == 1 else part.prepare(positions, streams)
            for part, indices in zip(parts, places, strict=True)
        )
        return chosen[0] if len(chosen) == 1 else chosen

    def embed(self, x: jax.Array, positions: jax.Array, streams: Streams) -> jax.Array:
        """Let every distinct part act on the token embeddings, in order."""
        for part in self.parts:
            x = part.embed(x, positions, streams)
        return x

    @staticmethod
    def _read(part: PositionalEncoding, positions: Any, streams: Any) -> list[Any]:
        """Give what a part is asked about: its own stream, or positions, each layer's too."""
        if isinstance(part, TokenStream):
            return [streams[part.stream]] if part.stream in streams else []
        own = streams.get(LAYER_POSITIONS)
        layers = [] if own is None else [own[..., layer] for layer in range(own.shape[-1])]
        return [positions, *layers]

    def representable(self, positions: Any, streams: Any = None) -> Any:
        """Say which tokens every part can represent; None when all can, known beforehand."""
        every = None
        for part in self.parts:
            for places in self._read(part, positions, streams or {}):
                own = part.representable(places)
                if own is not None:
                    every = own if every is None else every & own
        return every

    def check_bidirectional(self) -> None:
        """Raise ``EncodingError`` if a part has no form without the causal mask."""
        for part in self.parts:
            if not part.bidirectional:
                raise EncodingError(
                    f"{part.name} is defined under the causal mask only: keep causal=True, or "
                    "choose another encoding"
                )

    def check_positions(self, positions: Any, streams: Any = None) -> None:
        """Raise ``PositionOutOfRange`` for a position that some part cannot represent."""
        for part in self.parts:
            for places in self._read(part, positions, streams or {}):
                part.check_positions(places)

    def extends(self, policy: str, length: int) -> list[int]:
        """Give the indices of the parts that a policy is to change for ``length`` positions.

        An empty list where a part ends before ``length`` and has no such policy.
        """
        if policy in self._WHOLE:
            ends = self.max_position is not None and self.max_position < length
            return [] if policy == "window" and ends else list(range(len(self.parts)))
        ending = [p.max_position is not None and p.max_position < length for p in self.parts]
        chosen = concerned(policy, self.parts)
        if any(end and index not in chosen for index, end in enumerate(ending)):
            return []
        return [i for i in chosen if ending[i] or self.parts[i].max_position is None]

    def extend(self, policy: Part, length: int) -> list[str]:
        """Extend every part that has the policy, for ``length`` positions.

        A part whose positions end at ``length`` or later stays as it is.

        Returns:
            The names of the parts that were extended.

        Raises:
            EncodingError: a part that ends before ``length`` has no such policy; or no part has
                what the policy needs; or an option is unknown.
        """
        if policy.name not in self.policies():
            raise EncodingError(
                f"unknown extension policy {policy.name!r}: "
                f"{nearest(policy.name, sorted(self.policies()))}"
            )
        chosen = self.extends(policy.name, length)
        for part in self.parts:
            if part.max_position is not None and part.max_position < length and not chosen:
                part.extended(policy.name, length, **dict(policy.options))  # raises
        needs = POLICIES[policy.name].needs if policy.name in POLICIES else "part"
        if not chosen and needs != "table":
            for part in self.parts:
                if needs == "rotation" and part.turns:
                    part.extended(policy.name, length, **dict(policy.options))  # raises
            raise EncodingError(
                f"extension policy {policy.name} needs a {needs} to act on, and "
                f"{', '.join(dict.fromkeys(p.name for p in self.parts))} has none"
            )
        if policy.name in self._WHOLE:
            getattr(self, f"_{policy.name}")(dict(policy.options))
        else:
            options = dict(policy.options)
            extended = {i: self.parts[i].extended(policy.name, length, **options) for i in chosen}
            for index, part in extended.items():
                self.parts[index] = part
        self._check_layers()
        return [self.parts[index].name for index in chosen]

    # Policies that act on all parts and layers alike, whatever they are.
    _WHOLE = ("window", "drop")

    def _window(self, options: dict[str, Any]) -> None:
        """Let every layer see a window only, and sinks."""
        part = Window(self.dims, nnx.Rngs(0), **checked(Window, "window", options))
        self.parts.append(part)
        self.used = tuple((*indices, len(self.parts) - 1) for indices in self.used)

    def _drop(self, options: dict[str, Any]) -> None:
        """Remove the encodings from all layers; what tells nothing of position stays.

        Gelberg et al., 2025. Its softmax scale is an option: ``drop(factor=4, slope=0.412)``.
        """
        for index, part in enumerate(self.parts):
            kept = part.modifiers()
            self.parts[index] = NoPE(self.dims, nnx.Rngs(0)) if kept is None else kept
        if options:
            options = {"slope": 0.1, "power": 1.0, **options}
            scale = Temperature(self.dims, nnx.Rngs(0), **checked(Temperature, "drop", options))
            self.parts.append(scale)
            self.used = tuple((*indices, len(self.parts) - 1) for indices in self.used)

    def policies(self) -> set[str]:
        """Give the names of all policies, those of plug-ins among the parts included."""
        return set(POLICIES).union(*(part.extensions for part in self.parts))


def build(
    text: str,
    layers: int,
    dims: Dimensions,
    key: jax.Array,
    *,
    allow_plugins: bool = True,
) -> Encodings:
    """Make the encodings of a model from a spec."""
    spec = parse_spec(canonical_spec(text))
    return Encodings(spec, layers, dims, key, allow_plugins=allow_plugins)
