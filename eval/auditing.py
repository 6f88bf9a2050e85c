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
    figure_numbers,
    gradient_words,
    model_words,
    registry_words,
    trained_words,
)
from eval.evaluate import evaluate
from eval.gradients import position_gradients
from eval.report.rows import encoded, plain, write_file
from eval.report.table import print_table
from eval.results import Row, run_certificate
from eval.texts import load_text
from posenc.encodings.base import EncodingError
from posenc.encodings.registry import examples
from posenc.errors import UserError
from posenc.pretrained import ENCODING, load_gpt2
from posenc.runs import Run, load_model, open_run, provenance
from posenc.sharing import copies_of
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
    batch: int | None = None
    """Sequences, for the cache and attention; 1 unless given."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the preset's activations and cache."""
    position: int | None = None
    """Where the first of the tokens stands that trained blocks are sent; 5000 unless given."""
    gradients: bool = False
    """Of runs: what each position adds to the gradients of shared matrices, and nothing else."""
    sequences: int | None = None
    """Of test text, for --gradients; 16 unless given."""
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
    rows: list[Row] = []
    unmeasured: str | None = None
    # Whatever is said on the way is no part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        if arguments.gradients:
            found = _gradients(arguments)
        elif arguments.run:
            found, rows, unmeasured = _runs(arguments)
        elif arguments.pretrained is not None:
            found = [_pretrained(arguments)]
        else:
            found = _presets(arguments)
    if arguments.json:
        result: Found = {"audits": found, "losses": rows, "unmeasured": unmeasured}
        result |= {"provenance": provenance()}
        print(json.dumps(encoded(plain(result)), allow_nan=False))
        return
    table = arguments.model is not None and arguments.encoding is None
    if table:
        print(registry_words(str(arguments.model), [i["model"] for i in found if "model" in i]))
        for item in found:
            if "refused" in item:
                print(f"{item['encoding']}: {item['refused']}")
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
    if unmeasured is not None:
        print(f"losses were not measured: {unmeasured}")


def _check(arguments: Audit) -> None:
    named = [arguments.model is not None, bool(arguments.run), arguments.pretrained is not None]
    if sum(named) != 1:
        raise UserError(
            "audit takes one of --model PRESET, --run RUN ... and --pretrained FOLDER, and was "
            f"given {sum(named)} of them"
        )
    if arguments.gradients and not arguments.run:
        raise UserError("--gradients are of a trained model on its test text: give --run RUN")
    trained = arguments.model is None
    gradients = arguments.gradients
    for idle, options, why in (
        (trained, ("encoding", "sharing", "dtype"), "a trained model has its own"),
        (gradients, ("lengths", "batch"), "gradients are taken at the training length"),
        (not trained or gradients, ("position",), "it is where trained blocks are sent tokens"),
        (not gradients, ("sequences",), "it is the number of sequences for --gradients"),
    ):
        for option in options:
            if idle and (value := getattr(arguments, option)) not in (None, ()):
                words = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise UserError(f"--{option} {words} would do nothing here: {why}")
    if not 0 <= _position(arguments) < 2**30:
        raise UserError(f"--position is {arguments.position}: give 0 to {2**30 - 1}")
    for option, least in (("batch", 1), ("sequences", 1)):
        if (value := getattr(arguments, option)) is not None and value < least:
            raise UserError(f"--{option} is {value}: it must be at least {least}")


def _position(arguments: Audit) -> int:
    return 5000 if arguments.position is None else arguments.position


def _presets(arguments: Audit) -> list[Found]:
    config = preset(str(arguments.model))
    config = dataclasses.replace(
        config,
        sharing=config.sharing if arguments.sharing is None else arguments.sharing,
        dtype=arguments.dtype or config.dtype,
    )
    lengths = check_lengths(arguments.lengths or (1024, 4096))
    for length in lengths:
        copies_of(config.sharing, length)

    def of(encoding: str) -> Found:
        plugins = arguments.allow_plugins
        found = audit_model(
            config, encoding, lengths, batch=arguments.batch or 1, allow_plugins=plugins
        )
        return {"title": arguments.model, "model": found}

    if arguments.encoding is not None:
        return [of(arguments.encoding)]
    every: list[Found] = []
    for name, spec in examples().items():
        try:
            every.append(of(spec))
        except EncodingError as error:  # one that needs an option, or does not suit the preset
            every.append({"title": arguments.model, "encoding": name, "refused": str(error)})
    return every


def _trained(
    title: str, model: Transformer, encoding: str, tokens: np.ndarray, arguments: Audit
) -> Found:
    own = model.context_length
    lengths = check_lengths(arguments.lengths or (own, 4 * own))
    plugins = arguments.allow_plugins
    return {
        "title": title,
        "model": audit_model(
            model.config, encoding, lengths, batch=arguments.batch or 1, allow_plugins=plugins
        ),
        "trained": audit_trained(
            model, encoding, tokens, max(lengths), _position(arguments), allow_plugins=plugins
        ),
    }


def _pretrained(arguments: Audit) -> Found:
    model = load_gpt2(str(arguments.pretrained))
    # Any tokens will do: what is looked at is whether their states change with the place.
    tokens = np.arange(min(64, model.context_length)) % model.config.vocab_size
    return _trained(str(arguments.pretrained), model, ENCODING, tokens, arguments)


def _runs(arguments: Audit) -> tuple[list[Found], list[Row], str | None]:
    runs = [open_run(folder) for folder in dict.fromkeys(arguments.run)]
    models = [
        load_model(run, seed=run.config.seed, allow_plugins=arguments.allow_plugins) for run in runs
    ]
    found = []
    for run, model in zip(runs, models, strict=True):
        tokens = _sequences(run, 1)[0, :-1]
        item = _trained(str(run.folder), model, run.config.encoding, tokens, arguments)
        found.append({**item, "certificate": run_certificate(run, run.config.steps)})
    lengths = {n for item in found for n in item["model"]["lengths"]}
    try:
        return found, _losses(runs, models, lengths, arguments), None
    except UserError as error:  # too little text for such lengths, say: all else is known
        return found, [], str(error)


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

    They are spread evenly over all stretches of all documents, whose beginnings are often alike.
    """
    size = run.config.train_length + 1
    every = [
        document[start : start + size]
        for document in load_text(run).documents
        for start in range(0, len(document) - size + 1, size)
    ]
    if not every:
        raise UserError(
            f"no test document of {run.config.data!r} has {size} tokens, one more than the "
            f"training length of {run.folder}"
        )
    count = min(count, len(every))
    chosen = [every[(2 * k + 1) * len(every) // (2 * count)] for k in range(count)]
    return np.stack(chosen).astype(np.int32)


def _gradients(arguments: Audit) -> list[Found]:
    runs = [open_run(folder) for folder in dict.fromkeys(arguments.run)]
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"two runs are called {name}, and a figure each goes to {arguments.report}: give "
                "them one at a time, each with a --report of its own"
            )
    every = []
    for run in runs:
        model = load_model(run, seed=run.config.seed, allow_plugins=arguments.allow_plugins)
        tokens = _sequences(run, arguments.sequences or 16)
        found = position_gradients(model, tokens)
        item = {
            "title": f"{run.folder} on {len(tokens)} sequences of its test text",
            "certificate": run_certificate(run, run.config.steps),
            "sequences": len(tokens),
            "length": tokens.shape[1] - 1,
            "gradients": found,
            "figure": str(arguments.report / f"gradients-{run.name}.png"),
        }
        every.append(item)
        shown = {**item, "gradients": figure_numbers(found)}
        path = Path(str(item["figure"]))
        words = json.dumps(encoded(plain(shown)), allow_nan=False)
        write_file(path.with_suffix(".json"), words.encode())
        draw_gradients(shown["gradients"], path)
    return every
