"""In what rows differ besides the encoding, and whether they may stand in one report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from eval.report.rows import Row
from posenc.errors import UserError

# Rows that differ in one of these answer different questions: another text, other targets, another
# budget. Beside one another their numbers say nothing of encodings.
SAME = (
    *("data.name", "data.version", "data.sha256", "data.split_rule", "data.split_version"),
    *("data.tokenizer", "data.tokenizer_sha256", "data.bos", "bos", "train_tokens"),
    *("longest_length", "block_spacing", "blocks_per_document", "tokens_per_document"),
    *("dtype", "matmul_precision", "checkpoint", "mask_sha256"),
)
# Of some rows alone: runs that have none of these do not differ in it.
_WHERE_GIVEN = {"mask_sha256"}
# What differs from run to run, or with the encoding, and is shown elsewhere.
_EXPECTED = {
    *("run", "encoding", "seed", "config_hash", "recipe_hash", "parameters", "tuning", "settings"),
    *("train_flops", "train_seconds", "last_validations", "parent", "train_length"),
    "frozen_seeds",
}
# What is of a number and not of the run.
_OF_ROWS = {
    *("protocol", "length", "context", "targets", "blocks", "position_from", "position_to"),
    *("extend", "defined", "reason", "nll", "perplexity", "bits_per_byte", "reference_nll"),
    *("excess_nll", "tokens", "windows", "documents", "notes", "document_index", "document_nll"),
    *("document_tokens", "stride", "slice", "distance_from", "distance_to", "ngram"),
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """A fact in which runs differ.

    Attributes:
        name: of the fact, such as ``data.tokenizer``.
        values: each as text, with the runs that have it.
        forbidden: whether numbers of such runs cannot be compared.
    """

    name: str
    values: dict[str, tuple[str, ...]]
    forbidden: bool

    def __str__(self) -> str:
        """Give it in one line."""
        words = [
            f"{value} ({runs[0]}{' and others' if len(runs) > 1 else ''})"
            for value, runs in self.values.items()
        ]
        return f"{self.name}: {', '.join(words)}"


def differences(rows: Iterable[Row]) -> list[Difference]:
    """Give all in which the rows' runs differ besides the encoding and what follows from it."""
    facts: dict[str, dict[str, dict[str, None]]] = {}
    runs: dict[str, dict[str, Any]] = {}
    for row in rows:
        own = {k: v for k, v in row.items() if k not in _OF_ROWS and k not in _EXPECTED}
        # Rows of one run may come from several evaluations.
        runs.setdefault(f"{row['run']} {json.dumps(own, sort_keys=True, default=str)}", row)
    for row in runs.values():
        own = {k: v for k, v in row.items() if k not in _OF_ROWS and k not in _EXPECTED}
        for name, value in _flat(own):
            facts.setdefault(name, {}).setdefault(value, {})[row["run"]] = None
    found = []
    for name, values in facts.items():
        missing = {row["run"]: None for row in runs.values()}
        for known in values.values():
            for run in known:
                missing.pop(run, None)
        every = {value: tuple(known) for value, known in values.items()}
        if missing and name not in _WHERE_GIVEN:
            every["not given"] = tuple(missing)
        if len(every) > 1:
            found.append(Difference(name, every, name in SAME))
    return sorted(found, key=lambda one: (not one.forbidden, one.name))


def check_comparable(rows: Iterable[Row], *, allow_mixed: bool = False) -> list[Difference]:
    """Give what ``differences`` gives.

    Raises:
        UserError: numbers of these rows cannot be compared, and mixing them was not allowed.
    """
    found = differences(rows)
    forbidden = [one for one in found if one.forbidden]
    if forbidden and not allow_mixed:
        raise UserError(
            f"these rows cannot be compared; they differ in {'; '.join(map(str, forbidden))}: "
            "report them apart, or give --allow-mixed, which says so in the page"
        )
    return found


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
