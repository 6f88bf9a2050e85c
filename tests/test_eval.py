"""Protocols against naive loops over tokens; rows, resuming, refusals."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from eval import evaluate as evaluation
from eval import texts
from eval.evaluate import evaluate
from eval.protocols import (
    NllByContext,
    NonOverlapping,
    PerPosition,
    Settings,
    Window,
    check_ladder,
)
from eval.scoring import KeptScores, Scorer, extended_model
from eval.texts import load_text
from posenc import data as datasets
from posenc.encodings import EncodingError, PositionOutOfRange, parse_part
from posenc.errors import UserError
from posenc.runs import load_model, open_run
from posenc.training import split
from posenc.transformer import Transformer
from train import Arguments
from train import main as train_main

TRAIN_LENGTH = 16
LADDER = (8, 16, 32, 64)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Forty documents of words, from 20 to 900 bytes: some shorter than any window."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "wave", "phase", "slope", "é"]
    for index in range(160):
        size = int(rng.integers(3, 160))
        (folder / f"{index}.txt").write_text(" ".join(rng.choice(words, size)))
    return folder


@pytest.fixture(scope="session")
def runs(text, tmp_path_factory):
    """Two trained runs, one of which ends at its training length."""
    return train_some(text, tmp_path_factory.mktemp("runs"), "wpe", "alibi")


def train_some(text, out, *encodings):
    return train_main(
        Arguments(
            encoding=encodings,
            model="nano",
            data=str(text / "*.txt"),
            train_length=TRAIN_LENGTH,
            batch_size=8,
            steps=30,
            warmup_steps=5,
            learning_rate=1e-2,
            eval_every=30,
            eval_tokens=256,
            checkpoint_every=30,
            out=out,
        )
    )


@pytest.fixture(scope="session")
def rows(runs, tmp_path_factory):
    return evaluate(runs, LADDER, tmp_path_factory.mktemp("scores"), extend=("clamp", "fresh"))


def naive_scorer(model):
    """Score a window's tokens one at a time, each from what stands before it, in float64."""
    forward = jax.jit(lambda ids: model(ids, np.arange(64, dtype=np.int32)[None]))

    def naive_nll(window, first):
        ids = np.zeros((1, 64), np.int32)  # what stands behind a token changes nothing
        ids[0, : len(window)] = window
        logits = np.asarray(forward(ids), np.float64)[0]
        scores = []
        for place in range(first, len(window)):
            row = logits[place - 1]
            total = math.log(np.sum(np.exp(row - row.max()))) + row.max()
            scores.append(total - row[ids[0, place]])
        return scores

    return naive_nll


@pytest.mark.parametrize("bos", ["keep", "prepend", "none"])
def test_nll_by_context_equals_a_naive_loop(runs, bos, tmp_path):
    run = next(open_run(r) for r in runs if "alibi" in r.name)
    naive_nll = naive_scorer(load_model(run, run.config.steps))
    documents = load_text(run).documents
    lengths = (8, 32)
    rows = evaluate([run.folder], lengths, tmp_path, bos=bos, blocks=3)
    targets, longest = 2, max(lengths) - 2
    sums, counts, blocks, long_enough = dict.fromkeys(lengths, 0.0), 0, 0, 0
    for document in documents:
        room = len(document) - targets - longest
        if room < 0:
            continue
        long_enough += 1
        count = min(3, 1 + room // TRAIN_LENGTH)
        starts = [
            longest + (k * room // (count - 1) if count > 1 else room // 2) for k in range(count)
        ]
        for start in starts:
            blocks += 1
            counts += targets
            for length in lengths:
                context = length - targets
                window = document[start - context : start + targets].tolist()
                if bos == "prepend":
                    window = [256, *window[1:]]
                assert len(window) == length
                sums[length] += sum(naive_nll(window, context))
    assert long_enough >= 3
    for length in lengths:
        row = next(r for r in rows if r["protocol"] == "nll_by_context" and r["length"] == length)
        assert (row["blocks"], row["tokens"], row["documents"]) == (blocks, counts, long_enough)
        assert row["nll"] == pytest.approx(sums[length] / counts, abs=2e-5)
        assert row["context"] + row["targets"] == length
        assert row["bits_per_byte"] == pytest.approx(row["nll"] / math.log(2))
        assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))


@pytest.mark.parametrize("bos", ["keep", "prepend", "none"])
def test_non_overlapping_and_per_position_equal_a_naive_loop(runs, bos, tmp_path):
    run = next(open_run(r) for r in runs if "alibi" in r.name)
    naive_nll = naive_scorer(load_model(run, run.config.steps))
    documents = load_text(run).documents
    length, limit = 32, 100
    rows = evaluate([run.folder], (length,), tmp_path, bos=bos, tokens_per_document=limit)
    scored, by_place = [], {p: [] for p in range(1, length)}
    for document in documents:
        rest = document[:limit].tolist()
        if bos == "keep":
            rest = [256, *rest]  # as in training: one where the document begins
        while rest:
            window = rest[:length]
            if bos == "prepend":
                window = [256, *rest[: length - 1]]
            scores = naive_nll(window, 1) if len(window) > 1 else []
            scored += scores
            if len(window) == length:
                for place, score in enumerate(scores, 1):
                    by_place[place].append(score)
            # The last token of a window begins the next one, unscored; after a BOS all are scored.
            step = len(window) - 1
            rest = rest[step:] if bos == "prepend" or len(rest) > len(window) else []
    row = next(r for r in rows if (r["protocol"], r["length"]) == ("non_overlapping", length))
    assert row["tokens"] == len(scored)
    assert row["nll"] == pytest.approx(np.mean(scored), abs=2e-5)
    buckets = [r for r in rows if r["protocol"] == "per_position"]
    assert buckets[0]["position_from"] == 1
    assert buckets[-1]["position_to"] == length
    for one, following in itertools.pairwise(buckets):
        assert one["position_to"] == following["position_from"]
    for bucket in buckets:
        places = range(bucket["position_from"], bucket["position_to"])
        expected = np.concatenate([by_place[place] for place in places])
        assert bucket["tokens"] == len(expected)
        assert bucket["nll"] == pytest.approx(np.mean(expected), abs=2e-5)


@pytest.mark.fast
def test_two_processes_do_not_score_the_same(tmp_path):
    windows = [Window(0, 0, 4, 1, False)]
    with KeptScores(windows, tmp_path, {}).locked():
        with pytest.raises(UserError, match="another process scores the same"):
            KeptScores(windows, tmp_path, {}).locked().__enter__()
        with KeptScores(windows, tmp_path, {"other": 1}).locked():
            pass


@pytest.mark.parametrize("nll", [math.nan, math.inf])
def test_a_broken_model_is_reported_as_broken(runs, tmp_path, monkeypatch, nll):
    score = Scorer.score
    monkeypatch.setattr(Scorer, "score", lambda self, w: [s * 0 + nll for s in score(self, w)])
    rows = evaluate(runs[1:], (8, 32), tmp_path)
    for row in rows:
        np.testing.assert_equal((row["nll"], row["perplexity"]), (nll, nll))
        assert row["defined"]
        assert row["excess_nll"] is None


@pytest.mark.fast
def test_blocks_are_the_same_tokens_at_every_length():
    settings = Settings((8, 16, 64), 2, 16, 5, 10_000, "none")
    sizes = [10, 63, 64, 65, 300, 1000]
    seen = {}
    for length in settings.lengths:
        plan = NllByContext().plan(sizes, length, settings, True)
        seen[length] = [(w.document, w.start + w.first, w.start + w.length) for w in plan]
        assert all(w.length == length and w.first == length - 2 and w.start >= 0 for w in plan)
    assert seen[8] == seen[16] == seen[64]
    assert {document for document, _, _ in seen[8]} == {2, 3, 4, 5}
    for document in range(6):
        starts = [start for d, start, _ in seen[8] if d == document]
        assert all(b - a >= 16 for a, b in itertools.pairwise(starts))
        assert len(starts) <= 5
    assert max(end for d, _, end in seen[8] if d == 5) == 1000


@pytest.mark.fast
def test_non_overlapping_windows_score_the_same_tokens_at_every_length():
    sizes = [1, 2, 7, 8, 9, 50]
    for bos in ("keep", "prepend", "none"):
        for with_bos in (True, False):
            settings = Settings((8,), 1, 8, 5, 40, bos)
            wanted = None
            for length in (4, 8, 64):
                plan = NonOverlapping().plan(sizes, length, settings, with_bos)
                scored = [
                    (w.document, w.start - w.bos + place)
                    for w in plan
                    for place in range(w.first, w.length)
                ]
                assert len(scored) == len(set(scored))
                wanted = sorted(scored) if wanted is None else wanted
                assert sorted(scored) == wanted
            head = 0 if bos == "prepend" or (bos == "keep" and with_bos) else 1
            expected = [(d, t) for d, size in enumerate(sizes) for t in range(head, min(size, 40))]
            assert wanted == expected
    assert PerPosition().plan([50], 8, Settings((8,), 1, 8, 5, 40, "none"), True)


def test_undefined_lengths_are_rows_with_a_reason(rows):
    own = [r for r in rows if r["encoding"] == "wpe" and r["protocol"] == "nll_by_context"]
    plain = {r["length"]: r for r in own if r["extend"] is None}
    assert [plain[n]["defined"] for n in LADDER] == [True, True, False, False]
    assert plain[32]["reason"] == "no position beyond 15"
    assert plain[32]["nll"] is None
    for policy in ("clamp", "fresh"):
        extended = {r["length"]: r for r in own if r["extend"] == policy}
        assert sorted(extended) == [32, 64]
        assert all(math.isfinite(r["nll"]) for r in extended.values())


def test_an_extension_is_that_of_the_encoding(runs, rows):
    run = next(open_run(r) for r in runs if "wpe" in r.name)
    model = load_model(run, run.config.steps)
    extended = extended_model(model, parse_part("clamp"), 32)
    table = np.asarray(model.encoding.parts[0].table[...])
    grown = np.asarray(extended.encoding.parts[0].table[...])
    np.testing.assert_array_equal(grown, np.concatenate([table, np.tile(table[-1:], (16, 1))]))
    assert model.encoding.max_position == TRAIN_LENGTH  # the model itself stays as it was
    with pytest.raises(EncodingError, match="unknown extension policy 'stretch'"):
        extended_model(model, parse_part("stretch"), 32)


def test_the_reference_is_the_lowest_loss_up_to_the_training_length(rows):
    for encoding in ("wpe", "alibi"):
        own = [
            r
            for r in rows
            if r["encoding"] == encoding and r["protocol"] == "nll_by_context" and r["defined"]
        ]
        within = [r["nll"] for r in own if r["length"] <= TRAIN_LENGTH]
        assert len(within) == 2
        for row in own:
            assert row["reference_nll"] == min(within)
            assert row["excess_nll"] == pytest.approx(row["nll"] - min(within))


def test_every_row_says_where_it_comes_from(rows, runs):
    config = open_run(runs[0]).config
    for row in rows:
        assert row["train_tokens"] == 30 * 8 * TRAIN_LENGTH
        assert row["train_length"] == TRAIN_LENGTH
        assert (row["seed"], row["dtype"], row["bos"]) == (0, "float32", "keep")
        assert row["data"]["tokenizer"] == "bytes"
        assert len(row["data"]["sha256"]) == 64
        assert row["versions"]["jax"] == jax.__version__
        assert row["device"].endswith("(cpu)")
        assert {"commit", "dirty", "config_hash"} <= row.keys()
        assert row["matmul_precision"] == "highest"  # in float32, unless told otherwise
        assert row["trained_with"]["versions"]["jax"] == jax.__version__
    assert rows[0]["model"] == config.preset


def test_a_model_is_scored_in_another_type_and_says_so(runs, tmp_path):
    low = evaluate(runs[:1], (8, 16), tmp_path, dtype="bfloat16")
    place = ("protocol", "length", "position_from")
    full = evaluate(runs[:1], (8, 16), tmp_path)
    wanted = {tuple(row[p] for p in place): row for row in full}
    for row in low:
        assert (row["dtype"], row["matmul_precision"]) == ("bfloat16", None)
        if row["nll"] is not None and row["protocol"] != "per_position":
            nll = wanted[tuple(row[p] for p in place)]["nll"]
            # Eight bits of each logit, averaged over many tokens.
            assert row["nll"] == pytest.approx(nll, rel=2e-3)
            assert row["nll"] != nll
    (again,) = {
        row["matmul_precision"]
        for row in evaluate(runs[:1], (8,), tmp_path, matmul_precision="default")
    }
    assert again == "default"


def test_scores_are_kept_by_document_window_and_token_and_not_run_again(
    runs, tmp_path, monkeypatch
):
    first = evaluate(runs, (8, 16), tmp_path)
    files = sorted(tmp_path.glob("*.npz"))
    assert len(files) == 4  # a run and a length each
    with np.load(files[0]) as kept:
        places = int(np.sum(kept["length"] - kept["first"]))
        assert kept["nll"].size == places
        # The windows of one protocol, found again in the file, give that protocol's row.
        counts = kept["length"] - kept["first"]
        parts = np.split(kept["nll"], np.cumsum(counts)[:-1])
        whole = np.concatenate([p for p, n in zip(parts, kept["first"], strict=True) if n == 1])
        means = [r["nll"] for r in first if r["protocol"] == "non_overlapping"]
        assert np.mean(whole, dtype=np.float64) in means
        assert kept["nll"].dtype == np.float32
        assert json.loads(str(kept["identity"]))[0]["length"] in (8, 16)

    # An interrupted evaluation: one length lost, one cut in the middle of a window.
    with np.load(files[1]) as kept:
        part = kept["nll"].tobytes()[: 4 * 37 + 2]
    files[1].unlink()
    files[1].with_suffix(".f32").write_bytes(part)
    scored = []
    score = Scorer.score
    monkeypatch.setattr(
        Scorer, "score", lambda self, windows: scored.append(len(windows)) or score(self, windows)
    )
    again = evaluate(runs, (8, 16), tmp_path)
    assert [r["nll"] for r in again] == [r["nll"] for r in first]
    assert scored  # and only what was missing: fewer windows than one length of one run has
    total = len(np.load(files[1])["start"])
    assert 0 < sum(scored) < total
    scored.clear()
    evaluate(runs, (8, 16), tmp_path)
    assert not scored
    # A damaged file is scored again, and so is everything when the code has changed.
    files[2].write_bytes(files[2].read_bytes()[:100])
    assert [r["nll"] for r in evaluate(runs, (8, 16), tmp_path)] == [r["nll"] for r in first]
    assert scored
    scored.clear()
    monkeypatch.setattr(evaluation, "source_hash", lambda files: "other code")
    evaluate(runs[:1], (8,), tmp_path)
    assert scored


def test_one_compilation_a_length(runs, tmp_path):
    run = next(open_run(r) for r in runs if "alibi" in r.name)
    scorer = Scorer(load_model(run, run.config.steps), 16, batch_tokens=64)
    for size in (16, 9, 2):
        scorer.score([np.arange(size)] * 3)
    assert scorer.nll._cache_size() == 1
    with pytest.raises(PositionOutOfRange):
        Scorer(load_model(open_run(next(r for r in runs if "wpe" in r.name)), 30), 17)


def test_few_documents_are_noted_and_very_few_warned_of(runs, tmp_path, capsys):
    rows = evaluate(runs[:1], (8,), tmp_path)
    assert "warning" not in capsys.readouterr().err
    rows += evaluate(runs[1:], (600,), tmp_path)
    assert all(row["notes"] == ["few documents"] for row in rows if row["defined"])
    assert "warning: only" in capsys.readouterr().err


def test_what_cannot_be_scored_is_refused(runs, tmp_path, text):
    wpe = next(r for r in runs if "wpe" in r.name)
    with pytest.raises(UserError, match=r"nothing can be scored .* no position beyond 15"):
        evaluate([wpe], (32, 64), tmp_path)
    with pytest.raises(UserError, match=r"no test document .* length 100000: the longest"):
        evaluate(runs, (100_000,), tmp_path)
    with pytest.raises(UserError, match="is no run"):
        evaluate([text], (8,), tmp_path)
    with pytest.raises(UserError, match="no run to score"):
        evaluate([], (8,), tmp_path)
    with pytest.raises(UserError, match="--targets is 3: give 1 to 2"):
        evaluate(runs, (8,), tmp_path, targets=3)
    with pytest.raises(UserError, match="length 2 leaves no context before 2 targets"):
        evaluate(runs, (2, 8), tmp_path)
    with pytest.raises(UserError, match="no checkpoint of step 7; it has: 30"):
        evaluate(runs, (8,), tmp_path, checkpoint=7)
    with pytest.raises(EncodingError, match="unknown extension policy 'stretch'"):
        evaluate([wpe], (32,), tmp_path, extend=("stretch",))
    with pytest.raises(UserError, match="no length"):
        check_ladder([], 2, 16)


def test_data_that_changed_since_training_is_noticed(runs, text, tmp_path):
    extra = text / "999.txt"
    extra.write_text("one more document")
    try:
        with pytest.raises(UserError, match="trained on other data: sha256"):
            evaluate(runs[:1], (8,), tmp_path)
    finally:
        extra.unlink()


def test_an_unfinished_run_is_refused(runs, tmp_path):
    import shutil

    copy = Path(shutil.copytree(runs[0], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["config"]["steps"] = 60
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"unfinished \(step 30 of 60 steps\)"):
        evaluate([copy], (8,), tmp_path / "scores")


def test_somebody_elses_plugin_runs_only_where_it_is_allowed(runs, tmp_path, monkeypatch):
    import shutil

    (tmp_path / "their_code.py").write_text(
        "import posenc\nclass Theirs(posenc.PositionalEncoding):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    alibi = next(r for r in runs if "alibi" in r.name)
    copy = Path(shutil.copytree(alibi, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["config"]["encoding"] = "their_code:Theirs"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(EncodingError, match="--allow-plugins"):
        evaluate([copy], (8,), tmp_path / "scores")
    rows = evaluate([copy], (8,), tmp_path / "scores", allow_plugins=True)
    assert math.isfinite(rows[0]["nll"])


def test_a_run_is_loaded_by_its_folder(runs):
    import posenc

    model = posenc.load(runs[0])
    tokens, positions = np.arange(8)[None], np.arange(8)[None]
    expected = load_model(open_run(runs[0]), 30)(tokens, positions)
    np.testing.assert_array_equal(model(tokens, positions), expected)
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        posenc.load(runs[0], 7)


def test_a_policy_that_nobody_has_is_refused_even_where_none_is_needed(runs, tmp_path, capsys):
    alibi = next(r for r in runs if "alibi" in r.name)
    with pytest.raises(EncodingError, match="unknown extension policy 'clmp': did you mean clamp"):
        evaluate([alibi], (8,), tmp_path, extend=("clmp",))
    evaluate([alibi], (8,), tmp_path, extend=("clamp",))
    assert "--extend changes nothing" in capsys.readouterr().out


def test_a_report_that_replaces_another_says_so(runs, tmp_path, capsys):
    from eval.__main__ import main

    for chosen in (runs, runs[1:]):
        main(["score", *map(str, chosen), "--lengths", "8", "--report", str(tmp_path)])
    assert f"replaces one that had {runs[0].name} as well" in capsys.readouterr().out
    # A damaged report is no reason to lose a new one.
    (tmp_path / "rows.jsonl").write_text("{")
    main(["score", str(runs[0]), "--lengths", "8", "--report", str(tmp_path)])
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["run"] == runs[0].name


def test_the_default_checkpoint_is_the_last_and_not_the_best(runs, tmp_path):
    rows = evaluate(runs[:1], (8,), tmp_path)
    assert {(r["checkpoint"], r["checkpoint_step"]) for r in rows} == {("last", 30)}
    assert dataclasses.is_dataclass(texts.TestText)
    assert datasets.tokenizer("bytes").bos == 256


def test_a_rescaled_rotation_is_scored_at_every_length_and_refused_where_nothing_turns(
    runs, text, tmp_path
):
    (rope,) = train_some(text, tmp_path / "runs", "rope")
    alibi = next(r for r in runs if "alibi" in r.name)
    rows = evaluate([rope], (8, 32), tmp_path, extend=("yarn(factor=4.0)",))
    by = {(r["extend"], r["length"]): r["nll"] for r in rows if r["protocol"] == NllByContext.name}
    assert set(by) == {(e, n) for e in (None, "yarn(factor=4)") for n in (8, 16, 32)}
    # What it scores is the model that a spec with this scaling makes of the same weights.
    model = load_model(open_run(rope))
    scaled = extended_model(model, parse_part("yarn(factor=4)"), 32)
    tokens, positions = np.arange(12)[None], np.arange(12)[None]
    named = Transformer(
        model.config, f"rope(scaling=yarn(factor=4, original={model.context_length}))", 99
    )
    merge, _ = split(named)
    np.testing.assert_array_equal(
        merge(split(model)[1])(tokens, positions), scaled(tokens, positions)
    )
    assert np.abs(scaled(tokens, positions) - model(tokens, positions)).max() > 1e-3
    with pytest.raises(EncodingError, match="yarn needs a rotation to act on, and alibi has none"):
        evaluate([alibi], (8,), tmp_path, extend=("yarn(factor=4)",))
    with pytest.raises(EncodingError, match=r"yarn has no option 'fctor': did you mean factor"):
        evaluate([rope], (8,), tmp_path, extend=("yarn(fctor=4)",))
    with pytest.raises(EncodingError, match=r"yarn\(factor=0.5\): it must be at least 1"):
        evaluate([rope], (8,), tmp_path, extend=("yarn(factor=0.5)",))
