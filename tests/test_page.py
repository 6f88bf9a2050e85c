"""The page: its numbers by a second path, what it escapes, and what it says where there is less."""

import base64
import hashlib
import math
import re
from decimal import ROUND_HALF_EVEN, Context, Decimal
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_study import LENGTHS, LIMITED, PROBES, TOKENS, Reader, measured, numbers, picked, study
from scipy import stats

from eval.report import analysis as analyses
from eval.report.comparable import differences
from eval.report.comparing import compare_encodings
from eval.report.latex import latex_table
from eval.report.methods import methods
from eval.report.page import render_page
from eval.report.page.markup import number
from eval.report.summary import interval_tables, shown_lowest
from eval.stats import bootstrap_documents, crossed
from posenc.errors import UserError

pytestmark = pytest.mark.fast

BIBTEX = "@article{su2021,\n  title = {Ro{F}ormer & <more>},\n}\n"
METHODS = (
    "## Protocol\n\nEvery length is scored on `the same` targets.\n\n- one\n- two,\n  longer\n"
)


def page_of(rows, **options):
    options = {"references": BIBTEX, "methods": METHODS} | options
    return render_page(rows, analyses.analyse(rows), differences(rows), **options)


@pytest.fixture(scope="module")
def rows():
    return study()


@pytest.fixture(scope="module")
def page(rows):
    return page_of(rows)


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def label(encoding, train_length=64):
    return f"{encoding}, train_length={train_length}"


def per_seed(rows, encoding, protocol, length, train_length=64):
    return picked(rows, encoding, protocol, length, train_length).sum(1) / TOKENS.sum()


def t_interval(values, comparisons=1):
    level = 1 - 0.05 / comparisons
    half = stats.sem(values) * stats.t.ppf(0.5 + level / 2, len(values) - 1)
    return [values.mean(), values.mean() - half, values.mean() + half]


def shown(cell, expected):
    """Assert that a cell shows these numbers: to half of the last of three digits."""
    found = numbers(cell)
    assert len(found) == len(expected), (cell, expected)
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= 0.000501, (cell, expected)


def test_losses_are_means_with_students_t(rows, read):
    for encoding in ("rope", "alibi"):
        for length in LENGTHS:
            cell = read.cell("loss", str(length), label(encoding))
            shown(cell, t_interval(per_seed(rows, encoding, "nll_by_context", length)))
    for length in (64, 256):
        values = per_seed(rows, "rope", "nll_by_context", length, 256)
        shown(read.cell("loss", str(length), label("rope", 256)), t_interval(values))
    assert read.cell("loss", "32", label("rope", 256)) == "\N{EN DASH}"


def test_what_is_undefined_says_so_and_why(read):
    cells = [read.cell("loss", str(length), label(LIMITED)) for length in LENGTHS]
    assert cells[2:] == ["undefined"] * 4
    assert all(len(numbers(cell)) == 3 for cell in cells[:2])
    reason = f"Undefined: no position beyond 63 ({label(LIMITED)} at 128, 256, 512, 1024)."
    assert reason in read.sections["curves"]
    assert "Note: few documents" in read.sections["curves"]


def test_differences_are_paired_and_simultaneous(rows, read):
    for encoding, lengths in (("alibi", LENGTHS), (LIMITED, LENGTHS[:2])):
        for length in lengths:
            own, base = (per_seed(rows, e, "nll_by_context", length) for e in (encoding, "rope"))
            place = label(encoding), length
            shown(read.cell("against", "difference", *place), t_interval(own - base, 2))
            correlation = np.corrcoef(own, base)[0, 1]
            shown(read.cell("against", "correlation", *place), [correlation])
            each = numbers(read.cell("against", "each seed", *place))
            np.testing.assert_array_equal(each[::2], [0, 1, 2])
            np.testing.assert_allclose(each[1::2], own - base, atol=0.000501)
            assert read.cell("against", "p", *place) == "\N{EN DASH}"
    # Power of the t-test at the detectable difference, by the noncentral t.
    own, base = (per_seed(rows, e, "nll_by_context", 512) for e in ("alibi", "rope"))
    (delta,) = numbers(read.cell("against", "detectable", label("alibi"), 512))
    ncp = delta / ((own - base).std(ddof=1) / math.sqrt(3))
    limit = stats.t.ppf(1 - 0.05 / 4, 2)
    power = stats.nct.sf(limit, 2, ncp) + stats.nct.cdf(-limit, 2, ncp)
    slope = stats.nct.sf(limit, 2, ncp * 1.01) - stats.nct.sf(limit, 2, ncp)
    assert abs(power - 0.8) < max(0.002, 0.000501 / delta * abs(slope) * 100)


def test_p_values_stand_from_eight_seeds_on():
    rows = study(("rope", "alibi"), seeds=range(8), bound=False, more=False)
    read = Reader(page_of(rows))
    for length in LENGTHS:
        own, base = (per_seed(rows, e, "nll_by_context", length) for e in ("alibi", "rope"))
        cell = read.cell("against", "p", "alibi", length)
        p = stats.ttest_rel(own, base).pvalue
        assert cell == "< 0.001" if p < 0.001 else abs(numbers(cell)[0] - p) <= 0.000501


def test_endpoint_is_the_mean_over_log_length(rows, read):
    for encoding in ("rope", "alibi"):
        curve = np.array([per_seed(rows, encoding, "nll_by_context", n) for n in LENGTHS])
        own = curve[np.argmin(curve[:2].mean(1))]
        area = np.trapezoid(curve[1:] - own, np.log(LENGTHS[1:]), axis=0) / math.log(16)
        cell = read.cell("effective-lengths", "primary endpoint", label(encoding))
        shown(cell, t_interval(area))
        # The same in the words above.
        assert cell.replace(" ", "") in read.text.split("What was compared")[0].replace(" ", "")
    why = "undefined at 128, 256, 512, 1024 for 3 of 3 seeds"
    assert read.cell("effective-lengths", "primary endpoint", label(LIMITED)).endswith(f" {why}")
    assert f"no endpoint to compare: {why}." in read.sections["baseline"]
    end = read.cell("against", "difference", label("alibi"), "L to 16 L")
    curves = {
        e: np.array([per_seed(rows, e, "nll_by_context", n) for n in LENGTHS])
        for e in ("rope", "alibi")
    }
    ends = [
        np.trapezoid(c[1:] - c[1], np.log(LENGTHS[1:]), axis=0) / math.log(16)
        for c in (curves["alibi"], curves["rope"])
    ]
    shown(end, t_interval(ends[0] - ends[1], 2))
    # The sums by document as well: those of lengths, weighted as the trapezoids' corners are.
    corners = [0.125, 0.25, 0.25, 0.25, 0.125]
    sums = {
        encoding: sum(
            weight * (picked(rows, encoding, "nll_by_context", n) - first)
            for weight, n in zip(corners, LENGTHS[1:], strict=True)
        )
        for encoding in ("rope", "alibi")
        for first in [picked(rows, encoding, "nll_by_context", 64)]
    }
    own = sums["alibi"] - sums["rope"]
    both = crossed(own, TOKENS, comparisons=2).interval
    documents = bootstrap_documents(own, TOKENS, seed=0, comparisons=2)
    place = label("alibi"), "L to 16 L"
    for column, one in (("seeds and documents", both), ("over documents", documents)):
        shown(read.cell("against", column, *place), [one.estimate, one.low, one.high])


def test_effective_lengths_follow_from_their_intervals(rows, read):
    for encoding in ("rope", "alibi"):
        curve = {n: per_seed(rows, encoding, "nll_by_context", n) for n in LENGTHS}
        start = min((32, 64), key=lambda n: curve[n].mean())
        reached = start
        for n in LENGTHS[LENGTHS.index(start) + 1 :]:
            if t_interval(curve[n] - curve[start], 3)[2] > 0.05:
                break
            reached = n
        cell = read.cell("effective-lengths", "tolerated", label(encoding))
        assert cell.startswith(f">= {reached} " if reached == 1024 else f"{reached} ")
        info = {
            n: per_seed(rows, encoding, "foreign_prefix", n) - curve[n] for n in LENGTHS if n > 64
        } | {64: np.zeros(3)}
        passed = [n for n in LENGTHS[2:] if t_interval(info[n] - info[n // 2], 3)[1] > 0]
        words = f">= {passed[-1]} " if passed[-1] == 1024 else f"{passed[-1]} "
        assert read.cell("effective-lengths", "used", label(encoding)).startswith(words)


def test_far_context_and_probes(rows, read):
    for encoding in ("rope", "alibi"):
        last = per_seed(rows, encoding, "nll_by_context", 64)
        for length in LENGTHS[2:]:
            true = per_seed(rows, encoding, "nll_by_context", length)
            foreign = per_seed(rows, encoding, "foreign_prefix", length)
            place = label(encoding), length
            values = {"tax": foreign - last, "info": foreign - true, "gain": last - true}
            limits = {name: t_interval(value, 3) for name, value in values.items()}
            for name, expected in limits.items():
                shown(read.cell("tax", name, *place), expected)
            verdict = "tolerates" if limits["tax"][2] <= 0.05 else "neither"
            if limits["info"][1] > 0 and limits["gain"][1] > 0:
                verdict = "extrapolates"
            assert read.cell("tax", "verdict", *place) == verdict
            for name, column in zip(PROBES, ("index", "distance", "number of keys"), strict=True):
                value = per_seed(rows, encoding, name, length) - last
                shown(read.cell("probe", column, *place), t_interval(value))
    assert read.cell("tax", "verdict", label("rope"), 1024) == "neither"
    assert read.cell("tax", "verdict", label("alibi"), 1024) == "extrapolates"
    assert "rope, train_length=64: at T = 1024 neither extrapolation nor tolerance" in read.text
    assert "alibi, train_length=64: extrapolates to T = 1024" in read.text
    assert f"{label(LIMITED)}: no loss at T = 1024 (no position beyond 63)" in read.text


def test_recovery_is_a_ratio_of_means(rows, read):
    last, loss = (per_seed(rows, "rope", "nll_by_context", n) for n in (64, 256))
    long = per_seed(rows, "rope", "nll_by_context", 256, 256)
    found = numbers(read.cell("recovered", "recovery", label("rope"), 256))
    assert abs(found[0] - (last - loss).mean() / (last - long).mean()) < 0.000501
    assert found[1] < found[0] < found[2]
    shown(
        read.cell("recovered", "TRUNC - train-long", label("rope"), 256), t_interval(last - long, 3)
    )


def test_seeds_stand_beside_their_mean(rows, read):
    for encoding in ("rope", "alibi"):
        own = per_seed(rows, encoding, "nll_by_context", 64)
        for length in LENGTHS:
            values = per_seed(rows, encoding, "nll_by_context", length)
            place = label(encoding), length
            columns = {"mean": values.mean(), "median": np.median(values)}
            columns |= {"best": values.min(), "worst": values.max()}
            for name, value in columns.items():
                shown(read.cell("per-seed", name, *place), [value])
            passed = int((values - own <= 0.05).sum())
            rate = stats.binomtest(passed, 3).proportion_ci(method="wilson")
            cell = read.cell("per-seed", "within 0.05 of its reference", *place)
            shown(cell, [passed, 3, rate.low, rate.high])
            each = numbers(read.cell("per-seed", "each seed", *place))
            np.testing.assert_allclose(each[1::2], values, atol=0.000501)


def test_other_protocols_slices_positions_and_validations(rows, read):
    def mean(**wanted):
        found = [r["nll"] for r in rows if all(r.get(k) == v for k, v in wanted.items())]
        assert len(found) == 3
        return np.mean(found)

    for length in LENGTHS:
        value = mean(encoding="alibi", protocol="non_overlapping", length=length)
        shown(read.cell("other-non_overlapping", str(length), label("alibi")), [value])
        for name, words in (
            ({"slice": "novel"}, "novel"),
            ({"distance_from": 1}, "repeated, 1 to 63 back"),
            ({"distance_from": 64}, "repeated, 64 back or more"),
        ):
            value = mean(encoding="rope", protocol="slice", length=length, **name)
            shown(read.cell("slice-loss", "loss", label("rope"), words, length), [value])
    assert read.cell("other-non_overlapping", "1024", label(LIMITED)) == "undefined"
    for start in (1, 8, 512):
        value = mean(encoding="rope", protocol="per_position", position_from=start)
        cell = read.cell("by-position", label("rope"), f"{start} to {2 * start - 1}")
        shown(cell, [value])
    for seed in range(3):
        losses = [2.8, 2.5, 2.52, 2.49, 2.51 + 0.01 * seed]
        place = label("alibi"), seed, 64
        shown(read.cell("last-validations", "mean", *place), [np.mean(losses)])
        shown(read.cell("last-validations", "spread", *place), [np.std(losses, ddof=1)])


def drawing(page, name):
    """The SVG of an id."""
    text = re.search(rf"<svg[^>]* id=\"{name}\".*?</svg>", page, re.DOTALL).group()
    return ElementTree.fromstring(text)


def test_curves_are_drawn_where_their_numbers_are(rows, page):
    """Marks lie on straight lines of log2 T and of loss, and none is undefined."""
    svg = drawing(page, "chart-length")
    groups = {g.find("title").text: g for g in svg.findall("g") if g.find("title") is not None}
    points = []
    for encoding in ("rope", "alibi"):
        # What has a strip has a group there first: the curve's is the last of a title.
        group = groups[label(encoding)]
        means = [mark.get("d") for mark in group.findall("path[@class='mean']")]
        whiskers = group.findall("g/line")
        seeds = group.findall("circle")
        assert (len(means), len(whiskers), len(seeds)) == (6, 6, 18)
        for n, length in enumerate(LENGTHS):
            values = per_seed(rows, encoding, "nll_by_context", length)
            mean, low, high = t_interval(values)
            corners = np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)[aLz]", means[n]), float)
            if "a" in means[n]:
                corners = corners[:1] + np.array([4.6, 0])
            centre = (corners.min(0) + corners.max(0)) / 2
            points.append((math.log2(length), mean, *centre))
            bar = [float(whiskers[n].get(key)) for key in ("x1", "y1", "y2")]
            points += [
                (math.log2(length), low, *bar[:2]),
                (math.log2(length), high, bar[0], bar[2]),
            ]
            dots = [float(dot.get("cy")) for dot in seeds[3 * n : 3 * n + 3]]
            points += [(math.log2(length), v, bar[0], y) for v, y in zip(values, dots, strict=True)]
    x, y, across, down = np.array(points).T
    for value, pixel, sign in ((x, across, 1), (y, down, -1)):
        slope, origin = np.polyfit(value, pixel, 1)
        assert slope * sign > 10
        assert np.abs(slope * value + origin - pixel).max() < 0.5
    crosses = [g for g in svg.findall("g") if g.findall("path[@class='cross']")]
    assert [(g.find("title").text, len(g.findall("path"))) for g in crosses] == [
        (label(LIMITED), 4)
    ]
    slope, origin = np.polyfit(x, across, 1)
    trained = [float(line.get("x1")) for line in svg.findall("line[@class='trained']")]
    np.testing.assert_allclose(trained, slope * np.log2([64, 256]) + origin, atol=0.5)
    assert svg.find("desc").text
    assert "95% intervals, t over seeds" in svg.find("desc").text


HOSTILE = "<script>alert(1)</script>"


def test_text_of_rows_is_escaped_wherever_it_stands():
    changes = {"notes": ["a <b>note</b> & `code`"]}
    rows = [
        {**row, **changes, "run": f'"><img src=x onerror=alert(1)> {row["seed"]}\x00\ud800'}
        for row in study((HOSTILE, "</style>"), seeds=(0, 1), bound=False, model="<i>tiny</i>")
    ]
    rows[0]["device"] = "<svg onload=alert(2)>"
    page = page_of(rows, references="</pre><script>", methods="<script>\n\n# <script>\n\n- <b>")
    read = Reader(page)
    tags = {tag for tag, _ in read.tags}
    assert not tags & {"img", "b", "i", "iframe", "object"}
    assert [tag for tag, _ in read.tags].count("script") == 1
    assert not [name for _, every in read.tags for name in every if name.startswith("on")]
    assert read.cell("loss", "seeds", HOSTILE) == "2"
    for words in (HOSTILE, "</style>", '"><img src=x', "<i>tiny</i>", "a <b>note</b> & code"):
        assert words in read.text
    page.encode()
    assert "\x00" not in page


def test_only_the_two_known_texts_may_run_and_nothing_is_asked_for(rows, read):
    (policy,) = [a["content"] for t, a in read.tags if "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    for kind, text in (("style", read.styles), ("script", read.scripts)):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    links = [a.get("href") or a.get("src") for _, a in read.tags if "href" in a or "src" in a]
    assert links
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "url(" not in read.styles
    assert "@import" not in read.styles
    named = [a["id"] for _, a in read.tags if "id" in a]
    assert len(named) == len(set(named))
    assert {link[1:] for link in links if link.startswith("#")} <= set(named)


def test_the_same_rows_give_the_same_page(page):
    assert page == page_of(study())
    assert not re.search(r"\b20\d\d-\d\d", page)


def test_sections_without_data_are_left_out(read):
    every = [
        *("compared", "differences", "curves", "positions", "baseline", "effective", "seeds"),
        *("far", "probes", "recovery", "costs", "slices", "protocols", "validations"),
        *("provenance", "bibtex", "methods"),
    ]
    assert list(read.sections) == every
    rows = study(("rope",), seeds=(0, 1), bound=False, more=False)
    for row in rows:
        for name in ("train_flops", "train_seconds", "last_validations"):
            del row[name]
    less = Reader(page_of(rows, references="", methods=""))
    assert list(less.sections) == [
        "compared",
        "differences",
        "curves",
        "effective",
        "seeds",
        "provenance",
    ]
    assert "not scored with a foreign prefix" in less.cell("effective-lengths", "used", "rope")
    assert "no verdict on the far context (not scored with a foreign prefix)" in less.text


def test_one_seed_says_documents_only():
    read = Reader(page_of(study(("rope", "alibi"), seeds=(3,), bound=False)))
    assert "One seed of each was trained, so all intervals are of documents only" in read.text
    for encoding in ("rope", "alibi"):
        assert read.cell("loss", "64 (L)", encoding).endswith("documents only")
        assert read.cell("tax", "tax", encoding, 256).endswith("documents only")
    assert "documents only: one seed" in read.cell("against", "difference", "alibi", 64)
    assert "t over seeds" not in read.text
    assert "documents only" not in Reader(page_of(study(bound=False))).text


def test_losses_that_are_not_finite_are_words_with_a_reason():
    rows = study(("rope", "alibi"), bound=False)
    for row in rows:
        if row["encoding"] == "rope" and row["seed"] == 1 and row["length"] == 512:
            if row["protocol"] == "nll_by_context":
                row["nll"], row["document_nll"] = math.nan, [math.nan] * len(TOKENS)
                row["last_validations"] = {"64": [math.inf, 2.0, None]}
            elif row["protocol"] == "non_overlapping":
                row["nll"] = math.inf
    page = page_of(rows)
    read = Reader(page)
    assert read.cell("loss", "512", "rope") == "not finite"
    assert "No mean: rope at 512: not finite for 1 of 3 seeds." in read.sections["curves"]
    # What is not finite is worse than all else; median, best and rate hold without a mean.
    own, start = (per_seed(rows, "rope", "nll_by_context", n) for n in (512, 64))
    place = "rope", 512
    assert read.cell("per-seed", "mean", *place) == "not finite"
    assert read.cell("per-seed", "worst", *place) == "not finite"
    shown(read.cell("per-seed", "median", *place), [np.nanmax(own)])
    shown(read.cell("per-seed", "best", *place), [np.nanmin(own)])
    passed = int((own - start <= 0.05).sum())
    rate = stats.binomtest(passed, 3).proportion_ci(method="wilson")
    cell = read.cell("per-seed", "within 0.05 of its reference", *place)
    shown(cell, [passed, 3, rate.low, rate.high])
    each = read.cell("per-seed", "each seed", *place)
    assert "1: not finite" in each
    assert read.cell("other-non_overlapping", "512", "rope") == "not finite"
    assert not re.search(r"\b(nan|inf|infinity|none|null)\b", read.text, re.IGNORECASE)
    svg = drawing(page, "chart-length")
    crosses = [path for path in svg.iter("path") if path.get("class") == "cross"]
    assert len(crosses) == 1
    assert crosses[0].get("d").endswith("z")
    (group,) = [g for g in svg.findall("g[circle]") if g.find("title").text == "rope"]
    assert len(group.findall("circle")) == 3 * len(LENGTHS) - 1


def test_a_seed_that_was_not_scored_has_not_failed():
    def lost(row):
        return (row["seed"], row["length"], row["protocol"]) == (1, 512, "nll_by_context")

    rows = study(("alibi",), bound=False)
    read = Reader(page_of([row for row in rows if not lost(row)]))
    assert "No mean: alibi at 512: not scored for seed 1." in read.sections["curves"]
    assert read.cell("loss", "512", "alibi") == "\N{EN DASH}"
    own = per_seed(rows, "alibi", "nll_by_context", 512)[[0, 2]]
    shown(read.cell("per-seed", "worst", "alibi", 512), [own.max()])
    rate = stats.binomtest(2, 2).proportion_ci(method="wilson")
    cell = read.cell("per-seed", "within 0.05 of its reference", "alibi", 512)
    shown(cell, [2, 2, rate.low, rate.high])
    assert "1: \N{EN DASH};" in read.cell("per-seed", "each seed", "alibi", 512)
    # The true context is missing; a control alone gives no number.
    assert "not finite" not in read.sections["curves"]


def test_what_else_differs_is_red_and_what_forbids_comparing_is_first():
    rows = study(("rope",), seeds=(0, 1), bound=False, more=False)
    other = study(("alibi",), seeds=(0, 1), bound=False, more=False, dtype="bfloat16", dirty=True)
    read = Reader(page_of([*rows, *other]))
    text = read.sections["differences"]
    assert text.index("Not comparable") < text.index("dtype: float32 (") < text.index("Runs also")
    assert text.index("Runs also") < text.index("dirty: ")
    assert "tiny-rope-T64-seed0 and 1 more" in text
    assert "These rows differ in what makes numbers incomparable" in read.text
    reds = [a for t, a in read.tags if "red" in (a.get("class") or "").split()]
    assert len(reds) >= 2
    boxes = [a for t, a in read.tags if a.get("class") == "warning"]
    assert len(boxes) == 2
    assert "uncommitted changes" in read.sections["provenance"]
    assert "uncommitted" not in Reader(page_of(rows)).sections["provenance"]
    assert "In nothing that rows record" in Reader(page_of(rows)).sections["differences"]


def test_mixed_texts_stand_side_by_side_and_make_no_pair():
    options = {"bound": False, "more": False}
    other = study(("alibi",), **options)
    for row in other:
        row["data"] = row["data"] | {"name": "novels", "sha256": "cd" * 32}
    rows = study(("rope", "nope"), **options) + other
    with pytest.raises(UserError, match="were scored on different targets"):
        analyses.analyse(rows)
    found = analyses.analyse(rows, mixed=True)
    read = Reader(render_page(rows, found, differences(rows), references="", methods=""))
    name = "alibi, data.name=novels"
    values = per_seed(rows, "alibi", "nll_by_context", 256)
    shown(read.cell("loss", "256", name), t_interval(values))
    against = {line[0] for line in read.tables["against"][1]}
    assert against == {"nope, data.name=manuals"}
    assert f"{name}: scored on other targets." in read.sections["baseline"]
    assert "scored on targets that are not the same for all lines" in read.text
    assert "not the same targets for all lines" in latex_table(found)
    assert name not in shown_lowest(found).values()
    with pytest.raises(UserError, match="so that no two losses make a pair"):
        compare_encodings(rows, "rope", "alibi", allow_mixed=True)


def test_a_checkpoint_that_is_not_the_last_is_said_in_red():
    options = {"bound": False, "more": False, "seeds": (0, 1)}
    rows = study(("rope",), checkpoint="chosen", checkpoint_step=1200, **options)
    words = "Checkpoints are not the last of their runs: chosen by hand, step 1,200."
    page = page_of(rows)
    assert f'<p class="red">{words}' in page
    assert words in methods(rows, analyses.analyse(rows))
    assert "not the last" not in Reader(page_of(study(("rope",), **options))).text


def test_a_line_of_one_seed_among_others_is_told_apart_wherever_it_stands():
    name = "my:A(x='a*b_c|d*')"
    options = {"bound": False, "more": False}
    rows = study(("rope", "alibi"), **options) + study((name,), seeds=(1,), **options)
    found = analyses.analyse(rows)
    read = Reader(render_page(rows, found, differences(rows), references="", methods=""))
    text = read.sections["differences"]
    assert (
        f"Runs also differ, besides the encoding, in:seeds: 0, 1, 2 (rope and 1 more); 1 ({name})"
        in text
    )
    assert f"There are 3 seeds (0, 1, 2). Of these there are only 1 for `{name}`." in methods(
        rows, found
    )
    tables = interval_tables(found)
    assert (
        "- intervals: 95%, documents only or t over seeds "
        "(in brackets: documents only, of one seed);" in tables
    )
    label = "`" + name.replace("|", "\\|") + "`"
    losses, effects, against = [x for x in tables.splitlines() if x.startswith(f"| {label} |")]
    own = picked(rows, name, "nll_by_context", 1024)
    difference = own - picked(rows, "rope", "nll_by_context", 1024)[1]
    for line, sums, together in ((losses, own, 1), (against, difference, 2)):
        one = bootstrap_documents(sums, TOKENS, seed=0, comparisons=together)
        limits = f"{one.estimate:.3f} [{one.low:.3f}, {one.high:.3f}]"
        assert [cell.strip(" *|") for cell in line.split(" | ")][7] == limits
    assert "not scored with a foreign prefix: all lines scored beyond L." in tables
    assert effects.endswith("| --- | --- | --- | --- |")
    assert "## nll minus that of `rope`" in tables
    assert "a length alone is the longest that is shown" in tables


def test_a_line_without_any_loss_is_still_there():
    rows = study(("rope",), bound=False, more=False)
    for length in LENGTHS:
        base = {k: rows[0][k] for k in rows[0] if not k.startswith("document_")}
        base |= {"encoding": "none", "run": "none-0"}
        rows.append(measured(base, "nll_by_context", length, reason="no position at all"))
    read = Reader(page_of(rows))
    assert read.cell("loss", "64 (L)", "none") == "undefined"
    assert "Undefined: no position at all (none at" in read.sections["curves"]


def test_the_baseline_is_named_where_there_is_one(read):
    assert f"baseline{label('rope')}model" in read.sections["compared"]
    alone = Reader(page_of(study(("rope",), bound=False, more=False)))
    assert "baseline" not in alone.sections["compared"]


def test_references_and_methods_are_as_given(read):
    assert read.sections["bibtex"].endswith(BIBTEX)
    assert read.sections["methods"] == (
        "MethodsProtocolEvery length is scored on the same targets.onetwo, longer"
    )


def test_tables_can_be_read_by_their_headers(read):
    regions = [a for _, a in read.tags if a.get("role") == "region"]
    assert len(regions) == len(read.tables)
    assert all(a["tabindex"] == "0" for a in regions)
    named = {a["id"] for _, a in read.tags if "id" in a}
    assert {a["aria-labelledby"] for a in regions} <= named
    for header, lines in read.tables.values():
        assert all(header)
        assert all(len(line) == len(header) for line in lines)
    headers = [a for t, a in read.tags if t == "th"]
    assert all(a.get("scope") in ("row", "col") for a in headers)


@given(
    st.floats(-1e300, 1e300)
    | st.sampled_from([math.nan, math.inf, -math.inf])
    | st.integers()
    | st.none()
)
def test_a_number_reads_as_what_it_is(value):
    text = number(value)
    if value is None or not math.isfinite(value):
        assert text == ("\N{EN DASH}" if value is None else "not finite")
        return
    if isinstance(value, int):
        assert text.replace("\N{MINUS SIGN}", "-").replace(",", "") == str(value)
        return
    exact = Decimal(value).quantize(Decimal("0.001"), ROUND_HALF_EVEN, Context(prec=400))
    assert text == str(exact if exact else abs(exact)).replace("-", "\N{MINUS SIGN}")
