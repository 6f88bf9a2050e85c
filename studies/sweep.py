"""A sweep's config file: which cells there are, and how they are scored.

A cell is one run: an encoding, a training length, a seed and a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import train
from eval.__main__ import Score
from eval.protocols import check_ladder
from posenc.cli import parse
from posenc.encodings.extension import POLICIES
from posenc.encodings.registry import find_class, nearest, parse_part, parse_spec
from posenc.errors import UserError
from posenc.runs import RunConfig

# Each list of a config, and the option of train.py that takes its items.
LISTS: dict[str, tuple[str, type]] = {
    "seeds": ("seed", int),
    "models": ("model", str),
    "train_lengths": ("train_length", int),
    "encodings": ("encoding", str),
}
KEYS = ("name", "out", *LISTS, "lengths", "multiples", "train", "score")
# What a sweep says itself, or what is of one run alone.
NOT_IN_TRAIN = (*(option for option, _ in LISTS.values()), "seeds", "out", "name", "checkpoint")
NOT_IN_SCORE = ("runs", "lengths", "report", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: of the run; it begins with the model's, so that any may be added later.
        folder: of the run.
        config: what the run computes.
        words: the options of train.py that make it.
    """

    name: str
    folder: Path
    config: RunConfig
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A config, read and checked.

    Attributes:
        path: of the file.
        name: of the sweep.
        out: its folder, which holds ``runs``, ``cells`` (outcomes and logs) and ``report``.
        cells: seed by seed, so that what is there of a sweep compares all encodings.
        score_words: the options of ``python -m eval score`` after the runs.
    """

    path: Path
    name: str
    out: Path
    cells: tuple[Cell, ...]
    score_words: tuple[str, ...]


def options(table: dict[str, Any], cls: type[Any]) -> list[str]:
    """Give the words of a command line for the options of a TOML table."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    words: list[str] = []
    for key, value in table.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool) and isinstance(defaults[key], bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            words += [f"--{flag}", *map(str, values)]
    return words


def _refuse_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise UserError(f"{where} has no {key!r}: {nearest(key, known)}")


def _table(tree: dict[str, Any], key: str, cls: type[Any], without: Iterable[str], path: Path):
    table = tree.get(key, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {key} is {table!r}: write a table, [{key}]")
    table = {name.replace("-", "_"): value for name, value in table.items()}
    taken = {option: name for name, (option, _) in LISTS.items()}
    for name in table:
        if name in without:
            way = f"{taken[name]} = [...]" if name in taken else "what stands above the tables"
            raise UserError(f"{path}: [{key}] may not have {name}: it is said by {way}")
    every = [field.name for field in dataclasses.fields(cls) if field.name not in without]
    _refuse_unknown(table, every, f"{path}: [{key}]")
    return table


def _list(tree: dict[str, Any], key: str, kind: type, path: Path) -> list[Any]:
    values = tree.get(key)
    named = {int: "whole numbers", float: "numbers", str: "texts"}[kind]
    fits = (int, float) if kind is float else kind
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(v, fits) and not isinstance(v, bool) for v in values)
    ):
        given = "is missing" if values is None else f"is {values!r}"
        raise UserError(f"{path}: {key} {given}: give a list of {named}")
    return list(dict.fromkeys(values))


def _text(tree: dict[str, Any], key: str, path: Path) -> str:
    value = tree.get(key)
    if not isinstance(value, str) or not value:
        given = "is missing" if value is None else f"is {value!r}"
        raise UserError(f'{path}: {key} {given}: give a text, such as {key} = "small"')
    return value


def _lengths(tree: dict[str, Any], train_lengths: list[int], path: Path) -> list[int]:
    """Give the lengths of the evaluation: of all training lengths together, as one ladder."""
    if ("lengths" in tree) == ("multiples" in tree):
        raise UserError(
            f"{path}: give either lengths = [...], in tokens, or multiples = [...], in training "
            "lengths"
        )
    if "lengths" in tree:
        return _list(tree, "lengths", int, path)
    pairs = list(itertools.product(_list(tree, "multiples", float, path), train_lengths))
    for multiple, length in pairs:
        if not float(multiple * length).is_integer():
            raise UserError(
                f"{path}: multiples: {multiple} times {length} is no whole number of tokens"
            )
    return sorted({int(multiple * length) for multiple, length in pairs})


def _check_policies(policies: Iterable[str], cells: Iterable[Cell], path: Path) -> None:
    """Refuse a misspelt policy now, and not when all is trained."""
    layers = [layer for cell in cells for layer in parse_spec(cell.config.encoding)]
    offered = {name for layer in layers for p in layer for name in find_class(p.name).extensions}
    names = (parse_part(policy).name for policy in policies)
    _refuse_unknown(names, sorted({*POLICIES, *offered}), f"{path}: [score]: extend")


def read_sweep(path: Path) -> Sweep:
    """Read a config and check all of it that can be checked before training.

    Raises:
        UserError: the file is missing or no TOML, a key is unknown (with the nearest names) or
            lacking, or a value is of another kind.
        EncodingError: an encoding, sampler or policy is unknown.
        SystemExit: train.py or eval refuses an option, with code 2 after one line.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no TOML: {error}") from None
    _refuse_unknown(tree, KEYS, str(path))
    name, out = _text(tree, "name", path), Path(_text(tree, "out", path))
    lists = {key: _list(tree, key, kind, path) for key, (_, kind) in LISTS.items()}
    trained = options(_table(tree, "train", train.Arguments, NOT_IN_TRAIN, path), train.Arguments)
    cells = []
    for values in itertools.product(*lists.values()):
        own = dict(zip((option for option, _ in LISTS.values()), values, strict=True))
        words = [*options(own, train.Arguments), *trained]
        (config,) = train.configs_of(parse(train.Arguments, "", words))
        run = f"{own['model']}-{config.default_name}"
        words += ["--out", str(out / "runs"), "--name", run]
        cells.append(Cell(run, out / "runs" / run, config, tuple(words)))
    cells = list({cell.config: cell for cell in cells}.values())  # a spec given twice is one cell
    for run, count in Counter(cell.name for cell in cells).items():
        if count > 1:
            raise UserError(f"{path}: {count} cells would be called {run}: write them apart")
    shortest = min(lists["train_lengths"])
    table = _table(tree, "score", Score, NOT_IN_SCORE, path)
    lengths = _lengths(tree, lists["train_lengths"], path)
    words = ["--lengths", *map(str, lengths), "--report", str(out / "report")]
    words += options(table, Score)
    score = parse(Score, "", ["RUN", *words])
    check_ladder(lengths, score.targets or max(1, shortest // 8), shortest)
    _check_policies(score.extend, cells, path)
    return Sweep(path, name, out, tuple(cells), tuple(words))
