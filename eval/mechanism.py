"""How a model attends at a length: mass by distance, entropy by place, scale of the logits.

Let N be layers, H heads, T places of a window. Attention is computed densely beside the model's
own, in memory that grows with the square of T.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eval.protocols import NllByContext, Settings
from posenc.attention import segment_ranks, visibility, watched
from posenc.data import TokenArray
from posenc.encodings import PositionalEncoding
from posenc.encodings.base import Side
from posenc.encodings.sampling import Sampler
from posenc.errors import make_folder
from posenc.files import naming
from posenc.placing import Placer
from posenc.training import split
from posenc.transformer import Transformer

# Beyond this, dense attention of one window does not fit everywhere.
LONGEST = 4096


@dataclasses.dataclass(frozen=True)
class ReadOut:
    """Means over windows.

    Attributes:
        edges: of the buckets, ``[0, 1), [1, 2), [2, 4), ...``: tokens between query and key, or
            places before the query.
        mass: ``[N, H, buckets]``, the part of the last k queries' weights that goes to keys so far
            back. The parts sum to 1 where weights do.
        entropy: ``[N, H, buckets]``, nats, of the weights of queries at these places; NaN in a
            bucket without any.
        scale: ``[N, H]``, standard deviation over visible keys of the last k queries' logits.
    """

    edges: np.ndarray
    mass: np.ndarray
    entropy: np.ndarray
    scale: np.ndarray


def edges_of(length: int) -> np.ndarray:
    """Give the borders of the buckets of numbers below ``length``."""
    powers = 2 ** np.arange(int(np.ceil(np.log2(max(length, 2)))) + 1)
    return np.concatenate([[0], powers[powers < length], [length]])


def _moments(
    encoding: PositionalEncoding, queries: Side, keys: Side, carry: Any, targets: int
) -> dict[str, Array]:
    """Give one layer's read-out of one window, by bucket: sums and counts."""
    ranks = segment_ranks(keys.segments) if encoding.sinks else None
    visible = visibility(
        queries, keys, causal=True, reach=encoding.reach, sinks=encoding.sinks, ranks=ranks
    )
    scores = encoding.scores(queries, keys, visible)
    logits, _ = encoding.logits(scores, scores, queries, keys, visible, carry)
    weights = encoding.weights(logits, visible)[0].astype(jnp.float32)  # [H, T, T]
    seen = jnp.broadcast_to(visible, (1, 1, *weights.shape[1:]))[0, 0]
    length = weights.shape[-1]
    bucket = jnp.asarray(np.searchsorted(edges_of(length), np.arange(length), side="right") - 1)
    count = len(edges_of(length)) - 1
    apart = queries.slots[0][:, None] - keys.slots[0][None]
    far = bucket[jnp.clip(apart, 0, length - 1)]
    last = slice(length - targets, None)
    mass = jnp.stack(
        [jnp.sum(weights[:, last], (1, 2), where=(far[last] == n)) for n in range(count)], axis=-1
    )
    entropy = -jnp.sum(jax.scipy.special.xlogy(weights, weights), axis=-1)
    at = jax.nn.one_hot(bucket, count)
    kept = logits[0].astype(jnp.float32)[:, last]
    return {
        "mass": mass / targets,
        "entropy": entropy @ at / jnp.sum(at, axis=0),
        "scale": jnp.mean(jnp.std(kept, axis=-1, where=seen[last]), axis=-1),
    }


def read_out(
    model: Transformer,
    windows: Int[np.ndarray, "n T"],
    targets: int,
    sampler: Sampler | None = None,
    seed: int = 0,
) -> ReadOut:
    """Read out how a model attends in windows of one length.

    Args:
        model: to be looked at.
        windows: token ids.
        targets: k, the last queries of each that mass and scale are of.
        sampler: of positions; one after another unless told otherwise.
        seed: of its draws.

    Raises:
        PositionOutOfRange: the encoding has nothing for a position of these windows.
    """
    merge, parameters = split(model)
    placer = Placer(model.encoding, sampler)
    model_length = windows.shape[1]

    @jax.jit
    def look(
        parameters: Any, tokens: Array, positions: Array, streams: Any
    ) -> list[dict[str, Float[Array, ...]]]:
        layers: list[dict[str, Array]] = []

        def watch(encoding: PositionalEncoding, queries: Side, keys: Side, carry: Any) -> None:
            layers.append(_moments(encoding, queries, keys, carry, targets))

        with watched(watch):
            merge(parameters).hidden(tokens, positions, None, streams)
        return layers

    found = []
    for number, window in enumerate(np.asarray(windows, np.int32)):
        one = window[None]
        positions, streams = placer.place(one, np.ones_like(one), [number], (seed,), training=False)
        model.check_positions(positions, streams)
        layers = look(parameters, one, positions, streams)
        found.append({name: np.stack([layer[name] for layer in layers]) for name in layers[0]})
    means = {name: np.mean([one[name] for one in found], axis=0) for name in found[0]}
    return ReadOut(edges_of(model_length), **means)


def some_windows(
    documents: list[TokenArray], bos: int, length: int, settings: Settings, count: int
) -> np.ndarray:
    """Give windows of the primary protocol, evenly among all of them: token ids ``[count, T]``."""
    sizes = [len(document) for document in documents]
    every = NllByContext().plan(sizes, length, settings, False)
    chosen = np.unique(np.linspace(0, len(every) - 1, min(count, len(every))).round().astype(int))
    return np.stack([every[n].tokens(documents, bos) for n in chosen])


def write_read_outs(
    folder: Path, name: str, read_outs: dict[int, ReadOut], learned: dict[str, list[list[float]]]
) -> Path:
    """Write the read-outs of a run's lengths beside its rows, ``mechanism/NAME.npz``.

    Args:
        folder: of the report.
        name: of the run and seed.
        read_outs: by length.
        learned: of every parameter of the encoding, steps and values.
    """
    arrays: dict[str, Any] = {
        f"{field}_{length}": getattr(one, field)
        for length, one in read_outs.items()
        for field in ("edges", "mass", "entropy", "scale")
    }
    arrays |= {f"learned_{name}": np.array(pairs) for name, pairs in learned.items()}
    path = folder / "mechanism" / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, arrays)
    return path


def kept_read_out(
    read: Callable[[], ReadOut],
    windows: Int[np.ndarray, "n T"],
    targets: int,
    store: Path,
    identity: dict[str, Any],
) -> ReadOut:
    """Give a read-out that is kept; it is read if it is not there, or damaged.

    Args:
        read: reads it out.
        windows: that it is of.
        targets: k of it.
        store: folder of all scores.
        identity: what else it depends on (weights, code), JSON-ready.
    """
    text = json.dumps([identity, targets, list(windows.shape)], sort_keys=True).encode()
    key = hashlib.sha256(text + np.asarray(windows, np.int64).tobytes()).hexdigest()[:24]
    path = store / f"read-out-{key}.npz"
    fields = [field.name for field in dataclasses.fields(ReadOut)]
    try:
        with np.load(path) as kept:
            return ReadOut(**{name: kept[name] for name in fields})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        found = read()
    make_folder(store)
    _write(path, {name: getattr(found, name) for name in fields})
    return found


def _write(path: Path, arrays: dict[str, Any]) -> None:
    """Write a file of arrays so that a reader finds all of it, or none."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part.npz")
    try:
        with naming(path):
            np.savez_compressed(part, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def learned_over_training(folder: Path, seed: int | None = None) -> dict[str, list[list[float]]]:
    """Give steps and values of what a run's encoding learned, from its metrics, by name.

    Args:
        folder: of the run.
        seed: which, of a run that trained several at once.
    """
    found: dict[str, list[list[float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if seed is not None and row.get("seed") != seed:
            continue
        for name, value in row.items():
            if name.startswith("encoding."):
                found.setdefault(name.removeprefix("encoding."), []).append([row["step"], value])
    return found
