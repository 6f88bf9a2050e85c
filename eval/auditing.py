"""``python -m eval audit``: what is asked, measured and printed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from eval.audit import audit_model, audit_trained, check_lengths
from eval.audit_report import (
    draw_gradients,
    gradient_words,
    model_words,
    registry_words,
    trained_words,
)
from eval.evaluate import Row, evaluate, load_text
from eval.gradients import position_gradients
from eval.report.rows import encoded, plain
from eval.report.table import print_table
from posenc.encodings.registry import REGISTRY
from posenc.errors import UserError
from posenc.pretrained import ENCODING, load_gpt2
from posenc.runs import Run, load_model, open_run, provenance
from posenc.transformer import Transformer, preset

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Audit:
    """Say which weights know about position, what a longer context costs, and who teaches them."""

    model: str | None = None
    """A preset; with --encoding, or else as a table of all encodings."""
    encoding: str | None = None
    """A spec."""
    run: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN ...")] = ()
    """Folders of finished runs, instead of --model: their blocks are taken to a longer context."""
    pretrained: str | None = None
    """GPT-2 in the Hugging Face format, instead of --model: a folder, or a name on the hub."""
    lengths: tuple[int, ...] = ()
    """Context lengths, two or more; 1024 4096, or of a run its training length and 4 times that."""
    sharing: str | None = None
    """Of the preset's blocks: all (positions), none, or "groups(copies=8)"."""
    batch: int = 1
    """Sequences, for the cache and attention."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the preset's activations and cache."""
    position: int = 5000
    """Where trained blocks are sent tokens."""
    gradients: bool = False
    """Of runs: what each position adds to the gradients of shared matrices, and nothing else."""
    sequences: int = 16
    """Of test text, for --gradients."""
    report: Path = Path("report")
    """Where scores of runs are kept, and the figure of --gradients goes."""
    json: bool = False
    """One JSON object, and nothing else."""
    allow_plugins: bool = False
    """Import the code that an encoding names (module:Class), if you trust it."""


def audit(arguments: Audit) -> None:
    """Measure what was asked for, and print it.

    Raises:
        UserError: the arguments contradict each other, or name what is not there.
    """
    _check(arguments)
    # Whatever is said on the way is no part of the result.
    aside = contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()
    rows: list[Row] = []
    with aside:
        if arguments.gradients:
            found = [_gradients(run, arguments) for run in map(open_run, arguments.run)]
        elif arguments.run:
            found, rows = _runs(arguments)
        elif arguments.pretrained is not None:
            found = [_pretrained(arguments)]
        else:
            found = _presets(arguments)
    if arguments.json:
        result = {"audits": found, "losses": rows, "provenance": provenance()}
        print(json.dumps(encoded(plain(result)), allow_nan=False))
        return
    table = arguments.model is not None and arguments.encoding is None
    if table:
        print(registry_words(str(arguments.model), [item["model"] for item in found]))
        return
    for item in found:
        if "model" in item:
            print(model_words(item["title"], item["model"]))
        if "trained" in item:
            print(f"\n{trained_words(item['trained'])}")
        if "gradients" in item:
            print(f"{item['title']}: gradients of shared matrices, by position\n")
            print(gradient_words(item["gradients"]))
            print(f"\nfigure: {item['figure']}")
        print()
    if rows:
        print_table(rows)


def _check(arguments: Audit) -> None:
    named = [arguments.model is not None, bool(arguments.run), arguments.pretrained is not None]
    if sum(named) != 1:
        raise UserError(
            "audit takes one of --model PRESET, --run RUN ... and --pretrained FOLDER, and was "
            f"given {sum(named)} of them"
        )
    if arguments.model is None:
        for option in ("encoding", "sharing", "dtype"):
            value = getattr(arguments, option)
            if value is not None:
                raise UserError(f"--{option} {value} is for --model: a trained model has its own")
    if arguments.gradients and not arguments.run:
        raise UserError("--gradients are of a trained model on its test text: give --run RUN")
    if not 0 <= arguments.position < 2**30:
        raise UserError(f"--position is {arguments.position}: give 0 to {2**30 - 1}")
    if arguments.sequences < 1:
        raise UserError(f"--sequences is {arguments.sequences}: it must be at least 1")


def _presets(arguments: Audit) -> list[Found]:
    config = preset(str(arguments.model))
    config = dataclasses.replace(
        config,
        sharing=arguments.sharing or config.sharing,
        dtype=arguments.dtype or config.dtype,
    )
    encodings = list(REGISTRY) if arguments.encoding is None else [arguments.encoding]
    lengths = check_lengths(arguments.lengths or (1024, 4096))
    return [
        {
            "title": arguments.model,
            "model": audit_model(
                config,
                encoding,
                lengths,
                batch=arguments.batch,
                allow_plugins=arguments.allow_plugins,
            ),
        }
        for encoding in encodings
    ]


def _trained(
    title: str, model: Transformer, encoding: str, tokens: np.ndarray, arguments: Audit
) -> Found:
    own = model.context_length
    lengths = check_lengths(arguments.lengths or (own, 4 * own))
    plugins = arguments.allow_plugins
    return {
        "title": title,
        "model": audit_model(
            model.config, encoding, lengths, batch=arguments.batch, allow_plugins=plugins
        ),
        "trained": audit_trained(
            model, encoding, tokens, max(lengths), arguments.position, allow_plugins=plugins
        ),
    }


def _pretrained(arguments: Audit) -> Found:
    model = load_gpt2(str(arguments.pretrained))
    # Any tokens will do: what is looked at is whether their states change with the place.
    tokens = np.arange(min(64, model.context_length)) % model.config.vocab_size
    return _trained(str(arguments.pretrained), model, ENCODING, tokens, arguments)


def _runs(arguments: Audit) -> tuple[list[Found], list[Row]]:
    runs = [open_run(folder) for folder in dict.fromkeys(arguments.run)]
    models = [load_model(run, allow_plugins=arguments.allow_plugins) for run in runs]
    found = []
    for run, model in zip(runs, models, strict=True):
        tokens = _sequences(run, 1)[0, :-1]
        found.append(_trained(str(run.folder), model, run.config.encoding, tokens, arguments))
    lengths = {n for item in found for n in item["model"]["lengths"]}
    return found, _losses(runs, models, lengths, arguments)


def _losses(
    runs: list[Run], models: list[Transformer], lengths: set[int], arguments: Audit
) -> list[Row]:
    """Score runs within and beyond their training lengths, there by every way out that they have.

    Ways that only some of the encodings have are left out: all are scored on the same targets.
    """
    ladder = tuple(sorted(lengths | {run.config.train_length for run in runs}))
    ending = [
        part
        for model in models
        for part in model.encoding.parts
        if part.max_position is not None and part.max_position < max(ladder) and model.copies == 1
    ]
    ways = dict.fromkeys(way for part in ending for way in part.extensions)
    return evaluate(
        [run.folder for run in runs],
        ladder,
        arguments.report / "scores",
        extend=tuple(w for w in ways if all(w in part.extensions for part in ending)),
        allow_plugins=arguments.allow_plugins,
    )


def _sequences(run: Run, count: int) -> np.ndarray:
    """Give sequences of test text, one token longer than the training length: ``[N, T + 1]``.

    Documents take turns, each giving its next stretch.
    """
    size = run.config.train_length + 1
    documents = [d for d in load_text(run).documents if len(d) >= size]
    stretches = max((len(document) // size for document in documents), default=0)
    every = [
        document[turn * size : (turn + 1) * size]
        for turn in range(stretches)
        for document in documents
        if len(document) >= (turn + 1) * size
    ]
    if not every:
        raise UserError(
            f"no test document of {run.config.data!r} has {size} tokens, one more than the "
            f"training length of {run.folder}"
        )
    return np.stack(every[:count]).astype(np.int32)


def _gradients(run: Run, arguments: Audit) -> Found:
    model = load_model(run, allow_plugins=arguments.allow_plugins)
    tokens = _sequences(run, arguments.sequences)
    found = position_gradients(model, tokens)
    path = arguments.report / f"gradients-{run.name}.png"
    draw_gradients(found, path)
    return {
        "title": f"{run.folder} on {len(tokens)} sequences of its test text",
        "encoding": run.config.encoding,
        "sequences": len(tokens),
        "length": tokens.shape[1] - 1,
        "gradients": found,
        "figure": str(path),
    }
