"""Sections on what intervals show: the summary, comparisons, lengths, and the far context."""

from __future__ import annotations

import dataclasses
from typing import Any

from eval.measures import VOID_BEYOND, EffectiveLength
from eval.report.analysis import PROBES, Comparison, Finding, Point
from eval.report.page.data import PROTOCOLS, PageData
from eval.report.page.markup import (
    NONE,
    Cell,
    Node,
    h,
    interval_cell,
    interval_notes,
    name_cell,
    number,
    p_value,
    table,
    value_cell,
    with_interval,
)
from eval.report.summary import compared_of, one_text
from eval.stats import DOCUMENTS_ONLY, Interval

PROBE_TITLES = {
    "index_probe": "index",
    "distance_probe": "distance",
    "keys_probe": "number of keys",
    "foreign_prefix": "content",
}


def summary(page: PageData) -> list[Node]:
    """Say in words what the intervals show, and no more."""
    compared = compared_of(page.analysis)
    first = compared[0].subject
    documents = int((first.tokens > 0).sum())
    scored = f"the same {first.tokens.sum():,.0f} target tokens of {documents} documents"
    if not one_text(page.analysis):
        scored = "targets that are not the same for all lines"
    intro = (
        f"Models trained on {first.train_length} tokens at a time were scored on {scored} at "
        f"{len(page.lengths)} lengths, up to {page.lengths[-1]} tokens; losses are in nats per "
        f"token, and brackets hold {page.analysis.level:.0%} intervals."
    )
    if len(compared) > 1:
        intro += (
            f" Those of tax, info and gain hold for all {len(compared)} lines together "
            "(Bonferroni)."
        )
    if all(len(finding.subject.seeds) == 1 for finding in compared):
        intro += (
            f" One seed of each was trained, so all intervals are of {DOCUMENTS_ONLY} and say "
            "nothing of other seeds."
        )
    if any(difference.forbidden for difference in page.differences):
        intro += " These rows differ in what makes numbers incomparable; see What else differs."
    return [
        h("p", intro),
        h("ul", [h("li", h("code", f.subject.label), ": ", _said(f)) for f in compared]),
    ]


def _said(finding: Finding) -> str:
    """Say what a line's intervals show at its longest length, and its endpoint."""
    beyond = [p for p in finding.points if p.length > finding.subject.train_length]
    sentences = []
    if beyond and beyond[-1].loss is None:
        sentences.append(f"no loss at T = {beyond[-1].length} ({beyond[-1].why})")
    judged = next((p for p in reversed(beyond) if p.verdict and p.verdict.word), None)
    if judged:
        sentences.append(_verdict_words(judged, finding.subject.train_length))
    elif beyond:
        why = "" if beyond[-1].loss is None else f" ({_no_verdict(finding, beyond[-1])})"
        sentences.append(f"no verdict on the far context{why}")
    else:
        sentences.append("not scored beyond its training length")
    interval = finding.endpoint.interval if finding.endpoint else None
    if interval is not None:
        sentences.append(
            f"primary endpoint, the mean excess over its reference from L to 16 L, "
            f"{with_interval(interval)}"
        )
    else:
        sentences.append(f"no primary endpoint ({_why_no_endpoint(finding)})")
    if len(finding.subject.seeds) == 1:
        sentences.append(f"{DOCUMENTS_ONLY}: one seed")
    return "; ".join(sentences) + "."


def _verdict_words(point: Point, trained: int) -> str:
    verdict, at = point.verdict, f"T = {point.length}"
    assert verdict is not None
    if verdict.word == "extrapolates":
        return (
            f"extrapolates to {at}: the whole context lowers the loss by "
            f"{with_interval(verdict.gain)} against the last {trained} tokens alone, and by "
            f"{with_interval(verdict.info)} against a foreign prefix"
        )
    if verdict.word == "tolerates":
        return (
            f"tolerates {at}: the tax of a foreign prefix is {with_interval(verdict.tax)}; that it "
            f"extrapolates is not shown: info is {with_interval(verdict.info)}, and gain over the "
            f"last {trained} tokens alone is {with_interval(verdict.gain)}"
        )
    return (
        f"at {at} neither extrapolation nor tolerance is shown: the tax of a foreign prefix is "
        f"{with_interval(verdict.tax)}, info is {with_interval(verdict.info)}, and gain over the "
        f"last {trained} tokens alone is {with_interval(verdict.gain)}"
    )


def _no_verdict(finding: Finding, point: Point) -> str:
    if "used" in finding.missing and point.verdict is None:
        return finding.missing["used"]
    if point.verdict is not None:
        return point.verdict.tax.why or "no interval"
    return f"the loss at L = {finding.subject.train_length} or a control is missing"


def baseline(page: PageData) -> list[Node]:
    """Give differences from the baseline."""
    if not page.analysis.comparisons:
        return []
    base = page.analysis.comparisons[0].b
    body: list[list[Cell | str]] = []
    intervals: list[Interval | None] = []
    notes = [
        f"Each line minus `{base}` on the same seeds and targets, nats per token; below 0 is a "
        "lower loss.",
        "Correlation: of the two over seeds; at 0 or below, pairing gains nothing. Detectable: "
        "the smallest difference found four times in five, if the spread is as estimated.",
        "p: two-sided, times the number of comparisons; from 8 seeds on.",
    ]
    for comparison in page.analysis.comparisons:
        if comparison.endpoint is not None:
            end = comparison.endpoint
            both = comparison.endpoint_crossed.interval if comparison.endpoint_crossed else None
            texts = comparison.endpoint_documents
            body.append(_compared_line(comparison, Cell("L to 16 L", -1), end, both, texts))
            intervals += [end.interval, both, texts]
        elif comparison.why:
            notes.append(f"`{comparison.a}`: {comparison.why}.")
        for length, pair in comparison.by_length.items():
            crossed = comparison.crossed[length].interval
            documents = comparison.documents[length]
            body.append(_compared_line(comparison, name_cell(length), pair, crossed, documents))
            intervals += [pair.interval, crossed, documents]
    header = [
        *("encoding", "T", "difference", "seeds and documents", "over documents"),
        *("correlation", "detectable", "p", "each seed"),
    ]
    if any(comparison.endpoint for comparison in page.analysis.comparisons):
        notes.append("L to 16 L: the difference of the primary endpoints.")
    notes += interval_notes(intervals)
    return [table("against", f"Difference from {base}", header, body, notes)]


def _compared_line(
    comparison: Comparison,
    place: Cell,
    pair: Any,
    crossed: Interval | None,
    documents: Interval | None,
) -> list[Cell | str]:
    each = "; ".join(
        f"{seed}: {number(value)}"
        for seed, value in zip(comparison.seeds, pair.per_seed, strict=True)
    )
    return [
        comparison.a,
        place,
        interval_cell(pair.interval),
        interval_cell(crossed),
        interval_cell(documents),
        value_cell(pair.correlation),
        value_cell(pair.detectable),
        Cell(p_value(pair.p), pair.p),
        Cell(each, kind="list"),
    ]


def effective(page: PageData) -> list[Node]:
    """Give references, endpoints and effective lengths."""
    body: list[list[Cell | str]] = []
    for finding in page.findings:
        end = finding.endpoint.interval if finding.endpoint else None
        base = finding.reference
        first = (
            Cell(NONE, more=finding.missing.get("reference", ""))
            if base is None
            else dataclasses.replace(value_cell(base.loss), more=f"at T = {base.length}")
        )
        body.append(
            [
                finding.subject.label,
                first,
                interval_cell(end, _why_no_endpoint(finding) if end is None else ""),
                _length_cell(finding.tolerated, finding.missing.get("tolerated", "")),
                _length_cell(finding.used, finding.missing.get("used", "")),
            ]
        )
    asked = [
        interval
        for f in page.findings
        for length in (f.tolerated, f.used)
        if length is not None
        for _, interval in length.intervals
    ]
    together = max((interval.comparisons for interval in asked if interval), default=1)
    notes = [
        "Reference: the lowest mean loss at any T up to L. Primary endpoint: the mean over log T "
        "in [L, 16 L] of loss minus reference; every length in the range must be defined.",
        "Tolerated: the longest T such that at every evaluated length from the reference's to it "
        "the loss is within 0.05 nats of the reference, by the upper bound.",
        "Used: the longest T with info(T) - info(T/2) above 0 by its lower bound, where info is "
        "the loss with a foreign prefix minus that with the true one.",
        "A length alone: at no longer one is it shown, which is not to say that it ends there; >=: "
        "the longest tried; <=: no gain beyond was shown; void: not asked, for the reason given. "
        f"Both are void where the reference is more than {VOID_BEYOND:g} nats above the lowest.",
        *interval_notes(f.endpoint.interval for f in page.findings if f.endpoint),
    ]
    if together > 1:
        notes.append(
            f"Tolerated and used: {page.analysis.level:.0%} intervals for all {together} "
            "encodings together (Bonferroni)."
        )
    header = ["encoding", "reference", "primary endpoint", "tolerated", "used"]
    return [
        table("effective-lengths", "Effective lengths and primary endpoint", header, body, notes)
    ]


def _length_cell(length: EffectiveLength | None, missing: str) -> Cell:
    if length is None:
        return Cell(NONE, more=missing)
    why = length.why
    if length.without:
        why += f"; not shown at {', '.join(map(str, length.without))}"
    return Cell(str(length), length.length, more=why)


def _why_no_endpoint(finding: Finding) -> str:
    if finding.endpoint is None:
        return finding.missing.get("endpoint", "it cannot be computed")
    return finding.endpoint.why


def far_context(page: PageData) -> list[Node]:
    """Give tax, info and gain, and the verdict that follows."""
    found = [(f, p) for f, p in page.points if p.verdict is not None]
    body: list[list[Cell | str]] = []
    for finding, point in found:
        verdict = point.verdict
        assert verdict is not None
        body.append(
            [
                finding.subject.label,
                name_cell(point.length),
                *(interval_cell(one) for one in (verdict.tax, verdict.info, verdict.gain)),
                verdict.word or Cell(NONE),
            ]
        )
    if not body:
        return []
    notes = [
        "Tax: loss with a foreign prefix minus that of the last L tokens alone. Info: loss with a"
        " foreign prefix minus that with the true one. Gain: loss of the last L tokens alone "
        "minus that with the whole context. Nats per token.",
        "Extrapolates: info and gain are above 0 by their intervals. Tolerates: not so, and the "
        "tax is at most 0.05 nats by its upper bound. Neither: neither is shown.",
        *interval_notes(i for _, p in found if p.verdict for i in (p.verdict.tax, p.verdict.info)),
    ]
    header = ["encoding", "T", "tax", "info", "gain", "verdict"]
    return [table("tax", "Tax, info and gain by length", header, body, notes)]


def probes(page: PageData) -> list[Node]:
    """Give the harm of one thing about length at a time."""
    found = [(f, p) for f, p in page.points if p.probes and p.length > f.subject.train_length]
    names = [name for name in PROBES if any(name in p.probes for _, p in found)]
    # With a foreign prefix alone it would be the tax once more.
    if not set(names) - {"foreign_prefix"}:
        return []
    body: list[list[Cell | str]] = [
        [
            finding.subject.label,
            name_cell(point.length),
            *(interval_cell(point.probes.get(name)) for name in names),
        ]
        for finding, point in found
    ]
    notes = [
        "Loss minus that of the last L tokens alone, nats per token, where one thing is as at T: "
        + "; ".join(f"{PROBE_TITLES[n]}: {PROTOCOLS[n].rstrip('.')}" for n in names)
        + ".",
        *interval_notes(i for _, p in found for i in p.probes.values()),
    ]
    header = ["encoding", "T", *(PROBE_TITLES[name] for name in names)]
    return [table("probe", "Harm of one thing at a time", header, body, notes)]


def recoveries(page: PageData) -> list[Node]:
    """Give what part of the gain of training long is had without it."""
    found = [(f, p.length, p.recovery) for f, p in page.points if p.recovery is not None]
    if not found:
        return []
    body: list[list[Cell | str]] = [
        [
            finding.subject.label,
            name_cell(length),
            interval_cell(one.interval, one.why),
            interval_cell(one.denominator),
        ]
        for finding, length, one in found
    ]
    notes = [
        "Recovery: (TRUNC - loss) / (TRUNC - train-long): of what training at T gains over the "
        "last L tokens alone, the part that is had without it. Given where the denominator is "
        "above 0 by its interval.",
        *interval_notes(i for _, _, one in found for i in (one.interval, one.denominator)),
    ]
    header = ["encoding", "T", "recovery", "TRUNC - train-long"]
    return [table("recovered", "Recovery by length", header, body, notes)]
