"""From runs to result rows: plans, scores, reductions, and each row's birth certificate."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
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
from eval.protocols import (
    VERY_FEW_DOCUMENTS,
    Bos,
    NllByContext,
    NonOverlapping,
    PerPosition,
    Protocol,
    Scores,
    Settings,
    Sliding,
    Window,
    check_ladder,
)
from eval.scoring import BATCH_TOKENS, Scorer, extended_model, score_plan
from eval.slices import Slices, edges_of, read_mask
from posenc import data as datasets
from posenc.encodings.base import EncodingError, PositionalEncoding
from posenc.encodings.extension import POLICIES
from posenc.encodings.registry import (
    Encodings,
    Part,
    canonical_part,
    make_sampler,
    nearest,
    parse_part,
)
from posenc.encodings.sampling import Sampler
from posenc.errors import UserError
from posenc.progress import reporting
from posenc.runs import Member, Run, load_model, open_run, provenance, recipe_hash, source_hash
from posenc.transformer import DType, Transformer

SCHEMA = 1
Row = dict[str, Any]
PLAIN = {p.name: p for p in (NllByContext(), NonOverlapping(), PerPosition(), Sliding())}
# Rows of the primary protocol's tokens by what they need.
SLICE = "slice"
# Of a run that has the settings which all runs share.
SHARED: Row = {"settings": "shared", "tuning": None}


@dataclasses.dataclass(frozen=True)
class TestText:
    """The test split that a run is scored on.

    Attributes:
        documents: token ids, without BOS.
        tokenizer: that made them.
        bos: the id that begins a document.
    """

    __test__ = False  # pytest looks at names

    documents: list[datasets.TokenArray]
    tokenizer: datasets.Tokenizer
    bos: int


def load_text(run: Run) -> TestText:
    """Read the test split of a run's data, the same bytes that it was trained beside.

    Raises:
        UserError: the data are not what they were.
    """
    config = run.config
    corpus = datasets.open_data(config.data, config.separator_id)
    # The run has a copy of its tokenizer's files, which may lie elsewhere on this machine.
    tokenizer = datasets.tokenizer(config.tokenizer, beside=run.folder / "tokenizer")
    identity = datasets.identity(corpus, tokenizer, config.bos)
    changed = [
        f"{key} ({run.data.get(key)} there, {identity.get(key)} now)"
        for key in sorted(identity.keys() | run.data.keys())
        if identity.get(key) != run.data.get(key)
    ]
    if changed:
        raise UserError(
            f"{run.folder} was trained on other data: {', '.join(changed)} of {config.data!r} "
            "changed since; restore the data, or train again"
        )
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"{run.folder} has a vocabulary of {config.model.vocab_size}, and the tokenizer "
            f"{config.tokenizer!r} has {tokenizer.vocab_size}: evaluate with the version of posenc "
            "that trained it"
        )
    documents = datasets.token_documents(corpus, "test", tokenizer, config.bos)
    return TestText(documents, tokenizer, datasets.bos_id(corpus, tokenizer))


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


def _certificate(
    run: Run, step: int, settings: Settings, seed: int, frozen: Collection[int]
) -> Row:
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


def _settings_of(tuning: Path | None) -> dict[str, list[Row]]:
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


def _code(model: Transformer) -> str:
    """Give a hash of the code that scores depend on: posenc's own and that of plug-ins."""
    inner = (part for _, part in nnx.iter_graph(model.encoding))
    files = {inspect.getsourcefile(type(p)) for p in inner if isinstance(p, PositionalEncoding)}
    return source_hash(file for file in files if file)


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


def _refer(rows: list[Row], train_length: int) -> None:
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


@dataclasses.dataclass(frozen=True)
class Job:
    """One length of one run: as it was trained, or by a policy, or undefined and why."""

    length: int
    policy: Part | None = None
    undefined: str | None = None

    @property
    def extend(self) -> str | None:
        """The policy as rows name it."""
        return None if self.policy is None else str(self.policy)


def _end(model: Transformer, length: int, end: int) -> str | None:
    """Say why windows have no score: of so many places, whose positions lie below ``end``."""
    if model.copies > 1 and length > model.context_length:
        return f"no weights beyond {model.context_length - 1}"
    limit = model.encoding.max_position
    return None if limit is None or end <= limit else f"no position beyond {limit - 1}"


def _jobs(
    model: Transformer, lengths: tuple[int, ...], policies: list[Part], sampler: Sampler
) -> list[Job]:
    jobs = []
    for length in lengths:
        try:
            end = sampler.extent(length, training=False)
        except EncodingError as error:
            jobs.append(Job(length, undefined=str(error).split(":")[0]))
            continue
        jobs.append(Job(length, undefined=_end(model, length, end)))
        if model.copies > 1 and length > model.context_length:
            continue  # whatever the encoding could be made to represent, the blocks end here
        jobs += [Job(length, p) for p in policies if model.encoding.extends(p.name, length)]
    return jobs


@dataclasses.dataclass(frozen=True)
class Pass:
    """Windows of one size that are scored by one compiled program.

    Attributes:
        job: of the length and policy.
        plans: windows by protocol.
        places: of a window.
        positions: of these places; None are those that any window has.
        undefined: why there is no score.
    """

    job: Job
    plans: dict[str, list[Window]]
    places: int
    positions: np.ndarray | None = None
    undefined: str | None = None

    @property
    def windows(self) -> list[Window]:
        """Every window once, whichever plans share it."""
        return list(dict.fromkeys(itertools.chain(*self.plans.values())))


def _passes(
    model: Transformer,
    jobs: list[Job],
    protocols: list[Protocol],
    sizes: list[int],
    settings: Settings,
    *,
    with_bos: bool,
    drawn: bool,
) -> list[Pass]:
    """Give what is scored of a model, in order.

    Args:
        model: as it was trained.
        jobs: its lengths and policies.
        protocols: that are asked for.
        sizes: of the test documents, in tokens.
        settings: of the evaluation.
        with_bos: whether training placed BOS.
        drawn: whether positions of evaluation are drawn, so that no other ones can be told.
    """
    passes = []
    told = any(part.shift_invariant == "no" for part in model.encoding.parts)
    for job in jobs:
        plans = {p.name: p.plan(sizes, job.length, settings, with_bos) for p in protocols}
        own: dict[str, list[Window]] = {}
        for protocol in protocols:
            positions = protocol.positions(job.length, settings)
            windows = plans[protocol.name]
            if positions is None:
                own[protocol.name] = windows
            # Where a constant changes nothing, tokens are aligned as they stand.
            elif windows and not drawn and (told or protocol.name != "aligned"):
                end = int(positions.max()) + 1
                undefined = None if job.policy else _end(model, end, end)
                one = {protocol.name: windows}
                passes.append(Pass(job, one, len(positions), positions, undefined))
        passes.append(Pass(job, own, job.length, None, job.undefined))
    return passes


def _undefined_rows(one: Pass, settings: Settings) -> list[Row]:
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


def _scored_rows(
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
            none = _empty(one.job.length, one.job.extend, _no_foreign(settings))
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
    passes = _passes(
        model,
        _jobs(model, settings.lengths, policies, sampler),
        protocols,
        [len(document) for document in text.documents],
        settings,
        with_bos=run.config.bos == "document",
        drawn=_drawn(sampler, run.config.train_length),
    )
    scored = [one for one in passes if one.undefined is None]
    plain = [one.job for one in scored if one.positions is None]
    # The curve by position is drawn once, at the longest length that there is (lengths ascend).
    longest = {job.policy: job.length for job in plain}
    certificate = {**_certificate(run, step, settings, member.seed, frozen), "dtype": dtype}
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
                rows += _undefined_rows(one, settings)
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
            rows += _scored_rows(one, scores, text, slices, settings, by_position=by_position)
    _refer(rows, run.config.train_length)
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


def _drawn(sampler: Sampler, length: int) -> bool:
    """Say whether evaluation gives a window other positions than one after another."""
    window = np.zeros((1, length), np.int32)
    positions, _ = sampler.place(window + 1, [0], (0,), 1, training=False)
    return not np.array_equal(positions[0], np.arange(length))


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
    settings_of = _settings_of(tuning)
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
    _check_policies(runs, policies, settings, allow_plugins)
    texts: dict[str, TestText] = {}
    sorts: dict[str, Slices | None] = {}
    warned: set[tuple[str, int]] = set()
    rows: list[Row] = []
    diverged: list[str] = []
    for run in runs:
        key = json.dumps(run.data, sort_keys=True)
        if key not in texts:
            texts[key] = load_text(run)
            _check_text(texts[key], settings, run)
            documents = texts[key].documents
            sorts[key] = None if not ngram and masked is None else Slices(documents, ngram, masked)
        length = run.config.train_length
        if ForeignPrefix.name in controls and (key, length) not in warned:
            warned.add((key, length))
            _check_foreign(texts[key], dataclasses.replace(settings, train_length=length))
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


def _check_policies(
    runs: list[Run], policies: list[Part], settings: Settings, allow_plugins: bool
) -> None:
    """Find a policy that is misspelt, or that no run has a use for, before scoring."""
    longest = max(settings.lengths)

    def encodings(run: Run, policy: Part | None = None, length: int = 0) -> Encodings:
        """Give a run's encodings, abstractly, extended if a policy is given."""
        config = run.config

        def made() -> Encodings:
            encodings = Transformer(
                config.model, config.encoding, config.train_length, allow_plugins=allow_plugins
            ).encoding
            if policy is not None:
                encodings.extend(policy, length)
            return encodings

        return nnx.eval_shape(made)

    for policy in policies:
        helped, ending = [], []
        for run in runs:
            tried = encodings(run)
            # No policy leads beyond the end of blocks whose positions share no weights.
            limit = run.config.train_length if run.config.model.sharing != "all" else longest
            lengths = [n for n in settings.lengths if n <= limit]
            if any(tried.extends(policy.name, n) for n in lengths):
                helped.append(run.name)
                encodings(run, policy, max(lengths))  # an option that is wrong is refused now
            elif tried.max_position is not None and tried.max_position < min(longest, limit):
                ending.append(run)
        if helped:
            others = [run.name for run in runs if run.name not in helped]
            if others:
                print(f"{policy.name} has nothing to act on in {', '.join(others)}")
            continue
        # Refused for the reason that the first run has that ends too early, if there is one.
        table = policy.name in POLICIES and POLICIES[policy.name].needs == "table"
        if ending or not table:
            encodings((ending or runs)[0], policy, longest)
        print(f"no run needs {policy.name} at any of these lengths: --extend changes nothing")


def _no_foreign(settings: Settings) -> str:
    room = max(settings.lengths) - settings.train_length
    return f"no other test document has the {room} tokens of a foreign prefix"


def _check_foreign(text: TestText, settings: Settings) -> None:
    """Say where what stands before blocks as a foreign prefix is of few documents, or of none."""
    if max(settings.lengths) <= settings.train_length:
        return
    sizes = [len(document) for document in text.documents]
    # A block's own document, which is long enough too, is never before it.
    others = len(ForeignPrefix().sources(sizes, settings)) - 1
    if others >= VERY_FEW_DOCUMENTS:
        return
    text_of = (
        f"only {others} other test document{'s are' if others > 1 else ' is'} long enough to be "
        "the foreign prefix of a block; tax and info may be theirs, not the encoding's"
        if others
        else f"{_no_foreign(settings)}: its rows are undefined; give shorter --lengths, or a text "
        "with more long documents"
    )
    print(f"warning: {text_of}", file=sys.stderr)


def _check_text(text: TestText, settings: Settings, run: Run) -> None:
    need = max(settings.lengths)
    sizes = [len(document) for document in text.documents]
    long_enough = sum(size >= need for size in sizes)
    if not long_enough:
        raise UserError(
            f"no test document of {run.config.data!r} is long enough for length {need}: the "
            f"longest of {len(sizes)} has {max(sizes, default=0)} tokens; give a shorter length"
        )
    if long_enough < VERY_FEW_DOCUMENTS:
        print(
            f"warning: only {long_enough} test documents have {need} tokens; "
            "the curve may be theirs, not the encoding's",
            file=sys.stderr,
        )
