"""Tables and figures, from result rows alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from eval.report.figure import draw, make_figure, setup_style
from eval.report.rows import Row, checked, read_rows, write_file, write_rows
from eval.report.table import (
    console_table,
    cost_table,
    markdown_table,
    markdown_tables,
    tuning_table,
)

__all__ = [
    "Row",
    "console_table",
    "cost_table",
    "draw",
    "make_figure",
    "markdown_table",
    "read_rows",
    "setup_style",
    "tuning_table",
    "write_report",
    "write_rows",
]


def write_report(rows: Iterable[Row], folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write everything a paper needs from its rows; returns the paths by file name.

    The files are `rows.jsonl`, `rows.csv`, `table.md`, `figure.png` and `figure.pdf`; the same rows
    give the same bytes. Raises `UserError` for rows that cannot be reported and for a folder that
    cannot be written.
    """
    rows = checked(rows)
    folder = Path(folder)
    # Whatever reads the rows comes before the first file: rows at fault leave no half of a report.
    tables = markdown_tables(rows)
    figures = draw(rows, folder)
    paths = write_rows(rows, folder) | {"table.md": folder / "table.md"}
    write_file(paths["table.md"], tables.encode())
    paths |= {path.name: path for path in figures}
    return paths
