"""Tables of negative log-likelihood by length, as Markdown and for a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.report.lines import Cell, Line, lines_of, notes_of, reasons_of
from eval.report.rows import Row
from posenc.errors import UserError

TITLES = {"nll": "nll", "excess_nll": "excess nll over the reference"}
NO_REFERENCE = "n/a"


@dataclass(frozen=True)
class Grid:
    """A table's texts: a header, lines of cells of which the first is a label, and footnotes."""

    title: str
    header: list[str]
    body: list[list[str]]
    footnotes: list[str]


def markdown_table(
    rows: Iterable[Row], protocol: str = "nll_by_context", value: str = "nll"
) -> str:
    """A Markdown table with one line an encoding and one column a length, and its footnotes.

    Cells are means over seeds to three decimals, in nats per token; `value` is "nll" or
    "excess_nll" (over the lowest nll of the same run and protocol at any length up to the training
    length). A cell is `undefined` where the encoding has no value, `n/a` where there is no
    reference, and blank where nothing was measured. Raises `UserError` if no row is of `protocol`.
    """
    return _markdown(_grid(list(rows), protocol, value))


def console_table(
    rows: Iterable[Row], protocol: str = "nll_by_context", value: str = "nll"
) -> Table:
    """The table of `markdown_table`, for a terminal; it takes and raises the same."""
    return _console(_grid(list(rows), protocol, value))


def cost_table(rows: Iterable[Row]) -> str | None:
    """A Markdown table of what each line cost to train; None if the rows do not say."""
    grid = costs_of(list(rows))
    return None if grid is None else _markdown(grid)


def tuning_table(rows: Iterable[Row]) -> str | None:
    """A Markdown table of how each tuned line was tuned; None if none was."""
    grid = tunings_of(list(rows))
    return None if grid is None else _markdown(grid)


def markdown_tables(rows: list[Row]) -> str:
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


def _markdown(grid: Grid) -> str:
    lines = [
        markdown_line(grid.header),
        markdown_line(["---", *["---:"] * (len(grid.header) - 1)]),
        *(markdown_line([code(label), *cells]) for label, *cells in grid.body),
        "",
        *(f"- {note}" for note in grid.footnotes),
    ]
    return "\n".join(lines) + "\n"


def _console(grid: Grid) -> Table:
    # Text, not str: an encoding's name may look like rich's markup.
    table = Table(
        title=Text(grid.title),
        caption=Text("\n".join(grid.footnotes)),
        caption_justify="left",
    )
    for index, name in enumerate(grid.header):
        table.add_column(
            Text(name),
            justify="right" if index else "left",
            no_wrap=index > 0,
            overflow="fold",
        )
    for line in grid.body:
        table.add_row(*map(Text, line))
    return table


def print_table(rows: Iterable[Row]) -> None:
    """Print the primary protocol's table and what its lines cost.

    Where the output is no terminal, as wide as it needs.
    """
    rows = list(rows)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(console_table(rows))
    costs = costs_of(rows)
    if costs is not None:
        console.print(_console(costs))


def _grid(rows: Sequence[Row], protocol: str, value: str) -> Grid:
    if value not in TITLES:
        raise UserError(f"no table of {value!r}: choose one of {', '.join(TITLES)}")
    if protocol == "per_position":
        raise UserError("per_position rows have no table by length: draw the figure instead")
    lines = lines_of(rows, protocol)
    if not lines:
        present = ", ".join(sorted({row["protocol"] for row in rows})) or "none"
        raise UserError(f"no rows of the protocol {protocol!r}: the rows are of {present}")
    lengths = sorted({length for line in lines for length in line.cells})
    trained = {line.train_length for line in lines}
    cells = [cell for line in lines for cell in line.cells.values()]
    usual = max(len(cell.values(value)) for cell in cells)

    def text(line: Line, length: int) -> str:
        cell = line.cells.get(length)
        if cell is None:
            return ""
        marks = []
        if len(trained) > 1 and length == line.train_length:
            marks.append("train")
        if (count := len(cell.values(value))) not in (0, usual):
            marks.append(f"n={count}")
        return _number(cell, value) + (f" ({', '.join(marks)})" if marks else "")

    header = [f"{n} (train)" if trained == {n} else str(n) for n in lengths]
    return Grid(
        title=f"{protocol}: {TITLES[value]} (nats per token)",
        header=["encoding", *header],
        body=[[line.label, *(text(line, n) for n in lengths)] for line in lines],
        footnotes=_footnotes(lines, protocol, value, usual),
    )


def runs_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Each line of the primary protocol, as it was trained, with a row a seed."""
    plain = [row for row in rows if not row["extend"]]
    present = {row["protocol"] for row in plain}
    protocols = [name for name in ("nll_by_context", "non_overlapping") if name in present]
    found = []
    for line in lines_of(plain, protocols[0]) if protocols else []:
        seeds = {row["seed"]: row for cell in line.cells.values() for row in cell.rows}
        found.append((line.label, [seeds[seed] for seed in sorted(seeds)]))
    return found


def costs_of(rows: Sequence[Row]) -> Grid | None:
    """What each line cost to train; None if the rows do not say."""
    if not any(row.get("train_flops") or row.get("train_seconds") for row in rows):
        return None

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return math.fsum(known) / len(known) if known else None

    body, every = [], []
    for label, seeds in runs_of(rows):
        every += seeds
        flops, seconds = (
            mean(row.get(name) for row in seeds) for name in ("train_flops", "train_seconds")
        )
        cells = [
            *(_range(seeds, name) for name in ("parameters", "train_tokens")),
            "" if flops is None else f"{flops:.3g}",
            "" if seconds is None else f"{seconds:,.0f}",
        ]
        body.append([label, *cells])
    at_once = _range(every, "seeds_at_once")
    together = f", of {at_once} trained at once" if at_once not in ("", "1") else ""
    devices = dict.fromkeys((row.get("trained_with") or {}).get("device") for row in every)
    return Grid(
        title="cost of training",
        header=["encoding", "parameters", "tokens", "operations", "seconds"],
        body=body,
        footnotes=[
            "operations: floating-point operations of all matrix products, forward and backward, "
            "masked or not; of one seed.",
            f"seconds: wall clock, compilation and validation among them; mean over seeds{together}"
            "; whatever else the machine did.",
            f"trained on: {'; '.join(str(device or 'not given') for device in devices)}.",
        ],
    )


def tunings_of(rows: Sequence[Row]) -> Grid | None:
    """How each tuned line was tuned; None if none was."""
    lines = []
    for label, seeds in runs_of(rows):
        if tuning := seeds[0].get("tuning"):
            lines.append((label, tuning))
    if not lines:
        return None
    body, notes = [], []
    for label, tuning in lines:
        losses = ["diverged" if loss is None else three_digits(loss) for loss in tuning["losses"]]
        body.append([label, _options(tuning["chosen"]), ", ".join(losses)])
        edges = [
            name
            for name, values in tuning["grid"].items()
            if _is_edge(tuning["chosen"][name], values)
        ]
        if edges:
            notes.append(f"at the edge of what was tried: `{label}`: {', '.join(edges)}.")
    designs = {
        f"{tuning['trials']} trials an encoding, of {_options(tuning['grid'])}, in this order; "
        f"seed {tuning['seed']}, {tuning['steps']} steps"
        for _, tuning in lines
    }
    return Grid(
        title="tuning",
        header=["encoding", "chosen", "losses"],
        body=body,
        footnotes=[
            *(f"{design}." for design in sorted(designs)),
            f"losses: {lines[0][1]['criterion']}, nats per token; the lowest is chosen.",
            *notes,
        ],
    )


def _options(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _is_edge(value: Any, tried: Sequence[Any]) -> bool:
    numbers = all(isinstance(other, int | float) for other in tried)
    return numbers and value in (min(tried), max(tried))


def three_digits(value: float) -> str:
    """Give a number to three decimals."""
    text = f"{value:.3f}"
    # What rounds to nothing has no sign.
    return text.removeprefix("-") if float(text) == 0 else text


def _number(cell: Cell, value: str) -> str:
    if cell.undefined:
        return "undefined"
    mean = cell.mean(value)
    if mean is None:
        return NO_REFERENCE
    return three_digits(mean)


def _footnotes(lines: Sequence[Line], protocol: str, value: str, usual: int) -> list[str]:
    rows = [row for line in lines for cell in line.cells.values() for row in cell.rows]
    scored = [row for row in rows if row["defined"]] or rows
    seeds = sorted({row["seed"] for row in rows})
    listed = ", ".join(map(str, seeds))
    what = "nll: mean negative log-likelihood of the target tokens"
    if value == "excess_nll":
        what = (
            "excess nll: nll less the lowest nll of the same run and protocol at any length up to "
            "the training length"
        )
    notes = [f"{what}; nats per token; columns: tokens in the window."]
    trained = sorted({line.train_length for line in lines})
    words = ", ".join(map(str, trained))
    notes.append(
        f"training length: {words} tokens."
        if len(trained) == 1
        else f"training lengths: {words} tokens; each line's own is marked (train)."
    )
    if len(seeds) == 1:
        notes.append(f"one seed ({listed}).")
    elif usual < 2:
        notes.append(f"one seed a cell; seeds {listed}.")
    else:
        notes.append(f"mean over {usual} seeds unless marked (n=...); seeds {listed}.")
    last = _range(scored, "targets")
    tail = f" (the last {last} of each window)" if last else ""
    counts = [f"target tokens: {_range(scored, 'tokens') or 'not given'}{tail}"]
    counts += [
        f"{name}: {count}"
        for name in ("blocks", "windows", "documents")
        if (count := _range(scored, name))
    ]
    notes.append(f"counts for each seed and length: {'; '.join(counts)}.")
    notes.append(f"protocol: {protocol}; bos: {_listed(rows, 'bos')}.")
    corpora = dict.fromkeys(_corpus(row) for row in rows)
    notes.append(f"corpus: {'; '.join(corpora)}.")
    notes += [f"note: {note}." for note in notes_of(lines)]
    notes += [f"undefined: {reason}." for reason in reasons_of(lines)]
    if value == "excess_nll" and any(row["defined"] and row[value] is None for row in rows):
        notes.append(f"{NO_REFERENCE}: no length up to the training length was scored.")
    return notes


def _range(rows: Iterable[Row], name: str) -> str:
    """The whole numbers under a name: one, or the lowest and the highest; empty without any."""
    numbers = {row[name] for row in rows if row.get(name) is not None}
    return " to ".join(f"{n:,}" for n in sorted({min(numbers), max(numbers)})) if numbers else ""


def _listed(rows: Iterable[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(str(row.get(name, "not given")) for row in rows))


def _corpus(row: Row) -> str:
    data = row.get("data") or {}
    name = " ".join(str(data[key]) for key in ("name", "version") if data.get(key))
    return f"{name or 'not given'}, tokenizer {data.get('tokenizer') or 'not given'}"


def markdown_line(cells: Iterable[str]) -> str:
    """Give a row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def code(text: str) -> str:
    """Text as a code span, since a spec may hold characters that Markdown reads (`a*3,b*2`)."""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"
