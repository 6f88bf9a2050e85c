"""Tokens that were made elsewhere, read by memory map: NumPy's `.npy` and nanoGPT's `.bin`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.errors import UserError

SUFFIXES = (".npy", ".bin")
FILES_VERSION = "tokens-1"  # how files become documents; part of the data's identity
CHUNK = 2**22  # tokens that are in memory while a file is looked through
# llm.c's files begin with 256 int32, of which the first is this number.
LLMC_MAGIC, LLMC_HEADER = 20240520, 1024


@dataclass(frozen=True)
class TokenPart:
    """The tokens of one split.

    Attributes:
        path: of the file that they are in.
        tokens: integers `[n]`, mapped.
        offsets: int64 `[documents + 1]`: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        highest: the highest id in the file.
        sha256: of the file's tokens and their type, whatever the file's format.
    """

    path: Path
    tokens: np.ndarray
    offsets: np.ndarray
    highest: int
    sha256: str


@dataclass(frozen=True)
class TokenCorpus:
    """Token files, split as given.

    Attributes:
        name: of the files, without their folders.
        version: how they are read.
        parts: `train`, `valid` and `test`.
        separator_id: the token that begins a document, or None: a file is one.
        halved: whether the test is the second half of the validation file's documents.
    """

    name: str
    version: str
    parts: dict[str, TokenPart]
    separator_id: int | None
    halved: bool

    @property
    def sha256(self) -> str:
        """Hash of all files' hashes, in order."""
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
            without). Without the third, the test is the second half of the second's documents.
        separator_id: begins a document, whose BOS it is; what lies before a file's first one is a
            document as well. Without it, a file is one document.

    Raises:
        UserError: a file is missing, or holds something else.
    """
    names = [name.strip() for name in spec.split(",")]
    if len(names) not in (2, 3) or not all(name.endswith(SUFFIXES) for name in names):
        raise UserError(
            f"token files {spec!r}: give those of train and validation, and perhaps test, as in "
            f"train.bin,valid.bin,test.bin, each ending in {' or '.join(SUFFIXES)}"
        )
    if separator_id is not None and separator_id < 0:
        raise UserError(f"--separator-id is {separator_id}: token ids count from 0")
    paths = [Path(name).expanduser() for name in names]
    parts = dict(
        zip(("train", "valid", "test"), (_scan(p, separator_id) for p in paths), strict=False)
    )
    if halved := len(parts) == 2:
        parts["valid"], parts["test"] = _halves(parts["valid"], separator_id)
    name = ",".join(path.name for path in paths)
    return TokenCorpus(name, FILES_VERSION, parts, separator_id, halved)


def _map(path: Path) -> np.ndarray:
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


def _scan(path: Path, separator_id: int | None) -> TokenPart:
    tokens = _map(path)
    digest = hashlib.sha256(tokens.dtype.newbyteorder("<").str.encode() + b"\0")
    lowest, highest, starts = 0, 0, [np.zeros(1, np.int64)]
    for first in range(0, len(tokens), CHUNK):
        chunk = tokens[first : first + CHUNK]
        digest.update(chunk.astype(chunk.dtype.newbyteorder("<"), copy=False).tobytes())
        lowest, highest = min(lowest, int(chunk.min())), max(highest, int(chunk.max()))
        if separator_id is not None:
            starts.append(first + np.flatnonzero(chunk == separator_id))
    if lowest < 0:
        raise UserError(f"{path} holds the token {lowest}: token ids count from 0")
    # A file that begins with a separator has no document before it.
    offsets = np.unique(np.concatenate([*starts, [len(tokens)]])).astype(np.int64)
    return TokenPart(path, tokens, offsets, highest, digest.hexdigest())


def _halves(part: TokenPart, separator_id: int | None) -> tuple[TokenPart, TokenPart]:
    """Cut a file at the document that begins after its middle, or, as one document, there."""
    middle = len(part.tokens) // 2
    if separator_id is None:
        border = middle
    else:
        border = int(part.offsets[np.searchsorted(part.offsets, middle)])
    if not 0 < border < len(part.tokens):
        raise UserError(
            f"{part.path} cannot be halved into validation and test: no document begins in its "
            "second half; give a third file for the test"
        )
    before = part.offsets[part.offsets < border]
    after = part.offsets[part.offsets > border]
    return (
        TokenPart(
            part.path,
            part.tokens[:border],
            np.append(before, border),
            part.highest,
            part.sha256,
        ),
        TokenPart(
            part.path,
            part.tokens[border:],
            np.concatenate([[0], after - border]),
            part.highest,
            part.sha256,
        ),
    )
