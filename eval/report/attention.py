"""How models attend: the figure of the arrays that ``eval score --probe`` wrote beside rows."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from eval.report.analysis import PRIMARY
from eval.report.figure import GREY, LINESTYLES, PALETTE, setup_style
from eval.report.lines import lines_of
from eval.report.rows import Row
from posenc.errors import UserError

ReadOut = dict[str, np.ndarray]

TITLES = (
    "attention mass, by tokens back",
    "entropy (nats), by place",
    "deviation of logits, by $T$",
    "learned, rms as a share of its first",
)
# More lines than these make a figure that no page holds.
MOST = 12


def read_mechanism(rows: Iterable[Path]) -> dict[str, ReadOut]:
    """Read what stands beside files of rows, by the name of the run.

    Raises:
        UserError: a file is damaged.
    """
    found: dict[str, ReadOut] = {}
    for path in rows:
        folder = (path if path.is_dir() else path.parent) / "mechanism"
        for file in sorted(folder.glob("*.npz")):
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    found[file.stem] = dict(arrays)
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
                raise UserError(
                    f"cannot read {file} ({error}): score with --probe again, or remove it"
                ) from None
    return found


def read_outs_of(rows: Iterable[Row], mechanism: dict[str, ReadOut]) -> dict[str, list[ReadOut]]:
    """Give the read-outs of every line of the primary protocol, one a seed, by label."""
    plain = [row for row in rows if not row["extend"]]
    found: dict[str, list[ReadOut]] = {}
    for line in lines_of(plain, PRIMARY):
        names: dict[str, None] = {}
        for cell in line.cells.values():
            for row in cell.rows:
                names |= dict.fromkeys((row["run"], f"{row['run']}-seed{row['seed']}"))
        own = [mechanism[name] for name in names if name in mechanism]
        if own:
            found[line.label] = own
    return found


def attention_figure(read_outs: dict[str, list[ReadOut]]) -> Figure:
    """Draw a row of panels a line: means over heads and seeds, a curve a layer.

    Mass and entropy are those of the longest length that was read out.
    """
    shown = list(read_outs.items())[:MOST]
    with setup_style():
        height = 0.55 + 1.25 * len(shown)
        figure = Figure(figsize=(7.0, height), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(shown), 4, squeeze=False)
        for row, (label, seeds) in enumerate(shown):
            lengths = sorted(_lengths(seeds[0]))
            longest = lengths[-1]
            _by_bucket(grid[row, 0], seeds, "mass", longest)
            _by_bucket(grid[row, 1], seeds, "entropy", longest)
            scales = np.mean(
                [[one[f"scale_{n}"].mean(axis=-1) for n in lengths] for one in seeds], axis=0
            )
            for layer, values in enumerate(scales.T):
                grid[row, 2].plot(lengths, values, marker="o", **_style(layer))
            _log_ticks(grid[row, 2], lengths)
            _learned(grid[row, 3], seeds)
            # A dollar would begin mathematics.
            name = label.replace("$", r"\$")
            grid[row, 0].set_ylabel(f"{name}\n$T$ = {longest}")
        for axes, title in zip(grid[0], TITLES, strict=True):
            axes.set_title(title, fontsize=7)
        every = [one for seeds in read_outs.values() for one in seeds]
        layers = max(len(one[f"scale_{_lengths(one)[0]}"]) for one in every)
        handles = [
            grid[0, 2].plot([], [], **_style(layer), label=f"layer {layer}")[0]
            for layer in range(layers)
        ]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(layers, 8), frameon=False
        )
    return figure


def _lengths(one: ReadOut) -> list[int]:
    return [int(name.removeprefix("scale_")) for name in one if name.startswith("scale_")]


def _style(layer: int) -> dict[str, Any]:
    dash = LINESTYLES[layer // len(PALETTE) % len(LINESTYLES)]
    return {"color": PALETTE[layer % len(PALETTE)], "linestyle": dash}


def _by_bucket(axes: Axes, seeds: Sequence[ReadOut], name: str, length: int) -> None:
    edges = seeds[0][f"edges_{length}"]
    # The first bucket is 0 alone, which a logarithm has no place for.
    places = np.sqrt(np.maximum(edges[:-1], 0.5) * np.maximum(edges[1:] - 1, 0.5))
    every = np.mean([one[f"{name}_{length}"].mean(axis=1) for one in seeds], axis=0)
    for layer, values in enumerate(every):
        axes.plot(places, values, marker="o", markersize=2.5, **_style(layer))
    _log_ticks(axes, [2**n for n in range(0, int(np.log2(length)) + 1, 2)])


def _log_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [str(tick) if n % 2 == 0 else "" for n, tick in enumerate(ticks)])


def _learned(axes: Axes, seeds: Sequence[ReadOut]) -> None:
    names = [n for n in seeds[0] if n.startswith("learned_") and n.endswith(".rms")]
    for index, name in enumerate(names):
        first = seeds[0][name]
        alike = [one[name] for one in seeds if one[name].shape == first.shape]
        shares = np.mean([one[:, 1] / one[0, 1] for one in alike], axis=0)
        dash: Any = LINESTYLES[index % len(LINESTYLES)]
        name = name.removeprefix("learned_").removesuffix(".rms")
        axes.plot(first[:, 0], shares, color=GREY, linestyle=dash, label=name)
    if names:
        axes.set_xlabel("step", fontsize=6)
        # With more, dashes come again.
        if len(names) <= len(LINESTYLES):
            bottom, top = axes.get_ylim()
            axes.set_ylim(bottom, top + 0.13 * len(names) * (top - bottom))
            axes.legend(
                loc="upper left", fontsize=4.5, frameon=False, handlelength=2.5, labelspacing=0.2
            )
    else:
        axes.text(0.5, 0.5, "nothing is learned", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_axis_off()
