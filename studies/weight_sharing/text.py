"""(a) and (c): text, at equal width and at an equal number of parameters."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import train
from eval.audit import count, parameter_shapes
from eval.evaluate import evaluate
from eval.results import Row
from posenc import data as datasets
from posenc.runs import open_run
from posenc.transformer import TransformerConfig, preset

MODEL, ENCODING, HEADS = "tiny", "rope", 2
SHARINGS = ("all", "groups(copies=8)", "none")
# Shares of the run after which models are scored.
SCORED = (1 / 8, 1 / 4, 1 / 2, 1)


def shape(sharing: str, width: int) -> TransformerConfig:
    """Give a model's shape."""
    return dataclasses.replace(
        preset(MODEL),
        vocab_size=datasets.tokenizer("bytes").vocab_size,
        width=width,
        heads=HEADS,
        sharing=sharing,
    )


def parameters(sharing: str, width: int, length: int) -> int:
    """Count a model's parameters, without making it."""
    return count(parameter_shapes(shape(sharing, width), ENCODING, length))


def narrowed(sharing: str, width: int, length: int) -> int:
    """Give the width at which a model has as many parameters as the shared one of ``width``.

    The nearest one of even head width.
    """
    wanted = parameters("all", width, length)
    widths = range(2 * HEADS, width + 1, 2 * HEADS)
    return min(widths, key=lambda w: abs(parameters(sharing, w, length) - wanted))


def variants(width: int, length: int) -> list[tuple[str, int]]:
    """Give every model that is compared: how it shares, and its width."""
    narrow = [(sharing, narrowed(sharing, width, length)) for sharing in SHARINGS[1:]]
    return [(sharing, width) for sharing in SHARINGS] + narrow


def trained(study: Any, sharing: str, width: int, rate: float, **settings: Any) -> list[Path]:
    """Train a model with some seeds, and give its runs."""
    return train.main(
        train.Arguments(
            encoding=(ENCODING,),
            model=MODEL,
            heads=HEADS,
            width=width,
            sharing=sharing,
            data=study.data,
            train_length=study.length,
            batch_size=study.batch_size,
            learning_rate=rate,
            **settings,
        )
    )


def best_rate(study: Any, sharing: str, width: int) -> float:
    """Give the rate with the lowest validation loss after a quarter of the steps, with one seed."""
    losses = {}
    steps = study.steps // 4
    for rate in study.rates:
        (folder,) = trained(
            study,
            sharing,
            width,
            rate,
            steps=steps,
            seed=study.seeds[:1],
            eval_every=steps,
            checkpoint_every=steps,
            out=study.out / "rates" / f"{rate:g}" / f"width-{width}",
        )
        loss = open_run(folder).checkpoints.valid_loss(steps)
        losses[rate] = math.inf if loss is None else loss
    return min(losses, key=lambda rate: losses[rate])


def run(study: Any) -> list[Row]:
    """Train every model with every seed at its own best rate, and give the rows of all."""
    rows: list[Row] = []
    for sharing, width in variants(study.width, study.length):
        rate = best_rate(study, sharing, width)
        folders = trained(
            study,
            sharing,
            width,
            rate,
            steps=study.steps,
            seed=study.seeds,
            eval_every=study.steps // 8,
            checkpoint_every=study.steps // 8,
            keep=8,
            out=study.out / "runs" / f"{rate:g}" / f"width-{width}",
        )
        for share in SCORED:
            scores = scored(study, folders, width, round(share * study.steps))
            rows += [{**row, "learning_rate": rate} for row in scores]
    return rows


def scored(study: Any, folders: list[Path], width: int, step: int) -> list[Row]:
    """Score runs at one step; by position only at the last."""
    rows = evaluate(
        folders,
        (study.length,),
        study.out / "scores",
        tokens_per_document=study.tokens_per_document,
        checkpoint=step,
    )
    last = step == study.steps
    return [{**row, "width": width} for row in rows if last or row["protocol"] != "per_position"]
