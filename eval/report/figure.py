"""The extrapolation figure: nll by length, and by position in the window."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from eval.report.lines import Cell, Line, by_position, lines_of, notes_of
from eval.report.rows import Row, write_file
from posenc.errors import UserError

Style = dict[str, Any]

# Okabe and Ito (2008), https://jfly.uni-koeln.de/color/; yellow last, the faintest on white.
PALETTE = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#56B4E9", "#E69F00", "#000000", "#F0E442"),
)
LINESTYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "<", "h", ">", "p", "d", "8")

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs everywhere
    "font.size": 7,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.8,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}

# Inches. A text column of one-column papers is 5.5 wide, a column of two-column ones about 3.3.
_WIDTHS = {1: 3.3, 2: 5.5}
_LEFT, _RIGHT, _GAP, _TOP, _HEIGHT, _BOTTOM = 0.46, 0.1, 0.5, 0.2, 1.9, 0.42
_SHORT, _ROW_GAP = 1.15, 0.14  # of panels above one another
_ROW, _NOTE_ROW = 0.132, 0.115
GREY = "0.35"


@dataclass(frozen=True)
class Curve:
    """What one line shows in one panel: (x, cell) by rising x."""

    line: Line
    points: list[tuple[float, Cell]]

    def undefined(self) -> list[float]:
        """Where the encoding has no value."""
        return [x for x, cell in self.points if cell.undefined]

    def not_finite(self) -> list[float]:
        """Where the mean cannot be drawn."""
        means = [(x, cell.mean()) for x, cell in self.points]
        return [x for x, mean in means if mean is not None and not math.isfinite(mean)]


@contextmanager
def setup_style() -> Iterator[None]:
    """The style of every figure, in force within the block and on matplotlib's own defaults."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the caller has set, the same rows give the same figure
        matplotlib.rcParams.update(STYLE)
        yield


def draw(rows: Iterable[Row], folder: str | os.PathLike[str]) -> list[Path]:
    """Write `figure.png` (200 dpi) and `figure.pdf` into a folder; returns their paths.

    The same rows give the same bytes. Raises `UserError` if there is nothing to draw or the folder
    cannot be written.
    """
    paths = []
    for name, content in rendered(make_figure(rows), "figure").items():
        paths.append(Path(folder) / name)
        write_file(paths[-1], content)
    return paths


def rendered(figure: Figure, stem: str) -> dict[str, bytes]:
    """Give a figure as PNG (200 dpi) and as PDF, by file name; the same figure, the same bytes."""
    # No dates and no versions: a figure that is built again from its rows is the same file.
    metadata: dict[str, dict[str, None]] = {
        "png": {"Software": None},
        "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    }
    files = {}
    for kind, fields in metadata.items():
        buffer = io.BytesIO()
        with setup_style():
            # Tight: tick labels are as wide as the numbers need.
            figure.savefig(
                buffer, format=kind, metadata=fields, bbox_inches="tight", pad_inches=0.03
            )
        files[f"{stem}.{kind}"] = buffer.getvalue()
    return files


def make_figure(rows: Iterable[Row], *, positions_only: bool = False) -> Figure:
    """The figure, in nats per token: by length on the left, by position on the right.

    Means over seeds are lines labelled as in the table; single seeds are faint. A length at which
    an encoding is undefined is a cross in the strip at the top, a mean that is not finite a
    triangle there. ``positions_only`` leaves out the left panel. Raises `UserError` if there are no
    rows to draw.
    """
    rows = list(rows)
    by_context = lines_of(rows, "nll_by_context")
    lengths = by_context or lines_of(rows, "non_overlapping")
    positions = lines_of(rows, "per_position", by_position)
    styles = styles_of([lines for lines in (lengths, positions) if lines])
    if positions_only:
        lengths = []
        styles = {line.label: styles[line.label] for line in positions}
    panels = [lines for lines in (lengths, positions) if lines]
    if not panels:
        raise UserError("no rows by length or by position to draw: score a run first")
    notes = notes_of([line for lines in panels for line in lines], named=False)
    with setup_style():
        figure, axes, floor = canvas(styles, notes, len(panels))
        if lengths:
            ticks = sorted({length for line in lengths for length in line.cells})
            curves = [
                Curve(line, [(float(n), line.cells[n]) for n in sorted(line.cells)])
                for line in lengths
            ]
            _panel(axes[0], curves, styles, ticks)
            axes[0].set_xlabel("$T$, tokens in the window")
        if positions:
            curves, caption = curves_by_position(positions)
            last = max((x for curve in curves for x, _ in curve.points), default=1.0)
            powers = [2**n for n in range(1 + max(0, math.ceil(math.log2(last))))]
            _panel(axes[-1], curves, styles, powers)
            axes[-1].set_xlabel(caption)
        axes[0].set_ylabel("nll (nats per token)")
        add_legend(figure, styles, floor)
    return figure


def styles_of(panels: Sequence[Sequence[Line]]) -> dict[str, Style]:
    """How each label is drawn: a colour an encoding, in all panels, and a marker a line."""
    encodings = list(dict.fromkeys(line.encoding for lines in panels for line in lines))
    styles: dict[str, Style] = {}
    for line in (line for lines in panels for line in lines):
        index = encodings.index(line.encoding)
        dash = LINESTYLES[(index // len(PALETTE) + line.variant) % len(LINESTYLES)]
        styles.setdefault(
            line.label,
            {
                "color": PALETTE[index % len(PALETTE)],
                "linestyle": dash,
                "marker": MARKERS[len(styles) % len(MARKERS)],
            },
        )
    return styles


def curves_by_position(lines: Sequence[Line]) -> tuple[list[Curve], str]:
    """The curve of every line in its longest defined window, by bucket midpoint, and a caption."""
    curves, shown = [], set()
    for line in lines:
        places = [spot for spot in line.cells if spot[1] is not None]
        longest = max((n for n, *_ in places), default=0)
        drawn = max((s[0] for s in places if not line.cells[s].undefined), default=longest)
        # Beyond the window that is drawn, the longer one says where there is no value.
        points = [
            ((start + stop) / 2, line.cells[length, start, stop])
            for length, start, stop in places
            if length == drawn or (length == longest and start >= drawn)
        ]
        shown.add(drawn)
        curves.append(Curve(line, sorted(points, key=lambda point: point[0])))
    window = f"{shown.pop()} tokens" if len(shown) == 1 else "longest defined"
    return curves, f"index in the window ({window})"


def _panel(
    axes: Axes,
    curves: Sequence[Curve],
    styles: Mapping[str, Style],
    ticks: Sequence[int],
) -> None:
    drawn: list[float] = []
    for order, curve in enumerate(curves):
        style = styles[curve.line.label]
        seeds = sorted({row["seed"] for _, cell in curve.points for row in cell.rows})
        for seed in seeds if len(seeds) > 1 else []:
            single = [(x, cell.values().get(seed, math.nan)) for x, cell in curve.points]
            drawn += _plot(axes, single, label="_seed", color=style["color"], lw=0.6, alpha=0.35)
        means = [(x, math.nan if (m := cell.mean()) is None else m) for x, cell in curve.points]
        drawn += _plot(axes, means, label=curve.line.label, zorder=3 + order / 100, **style)
    trained = sorted({curve.line.train_length for curve in curves})
    scale_x(axes, [x for curve in curves for x, _ in curve.points], trained, ticks)
    mark_training(axes, trained)
    strip = _strip(axes, curves, styles)
    finite = [y for y in drawn if math.isfinite(y)] or [0.0]
    low, high = min(finite), max(finite)
    pad = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - pad, low - pad + (high - low + 2 * pad) / (1 - strip))
    axes.set_yticks([tick for tick in axes.get_yticks() if low - pad <= tick <= high + pad])


def _plot(
    axes: Axes, points: Sequence[tuple[float, float]], label: str, **style: Any
) -> list[float]:
    # Infinity would be drawn as a segment that leaves the panel; it has its own marker.
    ys = [y if math.isfinite(y) else math.nan for _, y in points]
    axes.plot([x for x, _ in points], ys, label=label, **style)
    return ys


def scale_x(
    axes: Axes, places: Sequence[float], trained: Sequence[int], ticks: Sequence[int]
) -> None:
    """Make x logarithmic over places and training lengths; labels of ticks where there is room."""
    axes.set_xscale("log", base=2)
    xs = [*places, *trained]
    low, high = math.log2(min(xs)), math.log2(max(xs))
    pad = 0.05 * (high - low) or 0.5
    axes.set_xlim(2 ** (low - pad), 2 ** (high + pad))
    ticks = sorted({*ticks, *trained})
    ticks = [tick for tick in ticks if low - pad <= math.log2(tick) <= high + pad]
    width = axes.get_window_extent().width * 72 / axes.figure.dpi
    scale = width / (high - low + 2 * pad)
    placed: list[tuple[float, float]] = []
    labels = dict.fromkeys(ticks, "")
    for tick in sorted(ticks, key=lambda tick: (tick not in trained, tick)):
        half = 0.5 * (4.3 * len(str(tick)) + 2.0)  # points: digits of 6.5 points and a gap
        centre = scale * math.log2(tick)
        if all(abs(centre - other) >= half + taken for other, taken in placed):
            placed.append((centre, half))
            labels[tick] = str(tick)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [labels[tick] for tick in ticks])


def mark_training(axes: Axes, lengths: Sequence[int]) -> None:
    """Draw a line at each training length, and say what it is."""
    for length in lengths:
        axes.axvline(length, color=GREY, linestyle="--", lw=0.8, zorder=1.5, label="_training")
    axes.text(
        2 ** (sum(map(math.log2, lengths)) / len(lengths)),
        1.015,
        "training length" + "s" * (len(lengths) > 1),
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="bottom",
        fontsize=6.5,
        color=GREY,
    )


def _strip(axes: Axes, curves: Sequence[Curve], styles: Mapping[str, Style]) -> float:
    """Show where lines have no finite value, a row a line; returns the strip's share of height."""
    marked = [curve for curve in curves if curve.undefined() or curve.not_finite()]
    if not marked:
        return 0.0
    row = min(0.055, 0.35 / (len(marked) + 1))
    height = row * (len(marked) + 1) + 0.02
    transform = axes.get_xaxis_transform()
    # Over the grid and the training length, which mean nothing here.
    axes.add_patch(
        Rectangle(
            (0, 1 - height), 1, height, transform=axes.transAxes, color="0.96", lw=0, zorder=2
        )
    )
    words = [
        *(["\N{MULTIPLICATION SIGN} undefined"] if any(c.undefined() for c in marked) else []),
        *(
            ["\N{BLACK UP-POINTING TRIANGLE} nan or inf"]
            if any(c.not_finite() for c in marked)
            else []
        ),
    ]
    # Its own row, so that no marker can cover it.
    axes.text(
        0.015,
        1 - row * 0.55,
        ",  ".join(words),
        transform=axes.transAxes,
        va="center",
        fontsize=6,
        color=GREY,
        zorder=5,
    )
    for index, curve in enumerate(marked):
        level = 1 - row * (index + 1.6)
        for xs, marker, name in (
            (curve.undefined(), "x", "_undefined"),
            (curve.not_finite(), "^", "_not finite"),
        ):
            if xs:
                axes.plot(
                    xs,
                    [level] * len(xs),
                    transform=transform,
                    linestyle="none",
                    marker=marker,
                    markeredgewidth=1.2,
                    color=styles[curve.line.label]["color"],
                    label=f"{name}: {curve.line.label}",
                    zorder=4,
                )
    return height


def canvas(
    styles: Mapping[str, Style], notes: Sequence[str], panels: int, rows: int = 1
) -> tuple[Figure, list[Axes], float]:
    """An empty figure, as tall as its legend and notes need, and where the legend starts.

    ``panels`` stand side by side, in ``rows`` of them, whose axes follow one another from the top.
    """
    width = _WIDTHS[panels]
    columns, labels = _legend_shape(styles, width)
    lines = math.ceil(len(labels) / columns) + sum(label.count("\n") for label in labels)
    note = textwrap.fill("; ".join(notes), int(width * 72 / 3.6)) if notes else ""
    below = lines * _ROW + 0.08 + (note.count("\n") + 1) * _NOTE_ROW * bool(note)
    tall = _HEIGHT if rows == 1 else _SHORT
    height = _TOP + rows * tall + (rows - 1) * _ROW_GAP + _BOTTOM + below
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    each = (width - _LEFT - _RIGHT - _GAP * (panels - 1)) / panels
    bottom = (below + _BOTTOM) / height
    axes = [
        figure.add_axes(
            (
                (_LEFT + index * (each + _GAP)) / width,
                bottom + (rows - 1 - row) * (tall + _ROW_GAP) / height,
                each / width,
                tall / height,
            )
        )
        for row in range(rows)
        for index in range(panels)
    ]
    if note:
        figure.text(
            0.5,
            0.03 / height,
            note,
            ha="center",
            va="bottom",
            fontsize=6,
            color=GREY,
            linespacing=1.25,
            parse_math=False,
        )
    return figure, axes, below / height


def _legend_shape(styles: Mapping[str, Style], width: float) -> tuple[int, list[str]]:
    """How many columns fit, and the labels broken to the width of the figure."""
    points, character, handle = width * 72 - 8, 3.9, 31  # of a 7-point font and a legend's handle
    labels = [textwrap.fill(label, int((points - handle) / character)) for label in styles]
    sizes = [max(map(len, label.split("\n"))) * character + handle for label in labels]
    for columns in range(min(6, len(labels)), 1, -1):
        parts = np.array_split(sizes, columns)  # matplotlib fills a legend in the same way
        if sum(part.max() for part in parts) <= points:
            return columns, labels
    return 1, labels


def add_legend(figure: Figure, styles: Mapping[str, Style], top: float) -> None:
    """Write every line's label below the panels."""
    columns, labels = _legend_shape(styles, figure.get_size_inches()[0])
    handles = [Line2D([], [], **style) for style in styles.values()]
    legend = figure.legend(
        handles,
        list(map(str, range(len(labels)))),
        loc="upper center",
        bbox_to_anchor=(0.5, top),
        ncols=columns,
        frameon=False,
        fontsize=7,
        handlelength=2.2,
        handletextpad=0.6,
        columnspacing=1.4,
        labelspacing=0.35,
        borderpad=0.1,
        borderaxespad=0,
    )
    # Set afterwards: matplotlib hides labels with a leading underscore and reads $ as mathematics.
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
