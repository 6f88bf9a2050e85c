"""The whole report: its numbers by a second path, its LaTeX, its papers, and what it refuses."""

import csv
import gzip
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bibtexparser
import numpy as np
import pytest
from scipy import stats
from study_rows import ENDLESS, LENGTHS, TABLE, TOKENS, study, sums_of
from test_report import realistic, row

from eval.__main__ import main
from eval.report import write_report
from eval.report.analysis import analyse
from eval.report.bibliography import references
from eval.report.full import NO_INTERVALS, write_full_report
from eval.report.latex import escaped, latex_table
from eval.report.methods import methods
from eval.report.rows import read_rows, write_rows
from eval.report.summary import csv_table, interval_tables, shown_lowest
from posenc.citations import entries_of, fields_of
from posenc.encodings.extension import POLICIES
from posenc.encodings.registry import examples, find_class
from posenc.encodings.sampling import SAMPLERS
from posenc.errors import UserError

ROOT = Path(__file__).parent.parent
FILES = {
    *("rows.jsonl", "rows.csv", "table.md", "table.tex", "table.csv", "references.bib"),
    *("methods.md", "index.html"),
    *(f"{name}.{kind}" for kind in ("png", "pdf") for name in (
        "figure", "figure-loss", "figure-tax-info", "figure-positions",
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return study()


@pytest.fixture(scope="module")
def analysis(rows):
    return analyse(rows, baseline="alibi")


@pytest.fixture(scope="module")
def table(analysis):
    found = list(csv.DictReader(io.StringIO(csv_table(analysis))))
    return {(line["label"], int(line["length"])): line for line in found}


def per_seed(encoding, length, foreign=False):
    return np.array([sums_of(encoding, length, s, foreign).sum() / TOKENS.sum() for s in range(3)])


def t_interval(values, level=0.95):
    error = stats.sem(values)
    return values.mean(), *stats.t.interval(level, len(values) - 1, values.mean(), error)


def limits(line, name):
    return [float(line[name + ending]) for ending in ("", "_low", "_high")]


@pytest.mark.parametrize("encoding", ENDLESS)
def test_the_table_of_numbers_agrees_with_scipy_on_sums_by_document(table, encoding):
    for length in LENGTHS:
        line = table[encoding, length]
        values = per_seed(encoding, length)
        assert limits(line, "nll") == pytest.approx(t_interval(values), rel=1e-9)
        assert [float(v) for v in line["nll_by_seed"].split("; ")] == pytest.approx(values)
        assert float(line["median"]) == pytest.approx(np.median(values))
        assert (float(line["best"]), float(line["worst"])) == (values.min(), values.max())
        if encoding != "alibi":
            gap = values - per_seed("alibi", length)
            # Three encodings are compared with the baseline.
            assert limits(line, "difference") == pytest.approx(
                t_interval(gap, 1 - 0.05 / 3), rel=1e-7
            )
        if length > 64:
            foreign, own = per_seed(encoding, length, True), per_seed(encoding, 64)
            for name, gap in (
                ("info", foreign - values),
                ("gain", own - values),
                ("tax", foreign - own),
            ):
                # Four encodings have verdicts.
                assert limits(line, name) == pytest.approx(
                    t_interval(gap, 1 - 0.05 / 4), rel=1e-7, abs=1e-9
                )


@pytest.mark.parametrize("encoding", ENDLESS)
def test_the_endpoint_is_the_mean_over_log_length(table, encoding):
    used = [n for n in LENGTHS if 64 <= n <= 1024]
    curves = np.array([per_seed(encoding, n) for n in used])
    area = np.trapezoid(curves, np.log(used), axis=0) / math.log(16)
    best = min((32, 64), key=lambda n: per_seed(encoding, n).mean())
    expected = t_interval(area - per_seed(encoding, best))
    assert limits(table[encoding, 32], "endpoint") == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_what_is_undefined_has_no_number_and_a_reason(table, analysis):
    line = table[TABLE, 128]
    assert (line["nll"], line["endpoint"], line["verdict"]) == ("", "", "")
    assert "beyond max_position 64" in line["why_undefined"]
    text = latex_table(analysis)
    assert "Undefined at 128, 256, 512, 1024: position 127" in text
    body = next(line for line in text.splitlines() if line.startswith("wpe"))
    assert body.count("---") == 4 + 3  # lengths; endpoint, used length and verdict


def test_the_tables_for_people_say_the_same(table, analysis):
    text = interval_tables(analysis)
    tex = latex_table(analysis)
    for encoding in ENDLESS:
        line = next(x for x in text.splitlines() if x.startswith(f"| `{encoding}` | 3 |"))
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")][2:]
        above, below = (
            [re.sub(r"\\rlap.*|\\textbf|\\scriptsize|\\pm|[{}$ ]|\\,", "", c) for c in part]
            for part in latex_rows(tex, encoding)
        )
        for place, length in enumerate(LENGTHS):
            mean, low, high = limits(table[encoding, length], "nll")
            assert cells[place].replace("*", "") == f"{mean:.3f} ± {(high - low) / 2:.3f}"
            assert above[place + 1] == f"{mean:.3f}"
            assert below[place + 1] == f"{(high - low) / 2:.3f}"


def latex_rows(tex, encoding):
    lines = tex.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith(f"{encoding} &"))
    return [re.sub(r" \\\\\[.*", "", lines[n]).split(" & ") for n in (place, place + 1)]


def test_bold_is_what_all_intervals_of_pairs_say(analysis):
    found = shown_lowest(analysis)
    for length in LENGTHS:
        names = [n for n in (*ENDLESS, TABLE) if n != TABLE or length <= 64]
        lower = [
            name
            for name in names
            if all(
                t_interval(per_seed(name, length) - per_seed(other, length), 1 - 0.05 / 6)[2] < 0
                for other in names
                if other != name
            )
        ]
        assert lower == ([found[length]] if length in found else [])
    assert found[1024] == "alibi"
    tex = latex_table(analysis)
    assert latex_rows(tex, "alibi")[0][6].startswith("\\textbf{")
    assert "textbf" not in " ".join(latex_rows(tex, "rope")[0])


def test_nothing_is_bold_where_no_interval_says_it(rows):
    one_seed = analyse([row for row in rows if row["seed"] == 0])
    assert shown_lowest(one_seed) == {}
    tex = latex_table(one_seed)
    assert "textbf" not in tex
    assert "documents only" in tex
    twins = [{**r, "encoding": name} for name in ("alibi", "rope") for r in rows
             if r["encoding"] == "alibi"]  # fmt: skip
    assert shown_lowest(analyse(twins)) == {}


def test_text_is_escaped_for_latex():
    assert escaped("a_b%c&d#e{f}g$") == r"a\_b\%c\&d\#e\{f\}g\$"
    assert escaped("~^\\<>") == (
        r"\textasciitilde{}\textasciicircum{}\textbackslash{}\textless{}\textgreater{}"
    )
    assert escaped("a--b\n\x07 c λ") == "a-{}-b c U+03BB"


def test_every_paper_is_there_once_and_plug_ins_are_named():
    rows = [
        row("rope(scaling=yarn(factor=4))*3,nope+fire"),
        row("alibi", positions="randomized(max_position=2048)"),
        row("rope", extend="yarn(factor=4.0)"),
        row("not_here.of_mine:Own"),
    ]
    text = references(rows)
    keys = [entry["ID"] for entry in bibtexparser.loads(text).entries]
    assert keys == sorted(set(keys))
    assert {"su2021roformer", "press2022train"} < {*keys}
    assert "% not_here.of_mine:Own: not known here" in text
    assert "% nope:" in text
    assert references(rows[::-1]) == text


def test_whatever_can_be_named_is_known_to_the_references():
    rows = [row(spec) for spec in examples().values()]
    rows += [row("rope", positions=name) for name in SAMPLERS]
    rows += [row("rope", extend=name) for name in POLICIES]
    text = references(rows)
    assert "not known here" not in text
    keys = {entry["ID"] for entry in bibtexparser.loads(text).entries}
    every = [*map(find_class, examples()), *SAMPLERS.values(), *POLICIES.values()]
    papers = [each.reference for each in every]
    assert {fields_of(one)["key"] for paper in papers for one in entries_of(paper)} <= keys


def test_methods_say_what_rows_say_and_no_more(rows, analysis):
    text = methods(rows, analysis)
    for words in (
        "`alibi`",
        "`tiny` transformer of 120,000 parameters",
        "The training length L is 64 tokens.",
        "There are 3 seeds (0, 1, 2).",
        "T = 32, 64, 128, 256, 512 and 1,024 tokens",
        "800 targets in all",
        "A window has a BOS token only where it begins a document",
        "`foreign_prefix`: T - L tokens of another document",
        "95%, t over seeds",
        "Differences from `alibi`",
        "Matrix products have precision highest.",
        "Evaluated at commit 0123abc.",
    ):
        assert words in text, words
    for words in ("tuned", "policies", "Packing", "left out", "sliding", "Trained at", "sets"):
        assert words not in text, words
    assert "2 lines were left out" in methods(rows, analysis, left_out=2)
    less = [{k: v for k, v in r.items() if k not in ("model", "data", "device")} for r in rows]
    for words in ("transformer", "The text is", "Evaluated on"):
        assert words in text
        assert words not in methods(less, analysis)


def test_the_same_rows_give_the_same_bytes_in_another_process(rows, tmp_path):
    first = write_full_report(rows, tmp_path / "first")
    assert set(first) == FILES
    assert {path.name for path in (tmp_path / "first").iterdir()} == FILES
    done = subprocess.run(
        [sys.executable, "-m", "eval", "report", str(tmp_path / "first"), "--out",
         str(tmp_path / "second")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for name in FILES:
        assert (tmp_path / "second" / name).read_bytes() == first[name].read_bytes(), name


def test_corrupt_rows_are_named_and_left_out(rows, tmp_path, capsys):
    good = write_rows(rows, tmp_path / "good")["rows.jsonl"].read_text()
    wrong = json.loads(good.splitlines()[0])
    worse = {**wrong, "document_nll": [value + 1 for value in wrong["document_nll"]]}
    short = {**wrong, "document_tokens": wrong["document_tokens"][1:]}
    foreign = {**wrong, "schema": 99}
    lines = [json.dumps(worse), json.dumps(short), json.dumps(foreign), "{", good]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err.splitlines()
    for number, words in enumerate(
        ("but the sums by document give", "not lists of one size", "schema 99", "not JSON"), 1
    ):
        assert f"rows.jsonl, line {number}: " in said[number - 1]
        assert words in said[number - 1]
    assert len(said) == 4
    assert read_rows(tmp_path / "out") == read_rows(tmp_path / "good")
    assert "4 lines were left out" in (tmp_path / "out" / "methods.md").read_text()
    with pytest.raises(UserError, match="line 1: nll is"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("{\n{")
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "none")])
    assert stopped.value.code == 2
    assert "2 lines are none" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_reported_leaves_no_file(rows, tmp_path):
    mixed = [{**r, "train_tokens": 2_000_000} if r["encoding"] == "rope" else r for r in rows]
    with pytest.raises(UserError, match="train_tokens"):
        write_full_report(mixed, tmp_path / "none")
    with pytest.raises(UserError, match="no line is called 'other'"):
        write_full_report(rows, tmp_path / "none", baseline="other")
    assert not (tmp_path / "none").exists()
    paths = write_full_report(mixed, tmp_path / "mixed", allow_mixed=True)
    assert "train\\_tokens=2000000" in paths["table.tex"].read_text()
    assert "incomparable: train_tokens: " in paths["methods.md"].read_text()


def test_no_figure_of_another_report_is_left_beside_the_new_one(rows, tmp_path):
    for name in ("figure-tax-info.png", "figure-positions.pdf", "mine.txt"):
        (tmp_path / name).write_text("of before")
    small = [r for r in rows if r["protocol"] == "nll_by_context" and r["encoding"] == "rope"]
    paths = write_full_report(small, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*paths, "mine.txt"}


def test_a_line_without_sums_by_document_is_named_apart(rows):
    old = [
        {k: v for k, v in r.items() if r["encoding"] != "nope" or not k.startswith("document_")}
        for r in rows
    ]
    found = analyse(old)
    assert [finding.subject.label for finding in found.findings] == ["alibi", "rope", TABLE]
    assert "Without sums by document, `nope` have no intervals." in methods(old, found)


def test_rows_without_sums_by_document_give_the_light_report(tmp_path, capsys):
    old = realistic()
    paths = write_report(old, tmp_path / "light")
    main(["report", str(tmp_path / "light"), "--out", str(tmp_path / "full")])
    assert capsys.readouterr().out.splitlines()[-1] == NO_INTERVALS
    assert {path.name for path in (tmp_path / "full").iterdir()} == set(paths)
    for name, path in paths.items():
        assert (tmp_path / "full" / name).read_bytes() == path.read_bytes()


@pytest.mark.peers
def test_latex_compiles_the_table(rows, tmp_path):
    if not shutil.which("pdflatex"):
        pytest.skip("no pdflatex: install texlive-latex-base and texlive-latex-recommended")
    ugly = "own.part:A_b(x='50%&#~^{}<>')"
    named = [{**r, "encoding": ugly} if r["encoding"] == "nope" else r for r in rows]
    (tmp_path / "table.tex").write_text(latex_table(analyse(named)))
    (tmp_path / "main.tex").write_text(
        "\\documentclass[twocolumn]{article}\n\\usepackage{booktabs}\n"
        "\\usepackage[textwidth=6.75in]{geometry}\n"
        "\\begin{document}\nSee Table~\\ref{tab:extrapolation}.\n\\input{table}\n\\end{document}\n"
    )
    for _ in range(2):
        done = subprocess.run(
            ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    log = (tmp_path / "main.log").read_text()
    assert done.returncode == 0, log
    for fault in ("Overfull", "Missing character", "undefined"):
        assert fault not in re.sub(r"undefined at", "", log), log
    assert (tmp_path / "main.pdf").read_bytes().startswith(b"%PDF")


def test_the_page_is_joined_with_the_papers_and_the_methods(rows, tmp_path):
    paths = write_full_report(rows, tmp_path)
    page = paths["index.html"].read_text()
    for words in ("press2022train", "Differences from the baseline"):
        assert words in page
    sentence = paths["methods.md"].read_text().split("\n\n")[1].split(". ")[0]
    assert re.sub(r"[`*]", "", sentence)[:40] in re.sub(r"<[^>]*>", "", page)
    # Rows that were packed are the same rows.
    packed = tmp_path / "packed"
    packed.mkdir()
    content = paths["rows.jsonl"].read_bytes()
    (packed / "rows.jsonl.gz").write_bytes(gzip.compress(content))
    assert read_rows(packed) == read_rows(tmp_path)
    (packed / "rows.jsonl.gz").write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(UserError, match=r"rows.jsonl.gz: cannot read result rows"):
        read_rows(packed)
