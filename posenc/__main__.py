"""``python -m posenc list | show SPEC | check SPEC | cite SPEC``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import tyro
from flax import nnx

from posenc.cli import parse_subcommand
from posenc.conformance import conformance
from posenc.data import CORPORA
from posenc.encodings import REGISTRY, find_class, format_spec, parse_spec
from posenc.errors import UserError, one_line_errors
from posenc.training import split
from posenc.transformer import PRESETS, Transformer, count_parameters


@dataclasses.dataclass(frozen=True)
class List:
    """Name the encodings, models and corpora that there are."""


@dataclasses.dataclass(frozen=True)
class Show:
    """Say what an encoding is, and what it adds to a model."""

    encoding: Annotated[str, tyro.conf.Positional]
    """A spec."""
    model: str = "gpt2-small"
    """A preset."""
    length: int = 1024
    """The context length."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Check an encoding against the laws."""

    encoding: Annotated[str, tyro.conf.Positional]
    """A spec, or module:Class of one's own."""


@dataclasses.dataclass(frozen=True)
class Cite:
    """Print the BibTeX entries of an encoding's papers."""

    encoding: Annotated[str, tyro.conf.Positional]
    """A spec."""


def show_list() -> None:
    """Print what there is."""
    print("encodings")
    for name, cls in REGISTRY.items():
        print(f"  {name:<12} {(inspect.getdoc(cls) or '').splitlines()[0]}")
    print("models")
    for name, shape in PRESETS.items():
        print(
            f"  {name:<12} {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
            f"{shape.norm} norm, {shape.activation}"
        )
    print("corpora")
    for name in CORPORA:
        print(f"  {name}")


def show(arguments: Show) -> None:
    """Print an encoding's description, attributes and parameters."""
    from posenc.transformer import preset

    spec, shape = parse_spec(arguments.encoding), preset(arguments.model)
    model = nnx.eval_shape(lambda: Transformer(shape, arguments.encoding, arguments.length))
    print(f"spec: {format_spec(spec)}")
    for part in model.encoding.parts:
        print(f"\n{part.name}: {inspect.getdoc(type(part))}")
        limit = "unbounded" if part.max_position is None else part.max_position
        print(f"\n  max_position {limit}, shift_invariant {part.shift_invariant}, ", end="")
        print(f"pointwise {part.pointwise}, extensions {', '.join(part.extensions) or 'none'}")
    own = {k: v.shape for k, v in split(model)[1].items() if k.startswith("encoding.")}
    total = count_parameters(model)
    print(f"\n{arguments.model} at {arguments.length} tokens: {total:,} parameters, of which")
    for name, sizes in own.items():
        print(f"  {name} {list(sizes)}")
    print("  the encoding has none" if not own else "  belong to the encoding")


def check(arguments: Check) -> None:
    """Run the checks and print one line each; exit code 1 if the encoding breaks a law."""
    failed = 0
    for result in conformance(arguments.encoding):
        failed += result.error is not None
        word = "BROKEN" if result.error else "holds" if result.applies else "says nothing"
        print(f"law {result.law:>2}  {result.check.replace('_', ' '):<36} {word}", flush=True)
        if result.error:
            print(f"        {result.error}")
    if failed:
        raise SystemExit(1)


def cite(arguments: Cite) -> None:
    """Print the references of every distinct part."""
    names = dict.fromkeys(part.name for layer in parse_spec(arguments.encoding) for part in layer)
    for name in names:
        reference = find_class(name).reference
        if not reference:
            raise UserError(f"{name} names no reference")
        print(reference)


def main() -> None:
    """Run one subcommand."""
    commands: dict[str, Callable[..., Any]] = {
        "list": List,
        "show": Show,
        "check": Check,
        "cite": Cite,
    }
    chosen = parse_subcommand(commands, "python -m posenc")
    with one_line_errors():
        if isinstance(chosen, List):
            show_list()
        elif isinstance(chosen, Show):
            show(chosen)
        elif isinstance(chosen, Check):
            check(chosen)
        else:
            cite(chosen)


if __name__ == "__main__":
    main()
