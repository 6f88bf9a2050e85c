"""``python -m posenc list | show SPEC | check SPEC | cite SPEC | generate RUN``."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from flax import nnx

from posenc.catalogue import catalogue, markdown, names_in, places_of, reference_of
from posenc.citations import entries_of, short
from posenc.cli import parse_subcommand
from posenc.compilation import keep_compiled
from posenc.conformance import conformance
from posenc.continuation import continuations
from posenc.data import CORPORA
from posenc.data.hub import RECIPES
from posenc.effects import draw_effects, effects
from posenc.encodings import parse_spec
from posenc.encodings.registry import canonical_spec
from posenc.errors import UserError, one_line_errors
from posenc.generate import Sampling
from posenc.training import split
from posenc.transformer import PRESETS, Transformer, count_parameters, preset

KINDS = {
    "encodings": "encodings",
    "scalings of rotations: rope(scaling=NAME(...)) or --extend": "scalings",
    "positions of training windows: --positions": "samplers",
    "extension at evaluation: --extend": "policies",
}


@dataclasses.dataclass(frozen=True)
class List:
    """List every encoding, sampler, extension policy, model and corpus."""

    json: bool = False
    """As JSON, with everything that is known of each."""
    markdown: bool = False
    """As the tables of docs/encodings.md."""


@dataclasses.dataclass(frozen=True)
class Show:
    """Say what an encoding is and adds to a model, and draw what it does over distance."""

    encoding: Annotated[str, tyro.conf.Positional]
    """A spec."""
    model: str = "gpt2-small"
    """A preset."""
    length: int = 1024
    """The training length."""
    figure: Path | None = None
    """The PNG file to draw; show-SPEC.png unless told otherwise."""


@dataclasses.dataclass(frozen=True)
class Check:
    """Check an encoding against the laws."""

    encoding: Annotated[str, tyro.conf.Positional]
    """A spec, or module:Class of one's own."""


@dataclasses.dataclass(frozen=True)
class Cite:
    """Print the BibTeX entries of the papers of encodings, samplers and extension policies."""

    encoding: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Specs."""


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue texts by the model of a finished run."""

    run: Annotated[Path, tyro.conf.Positional]
    """A folder that train.py made."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """What to go on from; give it several times for several. Without one, a document begins."""
    tokens: int = 100
    """How many to add at most: a text ends where the model would begin another document."""
    temperature: float = 0.0
    """What logits are divided by; 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens that has so much of the probability."""
    seed: int = 0
    """Of the draws."""
    extend: str | None = None
    """A policy, such as clamp or "yarn(factor=4)"; see `python -m posenc list`."""
    checkpoint: int | None = None
    """A step, instead of the last."""
    run_seed: int | None = None
    """Which model, of a run that trained several seeds at once."""
    allow_plugins: bool = False
    """Import the code that the run's encoding names (module:Class), if you trust it."""


def show_list(arguments: List) -> None:
    """Print what there is."""
    rows = catalogue()
    if arguments.json:
        print(json.dumps({**rows, "models": list(PRESETS), "corpora": list(CORPORA)}, default=str))
        return
    if arguments.markdown:
        print(markdown(rows))
        return
    for title, kind in KINDS.items():
        print(title)
        for row in rows[kind]:
            print(f"  {row['name']:<15} {row['summary']}")
    print("models")
    for name, shape in PRESETS.items():
        print(
            f"  {name:<15} {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
            f"{shape.norm} norm, {shape.activation}"
        )
    print("corpora")
    for name in CORPORA:
        print(f"  {name}")
    print("data sets of the hub: python -m posenc.data tokens")
    for name, source in RECIPES.items():
        print(f"  {name:<15} {source.path}")


def show(arguments: Show) -> None:
    """Print an encoding's description, attributes and parameters, and draw it."""
    spec, shape = canonical_spec(arguments.encoding), preset(arguments.model)
    if arguments.length < 1:
        raise UserError(f"--length is {arguments.length}: it must be at least 1")
    model = nnx.eval_shape(lambda: Transformer(shape, arguments.encoding, arguments.length))
    print(f"spec: {spec}")
    for part in {type(part): part for part in model.encoding.parts}.values():
        print(f"\n{part.name}: {inspect.getdoc(type(part))}")
        limit = "unbounded" if part.max_position is None else part.max_position
        print(f"\n  acts on {', '.join(places_of(part)) or 'nothing'}")
        print(f"  max_position {limit}, shift_invariant {part.shift_invariant}, ", end="")
        print(f"pointwise {part.pointwise}, extensions {', '.join(part.extensions) or 'none'}")
        print(f"  paper: {short(part.reference) or 'none'}")
    own = {k: v.shape for k, v in split(model)[1].items() if k.startswith("encoding.")}
    total = count_parameters(model)
    print(f"\n{arguments.model} at {arguments.length} tokens: {total:,} parameters, of which")
    for name, sizes in list(own.items())[:8]:
        print(f"  {name} {list(sizes)}")
    if len(own) > 8:
        print(f"  and {len(own) - 8} more like these")
    print("  the encoding has none" if not own else "  belong to the encoding")
    panels = effects(arguments.encoding, shape, arguments.length)
    if not panels:
        print("\nnothing to draw: it adds nothing to embeddings, queries, keys or logits")
        return
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", spec).strip("-")
    path = arguments.figure or Path(f"show-{slug}.png")
    draw_effects(spec, panels, arguments.length, path)
    print(f"\nfigure: {path}")


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
    """Print the references of every distinct name in the specs."""
    specs = [parse_spec(text) for text in arguments.encoding]
    names = dict.fromkeys(n for spec in specs for n in names_in(spec))
    entries = {name: reference_of(name) for name in names}
    for name, entry in entries.items():
        if not entry:
            print(f"% {name} has no paper of its own")
    found = [entry for reference in entries.values() for entry in entries_of(reference)]
    print("\n\n".join(dict.fromkeys(found)))


def generate_text(arguments: Generate) -> None:
    """Print each prompt with what follows; a line with its number above, where there are several.

    Characters that could steer a terminal are shown as "�".
    """
    keep_compiled()
    texts = continuations(
        arguments.run,
        arguments.prompt or ("",),
        arguments.tokens,
        Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed),
        extend=arguments.extend,
        checkpoint=arguments.checkpoint,
        run_seed=arguments.run_seed,
        allow_plugins=arguments.allow_plugins,
    )
    encoding = sys.stdout.encoding or "utf-8"
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number}")
        shown = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
        print(shown.encode(encoding, "replace").decode(encoding))


def main() -> None:
    """Run one subcommand."""
    commands: dict[str, Callable[..., Any]] = {
        "list": List,
        "show": Show,
        "check": Check,
        "cite": Cite,
        "generate": Generate,
    }
    chosen = parse_subcommand(commands, "python -m posenc")
    with one_line_errors():
        if isinstance(chosen, List):
            show_list(chosen)
        elif isinstance(chosen, Show):
            show(chosen)
        elif isinstance(chosen, Check):
            check(chosen)
        elif isinstance(chosen, Generate):
            generate_text(chosen)
        else:
            cite(chosen)


if __name__ == "__main__":
    main()
