"""Text to token ids and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from posenc.data._names import unknown
from posenc.data.corpora import replace_file
from posenc.data.vocabularies import KINDS
from posenc.errors import UserError, make_folder


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer.

    One that is read from files has `sha256` and `files` as well; see `vocabularies`.
    """

    name: str
    vocab_size: int
    bos: int

    def encode(self, text: bytes) -> np.ndarray:
        """Give the ids of `text`, without specials."""

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Give the text of `ids`, without specials."""

    def count_bytes(self, ids: Iterable[int] | np.ndarray) -> int:
        """Count the bytes of text that `ids` stand for."""


class ByteTokenizer:
    """One token a byte, and one special: the beginning of a document."""

    name = "bytes"
    vocab_size = 257
    bos = 256

    def encode(self, text: bytes) -> np.ndarray:
        """Give the ids of `text`: uint16 `[len(text)]`, without specials."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Give the text of `ids` (integers, any shape); specials are skipped, bad UTF-8 is "�"."""
        return self._bytes(ids).tobytes().decode("utf-8", errors="replace")

    def count_bytes(self, ids: Iterable[int] | np.ndarray) -> int:
        """Count the bytes of text behind `ids` (one a token, none for specials).

        Bits per byte are total nats / ln 2 / this.
        """
        return int(self._bytes(ids).size)

    def _bytes(self, ids: Iterable[int] | np.ndarray) -> np.ndarray:
        flat = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).ravel()
        return flat[(flat >= 0) & (flat < 256)].astype(np.uint8)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {ByteTokenizer.name: ByteTokenizer}


def tokenizer(name: str, beside: Path | None = None) -> Tokenizer:
    """Give a tokenizer by name, or from its file.

    Args:
        name: of a registered one; or the path of a `tokenizer.json` of Hugging Face's `tokenizers`
            or of a `.tiktoken` vocabulary.
        beside: a folder with a copy of the file, which is read where `name` leads to no file.

    Raises:
        UserError: there is no such tokenizer, or its file cannot be used.
    """
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    path = Path(os.path.expanduser(name))
    read = KINDS.get(path.suffix)
    if read is None:
        way_out = f"; or give a file that ends in {' or '.join(KINDS)}"
        raise unknown("tokenizer", name, TOKENIZERS, way_out)
    if not path.is_file() and beside is not None and (beside / path.name).is_file():
        path = beside / path.name
    if not path.is_file():
        raise UserError(f"the tokenizer {name!r} is not there: give the path of its file")
    return read(path)


def keep_tokenizer(used: Tokenizer, folder: Path) -> None:
    """Copy the files that a tokenizer was read from into a folder, so that it goes with a run."""
    for path in getattr(used, "files", ()):
        make_folder(folder)
        replace_file(folder / path.name, path.read_bytes())
