"""Samplers of positions: what they draw, of what it is a function, and how a model uses it."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.evaluate import evaluate
from eval.protocols import NonOverlapping
from eval.scoring import Scorer
from posenc import data as datasets
from posenc.data import Batches, TokenStream, Windows
from posenc.encodings import (
    Dimensions,
    EncodingError,
    build,
    make_sampler,
    sequential_positions,
)
from posenc.encodings.sampling import LAYER_POSITIONS, SAMPLERS, runs
from posenc.placing import Placer
from posenc.runs import load_model, open_run
from posenc.transformer import Transformer, TransformerConfig
from train import Arguments
from train import main as train_main

SEGMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1], [3, 3, 0, 0, 4, 4, 4, 4]])


def place(text, segments=SEGMENTS, rows=None, seed=(0, 7), layers=3, training=True):
    rows = range(len(segments)) if rows is None else rows
    return make_sampler(text).place(segments, rows, seed, layers, training=training)


def segments_of(positions, segments=SEGMENTS):
    return [
        positions[row, low:high]
        for row, owners in enumerate(segments)
        for low, high in runs(owners)
    ]


@pytest.mark.fast
def test_runs_are_the_segments_without_padding():
    assert [runs(row) for row in SEGMENTS] == [[(0, 3), (3, 7)], [(0, 8)], [(0, 2), (4, 8)]]
    assert runs(np.zeros(4, int)) == []


@pytest.mark.fast
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.sampled_from(["randomized(max_position=12)", "shape(max_shift=9)", "pose(max_position=30)"]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_positions_rise_within_a_segment_and_stay_below_their_limit(owners, text, seed):
    segments = np.array([owners])
    positions, streams = place(text, segments, seed=(seed,))
    assert not streams
    assert (positions[segments == 0] == 0).all()
    for drawn in segments_of(positions, segments):
        assert (np.diff(drawn) > 0).all()
        assert drawn.min() >= 0
        assert drawn.max() < make_sampler(text).extent(len(drawn), training=True)


@pytest.mark.fast
def test_randomized_draws_every_set_of_positions_equally_often():
    segments = np.array([[1, 1]] * 3000)
    drawn, _ = place("randomized(max_position=4)", segments)
    pairs, counts = np.unique(drawn, axis=0, return_counts=True)
    assert pairs.tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 500).max() < 5 * np.sqrt(3000 * (1 / 6) * (5 / 6))


@pytest.mark.fast
def test_shape_shifts_a_segment_as_a_whole_and_pose_all_but_its_first_chunk():
    shifted, _ = place("shape(max_shift=500)")
    for drawn in segments_of(shifted):
        np.testing.assert_array_equal(np.diff(drawn), 1)
    segments = np.ones((400, 6), int)
    shifts = place("shape(max_shift=3)", segments)[0][:, 0]
    assert set(shifts.tolist()) == {0, 1, 2}
    skipped, _ = place("pose(max_position=40, chunks=3)", segments)
    assert (skipped[:, 0] == 0).all()
    gaps = np.diff(skipped, axis=1) - 1
    assert gaps.min() == 0
    assert (gaps > 0).sum(axis=1).max() == 2
    assert skipped.max() == 39
    # One token cannot be cut, and two tokens make two chunks.
    np.testing.assert_array_equal(place("pose", np.array([[1]]))[0], [[0]])


@pytest.mark.fast
def test_a_draw_is_a_function_of_seed_step_and_row_alone():
    text = "randomized(max_position=99)"
    whole, _ = place(text)
    apart = [place(text, SEGMENTS[row : row + 1], rows=[row])[0] for row in range(3)]
    np.testing.assert_array_equal(np.concatenate(apart), whole)
    assert (place(text, seed=(0, 8))[0] != whole).any()
    alike, _ = place("randomized(max_position=99, per=batch)", np.ones((4, 6), int))
    np.testing.assert_array_equal(alike, np.broadcast_to(alike[:1], alike.shape))
    free, _ = place(text, np.ones((4, 6), int))
    assert len(np.unique(free, axis=0)) == 4


@pytest.mark.fast
def test_layers_share_a_draw_or_have_their_own():
    positions, streams = place("randomized(max_position=99, layers=each)")
    own = streams[LAYER_POSITIONS]
    assert own.shape == (3, 8, 3)
    np.testing.assert_array_equal(own[..., 0], positions)
    assert len({own[..., layer].tobytes() for layer in range(3)}) == 3
    assert not place("randomized(max_position=99)")[1]


@pytest.mark.fast
@pytest.mark.parametrize(
    "text", ["sequential", "shape", "pose", "randomized(evaluation=sequential)"]
)
def test_most_are_sequential_in_evaluation(text):
    positions, streams = place(text, training=False)
    np.testing.assert_array_equal(positions, sequential_positions(SEGMENTS))
    assert not streams


@pytest.mark.fast
def test_positions_and_streams_are_drawn_apart():
    """How far positions are shifted says nothing of how far numbers are moved."""
    tokens = np.tile(np.frombuffer(b"12+34=46", np.uint8).astype(np.int32), (500, 1))
    for per in ("batch", "example"):
        encodings = build(f"abacus(per={per})", 1, Dimensions(8, 2, 4, 8), jax.random.key(0))
        placer = Placer(encodings, make_sampler(f"shape(max_shift=100, per={per})"))
        steps = range(500 if per == "batch" else 1)
        some = tokens[: 1 if per == "batch" else 500]
        shifts, moves = [], []
        for step in steps:
            positions, streams = placer.place(
                some, np.ones_like(some), range(len(some)), (3, step), training=True
            )
            shifts += positions[:, 0].tolist()
            moves += (streams["digit_place"][:, 0] - 1).tolist()
        assert len(set(shifts)) > 90
        assert len(set(moves)) > 90
        # 500 pairs of numbers below 100: 5 agree by chance, and a correlation is within 0.2.
        assert np.equal(shifts, moves).sum() < 20
        assert abs(np.corrcoef(shifts, moves)[0, 1]) < 0.2


@pytest.mark.fast
def test_windows_of_an_evaluation_have_draws_of_their_own():
    text = "randomized(max_position=99, per=batch)"
    positions, _ = place(text, np.ones((4, 6), int), training=False)
    assert len(np.unique(positions, axis=0)) == 4


@pytest.mark.fast
def test_randomized_is_drawn_again_or_spread_evenly_in_evaluation():
    again = "randomized(max_position=99, layers=each)"
    np.testing.assert_array_equal(
        place(again, training=False)[1][LAYER_POSITIONS], place(again)[1][LAYER_POSITIONS]
    )
    even, streams = place(
        "randomized(max_position=9, evaluation=even, layers=each)", training=False
    )
    assert not streams
    np.testing.assert_array_equal(even[1], [0, 1, 2, 3, 5, 6, 7, 8])
    np.testing.assert_array_equal(even[0], [0, 4, 8, 0, 3, 5, 8, 0])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("randomised", "unknown way to give positions 'randomised': did you mean randomized"),
        ("randomized(max=3)", "randomized has no option 'max'"),
        ("randomized(per=token)", "randomized has no per 'token': example, batch"),
        ("shape(max_shift=0)", r"shape\(max_shift=0\): it must be at least 1"),
        ("pose(chunks=1)", r"pose\(chunks=1\): it must be at least 2"),
        ("randomized(max_position=5)", "8 tokens do not find 8 positions below 5"),
        ("pose(max_position=7)", "8 tokens do not find 8 positions below 7"),
    ],
)
def test_bad_samplers_are_refused_in_one_line(text, message):
    with pytest.raises(EncodingError, match=message):
        place(text)


@pytest.mark.fast
def test_batches_are_the_same_however_many_processes_read_them():
    tokens = TokenStream([], datasets.tokenizer("bytes"))
    tokens.tokens, tokens.offsets = np.arange(200, dtype=np.uint16), np.array([0, 90, 200])
    tokens.regions = np.array([[0, 200]])
    windows = Windows(tokens, 8)
    encodings = build("abacus(per=example)", 2, Dimensions(8, 2, 4, 8), jax.random.key(0))
    placer = Placer(encodings, make_sampler("randomized(max_position=50, layers=each)"))
    whole = Batches(windows, 4, 0, placer=placer)[3]
    parts = [Batches(windows, 4, 0, p, 2, placer=placer)[3] for p in range(2)]
    joined = jax.tree.map(lambda *some: np.concatenate(some), *parts)
    jax.tree.map(np.testing.assert_array_equal, joined, whole)
    assert whole["streams"][LAYER_POSITIONS].shape == (4, 8, 2)
    plain = Batches(windows, 4, 0)[3]
    np.testing.assert_array_equal(plain["inputs"], whole["inputs"])


def test_a_layer_stands_where_its_own_positions_say():
    """Half of every position is, to RoPE, half of every frequency."""
    config = TransformerConfig(vocab_size=31, layers=2, width=32, heads=2, init_std=0.2)
    plain = Transformer(config, "rope", 24, seed=3)
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (2, 24), 0, 31))
    positions = np.arange(24, dtype=np.float32)[None]
    own = np.stack([positions, positions / 2], axis=-1)
    halved = Transformer(config, "rope,rope(scaling=linear(factor=2))", 24, seed=3)
    wanted = halved(tokens, positions)
    got = plain(tokens, positions, streams={LAYER_POSITIONS: own})
    np.testing.assert_array_equal(got, wanted)
    assert np.abs(wanted - plain(tokens, positions)).max() > 0.01
    # On the cache too, in two chunks.
    cache = plain.start_cache(2, 24, positions=jnp.float32, streams={LAYER_POSITIONS: jnp.float32})
    made = []
    for low, high in ((0, 10), (10, 24)):
        part = np.broadcast_to(positions[:, low:high], (2, high - low))
        streams = {LAYER_POSITIONS: np.broadcast_to(own[:, low:high], (2, high - low, 2))}
        logits, cache = plain(tokens[:, low:high], part, streams=streams, cache=cache)
        made.append(logits)
    np.testing.assert_allclose(np.concatenate(made, axis=1), wanted, atol=2e-5)
    # And a layer's position that has no representation is refused.
    with pytest.raises(EncodingError, match="position 24 has no representation in wpe"):
        Transformer(config, "wpe", 24)(
            tokens, positions.astype(int), streams={LAYER_POSITIONS: np.full((1, 24, 2), 24)}
        )


def test_a_run_trains_and_is_scored_with_its_positions(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    rng = np.random.default_rng(0)
    for index in range(160):
        (text / f"{index}.txt").write_text(" ".join(rng.choice(["aa", "b", "cccc"], 40)))
    encoding = "wpe(max_position=40)"
    common = {"model": "nano", "data": str(text / "*.txt"), "train_length": 16, "batch_size": 4}
    common |= {"warmup_steps": 2, "eval_every": 6, "checkpoint_every": 6, "eval_tokens": 64}
    common |= {"steps": 6}
    spec = "randomized(max_position=40, layers=each)"
    (folder,) = train_main(
        Arguments(encoding=(encoding,), positions=spec, out=tmp_path / "runs", **common)
    )
    assert folder.name == "wpe-max_position-40-randomized-layers-each-max_position-40-T16-seed0"
    rows = evaluate([folder], (16, 32, 64), tmp_path / "scores")
    assert {row["positions"] for row in rows} == {"randomized(layers=each, max_position=40)"}
    undefined = [row for row in rows if not row["defined"]]
    assert {row["length"] for row in undefined} == {64}
    assert "64 tokens do not find 64 positions below 40" in undefined[0]["reason"]
    assert {r["length"] for r in rows if r["defined"] and r["protocol"] == NonOverlapping.name} == {
        16,
        32,
    }
    # What is scored is the model at the positions that the sampler gives a window.
    model = load_model(open_run(folder))
    window = np.arange(20) % 7 + 60
    sampler = make_sampler(spec)
    (got,) = Scorer(model, 32, 64, sampler, seed=0).score([window])
    padded = np.zeros((1, 32), np.int32)
    padded[0, :20] = window
    segments = (np.arange(32) < 20).astype(int)[None]
    positions, streams = sampler.place(
        segments, [zlib.crc32(padded[0].tobytes())], (0,), 2, training=False
    )
    logits = np.asarray(model(padded, positions, segments, streams), np.float64)[0, :19]
    logits -= logits.max(axis=-1, keepdims=True)
    nll = np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(19), window[1:]]
    np.testing.assert_allclose(got, nll, atol=1e-4)
    with pytest.raises(EncodingError, match="position 16 has no representation in wpe"):
        train_main(Arguments(encoding=("wpe",), positions=spec, out=tmp_path / "no", **common))
    assert not (tmp_path / "no").exists()


def test_every_sampler_has_a_reference_but_the_plain_one():
    assert [name for name, cls in SAMPLERS.items() if not cls.reference] == ["sequential"]
