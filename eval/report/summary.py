"""What an analysis says of each line, as Markdown and as CSV, and the rules of its tables.

Lines are those of the report: an encoding under one set of conditions. All losses and differences
are in nats per token.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from eval.measures import EffectiveLength, endpoint, paired_endpoints
from eval.report.analysis import FOREIGN, Analysis, Comparison, Finding, Point, Subject
from eval.report.table import code, markdown_line, three_digits
from eval.stats import DOCUMENTS_ONLY, OVER_SEEDS, Interval, paired
from posenc.errors import UserError

NONE = "---"
_EVERY = "all lines scored beyond L"


def lengths_of(analysis: Analysis) -> list[int]:
    """Give every length at which some line was scored, ascending."""
    return sorted({n for finding in analysis.findings for n in finding.subject.lengths})


def compared_of(analysis: Analysis) -> list[Finding]:
    """Give the lines that are compared: those of the shortest training length."""
    short = min(finding.subject.train_length for finding in analysis.findings)
    return [each for each in analysis.findings if each.subject.train_length == short]


def shown_lowest(analysis: Analysis) -> dict[int | None, str]:
    """Give the line that an interval shows to be lower than all others, where there is one.

    By length, and under None by the endpoint. A line is named where the paired difference from each
    other compared line that has a value there lies below 0 with its interval over seeds; the level
    holds for all pairs of lines together. With one seed in common nothing can be named.
    """
    findings = compared_of(analysis)
    pairs = list(combinations(findings, 2))
    places: list[int | None] = [*lengths_of(analysis), None]
    found: dict[int | None, str] = {}
    for place in places:
        values = [finding for finding in findings if _has(finding, place)]
        wins = {finding.subject.label: 0 for finding in values}
        for a, b in combinations(values, 2):
            interval = _difference(a.subject, b.subject, place, analysis.level, len(pairs))
            if interval is not None and interval.below(0):
                wins[a.subject.label] += 1
            elif interval is not None and interval.above(0):
                wins[b.subject.label] += 1
        for label, count in wins.items():
            if count == len(values) - 1 > 0:
                found[place] = label
    return found


def _has(finding: Finding, place: int | None) -> bool:
    if place is None:
        return finding.endpoint is not None and finding.endpoint.interval is not None
    return finding.subject.at(place) is not None


def _difference(
    a: Subject, b: Subject, place: int | None, level: float, comparisons: int
) -> Interval | None:
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    if len(seeds) < 2 or not a.same_targets(b):
        return None
    one, two = a.of(seeds), b.of(seeds)
    options: dict[str, Any] = {"level": level, "comparisons": comparisons}
    if place is not None:
        left, right = one.at(place), two.at(place)
        assert left is not None
        assert right is not None
        return paired(left, right, a.tokens, **options).interval
    first, second = (
        endpoint(s.nll, s.tokens, s.lengths, s.train_length, level=level) for s in (one, two)
    )
    try:
        return paired_endpoints(first, second, a.tokens, **options).interval
    except UserError:  # over different lengths
        return None


def methods_of(analysis: Analysis) -> str:
    """Name level and methods of the intervals of losses: ``95%, t over seeds``."""
    points = [point for finding in analysis.findings for point in finding.points]
    known = [point.loss for point in points if point.loss is not None]
    names = sorted({loss.method for loss in known if loss.low is not None})
    return f"{100 * analysis.level:g}%, {' or '.join(names) or 'none'}"


def one_text(analysis: Analysis) -> bool:
    """Say whether all lines were scored on the same targets."""
    first, *others = (finding.subject for finding in analysis.findings)
    return all(first.same_targets(other) for other in others)


def in_brackets(analysis: Analysis) -> str:
    """Say which intervals of losses are given by their limits, where others are not."""
    counts = {len(finding.subject.seeds) for finding in analysis.findings}
    return (
        f" (in brackets: {DOCUMENTS_ONLY}, of one seed)" if min(counts) == 1 < max(counts) else ""
    )


def seeds_of(analysis: Analysis) -> str:
    """Give the numbers of seeds of lines: ``3``, or ``2 to 3``."""
    counts = sorted({len(finding.subject.seeds) for finding in analysis.findings})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def spread(interval: Interval, plus_minus: str = "±") -> str:
    """Give an interval beside its estimate: a half width, or both limits where they are uneven."""
    if interval.low is None or interval.high is None:
        return ""
    if interval.method == OVER_SEEDS:
        return f"{plus_minus} {(interval.high - interval.low) / 2:.3f}"
    return f"[{three_digits(interval.low)}, {three_digits(interval.high)}]"


def beyond(finding: Finding) -> bool:
    """Say whether a line was scored at a length beyond its own training length."""
    return max(finding.subject.lengths) > finding.subject.train_length


def verdict_at(finding: Finding, length: int) -> str:
    """Give the verdict's word; nothing where there is none to be asked for."""
    point = finding.at(length)
    if point is None or length <= finding.subject.train_length:
        return ""
    return (point.verdict.word if point.verdict else "") or NONE


def effective(length: EffectiveLength | None, finding: Finding) -> str:
    """Give an effective length as a table shows it."""
    if length is None:
        return NONE if beyond(finding) else ""
    return str(length)


def remarks(analysis: Analysis) -> list[tuple[str, list[str]]]:
    """Give why values are absent or void, each reason once with the labels that it is about."""
    found: dict[str, list[str]] = {}

    def say(text: str, finding: Finding) -> None:
        labels = found.setdefault(text, [])
        if finding.subject.label not in labels:
            labels.append(finding.subject.label)

    longest = lengths_of(analysis)[-1]
    for finding in analysis.findings:
        if finding.subject.frozen:
            seeds = ", ".join(map(str, finding.subject.frozen))
            say(f"diverged in training, and in no mean: seed {seeds}", finding)
        # Reasons that differ in a number alone, such as a position, are one: the first length's.
        why: dict[str, list[Point]] = {}
        for point in finding.points:
            if point.loss is None:
                why.setdefault(re.sub(r"\d+", "", point.why), []).append(point)
        for points in why.values():
            places = ", ".join(str(point.length) for point in points)
            word = "undefined" if points[0].length in finding.subject.reasons else "no mean"
            say(f"{word} at {places}: {points[0].why}", finding)
        if beyond(finding):
            if finding.endpoint is not None and finding.endpoint.why:
                gaps = finding.endpoint.why.startswith("undefined")
                reason = "undefined within [L, 16 L]" if gaps else finding.endpoint.why
                say(f"no endpoint: {reason}", finding)
            for name, reason in finding.missing.items():
                what = f"{name} length" if name in ("tolerated", "used") else name
                say(f"no {what}: {reason}", finding)
            last = finding.at(longest)
            if verdict_at(finding, longest) == NONE and last is not None and not last.why:
                why_none = finding.subject.lacking.get(
                    FOREIGN, "not scored with a foreign prefix there"
                )
                say(f"no verdict at {longest}: {why_none}", finding)
        for name, length in (("tolerated", finding.tolerated), ("used", finding.used)):
            if length is not None and length.sign == "void":
                # How far above it is stands with the losses.
                why_void = re.sub(
                    "is .* nats above the lowest, more than (.*)",
                    r"is more than \1 nats above the lowest",
                    length.why,
                )
                say(f"void: {why_void}", finding)
            if length is not None and length.without:
                missed = ", ".join(map(str, length.without))
                say(f"{name}, though not shown at {missed}", finding)
    every = [finding.subject.label for finding in analysis.findings if beyond(finding)]
    return [
        (text, [_EVERY] if labels == every and len(every) > 2 else labels)
        for text, labels in found.items()
    ]


def interval_tables(analysis: Analysis) -> str:
    """Markdown of losses with intervals, endpoints, effective lengths and paired differences."""
    lengths, lowest = lengths_of(analysis), shown_lowest(analysis)
    trained = {finding.subject.train_length for finding in analysis.findings}
    head = ["encoding", "seeds", *(f"{n} (train)" if trained == {n} else str(n) for n in lengths)]
    losses, effects = [], []
    for finding in analysis.findings:
        label, seeds = code(finding.subject.label), str(len(finding.subject.seeds))
        cells = []
        for length in lengths:
            point = finding.at(length)
            mark = " (train)" if length == finding.subject.train_length else ""
            bold = lowest.get(length) == finding.subject.label
            cells.append(_loss(point, bold) + (mark if len(trained) > 1 and point else ""))
        losses.append([label, seeds, *cells])
        ends = finding.endpoint.interval if finding.endpoint is not None else None
        effects.append(
            [
                label,
                (NONE if beyond(finding) else "")
                if ends is None
                else _bold(_with_spread(ends), lowest.get(None) == finding.subject.label),
                effective(finding.tolerated, finding),
                effective(finding.used, finding),
                *(_difference_cell(finding, lengths[-1], name) for name in ("info", "gain", "tax")),
                verdict_at(finding, lengths[-1]),
            ]
        )
    notes = [
        f"intervals: {methods_of(analysis)}{in_brackets(analysis)}; bold: lower than every other "
        "line of its training length that has a value there, by the intervals of all "
        "paired differences together.",
        *(f"{text}: {'; '.join(map(_named, labels))}." for text, labels in remarks(analysis)),
    ]
    longest = lengths[-1]
    parts = [
        _section("nll_by_context: nll with intervals", head, losses, notes),
        _section(
            "what the far context does",
            [
                *("encoding", "endpoint", "tolerated", "used"),
                *(f"{name} at {longest}" for name in ("info", "gain", "tax", "verdict")),
            ],
            effects,
            [
                "endpoint: mean over log T in [L, 16 L] of loss minus reference.",
                "tolerated and used: a length alone is the longest that is shown; >=: the longest "
                "tried; <=: nothing beyond L is shown.",
                f"info, gain, tax and verdict: intervals of all {len(compared_of(analysis))} "
                "compared lines together.",
            ],
        ),
    ]
    if analysis.comparisons:
        parts.append(_differences(analysis.comparisons, lengths))
    return "\n".join(parts)


def _differences(comparisons: Sequence[Comparison], lengths: Sequence[int]) -> str:
    count = len(comparisons)
    together = "the one difference" if count == 1 else f"all {count} differences together"
    lone = f"; in brackets: {DOCUMENTS_ONLY}, of the one seed in common"
    lone = lone if any(len(one.seeds) == 1 for one in comparisons) else ""
    body = []
    for one in comparisons:
        # One seed in common has a spread over documents alone.
        alone = len(one.seeds) == 1
        every = one.documents if alone else {n: p.interval for n, p in one.by_length.items()}
        end = one.endpoint.interval if one.endpoint else None
        if alone:
            end = one.endpoint_documents
        cells = [_with_spread(every[n]) if n in every else "" for n in lengths]
        cells.append(NONE if end is None else _with_spread(end))
        body.append([code(one.a), str(len(one.seeds)), *cells])
    return _section(
        f"nll minus that of {code(comparisons[0].b)}",
        ["encoding", "seeds", *map(str, lengths), "endpoint"],
        body,
        [
            f"paired by seed on the same targets; intervals of {together}{lone}.",
            *(f"{code(one.a)}: {one.why}." for one in comparisons if one.why),
        ],
    )


def _named(label: str) -> str:
    return label if label == _EVERY else code(label)


def csv_table(analysis: Analysis) -> str:
    """CSV with a row a line and length: every number, its bounds and methods, in full precision."""
    rows = [
        _flat_row(analysis, finding, point)
        for finding in analysis.findings
        for point in finding.points
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _flat_row(analysis: Analysis, finding: Finding, point: Point) -> dict[str, Any]:
    subject = finding.subject
    row: dict[str, Any] = {
        "label": subject.label,
        "encoding": subject.row["encoding"],
        "extend": subject.policy,
        "train_length": subject.train_length,
        "length": point.length,
        "seeds": "; ".join(map(str, subject.seeds)),
        "tokens": int(subject.tokens.sum()),
        "documents": int((subject.tokens > 0).sum()),
        "why_undefined": point.why,
    }
    if any(f.subject.frozen for f in analysis.findings):
        row["frozen_seeds"] = "; ".join(map(str, subject.frozen))
    row |= _bounds("nll", point.loss)
    row["nll_by_seed"] = "" if point.summary is None else "; ".join(map(repr, point.summary.values))
    for name in ("median", "best", "worst"):
        row[name] = None if point.summary is None else getattr(point.summary, name)
    row |= _bounds("nll_over_documents", point.documents)
    row |= _bounds("nll_crossed", point.crossed.interval if point.crossed else None)
    row |= _bounds("success", point.success)
    far = point.verdict
    row["verdict"] = far.word if far is not None else None
    for name in ("info", "gain", "tax"):
        row |= _bounds(name, getattr(far, name) if far is not None else None)
    row |= _bounds("recovery", point.recovery.interval if point.recovery is not None else None)
    for name in sorted({n for f in analysis.findings for p in f.points for n in p.probes}):
        row |= _bounds(f"probe_{name}", point.probes.get(name))
    base = finding.reference
    row["reference"] = base.loss if base is not None else None
    row["reference_length"] = base.length if base is not None else None
    row |= _bounds("endpoint", finding.endpoint.interval if finding.endpoint is not None else None)
    row["tolerated"] = "" if finding.tolerated is None else str(finding.tolerated)
    row["used"] = "" if finding.used is None else str(finding.used)
    own = next((one for one in analysis.comparisons if one.a == subject.label), None)
    pair = own.by_length.get(point.length) if own is not None else None
    row["baseline"] = analysis.comparisons[0].b if analysis.comparisons else None
    row |= _bounds("difference", pair.interval if pair is not None else None)
    row["difference_by_seed"] = "" if pair is None else "; ".join(map(repr, pair.per_seed))
    for name in ("correlation", "detectable", "p"):
        row[f"difference_{name}"] = getattr(pair, name) if pair is not None else None
    both = own.crossed.get(point.length) if own is not None else None
    row |= _bounds("difference_crossed", both.interval if both is not None else None)
    texts = own.documents.get(point.length) if own is not None else None
    return row | _bounds("difference_over_documents", texts)


def _bounds(name: str, interval: Interval | None) -> dict[str, Any]:
    values = {"": "estimate", "_low": "low", "_high": "high", "_method": "method"}
    values |= {"_level": "level", "_comparisons": "comparisons", "_df": "df"}
    return {
        name + ending: None if interval is None else getattr(interval, field)
        for ending, field in values.items()
    }


def _loss(point: Point | None, bold: bool) -> str:
    if point is None:
        return ""
    return NONE if point.loss is None else _bold(_with_spread(point.loss), bold)


def _difference_cell(finding: Finding, length: int, name: str) -> str:
    point = finding.at(length)
    if point is None or length <= finding.subject.train_length:
        return ""
    return NONE if point.verdict is None else _with_spread(getattr(point.verdict, name))


def _with_spread(interval: Interval) -> str:
    return f"{three_digits(interval.estimate)} {spread(interval)}".strip()


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _section(
    title: str, head: Sequence[str], body: Iterable[Sequence[str]], notes: Iterable[str]
) -> str:
    lines = [
        f"## {title}\n",
        markdown_line(head),
        markdown_line(["---", *["---:"] * (len(head) - 1)]),
        *map(markdown_line, body),
        "",
        *(f"- {note}" for note in notes),
    ]
    return "\n".join(lines) + "\n"
