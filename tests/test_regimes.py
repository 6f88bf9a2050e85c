"""How windows are cut into pieces and how documents share them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from eval.evaluate import evaluate
from posenc import data as datasets
from posenc.data import Batches, TokenStream, Windows, attended_distances, make_regime
from posenc.data.regimes import cut
from posenc.data.windows import Rows, Unmasked
from posenc.encodings import EncodingError
from posenc.errors import UserError


def stream(sizes):
    """Documents of given sizes, every token with a number of its own."""
    made = TokenStream.__new__(TokenStream)
    made.tokens = np.arange(sum(sizes), dtype=np.int32)
    made.offsets = np.cumsum([0, *sizes])
    made.regions = np.array([[0, sum(sizes)]])
    return made


@pytest.mark.fast
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.integers(1, 5), min_size=12, max_size=12),
)
@settings(max_examples=100, deadline=None)
def test_a_cut_separates_pieces_and_segments_and_nothing_else(changes, sizes):
    segments = np.cumsum(changes).astype(np.int32)
    got = cut(segments, np.array(sizes))
    piece = [n for n, size in enumerate(sizes) for _ in range(size)][: len(segments)]
    for i in range(len(segments)):
        for j in range(i, len(segments)):
            together = segments[i] == segments[j] != 0 and piece[i] == piece[j]
            assert (got[i] == got[j] != 0) == together
        assert (got[i] == 0) == (segments[i] == 0)


@pytest.mark.fast
def test_sizes_are_drawn_as_is_said():
    rng = np.random.default_rng(0)
    uniform = make_regime("uniform(least=3)", 10)
    sizes = np.concatenate([uniform.pieces(10, 0.0, rng) for _ in range(4000)])
    counts = np.bincount(sizes, minlength=11)[3:]
    assert counts.sum() == len(sizes)
    np.testing.assert_allclose(counts / len(sizes), 1 / 8, atol=0.01)
    log = make_regime("log_uniform", 64)
    sizes = np.concatenate([log.pieces(64, 0.0, rng) for _ in range(200)])
    # From n to 2n as many as from 2n to 4n.
    shares = [np.mean((sizes >= n) & (sizes < 2 * n)) for n in (2, 4, 8, 16)]
    np.testing.assert_allclose(shares, np.log(2) / np.log(65), atol=0.02)
    ramp = make_regime("ramp(first=4)", 64)
    assert [int(ramp.pieces(64, share, rng)[0]) for share in (0.0, 0.25, 0.5, 1.0)] == [
        4,
        8,
        16,
        64,
    ]
    mixture = make_regime("mixture(lengths=[8, 32], shares=[3, 1])", 32)
    first = [int(mixture.pieces(32, 0.0, rng)[0]) for _ in range(4000)]
    assert np.mean(np.equal(first, 8)) == pytest.approx(0.75, abs=0.02)
    for regime in (uniform, log, ramp, mixture):
        for length in (10, 32, 64):
            assert regime.pieces(length, 0.3, rng).sum() >= length


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("uniforme", "unknown lengths 'uniforme': did you mean uniform"),
        ("uniform(least=0)", r"uniform\(least=0\): it must be at least 1"),
        ("uniform(least=64)", "it must be below the training length 64"),
        ("ramp(first=65)", "it must be at most the training length 64"),
        ("mixture(lengths=[8], shares=[1])", "the longest must be the training length, 64"),
        ("mixture(lengths=[64, 8], shares=[1])", "give as many shares above 0"),
        ("mixture(lengths=[64], shares=[0])", "give as many shares above 0"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(text, message):
    with pytest.raises(EncodingError, match=message):
        make_regime(text, 64)


@pytest.mark.fast
def test_a_mixture_is_written_as_a_training_length():
    assert datasets.read_train_length(64) == (64, "fixed")
    assert datasets.read_train_length("128") == (128, "fixed")
    length, regime = datasets.read_train_length("64:0.5,256:1.5")
    assert length == 256
    np.testing.assert_allclose(make_regime(regime, 256).shares, [0.25, 0.75])
    for wrong in ("64:", "long", "64:1,x:2", "64,128"):
        with pytest.raises(EncodingError, match=f"--train-length {wrong}: give tokens"):
            datasets.read_train_length(wrong)


@pytest.mark.fast
@pytest.mark.parametrize("text", ["uniform(least=2)", "log_uniform", "ramp(first=3)"])
def test_pieces_take_nothing_from_the_tokens_and_are_a_function_of_seed_and_step(text):
    windows = Windows(stream([30, 5, 100, 65]), 16)
    plain = Batches(windows, 4, seed=3)
    regime = make_regime(text, 16)
    whole = Batches(windows, 4, seed=3, regime=regime, steps=20)
    halves = [Batches(windows, 4, 3, p, 2, regime=regime, steps=20) for p in range(2)]
    for step in (0, 7, 19):
        batch = whole[step]
        for name in ("inputs", "targets", "mask"):
            np.testing.assert_array_equal(batch[name], plain[step][name])
        apart = [half[step] for half in halves]
        for name in batch:
            np.testing.assert_array_equal(batch[name], np.concatenate([b[name] for b in apart]))
        begins = np.diff(batch["segments"], axis=1, prepend=0) != 0
        np.testing.assert_array_equal(batch["positions"][begins], 0)
        assert (np.diff(batch["positions"], axis=1)[~begins[:, 1:]] == 1).all()
    pieces = [whole[step]["segments"].max() for step in (0, 19)]
    assert pieces[0] > 1
    if text.startswith("ramp"):
        np.testing.assert_array_equal(whole[19]["segments"], plain[19]["segments"])


@pytest.mark.fast
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda s: max(s) > 1))
@settings(max_examples=60, deadline=None)
def test_without_packing_every_token_is_a_target_once_and_sees_its_document_alone(sizes):
    made, length = stream(sizes), 4
    rows = Rows(made, length)
    batch = datasets.make_batch(rows[n] for n in range(len(rows)))
    targets = batch["targets"][batch["mask"]].tolist()
    firsts = {int(low) for low, size in zip(made.offsets, sizes, strict=False) if size}
    assert targets == [token for token in range(sum(sizes)) if token not in firsts]
    document = np.searchsorted(made.offsets, np.arange(sum(sizes)), side="right")
    for inputs, segments in zip(batch["inputs"], batch["segments"], strict=True):
        assert len({int(document[token]) for token in inputs[segments != 0]}) == 1
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.fast
def test_unmasked_windows_are_one_sequence():
    windows, plain = Unmasked(stream([3, 4, 30]), 8), Windows(stream([3, 4, 30]), 8)
    batch = datasets.make_batch(windows[n] for n in range(len(windows)))
    np.testing.assert_array_equal(batch["inputs"][0], plain[0]["tokens"][:-1])
    np.testing.assert_array_equal(batch["positions"], np.tile(np.arange(8), (len(windows), 1)))
    assert (batch["segments"] == 1).all()
    assert batch["mask"].all()
    with pytest.raises(UserError, match="no document of the split has 2 tokens"):
        Rows(stream([1, 1]), 8)


@pytest.mark.fast
def test_distances_are_counted_as_a_naive_loop_counts_them():
    rng = np.random.default_rng(1)
    positions = rng.integers(0, 40, (3, 24))
    segments = np.sort(rng.integers(0, 4, (3, 24)), axis=1)
    pairs = [
        max(int(positions[b, i] - positions[b, j]), 0)
        for b in range(3)
        for i in range(24)
        for j in range(i + 1)
        if segments[b, i] == segments[b, j] != 0
    ]
    found = attended_distances([{"positions": positions, "segments": segments}], 24)
    assert [bin_["from"] for bin_ in found] == [0, 1, 2, 4, 8, 16, 32]
    for bin_ in found:
        inside = [bin_["from"] <= pair <= bin_["to"] for pair in pairs]
        assert bin_["share"] == pytest.approx(np.mean(inside))


def test_a_run_trains_in_pieces_and_says_what_it_saw(tmp_path, common):
    options = {**common, "encoding": ("alibi",), "train_length": "4:0.5,16:0.5"}
    (folder,) = train.main(train.Arguments(out=tmp_path, packing="unmasked", **options))
    regime = "mixture(lengths=[4, 16], shares=[0.5, 0.5])"
    assert folder.name == "alibi-T16-mixture-lengths-4-16-shares-0.5-0.5-packing-unmasked-seed0"
    seen = json.loads((folder / "distances.json").read_text())
    # Of two sorts of pieces, as many tokens each: by their pairs.
    short = [4 * (4 - d) for d in range(4)]
    long = [16 - d for d in range(16)]
    counts = [long[d] + (short[d] if d < 4 else 0) for d in range(16)]
    wanted = [
        sum(counts[low : high + 1]) / sum(counts)
        for low, high in ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15))
    ]
    np.testing.assert_allclose([bin_["share"] for bin_ in seen], wanted, atol=0.06)
    (row, *_) = evaluate([folder], (8, 16), tmp_path / "scores")
    assert (row["lengths"], row["packing"], row["train_length"]) == (regime, "unmasked", 16)
    with pytest.raises(UserError, match="say two things: give one of them"):
        train.main(train.Arguments(out=tmp_path, lengths="uniform", **options))
