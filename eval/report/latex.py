"""The report's table for a paper: booktabs, and no other package."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from eval.report.analysis import Analysis, Finding
from eval.report.summary import (
    NONE,
    beyond,
    compared_of,
    effective,
    in_brackets,
    lengths_of,
    methods_of,
    one_text,
    remarks,
    seeds_of,
    shown_lowest,
    spread,
    verdict_at,
)
from eval.report.table import three_digits
from eval.stats import Interval

_SPECIAL = {
    **{character: f"\\{character}" for character in "_%&#{}$"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "{''}",
    "`": r"\textasciigrave{}",
    "'": "{'}",
}

# Of means, and of what stands below them: with more lengths, smaller.
_SIZES = (("footnotesize", "scriptsize"), ("scriptsize", "tiny"))


def escaped(text: str) -> str:
    """Give plain text as LaTeX that prints it; what pdfTeX has no letter for, by its number."""
    shown = (c for c in unicodedata.normalize("NFC", text) if c.isprintable() or c.isspace())
    plain = " ".join("".join(shown).split())
    written = "".join(
        _SPECIAL.get(c) or (c if c.isascii() or "À" <= c <= "ÿ" else f"U+{ord(c):04X}")
        for c in plain
    )
    # A run of hyphens would become a dash.
    return re.sub("-(?=-)", "-{}", written)


def latex_table(analysis: Analysis, label: str = "tab:extrapolation") -> str:
    r"""Give a table environment with one row a line of the report, for ``\input``.

    Args:
        analysis: whose numbers.
        label: of the table, as ``\ref`` names it.
    """
    lengths, lowest = lengths_of(analysis), shown_lowest(analysis)
    size, small = _SIZES[len(lengths) > 6]
    rows = [_rows(finding, lengths, lowest, small) for finding in analysis.findings]
    longest = lengths[-1]
    head = [
        "encoding",
        *map(str, lengths),
        *("endpoint", "tolerated", "used", f"at ${longest}$"),
    ]
    count = len(lengths)
    return "\n".join(
        [
            "% Needs \\usepackage{booktabs}. Generated from result rows.",
            "% Bold: the paired difference from each other line of the same training length that",
            "% has a value there lies below 0 with its interval over seeds, at a level that holds",
            "% for all pairs of lines together. Where no interval says so, nothing is bold.",
            "\\begin{table*}",
            "\\centering",
            f"\\caption{{{_caption(analysis)}}}",
            f"\\label{{{label}}}",
            f"\\vspace{{4pt}}\\{size}",
            "\\setlength{\\tabcolsep}{3pt}",
            f"\\begin{{tabular}}{{@{{}}l{'r' * count}rrrl@{{}}}}",
            "\\toprule",
            f" & \\multicolumn{{{count}}}{{c}}{{loss by tokens in the window, $T$}} & & "
            "\\multicolumn{2}{c}{length} & verdict \\\\",
            f"\\cmidrule(lr){{2-{count + 1}}} \\cmidrule(lr){{{count + 3}-{count + 4}}}",
            " & ".join(head) + " \\\\",
            "\\midrule",
            *_spaced(rows),
            "\\bottomrule",
            "\\end{tabular}",
            *_notes(analysis),
            "\\end{table*}",
            "",
        ]
    )


def _caption(analysis: Analysis) -> str:
    row, subject = analysis.findings[0].subject.row, analysis.findings[0].subject
    data = row.get("data") or {}
    corpus = " ".join(str(data[key]) for key in ("name", "version") if data.get(key))
    targets = f"the last {row['targets']} tokens" if row.get("targets") else "the last tokens"
    scored = (
        f"{int(subject.tokens.sum()):,} targets of {int((subject.tokens > 0).sum())} documents"
        + (f" of {escaped(corpus)}" if corpus else "")
        if one_text(analysis)
        else "not the same targets for all lines"
    )
    levels = escaped(methods_of(analysis) + in_brackets(analysis))
    compared = len(compared_of(analysis))
    parts = [
        f"Loss, the mean negative log-likelihood in nats per token, of {targets} of windows of $T$ "
        f"tokens, which are the same at every $T$ (protocol nll\\_by\\_context; {scored}).",
        f"Seeds: {seeds_of(analysis)}. Below each mean: its interval ({levels}).",
        "$^\\dagger$: the training length $L$.",
        "Endpoint: the mean over $\\log T$ in $[L, 16L]$ of the loss minus the lowest at any "
        "$T \\le L$.",
        "Length: the longest $T$ that is tolerated, and whose context is used.",
    ]
    if compared > 1:
        parts.append(f"Lengths and verdicts: with intervals of all {compared} lines together.")
    return "\n".join(parts)


def _rows(
    finding: Finding, lengths: Sequence[int], lowest: dict[int | None, str], small: str
) -> tuple[list[str], list[str]]:
    """Give the cells of a line's means, and those of the intervals below them."""
    subject = finding.subject
    encoding = subject.row["encoding"]
    rest = subject.label.removeprefix(encoding).removeprefix(", ")
    above, below = [escaped(encoding)], [_sized(escaped(rest), small)]

    def add(interval: Interval | None, absent: str, bold: bool, mark: str = "") -> None:
        if interval is None:
            above.append(absent + mark)
            below.append("")
            return
        number = three_digits(interval.estimate)
        text = f"\\textbf{{{number}}}" if bold else number.replace("-", "$-$")
        above.append(text + mark)
        below.append(_sized(_limits(interval), small))

    for length in lengths:
        point = finding.at(length)
        mark = "\\rlap{$^\\dagger$}" if point and length == subject.train_length else ""
        bold = lowest.get(length) == subject.label
        add(point.loss if point else None, NONE if point else "", bold, mark)
    ends = finding.endpoint.interval if finding.endpoint is not None else None
    add(ends, NONE if beyond(finding) else "", lowest.get(None) == subject.label)
    for effect in (finding.tolerated, finding.used):
        text = effective(effect, finding)
        above.append(text.replace(">= ", "$\\ge$\\,").replace("<= ", "$\\le$\\,"))
        below.append("")
    above.append(verdict_at(finding, lengths[-1]))
    below.append("")
    return above, below


def _limits(interval: Interval) -> str:
    return spread(interval, "$\\pm$").replace(" ", "\\,").replace("-", "$-$")


def _sized(text: str, size: str) -> str:
    return f"{{\\{size} {text}}}" if text else ""


def _spaced(rows: Sequence[tuple[list[str], list[str]]]) -> list[str]:
    lines = []
    for above, below in rows:
        lines.append(" & ".join(above) + " \\\\[-1pt]")
        lines.append(" & ".join(below) + " \\\\[2pt]")
    return lines


def _notes(analysis: Analysis) -> list[str]:
    found = [
        f"{escaped(text)} ({'; '.join(map(escaped, labels))})."
        for text, labels in remarks(analysis)
    ]
    if not found:
        return []
    words = [f"{NONE}: no value."] + [note[0].upper() + note[1:] for note in found]
    return [
        "\\par\\smallskip",
        "\\begin{minipage}{\\linewidth}\\scriptsize\\raggedright",
        "\n".join(words),
        "\\end{minipage}",
    ]
