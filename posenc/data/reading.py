"""One way to the tokens of a split, whether they come from text or from token files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from posenc.data.corpora import Corpus, load
from posenc.data.hub import RECIPES
from posenc.data.shards import TokenArray
from posenc.data.splits import split
from posenc.data.token_files import TokenCorpus, is_token_files, load_token_files
from posenc.data.tokens import Tokenizer
from posenc.data.windows import TokenStream
from posenc.data.writing import RECORD
from posenc.errors import UserError


def open_data(spec: str, separator_id: int | None = None) -> Corpus | TokenCorpus:
    """Open what `--data` names: token files, or a text corpus as `load` reads it.

    Args:
        spec: see `load` and `load_token_files`.
        separator_id: of token files.

    Raises:
        UserError: there is no such data, or a separator is given for text.
    """
    if spec in RECIPES or spec.startswith("hub:"):
        raise UserError(
            f"{spec} is read once, into token files: python -m posenc.data tokens --data {spec} "
            "--out FOLDER says what to give as --data then"
        )
    if is_token_files(spec):
        return load_token_files(spec, separator_id)
    if separator_id is not None:
        raise UserError(
            f"--separator-id {separator_id} is of token files, and {spec!r} is text: leave it out"
        )
    return load(spec)


def bos_id(corpus: Corpus | TokenCorpus, tokenizer: Tokenizer) -> int:
    """Give the token that begins a document: a token file's separator, or the tokenizer's BOS."""
    own = corpus.separator_id if isinstance(corpus, TokenCorpus) else None
    return tokenizer.bos if own is None else own


def _check(corpus: TokenCorpus, tokenizer: Tokenizer, bos: str) -> None:
    separator = corpus.separator_id
    if separator is None and bos != "none":
        raise UserError(
            f"token files {corpus.name} are read without separator, so that no document begins "
            "with a BOS token: give --separator-id, or --bos none"
        )
    if separator is not None and bos == "none":
        raise UserError(
            f"--separator-id {separator} begins every document of {corpus.name} as its BOS token: "
            "leave out --bos none"
        )
    size = tokenizer.vocab_size
    for part in corpus.parts.values():
        for shard in part.shards:
            _check_record(shard.path, tokenizer)
            if shard.highest >= size:
                raise UserError(
                    f"{shard.path} holds the token {shard.highest}, and the tokenizer "
                    f"{tokenizer.name} has {size} (0 to {size - 1}): give the tokenizer that made "
                    "it (--tokenizer)"
                )
    if separator is not None and separator >= size:
        raise UserError(
            f"--separator-id {separator} is no token of {tokenizer.name}, which has {size}"
        )


def _check_record(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse another tokenizer than the one that is recorded beside a token file."""
    try:
        made = json.loads((path.parent / RECORD).read_text())["tokenizer"]
        name, sha256 = made["name"], made["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # of files that were made elsewhere nothing more is known
    now = getattr(tokenizer, "sha256", None)
    if sha256 != now or (sha256 is None and name != tokenizer.name):
        raise UserError(
            f"{path} was made with the tokenizer {name} ({sha256} there, {tokenizer.name}, {now} "
            "now): give that one (--tokenizer)"
        )


def token_stream(
    corpus: Corpus | TokenCorpus, name: str, tokenizer: Tokenizer, bos: str
) -> TokenStream:
    """Give the tokens of one split as a stream; those of token files stay in the file.

    Raises:
        UserError: as `split`; or the files do not fit the tokenizer or the BOS rule.
    """
    if not isinstance(corpus, TokenCorpus):
        return TokenStream(split(corpus, name), tokenizer, bos)
    _check(corpus, tokenizer, bos)
    part = corpus.parts[name]
    return TokenStream.of_tokens(part.tokens, part.offsets)


def token_documents(
    corpus: Corpus | TokenCorpus, name: str, tokenizer: Tokenizer, bos: str
) -> list[TokenArray]:
    """Give the documents of one split as token ids, without BOS.

    Raises:
        UserError: as `token_stream`.
    """
    if not isinstance(corpus, TokenCorpus):
        return [tokenizer.encode(document.text) for document in split(corpus, name)]
    _check(corpus, tokenizer, bos)
    part = corpus.parts[name]
    documents = []
    for start, stop in zip(part.offsets[:-1], part.offsets[1:], strict=True):
        # Only what lies before a split's first separator begins without one.
        first = np.asarray(part.tokens[start : start + 1])
        documents.append(part.tokens[start + int((first == corpus.separator_id).any()) : stop])
    return [document for document in documents if len(document)]
