"""The whole report in one folder: the page, rows, tables, figures, methods and references."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from eval.report import write_report
from eval.report.analysis import PRIMARY, analyse
from eval.report.attention import ReadOut, attention_figure, read_outs_of
from eval.report.bibliography import references
from eval.report.comparable import check_comparable
from eval.report.figure import make_figure, rendered
from eval.report.figures import figures
from eval.report.latex import latex_table
from eval.report.methods import methods
from eval.report.page import render_page
from eval.report.rows import Row, checked, write_file, write_rows
from eval.report.summary import csv_table, interval_tables
from eval.report.table import markdown_tables

# Of these a report may have none; one of an earlier report would stand beside other rows.
OPTIONAL = ("figure-tax-info", "figure-positions", "figure-attention")
# What the page has of other files.
KINDS = {"references": "bib", "methods": "md"}
NO_INTERVALS = (
    "no intervals, hence no page, table.tex, table.csv, references.bib and methods.md: no row of "
    f"{PRIMARY} has sums by document; score the runs again"
)


def has_intervals(rows: Iterable[Row]) -> bool:
    """Say whether intervals can be made: rows of before there were sums by document have none."""
    return any(row["protocol"] == PRIMARY and row.get("document_nll") for row in rows)


def write_full_report(
    rows: Iterable[Row],
    folder: str | os.PathLike[str],
    *,
    baseline: str | None = None,
    allow_mixed: bool = False,
    left_out: int = 0,
    mechanism: dict[str, ReadOut] | None = None,
) -> dict[str, Path]:
    """Write a report with intervals, and give the paths by file name.

    Everything is computed before the first file is written; the same rows give the same bytes. Rows
    that intervals cannot be made of give what `write_report` gives.

    Args:
        rows: that can be compared.
        folder: where the files go.
        baseline: the label of the line that others are compared with; the first unless told.
        allow_mixed: whether rows may differ in what makes numbers incomparable.
        left_out: lines that were no rows, which the methods then say.
        mechanism: how models attend, by run, as `read_mechanism` gives it.

    Raises:
        UserError: rows that cannot be compared or reported, no line of the baseline's label, or a
            folder that cannot be written.
    """
    rows = checked(rows)
    found = check_comparable(rows, allow_mixed=allow_mixed)
    if not has_intervals(rows):
        return write_report(rows, folder)
    analysis = analyse(rows, baseline, mixed=allow_mixed)
    files = {
        "table.md": f"{markdown_tables(rows)}\n{interval_tables(analysis)}".encode(),
        "table.tex": latex_table(analysis).encode(),
        "table.csv": csv_table(analysis).encode(),
        "references.bib": references(rows).encode(),
        "methods.md": methods(rows, analysis, left_out).encode(),
        **rendered(make_figure(rows), "figure"),
        **figures(rows, analysis),
    }
    if read_outs := read_outs_of(rows, mechanism or {}):
        files |= rendered(attention_figure(read_outs), "figure-attention")
    words = {name: files[f"{name}.{kind}"].decode() for name, kind in KINDS.items()}
    files["index.html"] = render_page(
        rows, analysis, found, **words, attention=files.get("figure-attention.png")
    ).encode()
    folder = Path(folder)
    for name, content in files.items():
        write_file(folder / name, content)
    for name in OPTIONAL:
        for kind in ("png", "pdf"):
            if f"{name}.{kind}" not in files:
                (folder / f"{name}.{kind}").unlink(missing_ok=True)
    # Rows come last: where there was no room for all, what is there is no report.
    return write_rows(rows, folder) | {name: folder / name for name in files}
