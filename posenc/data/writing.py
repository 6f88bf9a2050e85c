"""Documents to token files, going on where a kill came."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posenc.checkpoints import write_json
from posenc.data.hub import Piece, State
from posenc.data.tokens import Tokenizer
from posenc.errors import UserError, make_folder
from posenc.files import naming

SPLITS = ("train", "valid", "test")
RECORD = "tokens.json"
CHECKPOINT_TOKENS = 2**22  # between records of how far it came


def _header(dtype: np.dtype, count: int) -> bytes:
    # NumPy leaves room for the count to grow: the header's size does not depend on it.
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
    )
    return file.getvalue()


class _TokenWriter:
    """A `.npy` file that grows; it has its name once it is whole."""

    def __init__(self, path: Path, dtype: np.dtype, count: int):
        self.path, self.dtype, self.count = path, dtype, count
        self._part = path.with_name(path.name + ".part")
        if path.exists() and not self._part.exists():  # killed while files got their names
            os.replace(path, self._part)
        size = len(_header(dtype, 0)) + count * dtype.itemsize
        if count and (not self._part.exists() or self._part.stat().st_size < size):
            raise UserError(
                f"{self._part} has lost tokens that {RECORD} beside it counts: remove the "
                "folder to begin again"
            )
        self._file = open(self._part, "r+b" if self._part.exists() else "w+b")  # noqa: SIM115
        # What was written after the last record is written again.
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def append(self, ids: np.ndarray) -> None:
        with naming(self.path):
            self._file.write(ids.astype(self.dtype).tobytes())
        self.count += len(ids)

    def sync(self) -> None:
        with naming(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> None:
        with naming(self.path):
            self._file.seek(0)
            self._file.write(_header(self.dtype, self.count))
        self.sync()
        self._file.close()
        os.replace(self._part, self.path)

    def close(self) -> None:
        # What cannot be written any more is behind the last record, and written again.
        with contextlib.suppress(OSError):
            self._file.close()


@dataclasses.dataclass(frozen=True)
class Written:
    """What a folder of token files holds, by split: token counts, and which files there are."""

    tokens: dict[str, int]
    files: tuple[Path, ...]


def write_tokens(
    documents: Callable[[State | None], Iterator[Piece]],
    source: dict[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
    limit: int | None = None,
) -> Written:
    """Write a `.npy` file for each split, every document after the tokenizer's BOS.

    Killed, it goes on at the next call from the last record, in tokens.json, to the same files.

    Args:
        documents: gives them from a state on, training last or all splits mixed.
        source: what they are, ready for JSON: another one is not mixed into the same folder.
        tokenizer: makes the tokens: uint16, or uint32 where its vocabulary is larger.
        folder: for the files.
        limit: training tokens, after which no more documents are read; about.

    Raises:
        UserError: the folder holds something else, another process writes there, or a split that
            the source should have stays empty.
    """
    sha256 = getattr(tokenizer, "sha256", None)
    made_of = {
        "source": source,
        "tokenizer": {"name": tokenizer.name, "sha256": sha256, "bos": tokenizer.bos},
        "limit": limit,
    }
    made_of = json.loads(json.dumps(made_of))
    make_folder(folder)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process writes tokens to {folder}: wait for it") from None
        record = _read_record(folder, made_of)
        if not record["done"]:
            record = _write(documents, made_of, record, tokenizer, folder)
    counts = record["tokens"]
    files = tuple(folder / f"{name}.npy" for name in SPLITS if counts[name])
    for file in files:
        if not file.is_file():
            raise UserError(
                f"{file} is gone, which {RECORD} beside it counts: choose another --out"
            )
    return Written(counts, files)


def _read_record(folder: Path, made_of: dict[str, Any]) -> dict[str, Any]:
    path = folder / RECORD
    if path.exists():
        try:
            record = json.loads(path.read_text())
            differing = [key for key in made_of if record[key] != made_of[key]]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} cannot be read: choose another --out") from None
        if differing:
            said = "; ".join(
                f"{key} ({record[key]} there, {made_of[key]} now)" for key in differing
            )
            raise UserError(f"{folder} holds other tokens: {said}; choose another --out")
        return record
    there = sorted(p.name for p in folder.iterdir() if p.name.startswith(SPLITS))
    if there:
        raise UserError(f"{folder} holds {there[0]} and no {RECORD}: choose another --out")
    return {**made_of, "done": False, "tokens": dict.fromkeys(SPLITS, 0), "state": None}


def _write(
    documents: Callable[[State | None], Iterator[Piece]],
    made_of: dict[str, Any],
    record: dict[str, Any],
    tokenizer: Tokenizer,
    folder: Path,
) -> dict[str, Any]:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    # The record is there before the files are, which a folder without one is refused for.
    write_json(folder / RECORD, record)
    writers = {
        name: _TokenWriter(folder / f"{name}.npy", dtype, record["tokens"][name]) for name in SPLITS
    }
    counts = dict(record["tokens"])
    limit, recorded = made_of["limit"], sum(counts.values())
    try:
        for piece in documents(record["state"]):
            if limit is not None and counts["train"] >= limit:
                break
            ids = np.concatenate([[tokenizer.bos], tokenizer.encode(piece.text)])
            writers[piece.split].append(ids)
            counts[piece.split] += len(ids)
            if piece.state is not None and sum(counts.values()) - recorded >= CHECKPOINT_TOKENS:
                # Files first: a record never counts tokens that are not there.
                for writer in writers.values():
                    writer.sync()
                record = {**record, "tokens": dict(counts), "state": piece.state()}
                write_json(folder / RECORD, record)
                recorded = sum(counts.values())
        empty = [name for name in ("train", "valid") if not counts[name]]
        if empty:
            raise UserError(
                f"no document of {made_of['source']} is in {' or '.join(empty)}: give more, or "
                "--splits hash where there is only a training split"
            )
        for name, writer in writers.items():
            if counts[name]:
                writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    for name in SPLITS:
        if not counts[name]:
            (folder / f"{name}.npy.part").unlink(missing_ok=True)
    record = {**record, "done": True, "tokens": counts, "state": None}
    write_json(folder / RECORD, record)
    return record
