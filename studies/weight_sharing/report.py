"""Table and figure of the study, from its rows alone.

python -m studies.weight_sharing.report studies/weight_sharing/results again
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.report.figure import LINESTYLES, PALETTE, setup_style
from eval.report.rows import Row, read_rows, write_file
from posenc.errors import UserError, one_line_errors
from posenc.sharing import copies_of

Rows = dict[str, list[Row]]
Model = tuple[str, int, int, float]  # how it shares, width, parameters, peak learning rate
EXPERIMENTS = ("text", "facts", "contributions")
# Every place of the window counts alike, as in training.
ON_TEXT = "non_overlapping"
COLOURS = {"all": PALETTE[0], "none": PALETTE[1]}


def by_seed(rows: Iterable[Row], value: str = "nll") -> tuple[float, float, float]:
    """Give the mean over the seeds, the lowest and the highest."""
    seeds: dict[int, list[float]] = {}
    for row in rows:
        seeds.setdefault(row["seed"], []).append(row[value])
    means = [float(np.mean(values)) for values in seeds.values()]
    return float(np.mean(means)), min(means), max(means)


def _models(rows: list[Row]) -> list[Model]:
    """Give every model among rows, in order."""
    keys = ("sharing", "width", "parameters", "learning_rate")
    return list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))


def _of(rows: list[Row], model: Model, **conditions: object) -> list[Row]:
    sharing, width, *_ = model
    wanted = {"sharing": sharing, "width": width, **conditions}
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _words(value: tuple[float, float, float], digits: int = 3) -> str:
    mean, low, high = value
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def kind_of_place(row: Row) -> str | None:
    """Say what a place of the facts is to the weights that read a fact there.

    Returns:
        ``taught``; ``shared`` if mark and letter meet weights of which facts were taught elsewhere;
        ``own`` if no fact was taught to the letter's weights; None at the border of two groups,
        where mark and letter meet the weights of different ones.
    """
    if row["taught"]:
        return "taught"
    per_copy = row["length"] // copies_of(row["sharing"], row["length"])
    letter, mark = row["place"] // per_copy, (row["place"] - 1) // per_copy
    if letter not in {place // per_copy for place in row["taught_places"]}:
        return "own"
    return "shared" if letter == mark else None


def table(rows: Rows) -> str:
    """Give the numbers as Markdown: means over the seeds, and their range."""
    scored = [row for row in rows["text"] if row["protocol"] == ON_TEXT]
    steps = sorted({row["train_tokens"] for row in scored})
    seeds = sorted({row["seed"] for row in scored})
    first = scored[0]
    lines = [
        "## Text: loss by tokens trained on",
        "",
        f"{ON_TEXT}: nats a token, {first['tokens']:,} tokens of {first['documents']} test "
        f"documents, windows of {first['length']}; mean (lowest to highest) of seeds "
        f"{', '.join(map(str, seeds))}. The learning rate, each model's best of three, falls until "
        "the end.",
        "",
        "| sharing | width | parameters | peak rate | "
        + " | ".join(f"{n:,}" for n in steps)
        + " |",
        "| --- | ---: | ---: | ---: | " + " | ".join("---:" for _ in steps) + " |",
    ]
    for model in _models(scored):
        sharing, width, parameters, rate = model
        cells = [_words(by_seed(_of(scored, model, train_tokens=n))) for n in steps]
        head = f"| `{sharing}` | {width} | {parameters:,} | {rate:g} | "
        lines.append(head + " | ".join(cells) + " |")
    lines += [
        "",
        "## Facts: taught at some places, asked for at all",
        "",
        f"share of answers that were right ({rows['facts'][0]['tokens']} a place and seed); mean "
        "(lowest to highest) of the seeds",
        "",
        "| sharing | parameters | taught places | other places, weights taught elsewhere "
        "| places of weights never taught |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for model in _models(rows["facts"]):
        sharing, _, parameters, _ = model
        cells = []
        for kind in ("taught", "shared", "own"):
            some = [r for r in _of(rows["facts"], model) if kind_of_place(r) == kind]
            cells.append(_words(by_seed(some, "accuracy"), 2) if some else "none")
        lines.append(f"| `{sharing}` | {parameters:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Signal: positions of one sequence that add to a weight's gradient",
        "",
        "| sharing | median weight | most |",
        "| --- | ---: | ---: |",
    ]
    lines += [
        f"| `{row['sharing']}` | {row['contributions_median']:g} | {row['contributions_most']} |"
        for row in rows["contributions"]
    ]
    return "\n".join(lines) + "\n"


def _style(model: Model, widest: int) -> dict[str, object]:
    sharing, width, *_ = model
    colour = COLOURS.get(sharing, PALETTE[3] if "=2)" in sharing else PALETTE[2])
    return {"color": colour, "linestyle": LINESTYLES[0] if width == widest else LINESTYLES[1]}


def _label(model: Model, widest: int) -> str:
    sharing, width, parameters, _ = model
    kind = {"all": "all positions share", "none": "none share"}.get(
        sharing, f"{sharing.partition('=')[2].rstrip(')')} groups of positions"
    )
    narrow = "" if width == widest else f", width {width}"
    return f"{kind}{narrow} ({parameters / 1e6:.2f} M)"


def _curve(
    axes: Axes,
    places: list[float],
    values: list[tuple[float, float, float]],
    style: dict,
    label: str,
) -> None:
    mean, low, high = zip(*values, strict=True)
    axes.fill_between(places, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.plot(places, mean, marker="o", markersize=2.4, label=label, **style)


def make_figure(rows: Rows) -> Figure:
    """Draw loss by tokens, facts by place and loss by position; bands are the seeds' range."""
    with setup_style():
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        panels = figure.subplots(1, 3)
    scored = [row for row in rows["text"] if row["protocol"] == ON_TEXT]
    position = [row for row in rows["text"] if row["protocol"] == "per_position"]
    widest = max(row["width"] for row in scored)
    for model in _models(scored):
        style, label = _style(model, widest), _label(model, widest)
        some = _of(scored, model)
        tokens = sorted({row["train_tokens"] for row in some})
        values = [by_seed(_of(some, model, train_tokens=n)) for n in tokens]
        _curve(panels[0], tokens, values, style, label)
        some = _of(position, model)
        buckets = sorted({(row["position_from"], row["position_to"]) for row in some})
        values = [by_seed(_of(some, model, position_from=low)) for low, _ in buckets]
        _curve(panels[2], [(low + high - 1) / 2 for low, high in buckets], values, style, label)
    for model in _models(rows["facts"]):
        some = _of(rows["facts"], model)
        places = sorted({row["place"] for row in some})
        values = [by_seed(_of(some, model, place=p), "accuracy") for p in places]
        _curve(panels[1], places, values, _style(model, widest), _label(model, widest))
    for place in sorted({row["place"] for row in rows["facts"] if row["taught"]}):
        panels[1].axvspan(place - 0.5, place + 0.5, color="0.92", zorder=0, linewidth=0)
    for axes, letter, title, x, y in (
        (panels[0], "a", "text", "tokens trained on", "loss (nats per token)"),
        (
            panels[1],
            "b",
            "facts taught in grey places",
            "place of the fact",
            "right answers (share)",
        ),
        (panels[2], "c", "text", "place of the predicted token", "loss (nats per token)"),
    ):
        axes.set_title(f"({letter}) {title}", fontsize=7.5, loc="left")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    panels[0].set_xscale("log")
    ticks = sorted({row["train_tokens"] for row in scored})
    panels[0].set_xticks(ticks, [f"{n / 1000:,.0f}k" for n in ticks], minor=False)
    panels[0].set_xticks([], minor=True)
    panels[1].set_ylim(-0.03, 1.03)
    handles: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=6.5,
        handlelength=3.4,
    )
    return figure


def draw(rows: Rows, path: Path) -> None:
    """Write the figure as PNG; the same rows give the same bytes."""
    buffer = io.BytesIO()
    with setup_style():
        make_figure(rows).savefig(buffer, format="png", metadata={"Software": None})
    write_file(path, buffer.getvalue())


def main(arguments: list[str]) -> None:
    """Make table and figure again."""
    if len(arguments) != 2:
        raise UserError("give two folders: that of the results, and where table and figure go")
    results, out = map(Path, arguments)
    rows = {name: read_rows(results / name) for name in EXPERIMENTS}
    write_file(out / "table.md", table(rows).encode())
    draw(rows, out / "figure.png")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
