import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from rich.console import Console

from eval.report import (
    console_table,
    cost_table,
    draw,
    make_figure,
    markdown_table,
    read_rows,
    tuning_table,
    write_report,
    write_rows,
)
from eval.report.figure import scale_x
from posenc.errors import UserError

pytestmark = pytest.mark.fast

FILES = ["figure.pdf", "figure.png", "rows.csv", "rows.jsonl", "table.md"]
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
BUCKETS = tuple((1 << n >> 1, 1 << n) for n in range(10))  # [0, 1), [1, 2), [2, 4), ...
SLOPES = {"nope": 0.35, "rope": 0.5, "alibi": -0.02, "rope*3,nope": 0.15}
TABLE = "wpe(max_position=64)"


def row(encoding="rope", length=64, nll=3.0, **changes):
    seed, train = changes.get("seed", 0), changes.get("train_length", 64)
    defined = nll is not None
    reference = changes.pop("reference_nll", None)
    return {
        "schema": 1,
        "run": f"{encoding}-T{train}-seed{seed}",
        "encoding": encoding,
        "model": "tiny",
        "parameters": 120_000,
        "protocol": "nll_by_context",
        "length": length,
        "context": length - 8,
        "targets": 8,
        "position_from": None,
        "position_to": None,
        "bos": "keep",
        "extend": None,
        "defined": defined,
        "reason": None if defined else f"position {length - 1} is beyond max_position 64",
        "nll": nll,
        "perplexity": math.exp(nll) if defined and math.isfinite(nll) else nll,
        "bits_per_byte": nll / math.log(2) if defined else None,
        "reference_nll": reference,
        "excess_nll": None if reference is None or not defined else nll - reference,
        "tokens": 4096,
        "blocks": 512,
        "windows": 512,
        "documents": 20,
        "notes": [],
        "seed": seed,
        "train_tokens": 1_000_000,
        "train_length": train,
        "checkpoint_step": 500,
        "checkpoint": "last",
        "data": {
            "name": "manuals",
            "version": "1",
            "sha256": "ab" * 32,
            "tokenizer": "bytes",
            "split_version": 1,
            "split_rule": "hash",
            "bos": True,
        },
        "config_hash": "c0ffee",
        "commit": "0123abc",
        "dirty": False,
        "versions": {"jax": "0.10.0", "flax": "0.12.6"},
        "device": "cpu",
        "dtype": "float32",
        "matmul_precision": "highest",
        **changes,
    }


def by_position(encoding, start, stop, nll, **changes):
    changes = {"context": None, "targets": None, "position_from": start, "position_to": stop} | (
        changes
    )
    return row(encoding, changes.pop("length", 512), nll, protocol="per_position", **changes)


def realistic(seeds=(0, 1, 2), per_position=True):
    rows = []
    for encoding in (TABLE, *SLOPES):
        for seed in seeds:
            rng = np.random.default_rng([seed, len(encoding)])
            for length in LENGTHS:
                beyond = max(0.0, math.log2(length / 64))
                nll = 2.2 + 6 / length + SLOPES.get(encoding, 0) * beyond
                nll += 0.04 * float(rng.normal())
                if encoding == TABLE and length > 64:
                    nll = None
                notes = ["few documents"] if length >= 512 else []
                rows.append(row(encoding, length, nll, seed=seed, notes=notes, reference_nll=2.25))
            for start, stop in BUCKETS if per_position else ():
                mid = (start + stop) / 2
                nll = 2.2 + 1.6 / mid**0.6
                nll += SLOPES.get(encoding, 0) * max(0.0, math.log2(mid / 64))
                for length in (64, 512):
                    if stop <= length:
                        lost = encoding == TABLE and length > 64
                        rows.append(
                            by_position(
                                encoding,
                                start,
                                stop,
                                None if lost else nll + 0.03 * float(rng.normal()),
                                length=length,
                                seed=seed,
                            )
                        )
    return rows


def parse(markdown):
    """Header, {label: cells} and footnotes of a Markdown table."""
    lines = markdown.splitlines()
    cells = [
        [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    body = {label.strip("` ").replace("\0", "|"): values for label, *values in cells[2:]}
    return cells[0], body, [line[2:] for line in lines if line.startswith("- ")]


def drawn(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def test_table_holds_the_means_over_seeds():
    rows = [
        row("rope", 32, 3.0, seed=0),
        row("rope", 32, 3.5, seed=1),
        row("rope", 32, 3.1, seed=2),
        row("rope", 64, 2.0005, seed=0),
        row("rope", 64, 2.0, seed=1),
        row("a|b*2", 64, 1.0, seed=0),
        row("a|b*2", 64, 1.1, seed=1),
        row("a|b*2", 64, 1.5, seed=2),
    ]
    header, body, notes = parse(markdown_table(rows))
    assert header == ["encoding", "32", "64 (train)"]
    assert body == {"rope": ["3.200", "2.000 (n=2)"], "a|b*2": ["", "1.200"]}
    assert list(body) == ["rope", "a|b*2"]
    assert "mean over 3 seeds unless marked (n=...); seeds 0, 1, 2." in notes
    assert "training length: 64 tokens." in notes
    assert (
        "counts for each seed and length: target tokens: 4,096 (the last 8 of each window); "
        "blocks: 512; windows: 512; documents: 20."
    ) in notes
    assert "protocol: nll_by_context; bos: keep." in notes
    assert "corpus: manuals 1, tokenizer bytes." in notes
    assert any("nats per token" in note for note in notes)


def test_a_realistic_table_agrees_with_its_rows():
    rows = [*realistic(), row("late", 1024, 3.0, notes=["few documents"])]
    header, body, notes = parse(markdown_table(rows))
    assert header[1:] == ["16", "32", "64 (train)", "128", "256", "512", "1024"]
    for encoding in SLOPES:
        for length, cell in zip(LENGTHS, body[encoding], strict=True):
            values = [
                r["nll"]
                for r in rows
                if (r["encoding"], r["length"], r["protocol"])
                == (encoding, length, "nll_by_context")
            ]
            assert len(values) == 3
            assert float(cell) == pytest.approx(sum(values) / 3, abs=5.01e-4)
    assert body[TABLE][3:] == ["undefined"] * 4
    assert (
        "note: few documents (`wpe(max_position=64)`, `nope`, `rope`, `alibi`, `rope*3,nope` "
        "at 512, 1024; `late` at 1024)."
    ) in notes
    assert f"undefined: position 127 is beyond max_position 64 (`{TABLE}` at 128)." in notes


def test_one_seed_is_said_and_a_reason_is_said_once():
    reason = "beyond the table"
    rows = [
        row(name, length, None, reason=reason) for name in ("wpe", "t5") for length in (128, 256)
    ]
    _, body, notes = parse(markdown_table(rows))
    assert body == {"wpe": ["undefined"] * 2, "t5": ["undefined"] * 2}
    assert "one seed (0)." in notes
    assert [note for note in notes if note.startswith("undefined")] == [
        "undefined: beyond the table (at 128, 256)."
    ]


def test_excess_and_its_missing_reference():
    rows = [
        row("rope", 64, 2.5, reference_nll=2.5),
        row("rope", 128, 3.75, reference_nll=2.5),
        row("nope", 128, 3.0),
        row("wpe", 128, None),
    ]
    _, body, notes = parse(markdown_table(rows, value="excess_nll"))
    assert body == {"rope": ["0.000", "1.250"], "nope": ["", "n/a"], "wpe": ["", "undefined"]}
    assert "n/a: no length up to the training length was scored." in notes


def tried(chosen, losses):
    """What a tuned row says of its tuning."""
    grid = {"learning_rate": [0.001, 0.003, 0.01], "schedule": ["cosine", "wsd"]}
    criterion = "validation loss"
    design = {"trials": 6, "grid": grid, "seed": 9, "steps": 50, "criterion": criterion}
    return {**design, "chosen": chosen, "losses": losses}


def test_costs_and_tuning_stand_beside_the_numbers(tmp_path):
    chosen = {
        "rope": {"learning_rate": 0.003, "schedule": "wsd"},
        "alibi": {"learning_rate": 0.01, "schedule": "cosine"},
    }
    losses = [2.0, 1.5, None, 1.25, 1.375, 1.0]
    rows = []
    for encoding, flops, parameters in (("rope", 1.5e12, 120_000), ("alibi", 1.25e12, 119_000)):
        for settings, seconds in (("shared", (10.0, 20.0)), ("tuned", (30.0, 32.0))):
            tuning = tried(chosen[encoding], losses) if settings == "tuned" else None
            for seed in (0, 1):
                cost = {"train_flops": flops, "train_seconds": seconds[seed], "seeds_at_once": 2}
                own = {
                    "seed": seed,
                    "settings": settings,
                    "tuning": tuning,
                    "parameters": parameters,
                }
                device = {"trained_with": {"device": "8 x TPU v4 (tpu)"}}
                rows += [row(encoding, n, 2.0 + seed, **own, **cost, **device) for n in (64, 128)]
    # Another policy is no other training.
    rope = {"parameters": 120_000, "tuning": tried(chosen["rope"], losses)}
    rows.append(row("rope", 128, 2.5, **own | rope, **cost, extend="yarn"))
    table = cost_table(rows)
    assert parse(table)[1]["rope, shared"] == ["120,000", "1,000,000", "1.5e+12", "15"]
    assert parse(table)[1]["alibi, tuned"] == ["119,000", "1,000,000", "1.25e+12", "31"]
    assert len(parse(table)[1]) == 4
    assert "mean over seeds, of 2 trained at once" in table
    assert "trained on: 8 x TPU v4 (tpu)" in table
    table = tuning_table(rows)
    shown = "2.000, 1.500, diverged, 1.250, 1.375, 1.000"
    assert parse(table)[1] == {
        "rope, tuned": ["learning_rate 0.003, schedule wsd", shown],
        "alibi, tuned": ["learning_rate 0.01, schedule cosine", shown],
    }
    assert "6 trials an encoding" in table
    assert "at the edge of what was tried: `alibi, tuned`: learning_rate." in table
    assert "`rope, tuned`:" not in table
    # They stand right below the first table, and the lines of one encoding side by side.
    text = write_report(rows, tmp_path)["table.md"].read_text()
    first, costs, tuning = text.split("## ")[1:4]
    assert list(parse(first)[1])[-2:] == ["alibi, shared", "alibi, tuned"]
    assert costs.startswith("cost of training\n")
    assert tuning.startswith("tuning\n")
    # Rows that do not say have no such tables.
    assert cost_table([row()]) is None
    assert tuning_table([row()]) is None


def test_broken_models_show_as_nan_and_inf():
    rows = [row("a", 64, math.nan), row("a", 128, math.inf), row("b", 64, 1.0, seed=0)]
    _, body, _ = parse(markdown_table(rows))
    assert body == {"a": ["nan", "inf"], "b": ["1.000", ""]}


def test_an_extension_shares_the_rows_below_it():
    below = [row("wpe", 32, 2.5), row("wpe", 64, 2.0)]
    extended = [row("wpe", 128, 4.0, extend="clamp"), row("wpe", 256, 5.0, extend="clamp")]
    _, body, _ = parse(markdown_table(below + extended))
    assert body == {"wpe, extend=clamp": ["2.500", "2.000", "4.000", "5.000"]}
    # Scored a second time without the policy: the rows that agree are not counted twice.
    again = [*below, row("wpe", 128, None), row("wpe", 256, None)]
    _, body, notes = parse(markdown_table(below + extended + again))
    assert body == {
        "wpe": ["2.500", "2.000", "undefined", "undefined"],
        "wpe, extend=clamp": ["2.500", "2.000", "4.000", "5.000"],
    }
    assert "one seed (0)." in notes


def test_rows_that_differ_are_not_averaged():
    rows = [
        row("rope", 64, 2.0),
        row("rope", 128, 3.0),
        row("rope", 128, 2.5, train_length=128, checkpoint_step=250),
        row("nope", 64, 4.0, model="small"),
    ]
    header, body, _ = parse(markdown_table(rows))
    assert header == ["encoding", "64", "128"]
    # checkpoint_step says no more than train_length does, and stays out.
    assert body == {
        "rope, model=tiny, train_length=64": ["2.000 (train)", "3.000"],
        "rope, model=tiny, train_length=128": ["", "2.500 (train)"],
        "nope, model=small, train_length=64": ["4.000 (train)", ""],
    }
    # A line has the same label, and so the same look, in both panels.
    rows = [*rows[1:3], by_position("rope", 0, 1, 3.0, length=64)]
    left, right = make_figure(rows).axes
    same = "rope, train_length=64"
    assert drawn(left, same).get_marker() == drawn(right, same).get_marker()
    with pytest.raises(UserError, match=r"two results for rope at length 64, seed 0 \(runs .*x\)"):
        markdown_table([row("rope", 64, 2.0), row("rope", 64, 2.1, run="x")])


def test_console_table_says_the_same_as_markdown():
    rows = [*realistic(per_position=False), row("[bold]x", 64, 1.25)]
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(console_table(rows))
    text = console.export_text()
    _, body, notes = parse(markdown_table(rows))
    assert "[bold]x" in text
    lines = {line.split("│")[1].strip(): line for line in text.splitlines() if "│" in line}
    for label, cells in body.items():
        assert [cell.strip() for cell in lines[label].split("│")[2:-1]] == cells
    flat = " ".join(text.split())
    assert all(note in flat for note in notes)


def test_rows_survive_the_disk(tmp_path):
    rows = realistic()
    rows += [
        row("NaN", 64, math.nan, extra=[1.5, -math.inf], notes=["NaN"]),
        row("b", np.int64(64), math.inf, perplexity=np.float32(math.inf)),
    ]
    write_rows(rows, tmp_path)
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        back = read_rows(path)
        assert repr(back[:-1]) == repr(rows[:-1])  # repr, since nan differs from itself
        assert back[-1]["perplexity"] == math.inf
        assert back[-1]["length"] == 64
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()

    def refuse(name):
        raise AssertionError(name)

    assert [json.loads(line, parse_constant=refuse)["nll"] for line in lines[-2:]] == [
        "NaN",
        "Infinity",
    ]
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".partial")]


def test_csv_is_flat_and_in_a_stable_order(tmp_path):
    rows = [
        row("rope", 64, math.nan, notes=["few documents", "a, b"]),
        row("wpe", 128, None, zeta=1, alpha={"b": True}),
    ]
    write_rows(rows, tmp_path / "a")
    write_rows(rows[::-1], tmp_path / "b")
    with open(tmp_path / "a" / "rows.csv", newline="") as file:
        first, second = table = list(csv.DictReader(file))
    header = list(table[0])
    assert header[:3] == ["schema", "run", "encoding"]
    assert header[-2:] == ["alpha.b", "zeta"]
    assert (first["nll"], first["notes"]) == ("NaN", "few documents; a, b")
    assert (second["nll"], second["defined"], second["alpha.b"]) == ("", "false", "true")
    assert (first["data.name"], first["versions.jax"]) == ("manuals", "0.10.0")
    assert float(first["train_tokens"]) == 1e6
    assert (first["zeta"], second["zeta"]) == ("", "1")
    with open(tmp_path / "b" / "rows.csv", newline="") as file:
        assert file.readline().strip().split(",") == header


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"rows\.jsonl: cannot read result rows \(No such file"),
        ("\n", r"rows\.jsonl: holds no result rows: score a run first"),
        ('GOOD\n{"schema": 1, "ru', r"rows\.jsonl, line 2: not JSON"),
        ("GOOD\n[1]", r"line 2: expected a JSON object, found list"),
        ('GOOD\n\n{"schema": 1}', r"line 3: without run, encoding"),
        ('{"schema": 2}', r"line 1: schema 2, but this version reads schema 1"),
        ({"nll": "low"}, r"line 1: nll is 'low', not a number"),
        ({"length": 0}, r"line 1: length is 0, not a positive number of tokens"),
        ({"defined": False}, r"line 1: defined is False, but nll is 3\.0"),
        ({"defined": "yes"}, r"line 1: defined is 'yes'"),
        ({"protocol": "per_position"}, r"line 1: the bucket of positions \[None, None\)"),
        ({"data": 5}, r"line 1: data is 5, not a JSON object"),
        (
            {"trained_with": {"versions": [1]}},
            r"trained_with\.versions is \[1\], not a JSON object",
        ),
        ({"parameters": "many"}, r"line 1: parameters is 'many', not a whole number"),
        ({"train_seconds": "long"}, r"line 1: train_seconds is 'long', not a number"),
        ({"tuning": {"grid": {}}}, r"tuning is without trials, steps, seed, criterion, chosen"),
        (
            {"last_validations": {"64": 2.5}},
            r"last_validations has 2\.5 at length '64', not a list",
        ),
        (b"\xff\n", r"rows\.jsonl: not UTF-8 at byte 0"),
    ],
)
def test_files_at_fault_are_named_in_one_line(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    if isinstance(content, dict):
        content = json.dumps(row() | content)
    if isinstance(content, str):
        content = content.replace("GOOD", json.dumps(row())).encode()
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_rows(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_what_cannot_be_reported_is_refused(tmp_path):
    with pytest.raises(UserError, match="no result rows"):
        write_report([], tmp_path)
    with pytest.raises(UserError, match="result row 2: without run"):
        write_report([row(), {"schema": 1}], tmp_path)
    with pytest.raises(UserError, match=r"'non_overlapping': the rows are of nll_by_context"):
        markdown_table([row()], "non_overlapping")
    with pytest.raises(UserError, match="two results"):
        write_report([row(), row(nll=2.0, run="x")], tmp_path)
    twice = [by_position("a", 0, 1, nll, run=run) for nll, run in ((2.0, "x"), (3.0, "y"))]
    with pytest.raises(UserError, match="two results"):
        write_report([row(), *twice], tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match=r"cannot write .*make room, or name a folder that can be written"
    ):
        write_report([row()], tmp_path / "file")
    (tmp_path / "taken" / "rows.csv").mkdir(parents=True)
    with pytest.raises(UserError, match=r"rows\.csv: cannot write"):
        write_rows([row()], tmp_path / "taken")
    assert sorted(p.name for p in (tmp_path / "taken").iterdir()) == ["rows.csv", "rows.jsonl"]


def test_the_training_length_has_a_number_where_no_length_is_scored_there():
    axes = Figure().add_subplot()
    scale_x(axes, [128, 1024], [64], [128, 256, 512, 1024])
    assert axes.get_xticks().tolist() == [64, 128, 256, 512, 1024]
    assert axes.get_xticklabels()[0].get_text() == "64"


def test_figure_plots_the_rows():
    rows = realistic()
    figure = make_figure(rows)
    left, right = figure.axes
    for encoding in SLOPES:
        mine = [r for r in rows if r["encoding"] == encoding]
        line = drawn(left, encoding)
        assert tuple(line.get_xdata()) == LENGTHS
        means = [
            sum(
                r["nll"] for r in mine if (r["protocol"], r["length"]) == ("nll_by_context", length)
            )
            / 3
            for length in LENGTHS
        ]
        np.testing.assert_allclose(line.get_ydata(), means, rtol=1e-12)
        curve = drawn(right, encoding)
        np.testing.assert_array_equal(curve.get_xdata(), [(a + b) / 2 for a, b in BUCKETS])
        means = [
            sum(
                r["nll"]
                for r in mine
                if r["protocol"] == "per_position"
                and (r["length"], r["position_from"], r["position_to"]) == (512, a, b)
            )
            / 3
            for a, b in BUCKETS
        ]
        np.testing.assert_allclose(curve.get_ydata(), means, rtol=1e-12)
        assert curve.get_color() == line.get_color()
        # The single seeds, in the encoding's colour.
        faint = [
            tuple(each.get_ydata())
            for each in left.lines
            if each.get_label() == "_seed" and each.get_color() == line.get_color()
        ]
        assert sorted(faint) == sorted(
            tuple(r["nll"] for r in mine if r["protocol"] == "nll_by_context" and r["seed"] == seed)
            for seed in (0, 1, 2)
        )
    for axes in figure.axes:
        assert set(drawn(axes, "_training").get_xdata()) == {64}
        assert "training length" in [text.get_text() for text in axes.texts]
    assert [tick.get_text() for tick in left.get_xticklabels()] == list(map(str, LENGTHS))
    assert left.get_ylabel() == "nll (nats per token)"
    assert [text.get_text() for text in figure.texts] == ["few documents (T = 512, 1024)"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [TABLE, *SLOPES]


def test_figure_shows_where_there_is_no_value():
    rows = [
        row("wpe", 64, 2.0),
        row("wpe", 128, None),
        row("rope", 64, 2.5),
        row("rope", 128, math.nan),
        row("rope", 256, math.inf),
        row("rope", 512, 4.0),
    ]
    (axes,) = make_figure(rows).axes
    crosses, triangles = drawn(axes, "_undefined: wpe"), drawn(axes, "_not finite: rope")
    assert list(crosses.get_xdata()) == [128]
    assert list(triangles.get_xdata()) == [128, 256]
    assert crosses.get_color() == drawn(axes, "wpe").get_color()
    assert triangles.get_color() == drawn(axes, "rope").get_color()
    assert (crosses.get_marker(), triangles.get_marker()) == ("x", "^")
    text = " ".join(text.get_text() for text in axes.texts)
    assert "undefined" in text
    assert "nan or inf" in text
    np.testing.assert_array_equal(drawn(axes, "rope").get_ydata(), [2.5, math.nan, math.nan, 4.0])
    # The markers stand above all data, inside the axes.
    top = axes.transData.transform((64, 4.0))[1]
    for line in (crosses, triangles):
        height = line.get_transform().transform((128, line.get_ydata()[0]))[1]
        assert top < height < axes.get_window_extent().y1


def test_positions_are_drawn_in_the_longest_window_that_is_defined():
    rows = [by_position("wpe", a, b, 3.0, length=64) for a, b in BUCKETS if b <= 64]
    rows += [by_position("wpe", a, b, None) for a, b in BUCKETS]
    rows += [by_position("rope", a, b, 2.0 + a) for a, b in BUCKETS]
    (axes,) = make_figure(rows).axes
    wpe = drawn(axes, "wpe")
    assert [y for y in wpe.get_ydata() if math.isfinite(y)] == [3.0] * 7
    assert list(drawn(axes, "_undefined: wpe").get_xdata()) == [96, 192, 384]
    assert drawn(axes, "rope").get_ydata()[-1] == 2.0 + 256
    assert axes.get_xlabel() == "index in the window (longest defined)"


def test_every_line_looks_different():
    rows = [row(f"e{n}", 64, 2.0 + n / 10) for n in range(20)]
    rows += [row("e0", 128, None), row("e0", 128, 5.0, extend="clamp")]
    (axes,) = make_figure(rows).axes
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    assert len(lines) == 21
    looks = {
        (to_hex(line.get_color()), str(line.get_linestyle()), str(line._dash_pattern))
        for line in lines
        if "extend" not in line.get_label()
    }
    assert len(looks) == 20
    markers = {(line.get_color(), str(line._dash_pattern), line.get_marker()) for line in lines}
    assert len(markers) == 21
    colours = [line.get_color() for line in lines if line.get_label().startswith("e0")]
    assert len(colours) == 2
    assert len(set(colours)) == 1
    assert len({line.get_color() for line in lines[:8]}) == 7  # e0 twice
    assert len({line.get_color() for line in lines}) == 8


def test_names_are_text_in_the_figure(tmp_path):
    name = "$x_$_" + "y" * 150
    rows = [row("_hidden", 64, 2.0), row(name, 64, 3.0), row("$\\frac{$", 64, 3.0)]
    texts = make_figure(rows).legends[0].get_texts()
    assert texts[0].get_text() == "_hidden"
    assert texts[1].get_text().replace("\n", "") == name
    draw(rows, tmp_path)


def test_report_is_rebuilt_byte_for_byte_from_its_rows(tmp_path):
    rows = realistic()
    rows += [
        {**r, "protocol": "non_overlapping", "targets": None, "context": None}
        for r in rows
        if r["protocol"] == "nll_by_context"
    ]
    before = dict(matplotlib.rcParams)
    paths = write_report(rows, tmp_path / "first")
    assert dict(matplotlib.rcParams) == before
    assert sorted(paths) == FILES
    assert sorted(path.name for path in (tmp_path / "first").iterdir()) == FILES
    # Another process, with other hashes of strings and the caller's own matplotlib settings.
    code = (
        "import sys, matplotlib\n"
        "matplotlib.rcParams['font.size'] = 20\n"
        "from eval.report import read_rows, write_report\n"
        "write_report(read_rows(sys.argv[1]), sys.argv[2])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "first"), str(tmp_path / "second")],
        check=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    for name in FILES:
        assert (tmp_path / "second" / name).read_bytes() == paths[name].read_bytes(), name

    png, pdf = paths["figure.png"].read_bytes(), paths["figure.pdf"].read_bytes()
    assert png.startswith(b"\x89PNG")
    assert 10_000 < len(png) < 300_000
    assert pdf.startswith(b"%PDF")
    assert b"/FontFile2" in pdf  # an embedded TrueType font
    assert b"/Type3" not in pdf
    assert b"Date" not in pdf

    text = paths["table.md"].read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## nll_by_context: nll",
        "## non_overlapping: nll",
        "## nll_by_context: excess nll over the reference",
    ]
    assert markdown_table(rows) in text
    assert markdown_table(rows, "non_overlapping") in text
    assert markdown_table(rows, value="excess_nll") in text


def test_one_panel_without_positions(tmp_path):
    figure = make_figure(realistic(per_position=False))
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 1
    figure = make_figure([row("rope", 64, 2.0, protocol="non_overlapping")])
    assert list(drawn(figure.axes[0], "rope").get_ydata()) == [2.0]
    with pytest.raises(UserError, match="no rows by length or by position"):
        make_figure([])


def test_labels_name_every_setting_in_which_joined_rows_differ():
    # One field would be enough to tell the two apart; a reader needs to know all three.
    rows = [
        row(nll=3.0, train_tokens=10, bos="none", longest_length=16),
        row(nll=2.0, train_tokens=20, bos="keep", longest_length=32),
    ]
    text = markdown_table(rows)
    for words in (
        "train_tokens=10, bos=none, longest_length=16",
        "train_tokens=20, bos=keep, longest_length=32",
    ):
        assert f"`rope, {words}`" in text
    # A checksum that says no more than what stands there stays out.
    assert "sha256" not in markdown_table(
        [row(nll=3.0), row(nll=2.0, data={**row()["data"], "name": "sotu", "sha256": "cd" * 32})]
    )
