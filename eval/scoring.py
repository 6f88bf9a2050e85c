"""Runs a plan of windows through a model: windows in, negative log-likelihood per token out."""

from __future__ import annotations

import fcntl
import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eval.protocols import Scores, Window
from posenc.checkpoints import abstract
from posenc.encodings.registry import Part
from posenc.errors import UserError
from posenc.runs import Run
from posenc.training import split, token_nll
from posenc.transformer import Transformer

# Places of a batch: enough to keep a device busy, few enough for its memory.
BATCH_TOKENS = 8192


def load_model(run: Run, step: int, *, allow_plugins: bool = False) -> Transformer:
    """Read a run's model at a checkpoint, verified.

    Raises:
        UserError: the checkpoint is missing or damaged.
        SpecError: the run names a plug-in, and plug-ins are not allowed.
    """
    config = run.config
    model = nnx.eval_shape(
        lambda: Transformer(
            config.model, config.encoding, config.train_length, allow_plugins=allow_plugins
        )
    )
    merge, shapes = split(model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    read = run.checkpoints.restore(step, {"parameters": abstract(shapes, device)})
    return merge(read["parameters"])


def extended_model(model: Transformer, policy: Part, length: int) -> Transformer:
    """Give a copy of a model whose encoding represents ``length`` positions by a policy.

    Raises:
        EncodingError: the encoding has no such policy.
    """
    copy = nnx.clone(model)
    copy.encoding.extend(policy, length)
    return copy


class Scorer:
    """Scores windows of one length with one model; compiled once.

    Args:
        model: to be scored.
        length: places of a window; shorter windows are padded.
        batch_tokens: places of a batch, about.
    """

    def __init__(self, model: Transformer, length: int, batch_tokens: int = BATCH_TOKENS):
        merge, self._parameters = split(model)
        self.length = length
        self.rows = max(1, batch_tokens // length)
        model.encoding.check_positions(np.arange(length))

        @jax.jit
        def nll(parameters, tokens, positions, segments):
            model = merge(parameters)
            hidden, _ = model.hidden(tokens, positions, segments)
            return token_nll(model, hidden[:, :-1], tokens[:, 1:])

        self.nll: Callable[..., jax.Array] = nll

    def score(self, windows: list[np.ndarray]) -> list[np.ndarray]:
        """Give, for each of at most ``rows`` windows, the NLL of all its tokens but the first."""
        tokens = np.zeros((self.rows, self.length), np.int32)
        segments = np.zeros((self.rows, self.length), np.int32)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = window
            segments[row, : len(window)] = 1
        positions = np.broadcast_to(np.arange(self.length, dtype=np.int32), tokens.shape)
        positions = np.where(segments == 0, 0, positions)
        nll = np.asarray(
            self.nll(self._parameters, *map(jnp.asarray, (tokens, positions, segments)))
        )
        return [nll[row, : len(window) - 1] for row, window in enumerate(windows)]


def score_plan(
    make_scorer: Callable[[], Scorer],
    windows: list[Window],
    documents: list[np.ndarray],
    bos: int,
    store: Path,
    identity: dict[str, Any],
    progress: Callable[[int], None] = lambda places: None,
) -> Scores:
    """Score windows, each once, and keep the scores; what is kept already is not run again.

    The scores stream into a file, from whose last complete window an interrupted evaluation goes
    on; when all are there, they become one ``.npz`` by (document, window, token).

    Args:
        make_scorer: makes the scorer, if anything is left to be scored.
        windows: of one length.
        documents: token ids of every document, without BOS.
        bos: the BOS token's id.
        store: folder of the scores.
        identity: what else the scores depend on (the weights, the data), JSON-ready.
        progress: is told the places that a finished batch had.
    """
    windows = list(dict.fromkeys(windows))
    table = np.array(windows, np.int64).reshape(-1, len(Window._fields))
    text = json.dumps([identity, hashlib.sha256(table.tobytes()).hexdigest()], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    whole, partial = store / f"{key}.npz", store / f"{key}.f32"
    counts = np.array([window.length - window.first for window in windows], np.int64)
    ends = np.cumsum(counts)
    store.mkdir(parents=True, exist_ok=True)
    with open(store / f".{key}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{store} is being written by another process that scores the same: wait for it"
            ) from None
        nll = _kept(whole, int(counts.sum()))
        if nll is not None:
            progress(int(table[:, 2].sum()))
            return Scores(windows, nll)
        return _score_rest(
            make_scorer, windows, table, ends, documents, bos, whole, partial, text, progress
        )


def _kept(path: Path, size: int) -> np.ndarray | None:
    """Read kept scores; None where there are none, or the file is damaged."""
    try:
        with np.load(path) as kept:
            nll = kept["nll"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return nll if nll.shape == (size,) else None


def _score_rest(
    make_scorer: Callable[[], Scorer],
    windows: list[Window],
    table: np.ndarray,
    ends: np.ndarray,
    documents: list[np.ndarray],
    bos: int,
    whole: Path,
    partial: Path,
    identity: str,
    progress: Callable[[int], None],
) -> Scores:
    """Score the windows behind the last one that the partial file holds whole."""
    partial.touch()
    have = int(np.searchsorted(ends, partial.stat().st_size // 4, side="right"))
    progress(int(table[:have, 2].sum()))
    scorer = make_scorer() if have < len(windows) else None
    with open(partial, "r+b") as file:
        file.truncate(int(ends[have - 1]) * 4 if have else 0)
        file.seek(0, 2)
        while scorer is not None and have < len(windows):
            some = windows[have : have + scorer.rows]
            nll = scorer.score([w.tokens(documents[w.document], bos) for w in some])
            for window, row in zip(some, nll, strict=True):
                file.write(row[window.first - 1 :].astype(np.float32).tobytes())
            file.flush()
            have += len(some)
            progress(sum(window.length for window in some))
    every = np.fromfile(partial, np.float32)
    part = whole.with_name(f".{whole.stem}.part.npz")
    columns = {field: table[:, i] for i, field in enumerate(Window._fields)}
    np.savez_compressed(part, nll=every, identity=np.array(identity), **columns)  # type: ignore[arg-type]
    part.replace(whole)
    partial.unlink()
    return Scores(windows, every)
