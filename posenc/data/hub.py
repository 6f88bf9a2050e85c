"""Data sets of the Hugging Face hub, or folders like them, read as a stream of documents."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from posenc.data.corpora import Document
from posenc.data.splits import split_of
from posenc.errors import UserError

# WikiText's rows are lines; an article begins with a heading of one equals sign.
ARTICLE = re.compile(r" = [^=](?:.*[^=])? = \n?")
TARGETS = {"train": "train", "validation": "valid", "valid": "valid", "test": "test"}


@dataclasses.dataclass(frozen=True)
class HubSource:
    """Which rows of a data set are which documents of which split.

    Attributes:
        path: of the data set on the hub, or a folder.
        config: its configuration.
        revision: its branch.
        data_files: of it, where they must be named.
        column: that holds the text.
        id_column: that names documents, which is what hashing goes by; the row's place without one.
        splits: to be read, in order; training last, so that a limit on its tokens can end it all.
        by_hash: whether documents are split by the hash of their ids, because there is only
            `train`.
        articles: whether rows are lines, of which some begin an article.
        cut: where one text ends to be training text and validation text, in bytes.
    """

    path: str
    config: str | None = None
    revision: str | None = None
    data_files: str | None = None
    column: str = "text"
    id_column: str | None = None
    splits: tuple[str, ...] = ("validation", "test", "train")
    by_hash: bool = False
    articles: bool = False
    cut: tuple[int, int] | None = None


RECIPES: dict[str, HubSource] = {
    # Merity et al. 2017; articles, as Transformer-XL and later work evaluates them.
    "wikitext-103": HubSource("Salesforce/wikitext", "wikitext-103-raw-v1", articles=True),
    # The Hutter prize's 10^8 bytes; 90, 5 and 5 million of them since Graves 2013. The data set
    # itself is a script, which `datasets` no longer runs: its conversion is read.
    "enwik8": HubSource(
        "LTCB/enwik8",
        revision="refs/convert/parquet",
        data_files="enwik8-raw/train/*.parquet",
        splits=("train",),
        cut=(90_000_000, 95_000_000),
    ),
    # Rae et al. 2020; a copy without a script.
    "pg19": HubSource("emozilla/pg19"),
    # Penedo et al. 2024.
    "fineweb-edu": HubSource(
        "HuggingFaceFW/fineweb-edu", "sample-10BT", id_column="id", splits=("train",), by_hash=True
    ),
    # Python files, each once; Tunstall et al. 2022.
    "codeparrot": HubSource(
        "codeparrot/codeparrot-clean", column="content", splits=("train",), by_hash=True
    ),
}

State = dict[str, Any]


class Piece(NamedTuple):
    """A document on its way into a token file.

    Attributes:
        split: `train`, `valid` or `test`.
        text: of the document.
        state: gives what `documents` takes to go on after this document; None where it cannot.
    """

    split: str
    text: bytes
    state: Callable[[], State] | None


def documents(source: HubSource, state: State | None = None) -> Iterator[Piece]:
    """Read a data set's documents, one after another.

    Args:
        source: see there.
        state: of the last document that need not be read again.

    Raises:
        UserError: the package `datasets`, the data set, a split or a column is not there.
    """
    at = state or {"split": 0, "row": 0, "rows": None, "lines": []}
    for index in range(at["split"], len(source.splits)):
        name = source.splits[index]
        rows = _open(source, name)
        row, lines = 0, []
        if index == at["split"]:
            row, lines = at["row"], list(at["lines"])
            if at["rows"] is not None:
                rows.load_state_dict(at["rows"])
        after: State = {"split": index + 1, "row": 0, "rows": None, "lines": []}
        for values in _each(rows, f"{source.path}, {name}"):
            text = _text(source, values, f"{source.path}, {name}, row {row}")
            key = values.get(source.id_column) if source.id_column else None
            identity = f"{name}:{row}" if key is None else str(key)
            row += 1

            def here(index: int = index, row: int = row, lines: list[str] | None = None) -> State:
                return {
                    "split": index,
                    "row": row,
                    "rows": rows.state_dict(),  # noqa: B023  (asked before the next split)
                    "lines": lines or [],
                }

            if source.cut is not None:
                yield from _cut(text.encode(), source.cut, here)
            elif not source.articles:
                document = Document(identity, text.encode())
                target = split_of(document) if source.by_hash else TARGETS[name]
                yield Piece(target, document.text, here)
            elif ARTICLE.fullmatch(text) and lines:
                whole, lines = "".join(lines), [text]
                yield Piece(TARGETS[name], whole.encode(), partial(here, lines=[text]))
            elif text.strip() or lines:  # the blank lines before the first article are none
                lines.append(text)
        if lines:
            yield Piece(TARGETS[name], "".join(lines).encode(), partial(dict, after))


def _each(rows: Any, where: str) -> Iterator[dict[str, Any]]:
    """Iterate, with one line for whatever a network or a broken file raises."""
    iterator = iter(rows)
    while True:
        try:
            values = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"{where}: reading broke off ({said}); give the same command again to go on"
            ) from None
        yield values


def _cut(text: bytes, cut: tuple[int, int], state: Callable[[], State]) -> Iterator[Piece]:
    first, second = cut
    if len(text) <= second:
        raise UserError(f"a text of {len(text)} bytes cannot be cut at {first} and {second}")
    yield Piece("train", text[:first], None)
    yield Piece("valid", text[first:second], None)
    yield Piece("test", text[second:], state)


def _text(source: HubSource, values: dict[str, Any], where: str) -> str:
    text = values.get(source.column)
    if not isinstance(text, str):
        raise UserError(
            f"{where}: no text in the column {source.column!r}; its columns are "
            f"{', '.join(values)} (--column)"
        )
    return text


def _open(source: HubSource, split: str) -> Any:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise UserError(
            "data sets of the hub need the package datasets, which is not installed: "
            "pip install 'posenc[hf]'"
        ) from None
    try:
        if any(
            (Path(source.path) / name).is_file() for name in ("dataset_dict.json", "state.json")
        ):
            saved = datasets.load_from_disk(source.path)
            if isinstance(saved, dict):
                saved = saved[split]
            return saved.to_iterable_dataset()
        return datasets.load_dataset(
            source.path,
            source.config,
            split=split,
            revision=source.revision,
            data_files=source.data_files,
            streaming=True,
        )
    except Exception as error:  # of many kinds: no network, no such set, configuration or split
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"the split {split!r} of {source.path} cannot be opened: {said}") from None
