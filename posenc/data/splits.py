"""Which documents train, validate and test: a pure function of the corpus."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from posenc.data._names import unknown
from posenc.data.corpora import Corpus, Document
from posenc.data.token_files import TokenCorpus
from posenc.errors import UserError

SPLITS = ("train", "valid", "test")
SPLIT_VERSION = "1"  # raise it with any change below: it is part of the data's identity

MIN_DOCUMENTS = 20
TRAIN_BELOW, VALID_BELOW = 0.90, 0.95
BLOCK_BYTES = 64 * 1024
GAP_BYTES = 4 * 1024


@dataclass(frozen=True)
class Block(Document):
    """A piece of a document that is a region of its own: no window crosses its borders."""


def split_rule(
    corpus: Corpus | TokenCorpus,
) -> Literal["documents", "blocks", "files", "files, validation halved"]:
    """Say which rule splits `corpus`: by document, or by block where it has fewer than 20.

    Token files are split already; without one for the test, that is half of the validation's.
    """
    if isinstance(corpus, TokenCorpus):
        return "files, validation halved" if corpus.halved else "files"
    return "documents" if len(corpus.documents) >= MIN_DOCUMENTS else "blocks"


def describe_split(corpus: Corpus | TokenCorpus) -> str:
    """Say in one line, for the log, how `corpus` is split."""
    if isinstance(corpus, TokenCorpus):
        train, valid = corpus.parts["train"], corpus.parts["valid"]
        given = f"{len(train.offsets) - 1:,} training documents"
        given += f" in {len(train.shards):,} files" * (len(train.shards) > 1)
        whose = "file's" if len(valid.shards) == 1 else "files'"
        return (
            f"{given}: split as given"
            + f"; the validation {whose} second half is the test" * corpus.halved
        )
    count = len(corpus.documents)
    if split_rule(corpus) == "blocks":
        return (
            f"fewer than {MIN_DOCUMENTS} documents ({count}): split by 64 KiB blocks, 4 KiB "
            "dropped at each border; no window crosses a border"
        )
    return f"{count} documents: split by SHA-256 of the document id, 90% train, 5% valid, 5% test"


def split(corpus: Corpus, name: str) -> list[Document]:
    """Give one split's documents (or blocks), in the corpus's order.

    With 20 documents or more a document's split is decided by the SHA-256 of its id alone. With
    fewer, documents are cut into blocks of 64 KiB; the last 4 KiB of a block that is followed by
    another are dropped, and a twentieth of the blocks (by hash, at least one) is test, as many
    valid.

    Args:
        corpus: the whole corpus.
        name: `train`, `valid` or `test`.

    Raises:
        UserError: an unknown name, fewer than 3 blocks, or a split that got no document.
    """
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    if split_rule(corpus) == "blocks":
        return _by_block(corpus, name)
    chosen = [d for d in corpus.documents if split_of(d) == name]
    if not chosen:
        raise UserError(
            f"corpus {corpus.name!r}: none of its {len(corpus.documents)} documents falls into the "
            f"split {name!r} (5% of them are expected in valid and in test, by hash of the id); "
            f"give more documents, or join them into fewer than {MIN_DOCUMENTS} to split by block"
        )
    return chosen


def split_of(document: Document) -> str:
    """Give the split that a document belongs to, by the SHA-256 of its id alone."""
    u = int.from_bytes(hashlib.sha256(document.key).digest()[:8], "big") / 2**64
    return "train" if u < TRAIN_BELOW else "valid" if u < VALID_BELOW else "test"


def _by_block(corpus: Corpus, name: str) -> list[Document]:
    blocks: list[Document] = []
    hashes: list[bytes] = []
    for document in corpus.documents:
        size = len(document.text)
        for k, start in enumerate(range(0, size, BLOCK_BYTES)):
            stop = start + BLOCK_BYTES
            stop = stop - GAP_BYTES if stop < size else size
            blocks.append(Block(f"{document.id}[{k}]", document.text[start:stop]))
            hashes.append(hashlib.sha256(document.key + f":{k}".encode()).digest())
    count = len(blocks)
    if count < 3:
        raise UserError(
            f"corpus {corpus.name!r} has {len(corpus.documents)} document(s) in {count} block(s) "
            f"of {BLOCK_BYTES} bytes, and train, valid and test need at least 3; give more than "
            f"{2 * BLOCK_BYTES} bytes of text in a document, or more documents"
        )
    held = max(1, round(count / 20))
    # The place breaks ties, which only documents of one id have.
    order = sorted(range(count), key=lambda i: (hashes[i], i))
    parts = {"test": order[:held], "valid": order[held : 2 * held], "train": order[2 * held :]}
    return [blocks[i] for i in sorted(parts[name])]
