"""A sweep's config file: which cells there are, what is tuned, and how all is scored.

A cell is one run: an encoding, a training length, a seed and a model. A trial is one as well, which
tries out settings of the optimiser.
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
from posenc.optimizer import OptimizerConfig
from posenc.runs import RunConfig

# Each list of a config, and the option of train.py that takes its items.
LISTS: dict[str, tuple[str, type]] = {
    "seeds": ("seed", int),
    "models": ("model", str),
    "train_lengths": ("train_length", int),
    "encodings": ("encoding", str),
}
KEYS = ("name", "out", *LISTS, "train_long", "lengths", "multiples", "train", "tune", "score")
# What a sweep says itself, or what is of one run alone.
NOT_IN_TRAIN = (*(option for option, _ in LISTS.values()), "seeds", "out", "name", "checkpoint")
NOT_IN_SCORE = ("runs", "lengths", "report", "checkpoint", "tuning")
# What may be tuned, and what trials have of their own.
TUNED = [
    field.name
    for field in dataclasses.fields(OptimizerConfig)
    if field.name in {field.name for field in dataclasses.fields(train.Arguments)}
]
OF_TRIALS = ("seed", "steps")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: of the run; it begins with the model's, so that any may be added later.
        folder: of the run.
        config: what the run computes.
        words: the options of train.py that make it.
        options: the same, by name, without those that say where it is.
        group: model, training length and encoding: what is tuned together. A run that trains long
            has the training length that it is the bound of.
        ending: of its name, beyond what the config says.
        is_trial: whether it tries out settings, and has an outcome where it diverges, too.
    """

    name: str
    folder: Path
    config: RunConfig
    words: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(hash=False)
    group: tuple[str, int, str]
    ending: str = ""
    is_trial: bool = False


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What is tuned: every encoding within the same trials.

    Attributes:
        grid: the values of each option, all combinations of which are tried.
        options: what trials have of their own: their seed, and perhaps their steps.
    """

    grid: dict[str, list[Any]]
    options: dict[str, int]

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """The options of every trial."""
        every = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in every]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A config, read and checked.

    Attributes:
        path: of the file.
        name: of the sweep.
        out: its folder, which holds ``runs``, ``cells`` (outcomes and logs) and ``report``.
        cells: seed by seed, so that what is there of a sweep compares all encodings.
        score_words: the options of ``python -m eval score`` after the runs.
        tuning: if there is any.
        trials: of it.
    """

    path: Path
    name: str
    out: Path
    cells: tuple[Cell, ...]
    score_words: tuple[str, ...]
    tuning: Tuning | None = None
    trials: tuple[Cell, ...] = ()


def as_words(table: dict[str, Any], cls: type[Any]) -> list[str]:
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


def make_cell(
    out: Path,
    options: dict[str, Any],
    group: tuple[str, int, str],
    ending: str = "",
    *,
    is_trial: bool = False,
) -> Cell:
    """Make a cell from the options of train.py.

    Args:
        out: the sweep's folder.
        options: by name.
        group: of the cell.
        ending: of its name.
        is_trial: or a run that is scored.

    Raises:
        SystemExit: train.py refuses an option, with code 2 after one line.
    """
    words = as_words(options, train.Arguments)
    (config,) = train.configs_of(parse(train.Arguments, "", words))
    name = f"{options['model']}-{config.default_name}{ending}"
    folder = out / ("trials" if is_trial else "runs")
    words += ["--out", str(folder), "--name", name]
    return Cell(name, folder / name, config, tuple(words), options, group, ending, is_trial)


def _train_long(
    tree: dict[str, Any], cells: list[Cell], out: Path, longest: int, path: Path
) -> list[Cell]:
    """Make the cells that bound what could be recovered: trained longer, on as many tokens."""
    given = tree.get("train_long", False)
    if given is False:
        return []
    lengths = [longest] if given is True else _list(tree, "train_long", int, path)
    long = []
    for length, cell in itertools.product(lengths, cells):
        short, windows = cell.config.train_length, cell.config.batch_size
        if length <= short:
            raise UserError(
                f"{path}: train_long {length} is no longer than the training length {short}"
            )
        if windows * short % length:
            raise UserError(
                f"{path}: train_long: {windows} windows of {short} tokens are no whole number of "
                f"windows of {length}; choose another batch_size"
            )
        bounded = {"train_length": length, "batch_size": windows * short // length}
        ending = f"-for-T{short}"
        long.append(make_cell(out, {**cell.options, **bounded}, cell.group, ending))
    return long


def _tuning(tree: dict[str, Any], seeds: list[int], path: Path) -> Tuning | None:
    if "tune" not in tree:
        return None
    table = tree["tune"]
    if not isinstance(table, dict):
        raise UserError(f"{path}: tune is {table!r}: write a table, [tune]")
    table = {name.replace("-", "_"): value for name, value in table.items()}
    _refuse_unknown(table, [*TUNED, *OF_TRIALS], f"{path}: [tune]")
    grid = {name: value for name, value in table.items() if name not in OF_TRIALS}
    for name, values in grid.items():
        if not isinstance(values, list) or len(set(map(repr, values))) < 2:
            raise UserError(f"{path}: [tune] {name} is {values!r}: give a list of values to try")
    if not grid:
        raise UserError(f"{path}: [tune] has nothing to try, such as learning_rate = [1e-3, 3e-3]")
    options = {name: table[name] for name in OF_TRIALS if name in table}
    for name, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{path}: [tune] {name} is {value!r}: give one whole number")
    if options.setdefault("seed", max(seeds) + 1) in seeds:
        raise UserError(
            f"{path}: [tune] seed {options['seed']} is one of the seeds that are compared: give "
            "another one"
        )
    return Tuning(grid, options)


def _trials(cells: list[Cell], tuning: Tuning, out: Path) -> list[Cell]:
    """Make every combination of every group of cells."""
    trials = []
    for cell in {cell.group: cell for cell in cells}.values():
        for combination in tuning.combinations:
            options = {**cell.options, **tuning.options, **combination, "keep": 1}
            options.pop("keep_at", None)
            ending = "".join(f"-{name}-{value}" for name, value in combination.items())
            trials.append(make_cell(out, options, cell.group, ending, is_trial=True))
    return trials


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
    trained = _table(tree, "train", train.Arguments, NOT_IN_TRAIN, path)
    lengths = _lengths(tree, lists["train_lengths"], path)
    cells = []
    for values in itertools.product(*lists.values()):
        own = dict(zip((option for option, _ in LISTS.values()), values, strict=True))
        group = own["model"], own["train_length"], own["encoding"]
        cells.append(make_cell(out, {**own, **trained}, group))
    cells = list({cell.config: cell for cell in cells}.values())  # a spec given twice is one cell
    tuning = _tuning(tree, lists["seeds"], path)
    trials = [] if tuning is None else _trials(cells, tuning, out)
    cells += _train_long(tree, cells, out, max(lengths), path)
    for run, count in Counter(cell.name for cell in [*cells, *trials]).items():
        if count > 1:
            raise UserError(f"{path}: {count} cells would be called {run}: write them apart")
    shortest = min(lists["train_lengths"])
    table = _table(tree, "score", Score, NOT_IN_SCORE, path)
    words = ["--lengths", *map(str, lengths), "--report", str(out / "report")]
    words += as_words(table, Score)
    score = parse(Score, "", ["RUN", *words])
    check_ladder(lengths, score.targets or max(1, shortest // 8), shortest)
    _check_policies(score.extend, cells, path)
    return Sweep(path, name, out, tuple(cells), tuple(words), tuning, tuple(trials))
