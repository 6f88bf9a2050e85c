"""Tables and figures, from result rows alone."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from eval.report.figure import draw, make_figure, setup_style
from eval.report.rows import Row, checked, read_rows, write_file, write_rows
from eval.report.table import TITLES, console_table, cost_table, markdown_table, tuning_table

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
    tables = _tables(rows)
    figures = draw(rows, folder)
    paths = write_rows(rows, folder) | {"table.md": folder / "table.md"}
    write_file(paths["table.md"], tables.encode())
    paths |= {path.name: path for path in figures}
    return paths


def _tables(rows: list[Row]) -> str:
    """The primary protocol's table, the other one's, and the excess over the reference."""
    present = {row["protocol"] for row in rows}
    protocols = [name for name in ("nll_by_context", "non_overlapping") if name in present]
    wanted = [(protocol, "nll") for protocol in protocols]
    wanted += [
        (protocol, "excess_nll")
        for protocol in protocols[:1]
        if any(row["protocol"] == protocol and row["excess_nll"] is not None for row in rows)
    ]
    more = {"cost of training": cost_table(rows), "tuning": tuning_table(rows)}
    parts = [
        f"## {protocol}: {TITLES[value]}\n\n{markdown_table(rows, protocol, value)}"
        for protocol, value in wanted
    ]
    # What they cost stands right below what is compared.
    parts[1:1] = [f"## {title}\n\n{table}" for title, table in more.items() if table is not None]
    return "\n".join(parts) or "No rows give a number by length.\n"
