"""Token files by memory map, one or several in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from posenc.errors import UserError

# llm.c's files begin with 256 int32, of which the first is this number.
LLMC_MAGIC, LLMC_HEADER = 20240520, 1024
# Each holds a file descriptor, of which a process often has no more than 1024.
OPEN_MAPS = 128


def map_tokens(path: Path) -> np.ndarray:
    """Map the tokens of a file, `.npy` or `.bin`: integers `[n]`.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with open(path, "rb") as file:
                magic = int.from_bytes(file.read(4), "little")
            start = LLMC_HEADER if magic == LLMC_MAGIC else 0
            tokens = np.memmap(path, "<u2", mode="r", offset=start)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} holds no tokens: {error}") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise UserError(
            f"{path} holds {tokens.dtype} of shape {list(tokens.shape)}, and token files hold one "
            "dimension of integers, at least one"
        )
    return tokens


@dataclass(frozen=True)
class Shard:
    """A token file, as it was looked through.

    Attributes:
        path: of the file.
        size: tokens in it.
        highest: the highest id in it.
    """

    path: Path
    size: int
    highest: int


class Shards:
    """The tokens of several files, one after another, as one array that stays in the files.

    A slice is of the same kind, whichever files it spans; `np.asarray` reads it. A file is mapped
    when it is read, and not for good: there may be more than a process may hold open.

    Args:
        shards: the files, in order.
        dtype: of the tokens of all.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype):
        self._shards, self.dtype = tuple(shards), dtype
        self._starts = np.cumsum([0, *(shard.size for shard in shards)], dtype=np.int64)
        self._span = range(int(self._starts[-1]))
        self._mapped = lru_cache(OPEN_MAPS)(self._map)

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, places: slice) -> Shards:
        part = Shards.__new__(Shards)
        vars(part).update(vars(self), _span=self._span[places])
        if part._span.step != 1:
            raise ValueError(f"a slice of token files has step 1, not {part._span.step}")
        return part

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        start, stop = self._span.start, self._span.stop
        pieces = [np.empty(0, self.dtype)]
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._starts[index]), int(self._starts[index + 1])
            pieces.append(self._mapped(index)[start - first : min(stop, end) - first])
            start, index = end, index + 1
        # Within one file nothing is copied that need not be.
        tokens = pieces[1] if len(pieces) == 2 else np.concatenate(pieces)
        return np.array(tokens, dtype, copy=copy)

    def _map(self, index: int) -> np.ndarray:
        shard = self._shards[index]
        tokens = map_tokens(shard.path)
        if len(tokens) != shard.size or tokens.dtype != self.dtype:
            raise UserError(
                f"{shard.path} changed while it was in use: it holds {len(tokens)} {tokens.dtype}, "
                f"and held {shard.size} {self.dtype}; restore it"
            )
        return tokens


TokenArray = np.ndarray | Shards
