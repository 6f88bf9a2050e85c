"""Two encodings, one minus the other, in three lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eval.report.analysis import Comparison, Finding, Subject, compare, subjects_of
from eval.report.comparable import check_comparable
from eval.report.rows import Row
from eval.report.table import three_digits
from eval.stats import (
    DOCUMENTS_ONLY,
    LEVEL,
    SEEDS_FOR_P,
    Crossed,
    Interval,
    Paired,
)
from posenc.encodings.registry import SpecError, canonical_spec
from posenc.errors import UserError


def compare_encodings(
    rows: Iterable[Row],
    a: str,
    b: str,
    *,
    allow_mixed: bool = False,
    level: float = LEVEL,
    seed: int = 0,
) -> list[str]:
    """Say in three lines by how much the loss of A is above that of B, in nats per token.

    The first is the primary endpoint's difference or, where there is none, that at the longest
    length which both have; the second that of the losses by length; the third what the first is
    worth.

    Args:
        rows: of both, and of others if need be.
        a: a spec, however it is spelt, or the label of a line in the report.
        b: likewise.
        allow_mixed: whether rows may differ in what makes numbers incomparable.
        level: of each interval.
        seed: of resampling.

    Raises:
        UserError: a name is of no line or of several, both name one, the rows cannot be compared,
            or the two have no seed or no length in common.
    """
    rows = list(rows)
    check_comparable(rows, allow_mixed=allow_mixed)
    subjects = subjects_of(rows, mixed=allow_mixed)
    first, second = (_named(name, subjects) for name in (a, b))
    if first is second:
        raise UserError(f"{a!r} and {b!r} are both {first.label}: name two lines to compare")
    found = compare(_bare(first), _bare(second), level, seed=seed)
    if not first.same_targets(second):
        raise UserError(
            f"{first.label} and {second.label} were scored on different targets, so that no two "
            "losses make a pair: score them together"
        )
    if not found.by_length:
        raise UserError(
            f"{first.label} and {second.label} have no length in common at which both are defined: "
            "score them at the same lengths"
        )
    longest = max(found.by_length)
    place = "endpoint" if found.endpoint else f"at T = {longest} ({found.why})"
    pair = found.endpoint or found.by_length[longest]
    both = found.endpoint_crossed or found.crossed[longest]
    documents = found.endpoint_documents or found.documents[longest]
    lone = len(found.seeds) == 1
    return [
        _first(found, place, documents if lone else pair.interval),
        _second(found),
        _third(pair, both, documents),
    ]


def _first(found: Comparison, place: str, interval: Interval) -> str:
    seeds = len(found.seeds)
    method = DOCUMENTS_ONLY if seeds == 1 else interval.method
    return (
        f"{found.a} minus {found.b}, {place}: {_text(interval)} nats per token; "
        f"{seeds} seed{'s' if seeds > 1 else ''}; {100 * interval.level:g}%, {method}"
        + (", bootstrap" if seeds == 1 else "")
    )


def _second(found: Comparison) -> str:
    lone = len(found.seeds) == 1
    every = found.documents if lone else {n: one.interval for n, one in found.by_length.items()}
    return "by T: " + ", ".join(f"{n}: {_text(interval)}" for n, interval in every.items())


def _third(pair: Paired, both: Crossed, documents: Interval) -> str:
    seeds = len(pair.per_seed)
    if seeds == 1:
        return "one seed: no correlation of pairs, no detectable difference, no crossed interval"
    correlation = (
        f"correlation of the pairs {pair.correlation:.2f}"
        if pair.correlation is not None
        else "no correlation of the pairs"
        + (" (2 seeds; from 3)" if seeds == 2 else " (seeds do not vary)")
    )
    detectable = "" if pair.detectable is None else f"; detectable difference {pair.detectable:.3f}"
    p = f"; p {pair.p:.3g}" if pair.p is not None else f"; no p-value below {SEEDS_FOR_P} seeds"
    if pair.p is None and seeds >= SEEDS_FOR_P:
        p = "; no p-value (all differences are equal)"
    limits = _limits(both.interval) or f"none ({both.interval.why})"
    spread = _limits(documents) or f"none ({documents.why})"
    return (
        f"{correlation}{detectable}{p}; seeds crossed with documents {limits}; "
        f"documents for these seeds {spread}"
    )


def _bare(subject: Subject) -> Finding:
    return Finding(subject, (), None, None, None, None, {})


def _named(name: str, subjects: Sequence[Subject]) -> Subject:
    """Give the line of a label, or the one line of a spec."""
    for subject in subjects:
        if subject.label == name:
            return subject
    try:
        spec = canonical_spec(name)
    except SpecError:
        spec = name
    found = [subject for subject in subjects if subject.row["encoding"] == spec]
    if len(found) == 1:
        return found[0]
    labels = "; ".join(repr(subject.label) for subject in found or subjects)
    if found:
        raise UserError(f"{name!r} is {len(found)} lines: give the label of one: {labels}")
    raise UserError(f"no line is {name!r}: the lines are {labels}")


def _text(interval: Interval) -> str:
    limits = _limits(interval)
    return f"{_signed(interval.estimate)}{f' {limits}' if limits else ''}"


def _limits(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f"[{_signed(interval.low)}, {_signed(interval.high)}]"


def _signed(value: float) -> str:
    text = three_digits(value)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"
