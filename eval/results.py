"""Scores into result rows, each with its birth certificate."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from eval.controls import CONTROLS, ForeignPrefix
from eval.passes import PLAIN, Pass
from eval.protocols import (
    NllByContext,
    NonOverlapping,
    PerPosition,
    Scores,
    Settings,
    Sliding,
)
from eval.slices import Slices, edges_of
from eval.texts import TestText, no_foreign
from posenc import data as datasets
from posenc.errors import UserError
from posenc.runs import Run, provenance, recipe_hash

SCHEMA = 1
Row = dict[str, Any]
# Rows of the primary protocol's tokens by what they need.
SLICE = "slice"
# Of a run that has the settings which all runs share.
SHARED: Row = {"settings": "shared", "tuning": None}


def run_certificate(run: Run, step: int, seed: int | None = None) -> Row:
    """Give what every row says of the run that it comes from, and of what measures it now.

    Args:
        run: whose.
        step: of the checkpoint.
        seed: which, of a run that trained several at once.
    """
    start, config = run.last_start, run.config
    made = json.loads((run.folder / "provenance.json").read_text())
    tokens, cost = step * config.batch_size * config.train_length, made.get("flops_a_token")
    return {
        "run": run.name,
        "encoding": config.encoding,
        "model": config.preset,
        "sharing": config.model.sharing,
        # How windows get them, in training and, as the options say, in evaluation.
        "positions": config.positions,
        "lengths": config.lengths,
        "packing": config.packing,
        "parameters": made["parameters"],
        "seed": config.seed if seed is None else seed,
        # What was fixed for all seeds, instead of following the seed.
        "fixed_seeds": {
            kind: fixed
            for kind in ("init", "data", "encoding")
            if (fixed := getattr(config, f"{kind}_seed")) is not None
        },
        # Whose weights it began with.
        "parent": None if config.parent is None else dataclasses.asdict(config.parent),
        "train_tokens": tokens,
        # Of one seed; the seconds are of all those that were trained at once.
        "train_flops": None if cost is None else cost * tokens,
        "train_seconds": run.seconds(step),
        "seeds_at_once": config.seeds,
        "train_length": config.train_length,
        "checkpoint": "last" if step == config.steps else "chosen",
        "checkpoint_step": step,
        "data": run.data,
        "config_hash": run.hash,
        "recipe_hash": recipe_hash(config),
        "trained_with": {
            key: start[key] for key in ("commit", "dirty", "versions", "device", "matmul_precision")
        },
        "dtype": config.model.dtype,
        **provenance(),
    }


def row_certificate(
    run: Run, step: int, settings: Settings, seed: int, frozen: Collection[int]
) -> Row:
    """Give what every row of an evaluation says: its run, what measures it, and the settings."""
    return {
        "schema": SCHEMA,
        **run_certificate(run, step, seed),
        # Of the run's seeds, those that diverged and have no row: rates of success count them.
        "frozen_seeds": sorted(frozen),
        "bos": settings.bos,
        # What decides which tokens are scored, beside the length.
        "longest_length": max(settings.lengths),
        "block_spacing": settings.spacing,
        "blocks_per_document": settings.blocks,
        "tokens_per_document": settings.tokens_per_document,
    }


def tuned_of(tuning: Path | None) -> dict[str, list[Row]]:
    """Read what each run of a sweep is, by name: of the shared settings, of its tuned ones, both.

    Raises:
        UserError: the file cannot be read.
    """
    if tuning is None:
        return {}
    try:
        runs = json.loads(tuning.read_text())["runs"]
        return {name: [{**SHARED, **role} for role in roles] for name, roles in runs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{tuning} cannot be read as a sweep's tuning ({error!r}): give the tuning.json that "
            "python -m studies run wrote"
        ) from None


def _empty(length: int, extend: str | None, reason: str | None) -> Row:
    return {
        "length": length,
        "context": None,
        "targets": None,
        "blocks": None,
        "position_from": None,
        "position_to": None,
        "extend": extend,
        "defined": reason is None,
        "reason": reason,
        "nll": None,
        "perplexity": None,
        "bits_per_byte": None,
        "reference_nll": None,
        "excess_nll": None,
        "tokens": 0,
        "windows": 0,
        "documents": 0,
        "notes": [],
    }


def _bits_per_byte(
    row: Row, scored: list[np.ndarray], tokenizer: datasets.Tokenizer
) -> float | None:
    """Give a row's loss by the bytes of the very tokens that it is of; None where they have none.

    A slice, whose tokens are here and there, has no such number.

    Args:
        row: that a protocol gave.
        scored: token ids of each window from the first that is scored on, place 1 where rows are of
            a bucket of places.
        tokenizer: that made them.
    """
    if "slice" in row:
        return None
    if "position_from" in row:
        bucket = slice(row["position_from"] - 1, row["position_to"] - 1)
        scored = [window[bucket] for window in scored]
    ids = np.concatenate(scored)
    count = tokenizer.count_bytes(ids)
    return row["nll"] / math.log(2) * len(ids) / count if count else None


def undefined_rows(one: Pass, settings: Settings) -> list[Row]:
    """Give the rows of a pass that has no score, with the reason."""
    length = one.job.length
    context = {"context": length - settings.targets, "targets": settings.targets}
    # A curve by position, and windows that slide, are of the lengths that there are.
    names = [name for name in one.plans if name not in (PerPosition.name, Sliding.name)]
    return [
        {
            "protocol": name,
            **_empty(length, one.job.extend, one.undefined),
            **(context if name != NonOverlapping.name else {}),
        }
        for name in names
        if one.plans[name] or name not in CONTROLS
    ]


def scored_rows(
    one: Pass,
    scores: Scores,
    text: TestText,
    slices: Slices | None,
    settings: Settings,
    *,
    by_position: bool,
) -> list[Row]:
    """Reduce one pass's scores by every protocol."""
    by_window = dict(zip(scores.windows, scores.by_window(), strict=True))
    rows = []
    for name, windows in one.plans.items():
        if name == ForeignPrefix.name and one.job.length > settings.train_length and not windows:
            none = _empty(one.job.length, one.job.extend, no_foreign(settings))
            context = {"context": one.job.length - settings.targets, "targets": settings.targets}
            rows.append({"protocol": name, **none, **context})
        if not windows or (name == PerPosition.name and not by_position):
            continue
        chosen = Scores(windows, np.concatenate([by_window[w] for w in windows]))
        reduced = (PLAIN | CONTROLS)[name].reduce(chosen, one.job.length, settings)
        if name == NllByContext.name and slices is not None:
            edges = edges_of(settings.train_length, max(settings.lengths))
            reduced += [{"protocol": SLICE, **row} for row in slices.rows(chosen, edges)]
        held = (window.tokens(text.documents, text.bos)[window.first :] for window in windows)
        scored = [tokens.copy() for tokens in held]  # without the context
        for row in reduced:
            nll = row["nll"]
            rows.append(
                {
                    "protocol": name,
                    **_empty(one.job.length, one.job.extend, None),
                    **row,
                    "perplexity": math.inf if nll > 700 else math.exp(nll),
                    "bits_per_byte": _bits_per_byte(row, scored, text.tokenizer),
                }
            )
    return rows


def refer(rows: list[Row], train_length: int) -> None:
    """Fill in each row's excess over the lowest loss at any length up to the training length.

    The lowest, not the one at the training length, which may already suffer; of the model as it was
    trained, not as an extension policy made it.
    """
    for protocol in {row["protocol"] for row in rows} - {PerPosition.name, SLICE}:
        # A control changes nothing about what the model is measured against.
        base = NllByContext.name if protocol in CONTROLS else protocol
        within = [
            row["nll"]
            for row in rows
            if row["protocol"] == base
            and row["defined"]
            and row["length"] <= train_length
            and row["extend"] is None
            and math.isfinite(row["nll"])
        ]
        for row in rows:
            if within and row["protocol"] == protocol and row["defined"]:
                row["reference_nll"] = min(within)
                row["excess_nll"] = row["nll"] - min(within)
