"""(b): facts taught at some places of the window, and asked for at all of them.

A fact is three bytes in ordinary text: a mark, a capital letter, and the small letter that belongs
to it by a permutation fixed for all models. In training facts stand in the taught runs of places
alone; a test asks for the small letter at every place. The place of a fact is that of its capital
letter: the weights there give the answer, and those of the place before read the mark.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.report.rows import Row, plain, write_file
from posenc import data as datasets
from posenc.optimizer import OptimizerConfig
from posenc.progress import reporting
from posenc.runs import provenance, source_hash
from posenc.sharing import canonical_sharing
from posenc.training import Trainer
from posenc.transformer import Transformer, count_parameters
from studies.weight_sharing import text

SHARINGS = ("all", "groups(copies=2)", "groups(copies=8)", "none")
MARK = 1  # occurs in no text
ASKED = np.arange(ord("A"), ord("Z") + 1)
ANSWERS = np.random.default_rng(0).permutation(np.arange(ord("a"), ord("z") + 1))
PROTOCOL = "facts_by_place"
# Windows of a test, at each place: each fact so many times.
ASKINGS = 4


def taught_runs(length: int) -> list[range]:
    """Give the places where facts are taught: the first and the third quarter of the window.

    Without the first place of each, where the mark would stand outside.
    """
    quarter = length // 4
    return [range(1, quarter), range(2 * quarter + 1, 3 * quarter)]


def plant(tokens: np.ndarray, places: np.ndarray, which: np.ndarray) -> None:
    """Write a fact into each row of ``[B, T + 1]`` tokens, at a place of its own."""
    rows = np.arange(len(tokens))
    tokens[rows, places - 1] = MARK
    tokens[rows, places] = ASKED[which]
    tokens[rows, places + 1] = ANSWERS[which]


def as_batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Give a batch whose rows are one segment each, with positions from 0."""
    inputs = tokens[:, :-1]
    return {
        "inputs": inputs,
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape),
        "segments": np.ones_like(inputs),
        "mask": np.ones(inputs.shape, bool),
    }


def whole(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Give the tokens ``[B, T + 1]`` of a batch."""
    return np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)


def taught_batch(batches: datasets.Batches, seed: int, step: int) -> dict[str, np.ndarray]:
    """Give a training batch, with a fact in each taught run of every row."""
    tokens = whole(batches[step])
    draw = np.random.default_rng([seed, step])
    for run in taught_runs(tokens.shape[1] - 1):
        places = draw.integers(run.start, run.stop, len(tokens))
        plant(tokens, places, draw.integers(0, len(ASKED), len(tokens)))
    return as_batch(tokens)


def train_one(study: Any, sharing: str, seed: int, batches: datasets.Batches) -> Transformer:
    """Train a model on text with facts."""
    model = Transformer(text.shape(sharing, study.width), text.ENCODING, study.length, seed=seed)
    config = OptimizerConfig(study.fact_rate)
    trainer = Trainer(model, config, study.fact_steps, seed)
    state = trainer.start()
    with reporting(f"facts, sharing {sharing}, seed {seed}", study.fact_steps) as report:
        for step in range(study.fact_steps):
            state, values = trainer.step(state, taught_batch(batches, seed, step))
            if step % 20 == 19:
                report.update(step + 1, f"loss {float(values['loss']):.3f},")
    return trainer.merge(state["parameters"])


def ask(model: Transformer, windows: np.ndarray) -> list[dict[str, Any]]:
    """Ask for every fact at every place of some windows ``[26 n, T + 1]``."""
    which = np.arange(len(windows)) % len(ASKED)

    @jax.jit
    def answers(tokens: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = as_batch(windows)
        hidden, _ = model.hidden(tokens[:, :-1], batch["positions"], batch["segments"])
        logits = model.logits(hidden[:, place])
        nll = jax.nn.logsumexp(logits, -1) - logits[jnp.arange(len(which)), ANSWERS[which]]
        return nll, jnp.argmax(logits, -1) == ANSWERS[which]

    asked = []
    for place in range(1, windows.shape[1] - 1):
        tokens = windows.copy()
        plant(tokens, np.full(len(tokens), place), which)
        nll, right = answers(jnp.asarray(tokens), place)
        asked.append(
            {
                "place": place,
                "nll": float(np.mean(np.asarray(nll, np.float64))),
                "accuracy": float(np.mean(np.asarray(right))),
                "tokens": len(which),
            }
        )
    return asked


def run(study: Any) -> list[Row]:
    """Train and ask every model with every seed; what was asked before is read again."""
    corpus, tokenizer = datasets.load(study.data), datasets.tokenizer("bytes")
    stream = {
        name: datasets.TokenStream(datasets.split(corpus, name), tokenizer, "document")
        for name in ("train", "test")
    }
    count = ASKINGS * len(ASKED)
    windows = whole(datasets.fixed_windows(stream["test"], study.length, count))
    windows = windows[: len(windows) // len(ASKED) * len(ASKED)]
    taught = [place for run in taught_runs(study.length) for place in run]
    identity = datasets.identity(corpus, tokenizer, "document")
    rows: list[Row] = []
    for sharing in SHARINGS:
        for seed in study.seeds:
            batches = datasets.Batches(
                datasets.Windows(stream["train"], study.length), study.batch_size, seed
            )
            certificate = {
                "schema": 1,
                "run": f"facts-{canonical_sharing(sharing, study.length)}-seed{seed}",
                "encoding": text.ENCODING,
                "model": text.MODEL,
                "width": study.width,
                "sharing": canonical_sharing(sharing, study.length),
                "protocol": PROTOCOL,
                "length": study.length,
                "extend": None,
                "defined": True,
                "reason": None,
                "excess_nll": None,
                "notes": [],
                "seed": seed,
                "train_length": study.length,
                "train_tokens": study.fact_steps * study.batch_size * study.length,
                "batch_size": study.batch_size,
                "steps": study.fact_steps,
                "learning_rate": study.fact_rate,
                "optimizer": dataclasses.asdict(OptimizerConfig(study.fact_rate)),
                "dtype": text.shape(sharing, study.width).dtype,
                "taught_places": taught,
                "askings": ASKINGS,
                "data": identity,
            }
            rows += _finished(study, certificate, sharing, seed, batches, windows, taught)
    return rows


def _finished(
    study: Any,
    certificate: Row,
    sharing: str,
    seed: int,
    batches: datasets.Batches,
    windows: np.ndarray,
    taught: list[int],
) -> list[Row]:
    """Give a model's rows: those kept, if the same code made them here of the same settings."""
    here = provenance()
    code = source_hash([__file__, text.__file__])
    key = {**certificate, "code": code, "versions": here["versions"], "device": here["device"]}
    kept = study.out / "facts" / f"{certificate['run']}.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        if found["key"] == key:
            print(f"{kept}: finished before, left as it is")
            return found["rows"]
    model = train_one(study, sharing, seed, batches)
    rows = [
        {
            **certificate,
            "parameters": count_parameters(model),
            **here,
            **asked,
            "position_from": asked["place"],
            "position_to": asked["place"] + 1,
            "taught": asked["place"] in taught,
        }
        for asked in ask(model, windows)
    ]
    write_file(kept, json.dumps(plain({"key": key, "rows": rows})).encode())
    return rows
