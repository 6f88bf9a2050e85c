"""``python -m eval score RUN ... --lengths N ...``, ``report``, ``compare`` and more."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import tyro

from eval.auditing import Audit, audit
from eval.coverage import Coverage, coverage
from eval.evaluate import evaluate
from eval.protocols import Bos
from eval.report import write_report
from eval.report.attention import read_mechanism
from eval.report.comparable import differences
from eval.report.comparing import compare_encodings
from eval.report.full import NO_INTERVALS, has_intervals, write_full_report
from eval.report.rows import Row, read_rows, sift_rows
from eval.report.table import print_table
from eval.scoring import BATCH_TOKENS
from posenc.cli import parse_subcommand
from posenc.compilation import keep_compiled
from posenc.errors import UserError, one_line_errors

Control = Literal["foreign_prefix", "index_probe", "distance_probe", "keys_probe", "aligned"]


@dataclasses.dataclass(frozen=True)
class Score:
    """Score finished runs by context length, and write rows, table and figure."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that train.py made."""
    lengths: tuple[int, ...]
    """Window lengths, in tokens."""
    report: Path = Path("report")
    """Where rows, table and figure go; scores are kept there too, and not run again."""
    bos: Bos = "keep"
    """BOS as in training, at the start of every window, or nowhere."""
    extend: tuple[str, ...] = ()
    """Policies, each scored beside the plain model, such as clamp or "yarn(factor=4)"; see
    `python -m posenc list`."""
    controls: tuple[Control, ...] = ("foreign_prefix", "aligned")
    """What else the blocks are scored with: T - L foreign tokens before the last L; as many tokens
    as L at the positions of T (index_probe), with a gap (distance_probe), or T tokens at those of L
    (keys_probe); for absolute encodings, fewer tokens than L at their positions in L (aligned)."""
    stride: int | None = None
    """Of sliding windows, in tokens; none unless given."""
    ngram: int = 0
    """Sort targets by how far back the n tokens that end with each last occurred; 0 does not."""
    mask: Path | None = None
    """A .npy file of booleans, one for each token of the test documents, that says which need long
    context, by a model that is not among the compared ones."""
    probe: int = 0
    """Windows of each length in which to read out how a model attends: mass by distance, entropy,
    scale of logits, learned encoding parameters; arrays go into REPORT/mechanism."""
    targets: int | None = None
    """Tokens of a block; an eighth of the training length unless given, and at most."""
    blocks: int = 16
    """Blocks of a document, at most."""
    tokens_per_document: int = 16_384
    """Of each document's beginning, for the non-overlapping windows."""
    checkpoint: int | None = None
    """A step, instead of the last."""
    batch_tokens: int = BATCH_TOKENS
    """Tokens of a batch, about."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of activations, instead of that in training."""
    matmul_precision: Literal["default", "high", "highest"] | None = None
    """Of matrix products; highest in float32 unless given, the device's own in bfloat16."""
    tuning: Path | None = None
    """What a sweep's tuning led to, the file tuning.json that `python -m studies run` writes."""
    allow_plugins: bool = False
    """Import the code that a run's encoding names (module:Class), if you trust it."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Write tables, figures, methods and references, with intervals, from rows alone."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """rows.jsonl files, or folders that hold one."""
    out: Path = Path("report")
    """Where they go."""
    baseline: str | None = None
    """The label of the line that others are compared with; the first unless given."""
    allow_mixed: bool = False
    """Take rows that differ in text, protocol or budget, and say so."""


@dataclasses.dataclass(frozen=True)
class Compare:
    """Say by how much the loss of one encoding is above that of another, paired by seed."""

    rows: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """rows.jsonl files, or folders that hold one."""
    encodings: tuple[str, str]
    """A and B, for A minus B: specs, or labels of lines as tables have them."""
    allow_mixed: bool = False
    """Take rows that differ in text, protocol or budget, and say so on stderr."""


def score(arguments: Score) -> None:
    """Score runs and write their report."""
    keep_compiled()
    given = dataclasses.asdict(arguments)
    folders, report = list(given.pop("runs")), given.pop("report")
    rows = evaluate(folders, given.pop("lengths"), report / "scores", **given)
    _write(rows, report, write_report)


def report(arguments: Report) -> None:
    """Write a report from rows that were written before."""
    rows, left_out = _read(arguments.rows)

    def write(rows: list[Row], folder: Path) -> dict[str, Path]:
        return write_full_report(
            rows,
            folder,
            baseline=arguments.baseline,
            allow_mixed=arguments.allow_mixed,
            left_out=left_out,
            mechanism=read_mechanism(arguments.rows),
        )

    _write(rows, arguments.out, write)
    if not has_intervals(rows):
        print(NO_INTERVALS)


def compare(arguments: Compare) -> None:
    """Print the difference of two encodings."""
    rows, _ = _read(arguments.rows)
    lines = compare_encodings(rows, *arguments.encodings, allow_mixed=arguments.allow_mixed)
    for one in differences(rows):
        if one.forbidden:
            print(f"not comparable, and mixed on request: {one}", file=sys.stderr)
    for line in lines:
        print(line)


def _read(paths: tuple[Path, ...]) -> tuple[list[Row], int]:
    """Give the rows of files, and how many lines were none: each is named, and left out."""
    rows: list[Row] = []
    faults: list[str] = []
    for path in paths:
        own, bad = sift_rows(path)
        rows += own
        faults += bad
    for fault in faults:
        print(f"left out: {fault}", file=sys.stderr)
    if not rows:
        raise UserError(
            f"no result rows in {', '.join(map(str, paths))}"
            f"{f'; {len(faults)} lines are none' if faults else ''}: score a run first"
        )
    return rows, len(faults)


def _write(
    rows: list[Row], folder: Path, write: Callable[[list[Row], Path], dict[str, Path]]
) -> None:
    try:
        before = read_rows(folder)
    except UserError:  # none there, or none that could be lost
        before = []
    lost = sorted({row["run"] for row in before} - {row["run"] for row in rows})
    if lost:
        print(f"{folder}: this report replaces one that had {', '.join(lost)} as well")
    paths = write(rows, folder)
    print_table(rows)
    for path in paths.values():
        print(path)


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand."""
    commands = {
        "score": Score,
        "report": Report,
        "compare": Compare,
        "audit": Audit,
        "coverage": Coverage,
    }
    chosen = parse_subcommand(commands, "python -m eval", arguments)
    with one_line_errors():
        if isinstance(chosen, Audit):
            keep_compiled()
            audit(chosen)
        elif isinstance(chosen, Score):
            score(chosen)
        elif isinstance(chosen, Coverage):
            coverage(chosen)
        elif isinstance(chosen, Compare):
            compare(chosen)
        else:
            report(chosen)


if __name__ == "__main__":
    main()
