"""Rows grouped into the lines of a table or a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.report.rows import Row
from posenc.errors import UserError

# Rows that differ in one of these answer different questions and are never averaged; where rows
# differ in one, the labels say which is which.
SHOWN = (
    *(
        "settings",
        "model",
        "sharing",
        "positions",
        "train_length",
        "targets",
        "train_tokens",
        "checkpoint",
        "data.name",
    ),
    *("data.tokenizer", "bos", "data.bos", "dtype", "matmul_precision"),
    *("longest_length", "block_spacing", "blocks_per_document", "tokens_per_document"),
)
# Nor where they differ in one of these, which stay out of the labels when they say no more than
# what stands there already (a checksum beside its version).
SETTINGS = (
    *SHOWN,
    *("checkpoint_step", "data.version", "data.split_version", "data.split_rule"),
    *("data.sha256", "data.tokenizer_sha256", "parameters", "recipe_hash"),
    *("tuning.grid", "tuning.steps", "tuning.seed"),
)
# What rows meant that were written before it could be chosen; labels name anything else.
_USUAL = {
    **{"sharing": "all", "positions": "sequential", "lengths": "fixed", "packing": "masked"},
    **{"parent.run": "None", "settings": "shared"},
}
# Whose values say what they are.
_BARE = ("settings",)
# Encodings have their own number of parameters: it separates runs of one encoding only.
_WITHIN_ENCODING = ("parameters",)


@dataclass(frozen=True)
class Cell:
    """One measurement of one line: a row a seed, in order of the seeds."""

    rows: tuple[Row, ...]

    @property
    def undefined(self) -> bool:
        """Whether no seed has a value because the encoding has none here."""
        return not any(row["defined"] for row in self.rows)

    def values(self, value: str = "nll") -> dict[int, float]:
        """The value of every seed that has one, in nats per token."""
        return {row["seed"]: float(row[value]) for row in self.rows if row[value] is not None}

    def mean(self, value: str = "nll") -> float | None:
        """The mean over the seeds that have a value, or None; NaN and infinity pass through."""
        values = list(self.values(value).values())
        if not all(map(math.isfinite, values)):
            return sum(values)
        return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True)
class Line:
    """One encoding under one set of conditions, with its measurements by place.

    `variant` counts the lines of the same encoding from 0.
    """

    label: str
    encoding: str
    variant: int
    train_length: int
    cells: dict[Any, Cell]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that has a row, ascending."""
        return tuple(sorted({row["seed"] for cell in self.cells.values() for row in cell.rows}))


def by_length(row: Row) -> Hashable:
    """The place of a row of a protocol that gives one number a length."""
    return row["length"]


def by_position(row: Row) -> Hashable:
    """The place of a per-position row: (length, bucket from, bucket to), half open."""
    return row["length"], row.get("position_from"), row.get("position_to")


def lines_of(
    rows: Iterable[Row], protocol: str, place: Callable[[Row], Hashable] = by_length
) -> list[Line]:
    """The lines of one protocol, encodings in order of first appearance.

    A line is labelled with its encoding, with its extension policy where it was extended, and with
    those `SETTINGS` in which the rows differ: rows of any protocol, so that a line has one label
    in all of them. Raises `UserError` where one seed of a line has two different values at one
    place.
    """
    rows = list(rows)
    chosen = [row for row in rows if row["protocol"] == protocol]
    settings = _varying(rows, chosen)
    groups: dict[str, dict[tuple[str, ...], list[Row]]] = {}
    for row in chosen:
        key = tuple(_lookup(row, name) for name in settings)
        groups.setdefault(row["encoding"], {}).setdefault(key, []).append(row)
    lines: list[Line] = []
    for encoding, members in groups.items():
        variant = 0
        for key, group in members.items():
            for policy, part in _by_policy(group):
                words = [encoding, *([f"extend={policy}"] if policy else [])]
                words += [
                    _word(name, _lookup(part[0], name))
                    for name, usual in _USUAL.items()
                    if name not in settings and _lookup(part[0], name) != usual
                ]
                words += [
                    _word(name, value)
                    for name, value in zip(settings, key, strict=True)
                    if name not in _WITHIN_ENCODING or len(members) > 1
                ]
                label = " ".join(", ".join(words).split())
                cells = _cells(label, part, place)
                lines.append(Line(label, encoding, variant, part[0]["train_length"], cells))
                variant += 1
    return lines


def chosen_checkpoints(rows: Iterable[Row]) -> str:
    """Say which checkpoints are not the last of their runs; nothing where all are."""
    steps = {row.get("checkpoint_step") for row in rows if row.get("checkpoint") == "chosen"}
    known = ", ".join(f"{step:,}" for step in sorted(step for step in steps if step is not None))
    if not steps:
        return ""
    at = f", step {known}" if known else ""
    return (
        f"Checkpoints are not the last of their runs: chosen by hand{at}. "
        "Rows do not say by what; chosen by losses at far lengths they would flatter these."
    )


def notes_of(lines: Sequence[Line], named: bool = True) -> list[str]:
    """Every note of the lines' rows, once, with the lengths (`named`: and lines) it holds for."""
    return _collect(lines, lambda row: row["notes"], named)


def reasons_of(lines: Sequence[Line]) -> list[str]:
    """Every reason why a value is undefined, once, with the lines and lengths it holds for."""
    return _collect(
        lines, lambda row: [] if row["defined"] else [row["reason"] or "no reason"], True
    )


def _varying(rows: Sequence[Row], chosen: Sequence[Row]) -> list[str]:
    """The settings that tell the rows apart, without those that add nothing."""
    names: list[str] = []
    for name in SETTINGS:
        # The number of targets belongs to a protocol: two protocols do not differ in it.
        pool = chosen if name == "targets" else rows
        base = [*(["encoding"] if name in _WITHIN_ENCODING else []), *names]
        before = {tuple(_lookup(row, key) for key in base) for row in pool}
        after = {tuple(_lookup(row, key) for key in [*base, name]) for row in pool}
        differs = len({_lookup(row, name) for row in pool}) > 1
        if len(after) > len(before) or (name in SHOWN and differs):
            names.append(name)
    return names


def _lookup(row: Row, name: str) -> str:
    value: Any = _USUAL | row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return str(value)


def _word(name: str, value: str) -> str:
    if name in _BARE:
        return value
    return f"{name}={value[:12] if name.endswith('sha256') else value}"


def _by_policy(rows: Sequence[Row]) -> list[tuple[str | None, list[Row]]]:
    """Split rows by extension policy.

    A policy acts only beyond some length; below it the row without a policy is the policy's own,
    and the line without one is there only if it goes on where a policy acts.
    """
    starts: dict[str, int] = {}
    for row in rows:
        if row["extend"]:
            starts[row["extend"]] = min(starts.get(row["extend"], row["length"]), row["length"])
    plain = [row for row in rows if not row["extend"]]
    parts: list[tuple[str | None, list[Row]]] = []
    if not starts or any(row["length"] >= min(starts.values()) for row in plain):
        parts.append((None, plain))
    for policy, start in starts.items():
        own = [
            row
            for row in rows
            if row["extend"] == policy or (not row["extend"] and row["length"] < start)
        ]
        parts.append((policy, own))
    return parts


def _cells(label: str, rows: Iterable[Row], place: Callable[[Row], Hashable]) -> dict[Any, Cell]:
    found: dict[Any, dict[int, Row]] = {}
    for row in rows:
        seeds = found.setdefault(place(row), {})
        other = seeds.setdefault(row["seed"], row)
        # A run that was scored twice may repeat a row; anything else would be averaged unseen.
        same = other["run"] == row["run"] and repr(other["nll"]) == repr(row["nll"])
        if other is not row and not same:
            raise UserError(
                f"two results for {label} at length {row['length']}, seed {row['seed']} "
                f"(runs {other['run']} and {row['run']}): report them apart"
            )
    return {
        spot: Cell(tuple(seeds[seed] for seed in sorted(seeds))) for spot, seeds in found.items()
    }


def _collect(
    lines: Sequence[Line], words: Callable[[Row], Iterable[str]], named: bool
) -> list[str]:
    found: dict[str, dict[str, set[int]]] = {}
    for line in lines:
        for cell in line.cells.values():
            for row in cell.rows:
                for word in words(row):
                    spots = found.setdefault(" ".join(str(word).split()), {})
                    spots.setdefault(line.label, set()).add(row["length"])
    everyone = len({line.label for line in lines})
    texts = []
    for word, spots in found.items():
        places: dict[str, list[str]] = {}
        if not named:
            spots = {"": set().union(*spots.values())}
        for label, lengths in spots.items():
            places.setdefault(", ".join(map(str, sorted(lengths))), []).append(label)
        where = [
            f"T = {at}"
            if not named
            else f"at {at}"
            if len(labels) == everyone
            # Code, since a spec may hold commas, and characters that Markdown reads.
            else f"{', '.join(f'`{label}`' for label in labels)} at {at}"
            for at, labels in places.items()
        ]
        texts.append(f"{word} ({'; '.join(where)})")
    return texts
