"""The figures of a paper: losses with intervals, tax and information, and losses by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eval.measures import TOLERANCE
from eval.report.analysis import FOREIGN, PRIMARY, Analysis, Finding, truncated
from eval.report.figure import (
    GREY,
    Style,
    add_legend,
    canvas,
    make_figure,
    mark_training,
    rendered,
    scale_x,
    setup_style,
    styles_of,
)
from eval.report.lines import lines_of
from eval.report.rows import Row
from eval.stats import Interval

# Lines stand beside one another where their intervals would cover each other: octaves between two
# lines, and between the first and the last.
_DODGE, _WIDEST = 0.055, 0.28
# An interval of two seeds may be many times as wide as all that is known: beyond this part of the
# height of the values, and beyond what is usual among intervals, it leaves the panel.
_ROOM = 0.35

# T, its interval, and its value for each seed.
_Place = tuple[int, Interval | None, Sequence[float]]


class _Panel(NamedTuple):
    """``marks`` are values that are always in view, with a line: 0, and a tolerance."""

    title: str
    lines: Sequence[tuple[Finding, Sequence[_Place]]]
    marks: tuple[float, ...] = ()

    def places(self) -> list[_Place]:
        return [place for _, places in self.lines for place in places]


def figures(rows: Iterable[Row], analysis: Analysis) -> dict[str, bytes]:
    """Give every figure that there are numbers for, as PNG and PDF by file name.

    Intervals are bars, single seeds are small rings, and the training length is a dashed line; the
    same rows give the same bytes. All are one column of a paper of two wide.
    """
    rows = list(rows)
    files = rendered(_loss_figure(rows, analysis), "figure-loss")
    if any(point.verdict for finding in analysis.findings for point in finding.points):
        files |= rendered(_far_figure(rows, analysis), "figure-tax-info")
    if any(row["protocol"] == "per_position" for row in rows):
        files |= rendered(make_figure(rows, positions_only=True), "figure-positions")
    return files


def _loss_figure(rows: Sequence[Row], analysis: Analysis) -> Figure:
    lines = [
        (finding, [_loss_at(finding, n) for n in finding.subject.lengths])
        for finding in analysis.findings
    ]
    return _drawn(rows, analysis, [_Panel("nll (nats per token)", lines)])


def _loss_at(finding: Finding, length: int) -> _Place:
    point, sums = finding.at(length), finding.subject.at(length)
    assert point is not None
    seeds = [] if sums is None else (sums.sum(-1) / finding.subject.tokens.sum()).tolist()
    return length, point.loss, seeds


def _far_figure(rows: Sequence[Row], analysis: Analysis) -> Figure:
    subjects = [finding.subject for finding in analysis.findings]

    def seeds(finding: Finding, length: int, name: str) -> list[float]:
        own = finding.subject
        foreign, whole = own.at(length, FOREIGN), own.at(length)
        base = truncated(own, subjects) if name == "tax" else whole
        if foreign is None or base is None:
            return []
        return ((foreign - base).sum(-1) / own.tokens.sum()).tolist()

    def panel(name: str, value: Callable[[Any], Interval]) -> list[tuple[Finding, list[_Place]]]:
        return [
            (
                finding,
                [
                    (point.length, value(point.verdict), seeds(finding, point.length, name))
                    for point in finding.points
                    if point.verdict is not None
                ],
            )
            for finding in analysis.findings
            if any(point.verdict is not None for point in finding.points)
        ]

    panels = [
        _Panel("tax (nats per token)", panel("tax", lambda far: far.tax), (0.0, TOLERANCE)),
        _Panel("info (nats per token)", panel("info", lambda far: far.info), (0.0,)),
    ]
    return _drawn(rows, analysis, panels)


def _drawn(rows: Sequence[Row], analysis: Analysis, panels: Sequence[_Panel]) -> Figure:
    """Draw panels above one another, over the same lengths."""
    shown = [finding for finding, _ in panels[0].lines]
    every = styles_of([lines_of(rows, PRIMARY)])
    styles = {finding.subject.label: every[finding.subject.label] for finding in shown}
    lengths = sorted({length for panel in panels for length, *_ in panel.places()})
    trained = sorted({finding.subject.train_length for finding in shown})
    step = min(_DODGE, _WIDEST / max(1, len(shown) - 1))
    edge = 2 ** (step * (len(shown) - 1) / 2)
    with setup_style():
        figure, axes, floor = canvas(styles, _notes(panels, analysis), 1, rows=len(panels))
        for each, panel in zip(axes, panels, strict=True):
            middle = (len(panel.lines) - 1) / 2
            for index, (finding, places) in enumerate(panel.lines):
                _line(each, places, 2 ** (step * (index - middle)), styles[finding.subject.label])
            each.set_ylim(*_window(panel))
            for mark in panel.marks:
                each.axhline(mark, color=GREY, lw=0.6, ls=":" if mark else "-", zorder=1.2)
            scale_x(each, [lengths[0] / edge, lengths[-1] * edge], trained, lengths)
            each.set_ylabel(panel.title)
            each.yaxis.set_major_locator(MaxNLocator(5))
            if len(panels) > 1:  # aligned, whatever the tick labels are
                each.yaxis.set_label_coords(-0.14, 0.5)
        mark_training(axes[0], trained)
        for below in axes[1:]:
            for length in trained:
                below.axvline(length, color=GREY, linestyle="--", lw=0.8, zorder=1.5)
        for above in axes[:-1]:
            above.set_xticklabels([])
        axes[-1].set_xlabel("$T$, tokens in the window")
        add_legend(figure, styles, floor)
    return figure


def _line(axes: Axes, places: Sequence[_Place], shift: float, style: Style) -> None:
    known = [(length * shift, interval) for length, interval, _ in places if interval is not None]
    dots = [(length * shift, y) for length, _, seeds in places for y in seeds if len(seeds) > 1]
    axes.plot(
        [x for x, _ in dots],
        [y for _, y in dots],
        linestyle="none",
        marker="o",
        markersize=2.2,
        markeredgewidth=0.6,
        markerfacecolor="white",
        color=style["color"],
        zorder=2.9,
    )
    # A gap in the line says that there is no value.
    means = [math.nan if interval is None else interval.estimate for _, interval, _ in places]
    axes.plot([length * shift for length, *_ in places], means, zorder=3, **style)
    bounded = [(x, i.low, i.high) for x, i in known if i.low is not None and i.high is not None]
    axes.vlines(
        [x for x, *_ in bounded],
        [low for _, low, _ in bounded],
        [high for *_, high in bounded],
        color=style["color"],
        lw=0.7,
        alpha=0.8,
        zorder=2.8,
    )


def _values(places: Iterable[_Place]) -> tuple[list[float], list[float]]:
    """Give what is always in a panel, and the limits of intervals, which may leave it."""
    values, limits = [], []
    for _, interval, seeds in places:
        values += [y for y in seeds if math.isfinite(y)]
        if interval is not None:
            values.append(interval.estimate)
            limits += [y for y in (interval.low, interval.high) if y is not None]
    return values, limits


def _window(panel: _Panel) -> tuple[float, float]:
    values, limits = _values(panel.places())
    values += panel.marks
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = max(_ROOM * (high - low), 1.2 * _usual(panel)) or 0.05
    low = max(low - room, min([*limits, low]))
    high = min(high + room, max([*limits, high]))
    pad = 0.04 * (high - low) or 0.05
    return low - pad, high + pad


def _usual(panel: _Panel) -> float:
    """Give the half width of an interval in the middle of all."""
    widths = [
        one.high - one.low
        for _, one, _ in panel.places()
        if one is not None and one.low is not None and one.high is not None
    ]
    return median(widths) / 2 if widths else 0.0


def _notes(panels: Sequence[_Panel], analysis: Analysis) -> list[str]:
    every = [place for panel in panels for place in panel.places()]
    bounded = [one for _, one, _ in every if one is not None and one.low is not None]
    notes = []
    if bounded:
        methods = " or ".join(dict.fromkeys(one.method for one in bounded))
        many = max(one.comparisons for one in bounded)
        together = f" of all {many} lines together" if many > 1 else ""
        notes.append(f"bars: {100 * analysis.level:g}% intervals{together}, {methods}")
    if any(len(seeds) > 1 for *_, seeds in every):
        notes.append("rings: seeds")
    if any(not _window(p)[0] <= y <= _window(p)[1] for p in panels for y in _values(p.places())[1]):
        notes.append("bars that leave the panel go on")
    missing = sorted({length for length, interval, _ in every if interval is None})
    if missing:
        notes.append(f"lines end where undefined (T = {', '.join(map(str, missing))})")
    return notes
