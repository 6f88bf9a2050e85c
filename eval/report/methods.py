"""The paragraph of a paper's appendix that says how its numbers were made, from rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eval.measures import ENDPOINT_REACH, TOLERANCE, VOID_BEYOND
from eval.report.analysis import FOREIGN, PRIMARY, Analysis
from eval.report.comparable import differences
from eval.report.lines import chosen_checkpoints, lines_of
from eval.report.rows import Row
from eval.report.summary import compared_of, methods_of
from eval.report.table import code
from eval.stats import DOCUMENTS_ONLY, OVER_SEEDS, SEEDS_FOR_P

_BOS = {
    "keep": "A window has a BOS token only where it begins a document, as in training.",
    "prepend": "Every window begins with a BOS token.",
    "none": "No window has a BOS token.",
}
_SIZES = ("blocks", "documents", "tokens")


def methods(rows: Iterable[Row], analysis: Analysis, left_out: int = 0) -> str:
    """Give the paragraphs as Markdown; what the rows do not say is not in them.

    Args:
        rows: of the report.
        analysis: their numbers.
        left_out: lines that were no rows, and are in no number.
    """
    rows = list(rows)
    sections = {
        "Models and training": _training(rows),
        "Evaluation": _evaluation(rows),
        "Statistics": _statistics(rows, analysis),
        "Provenance": _provenance(rows, left_out),
    }
    parts = [
        f"## {title}\n\n{' '.join(sentences)}\n"
        for title, sentences in sections.items()
        if sentences
    ]
    return "\n".join(parts)


def _training(rows: list[Row]) -> list[str]:
    runs = {(row["run"], row["seed"]): row for row in rows}
    every = list(runs.values())
    encodings = [code(text) for text in _known(every, lambda row: row["encoding"])]
    said = [f"The encodings are {_listed(encodings)}."]
    models = _known(every, lambda row: row.get("model"))
    if models:
        sizes = [row["parameters"] for row in every if row.get("parameters")]
        weights = f" of {_span(sizes)} parameters" if sizes else ""
        said.append(f"Each is in a `{_listed(models)}` transformer{weights}.")
    for name, usual, text in (
        ("sharing", "all", "Positions share weights as `{}` says."),
        ("positions", "sequential", "Training windows take positions by `{}`."),
        ("lengths", "fixed", "Lengths of training windows: `{}`."),
    ):
        values = list(dict.fromkeys(row[name] for row in every if row.get(name) is not None))
        if any(value != usual for value in values):
            said.append(text.format(_listed(values)))
    packing = _known(every, lambda row: row.get("packing"))
    if packing:
        said.append(f"Packing of documents in training windows: {_listed(packing)}.")
    texts = _known(every, lambda row: _corpus(row.get("data") or {}))
    said += [f"The text is {text}." for text in texts]
    lengths = sorted({row["train_length"] for row in every})
    said.append(
        f"The training length L is {lengths[0]:,} tokens."
        if len(lengths) == 1
        else f"Training lengths L are {_listed([f'{n:,}' for n in lengths])} tokens."
    )
    tokens = [row["train_tokens"] for row in every if row.get("train_tokens")]
    if tokens:
        said.append(f"A run is trained on {_span(tokens)} tokens.")
    seeds = sorted({row["seed"] for row in every})
    numbers = ", ".join(map(str, seeds))
    said.append(
        f"There is one seed ({numbers})."
        if len(seeds) == 1
        else f"There are {len(seeds)} seeds ({numbers})."
    )
    fewer = [line for line in lines_of(rows, PRIMARY) if len(line.seeds) < len(seeds)]
    if fewer:
        had = [f"{', '.join(map(str, line.seeds))} for {code(line.label)}" for line in fewer]
        said.append(f"Of these there are only {'; '.join(had)}.")
    lost = {(row["run"], seed) for row in every for seed in row.get("frozen_seeds") or ()}
    if lost:
        names = _listed([f"seed {seed} of `{run}`" for run, seed in sorted(lost)])
        said.append(
            f"Training diverged for {names}: in no mean, and a failure in rates of success."
        )
    if any("fixed_seeds" in row for row in every):
        fixed = _fixed(every)
        said.append(
            "The seed sets initial weights and the order of the data"
            + (f", but for what is the same for all: {fixed}." if fixed else ".")
        )
    for tuning in _tunings(every):
        said.append(tuning)
    shared = [row for row in every if row.get("settings") == "shared"]
    if shared and len(shared) < len(every):
        said.append("Lines marked shared have one recipe for all encodings.")
    return said


def _evaluation(rows: list[Row]) -> list[str]:
    primary = [row for row in rows if row["protocol"] == PRIMARY]
    said = []
    if primary:
        row = next((row for row in primary if row["defined"]), primary[0])
        lengths = [f"{n:,}" for n in sorted({row["length"] for row in primary})]
        said.append(
            f"Primary protocol, `{PRIMARY}`: the loss is the mean negative log-likelihood, in nats "
            f"per token, of the same target tokens with windows of T = {_listed(lengths)} tokens, "
            "context and targets together; each T is a pass of its own."
        )
        if row.get("targets"):
            said.append(f"A block has {row['targets']:,} targets.")
        counts = [f"{row[name]:,} {name}" for name in ("blocks", "documents") if row.get(name)] + (
            [f"{row['tokens']:,} targets"] if row.get("tokens") else []
        )
        sizes = {tuple(one.get(name) for name in _SIZES) for one in primary if one["defined"]}
        if counts and len(sizes) < 2:
            said.append(f"Each seed and length is scored on {_listed(counts)} in all.")
        limits = [
            text.format(row[name])
            for name, text in (
                ("blocks_per_document", "at most {:,} a document"),
                ("block_spacing", "their starts at least {:,} tokens apart"),
                ("longest_length", "each with context enough for a window of {:,} tokens"),
            )
            if row.get(name)
        ]
        if limits:
            said.append(f"Blocks: {', '.join(limits)}.")
    for bos in _known(primary or rows, lambda row: row.get("bos")):
        said.append(_BOS.get(bos, f"BOS: {bos}."))
    present = {row["protocol"] for row in rows}
    descriptions = {
        "non_overlapping": "`non_overlapping`: windows side by side over the beginning of each "
        "document",
        "sliding": "`sliding`: windows that overlap, each of which scores its last tokens",
        "per_position": "`per_position`: the loss by position in the longest window that has a "
        "value",
        FOREIGN: f"`{FOREIGN}`: T - L tokens of another document, then the last L true ones",
        "index_probe": "`index_probe`: the last L tokens, all positions moved by T - L",
        "distance_probe": "`distance_probe`: the last L tokens with a gap of T - L positions in "
        "their middle",
        "keys_probe": "`keys_probe`: the last T tokens within L positions, which repeat",
        "aligned": "`aligned`: fewer tokens than L, at the positions that they have at the end "
        "of L",
        "slice": f"`slice`: targets of `{PRIMARY}` by what they need, {_slicing(rows)}",
    }
    named = [text for name, text in descriptions.items() if name in present]
    if named:
        said.append(f"Beside it: {'; '.join(named)}.")
    if FOREIGN in present:
        said.append(
            "tax(T) is the loss with the foreign prefix minus that of the last L tokens alone "
            "(TRUNC); info(T) is the loss with the foreign prefix minus that with the true one; "
            "gain(T) is TRUNC minus the loss with the true one."
        )
    policies = _known(rows, lambda row: row.get("extend"))
    if policies:
        said.append(
            "Extension policies, applied to trained models without further training: "
            f"{_listed([code(policy) for policy in policies])}."
        )
    steps = _known(primary or rows, lambda row: row.get("checkpoint"))
    said += ["The checkpoint is the last step."] if steps == ["last"] else []
    if chosen := chosen_checkpoints(rows):
        said.append(chosen)
    return said


def _slicing(rows: list[Row]) -> str:
    own = [row for row in rows if row["protocol"] == "slice"]
    grams = sorted({row["ngram"] for row in own if row.get("ngram")})
    said = []
    if grams:
        said.append(
            f"how far back the {_listed(grams)} tokens that end with a target last occurred"
        )
    if any("mask" in str(row.get("slice")) for row in own):
        said.append("whether a mask of tokens, by a model that is not among these, holds them")
    return " and ".join(said) or "as the rows name it"


def _statistics(rows: list[Row], analysis: Analysis) -> list[str]:
    losses = [p.loss for f in analysis.findings for p in f.points if p.loss is not None]
    used = {loss.method for loss in losses}
    said = [
        "An estimate is a mean per token within each seed, then the mean over seeds; intervals of "
        f"losses are {methods_of(analysis)}."
    ]
    if DOCUMENTS_ONLY in used:
        said.append(
            "Where there is one seed, the interval is a percentile bootstrap over documents only "
            "and says nothing of other seeds."
        )
    if OVER_SEEDS in used:
        said.append("Student's t over seeds is about other seeds on these documents.")
    compared = len(compared_of(analysis))
    if analysis.comparisons:
        count = len(analysis.comparisons)
        base = analysis.comparisons[0].b
        said.append(
            f"Differences from {code(base)} are paired by seed on identical targets; their level "
            f"holds for {'the one' if count == 1 else f'all {count}'} of them together "
            f"(Bonferroni). p-values are given from {SEEDS_FOR_P} seeds on."
        )
    said.append(
        "The reference of a line is its lowest mean loss at any T up to L. The primary endpoint is "
        f"the mean over log T in [L, {ENDPOINT_REACH} L] of loss minus reference (trapezoid rule)."
    )
    said.append(
        "The tolerated length is the longest T such that at each evaluated length up to it the "
        f"upper bound of loss minus reference is within {TOLERANCE:g} nats; it is void where the "
        f"reference is more than {VOID_BEYOND:g} nats above the lowest."
    )
    if any(f.used is not None for f in analysis.findings):
        said.append(
            "The used length is the longest T whose info(T) - info(T/2) lies above 0 with its "
            "interval; it is void where the tolerated length is."
        )
    if any(p.verdict is not None for f in analysis.findings for p in f.points):
        said.append(
            "A line extrapolates to T where info and gain lie above 0 with their intervals; "
            f"otherwise it tolerates T where the upper bound of the tax is within {TOLERANCE:g} "
            "nats."
        )
    if compared > 1:
        said.append(
            f"Effective lengths and verdicts have intervals whose level holds for all {compared} "
            "compared lines together (Bonferroni)."
        )
    known = {finding.subject.label for finding in analysis.findings}
    apart = [line.label for line in lines_of(rows, PRIMARY) if line.label not in known]
    if apart:
        labels = _listed([code(label) for label in apart])
        said.append(f"Without sums by document, {labels} have no intervals.")
    mixed = [str(one) for one in differences(rows) if one.forbidden]
    if mixed:
        said.append(f"Runs differ in what makes numbers incomparable: {'; '.join(mixed)}.")
    return said


def _provenance(rows: list[Row], left_out: int) -> list[str]:
    def versions(row: Row) -> str | None:
        known = row.get("versions") or {}
        return ", ".join(f"{name} {known[name]}" for name in sorted(known)) or None

    def commit(row: Row, key: str | None = None) -> str | None:
        place = row if key is None else row.get(key) or {}
        dirty = " with changes that are in no commit" if place.get("dirty") else ""
        return f"{place['commit'][:12]}{dirty}" if place.get("commit") else None

    facts: list[tuple[str, Callable[[Row], Any]]] = [
        ("Trained at commit {}.", lambda row: commit(row, "trained_with")),
        ("Trained on {}.", lambda row: (row.get("trained_with") or {}).get("device")),
        ("Evaluated at commit {}.", commit),
        ("Evaluated on {}.", lambda row: row.get("device")),
        ("Activations are {}.", lambda row: row.get("dtype")),
        ("Matrix products have precision {}.", lambda row: row.get("matmul_precision")),
        ("Versions: {}.", versions),
    ]
    said = [
        text.format("; ".join(map(str, known)))
        for text, fact in facts
        if (known := _known(rows, fact))
    ]
    if left_out:
        verb = "line was" if left_out == 1 else "lines were"
        said.append(f"{left_out} {verb} left out that could not be read as result rows.")
    return said


def _corpus(data: dict[str, Any]) -> str | None:
    if not data.get("name"):
        return None
    words = [f"`{' '.join(str(data[key]) for key in ('name', 'version') if data.get(key))}`"]
    if data.get("sha256"):
        words.append(f"SHA-256 {str(data['sha256'])[:16]}")
    if data.get("tokenizer"):
        words.append(f"tokenizer `{data['tokenizer']}`")
    if data.get("split_rule"):
        version = f" (version {data['split_version']})" if data.get("split_version") else ""
        words.append(f"split by {data['split_rule']}{version}")
    return ", ".join(words)


def _fixed(rows: list[Row]) -> str:
    fixed = {kind: seed for row in rows for kind, seed in (row.get("fixed_seeds") or {}).items()}
    return ", ".join(f"{kind} (seed {seed})" for kind, seed in sorted(fixed.items()))


def _tunings(rows: list[Row]) -> list[str]:
    designs = {}
    for row in rows:
        if tuning := row.get("tuning"):
            grid = "; ".join(
                f"{name} in {', '.join(map(str, values))}"
                for name, values in tuning["grid"].items()
            )
            designs[json.dumps([grid, tuning["trials"], tuning["steps"], tuning["seed"]])] = (
                f"Lines marked tuned: {tuning['trials']} trials an encoding of {grid}, "
                f"{tuning['steps']} steps, seed {tuning['seed']}; chosen by "
                f"{tuning['criterion']}."
            )
    return [designs[key] for key in sorted(designs)]


def _known(rows: Iterable[Row], fact: Callable[[Row], Any]) -> list[Any]:
    return list(dict.fromkeys(value for row in rows if (value := fact(row)) is not None))


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _listed(words: Sequence[Any]) -> str:
    words = [str(word) for word in words]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
