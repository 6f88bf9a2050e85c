"""Tokens that were made elsewhere, read by memory map: NumPy's `.npy` and nanoGPT's `.bin`."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from posenc.data.corpora import match_files
from posenc.data.shards import Shard, Shards, TokenArray, map_tokens
from posenc.errors import UserError

SUFFIXES = (".npy", ".bin")
FILES_VERSION = "tokens-1"  # how files become documents; part of the data's identity
CHUNK = 2**22  # tokens that are in memory while a file is looked through


@dataclass(frozen=True)
class TokenPart:
    """The tokens of one split.

    Attributes:
        name: of the file, or the glob of several, without its folder.
        shards: the files.
        tokens: integers `[n]`, mapped; several files are one array.
        offsets: int64 `[documents + 1]`: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        sha256: of the tokens and their type, whatever the files' format and wherever one ends.
    """

    name: str
    shards: tuple[Shard, ...]
    tokens: TokenArray
    offsets: np.ndarray
    sha256: str

    @property
    def highest(self) -> int:
        """The highest id in the files."""
        return max(shard.highest for shard in self.shards)


@dataclass(frozen=True)
class TokenCorpus:
    """Token files, split as given.

    Attributes:
        name: of the files, without their folders.
        version: how they are read.
        parts: `train`, `valid` and `test`.
        separator_id: the token that begins a document, or None: a split's files are one.
        halved: whether the test is the second half of the validation files' documents.
    """

    name: str
    version: str
    parts: dict[str, TokenPart]
    separator_id: int | None
    halved: bool

    @property
    def sha256(self) -> str:
        """Hash of all splits' hashes, in order."""
        hashes = dict.fromkeys(part.sha256 for part in self.parts.values())
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def is_token_files(spec: str) -> bool:
    """Say whether a data spec names token files, by how its names end."""
    return any(name.strip().endswith(SUFFIXES) for name in spec.split(","))


def load_token_files(spec: str, separator_id: int | None = None) -> TokenCorpus:
    """Map token files; each is looked through once, for its hash, highest id and documents.

    Args:
        spec: two or three files with commas between them: train, validation and test. `.npy` holds
            one dimension of integers, `.bin` uint16 (with llm.c's header or, as nanoGPT writes it,
            without). A glob stands for all files that match, in the order of their names, as if
            they were one. Without the third, the test is the second half of the second's documents.
        separator_id: begins a document, whose BOS it is, and which may go on in the next file; what
            lies before a split's first one is a document as well. Without it, a split is one
            document.

    Raises:
        UserError: a file is missing, holds something else, or is matched by two splits.
    """
    names = [name.strip() for name in spec.split(",")]
    if len(names) not in (2, 3) or not all(name.endswith(SUFFIXES) for name in names):
        raise UserError(
            f"token files {spec!r}: give those of train and validation, and perhaps test, as in "
            f"train.bin,valid.bin,test.bin or train_*.bin,valid_*.bin, each ending in "
            f"{' or '.join(SUFFIXES)}"
        )
    if separator_id is not None and separator_id < 0:
        raise UserError(f"--separator-id is {separator_id}: token ids count from 0")
    found = [_match(name) for name in names]
    _check_disjoint(names, [paths for _, paths in found])
    parts = {
        split: _scan(name, paths, separator_id)
        for split, (name, paths) in zip(("train", "valid", "test"), found, strict=False)
    }
    if halved := len(parts) == 2:
        parts["valid"], parts["test"] = _halves(parts["valid"], separator_id)
    name = ",".join(name for name, _ in found)
    return TokenCorpus(name, FILES_VERSION, parts, separator_id, halved)


def _match(name: str) -> tuple[str, list[Path]]:
    """Give what a file or glob is called without its folder, and the files."""
    folder, pattern, paths = match_files(name)
    if paths:
        return pattern, paths
    if glob.has_magic(name):
        raise UserError(
            f"token files {name!r}: no file in {folder.absolute()} matches {pattern!r}: give a "
            "glob of files that are there"
        )
    path = Path(name).expanduser()
    return path.name, [path]  # opening it says what is wrong


def _check_disjoint(names: Sequence[str], found: Sequence[Sequence[Path]]) -> None:
    """Refuse a file that a glob brings into a second split; who names one twice means it."""
    seen: dict[tuple[int, int], int] = {}
    for index, paths in enumerate(found):
        for path in paths:
            if not path.exists():
                continue
            status = path.stat()  # links to one file are that file
            other = seen.setdefault((status.st_dev, status.st_ino), index)
            if other != index and any(map(glob.has_magic, (names[other], names[index]))):
                raise UserError(
                    f"{path} is of two splits, by {names[other]!r} and by {names[index]!r}: give "
                    "globs that share no file"
                )


def _scan(name: str, paths: Sequence[Path], separator_id: int | None) -> TokenPart:
    dtype = map_tokens(paths[0]).dtype
    portable = dtype.newbyteorder("<")
    digest = hashlib.sha256(portable.str.encode() + b"\0")
    shards, count, starts = [], 0, [np.zeros(1, np.int64)]
    for path in paths:
        tokens = map_tokens(path)
        if tokens.dtype != dtype:
            raise UserError(
                f"{path} holds {tokens.dtype}, and {paths[0]}, of the same split, {dtype}: give "
                "files of one type"
            )
        highest = 0
        for first in range(0, len(tokens), CHUNK):
            chunk = tokens[first : first + CHUNK]
            digest.update(chunk.astype(portable, copy=False).tobytes())
            if (lowest := int(chunk.min())) < 0:
                raise UserError(f"{path} holds the token {lowest}: token ids count from 0")
            highest = max(highest, int(chunk.max()))
            if separator_id is not None:
                starts.append(count + first + np.flatnonzero(chunk == separator_id))
        shards.append(Shard(path, len(tokens), highest))
        count += len(tokens)
    # Files that begin with a separator have no document before it.
    offsets = np.unique(np.concatenate([*starts, [count]])).astype(np.int64)
    whole = tokens if len(shards) == 1 else Shards(shards, dtype)
    return TokenPart(name, tuple(shards), whole, offsets, digest.hexdigest())


def _halves(part: TokenPart, separator_id: int | None) -> tuple[TokenPart, TokenPart]:
    """Cut a split at the document that begins after its middle, or, as one document, there."""
    middle = len(part.tokens) // 2
    if separator_id is None:
        border = middle
    else:
        border = int(part.offsets[np.searchsorted(part.offsets, middle)])
    if not 0 < border < len(part.tokens):
        raise UserError(
            f"{part.name} cannot be halved into validation and test: no document begins in its "
            "second half; give a third file for the test"
        )
    before = part.offsets[part.offsets < border]
    after = part.offsets[part.offsets > border]
    return (
        replace(part, tokens=part.tokens[:border], offsets=np.append(before, border)),
        replace(part, tokens=part.tokens[border:], offsets=np.concatenate([[0], after - border])),
    )
