"""What rows say with intervals: the numbers of the report, before they are words or lines.

Let K be lengths, S seeds and D documents. A *subject* is a line of the report: an encoding, under
one set of conditions, with all its seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from eval.measures import (
    TOLERANCE,
    EffectiveLength,
    Endpoint,
    Recovery,
    Reference,
    Verdict,
    endpoint,
    paired_endpoints,
    recovery,
    reference,
    tolerated,
    used,
    verdict,
)
from eval.report.lines import Line, lines_of
from eval.report.rows import Row
from eval.stats import (
    LEVEL,
    Crossed,
    Interval,
    Paired,
    Summary,
    bootstrap_documents,
    crossed,
    paired,
    primary_interval,
    summarize,
    wilson,
)
from posenc.errors import UserError

T = TypeVar("T")

PRIMARY, FOREIGN = "nll_by_context", "foreign_prefix"
PROBES = ("index_probe", "distance_probe", "keys_probe", "foreign_prefix")
# What a line's training may not differ in from that of its bound, but for how windows are cut.
_BOUND = ("encoding", "settings", "model", "sharing", "positions", "train_tokens")
# What tells which tokens are targets.
_TEXT = ("name", "version", "sha256", "split_rule", "tokenizer", "tokenizer_sha256")
_BLOCKS = ("targets", "longest_length", "block_spacing", "blocks_per_document")


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """One line's measurements on identical targets.

    Attributes:
        label: as tables and figures have it.
        row: any of its rows, for what all of them say.
        seeds: ascending.
        lengths: at which the primary protocol has rows, ascending.
        tokens: ``[D]``, targets of each document.
        nll: ``[K, S, D]``, sums in nats; NaN where a seed has none.
        controls: the same of every control, by its name; NaN where it says nothing.
        reasons: why there is no value, by length.
        policy: that it was extended by, where it was.
        runs: that the rows are of.
        frozen: seeds of these runs that diverged in training, ascending: they have no rows.
        lacking: why a control says nothing, by its name, where its rows say so.
        documents: their numbers in the corpus.
        unscored: seeds without a row, by length.
    """

    label: str
    row: Row
    seeds: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: np.ndarray
    nll: np.ndarray
    controls: dict[str, np.ndarray]
    reasons: dict[int, str]
    policy: str | None
    runs: frozenset[str]
    frozen: tuple[int, ...] = ()
    lacking: dict[str, str] = dataclasses.field(default_factory=dict)
    documents: tuple[int, ...] = ()
    unscored: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def train_length(self) -> int:
        """L."""
        return self.row["train_length"]

    def at(self, length: int, control: str | None = None) -> np.ndarray | None:
        """Give the sums ``[S, D]`` at a length; None where any is not finite, or there are none."""
        every = self.nll if control is None else self.controls.get(control)
        if every is None or length not in self.lengths:
            return None
        found = every[self.lengths.index(length)]
        return found if np.isfinite(found).all() else None

    def same_targets(self, other: Subject) -> bool:
        """Say whether both were scored on the same tokens of the same text."""
        own, others = (
            [(subject.row.get("data") or {}).get(name) for name in _TEXT]
            + [subject.row.get(name) for name in _BLOCKS]
            for subject in (self, other)
        )
        alike = self.documents == other.documents and own == others
        return alike and np.array_equal(self.tokens, other.tokens)

    def of(self, seeds: Sequence[int]) -> Subject:
        """Give the same for some of its seeds."""
        keep = [self.seeds.index(seed) for seed in seeds]
        controls = {name: every[:, keep] for name, every in self.controls.items()}
        return dataclasses.replace(
            self, seeds=tuple(seeds), nll=self.nll[:, keep], controls=controls
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A subject at one length, in nats per token.

    Attributes:
        length: T.
        loss: with Student's t over seeds; None where it is undefined.
        documents: the same seeds, with the spread over documents.
        crossed: with seeds and documents drawn alike.
        summary: of the seeds. Where there is no loss it has no mean, seeds that are not finite are
            infinite, and those that were not scored NaN.
        success: the rate of those within the tolerance of their reference.
        verdict: of the far context; None up to L, and where a control is missing.
        recovery: of what training at this length gains; None where no run was trained so.
        probes: of each probe, loss minus that of the last L tokens alone.
        why: there is no loss.
    """

    length: int
    loss: Interval | None
    documents: Interval | None = None
    crossed: Crossed | None = None
    summary: Summary | None = None
    success: Interval | None = None
    verdict: Verdict | None = None
    recovery: Recovery | None = None
    probes: dict[str, Interval] = dataclasses.field(default_factory=dict)
    why: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Finding:
    """All that is said of one subject.

    ``tolerated`` and ``used`` are None where they cannot be asked, and ``missing`` says why.
    """

    subject: Subject
    points: tuple[Point, ...]
    reference: Reference | None
    endpoint: Endpoint | None
    tolerated: EffectiveLength | None
    used: EffectiveLength | None
    missing: dict[str, str]

    def at(self, length: int) -> Point | None:
        """Give the point of a length, if there is one."""
        return next((point for point in self.points if point.length == length), None)


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """A subject minus the baseline.

    Attributes:
        a: the subject's label.
        b: the baseline's.
        seeds: that both have.
        endpoint: of the primary endpoints; None where one of them has none, and ``why`` says so.
        by_length: of the losses, nats per token.
        crossed: the same differences with documents drawn as well.
        documents: the same differences with their spread over documents, for these seeds.
        endpoint_crossed: that of the endpoints with documents drawn as well.
        endpoint_documents: the same with its spread over documents.
        why: there is no endpoint.
    """

    a: str
    b: str
    seeds: tuple[int, ...]
    endpoint: Paired | None
    by_length: dict[int, Paired]
    crossed: dict[int, Crossed]
    documents: dict[int, Interval]
    endpoint_crossed: Crossed | None = None
    endpoint_documents: Interval | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """A report's numbers.

    Attributes:
        findings: of every line, in order.
        comparisons: of every line of the shortest training length with the baseline.
        level: of all intervals; of comparisons and effective lengths, of all encodings together.
    """

    findings: tuple[Finding, ...]
    comparisons: tuple[Comparison, ...]
    level: float = LEVEL


def subjects_of(rows: Iterable[Row], *, mixed: bool = False) -> list[Subject]:
    """Give every line of the primary protocol that has sums by document.

    Args:
        rows: of any protocol.
        mixed: whether lines may have been scored on other targets than others.

    Raises:
        UserError: there is none, or lines were scored on other targets.
    """
    rows = list(rows)
    every = {
        name: {line.label: line for line in lines_of(rows, name)}
        for name in dict.fromkeys((PRIMARY, *PROBES, "aligned"))
    }
    subjects = [
        _subject(line, {name: lines.get(line.label) for name, lines in every.items()})
        for line in every[PRIMARY].values()
        if any(row.get("document_nll") for cell in line.cells.values() for row in cell.rows)
    ]
    if not subjects:
        raise UserError(
            "no row has sums by document, which intervals are made from: score the runs again"
        )
    first = subjects[0]
    for other in subjects[1:]:
        if not (mixed or first.same_targets(other)):
            raise UserError(
                f"{first.label} and {other.label} were scored on different targets "
                f"({first.tokens.sum():.0f} of {len(first.documents)} documents, and "
                f"{other.tokens.sum():.0f} of {len(other.documents)}): score them together"
            )
    return subjects


def _subject(line: Line, lines: dict[str, Line | None]) -> Subject:
    rows = [row for cell in line.cells.values() for row in cell.rows]
    seeds = tuple(sorted({row["seed"] for row in rows}))
    lengths = tuple(sorted(line.cells))
    scored = next(row for row in rows if row.get("document_nll"))
    documents, counts = scored["document_index"], scored["document_tokens"]

    def sums(of: Line | None) -> np.ndarray:
        found = np.full((len(lengths), len(seeds), len(documents)), np.nan)
        for length, cell in () if of is None else of.cells.items():
            for row in cell.rows:
                if not row.get("document_nll") or length not in lengths:
                    continue
                if [row["document_index"], row["document_tokens"]] != [documents, counts]:
                    raise UserError(
                        f"{line.label} at length {length}, seed {row['seed']}, has other targets "
                        "than elsewhere: score it in one command"
                    )
                place = lengths.index(length), seeds.index(row["seed"])
                found[place] = row["document_nll"]
        return found

    reasons = {
        length: next(row["reason"] or "no reason" for row in cell.rows if not row["defined"])
        for length, cell in line.cells.items()
        if any(not row["defined"] for row in cell.rows)
    }
    controls = {name: sums(of) for name, of in lines.items() if name != PRIMARY and of is not None}
    lacking = {
        name: row["reason"]
        for name, of in lines.items()
        for cell in (() if of is None else of.cells.values())
        for row in cell.rows
        if row["reason"]
    }
    tokens = np.array(scored["document_tokens"], np.float64)
    return Subject(
        line.label,
        rows[0],
        seeds,
        lengths,
        tokens,
        sums(line),
        controls,
        reasons,
        next((row["extend"] for row in rows if row["extend"]), None),
        frozenset(row["run"] for row in rows),
        tuple(sorted({seed for row in rows for seed in row.get("frozen_seeds") or ()})),
        lacking,
        tuple(documents),
        {
            length: missing
            for length, cell in line.cells.items()
            if (missing := tuple(set(seeds) - {row["seed"] for row in cell.rows}))
        },
    )


def analyse(
    rows: Iterable[Row],
    baseline: str | None = None,
    level: float = LEVEL,
    seed: int = 0,
    *,
    mixed: bool = False,
) -> Analysis:
    """Give all numbers of a report.

    Args:
        rows: that can be compared.
        baseline: the label of the line that others are compared with; the first unless told.
        level: of intervals.
        seed: of resampling.
        mixed: whether lines may have been scored on other targets; they are compared with none.

    Raises:
        UserError: no row has sums by document, or no line has the baseline's label.
    """
    subjects = subjects_of(rows, mixed=mixed)
    short = min(subject.train_length for subject in subjects)
    # Bounds, trained longer, are beside what is compared.
    compared = [subject for subject in subjects if subject.train_length == short]
    references: list[tuple[Subject, float]] = []
    for subject in compared:
        curve: Any = subject.nll, subject.tokens, subject.lengths, subject.train_length
        with contextlib.suppress(UserError):
            references.append((subject, reference(*curve).loss))

    def lowest(subject: Subject) -> float | None:
        own = [loss for other, loss in references if other.same_targets(subject)]
        return min(own, default=None)

    options: dict[str, Any] = {"level": level, "comparisons": len(compared), "seed": seed}
    findings = tuple(_finding(subject, subjects, lowest(subject), options) for subject in subjects)
    labels = [subject.label for subject in compared]
    if baseline is not None and baseline not in labels:
        raise UserError(f"no line is called {baseline!r}: {', '.join(labels)}")
    base = compared[labels.index(baseline) if baseline is not None else 0]
    by_label = {finding.subject.label: finding for finding in findings}
    comparisons = tuple(
        compare(by_label[subject.label], by_label[base.label], level, len(compared) - 1, seed)
        for subject in compared
        if subject is not base
    )
    return Analysis(findings, comparisons, level)


def _finding(
    subject: Subject, subjects: list[Subject], lowest: float | None, options: dict[str, Any]
) -> Finding:
    curve: Any = subject.nll, subject.tokens, subject.lengths, subject.train_length
    missing: dict[str, str] = {}

    def asked(name: str, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except UserError as error:
            missing[name] = str(error)
            return None

    base = asked("reference", lambda: reference(*curve))
    level: dict[str, Any] = {"level": options["level"], "seed": options["seed"]}
    ends = asked("endpoint", lambda: endpoint(*curve, **level))
    if ends is not None:
        ends = dataclasses.replace(ends, why=gathered(ends.why))
    length = asked("tolerated", lambda: tolerated(*curve, lowest_reference=lowest, **options))
    foreign = subject.controls.get(FOREIGN)
    if foreign is None or np.isnan(foreign).all():
        stops = any(length > subject.train_length for length in subject.reasons)
        without = subject.lacking.get(FOREIGN, "not scored with a foreign prefix")
        missing["used"] = "undefined beyond L" if stops else without
        far = None
    else:
        info = foreign - subject.nll
        held: dict[str, Any] = {
            "loss_reference": base.loss if base else None,
            "lowest_reference": lowest,
        }
        held = {**held, **options} if base is not None and lowest is not None else options
        tokens, lengths, length_trained = curve[1:]
        far = asked("used", lambda: used(info, tokens, lengths, length_trained, **held))
    points = tuple(_point(subject, n, subjects, base, options) for n in subject.lengths)
    return Finding(subject, points, base, ends, length, far, missing)


def _point(
    subject: Subject,
    length: int,
    subjects: list[Subject],
    base: Reference | None,
    options: dict[str, Any],
) -> Point:
    sums, tokens = subject.at(length), subject.tokens
    level: dict[str, Any] = {"level": options["level"]}
    every = subject.nll[subject.lengths.index(length)]
    finite = np.isfinite(every).all(axis=-1)
    unscored = subject.unscored.get(length, ())
    success = None
    if base is not None:
        own = subject.nll[subject.lengths.index(base.length)].sum(-1)
        above = (every.sum(-1) - own) / tokens.sum()
        # A seed without a value has failed, and so has one that diverged in training.
        passed = int(np.count_nonzero(above[finite] <= TOLERANCE))
        scored = len(subject.seeds) - len(unscored)
        if scored:
            success = wilson(passed, scored + len(subject.frozen), **level)
    if sums is None:
        # What is infinite is worse than all else, so that median and best hold without it.
        values = np.where(finite, every.sum(-1) / tokens.sum(), np.inf)
        values[[seed in unscored for seed in subject.seeds]] = np.nan
        return Point(
            length,
            None,
            summary=_ranked(values) if finite.any() else None,
            success=success,
            why=_why_none(subject, length),
        )
    trunc, foreign = truncated(subject, subjects), subject.at(length, FOREIGN)
    far = None
    if length > subject.train_length and trunc is not None and foreign is not None:
        far = verdict(sums, foreign, trunc, tokens, **options)
    probes = {}
    for name in PROBES:
        probed = subject.at(length, name)
        if probed is not None and trunc is not None:
            probes[name] = primary_interval(probed - trunc, tokens, seed=options["seed"], **level)
    return Point(
        length,
        primary_interval(sums, tokens, seed=options["seed"], **level),
        bootstrap_documents(sums, tokens, seed=options["seed"], **level),
        crossed(sums, tokens, **level),
        summarize(sums.sum(-1) / tokens.sum()),
        success,
        far,
        _recovered(subject, length, subjects, options),
        probes,
    )


def _ranked(values: np.ndarray) -> Summary:
    """Summarise losses without a mean: some seeds are infinite, or were not scored (NaN)."""
    known = values[~np.isnan(values)]
    median, best, worst = float(np.median(known)), float(known.min()), float(known.max())
    return Summary(tuple(values.tolist()), math.nan, median, best, worst, None)


def _why_none(subject: Subject, length: int) -> str:
    """Say why a line has no loss at a length."""
    if length in subject.reasons:
        return subject.reasons[length]
    every = subject.nll[subject.lengths.index(length)]
    lost = ~np.isfinite(every).all(axis=-1)
    unscored = sorted(subject.unscored.get(length, ()))
    said = []
    if unscored:
        plural = "s" * (len(unscored) > 1)
        said.append(f"not scored for seed{plural} {', '.join(map(str, unscored))}")
    if broken := np.count_nonzero(lost) - len(unscored):
        said.append(f"not finite for {broken} of {len(lost)} seeds")
    return "; ".join(said)


def truncated(subject: Subject, subjects: list[Subject]) -> np.ndarray | None:
    """Give the sums of the last L tokens alone, by the model as it was trained."""
    plain = (other for other in subjects if other.runs == subject.runs and other.policy is None)
    return next(plain, subject).at(subject.train_length)


def _recovered(
    subject: Subject, length: int, subjects: list[Subject], options: dict[str, Any]
) -> Recovery | None:
    """Give how much of what training at a length gains is recovered, if a run was trained so."""
    trunc, loss = truncated(subject, subjects), subject.at(length)
    if length <= subject.train_length or trunc is None or loss is None:
        return None
    for other in subjects:
        alike = all(other.row.get(name) == subject.row.get(name) for name in _BOUND)
        long = other.at(length)
        if other.train_length != length or not alike or other.policy or long is None:
            continue
        if not other.same_targets(subject):
            continue
        seeds = [seed for seed in subject.seeds if seed in other.seeds]
        if seeds:
            own = [subject.seeds.index(seed) for seed in seeds]
            bound = [other.seeds.index(seed) for seed in seeds]
            sums = trunc[own], loss[own], long[bound]
            return recovery(*sums, subject.tokens, **options)
    return None


def compare(
    a: Finding, b: Finding, level: float = LEVEL, comparisons: int = 1, seed: int = 0
) -> Comparison:
    """Compare two lines, A minus B, on the seeds and lengths that both have.

    There is nothing but ``why`` where they were scored on different targets.

    Raises:
        UserError: they have no seed in common.
    """
    seeds = tuple(seed for seed in a.subject.seeds if seed in b.subject.seeds)
    if not seeds:
        raise UserError(
            f"{a.subject.label} has seeds {', '.join(map(str, a.subject.seeds))} and "
            f"{b.subject.label} {', '.join(map(str, b.subject.seeds))}: train seeds that both have"
        )
    if not a.subject.same_targets(b.subject):
        labels = a.subject.label, b.subject.label
        return Comparison(*labels, seeds, None, {}, {}, {}, why="scored on other targets")
    one, two, tokens = a.subject.of(seeds), b.subject.of(seeds), a.subject.tokens
    options: dict[str, Any] = {"level": level, "comparisons": max(1, comparisons)}
    by_length, both, documents = {}, {}, {}
    for length in one.lengths:
        first, second = one.at(length), two.at(length)
        if first is not None and second is not None:
            by_length[length] = paired(first, second, tokens, **options)
            both[length] = crossed(first - second, tokens, **options)
            documents[length] = bootstrap_documents(first - second, tokens, seed=seed, **options)
    ends, ends_both, ends_documents, why = None, None, None, ""
    try:
        first_end, second_end = (
            endpoint(s.nll, tokens, s.lengths, s.train_length, level=level, seed=seed)
            for s in (one, two)
        )
        ends = paired_endpoints(first_end, second_end, tokens, **options)
        sums = first_end.sums - second_end.sums  # type: ignore[operator]
        ends_both = crossed(sums, tokens, **options)
        ends_documents = bootstrap_documents(sums, tokens, seed=seed, **options)
    except UserError as error:
        why = gathered(str(error))
    return Comparison(
        a.subject.label,
        b.subject.label,
        seeds,
        ends,
        by_length,
        both,
        documents,
        ends_both,
        ends_documents,
        why,
    )


def gathered(why: str) -> str:
    """Say once what is so at several lengths: ``undefined at 128, 256 for 3 of 3 seeds``."""

    def once(found: re.Match[str]) -> str:
        lengths = re.findall(r"undefined at (\d+)", found.group())
        return f"undefined at {', '.join(lengths)} for {found.group(1)}"

    return re.sub(
        r"undefined at \d+ for (\d+ of \d+ seeds?)(; undefined at \d+ for \1)+", once, why
    )
