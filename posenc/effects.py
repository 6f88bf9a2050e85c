"""What an encoding does, as numbers over distance and as a figure.

Let H denote the heads, D the head width, L the training length and F the channel pairs.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from posenc.attention import visibility
from posenc.encodings.base import PositionalEncoding, Side
from posenc.errors import make_folder
from posenc.placing import token_streams
from posenc.transformer import Transformer, TransformerConfig

# Rows that the similarity of embeddings is shown for, and queries that a bias is shown for.
PLACES = 5

# Rows of logits that are made at a time.
ROWS = 128


def _sides(encoding: PositionalEncoding, dims: Any, positions: np.ndarray, seed: int) -> Any:
    """Give queries and keys of random content, as attention makes them of one sequence."""
    length = len(positions)
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((1, length, dims.width)), jnp.float32)
    q, k = (
        jnp.asarray(random.standard_normal((1, length, dims.heads, dims.head_width)), jnp.float32)
        for _ in range(2)
    )
    places = jnp.asarray(positions)[None]
    ones = jnp.ones((1, length), jnp.int32)
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    features, _ = encoding.features(x, places, ones, encoding.start_state(1))
    shared: tuple[Any, ...] = (places, {}, slots, ones, features, encoding.prepare(places, {}))
    queries, keys = Side(q, None, *shared), Side(k, None, *shared)
    return (
        dataclasses.replace(queries, rotated=encoding.rotate_queries(queries)),
        dataclasses.replace(keys, rotated=encoding.rotate_keys(keys)),
    )


def bias_by_distance(encoding: PositionalEncoding, dims: Any, length: int) -> np.ndarray:
    """Give what the last of ``length`` queries has added to its logits, ``[H, length]``.

    Where the bias depends on content, that of random content.
    """
    queries, keys = _sides(encoding, dims, np.arange(length, dtype=np.int32), seed=0)
    carry = encoding.start_carry(1, length)
    # What earlier rows hand on has to be made; else the last row is enough.
    first = 0 if jax.tree.leaves(carry) else length - 1
    for low in range(first, length, ROWS):
        rows = jax.tree.map(lambda leaf, low=low: leaf[:, low : low + ROWS], queries)
        visible = visibility(rows, keys, causal=True)
        scores = encoding.scores(rows, keys, visible)
        logits, carry = encoding.logits(scores, scores, rows, keys, visible, carry)
    return np.asarray(logits - scores)[0, :, -1, ::-1]


def score_by_distance(
    encoding: PositionalEncoding, dims: Any, length: int, contents: int = 16
) -> np.ndarray:
    """Give the score of a query with a key of the same content, ``[contents, length]``.

    By distance. Each content is a random direction, the same for all tokens; a score is divided by
    that at distance 0.
    """
    found = []
    for seed in range(contents):
        queries, keys = _sides(encoding, dims, np.arange(length, dtype=np.int32), seed)
        same = jnp.broadcast_to(queries.x[:, :1], queries.x.shape)
        queries = dataclasses.replace(queries, x=same)
        keys = dataclasses.replace(keys, x=same)
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        last = jax.tree.map(lambda leaf: leaf[:, -1:], queries)
        scores = encoding.scores(last, keys, visibility(last, keys, causal=True))
        row = np.asarray(scores)[0, 0, 0, ::-1]
        found.append(row / (row[0] if row[0] else 1.0))
    return np.stack(found)


def embedding_similarity(model: Transformer, length: int) -> np.ndarray:
    """Give the cosine of what is added to the embeddings at two positions, ``[length, length]``.

    Of a run of digits, for encodings that read tokens: as many as they can represent.
    """
    tokens = np.full((1, length), 48, np.int32)
    zeros = jnp.zeros((1, length, model.config.width))
    streams = {name: jnp.asarray(s) for name, s in token_streams(model, tokens).items()}
    positions = jnp.arange(length)[None]
    added = np.asarray(model.encoding.embed(zeros, positions, streams))[0]
    known = model.encoding.representable(positions, streams)
    if known is not None:
        added = added[np.asarray(known)[0]]
    norms = np.linalg.norm(added, axis=-1, keepdims=True)
    unit = added / np.where(norms == 0, 1, norms)
    return unit @ unit.T


def wavelengths(encoding: PositionalEncoding) -> np.ndarray | None:
    """Give the positions that every channel pair takes to turn once, infinite where it does not."""
    frequencies = getattr(encoding, "frequencies", None)
    if frequencies is None:
        return None
    turning = np.asarray(frequencies()[0], np.float64)
    return np.divide(2 * math.pi, turning, where=turning > 0, out=np.full(turning.shape, np.inf))


def effects(spec: str, shape: TransformerConfig, length: int) -> list[dict[str, Any]]:
    """Give what there is to be drawn of the first layer's encoding, a panel each."""
    # One block is enough, and a small vocabulary: nothing of either is looked at.
    config = dataclasses.replace(shape, layers=1, vocab_size=64)
    model = Transformer(config, spec, length)
    encoding, dims = model.encoding.at(0), model.encoding.dims
    limit = model.encoding.max_position
    far = 2 * length if limit is None else min(limit, 2 * length)
    panels: list[dict[str, Any]] = []
    parts = list(model.encoding.parts)
    if any(part.replaces("embed") for part in parts):
        near = min(length, far)
        panels.append({"kind": "similarity", "values": embedding_similarity(model, near)})
    for part in parts:
        found = wavelengths(part)
        if found is not None:
            panels.append({"kind": "spectrum", "values": found, "name": part.name})
    if any(part.replaces(hook) for part in parts for hook in ("rotate_queries", "scores")):
        panels.append({"kind": "score", "values": score_by_distance(encoding, dims, far)})
    if any(part.replaces("logits") for part in parts):
        panels.append({"kind": "bias", "values": bias_by_distance(encoding, dims, far)})
    return panels


_TITLES = {
    "similarity": "similarity of what is added to the embeddings",
    "spectrum": "wavelength of each channel pair",
    "score": "score of equal content, relative to distance 0",
    "bias": "what is added to the logits, by head",
}


def draw_effects(spec: str, panels: list[dict[str, Any]], length: int, path: Path) -> None:
    """Draw the panels side by side into a PNG file; the training length is a dotted line."""
    figure = Figure(figsize=(3.6 * len(panels), 2.9), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    for panel, axes in zip(panels, np.atleast_1d(figure.subplots(1, len(panels))), strict=True):
        values = panel["values"]
        axes.set_title(_TITLES[panel["kind"]], fontsize=8)
        axes.tick_params(labelsize=7)
        if panel["kind"] == "similarity":
            image = axes.imshow(values, vmin=-1, vmax=1, cmap="RdBu_r", origin="lower")
            axes.set_xlabel("position", fontsize=8)
            axes.set_ylabel("position", fontsize=8)
            figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
        elif panel["kind"] == "spectrum":
            pairs = np.arange(len(values))
            turning = np.isfinite(values)
            beyond = turning & (values > length)
            axes.semilogy(pairs[turning], values[turning], ".", color="#0072B2", ms=4)
            axes.semilogy(pairs[beyond], values[beyond], ".", color="#D55E00", ms=4)
            axes.axhline(length, color="0.4", ls=":", lw=1)
            still = np.count_nonzero(~turning)
            words = f"{np.count_nonzero(beyond)} of {len(values)} do not turn once in training"
            axes.set_xlabel(words + (f",\n{still} do not turn at all" if still else ""), fontsize=8)
            axes.set_ylabel("positions a turn", fontsize=8)
        else:
            distance = np.arange(values.shape[-1])
            if panel["kind"] == "bias":
                for head, row in enumerate(values):
                    shade = head / max(len(values) - 1, 1)
                    axes.plot(distance, row, lw=1, color=(0.85 * shade, 0.35, 0.7 - 0.6 * shade))
                axes.annotate(
                    f"head 1 (blue) to {len(values)} (red)",
                    (0.98, 0.96),
                    xycoords="axes fraction",
                    ha="right",
                    va="top",
                    fontsize=6.5,
                )
            else:
                low, mid, high = np.quantile(values, (0.1, 0.5, 0.9), axis=0)
                axes.fill_between(distance, low, high, color="#0072B2", alpha=0.2, lw=0)
                axes.plot(distance, mid, lw=1, color="#0072B2")
            axes.axvline(length, color="0.4", ls=":", lw=1)
            axes.set_xlabel("distance in tokens", fontsize=8)
    figure.suptitle(spec, fontsize=9)
    make_folder(path.parent)
    figure.savefig(path)
