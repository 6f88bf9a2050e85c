"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from posenc.data._names import unknown


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer."""

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


TOKENIZERS: dict[str, type[ByteTokenizer]] = {ByteTokenizer.name: ByteTokenizer}


def tokenizer(name: str) -> Tokenizer:
    """Look up a tokenizer by name; an unknown name is a `UserError` with the nearest ones."""
    if name not in TOKENIZERS:
        raise unknown("tokenizer", name, TOKENIZERS)
    return TOKENIZERS[name]()
