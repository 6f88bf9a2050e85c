"""``python -m posenc.data tokenizer --data DATA --vocab-size N --out FILE.json``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posenc.cli import parse_subcommand
from posenc.data.corpora import load
from posenc.data.splits import split
from posenc.data.tokens import tokenizer as read_tokenizer
from posenc.data.vocabularies import train_bpe
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
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.write_text(trained, encoding="utf-8")
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    made = read_tokenizer(str(out))
    tokens = sum(len(made.encode(document.text)) for document in unseen)
    size = sum(len(document.text) for document in unseen)
    print(
        f"{out}: {made.vocab_size:,} tokens, trained on {sum(map(len, texts)):,} bytes; "
        f"{size / max(tokens, 1):.2f} bytes a token of the validation split"
    )


def main(arguments: list[str] | None = None) -> None:
    """Run one subcommand."""
    commands: dict[str, Callable[..., Any]] = {"tokenizer": Tokenizer}
    chosen = parse_subcommand(commands, "python -m posenc.data", arguments)
    with one_line_errors():
        train_tokenizer(chosen)


if __name__ == "__main__":
    main()
