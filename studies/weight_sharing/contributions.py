"""The signal: how many positions of one sequence add to the gradient of a weight.

Every copy of a block's weights is copied again, one for each position that uses it. The gradients
of these are what the positions add to the copy's own (their sum, as tests/test_sharing.py holds),
and those that are not zero are counted.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from eval.report.rows import Row
from posenc import data as datasets
from posenc.runs import provenance
from posenc.training import mean_nll, split
from posenc.transformer import Transformer
from studies.weight_sharing import text
from studies.weight_sharing.facts import as_batch, whole


def per_weight(model: Transformer, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Count the contributions that each weight of the blocks gets from one sequence.

    Args:
        model: built for T tokens, with C copies of its blocks.
        tokens: ``[T + 1]``, token ids.

    Returns:
        By name, counts ``[C, ...]`` of the shape of all copies.
    """
    length, copies = model.context_length, model.copies
    apart = dataclasses.replace(model.config, sharing="none")
    merge, shapes = split(Transformer(apart, text.ENCODING, length))
    own = {
        name: np.repeat(
            np.asarray(value).reshape(copies, *shapes[name].shape[1:]), length // copies, 0
        )
        if name.startswith("blocks.")
        else value
        for name, value in split(model)[1].items()
    }
    gradient = jax.jit(jax.grad(lambda p: mean_nll(merge(p), as_batch(tokens[None]))))(own)
    return {
        name: (np.asarray(value) != 0).reshape(copies, -1, *value.shape[1:]).sum(axis=1)
        for name, value in gradient.items()
        if name.startswith("blocks.")
    }


def measure(study: Any) -> list[Row]:
    """Give a row for each way of sharing: contributions to a weight, before training."""
    corpus, tokenizer = datasets.load(study.data), datasets.tokenizer("bytes")
    stream = datasets.TokenStream(datasets.split(corpus, "valid"), tokenizer, "document")
    tokens = whole(datasets.fixed_windows(stream, study.length, 1))[0]
    rows = []
    for sharing in text.SHARINGS:
        model = Transformer(text.shape(sharing, study.width), text.ENCODING, study.length)
        counts = np.concatenate([c.ravel() for c in per_weight(model, tokens).values()])
        rows.append(
            {
                "schema": 1,
                "run": f"contributions-{sharing}",
                "encoding": text.ENCODING,
                "model": text.MODEL,
                "width": study.width,
                "sharing": sharing,
                "protocol": "contributions",
                "length": study.length,
                "extend": None,
                "defined": False,
                "reason": "no loss is measured",
                "nll": None,
                "excess_nll": None,
                "notes": [],
                "seed": 0,
                "train_length": study.length,
                "train_tokens": 0,
                "dtype": model.config.dtype,
                "contributions_median": float(np.median(counts)),
                "contributions_mean": float(np.mean(counts)),
                "contributions_most": int(counts.max()),
                "data": datasets.identity(corpus, tokenizer, "document"),
                **provenance(),
            }
        )
    return rows
