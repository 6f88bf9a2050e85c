"""Curves over a length as SVG, for the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias
from xml.etree.ElementTree import Element

import numpy as np
from matplotlib.markers import MarkerStyle
from matplotlib.ticker import MaxNLocator

from eval.report.figure import PALETTE, Style
from eval.report.page.markup import Node, h

Scale: TypeAlias = Callable[[float], float]

WIDTH, HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 18, 34, 66
_STROKE, _MARKER, _DOT, _ROW = 2.2, 4.6, 2.4, 18
# A mean's own seeds stand beside it, where the marker does not cover them.
_ASIDE = 9
# Intervals of two or three seeds may be so wide that nothing else could be seen.
_REACH = 0.6


@dataclasses.dataclass(frozen=True)
class Mark:
    """A point of a curve: x, its mean, the limits around it, and each seed's value."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    seeds: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve: its points by rising x, and where it has none, undefined or not finite.

    ``loose`` are seeds where there is no mean.
    """

    label: str
    style: Style
    marks: tuple[Mark, ...]
    undefined: tuple[float, ...] = ()
    not_finite: tuple[float, ...] = ()
    loose: tuple[Mark, ...] = ()


def chart(
    series: Sequence[Series],
    *,
    name: str,
    title: str,
    description: str,
    trained: Iterable[int],
    ticks: Iterable[int],
    x_label: str,
    y_label: str,
) -> Element:
    """Draw curves on a log2 axis, with bands, seeds, training lengths and a strip, and a legend.

    Args:
        series: in order; what has no value at an x is in the strip on top.
        name: its id.
        title: read aloud, and shown below.
        description: the same.
        trained: lengths that are marked.
        ticks: where the axis may have numbers.
        x_label: of the axis.
        y_label: of the other.
    """
    trained = sorted(set(trained))
    places = [m.x for s in series for m in s.marks]
    places += [x for s in series for x in (*s.undefined, *s.not_finite)] + [*map(float, trained)]
    left, right = math.log2(min(places)), math.log2(max(places))
    pad = 0.06 * (right - left) or 0.5
    left, right = left - pad, right + pad
    marked = [s for s in series if s.undefined or s.not_finite]
    top = _TOP + (_ROW * (len(marked) + 1) + 6 if marked else 0)
    low, high, cut = _range_of(series)

    def at_x(x: float) -> float:
        return _LEFT + (math.log2(x) - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _BOTTOM - top)

    drawn: list[Node] = [
        h("title", title, id=f"{name}-title"),
        h("desc", description, id=f"{name}-description"),
        h(
            "defs",
            h(
                "clipPath",
                h("rect", **_box(_LEFT, top, WIDTH - _LEFT - _RIGHT, HEIGHT - _BOTTOM - top)),
                id=f"{name}-panel",
            ),
        ),
        *_axes(at_x, at_y, (low, high), (left, right), trained, ticks, x_label, y_label),
    ]
    if marked:
        drawn += _strip(marked, at_x)
    drawn += [_curve(one, at_x, at_y, f"{name}-panel") for one in series]
    shown = h(
        "svg",
        drawn,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{name}-title {name}-description",
        id=name,
    )
    note = " Bands that leave the panel are cut." if cut else ""
    return h(
        "figure",
        shown,
        h("ul", [h("li", _key(one.style), one.label) for one in series], class_="legend"),
        h("figcaption", h("strong", title), ". ", description, note),
    )


def colours(dark: bool) -> str:
    """Give the rules of CSS that colour curves; what the dark would hide is lighter there."""
    lighter = {"#0072B2": "#4DA9E8", "#000000": "#F2F2F2", "#009E73": "#1FBE92"}
    return "".join(
        f".s{index}{{color:{lighter.get(colour, colour) if dark else colour}}}"
        for index, colour in enumerate(PALETTE)
    )


def _range_of(series: Sequence[Series]) -> tuple[float, float, bool]:
    """Give what the axis of y covers, and whether bands are cut there."""
    every = [m for s in series for m in (*s.marks, *s.loose)]
    own = [y for m in every for y in (m.y, *m.seeds) if math.isfinite(y)] or [0.0]
    low, high = min(own), max(own)
    room = (high - low) * _REACH or 0.5
    bands = [y for s in series for m in s.marks for y in (m.low, m.high) if y is not None] or own
    bottom, top = max(min(*bands, low), low - room), min(max(*bands, high), high + room)
    pad = 0.05 * (top - bottom) or 0.5
    return bottom - pad, top + pad, min(bands) < bottom - pad or max(bands) > top + pad


def _axes(
    at_x: Scale,
    at_y: Scale,
    limits: tuple[float, float],
    ends: tuple[float, float],
    trained: Sequence[int],
    ticks: Iterable[int],
    x_label: str,
    y_label: str,
) -> list[Node]:
    bottom = HEIGHT - _BOTTOM
    parts: list[Node] = []
    values = MaxNLocator(6).tick_values(*limits)
    # As many digits as tell the ticks apart exactly.
    digits = next(
        (d for d in range(9) if np.allclose(values, np.round(values, d), rtol=0, atol=1e-9)), 9
    )
    for value in values:
        if limits[0] <= value <= limits[1]:
            y = at_y(float(value))
            parts += [
                h("line", class_="grid", **_ends(_LEFT, y, WIDTH - _RIGHT, y)),
                h("text", f"{value:.{digits}f}", class_="right", **_at(_LEFT - 8, y + 5)),
            ]
    placed: list[float] = []
    for tick in sorted(set(ticks), key=lambda tick: (tick not in trained, tick)):
        x = at_x(tick)
        if not ends[0] <= math.log2(tick) <= ends[1]:
            continue
        parts.append(h("line", class_="axis", **_ends(x, bottom, x, bottom + 5)))
        if all(abs(x - other) > 58 for other in placed):
            placed.append(x)
            parts.append(h("text", str(tick), class_="middle", **_at(x, bottom + 24)))
    for length in trained:
        parts.append(
            h("line", class_="trained", **_ends(at_x(length), _TOP - 8, at_x(length), bottom))
        )
    centre = sum(at_x(length) for length in trained) / len(trained)
    said = f"training length{'s' * (len(trained) > 1)} {', '.join(map(str, trained))}"
    centre = min(max(centre, _LEFT + 90), WIDTH - _RIGHT - 110)
    parts += [
        h("text", said, class_="middle", **_at(centre, _TOP - 14)),
        h("line", class_="axis", **_ends(_LEFT, bottom, WIDTH - _RIGHT, bottom)),
        h("text", x_label, class_="middle", **_at((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 12)),
        h(
            "text",
            y_label,
            class_="middle side",
            transform=f"translate(18 {(_TOP + bottom) / 2:.1f}) rotate(-90)",
        ),
    ]
    return parts


def _strip(marked: Sequence[Series], at_x: Scale) -> list[Node]:
    words = [
        *(["\N{MULTIPLICATION SIGN} undefined"] if any(s.undefined for s in marked) else []),
        *(
            ["\N{WHITE UP-POINTING TRIANGLE} not finite"]
            if any(s.not_finite for s in marked)
            else []
        ),
    ]
    height = _ROW * (len(marked) + 1)
    parts: list[Node] = [
        h("rect", class_="strip", **_box(_LEFT, _TOP, WIDTH - _LEFT - _RIGHT, height)),
        h("text", ", ".join(words), **_at(_LEFT + 8, _TOP + 15)),
    ]
    for row, one in enumerate(marked):
        y = _TOP + _ROW * (row + 1.45)
        group: list[Node] = [
            h("path", d=f"M{at_x(x) - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="cross")
            for x in one.undefined
        ]
        group += [
            h("path", d=f"M{at_x(x) - 6:.1f} {y + 5:.1f}l6 -11l6 11z", class_="cross")
            for x in one.not_finite
        ]
        parts.append(h("g", h("title", one.label), group, class_=_colour(one.style)))
    return parts


def _curve(one: Series, at_x: Scale, at_y: Scale, panel: str) -> Element:
    """Draw band, line, seeds and means of one line; a gap where it has no value."""
    gaps = sorted((*one.undefined, *one.not_finite, *(mark.x for mark in one.loose)))
    runs: list[list[Mark]] = [[]]
    for mark in one.marks:
        if runs[-1] and any(runs[-1][-1].x < gap < mark.x for gap in gaps):
            runs.append([])
        runs[-1].append(mark)
    bands, lines = [], []
    for run in runs:
        banded = [(m.x, m.low, m.high) for m in run if m.low is not None and m.high is not None]
        around = [(x, high) for x, _, high in banded] + [(x, low) for x, low, _ in banded[::-1]]
        if len(banded) > 1:
            bands.append(h("path", d=_path(around, at_x, at_y) + "z", class_="band"))
        if len(run) > 1:
            lines.append(_path([(m.x, m.y) for m in run], at_x, at_y))
    points: list[Node] = []
    whiskers: list[Node] = []
    for mark in (*one.marks, *one.loose):
        x = at_x(mark.x)
        if len(mark.seeds) > 1:
            points += [
                h("circle", class_="seed", cx=f"{x + _ASIDE:.1f}", cy=f"{at_y(seed):.1f}", r=_DOT)
                for seed in mark.seeds
                if math.isfinite(seed)
            ]
    for mark in one.marks:
        x, y = at_x(mark.x), at_y(mark.y)
        if mark.low is not None and mark.high is not None:
            whiskers.append(
                h("line", class_="whisker", **_ends(x, at_y(mark.low), x, at_y(mark.high)))
            )
        points.append(h("path", d=_marker(one.style["marker"], x, y, _MARKER), class_="mean"))
    return h(
        "g",
        h("title", one.label),
        h("g", bands, whiskers, clip_path=f"url(#{panel})"),
        [h("path", d=line, class_="line", stroke_dasharray=_dashes(one.style)) for line in lines],
        points,
        class_=_colour(one.style),
    )


def _key(style: Style) -> Element:
    line = h("line", class_="line", stroke_dasharray=_dashes(style), **_ends(1, 8, 39, 8))
    mean = h("path", d=_marker(style["marker"], 20, 8, _MARKER), class_="mean")
    return h("svg", line, mean, viewBox="0 0 40 16", class_=_colour(style), aria_hidden="true")


def _colour(style: Style) -> str:
    return f"s{PALETTE.index(style['color'])}"


def _dashes(style: Style) -> str | None:
    if style["linestyle"] == "-":
        return None
    return " ".join(f"{_STROKE * length:.1f}" for length in style["linestyle"][1])


def _marker(marker: str, x: float, y: float, size: float) -> str:
    """Give the outline of one of Matplotlib's markers, so that page and figure have the same."""
    if marker == "o":
        half = f"a{size} {size} 0 1 0"
        return f"M{x - size:.1f} {y:.1f}{half} {2 * size} 0{half} {-2 * size} 0z"
    shape = MarkerStyle(marker)
    outline = shape.get_path().transformed(shape.get_transform()).to_polygons()
    polygons = [np.asarray(polygon, np.float64) for polygon in outline]
    scale = 2 * size
    return "".join(
        "M" + "L".join(f"{x + scale * a:.1f} {y - scale * b:.1f}" for a, b in polygon) + "z"
        for polygon in polygons
    )


def _path(points: Sequence[tuple[float, float]], at_x: Scale, at_y: Scale) -> str:
    return "M" + "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in points)


def _at(x: float, y: float) -> dict[str, str]:
    return {"x": f"{x:.1f}", "y": f"{y:.1f}"}


def _box(x: float, y: float, width: float, height: float) -> dict[str, str]:
    return {**_at(x, y), "width": f"{width:.1f}", "height": f"{height:.1f}"}


def _ends(x1: float, y1: float, x2: float, y2: float) -> dict[str, str]:
    return {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
