"""Runs into result rows: what is asked is planned, scored and reduced."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Collection
from pathlib import Path

import jax
from flax import nnx

from eval.controls import CONTROLS, ForeignPrefix
from eval.mechanism import (
    LONGEST,
    kept_read_out,
    learned_over_training,
    read_out,
    some_windows,
    write_read_outs,
)
from eval.passes import PLAIN, Job, Pass, check_policies, draws_positions, jobs_of, passes_of
from eval.protocols import Bos, NllByContext, Protocol, Settings, check_ladder
from eval.results import SHARED, Row, refer, row_certificate, scored_rows, tuned_of, undefined_rows
from eval.scoring import BATCH_TOKENS, Scorer, extended_model, score_plan
from eval.slices import Slices, read_mask
from eval.texts import TestText, check_foreign, check_text, load_text
from posenc.encodings.base import PositionalEncoding
from posenc.encodings.registry import Part, canonical_part, make_sampler, nearest, parse_part
from posenc.errors import UserError
from posenc.progress import reporting
from posenc.runs import Member, Run, load_model, open_run, source_hash
from posenc.transformer import DType, Transformer


def _code(model: Transformer) -> str:
    """Give a hash of the code that scores depend on: posenc's own and that of plug-ins."""
    inner = (part for _, part in nnx.iter_graph(model.encoding))
    files = {inspect.getsourcefile(type(p)) for p in inner if isinstance(p, PositionalEncoding)}
    return source_hash(file for file in files if file)


def score_run(
    run: Run,
    text: TestText,
    settings: Settings,
    protocols: list[Protocol],
    policies: list[Part],
    slices: Slices | None,
    store: Path,
    *,
    step: int,
    member: Member,
    dtype: DType,
    batch_tokens: int,
    allow_plugins: bool,
    probe: int = 0,
    frozen: Collection[int] = (),
) -> list[Row]:
    """Score a seed of a run at every length, as it is and by every policy that it needs."""
    model = load_model(run, step, seed=member.seed, dtype=dtype, allow_plugins=allow_plugins)
    sampler = make_sampler(run.config.positions)
    settings = dataclasses.replace(settings, train_length=run.config.train_length)
    passes = passes_of(
        model,
        jobs_of(model, settings.lengths, policies, sampler),
        protocols,
        [len(document) for document in text.documents],
        settings,
        with_bos=run.config.bos == "document",
        drawn=draws_positions(sampler, run.config.train_length),
    )
    scored = [one for one in passes if one.undefined is None]
    plain = [one.job for one in scored if one.positions is None]
    # The curve by position is drawn once, at the longest length that there is (lengths ascend).
    longest = {job.policy: job.length for job in plain}
    certificate = {**row_certificate(run, step, settings, member.seed, frozen), "dtype": dtype}
    identity = {
        "weights": json.loads((run.checkpoints.folder / f"{step}.json").read_text())["files"],
        "config": run.hash,
        "data": run.data,
        "code": _code(model),
        "versions": certificate["versions"],
        "precision": certificate["matmul_precision"],
        "dtype": dtype,
        "device": certificate["device"],
    }
    name = run.name
    if run.config.seeds > 1:
        identity["seed"] = member.seed
        name += f", seed {member.seed}"
    rows: list[Row] = []
    done, total = 0, sum(w.length for one in scored for w in one.windows)
    with reporting(f"score {name}", total) as report:
        for one in passes:
            job = one.job
            if one.undefined is not None:
                rows += undefined_rows(one, settings)
                continue

            def make_scorer(one: Pass = one, job: Job = job) -> Scorer:
                long = (
                    model if job.policy is None else extended_model(model, job.policy, job.length)
                )
                return Scorer(long, one.places, batch_tokens, sampler, member.data, one.positions)

            def progress(places: int, kept: bool, job: Job = job) -> None:
                nonlocal done
                done += places
                note = f"tokens, at length {job.length},"
                report.update(done, note, places if kept else 0)

            told = None if one.positions is None else one.positions.tolist()
            scores = score_plan(
                make_scorer,
                one.windows,
                text.documents,
                text.bos,
                store,
                {**identity, "extend": job.extend, "length": job.length, "positions": told},
                progress,
            )
            by_position = job.length == longest.get(job.policy)
            rows += scored_rows(one, scores, text, slices, settings, by_position=by_position)
    refer(rows, run.config.train_length)
    if probe:
        _probe(model, run, text, settings, plain, store, member, probe, identity)
    for row in rows:
        if row["protocol"] == NllByContext.name:
            row["last_validations"] = run.last_validations(step, member.seed)
    return [{**certificate, **row} for row in rows]


def _probe(
    model: Transformer,
    run: Run,
    text: TestText,
    settings: Settings,
    jobs: list[Job],
    store: Path,
    member: Member,
    count: int,
    identity: Row,
) -> None:
    """Read out how a seed of a run attends at every length, and write it beside the rows."""
    sampler, found = make_sampler(run.config.positions), {}
    lengths = sorted({job.length for job in jobs if job.policy is None})
    for length in lengths:
        if length > LONGEST:
            print(f"{run.name}: --probe leaves out length {length}: it reads up to {LONGEST}")
            continue
        windows = some_windows(text.documents, text.bos, length, settings, count)
        found[length] = kept_read_out(
            functools.partial(read_out, model, windows, settings.targets, sampler, member.data),
            windows,
            settings.targets,
            store,
            identity,
        )
    several = run.config.seeds > 1
    learned = learned_over_training(run.folder, member.seed if several else None)
    name = f"{run.name}-seed{member.seed}" if several else run.name
    write_read_outs(store.parent, name, found, learned)


def evaluate(
    folders: list[Path],
    lengths: tuple[int, ...],
    store: Path,
    *,
    bos: Bos = "keep",
    extend: tuple[str, ...] = (),
    controls: tuple[str, ...] = (),
    stride: int | None = None,
    ngram: int = 0,
    mask: Path | None = None,
    targets: int | None = None,
    blocks: int = 16,
    tokens_per_document: int = 16_384,
    checkpoint: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    dtype: DType | None = None,
    matmul_precision: str | None = None,
    tuning: Path | None = None,
    probe: int = 0,
    allow_plugins: bool = False,
) -> list[Row]:
    """Score runs on identical targets and give their rows.

    Args:
        folders: of finished runs.
        lengths: the ladder of window lengths.
        store: folder of the scores, which make an interrupted evaluation go on.
        bos: see ``Settings``.
        extend: extension policies: each run is scored a second time under each of them, at the
            lengths that it says something about.
        controls: by name, of ``CONTROLS``.
        stride: of sliding windows; none without it.
        ngram: n, by whose last occurrence targets are sorted into slices; 0 is no slices.
        mask: a file that says which tokens of the test documents need long context.
        targets: tokens of a block; an eighth of the shortest training length unless told otherwise.
        blocks: of a document, at most.
        tokens_per_document: for the non-overlapping windows.
        checkpoint: the step to score; the last one unless told otherwise.
        batch_tokens: places of a batch.
        dtype: of activations; that of training unless told otherwise.
        matmul_precision: of matrix products, JAX's name for it; ``highest`` in float32 and the
            device's own in bfloat16 unless told otherwise.
        tuning: a sweep's file that says which runs have tuned settings.
        probe: windows of each length in which to read out how models attend; arrays are written
            into the folder ``mechanism`` beside the store.
        allow_plugins: whether code that a run's config names may be imported.

    Raises:
        UserError: a folder is no finished run, a length cannot be evaluated, or nothing at all can
            be scored.
    """
    for name, value in (
        ("blocks", blocks),
        ("tokens-per-document", tokens_per_document - 1),
        ("batch-tokens", batch_tokens),
    ):
        if value < 1:
            raise UserError(f"--{name} is too small: give at least {1 + name.startswith('tok')}")
    settings_of = tuned_of(tuning)
    policies = list(dict.fromkeys(canonical_part(parse_part(policy)) for policy in extend))
    runs = [open_run(folder) for folder in dict.fromkeys(map(Path, folders))]
    if not runs:
        raise UserError("no run to score: name folders that train.py made, such as runs/*")
    shortest = min(run.config.train_length for run in runs)
    targets = max(1, shortest // 8) if targets is None else targets
    # What a user would do instead of a longer context is always there to compare with: the last L
    # tokens of each training length.
    trained, asked = {run.config.train_length for run in runs}, set(lengths)
    lengths = (*lengths, *(n for n in trained if n < max(lengths, default=0)))
    if stride is not None and not 1 <= stride < min(lengths):
        raise UserError(
            f"--stride is {stride}: give 1 to {min(lengths) - 1}, less than the shortest length"
        )
    if ngram < 0:
        raise UserError(f"--ngram is {ngram}: give the n of an n-gram, or 0 for no slices")
    for control in controls:
        if control not in CONTROLS:
            raise UserError(f"--controls has no {control!r}: {nearest(control, CONTROLS)}")
    protocols: list[Protocol] = [
        *PLAIN.values(),
        *(CONTROLS[name] for name in dict.fromkeys(controls)),
    ]
    masked = read_mask(mask)
    settings = Settings(
        lengths=check_ladder(lengths, targets, shortest),
        targets=targets,
        spacing=max(targets, shortest),
        blocks=blocks,
        tokens_per_document=tokens_per_document,
        bos=bos,
        stride=stride,
    )
    check_policies(runs, policies, settings, allow_plugins)
    texts: dict[str, TestText] = {}
    sorts: dict[str, Slices | None] = {}
    warned: set[tuple[str, int]] = set()
    rows: list[Row] = []
    diverged: list[str] = []
    for run in runs:
        key = json.dumps(run.data, sort_keys=True)
        if key not in texts:
            texts[key] = load_text(run)
            check_text(texts[key], settings, run)
            documents = texts[key].documents
            sorts[key] = None if not ngram and masked is None else Slices(documents, ngram, masked)
        length = run.config.train_length
        if ForeignPrefix.name in controls and (key, length) not in warned:
            warned.add((key, length))
            check_foreign(texts[key], dataclasses.replace(settings, train_length=length))
        step = run.config.steps if checkpoint is None else checkpoint
        own_dtype = dtype or run.config.model.dtype
        # Some devices round float32 products to less unless told otherwise.
        precision = matmul_precision or ("highest" if own_dtype == "float32" else None)
        frozen = run.frozen(step)
        if len(frozen) == run.config.seeds:
            diverged.append(f"{run.folder}")
            print(f"{run.folder}: {_all_diverged(frozen, step)}: it has no rows", file=sys.stderr)
            continue
        for seed, taken in frozen.items():
            print(
                f"{run.folder}: seed {seed} is left out: its loss was not finite after {taken} "
                f"steps of {step}"
            )
        for member in run.config.members:
            if member.seed not in frozen:
                with jax.default_matmul_precision(precision):
                    found = score_run(
                        run,
                        texts[key],
                        settings,
                        protocols,
                        policies,
                        sorts[key],
                        store,
                        step=step,
                        member=member,
                        dtype=own_dtype,
                        batch_tokens=batch_tokens,
                        allow_plugins=allow_plugins,
                        probe=probe,
                        frozen=frozen,
                    )
                for own in settings_of.get(run.name, [SHARED]):
                    rows += [{**row, **own} for row in found]
    if not rows:
        raise UserError(
            f"nothing to score: every seed of {', '.join(diverged)} diverged; train with a lower "
            "--learning-rate, or score an earlier --checkpoint"
        )
    if not any(row["defined"] and row["length"] in asked for row in rows):
        reasons = "; ".join(sorted({f"{row['run']}: {row['reason']}" for row in rows}))
        raise UserError(
            f"nothing can be scored at lengths {', '.join(map(str, sorted(asked)))} "
            f"({reasons}): give a shorter length, or a policy with --extend"
        )
    return rows


def _all_diverged(frozen: dict[int, int], step: int) -> str:
    """Say how many steps each seed of a run took of those to a checkpoint, none of them all."""
    first, last = min(frozen.values()), max(frozen.values())
    taken = f"{first}" if first == last else f"{first} to {last}"
    return f"every seed diverged ({len(frozen)} of {len(frozen)}, after {taken} steps of {step})"
