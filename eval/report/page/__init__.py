"""The page: everything that rows say, in one HTML file that asks nothing of a network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from eval.report.analysis import PRIMARY, Analysis
from eval.report.comparable import Difference
from eval.report.lines import lines_of
from eval.report.page import findings, losses, runs
from eval.report.page.chart import colours
from eval.report.page.data import PageData
from eval.report.page.markup import Node, h, html, words
from eval.report.rows import Row

__all__ = ["render_page"]


def render_page(
    rows: Iterable[Row],
    analysis: Analysis,
    differences: Sequence[Difference],
    *,
    references: str,
    methods: str,
    attention: bytes | None = None,
) -> str:
    """Give the report's ``index.html``: one file, without requests; the same rows, the same page.

    Args:
        rows: as `read_rows` gives them; of any protocol.
        analysis: of these rows, by `analyse`.
        differences: of these rows, by `differences`.
        references: BibTeX; may be empty.
        methods: the protocol in words: paragraphs, lists with ``-``, headings with ``#`` and
            `code`; may be empty.
        attention: a drawing of how models attend, PNG; None where nothing was read out.
    """
    rows = list(rows)
    page = PageData(rows, analysis, differences, lines_of(rows, PRIMARY))
    sections = [
        ("compared", "What was compared", runs.compared(page)),
        ("differences", "What else differs", runs.differing(page)),
        ("curves", "Loss by length", losses.by_length(page)),
        ("positions", "Loss by position in the window", losses.by_place(page)),
        ("baseline", "Differences from the baseline", findings.baseline(page)),
        ("effective", "Effective lengths and primary endpoint", findings.effective(page)),
        ("seeds", "Seeds, and other intervals", losses.seeds(page)),
        ("far", "What the far context does", findings.far_context(page)),
        ("probes", "Probes by position", findings.probes(page)),
        ("recovery", "Recovery", findings.recoveries(page)),
        ("attention", "How the models attend", _attention(attention)),
        ("costs", "Costs and tuning", runs.costs(page)),
        ("slices", "Slices", losses.slices(page)),
        ("protocols", "Other protocols", losses.other_protocols(page)),
        ("validations", "Last validations", runs.validations(page)),
        ("provenance", "Provenance", runs.provenance(page)),
        ("bibtex", "References", _references(references)),
        ("methods", "Methods", _methods(methods)),
    ]
    shown = [(name, title, content) for name, title, content in sections if content]
    body: list[Node] = [
        h("a", "Skip to the results", href="#results", class_="skip"),
        h("header", h("h1", _title(page)), findings.summary(page)),
        h(
            "nav",
            h("ul", [h("li", h("a", title, href=f"#{name}")) for name, title, _ in shown]),
            aria_label="Sections",
        ),
        h(
            "main",
            [
                h(
                    "section",
                    h("h2", title, id=f"{name}-h"),
                    content,
                    id=name,
                    aria_labelledby=f"{name}-h",
                )
                for name, title, content in shown
            ],
            id="results",
            tabindex="-1",
        ),
    ]
    return _document(_title(page), body)


def _document(title: str, body: list[Node]) -> str:
    folder = Path(__file__).parent
    style = (folder / "page.css").read_text(encoding="utf-8") + colours(dark=False)
    style += f"@media screen and (prefers-color-scheme:dark){{{colours(dark=True)}}}"
    script = (folder / "page.js").read_text(encoding="utf-8")
    # Nothing but these two may run, and nothing may be asked for: not even by text that got in.
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", http_equiv="Content-Security-Policy", content=policy),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", title),
        h("link", rel="icon", href="data:,"),
        h("style", style),
    )
    page = h("html", head, h("body", body, h("script", script)), lang="en")
    return f"<!doctype html>\n{html(page)}\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _title(page: PageData) -> str:
    encodings = list(dict.fromkeys(line.encoding for line in page.lines))
    named = ", ".join(encodings) if len(encodings) <= 4 else f"{len(encodings)} encodings"
    return f"Loss by context length: {named}"


def _attention(drawing: bytes | None) -> list[Node]:
    if drawing is None:
        return []
    return [
        h(
            "figure",
            h(
                "img",
                src="data:image/png;base64," + base64.b64encode(drawing).decode(),
                alt="Attention mass by distance, entropy by place, deviation of logits by length, "
                "and learned parameters by step; their numbers are in the folder mechanism.",
                class_="drawing",
            ),
            h(
                "figcaption",
                "Means over heads, windows and seeds, a curve a layer, of the last queries of each "
                "window: the part of their weights that goes so many tokens back; the entropy of "
                "the weights of queries at a place; the standard deviation of their logits over "
                "visible keys. Learned parameters of the encoding: root mean square over training.",
            ),
        )
    ]


def _references(references: str) -> list[Node]:
    if not references.strip():
        return []
    return [
        h(
            "button",
            "Copy BibTeX",
            type="button",
            class_="copy",
            data_copy="bibtex-text",
            hidden="",
        ),
        h("pre", references.strip() + "\n", id="bibtex-text", tabindex="0"),
    ]


def _methods(methods: str) -> list[Node]:
    """Mark up paragraphs, lists and headings; anything else is text."""
    parts: list[Node] = []
    for block in methods.replace("\r\n", "\n").split("\n\n"):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        while lines and lines[0].startswith("#"):
            parts.append(h("h3", words(lines.pop(0).lstrip("#").strip())))
        if lines and lines[0].startswith("- "):
            items: list[str] = []
            for line in lines:
                if line.startswith("- "):
                    items.append(line[2:])
                else:
                    items[-1] += f" {line}"
            parts.append(h("ul", [h("li", words(item)) for item in items]))
        elif lines:
            parts.append(h("p", words(" ".join(lines))))
    return parts
