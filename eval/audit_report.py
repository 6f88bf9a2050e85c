"""Audits in words and figures."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.report.figure import PALETTE, setup_style
from eval.report.rows import write_file

Line = tuple[str, ...]
# Kinds of weights that are named where a length is among their dimensions, which may be by chance.
LISTED = 4


def columns(lines: Sequence[Line], indent: str = "", words: int = 1) -> str:
    """Align lines of cells: the first ``words`` to the left, numbers to the right."""
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    return "\n".join(
        (
            indent
            + "  ".join(
                cell.ljust(width) if i < words else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=False))
            )
        ).rstrip()
        for line in lines
    )


def _gathered(named: Iterable[tuple[str, str]]) -> list[Line]:
    """Gather what is the same in all blocks into one line."""
    found: dict[tuple[str, str], int] = {}
    for name, words in named:
        key = re.sub(r"^blocks\.\d+\.", "blocks.*.", name), words
        found[key] = found.get(key, 0) + 1
    return [
        (name, words, f"({count} of them)" if count > 1 else "")
        for (name, words), count in found.items()
    ]


def _change(values: Sequence[int]) -> str:
    difference = values[-1] - values[0]
    return f"{difference:+,}" if difference else "0"


def _rounded(number: int) -> str:
    unit, name = (10**9, "billion") if number >= 10**9 else (10**6, "million")
    return f"{number / unit:,.1f} {name}"


def model_words(title: str, found: dict[str, Any]) -> str:
    """Say what ``audit_model`` found."""
    lengths = found["lengths"]
    at = " and ".join(f"{n:,}" for n in lengths)
    layers = f"{found['layers']} layers, sharing {found['sharing']}"
    parts = [
        f"{title} with {found['encoding']}, built for {at} tokens "
        f"({layers}, {found['dtype']}, batch {found['batch']})",
        "",
        "weights whose shape changes with the context length",
    ]
    changing = [(item["name"], " -> ".join(map(str, item["shapes"]))) for item in found["changing"]]
    parts.append(columns(_gathered(changing), "  ", 3) if changing else "  none")
    if max(found["copies"]) > 1:
        runs = [
            f"{c:,} copies of {n // c:,} at {n:,}"
            for c, n in zip(found["copies"], lengths, strict=True)
        ]
        parts.append(f"blocks that belong to runs of positions: {', '.join(runs)}")
    parts.append("weights with the context length itself among their dimensions")
    for length, items in zip(lengths, found["containing"], strict=True):
        lines = _gathered((item["name"], str(item["shape"])) for item in items)
        told = [(f"{length:,}:", *line) for line in lines[:LISTED]] or [(f"{length:,}:", "none")]
        more = len(lines) - LISTED
        told += [("", f"and {more} more kinds, listed by --json", "", "")] if more > 0 else []
        parts.append(columns(told, "  ", 4))

    header = [f"{n:,}" for n in lengths]
    names = {"all blocks": f"all {found['layers']} blocks"}
    table: list[Line] = [("parameters", *header, "change")]
    for part in found["parameters"][0]:
        values = [account[part] for account in found["parameters"]]
        cells = (names.get(part, part), *(f"{value:,}" for value in values), _change(values))
        table.append(cells)
    table.append(
        (
            "bytes of one block",
            *(f"{value:,}" for value in found["block_bytes"]),
            _change(found["block_bytes"]),
        )
    )
    parts += ["", columns(table)]

    table = [("what grows", *header, "factor")]
    for key, name in (
        ("kv_cache_bytes", "keys and values in the cache, bytes"),
        ("other_cache_bytes", "positions and the like in the cache, bytes"),
        ("attention_flops", "attention of a forward pass, FLOPs"),
    ):
        values = [grown[key] for grown in found["growth"]]
        factor = f"{values[-1] / values[0]:.2f}"
        table.append((name, *(f"{value:,}" for value in values), factor))
    parts += ["", columns(table)]

    table = [("blocks of its own for every position", *header)]
    table.append(("parameters of all blocks", *(f"{n:,}" for n in found["without_sharing"])))
    table.append(("", *map(_rounded, found["without_sharing"])))
    parts += ["", columns(table)]
    return "\n".join(parts)


def registry_words(title: str, every: Sequence[dict[str, Any]]) -> str:
    """Say in a table what ``audit_model`` found for several encodings."""
    first = every[0]
    at = " and ".join(f"{n:,}" for n in first["lengths"])
    table: list[Line] = [
        (
            "encoding",
            *(f"encoding at {n:,}" for n in first["lengths"]),
            "weights with a position axis",
            f"all blocks at {at}",
            f"total at {first['lengths'][0]:,}",
        )
    ]
    for found in every:
        accounts = found["parameters"]
        names = _gathered((item["name"], "") for item in found["changing"])
        changing = ", ".join(name for name, *_ in names[:2]) or "none"
        changing += f" and {len(names) - 2} more" if len(names) > 2 else ""
        if max(found["copies"]) > 1:
            changing = f"copies of all blocks, {changing}"
        blocks = dict.fromkeys(f"{account['all blocks']:,}" for account in accounts)
        table.append(
            (
                found["encoding"],
                *(f"{account['encoding']:,}" for account in accounts),
                changing,
                " and ".join(blocks),
                f"{accounts[0]['total']:,}",
            )
        )
    kind = f"parameters by encoding, built for {at} tokens, sharing {first['sharing']}"
    return f"{title}: {kind}\n\n{columns(table)}"


def trained_words(found: dict[str, Any]) -> str:
    """Say what ``audit_trained`` found."""
    last = found["position"] + found["tokens"] - 1
    own, longer = found["blocks_sha256"], found["longer_blocks_sha256"]
    same = "the same bytes" if own == longer else "OTHER BYTES"
    lines = [
        f"its blocks, as trained for {found['trained_length']:,} tokens: SHA-256 {own[:16]}...",
        f"put into a model built for {found['length']:,} tokens: "
        + (f"SHA-256 {longer[:16]}..., {same}" if longer else f"they do not fit: {found['fit']}"),
        f"{found['tokens']:,} tokens at positions {found['position']:,} to {last:,} instead of 0 "
        f"to {found['tokens'] - 1:,}; largest change of a number in a final state, by the largest:",
    ]
    if found["blocks_alone"] is not None:
        lines.append(f"  through the blocks alone: {found['blocks_alone']:.2g}")
    value = found["with_encoding"]
    lines.append("  with the encoding: " + (found["error"] if value is None else f"{value:.2g}"))
    return "\n".join(lines)


def gradient_words(found: dict[str, dict[str, Any]]) -> str:
    """Say what ``position_gradients`` found, a line a matrix."""
    length = len(next(iter(found.values()))["norm"])
    edges = np.unique(np.linspace(0, length, 5).round().astype(int))
    spans = [f"{low}-{high - 1}" for low, high in itertools.pairwise(edges)]
    table: list[Line] = [
        (
            "matrix",
            *(f"share {span}" for span in spans),
            "cosine, neighbours",
            "cosine, all pairs",
            "gain",
            "positions",
        )
    ]
    for name, own in found.items():
        shares = [own["share"][a:b].sum() for a, b in itertools.pairwise(edges)]
        # A position that adds nothing has no direction.
        adds = np.diagonal(own["cosine"]) > 0
        pairs = adds[:, None] & adds & ~np.eye(length, dtype=bool)
        near = np.diagonal(own["cosine"], 1)[np.diagonal(pairs, 1)]
        table.append(
            (
                name,
                *(f"{share:.2f}" for share in shares),
                f"{near.mean():.3f}",
                f"{own['cosine'][pairs].mean():.3f}",
                f"{own['gain']:.1f}",
                f"{own['contributions']} of {length}",
            )
        )
    return columns(table) + (
        "\n\nshare: of the matrix's gradient, by the positions that add it\n"
        "cosine: between what two positions add\n"
        "gain: squared norm of the sum over the sum of the parts' squared norms: 1 where positions "
        f"teach unrelated things, {length} where all teach the same\n"
        "positions: the fewest of any sequence that add more than rounding"
    )


def figure_numbers(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Reduce what ``position_gradients`` found to what the figure shows.

    Returns:
        ``norm`` by the kind of matrix, ``[T]`` with mean 1, over its layers; and ``cosine``
        ``[T, T]``, over all matrices.
    """
    kinds: dict[str, list[np.ndarray]] = {}
    for name, own in found.items():
        kinds.setdefault(name.split(".", 2)[2], []).append(own["norm"] / own["norm"].mean())
    return {
        "norm": {kind: np.mean(norms, axis=0).round(4) for kind, norms in kinds.items()},
        "cosine": np.mean([own["cosine"] for own in found.values()], axis=0).round(4),
    }


def draw_gradients(numbers: dict[str, Any], path: Path) -> None:
    """Draw ``figure_numbers``: norms by position, and cosines between positions, as PNG."""
    with setup_style():
        figure = Figure(figsize=(6.0, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, (kind, norm) in enumerate(numbers["norm"].items()):
            left.plot(norm, label=kind, color=PALETTE[number % len(PALETTE)], linewidth=0.9)
        left.set_xlabel("position in the window")
        left.set_ylabel("norm of what it adds (mean 1)")
        left.set_ylim(bottom=0)
        left.legend(fontsize=5.5, frameon=False, loc="lower center", ncols=2)
        cosine = np.asarray(numbers["cosine"])
        apart = np.where(np.eye(len(cosine), dtype=bool), np.nan, cosine)
        limit = float(np.nanmax(np.abs(apart)))
        image = right.imshow(apart, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        right.grid(False)
        right.set_xlabel("position")
        right.set_ylabel("position")
        figure.colorbar(image, ax=right, label="cosine, mean of all matrices")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
    write_file(path, buffer.getvalue())
