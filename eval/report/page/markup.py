"""HTML as a tree of elements, so that text is escaped wherever it stands."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from xml.etree.ElementTree import Element, tostring

from eval.report.table import three_digits
from eval.stats import DOCUMENTS_ONLY, Interval

Node: TypeAlias = "Element | str | Sequence[Node] | None"

NONE, NOT_FINITE, UNDEFINED = "\N{EN DASH}", "not finite", "undefined"
EXPLAINED = {
    NONE: "nothing was measured, or it cannot be computed",
    NOT_FINITE: "a loss overflowed, or is not a number",
}
# Neither HTML nor UTF-8 has a place for them.
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


def h(tag: str, *children: Node, **attributes: Any) -> Element:
    """Make an element.

    Args:
        tag: its name.
        children: elements and text; None is left out, and sequences are taken in order.
        attributes: ``class_`` is class, ``data_sort`` is data-sort; None is left out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(name.rstrip("_").replace("_", "-"), _clean(str(value)))
    for child in _flat(children):
        if isinstance(child, Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + _clean(child)
        else:
            element.text = (element.text or "") + _clean(child)
    return element


def html(element: Element) -> str:
    """Write an element; the contents of ``style`` and ``script`` as they are."""
    return tostring(element, encoding="unicode", method="html")


def words(text: str) -> list[Node]:
    """Give text with its `code` marked up."""
    parts = re.split(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", text)
    found: list[Node] = [parts[0]]
    for code, after in zip(parts[2::3], parts[3::3], strict=True):
        found += [h("code", code.strip()), after]
    return found


def number(value: float | None) -> str:
    """Give a number as the page shows it; what is no number, in words.

    As the report's other tables do: three decimals, and no sign of what rounds to nothing. Whole
    numbers have separators.
    """
    if value is None:
        return NONE
    if isinstance(value, int):
        text = f"{value:,}"
    elif not math.isfinite(value):
        return NOT_FINITE
    else:
        text = three_digits(value)
    return text.replace("-", "\N{MINUS SIGN}")


def p_value(value: float | None) -> str:
    """Give a p-value."""
    return "< 0.001" if value is not None and value < 0.001 else number(value)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it says.
        sort: what it is sorted by; None goes last, in either direction.
        more: said below, smaller.
        kind: a class, for how it looks.
    """

    text: str
    sort: float | str | None = None
    more: str = ""
    kind: str | None = None


def value_cell(value: float | None) -> Cell:
    """Make the cell of a number."""
    fit = value is not None and math.isfinite(value)
    return Cell(number(value), value if fit else None)


def name_cell(value: int) -> Cell:
    """Make the cell of a whole number that names something: a length or a seed."""
    return Cell(str(value), value)


def bounds(interval: Interval) -> str:
    """Give an interval's limits in brackets, or why it has none."""
    if interval.low is None:
        return interval.why
    only = f" {DOCUMENTS_ONLY}" if interval.method == DOCUMENTS_ONLY else ""
    return f"[{number(interval.low)}, {number(interval.high)}]{only}"


def interval_cell(interval: Interval | None, why: str = "") -> Cell:
    """Make the cell of an estimate with its interval below, or of the reason why there is none."""
    if interval is None:
        return Cell(NONE, more=why)
    return dataclasses.replace(value_cell(interval.estimate), more=bounds(interval))


def with_interval(interval: Interval) -> str:
    """Give an estimate and its interval in running text."""
    return f"{number(interval.estimate)} {bounds(interval)}"


def interval_notes(intervals: Iterable[Interval | None]) -> list[str]:
    """Say what the brackets of a table are."""
    found: dict[str, None] = {}
    for interval in intervals:
        if interval is None or interval.low is None:
            continue
        together = (
            f", for all {interval.comparisons} comparisons together (Bonferroni)"
            if interval.comparisons > 1
            else ""
        )
        text = f"[ ]: {interval.level:.0%} interval{together}, "
        if interval.method == DOCUMENTS_ONLY:
            text += f"{DOCUMENTS_ONLY}: by bootstrap, of one seed; it says nothing of other seeds."
        else:
            text += f"{interval.method}."
        found[text] = None
    return list(found)


def table(
    name: str,
    caption: str,
    header: Sequence[str],
    body: Iterable[Sequence[Cell | str]],
    notes: Iterable[str] = (),
) -> Element:
    """Make a sortable table that scrolls within itself, with its notes.

    Args:
        name: its id.
        caption: what it shows.
        header: of the columns; the first names the lines.
        body: lines; a string is a cell that is sorted by it.
        notes: below it; `code` is marked up, and what cells say instead of a number is explained.
    """
    lines = [[Cell(c, c) if isinstance(c, str) else c for c in line] for line in body]
    numeric = [
        any(isinstance(line[column].sort, int | float) for line in lines)
        for column in range(len(header))
    ]

    def made(cell: Cell, column: int) -> Element:
        kinds = [*(["number"] if numeric[column] else []), *([cell.kind] if cell.kind else [])]
        more: list[Node] = [" ", h("span", cell.more, class_="more")] if cell.more else []
        return h(
            "td" if column else "th",
            cell.text,
            more,
            scope=None if column else "row",
            class_=" ".join(kinds) or None,
            data_sort=cell.sort,
        )

    said = {cell.text for line in lines for cell in line}
    every = [*notes, *(f"{word}: {why}." for word, why in EXPLAINED.items() if word in said)]
    return h(
        "div",
        h(
            "div",
            h(
                "table",
                h("caption", caption, id=f"{name}-caption"),
                h(
                    "thead",
                    h(
                        "tr",
                        [
                            h("th", text, scope="col", class_="number" if right else None)
                            for text, right in zip(header, numeric, strict=True)
                        ],
                    ),
                ),
                h(
                    "tbody",
                    [h("tr", [made(cell, n) for n, cell in enumerate(line)]) for line in lines],
                ),
                id=name,
                class_="sortable",
            ),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_labelledby=f"{name}-caption",
        ),
        h("ul", [h("li", words(note)) for note in every], class_="notes") if every else None,
    )


def _flat(children: Iterable[Node]) -> Iterable[Element | str]:
    for child in children:
        if isinstance(child, Element | str):
            yield child
        elif child is not None:
            yield from _flat(child)


def _clean(text: str) -> str:
    return _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text)
