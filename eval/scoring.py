"""Runs a plan of windows through a model: windows in, negative log-likelihood per token out."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from eval.protocols import Scores, Window
from posenc.data import TokenArray
from posenc.devices import batch_sharding, mesh_of
from posenc.encodings.registry import Part
from posenc.encodings.sampling import Sampler
from posenc.errors import UserError, make_folder
from posenc.files import Appended, naming
from posenc.placing import Placer
from posenc.training import split, token_nll
from posenc.transformer import Transformer

# Places of a batch: enough to keep a device busy, few enough for its memory.
BATCH_TOKENS = 8192


def extended_model(model: Transformer, policy: Part, length: int) -> Transformer:
    """Give a copy of a model whose encoding represents ``length`` positions by a policy.

    Raises:
        EncodingError: the encoding has no such policy.
    """
    copy = nnx.clone(model)
    copy.encoding.extend(policy, length)
    return copy


class Scorer:
    """Scores windows of one length with one model, on all devices; compiled once.

    Args:
        model: to be scored.
        length: places of a window; shorter windows are padded.
        batch_tokens: places of a batch, about.
        sampler: what gives positions; one after another unless told otherwise.
        seed: of the sampler's draws, each a function of a window's tokens.
        positions: of a window's places, instead.
    """

    def __init__(
        self,
        model: Transformer,
        length: int,
        batch_tokens: int = BATCH_TOKENS,
        sampler: Sampler | None = None,
        seed: int = 0,
        positions: np.ndarray | None = None,
    ):
        merge, parameters = split(model)
        # Every device has the whole model and some of a batch's windows.
        mesh = mesh_of()
        self._by_row = batch_sharding(mesh, several=False)
        everywhere = NamedSharding(mesh, PartitionSpec())
        self._parameters = jax.device_put(parameters, everywhere)
        self.length = length
        devices = jax.device_count()
        self.rows = devices * max(1, batch_tokens // length // devices)
        self._placer, self._seed = Placer(model.encoding, sampler), seed
        self._positions = positions
        ends = self._placer.sampler.extent(length, training=False)
        model.check_positions(np.arange(ends) if positions is None else positions)

        @jax.jit
        def nll(parameters, tokens, positions, segments, streams):
            model = merge(parameters)
            hidden, _ = model.hidden(tokens, positions, segments, streams)
            return token_nll(model, hidden[:, :-1], tokens[:, 1:])

        self.nll: Callable[..., jax.Array] = nll

    def score(self, windows: list[np.ndarray]) -> list[np.ndarray]:
        """Give, for each of at most ``rows`` windows, the NLL of all its tokens but the first."""
        tokens = np.zeros((self.rows, self.length), np.int32)
        segments = np.zeros((self.rows, self.length), np.int32)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = window
            segments[row, : len(window)] = 1
        rows = [zlib.crc32(row.tobytes()) for row in tokens]
        positions, streams = self._placer.place(
            tokens, segments, rows, (self._seed,), training=False
        )
        if self._positions is not None:
            positions = np.where(segments != 0, self._positions, 0).astype(positions.dtype)
        places = jax.device_put((tokens, positions, segments, streams), self._by_row)
        nll = np.asarray(self.nll(self._parameters, *places))
        return [nll[row, : len(window) - 1] for row, window in enumerate(windows)]


class KeptScores:
    """Where the scores of a plan are kept: a file to stream into, and the ``.npz`` it becomes.

    Args:
        windows: of one length, each once.
        store: folder of all scores.
        identity: what else the scores depend on (weights, data, code), JSON-ready.
    """

    def __init__(self, windows: list[Window], store: Path, identity: dict[str, Any]):
        self.windows = windows
        self.table = np.array(windows, np.int64).reshape(-1, len(Window._fields))
        self.ends = np.cumsum([window.length - window.first for window in windows], dtype=np.int64)
        plan = hashlib.sha256(self.table.tobytes()).hexdigest()
        self.identity = json.dumps([identity, plan], sort_keys=True)
        key = hashlib.sha256(self.identity.encode()).hexdigest()[:24]
        self.store = store
        self.whole, self.partial = store / f"{key}.npz", store / f"{key}.f32"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from scoring the same.

        Raises:
            UserError: another one already does.
        """
        make_folder(self.store)
        with open(self.whole.with_name(f".{self.whole.stem}.lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"another process scores the same into {self.store}: wait for it, or choose "
                    "another --report"
                ) from None
            yield

    def read(self) -> np.ndarray | None:
        """Give all scores; None where they are not all there, or the file is damaged."""
        try:
            with np.load(self.whole) as kept:
                nll = kept["nll"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None
        return nll if nll.shape == (int(self.ends[-1]) if len(self.ends) else 0,) else None

    def complete(self) -> np.ndarray:
        """Make the ``.npz`` of the streamed scores, by document, window and token."""
        nll = np.fromfile(self.partial, np.float32)
        part = self.whole.with_name(f".{self.whole.stem}.part.npz")
        columns = {field: self.table[:, i] for i, field in enumerate(Window._fields)}
        arrays: dict[str, Any] = {"nll": nll, "identity": np.array(self.identity), **columns}
        try:
            with naming(self.whole):
                np.savez_compressed(part, **arrays)
            part.replace(self.whole)
        finally:
            part.unlink(missing_ok=True)
        self.partial.unlink()
        return nll


def score_plan(
    make_scorer: Callable[[], Scorer],
    windows: list[Window],
    documents: list[TokenArray],
    bos: int,
    store: Path,
    identity: dict[str, Any],
    progress: Callable[[int, bool], None] = lambda places, kept: None,
) -> Scores:
    """Score windows and keep the scores; what is kept already is not run again.

    The scores stream into a file, from whose last whole window an interrupted evaluation goes on.

    Args:
        make_scorer: makes the scorer, if anything is left to be scored.
        windows: of one length, each once.
        documents: token ids of every document, without BOS.
        bos: the BOS token's id.
        store: folder of the scores.
        identity: what else the scores depend on (weights, data, code), JSON-ready.
        progress: is told the places that a finished batch had, and whether they were kept already.
    """
    kept = KeptScores(windows, store, identity)
    with kept.locked():
        nll = kept.read()
        if nll is None:
            _score_rest(kept, make_scorer, documents, bos, progress)
            nll = kept.complete()
        else:
            progress(int(kept.table[:, 2].sum()), True)
    return Scores(windows, nll)


def _score_rest(
    kept: KeptScores,
    make_scorer: Callable[[], Scorer],
    documents: list[TokenArray],
    bos: int,
    progress: Callable[[int, bool], None],
) -> None:
    kept.partial.touch()
    have = int(np.searchsorted(kept.ends, kept.partial.stat().st_size // 4, side="right"))
    progress(int(kept.table[:have, 2].sum()), True)
    scorer = make_scorer() if have < len(kept.windows) else None
    with Appended(kept.partial, int(kept.ends[have - 1]) * 4 if have else 0) as file:
        while scorer is not None and have < len(kept.windows):
            some = kept.windows[have : have + scorer.rows]
            nll = scorer.score([window.tokens(documents, bos) for window in some])
            rows = zip(some, nll, strict=True)
            scores = np.concatenate([row[window.first - 1 :] for window, row in rows])
            file.append(scores.astype(np.float32).tobytes())
            have += len(some)
            progress(sum(window.length for window in some), False)
