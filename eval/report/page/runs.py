"""Sections on the runs: what was compared, what else differs, costs, where numbers come from."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from eval.report.analysis import PRIMARY
from eval.report.comparable import Difference
from eval.report.lines import chosen_checkpoints
from eval.report.page.data import PROTOCOLS, PageData
from eval.report.page.markup import NONE, Cell, Node, h, name_cell, number, table, value_cell
from eval.report.rows import Row
from eval.report.table import Grid, costs_of, runs_of, tunings_of


def compared(page: PageData) -> list[Node]:
    """Say what was compared, and by which protocols."""
    rows = page.rows
    scored = [row for row in rows if row["protocol"] == PRIMARY and row["defined"]] or rows
    base = page.analysis.comparisons[0].b if page.analysis.comparisons else None
    data = [row.get("data") or {} for row in rows]
    facts: list[tuple[str, Node]] = [
        ("encodings", _codes(line.encoding for line in page.lines)),
        ("lines", _codes(line.label for line in page.lines)),
        ("baseline", _codes([base] if base else [])),
        ("model", _listed(rows, "model")),
        ("parameters", _range(rows, "parameters")),
        (
            "text",
            ", ".join(dict.fromkeys(_words(one.get("name"), one.get("version")) for one in data)),
        ),
        ("text, SHA-256", _listed(data, "sha256")),
        (
            "split",
            ", ".join(
                dict.fromkeys(
                    _words(one.get("split_rule"), one.get("split_version")) for one in data
                )
            ),
        ),
        ("tokenizer", _listed(data, "tokenizer")),
        ("training length L", _listed(rows, "train_length", "tokens")),
        ("trained on", _range(rows, "train_tokens", "tokens")),
        ("seeds", _listed(sorted(rows, key=lambda row: row["seed"]), "seed")),
        ("checkpoint", _listed(rows, "checkpoint")),
        ("lengths T", ", ".join(map(str, page.lengths)) + " tokens, context and targets together"),
        (
            "targets",
            f"{_range(scored, 'tokens', 'tokens')} for each seed and length: "
            f"{_range(scored, 'blocks', 'blocks')} of {_range(scored, 'targets', 'tokens')} in "
            f"{_range(scored, 'documents', 'documents')}",
        ),
        ("blocks of a document, at most", _listed(rows, "blocks_per_document")),
        ("block starts apart, at least", _listed(rows, "block_spacing", "tokens")),
        ("documents long enough for", _listed(rows, "longest_length", "tokens")),
        (
            "of each document's beginning",
            _listed(rows, "tokens_per_document", "tokens, non-overlapping and sliding windows"),
        ),
        ("stride", _listed([row for row in rows if row.get("stride")], "stride", "tokens")),
        ("BOS", _listed(rows, "bos")),
        ("extension policies", _codes(row["extend"] for row in rows if row["extend"])),
    ]
    present = {row["protocol"] for row in rows}
    known = [name for name in PROTOCOLS if name in present]
    other = sorted(present - set(PROTOCOLS))
    return [
        h(
            "dl",
            [[h("dt", name), h("dd", value)] for name, value in facts if value],
            class_="facts",
        ),
        h("h3", "Protocols"),
        h("ul", [h("li", h("code", name), ": ", PROTOCOLS[name]) for name in known]),
        h("p", "Also in the rows: ", _codes(other)) if other else None,
    ]


def differing(page: PageData) -> list[Node]:
    """List what else the runs differ in, what forbids a comparison first."""
    forbidden = [one for one in page.differences if one.forbidden]
    others = [one for one in page.differences if not one.forbidden]
    # Facts of lines: which seeds they have, and how long they were trained.
    for name, fact in (("seeds", "seeds"), ("training length", "train_length")):
        own: dict[str, list[str]] = {}
        for line in page.lines:
            value = getattr(line, fact)
            text = str(value) if isinstance(value, int) else ", ".join(map(str, value))
            own.setdefault(text, []).append(line.label)
        if len(own) > 1:
            others.append(Difference(name, {k: tuple(v) for k, v in own.items()}, False))
    chosen = chosen_checkpoints(page.rows)
    if not forbidden + others and not chosen:
        return [
            h(
                "p",
                "In nothing that rows record do the runs differ besides the encoding, its seeds "
                "and what follows from them.",
            )
        ]

    def listed(some: Sequence[Difference]) -> Element:
        return h(
            "ul",
            [
                h(
                    "li",
                    h("strong", one.name),
                    ": ",
                    "; ".join(f"{value} ({_runs(runs)})" for value, runs in one.values.items()),
                )
                for one in some
            ],
        )

    def box(words: str, some: Sequence[Difference]) -> Element | None:
        return (
            h("div", h("p", words, class_="red"), listed(some), class_="warning") if some else None
        )

    return [
        box(
            "Not comparable: runs that differ in these answer different questions, and were put "
            "side by side on request.",
            forbidden,
        ),
        box("Runs also differ, besides the encoding, in:", others),
        h("p", chosen, class_="red") if chosen else None,
    ]


def costs(page: PageData) -> list[Node]:
    """Give what training cost, and how settings were tuned."""
    grids = [
        ("cost", "Cost of training", costs_of(page.rows)),
        ("tuning", "Tuning", tunings_of(page.rows)),
    ]
    return [_from_grid(name, title, grid) for name, title, grid in grids if grid is not None]


def _from_grid(name: str, title: str, grid: Grid) -> Element:
    def cell(text: str) -> Cell:
        try:
            return Cell(text or NONE, float(text.replace(",", "")))
        except ValueError:
            return Cell(text or NONE, text or None)

    body: list[list[Cell | str]] = [[label, *map(cell, cells)] for label, *cells in grid.body]
    return table(name, title, grid.header, body, grid.footnotes)


def validations(page: PageData) -> list[Node]:
    """Give mean and spread of each run's last validations."""
    body: list[list[Cell | str]] = []
    for label, seeds in runs_of(page.rows):
        for row in seeds:
            for length, values in (row.get("last_validations") or {}).items():
                known = [float(value) for value in values if value is not None]
                mean = statistics.fmean(known) if known else None
                finite = len(known) > 1 and all(map(math.isfinite, known))
                body.append(
                    [
                        label,
                        name_cell(row["seed"]),
                        name_cell(int(length)),
                        value_cell(len(known)),
                        value_cell(mean),
                        value_cell(statistics.stdev(known) if finite else None),
                        value_cell(known[-1] if known else None),
                    ]
                )
    if not body:
        return []
    header = ["encoding", "seed", "length", "validations", "mean", "spread", "last"]
    note = (
        "Losses of the last validations of training, five at most, nats per token; spread: their "
        "standard deviation."
    )
    if {row.get("checkpoint") for row in page.rows} == {"last"}:
        note += " What is scored is the last checkpoint, chosen by no loss."
    numbers = table("last-validations", "The last validations", header, body, [note])
    return [h("details", h("summary", f"{len(body)} lines"), numbers)]


def provenance(page: PageData) -> list[Node]:
    """Say from which files, on what and with which versions each run was made and scored."""
    runs: dict[tuple[Any, ...], Row] = {}
    for row in page.rows:
        runs.setdefault((row["run"], row["seed"], row.get("commit"), row.get("device")), row)
    body: list[list[Cell | str]] = []
    for row in runs.values():
        trained = row.get("trained_with") or {}
        body.append(
            [
                str(row["run"]),
                name_cell(row["seed"]),
                _text_cell(row.get("config_hash")),
                value_cell(row.get("checkpoint_step")),
                _commit_cell(trained),
                _text_cell(trained.get("device")),
                _commit_cell(row),
                _text_cell(row.get("device")),
                _text_cell(row.get("dtype")),
                _text_cell(row.get("matmul_precision")),
            ]
        )
    header = [
        *("run", "seed", "config", "step", "trained at commit", "trained on", "scored at commit"),
        *("scored on", "dtype", "precision"),
    ]
    versions = [
        *_versions(
            "trained with",
            [
                (row["run"], (row.get("trained_with") or {}).get("versions"))
                for row in runs.values()
            ],
        ),
        *_versions("scored with", [(row["run"], row.get("versions")) for row in runs.values()]),
    ]
    dirty = any(
        one.get("dirty") for row in runs.values() for one in (row, row.get("trained_with") or {})
    )
    notes = ["Precision: of matrix products, as JAX names it."]
    return [
        h(
            "p",
            "Some runs were made from files with uncommitted changes: their commit does not say "
            "what ran.",
            class_="red",
        )
        if dirty
        else None,
        table("runs", "Runs", header, body, notes),
        h("h3", "Versions"),
        h("ul", [h("li", words) for words in versions]),
    ]


def _commit_cell(one: dict[str, Any]) -> Cell:
    commit = str(one.get("commit") or NONE)[:12]
    if one.get("dirty"):
        return Cell(commit, commit, more="uncommitted changes", kind="red")
    return Cell(commit, commit)


def _text_cell(value: Any) -> Cell:
    return Cell(NONE) if value is None else Cell(str(value), str(value))


def _versions(title: str, known: Sequence[tuple[str, dict[str, str] | None]]) -> list[str]:
    found: dict[str, list[str]] = {}
    for run, versions in known:
        if versions:
            text = ", ".join(f"{name} {version}" for name, version in versions.items())
            found.setdefault(text, []).append(run)
    every = len(found) == 1
    return [
        f"{title}: {text}" + ("" if every else f" ({_runs(dict.fromkeys(runs))})")
        for text, runs in found.items()
    ]


def _codes(texts: Iterable[str]) -> list[Node]:
    found: list[Node] = []
    for text in dict.fromkeys(texts):
        found += ["; " if found else None, h("code", text)]
    return found


def _runs(runs: Iterable[str]) -> str:
    named = list(runs)
    return named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more"


def _words(*values: Any) -> str:
    return " ".join(str(value) for value in values if value is not None)


def _listed(rows: Iterable[dict[str, Any]], name: str, unit: str = "") -> str:
    found = list(dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None))
    return " ".join([", ".join(found), *([unit] if unit else [])]) if found else ""


def _range(rows: Iterable[dict[str, Any]], name: str, unit: str = "") -> str:
    known = {row[name] for row in rows if row.get(name) is not None}
    if not known:
        return "not given"
    ends = " to ".join(number(n) for n in sorted({min(known), max(known)}))
    return f"{ends} {unit}".strip()
