"""Sections of losses: curves, tables by length and by position, seeds, slices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from eval.report.analysis import Finding, Point
from eval.report.figure import Style, curves_by_position
from eval.report.lines import Cell as Measured
from eval.report.lines import lines_of, notes_of, reasons_of
from eval.report.page.chart import Mark, Series, chart
from eval.report.page.data import PROTOCOLS, PageData
from eval.report.page.markup import (
    NONE,
    NOT_FINITE,
    UNDEFINED,
    Cell,
    Node,
    h,
    interval_cell,
    interval_notes,
    name_cell,
    number,
    table,
    value_cell,
)
from eval.report.rows import Row

_BY_LENGTH = ("non_overlapping", "sliding", "aligned")


def by_length(page: PageData) -> list[Node]:
    """Draw loss by length, and give it as a table, with intervals."""
    series = [_series(finding, page.styles) for finding in page.findings]
    only = [f for f in page.findings if len(f.subject.seeds) == 1]
    how = {
        name: None
        for f in page.findings
        for p in f.points
        if p.loss and p.loss.low is not None
        for name in [p.loss.method]
    }
    description = (
        "Mean loss over seeds, in nats per token, by T, the tokens in the window, context and "
        f"targets together. Bands and bars: {page.analysis.level:.0%} intervals, "
        f"{', '.join(how) or 'none'}. "
        + ("" if len(only) == len(page.findings) else "Dots right of a mean: its seeds. ")
        + "Dashed upright lines: training lengths. The same numbers are in the table below."
    )
    drawn = chart(
        series,
        name="chart-length",
        title="Loss by length of the window",
        description=description,
        trained=page.trained,
        ticks=page.lengths,
        x_label="T, tokens in the window",
        y_label="loss (nats per token)",
    )
    header = [
        "encoding",
        "seeds",
        *(f"{n} (L)" if page.trained == [n] else str(n) for n in page.lengths),
    ]
    body = []
    for finding in page.findings:
        cells: list[Cell | str] = [finding.subject.label, value_cell(len(finding.subject.seeds))]
        for length in page.lengths:
            cells.append(_loss_cell(finding.at(length), finding))
        body.append(cells)
    known = {finding.subject.label for finding in page.findings}
    without = [line for line in page.lines if line.label not in known]
    for line in without:
        blank = [Cell(UNDEFINED if n in line.cells else NONE) for n in page.lengths]
        body.append([line.label, value_cell(len(line.seeds)), *blank])
    notes = [
        "Mean negative log-likelihood of the target tokens over seeds, nats per token; columns: "
        "tokens in the window.",
        *interval_notes(p.loss for f in page.findings for p in f.points),
    ]
    if len(page.trained) > 1:
        own = (f"`{line.label}`: {line.train_length}" for line in page.lines)
        notes.append(f"Training lengths: {'; '.join(own)}.")
    notes += [f"Undefined: {reason}." for reason in reasons_of(page.lines)]
    lost = [
        f"`{f.subject.label}` at {p.length}: {p.why}"
        for f in page.findings
        for p in f.points
        if p.loss is None and p.length not in f.subject.reasons
    ]
    notes += [f"No mean: {words}." for words in lost]
    notes += [f"Note: {note}." for note in notes_of(page.lines)]
    return [drawn, table("loss", "Loss by length, with intervals", header, body, notes)]


def _series(finding: Finding, styles: dict[str, Style]) -> Series:
    subject = finding.subject
    marks: list[Mark] = []
    without: dict[str, list[float]] = {UNDEFINED: [], NOT_FINITE: [], NONE: []}
    loose: list[Mark] = []
    for point in finding.points:
        own, values = point.loss, point.summary.values if point.summary else ()
        if own is not None:
            marks.append(Mark(point.length, own.estimate, own.low, own.high, values))
        else:
            without[_absent(point, finding)].append(float(point.length))
            loose.append(Mark(point.length, math.nan, seeds=values))
    return Series(
        subject.label,
        styles[subject.label],
        tuple(marks),
        tuple(without[UNDEFINED]),
        tuple(without[NOT_FINITE]),
        tuple(loose),
    )


def _absent(point: Point, finding: Finding) -> str:
    """Say in a word what stands for a loss that is not there."""
    if point.length in finding.subject.reasons:
        return UNDEFINED
    return NOT_FINITE if "not finite" in point.why else NONE


def _loss_cell(point: Point | None, finding: Finding) -> Cell:
    if point is None:
        return Cell(NONE)
    return interval_cell(point.loss) if point.loss else Cell(_absent(point, finding))


def seeds(page: PageData) -> list[Node]:
    """Give what stands beside each mean over seeds."""
    body: list[list[Cell | str]] = []
    for finding, point in page.points:
        if point.summary is None:
            continue
        summary = point.summary
        each = "; ".join(
            f"{seed}: {NONE if math.isnan(value) else number(value)}"
            for seed, value in zip(finding.subject.seeds, summary.values, strict=True)
        )
        body.append(
            [
                finding.subject.label,
                name_cell(point.length),
                value_cell(summary.mean) if point.loss else Cell(_absent(point, finding)),
                *map(value_cell, (summary.median, summary.best, summary.worst)),
                _success_cell(
                    point,
                    sum(not math.isnan(value) for value in summary.values),
                    len(finding.subject.frozen),
                ),
                interval_cell(point.documents),
                interval_cell(point.crossed.interval if point.crossed else None),
                Cell(each, kind="list"),
            ]
        )
    if not body:
        return []
    header = [
        *("encoding", "T", "mean", "median", "best", "worst", "within 0.05 of its reference"),
        *("over documents", "seeds and documents", "each seed"),
    ]
    notes = [
        "Within 0.05: how many seeds stay within 0.05 nats of their reference, the lowest mean "
        "loss at any T up to L; a seed without a value has failed, and so has one that "
        "diverged in training. [ ]: Wilson's interval of the "
        "rate.",
        "Over documents: these very seeds, other documents. Seeds and documents: other seeds and "
        "other documents.",
        *interval_notes(
            i
            for _, p in page.points
            for i in (p.documents, p.crossed.interval if p.crossed else None)
        ),
    ]
    return [
        table(
            "per-seed", "Seeds beside their mean, and the other two intervals", header, body, notes
        )
    ]


def _success_cell(point: Point, scored: int, diverged: int) -> Cell:
    rate = point.success
    if rate is None:
        return Cell(NONE)
    seeds = scored + diverged
    text = f"{round(rate.estimate * seeds)} of {seeds}"
    return dataclasses.replace(
        interval_cell(rate), text=text + (f", {diverged} diverged" if diverged else "")
    )


def by_place(page: PageData) -> list[Node]:
    """Draw loss by position in the window, and give it as a table."""
    if not page.positions:
        return []
    curves, caption = curves_by_position(page.positions)
    series: list[Series] = []
    buckets: dict[tuple[int, int], dict[str, Measured]] = {}
    for curve in curves:
        marks = []
        for x, cell in curve.points:
            mean = cell.mean()
            if mean is not None and math.isfinite(mean):
                marks.append(Mark(x, mean, seeds=tuple(cell.values().values())))
            row = cell.rows[0]
            buckets.setdefault((row["position_from"], row["position_to"]), {})[curve.line.label] = (
                cell
            )
        style = page.styles[curve.line.label]
        lost = tuple(curve.undefined()), tuple(curve.not_finite())
        series.append(Series(curve.line.label, style, tuple(marks), *lost))
    last = (
        max(mark.x for one in series for mark in one.marks) if any(s.marks for s in series) else 1
    )
    several = any(len(mark.seeds) > 1 for one in series for mark in one.marks)
    drawn = chart(
        series,
        name="chart-position",
        title="Loss by position in the window",
        description="Mean loss over seeds, in nats per token, by place in windows that cut a "
        "document from its start, in the longest window that each line has a value in; no "
        "intervals, since these rows hold no sums by document. "
        + ("Dots right of a mean: its seeds. " if several else "")
        + "Dashed upright lines: training lengths.",
        trained=page.trained,
        ticks=[2**n for n in range(1 + math.ceil(math.log2(max(last, 1))))],
        x_label=caption,
        y_label="loss (nats per token)",
    )
    header = ["positions", *(one.label for one in series)]
    body: list[list[Cell | str]] = []
    for (start, stop), cells in sorted(buckets.items()):
        means = [_mean_cell(cells.get(one.label)) for one in series]
        body.append([Cell(f"{start} to {stop - 1}", start), *means])
    numbers = table("by-position", f"Mean loss by position: {caption}", header, body)
    return [drawn, h("details", h("summary", "The same numbers as a table"), numbers)]


def _mean_cell(cell: Measured | None) -> Cell:
    if cell is not None and cell.undefined:
        return Cell(UNDEFINED)
    return value_cell(cell.mean() if cell else None)


def other_protocols(page: PageData) -> list[Node]:
    """Give means of the other protocols that have one number a length."""
    tables: list[Node] = []
    for name in _BY_LENGTH:
        lines = lines_of(page.rows, name)
        if not lines:
            continue
        lengths = sorted({length for line in lines for length in line.cells})
        body: list[list[Cell | str]] = []
        for line in lines:
            means = [_mean_cell(line.cells.get(length)) for length in lengths]
            body.append([line.label, value_cell(len(line.seeds)), *means])
        notes = [f"{name}: {PROTOCOLS[name]} Means over seeds, nats per token, without intervals."]
        notes += [f"Undefined: {reason}." for reason in reasons_of(lines)]
        notes += [f"Note: {note}." for note in notes_of(lines)]
        header = ["encoding", "seeds", *map(str, lengths)]
        tables.append(table(f"other-{name}", f"Loss by length: {name}", header, body, notes))
    return tables


def slices(page: PageData) -> list[Node]:
    """Give means of the primary protocol on some of its targets."""

    def place(row: Row) -> tuple[Any, ...]:
        # Tokens that 4-grams and 8-grams call novel are other ones, and so are those of two masks.
        of = row.get("ngram"), row.get("mask_sha256")
        span = row.get("distance_from"), row.get("distance_to")
        return (row["length"], row.get("slice"), *span, *of)

    sliced = [row for row in page.rows if row["protocol"] == "slice"]
    grams, masks = (
        sorted({row[name] for row in sliced if row.get(name)}) for name in ("ngram", "mask_sha256")
    )
    lines = lines_of(page.rows, "slice", place)
    body: list[list[Cell | str]] = []
    for line in lines:
        for (length, name, low, high, gram, mask), cell in line.cells.items():
            span = ""
            if low is not None:
                span = f", {low} to {high - 1} back" if high else f", {low} back or more"
            span += f", n = {gram}" if gram and len(grams) > 1 else ""
            span += f" {mask[:12]}" if mask and len(masks) > 1 else ""
            tokens = cell.rows[0].get("tokens")
            body.append(
                [
                    line.label,
                    f"{name or NONE}{span}",
                    name_cell(length),
                    _mean_cell(cell),
                    value_cell(len(cell.values())),
                    value_cell(tokens),
                ]
            )
    if not body:
        return []
    notes = [
        "Means over seeds of the loss on some of the targets, nats per token, without intervals."
    ]
    if grams:
        notes.append(
            f"Repeated: the {' or '.join(map(str, grams))} tokens that end with the target last "
            "ended that many tokens before it in its document; novel: never."
        )
    notes += [f"Note: {note}." for note in notes_of(lines)]
    header = ["encoding", "slice", "T", "loss", "seeds", "tokens"]
    numbers = table("slice-loss", "Loss by slice", header, body, notes)
    return [h("details", h("summary", f"{len(body)} lines"), numbers)]
