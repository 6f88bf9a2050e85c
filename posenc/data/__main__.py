"""``python -m posenc.data tokenizer --out FILE.json`` and ``tokens --data DATA --out FOLDER``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from posenc.cli import parse_subcommand
from posenc.data.corpora import load, replace_file
from posenc.data.hub import RECIPES, HubSource, Piece, State, documents
from posenc.data.splits import split
from posenc.data.tokens import tokenizer as read_tokenizer
from posenc.data.vocabularies import train_bpe
from posenc.data.writing import Written, write_tokens
from posenc.errors import UserError, make_folder, one_line_errors


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Train a byte-level BPE on the training split of a corpus."""

    out: Path
    """The JSON file to write, which `train.py --tokenizer` takes."""
    data: str = "manuals-small"
    """A corpus by name, or a glob of .txt or .jsonl files."""
    vocab_size: int = 4096
    """Tokens: 256 bytes, the special <|bos|> and merges."""


def train_tokenizer(arguments: Tokenizer) -> None:
    """Train a tokenizer, write it, and say how long its tokens are on text it has not seen."""
    out = arguments.out
    if out.suffix != ".json":
        raise UserError(f"--out {out}: give a name that ends in .json, by which it is known")
    if out.exists():
        # Runs may have been trained with it.
        raise UserError(f"{out} is there already: choose another --out")
    corpus = load(arguments.data)
    texts = [document.text for document in split(corpus, "train")]
    unseen = split(corpus, "valid")
    trained = train_bpe(texts, arguments.vocab_size)
    make_folder(out.parent)
    replace_file(out, trained.encode())
    made = read_tokenizer(str(out))
    tokens = sum(len(made.encode(document.text)) for document in unseen)
    size = sum(len(document.text) for document in unseen)
    print(
        f"{out}: {made.vocab_size:,} tokens, trained on {sum(map(len, texts)):,} bytes; "
        f"{size / max(tokens, 1):.2f} bytes a token of the validation split"
    )


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Write the tokens of a data set to files that train.py reads; killed, it goes on."""

    data: str
    """A data set of the hub by recipe (`python -m posenc list`) or as hub:OWNER/NAME (a folder
    will do: hub:FOLDER); or a corpus or files as for train.py."""
    out: Path
    """The folder for the files."""
    tokenizer: str = "bytes"
    """As for train.py."""
    config: str | None = None
    """The data set's configuration; of the hub only, like the two options below."""
    column: str | None = None
    """That holds the text, if not `text`."""
    splits: Literal["given", "hash"] | None = None
    """As the data set has them (train, validation, test), or by hash where it has only train."""
    limit_tokens: int | None = None
    """Training tokens, about, after which no more is read."""


def hub_source(arguments: Tokens) -> HubSource | None:
    """Give what the options say of a data set of the hub; None of other data.

    Raises:
        UserError: such an option is given with other data.
    """
    if arguments.data in RECIPES:
        source = RECIPES[arguments.data]
    elif arguments.data.startswith("hub:"):
        source = HubSource(arguments.data.removeprefix("hub:"))
    else:
        for name in ("config", "column", "splits"):
            if getattr(arguments, name) is not None:
                raise UserError(f"--{name} is of data sets of the hub: say hub:{arguments.data}")
        return None
    given = {name: getattr(arguments, name) for name in ("config", "column")}
    source = dataclasses.replace(source, **{k: v for k, v in given.items() if v is not None})
    if arguments.splits == "hash":
        source = dataclasses.replace(source, by_hash=True, splits=("train",))
    elif arguments.splits == "given":
        source = dataclasses.replace(source, by_hash=False, splits=HubSource.splits)
    return source


def make_tokens(arguments: Tokens) -> Written:
    """Write token files and say how to train on them."""
    limit = arguments.limit_tokens
    if limit is not None and limit < 1:
        raise UserError(f"--limit-tokens is {limit}: it must be at least 1")
    tokenizer = read_tokenizer(arguments.tokenizer)
    read: Callable[[State | None], Iterator[Piece]]
    if source := hub_source(arguments):
        tree, read = dataclasses.asdict(source), partial(documents, source)
    else:
        corpus = load(arguments.data)
        tree = {"name": corpus.name, "version": corpus.version, "sha256": corpus.sha256}
        # All in memory, it is written in one go.
        read = lambda state: (  # noqa: E731
            Piece(name, document.text, None)
            for name in ("valid", "test", "train")
            for document in split(corpus, name)
        )
    written = write_tokens(read, tree, tokenizer, arguments.out, limit)
    print(", ".join(f"{count:,} {name} tokens" for name, count in written.tokens.items()))
    files = ",".join(map(str, written.files))
    print(f"--data {files} --separator-id {tokenizer.bos} --tokenizer {arguments.tokenizer}")
    return written


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand."""
    commands: dict[str, Callable[..., Any]] = {"tokenizer": Tokenizer, "tokens": Tokens}
    chosen = parse_subcommand(commands, "python -m posenc.data", arguments)
    with one_line_errors():
        if isinstance(chosen, Tokens):
            make_tokens(chosen)
        else:
            train_tokenizer(chosen)


if __name__ == "__main__":
    main()
