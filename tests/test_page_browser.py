"""The page in a real headless Chromium: what it shows, asks for, and does at a click or a key."""

import os
import shutil

import pytest
from page_study import LENGTHS, LIMITED, numbers, study

from eval.report.analysis import analyse
from eval.report.comparable import differences
from eval.report.page import render_page

pytestmark = pytest.mark.peers

BIBTEX = "@article{su2021,\n  title = {RoFormer},\n}\n"
SECTIONS = ("compared", "differences", "curves", "baseline", "effective", "seeds", "far", "bibtex")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("POSENC_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium: install Debian's chromium, or name one by POSENC_CHROMIUM")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    rows = study(dirty=True)
    page = render_page(
        rows, analyse(rows), differences(rows), references=BIBTEX, methods="Words.\n"
    )
    file = tmp_path_factory.mktemp("report") / "index.html"
    file.write_text(page, encoding="utf-8")
    return file


@pytest.fixture
def visit(browser, file):
    """Open the page; at the end, it must have asked for nothing and complained of nothing."""
    contexts, heard = [], []

    def opened(width=1200, permissions=(), **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        context.grant_permissions(list(permissions))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: heard.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: heard.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    asked = []
    yield opened
    for context in contexts:
        context.close()
    assert heard == []
    assert asked == [file.as_uri()] * len(contexts)


def column(page, table, index):
    return page.eval_on_selector_all(
        f"#{table} tbody tr", "(rows, n) => rows.map((row) => row.cells[n].innerText)", index
    )


def test_everything_is_there_and_seen(visit):
    page = visit()
    for name in SECTIONS:
        assert page.locator(f"#{name} h2").is_visible()
    for name in ("chart-length", "chart-position"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["width"] > 600
        assert box["height"] > 300
    # Every mark is within its drawing.
    outside = page.evaluate("""() => [...document.querySelectorAll("figure > svg")].map((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll("text, .mean, .seed, .cross")].filter((mark) => {
            const box = mark.getBoundingClientRect();
            return box.left < frame.left - 1 || box.right > frame.right + 1 ||
                box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
        }).map((mark) => mark.outerHTML);
    }).flat()""")
    assert outside == []
    page.locator("#positions summary").click()
    assert page.locator("#by-position").is_visible()
    # Colours are in force under the page's own policy: curves differ, warnings are red.
    strokes = page.eval_on_selector_all(
        "#chart-length .line", "lines => lines.map((line) => getComputedStyle(line).stroke)"
    )
    assert len(set(strokes)) == 3
    red = page.locator("#provenance p.red").evaluate("e => getComputedStyle(e).color")
    assert red == "rgb(176, 0, 32)"


def test_a_header_sorts_its_table_and_says_so(visit):
    page = visit()
    last = 2 + LENGTHS.index(1024)
    header = page.locator("#loss thead th").nth(last)
    before = column(page, "loss", last)
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "ascending"
    up = column(page, "loss", last)
    values = [numbers(text)[0] for text in up if numbers(text)]
    assert len(values) == 2
    assert values == sorted(values)
    assert [text for text in up if not numbers(text)] == up[2:]
    assert sorted(up) == sorted(before)
    # Lines move as a whole.
    names = column(page, "loss", 0)
    assert [name.split(",")[0] for name in names[:2]] == ["alibi", "rope"]
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    down = column(page, "loss", last)
    assert [numbers(text)[0] for text in down if numbers(text)] == values[::-1]
    assert [text for text in down if not numbers(text)] == down[2:]
    page.locator("#loss thead th").first.locator("button").click()
    assert header.get_attribute("aria-sort") is None
    names = column(page, "loss", 0)
    assert names[-1].startswith(LIMITED)
    assert [name.rsplit("=", 1)[1] for name in names if name.startswith("rope")] == ["64", "256"]


def test_a_keyboard_is_enough(visit):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.id === 'results'")
    # From there on by tabs: the first table, then its headers.
    reached = []
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "[document.activeElement.tagName, getComputedStyle(document.activeElement)"
                ".outlineStyle, document.activeElement.closest('table')?.id]"
            )
        )
        if reached[-1][0] == "BUTTON" and reached[-1][2] == "per-seed":
            break
    assert {outline for _, outline, _ in reached} <= {"solid", "auto"}
    assert "loss" in [table for _, _, table in reached]
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#per-seed thead th").nth(1).get_attribute("aria-sort") == "ascending"
    lengths = [int(text) for text in column(page, "per-seed", 1)]
    assert lengths == sorted(lengths)
    page.keyboard.press("Space")
    assert [int(text) for text in column(page, "per-seed", 1)] == sorted(lengths, reverse=True)


def test_a_phone_scrolls_tables_and_not_the_page(visit):
    page = visit(width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for details in page.locator("summary").all():
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.locator("#against").evaluate(
        "table => [table.parentElement.scrollWidth, table.parentElement.clientWidth]"
    )
    assert wide[0] > wide[1]
    sizes = page.eval_on_selector_all(
        "figure > svg",
        "all => all.map((e) => 21 * e.getBoundingClientRect().width / e.viewBox.baseVal.width)",
    )
    assert min(sizes) > 9  # CSS pixels of a label


def luminance(colour):
    channels = [value / 255 for value in numbers(colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_by_day_and_night(visit, scheme):
    page = visit(color_scheme=scheme)
    found = page.evaluate("""() => {
        const shown = [...document.querySelectorAll("body *")].filter((element) =>
            !element.closest("svg, .skip") && element.checkVisibility() &&
            [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
        const behind = (element) => {
            for (; element; element = element.parentElement) {
                const colour = getComputedStyle(element).backgroundColor;
                if (colour !== "rgba(0, 0, 0, 0)") return colour;
            }
        };
        return [...new Set(shown.map((e) =>
            JSON.stringify([getComputedStyle(e).color, behind(e)])))].map(JSON.parse);
    }""")
    assert len(found) >= 4
    for pair in found:
        low, high = sorted(map(luminance, pair))
        # WCAG 2.2, 1.4.3.
        assert (high + 0.05) / (low + 0.05) >= 4.5, pair
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")


def test_print_is_light_and_without_buttons(visit):
    page = visit(color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for name in ("nav", ".copy", ".skip"):
        assert not page.locator(name).is_visible()
    clipped = page.eval_on_selector_all(
        ".scroll", "all => all.filter((e) => getComputedStyle(e).overflowX !== 'visible').length"
    )
    assert clipped == 0
    assert page.locator("details:not([open])").count() > 1
    assert page.pdf().startswith(b"%PDF")
    # What is folded on a screen is on paper.
    assert page.locator("details:not([open])").count() == 0


def test_bibtex_is_copied(visit):
    page = visit(permissions=["clipboard-read", "clipboard-write"])
    button = page.get_by_role("button", name="Copy BibTeX")
    button.click()
    page.wait_for_function("document.querySelector('.copy').textContent !== 'Copy BibTeX'")
    assert page.locator(".copy").text_content() == "Copied"
    assert page.evaluate("navigator.clipboard.readText()") == BIBTEX


def test_without_scripts_it_can_be_read(visit):
    page = visit(java_script_enabled=False)
    assert page.locator("#loss").is_visible()
    assert page.locator("button").count() == 1
    assert not page.locator("button").is_visible()
