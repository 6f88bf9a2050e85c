"""The study of weight sharing: its data, its counts, and what its committed results say."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from eval.__main__ import main
from eval.report.rows import read_rows
from posenc import data as datasets
from posenc.errors import UserError
from posenc.transformer import Transformer, count_parameters
from studies.documents import commands, nth_table, with_outputs, with_tables
from studies.weight_sharing import contributions, facts, report, text
from studies.weight_sharing.__main__ import EXPERIMENTS, Study
from studies.weight_sharing.__main__ import main as study

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "studies" / "weight_sharing" / "results"


@pytest.fixture(scope="module")
def batches():
    corpus = datasets.load("manuals-small")
    stream = datasets.TokenStream(
        datasets.split(corpus, "valid"), datasets.tokenizer("bytes"), "document"
    )
    return datasets.Batches(datasets.Windows(stream, 32), 64, seed=3)


@pytest.mark.fast
def test_a_fact_is_a_mark_a_letter_and_its_answer():
    tokens = np.zeros((2, 9), np.int32)
    facts.plant(tokens, np.array([3, 7]), np.array([0, 25]))
    first, last = facts.ANSWERS[[0, 25]]
    assert tokens.tolist() == [[0, 0, 1, 65, first, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 90, last]]
    assert sorted(facts.ANSWERS) == list(range(ord("a"), ord("z") + 1))


@pytest.mark.fast
def test_facts_are_taught_in_their_places_alone(batches):
    taught = [*range(1, 8), *range(17, 24)]
    assert [place for run in facts.taught_runs(32) for place in run] == taught
    seen, answers = set(), dict(zip(facts.ASKED, facts.ANSWERS, strict=True))
    for step in range(20):
        batch = facts.taught_batch(batches, 5, step)
        again = facts.taught_batch(batches, 5, step)
        assert all(np.array_equal(batch[name], again[name]) for name in batch)
        rows, marks = np.nonzero(batch["inputs"] == facts.MARK)
        assert np.array_equal(rows, np.repeat(np.arange(64), 2))  # one in each run
        for row, mark in zip(rows, marks, strict=True):
            assert batch["targets"][row, mark + 1] == answers[batch["inputs"][row, mark + 1]]
        seen |= set((marks + 1).tolist())
        plain = batches[step]["inputs"]
        far = np.ones_like(plain, bool)
        for shift in (0, 1, 2):
            far[rows, np.minimum(marks + shift, 31)] = False
        np.testing.assert_array_equal(batch["inputs"][far], plain[far])
    assert sorted(seen) == taught


@pytest.mark.parametrize(("sharing", "copies"), [("all", 1), ("groups(copies=4)", 4), ("none", 16)])
def test_a_weight_hears_from_every_position_that_shares_it(sharing, copies):
    model = Transformer(text.shape(sharing, 16), text.ENCODING, 16)
    tokens = np.random.default_rng(0).integers(0, 257, 17).astype(np.int32)
    counts = contributions.per_weight(model, tokens)
    for name in ("blocks.0.mlp.up.kernel", "blocks.1.attention.value.kernel"):
        assert counts[name].shape[0] == copies
        assert np.median(counts[name]) == counts[name].max() == 16 // copies


@pytest.mark.fast
def test_a_narrowed_model_has_as_many_parameters_as_the_shared_one():
    wanted = text.parameters("all", 64, 32)
    assert wanted == count_parameters(Transformer(text.shape("all", 64), text.ENCODING, 32))
    for sharing in text.SHARINGS[1:]:
        width = text.narrowed(sharing, 64, 32)
        off = [abs(text.parameters(sharing, width + d, 32) - wanted) for d in (-4, 0, 4)]
        assert min(off) == off[1] < 0.02 * wanted


def pixels(path):
    return matplotlib.image.imread(path)[..., :3]


def test_committed_results_rebuild_table_and_figure_and_bear_out_what_the_documents_say(tmp_path):
    report.main([str(RESULTS), str(tmp_path)])
    assert (tmp_path / "table.md").read_text() == (RESULTS / "table.md").read_text()
    # Another release of matplotlib may place a glyph elsewhere, and no line.
    again, committed = pixels(tmp_path / "figure.png"), pixels(RESULTS / "figure.png")
    assert again.shape == committed.shape
    assert np.abs(again - committed).mean() < 0.01
    tables = (RESULTS / "table.md").read_text()
    for document in ("docs/weight-sharing.md", "studies/weight_sharing/README.md"):
        shown = (ROOT / document).read_text()
        numbers = [int(n) for n in re.findall(r"<!-- table (\d) of", shown)]
        assert numbers
        assert all(nth_table(tables, number) in shown for number in numbers)
    rows = {name: read_rows(RESULTS / name) for name in EXPERIMENTS}
    every = [row for name in EXPERIMENTS for row in rows[name]]
    assert not any(row["dirty"] for row in every)
    assert len({row["commit"] for row in every}) == 1
    assert {row["seed"] for row in rows["text"]} == {0, 1, 2}

    # (a) The more positions share, the lower the loss: at equal width, at equal parameters, at
    # every number of tokens, and beyond the spread of the seeds.
    scored = [row for row in rows["text"] if row["protocol"] == report.ON_TEXT]
    for widths in ({64}, {64, 24, 12}):
        for tokens in {row["train_tokens"] for row in scored}:
            spans = []
            for sharing in text.SHARINGS:
                some = [r for r in scored if r["sharing"] == sharing and r["width"] in widths]
                narrowest = min(row["width"] for row in some)
                some = [r for r in some if r["width"] == narrowest and r["train_tokens"] == tokens]
                spans.append(report.by_seed(some))
            assert spans[0][2] < spans[1][1] < spans[1][2] < spans[2][1], (widths, tokens)

    # (b) What all positions share is known where it was never taught; what none share is not.
    def right(sharing, kind):
        some = [r for r in rows["facts"] if r["sharing"] == sharing]
        return report.by_seed([r for r in some if report.kind_of_place(r) == kind], "accuracy")

    assert all(right(sharing, "taught")[1] > 0.95 for sharing in facts.SHARINGS)
    assert right("all", "shared")[1] > 0.95
    assert right("groups(copies=2)", "shared")[1] > 0.5
    assert right("groups(copies=8)", "own")[2] < 0.2
    assert right("none", "own")[2] < 0.2

    # (c) Context helps the shared model all through the window, the other one hardly.
    def at(sharing, place):
        some = [r for r in rows["text"] if r["protocol"] == "per_position"]
        some = [r for r in some if r["sharing"] == sharing and r["width"] == 64]
        return report.by_seed([r for r in some if r["position_from"] == place])[0]

    assert at("all", 3) - at("all", 27) > 0.3
    assert at("none", 3) - at("none", 27) < 0


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sharing", "shared", "own"),
    [
        ("all", [*range(8, 17), *range(24, 32)], []),
        ("groups(copies=2)", [*range(8, 16), *range(24, 32)], []),
        ("groups(copies=8)", [], [*range(8, 16), *range(24, 32)]),
        ("none", [], [*range(8, 17), *range(24, 32)]),
    ],
)
def test_places_are_told_apart_by_what_their_weights_were_taught(sharing, shared, own):
    taught = [place for run in facts.taught_runs(32) for place in run]
    kinds = {
        place: report.kind_of_place(
            {
                "place": place,
                "taught": place in taught,
                "taught_places": taught,
                "sharing": sharing,
                "length": 32,
            }
        )
        for place in range(1, 32)
    }
    assert [place for place, kind in kinds.items() if kind == "taught"] == taught
    assert [place for place, kind in kinds.items() if kind == "shared"] == shared
    assert [place for place, kind in kinds.items() if kind == "own"] == own


@pytest.mark.fast
def test_documents_are_filled_where_they_say_and_nowhere_else(tmp_path):
    table = tmp_path / "table.md"
    table.write_text("## One\n\n| a |\n| - |\n\n## Two\n\n| b |\n| - |\n")
    empty = (
        f"before\n\n<!-- table 2 of {table} -->\n<!-- end of table -->\nbetween\n"
        f"<!-- table 1 of {table} -->\n| old |\n<!-- end of table -->\n\nafter\n"
    )
    filled = (
        f"before\n\n<!-- table 2 of {table} -->\n| b |\n| - |\n<!-- end of table -->\nbetween\n"
        f"<!-- table 1 of {table} -->\n| a |\n| - |\n<!-- end of table -->\n\nafter\n"
    )
    assert with_tables(empty) == with_tables(filled) == filled
    shown = "x\n```console\n$ python -c \\\n    'print(6 * 7)'\nold\n```\n```bash\npython no\n```\n"
    assert commands(shown) == [(["python", "-c", "print(6 * 7)"], "old\n")]
    assert with_outputs(shown) == shown.replace("old", "42")
    assert with_outputs(with_outputs(shown)) == with_outputs(shown)
    for code, said in (("raise SystemExit(3)", "exit code 3"), ("1 / 0", "ZeroDivisionError")):
        with pytest.raises(UserError, match=said):
            with_outputs(f"```console\n$ python -c '{code}'\n```\n")


def test_what_the_documents_show_of_presets_is_what_the_commands_print(capsys):
    document = (ROOT / "docs" / "weight-sharing.md").read_text()
    shown = [(words, printed) for words, printed in commands(document) if "--model" in words]
    assert len(shown) >= 3
    for words, printed in shown:
        assert words[:4] == ["python", "-m", "eval", "audit"]
        capsys.readouterr()
        main(words[3:])
        assert capsys.readouterr().out.rstrip() == printed.rstrip()


@pytest.mark.fast
def test_the_rate_of_the_lowest_validation_loss_is_chosen(monkeypatch):
    losses = {0.001: 2.5, 0.003: 2.0, 0.01: None}  # None: not finite, or not measured

    class Opened:
        def __init__(self, rate):
            self.checkpoints = self
            self.rate = rate

        def valid_loss(self, step):
            assert step == Study().steps // 4
            return losses[self.rate]

    def trained(study, sharing, width, rate, **settings):
        assert settings["seed"] == (0,)
        return [rate]

    monkeypatch.setattr(text, "trained", trained)
    monkeypatch.setattr(text, "open_run", Opened)
    assert text.best_rate(Study(), "none", 64) == 0.003


@pytest.mark.slow
def test_the_study_at_toy_size(tmp_path):
    words = [
        *(sys.executable, "-m", "studies.weight_sharing", "--out", str(tmp_path)),
        *("--fact-steps", "2", "--seeds", "0", "--width", "16"),
        *("--length", "16", "--batch-size", "4", "--tokens-per-document", "64"),
        *("--steps", "16", "--rates", "0.01"),
    ]
    first = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert first.returncode == 0, first.stderr
    rows = {name: read_rows(tmp_path / "results" / name) for name in EXPERIMENTS}
    assert {row["sharing"] for row in rows["text"]} == {"all", "groups(copies=8)", "none"}
    assert {row["learning_rate"] for row in rows["text"]} == {0.01}
    assert len(rows["facts"]) == 4 * 15
    assert [row["contributions_most"] for row in rows["contributions"]] == [16, 2, 1]
    kept = json.loads((tmp_path / "facts" / "facts-all-seed0.json").read_text())
    assert kept["rows"] == rows["facts"][:15]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 84}, "--steps is 84: give a multiple of 8"),
        ({"length": 24}, "--length is 24: give a multiple of 16"),
        ({"fact_steps": 0}, "--fact-steps is 0"),
        ({"tokens_per_document": 1}, "--tokens-per-document is 1"),
        ({"seeds": ()}, "--seeds names none"),
        ({"rates": (0.001, 0.0)}, "--learning-rate is 0"),
        ({"rates": ()}, "--rates names none"),
        ({"fact_rate": -1.0}, "--learning-rate is -1"),
        ({"width": 63}, "width 63 is not divisible by 2 heads"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_made(changes, said, tmp_path):
    with pytest.raises(UserError) as refusal:
        study(dataclasses.replace(Study(out=tmp_path / "out"), **changes))
    assert said in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.fast
def test_facts_of_other_settings_are_not_taken_for_these(tmp_path, monkeypatch, batches):
    """As many tokens in fewer steps are another training."""
    trained = []

    def train_one(given, sharing, seed, batches):
        trained.append((given.fact_steps, given.batch_size))
        return Transformer(text.shape(sharing, 16), text.ENCODING, 16)

    monkeypatch.setattr(facts, "train_one", train_one)
    monkeypatch.setattr(facts, "ask", lambda model, windows: [])
    monkeypatch.setattr(facts, "SHARINGS", ("all",))
    for steps, size in ((2, 8), (4, 4), (4, 4), (2, 8)):
        settings = {"fact_steps": steps, "batch_size": size, "seeds": (0,), "length": 16}
        facts.run(Study(out=tmp_path, **settings))
    assert trained == [(2, 8), (4, 4), (2, 8)]
