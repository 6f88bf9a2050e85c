"""Controls, sliding windows and slices against naive loops over blocks and tokens."""

import hashlib
import itertools
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval import evaluate as evaluation
from eval.__main__ import main
from eval.controls import CONTROLS
from eval.evaluate import evaluate
from eval.mechanism import read_out, some_windows
from eval.protocols import Settings, Sliding
from eval.report.rows import read_rows
from eval.slices import Slices, edges_of, last_occurrences, read_mask
from eval.texts import load_text
from posenc.encodings import PositionOutOfRange
from posenc.errors import UserError
from posenc.runs import load_model, open_run
from train import Arguments
from train import main as train_main

L, K = 16, 2
LADDER = (8, 16, 32, 64)
LONGEST = max(LADDER)
BLOCKS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs of an absolute and of a relative encoding, on documents of 20 to 900 bytes."""
    text, out = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "wave", "phase", "slope"]
    for index in range(120):
        size = int(rng.integers(3, 120))
        (text / f"{index}.txt").write_text(" ".join(rng.choice(words, size)))
    return train_main(
        Arguments(
            encoding=("wpe", "rope"),
            model="nano",
            data=str(text / "*.txt"),
            train_length=L,
            batch_size=8,
            steps=20,
            warmup_steps=5,
            learning_rate=1e-2,
            eval_every=20,
            eval_tokens=256,
            checkpoint_every=20,
            out=out,
        )
    )


@pytest.fixture(scope="module")
def rows(folders, tmp_path_factory):
    return evaluate(
        folders,
        LADDER,
        tmp_path_factory.mktemp("scores"),
        controls=tuple(CONTROLS),
        extend=("clamp",),
        blocks=BLOCKS,
        ngram=4,
    )


@pytest.fixture(scope="module")
def models(folders):
    """By encoding: the documents, and the loss of a window's last tokens at given positions."""
    found = {}
    for folder in folders:
        run = open_run(folder)
        model = load_model(run)

        @jax.jit
        def forward(tokens, positions, model=model):
            return model(tokens, positions)

        def nll(tokens, positions, last=K, forward=forward):
            tokens, positions = np.asarray(tokens, np.int32), np.asarray(positions, np.int32)
            logits = np.asarray(forward(tokens[None], positions[None]), np.float64)[0]
            total = 0.0
            for place in range(len(tokens) - last, len(tokens)):
                row = logits[place - 1]
                total += math.log(np.sum(np.exp(row - row.max()))) + row.max() - row[tokens[place]]
            return total

        found[run.config.encoding] = load_text(run).documents, nll
    return found


def blocks_of(documents, longest=LONGEST):
    """Where the targets of the primary protocol begin: (document, place), in order."""
    for index, document in enumerate(documents):
        room = len(document) - longest
        if room >= 0:
            count = min(BLOCKS, 1 + room // L)
            for block in range(count):
                apart = block * room // (count - 1) if count > 1 else room // 2
                yield index, longest - K + apart


def window_of(control, documents, index, document, place, length):
    """What a control feeds a model, and at which positions, said in its own words."""
    tokens = documents[document]

    def last(count):
        return tokens[place + K - count : place + K].tolist()

    if control == "foreign_prefix":
        long = [n for n, d in enumerate(documents) if len(d) >= LONGEST - L and n != document]
        other = documents[long[index % len(long)]][: LONGEST - L].tolist()
        return other[len(other) - (length - L) :] + last(L), range(length)
    if control == "index_probe":
        return last(L), range(length - L, length)
    if control == "distance_probe":
        return last(L), [*range(L // 2), *range(length - L // 2, length)]
    if control == "keys_probe":
        far = length - L // 2
        squeezed = [math.floor(n / far * (L // 2) + 1e-9) for n in range(far)]
        return last(length), squeezed + list(range(L // 2, L))
    return last(length), range(L - length, L)  # aligned


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("encoding", ["wpe", "rope"])
def test_a_control_equals_a_naive_loop(rows, models, encoding, control):
    documents, nll = models[encoding]
    compared = 0
    for length in LADDER:
        beyond = length < L if control == "aligned" else length > L
        own = [
            row
            for row in rows
            if (row["encoding"], row["protocol"], row["length"]) == (encoding, control, length)
            and row["extend"] is None
        ]
        if not beyond or (control == "aligned" and encoding == "rope"):
            assert own == []  # of rope, tokens are aligned as they stand
            continue
        (row,) = own
        sums, counts = {}, {}
        for index, (document, place) in enumerate(blocks_of(documents)):
            window = window_of(control, documents, index, document, place, length)
            if encoding == "wpe" and max(window[1]) >= L:
                continue
            sums[document] = sums.get(document, 0.0) + nll(*window)
            counts[document] = counts.get(document, 0) + K
        if not sums:
            assert not row["defined"]
            assert row["reason"] == f"no position beyond {L - 1}"
            continue
        compared += 1
        assert row["document_index"] == list(sums)
        assert row["document_tokens"] == list(counts.values())
        np.testing.assert_allclose(row["document_nll"], list(sums.values()), atol=2e-5)
        assert row["nll"] == pytest.approx(sum(sums.values()) / sum(counts.values()), abs=1e-5)
        assert row["context"] == length - K
        primary = [
            r["nll"]
            for r in rows
            if (r["encoding"], r["protocol"]) == (encoding, "nll_by_context")
            and r["length"] <= L
            and r["extend"] is None
        ]
        assert row["reference_nll"] == min(primary)
    # All but those that need positions which a table lacks.
    table = encoding == "wpe" and control not in ("keys_probe", "aligned")
    none = table or (encoding, control) == ("rope", "aligned")
    assert compared == (0 if none else 1 if control == "aligned" else 2)


def test_the_curve_by_position_is_of_the_longest_window_without_controls(rows):
    """A probe at table positions goes on where the model itself has ended."""
    for encoding, longest in (("wpe", L), ("rope", max(LADDER))):
        own = [
            row["length"]
            for row in rows
            if (row["encoding"], row["protocol"]) == (encoding, "per_position")
            and row["extend"] is None
        ]
        assert set(own) == {longest}


def test_a_policy_is_scored_with_every_control(rows):
    """Clamp, for wpe: the foreign prefix, and what it does to positions beyond the table."""
    found = {
        (row["protocol"], row["length"]): row
        for row in rows
        if row["extend"] == "clamp" and row["encoding"] == "wpe"
    }
    for control, length in itertools.product(set(CONTROLS) - {"aligned"}, (32, 64)):
        assert found[control, length]["defined"]
    # All positions of the index probe at 64 are one.
    documents = found["index_probe", 64]["document_index"]
    assert documents == found["nll_by_context", 64]["document_index"]


def test_sums_by_document_are_those_of_the_row(rows):
    kept = [row for row in rows if row.get("document_nll") is not None]
    assert {row["protocol"] for row in kept} == {"nll_by_context", *CONTROLS}
    for row in kept:
        assert sum(row["document_tokens"]) == row["tokens"]
        assert sum(row["document_nll"]) / row["tokens"] == pytest.approx(row["nll"], rel=1e-6)


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    length=st.integers(4, 12),
    more=st.integers(0, 8),
    stride=st.integers(1, 3),
    bos=st.sampled_from(["keep", "prepend", "none"]),
    with_bos=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_sliding_windows_score_every_token_once_with_as_much_context(
    sizes, length, more, stride, bos, with_bos
):
    documents = [np.arange(100 * n, 100 * n + size) for n, size in enumerate(sizes)]
    chosen = Settings((length, length + more), 1, 8, 5, 30, bos, 8, stride)
    plan = Sliding().plan(sizes, length, chosen, with_bos)
    scored = []
    for window in plan:
        tokens = window.tokens(documents, -1)
        assert len(tokens) == length
        scored += tokens[window.first :].tolist()
        # What is not in a document's first window has all but the stride before it.
        begins = tokens[0] == -1 and tokens[1] % 100 == 0
        assert begins or tokens[0] % 100 == 0 or length - window.first <= stride
        assert np.all(np.diff(tokens[window.bos :]) == 1)
        kept = (
            bos == "keep" and with_bos and tokens[int(window.bos)] % 100 == 0 and window.first == 1
        )
        assert window.bos == (bos == "prepend" or kept)
    first = 0 if bos == "prepend" or (bos == "keep" and with_bos) else 1
    wanted = [d[first : min(len(d), 30)] for d in documents if min(len(d), 30) >= length + more]
    assert scored == [int(token) for some in wanted for token in some]


def test_sliding_rows_equal_a_naive_loop(folders, models, tmp_path):
    rope = next(folder for folder in folders if "rope" in folder.name)
    rows = evaluate([rope], (16, 32), tmp_path, stride=5, tokens_per_document=80)
    documents, nll = models["rope"]
    text = load_text(open_run(rope))
    for length in (16, 32):
        total, count = 0.0, 0
        for document in documents:
            places = [text.bos, *document[:80].tolist()]  # as in training
            if len(places) <= 32:
                continue
            ends = [length, *range(length + 5, len(places), 5), len(places)]
            for before, end in itertools.pairwise([1, *dict.fromkeys(ends)]):
                total += nll(places[end - length : end], range(length), end - before)
                count += end - before
        (row,) = (r for r in rows if (r["protocol"], r["length"]) == ("sliding", length))
        assert (row["stride"], row["tokens"]) == (5, count)
        assert row["nll"] == pytest.approx(total / count, abs=1e-5)
    with pytest.raises(UserError, match="--stride is 16: give 1 to 15, less than the shortest"):
        evaluate([rope], (16, 32), tmp_path, stride=16)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_last_occurrences_equal_a_naive_search(tokens, n):
    wanted = []
    for end in range(len(tokens)):
        own = tokens[end - n + 1 : end + 1] if end + 1 >= n else None
        earlier = (p for p in range(end - 1, n - 2, -1) if tokens[p - n + 1 : p + 1] == own)
        place = next(earlier, None) if own is not None else None
        wanted.append(0 if place is None else end - place)
    assert last_occurrences(np.array(tokens, np.int64), n).tolist() == wanted


def test_slices_are_parts_of_the_primary_number(rows, models):
    edges = [1, 8, 16, 32, 64]
    assert edges_of(L, LONGEST) == edges
    documents, _ = models["rope"]
    wanted = {}
    for document, place in blocks_of(documents):
        apart = last_occurrences(documents[document], 4)
        for token in (place, place + 1):
            far = apart[token]
            bucket = None if far == 0 else max(edge for edge in edges if edge <= far)
            wanted.setdefault(bucket, []).append((document, token))
    for length in LADDER:
        own = {
            row["distance_from"] if row["slice"] == "repeated" else None: row
            for row in rows
            if (row["encoding"], row["protocol"], row["length"]) == ("rope", "slice", length)
        }
        assert {bucket: row["tokens"] for bucket, row in own.items()} == {
            bucket: len(tokens) for bucket, tokens in wanted.items()
        }
        (whole,) = (
            row
            for row in rows
            if (row["encoding"], row["protocol"], row["length"])
            == ("rope", "nll_by_context", length)
        )
        total = sum(row["nll"] * row["tokens"] for row in own.values())
        assert total / whole["tokens"] == pytest.approx(whole["nll"], rel=1e-6)
    assert len(own) > 3


def test_a_mask_divides_the_targets(folders, models, tmp_path):
    rope = next(folder for folder in folders if "rope" in folder.name)
    documents, _ = models["rope"]
    sizes = [len(document) for document in documents]
    mask = np.random.default_rng(0).random(sum(sizes)) < 0.3
    np.save(tmp_path / "mask.npy", mask)
    rows = evaluate([rope], (8, 64), tmp_path, blocks=BLOCKS, mask=tmp_path / "mask.npy")
    starts = np.cumsum([0, *sizes])
    inside = sum(
        int(mask[starts[document] + place : starts[document] + place + K].sum())
        for document, place in blocks_of(documents)
    )
    own = {row["slice"]: row for row in rows if (row["protocol"], row["length"]) == ("slice", 64)}
    whole = next(r for r in rows if (r["protocol"], r["length"]) == ("nll_by_context", 64))
    assert own["mask"]["tokens"] == inside
    # Of the array, not of the file, whose header may differ.
    wanted = hashlib.sha256(mask.tobytes()).hexdigest()
    assert {row["mask_sha256"] for row in own.values()} == {wanted}
    assert own["outside the mask"]["tokens"] == whole["tokens"] - inside
    for name, value in (("short", mask[:-1]), ("numbers", mask.astype(int))):
        np.save(tmp_path / f"{name}.npy", value)
    with pytest.raises(
        UserError,
        match=rf"shape \({len(mask) - 1},\), and the test split {len(mask)} tokens in {len(sizes)} "
        "documents: give one value for each of them, in order",
    ):
        Slices(documents, 0, read_mask(tmp_path / "short.npy"))
    with pytest.raises(UserError, match="is of int64: give booleans"):
        read_mask(tmp_path / "numbers.npy")
    with pytest.raises(UserError, match="cannot read the mask"):
        read_mask(tmp_path / "none.npy")


def test_controls_and_slices_that_are_not_there_are_refused(folders, tmp_path):
    with pytest.raises(UserError, match="--controls has no 'foreign': did you mean foreign_prefix"):
        evaluate(folders, LADDER, tmp_path, controls=("foreign",))
    with pytest.raises(UserError, match="--ngram is -1"):
        evaluate(folders, LADDER, tmp_path, ngram=-1)


def test_an_evaluation_killed_in_the_middle_goes_on_and_gives_the_same_rows(
    folders, rows, tmp_path
):
    scored = [
        *(f"--lengths {' '.join(map(str, LADDER))} --controls {' '.join(CONTROLS)}".split()),
        *(f"--extend clamp --blocks {BLOCKS} --ngram 4 --report {tmp_path}".split()),
    ]
    command = ["score", *map(str, folders), *scored]
    killed = subprocess.Popen(
        [sys.executable, "-m", "eval", *command],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def kept():
        return {path: path.stat().st_mtime_ns for path in (tmp_path / "scores").glob("[!.]*.npz")}

    while len(kept()) < 3:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.002)
    killed.kill()
    killed.communicate()
    before = kept()
    assert not (tmp_path / "rows.jsonl").exists()
    main(command)
    # Nothing that was finished is scored again, and much was left to do.
    after = kept()
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before) + 5
    assert read_rows(tmp_path) == json.loads(json.dumps(rows))


def test_read_outs_are_written_beside_the_rows_and_kept(folders, tmp_path, monkeypatch):
    wpe = next(folder for folder in folders if "wpe" in folder.name)
    # A control that is defined beyond the table makes nothing else so.
    rows = evaluate(
        [wpe], (8, 32), tmp_path / "scores", probe=2, blocks=BLOCKS, controls=("keys_probe",)
    )
    assert {row["length"] for row in rows if row["protocol"] == "per_position"} == {16}
    assert {row["length"] for row in rows if row["protocol"] == "keys_probe"} == {32}
    run = open_run(wpe)
    with np.load(tmp_path / "mechanism" / f"{wpe.name}.npz") as kept:
        arrays = dict(kept)
    # Beyond the table nothing is defined, and nothing is read out.
    assert {name for name in arrays if name.startswith("mass_")} == {"mass_8", "mass_16"}
    text = load_text(run)
    chosen = Settings((8, 16, 32), K, L, BLOCKS, 100, "keep")
    windows = some_windows(text.documents, text.bos, 16, chosen, 2)
    starts = [
        document[place + K - 16 : place + K]
        for document, place in (
            (text.documents[index], place) for index, place in blocks_of(text.documents, 32)
        )
    ]
    np.testing.assert_array_equal(windows, [starts[0], starts[-1]])
    wanted = read_out(load_model(run), windows, K)
    for field in ("mass", "entropy", "scale"):
        np.testing.assert_allclose(arrays[f"{field}_16"], getattr(wanted, field), atol=1e-6)
    table = np.asarray(load_model(run).encoding.parts[0].table[...], np.float64)
    ((steps, values),) = (arrays[n].T for n in arrays if n.startswith("learned_") and "rms" in n)
    assert steps[-1] == 20
    assert values[-1] == pytest.approx(np.sqrt(np.mean(table**2)), rel=1e-5)
    with pytest.raises(PositionOutOfRange):
        read_out(load_model(run), np.zeros((1, 17), np.int32), K)
    # The same command again reads nothing; what is damaged is read again, and nothing else is.
    kept = sorted((tmp_path / "scores").glob("read-out-*.npz"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    read, path = [], tmp_path / "mechanism" / f"{wpe.name}.npz"

    def reading(model, windows, *others):
        read.append(windows.shape)
        return read_out(model, windows, *others)

    monkeypatch.setattr(evaluation, "read_out", reading)
    for expected, probe in ((1, 2), (1, 2), (3, 1)):  # then another number of windows
        path.unlink()
        evaluate([wpe], (8, 32), tmp_path / "scores", probe=probe, blocks=BLOCKS)
        assert len(read) == expected
        with np.load(path) as again:
            same = [np.array_equal(again[name], arrays[name], equal_nan=True) for name in arrays]
            assert all(same) == (probe == 2)
