"""What the page's sections are made from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from eval.report.analysis import PRIMARY, Analysis, Finding, Point
from eval.report.comparable import Difference
from eval.report.figure import Style, styles_of
from eval.report.lines import Line, by_position, lines_of
from eval.report.rows import Row

PROTOCOLS = {
    PRIMARY: "the same target tokens at every length, each in a pass of its own; only the context "
    "before them differs. The primary protocol.",
    "non_overlapping": "windows that cut a document from its start, every token scored once; most "
    "have little context, so longer windows lower this loss of any model.",
    "per_position": "the loss by place in the windows of non_overlapping.",
    "sliding": "windows that advance by a stride, of which only what is new is scored.",
    "foreign_prefix": "T - L tokens of another document, then the last L true ones.",
    "index_probe": "the last L tokens at the positions that they have in a window of T.",
    "distance_probe": "the last L tokens, with a gap of T - L positions in their middle.",
    "keys_probe": "the last T tokens, within L positions.",
    "aligned": "fewer tokens than L, at the positions that they have at the end of L.",
    "slice": "the targets of nll_by_context, sorted by what they need.",
}


@dataclasses.dataclass(frozen=True)
class PageData:
    """The rows, what was made of them, and the lines of the primary protocol."""

    rows: list[Row]
    analysis: Analysis
    differences: Sequence[Difference]
    lines: list[Line]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Of every line that has losses."""
        return self.analysis.findings

    @property
    def points(self) -> list[tuple[Finding, Point]]:
        """Every length of every line."""
        return [(finding, point) for finding in self.findings for point in finding.points]

    @functools.cached_property
    def positions(self) -> list[Line]:
        """The lines by place in the window."""
        return lines_of(self.rows, "per_position", by_position)

    @functools.cached_property
    def styles(self) -> dict[str, Style]:
        """How each line is drawn, as in the figures."""
        return styles_of([lines for lines in (self.lines, self.positions) if lines])

    @property
    def lengths(self) -> list[int]:
        """Every T of the primary protocol."""
        return sorted({length for line in self.lines for length in line.cells})

    @property
    def trained(self) -> list[int]:
        """Every L."""
        return sorted({line.train_length for line in self.lines})
