"""All that can be named in a spec, as rows: for ``python -m posenc list`` and the documents."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
from flax import nnx

from posenc.citations import short
from posenc.encodings.base import Dimensions, PositionalEncoding
from posenc.encodings.extension import POLICIES
from posenc.encodings.options import defaults_of
from posenc.encodings.registry import (
    REGISTRY,
    Encodings,
    Part,
    Spec,
    examples,
    find_class,
    parse_spec,
)
from posenc.encodings.sampling import SAMPLERS
from posenc.encodings.scaling import SCALINGS
from posenc.training import split
from posenc.transformer import PRESETS

Row = dict[str, Any]

SIZE, LENGTH = "gpt2-small", 1024

# Where each hook acts.
_PLACES = {
    "embed": "embedding",
    "rotate_queries": "queries, keys",
    "scores": "scores",
    "logits": "logits",
    "weights": "softmax",
    "mix": "values",
}


def places_of(part: PositionalEncoding) -> list[str]:
    """Say where a part acts."""
    places = [place for hook, place in _PLACES.items() if part.replaces(hook)]
    return places + (["visibility"] if part.reach is not None else [])


def encoding_rows() -> list[Row]:
    """Give a row for every registered encoding, as it is in GPT-2 small."""
    shape = PRESETS[SIZE]
    dims = Dimensions(shape.width, shape.heads, shape.head_width, LENGTH)
    rows = []
    for name, spec in examples().items():
        cls = find_class(name)

        def make(spec: str = spec) -> Encodings:
            return Encodings(parse_spec(spec), shape.layers, dims, jax.random.key(0))

        encodings = nnx.eval_shape(make)
        part = encodings.parts[0]
        parameters = sum(value.size for value in split(encodings)[1].values())
        rows.append(
            {
                "name": name,
                "spec": spec,
                "summary": (inspect.getdoc(cls) or "").splitlines()[0],
                "acts_on": places_of(part),
                "options": defaults_of(cls),
                "max_position": part.max_position,
                "shift_invariant": part.shift_invariant,
                "learned": parameters > 0,
                "per_layer": part.per_layer,
                "pointwise": part.pointwise,
                "bidirectional": part.bidirectional,
                "modifier": part.modifier,
                "parameters": parameters,
                "extensions": list(part.extensions),
                "paper": short(cls.reference),
                "reference": cls.reference,
            }
        )
    return rows


def _plain_row(name: str, cls: type) -> Row:
    reference = getattr(cls, "reference", "")
    return {
        "name": name,
        "summary": (inspect.getdoc(cls) or "").splitlines()[0],
        "options": defaults_of(cls),
        "paper": short(reference),
        "reference": reference,
    }


def scaling_rows() -> list[Row]:
    """Give a row for every way to rescale rotations (``rope(scaling=...)`` and ``--extend``)."""
    return [_plain_row(name, cls) for name, cls in SCALINGS.items()]


def sampler_rows() -> list[Row]:
    """Give a row for every way to give positions (``--positions``)."""
    return [_plain_row(name, cls) for name, cls in SAMPLERS.items()]


def policy_rows() -> list[Row]:
    """Give a row for every extension policy (``--extend``)."""
    return [
        {"name": name, **dataclasses.asdict(policy), "paper": short(policy.reference)}
        for name, policy in POLICIES.items()
    ]


def names_in(value: Spec | Part | Any) -> list[str]:
    """Give the names of all parts of a spec, those within options too, in order."""
    if isinstance(value, tuple):
        return [name for item in value for name in names_in(item)]
    if not isinstance(value, Part):
        return [value] if value in SCALINGS else []
    return [value.name, *(name for _, option in value.options for name in names_in(option))]


def reference_of(name: str) -> str:
    """Give the BibTeX entries of whatever a spec may name."""
    others: dict[str, Any] = {**SCALINGS, **SAMPLERS, **POLICIES}
    known = others.get(name) if name not in REGISTRY else None
    return (find_class(name) if known is None else known).reference


def catalogue() -> dict[str, list[Row]]:
    """Give all rows by kind."""
    return {
        "encodings": encoding_rows(),
        "scalings": scaling_rows(),
        "samplers": sampler_rows(),
        "policies": policy_rows(),
    }


def _written(options: dict[str, Any]) -> str:
    def value(given: Any) -> str:
        if given is None or isinstance(given, bool):
            return str(given).lower()
        return f"{given:g}" if isinstance(given, float) else str(given)

    return ", ".join(n if v is ... else f"{n}={value(v)}" for n, v in options.items())


def _table(head: list[str], rows: list[list[str]]) -> str:
    ruled = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in ruled)


def markdown(rows: dict[str, list[Row]]) -> str:
    """Give all rows as Markdown tables, those of ``docs/encodings.md``."""
    words = {True: "yes", False: "no"}
    encodings = [
        [
            f"`{row['name']}`",
            row["paper"],
            ", ".join(row["acts_on"]) or "nothing",
            _written(row["options"]),
            "below " + f"{row['max_position']:,}" if row["max_position"] else "unbounded",
            row["shift_invariant"],
            "per layer" if row["learned"] and row["per_layer"] else words[row["learned"]],
            words[row["pointwise"]],
            words[row["bidirectional"]],
            f"{row['parameters']:,}",
        ]
        for row in rows["encodings"]
    ]
    head = ["name", "paper", "acts on", "options", "positions", "shift-invariant", "learned"]
    tables = ["## Encodings", _table([*head, "pointwise", "bidirectional", "extra"], encodings)]
    for title, kind in (
        ("Scalings of rotations", "scalings"),
        ("Positions of training windows", "samplers"),
        ("Extension at evaluation", "policies"),
    ):
        body = [
            [f"`{row['name']}`", row["paper"], row["summary"], _written(row["options"])]
            for row in rows[kind]
        ]
        tables += [f"## {title}", _table(["name", "paper", "what it does", "options"], body)]
    return "\n\n".join(tables)
