"""Result rows on disk: one JSON object a line, and the same as CSV."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posenc.errors import UserError

Row = dict[str, Any]

SCHEMA = 1
REQUIRED = (
    *("schema", "run", "encoding", "protocol", "length", "extend", "defined", "reason"),
    *("nll", "excess_nll", "notes", "seed", "train_length"),
)
COLUMNS = (
    *(
        "schema",
        "run",
        "encoding",
        "model",
        "sharing",
        "positions",
        "parameters",
        "protocol",
        "length",
        "context",
    ),
    *("targets", "position_from", "position_to", "bos", "extend", "defined", "reason", "nll"),
    *("perplexity", "bits_per_byte", "reference_nll", "excess_nll", "tokens", "blocks"),
    *("windows", "documents", "notes", "seed", "train_tokens", "train_length"),
    *("checkpoint_step", "checkpoint", "data", "config_hash", "commit", "dirty", "versions"),
    *("device", "dtype", "matmul_precision"),
)

# JSON has no word for these, and a bare NaN makes the whole file unreadable elsewhere.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# An encoding or a tokenizer may be called "NaN"; text stays text.
_TEXT = (
    "run",
    "encoding",
    "model",
    "protocol",
    "positions",
    "bos",
    "extend",
    "reason",
    "notes",
    "data",
)
# What else a report reads of rows that have it.
_TABLES = ("data", "trained_with", "versions", "fixed_seeds", "tuning", "last_validations")
_COUNTS = (
    *("parameters", "train_tokens", "seeds_at_once", "checkpoint_step", "targets", "tokens"),
    *("blocks", "windows", "documents", "longest_length", "block_spacing", "stride", "ngram"),
    *("blocks_per_document", "tokens_per_document", "distance_from", "distance_to"),
)
_TUNING = ("grid", "trials", "steps", "seed", "criterion", "chosen", "losses")
_OUT = "score the runs again, or remove the line"


def write_rows(rows: Iterable[Row], folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write `rows.jsonl` and `rows.csv` into a folder, each in one step.

    Non-finite floats become the strings "NaN", "Infinity" and "-Infinity". Raises `UserError`
    for no rows, for a row that could not be read back, and for a folder that cannot be written.
    """
    rows = checked(rows)
    lines = (json.dumps(encoded(row), allow_nan=False) + "\n" for row in rows)
    paths = {name: Path(folder) / name for name in ("rows.jsonl", "rows.csv")}
    write_file(paths["rows.jsonl"], "".join(lines).encode())
    write_file(paths["rows.csv"], _csv(rows).encode())
    return paths


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read the rows of a `.jsonl` file, perhaps gzipped, or of a folder that holds `rows.jsonl`.

    Raises `UserError`, naming the file and the line, for a file that is missing, empty or not
    JSON, and for a row of another schema or without the keys that a report needs.
    """
    rows, faults = sift_rows(path)
    if faults:
        raise UserError(f"{faults[0]}: {_OUT}")
    if not rows:
        raise UserError(f"{_file(path)}: holds no result rows: score a run first")
    return rows


def sift_rows(path: str | os.PathLike[str]) -> tuple[list[Row], list[str]]:
    """Read what rows can be read, and give each other line's fault with its file and number.

    A row that is at fault is in no number. Raises `UserError` for a file that is missing or no
    text.
    """
    file = _file(path)
    rows, faults = [], []
    for number, line in enumerate(_text_of(file).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            faults.append(f"{file}, line {number}: not JSON ({error})")
            continue
        if isinstance(row, dict):
            row = {key: value if key in _TEXT else _decode(value) for key, value in row.items()}
        if fault := _fault(row):
            faults.append(f"{file}, line {number}: {fault}")
        else:
            rows.append(row)
    return rows, faults


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    whole, packed = path / "rows.jsonl", path / "rows.jsonl.gz"
    return (packed if packed.exists() and not whole.exists() else whole) if path.is_dir() else path


def _text_of(file: Path) -> str:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"{file}: cannot read result rows ({why}): name a .jsonl file, or a folder that holds "
            "rows.jsonl"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: not UTF-8 at byte {error.start}: name a .jsonl file of result rows"
        ) from None


def checked(rows: Iterable[Row]) -> list[Row]:
    """Rows with NumPy scalars made plain, once each is known to hold what a report needs.

    Raises `UserError`, naming the first row at fault, counted from 1.
    """
    rows = [plain(row) for row in rows]
    if not rows:
        raise UserError("there are no result rows to report: score a run first")
    for number, row in enumerate(rows, start=1):
        if fault := _fault(row):
            raise UserError(f"result row {number}: {fault}: {_OUT}")
    return rows


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the old content or the new, never a part.

    The folder is made if need be. Raises `UserError` where it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(
            f"{path}: cannot write ({error.strerror}): make room, or name a folder that can "
            "be written"
        ) from None


def _fault(row: Any) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return f"expected a JSON object, found {type(row).__name__}"
    if row.get("schema", SCHEMA) != SCHEMA:
        return f"schema {row['schema']!r}, but this version reads schema {SCHEMA}"
    if missing := [key for key in REQUIRED if key not in row]:
        return f"without {', '.join(missing)}"
    for key in ("run", "encoding", "protocol"):
        if not isinstance(row[key], str):
            return f"{key} is {row[key]!r}, not text"
    for key in ("length", "train_length"):
        if not _whole(row[key]) or row[key] < 1:
            return f"{key} is {row[key]!r}, not a positive number of tokens"
    if not _whole(row["seed"]):
        return f"seed is {row['seed']!r}, not a whole number"
    frozen = row.get("frozen_seeds")
    if frozen is not None and not (isinstance(frozen, list) and all(map(_whole, frozen))):
        return f"frozen_seeds is {frozen!r}, not a list of seeds"
    if not isinstance(row["notes"], list):
        return f"notes is {row['notes']!r}, not a list"
    if fault := _optional_fault(row):
        return fault
    if not isinstance(row["defined"], bool):
        return f"defined is {row['defined']!r}, not true or false"
    for key in ("nll", "excess_nll"):
        if not (row[key] is None or _number(row[key])):
            return f"{key} is {row[key]!r}, not a number"
    if row["defined"] != (row["nll"] is not None):
        return f"defined is {row['defined']}, but nll is {row['nll']!r}"
    if row["protocol"] == "per_position" and row["defined"]:
        start, stop = row.get("position_from"), row.get("position_to")
        if not (_whole(start) and _whole(stop)) or not 0 <= start < stop:  # type: ignore[operator]
            return f"the bucket of positions [{start!r}, {stop!r}) is empty or not a range"
    return _documents_fault(row) if row.get("document_nll") is not None else None


def _optional_fault(row: Row) -> str | None:
    """What is wrong with keys that a row may lack, or None: a report reads what they hold."""
    for key in _TABLES:
        if not isinstance(row.get(key), dict | None):
            return f"{key} is {row[key]!r}, not a JSON object"
    trained = row.get("trained_with") or {}
    if not isinstance(trained.get("versions"), dict | None):
        return f"trained_with.versions is {trained['versions']!r}, not a JSON object"
    for key in _COUNTS:
        if row.get(key) is not None and not _whole(row[key]):
            return f"{key} is {row[key]!r}, not a whole number"
    for key in ("train_flops", "train_seconds"):
        if row.get(key) is not None and not _number(row[key]):
            return f"{key} is {row[key]!r}, not a number"
    tuning = row.get("tuning")
    if tuning and (missing := [key for key in _TUNING if key not in tuning]):
        return f"tuning is without {', '.join(missing)}"
    for length, losses in (row.get("last_validations") or {}).items():
        known = isinstance(losses, list) and all(one is None or _number(one) for one in losses)
        if not (length.isdecimal() and known):
            return f"last_validations has {losses!r} at length {length!r}, not a list of losses"
    return None


def _documents_fault(row: Row) -> str | None:
    """What is wrong with a row's sums by document, or None."""
    parts = [row.get(f"document_{name}") for name in ("nll", "tokens", "index")]
    sizes = [len(part) if isinstance(part, list) else None for part in parts]
    if None in sizes or len(set(sizes)) > 1 or not sizes[0]:
        return "document_nll, document_tokens and document_index are not lists of one size"
    sums, tokens, _ = parts
    assert isinstance(sums, list)
    assert isinstance(tokens, list)
    numbers = [*sums, *tokens]
    if not all(map(_number, numbers)):
        return "document_nll or document_tokens holds what is no number"
    total = math.fsum(tokens)
    if min(tokens) < 0 or not 0 < total < math.inf:
        return "document_tokens are not counts of tokens"
    nll = row["nll"]
    if nll is None or not math.isfinite(nll) or not all(map(math.isfinite, sums)):
        return None
    mean = math.fsum(sums) / total
    if abs(mean - nll) > 1e-5 * max(1.0, abs(nll)):
        return f"nll is {nll!r}, but the sums by document give {mean!r}"
    return None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or isinstance(value, float)


def plain(value: Any) -> Any:
    """Make NumPy's scalars and arrays, and tuples, plain."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def encoded(value: Any) -> Any:
    """Make plain values fit for JSON, which has no word for what is not finite."""
    if isinstance(value, dict):
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _csv(rows: Sequence[Row]) -> str:
    flat = [dict(_flatten(row)) for row in rows]
    rank = {name: index for index, name in enumerate(COLUMNS)}

    def order(name: str) -> tuple[int, str]:
        return rank.get(name.split(".")[0], len(rank)), name

    buffer = io.StringIO()
    names = sorted({name for row in flat for name in row}, key=order)
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def _flatten(row: Row, prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", "; ".join(_text(item) for item in value)
        else:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    value = encoded(value)
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
