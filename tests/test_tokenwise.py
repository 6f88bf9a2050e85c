"""Streams made from tokens: what they are, on a cache too, and that models read and refuse them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import posenc
from posenc.encodings import Dimensions, EncodingError, build
from posenc.placing import Placer, start_streams, step_streams
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=96, layers=1, width=16, heads=2, init_std=0.2)
SPECS = {"abacus": "digit_place", "coupled": "significance"}


def ids(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)[None]


def encodings(spec):
    return build(spec, 1, Dimensions(8, 2, 4, 64), jax.random.key(0))


def abacus_of(text):
    """Each digit's place in its run of digits, by the runs themselves."""
    places = [0] * len(text)
    for run in re.finditer("[0-9]+", text):
        for place, at in enumerate(range(*run.span()), 1):
            places[at] = place
    return places


def coupled_of(text):
    """The authors' numbers for ``a+b=c``, c written backwards: right-aligned, 1 the first."""
    match = re.fullmatch(r"(\d+)\+(\d+)=(\d*)", text)
    a, b, answer = match.groups()
    assert len(a) == len(b)
    end = 1 + len(a) + 1
    operands = [*range(end - len(a), end + 1), *range(end - len(b), end + 1)]
    return [*operands, *list(range(end - len(answer), end))[::-1]]


@pytest.mark.fast
@given(st.text(alphabet="0123 +=a", min_size=1, max_size=24))
@settings(max_examples=40, deadline=None)
def test_abacus_counts_the_digits_of_every_number(text):
    text = text.ljust(24)
    got = Placer(ABACUS).streams(ids(text), None)["digit_place"]
    assert got[0].tolist() == abacus_of(text)


ABACUS = encodings("abacus")


@pytest.mark.fast
@pytest.mark.parametrize(
    "text", ["65+37=", "065+137=202", "065+137=2020", "9+9=81", "0123+9999=2210"]
)
def test_coupled_numbers_digits_by_significance(text):
    got = Placer(encodings("coupled")).streams(ids(text), None)["significance"][0]
    assert got.tolist() == coupled_of(text)


@pytest.mark.fast
def test_coupled_begins_again_with_another_problem_and_has_no_number_beyond_a_carry():
    one = coupled_of("65+37=201")
    text = "65+37=201\n9+9=81 7=12345"
    got = Placer(encodings("coupled")).streams(ids(text), None)["significance"][0].tolist()
    assert got[: len(one)] == one
    assert got[len(one)] == 0
    assert got[len(one) + 1 : len(one) + 7] == coupled_of("9+9=81")
    assert got[-7:] == [2, 3, 2, 1, 0, 0, 0]


@pytest.mark.fast
@pytest.mark.parametrize("spec", SPECS)
def test_streams_start_again_with_a_segment_and_go_on_over_chunks(spec):
    text = "12+34=64 56+789=5 4321=78"
    made = encodings(spec)
    tokens = ids(text)
    segments = np.where(np.arange(len(text)) < 10, 1, 2)[None].astype(np.int32)
    whole = Placer(made).streams(tokens, segments)[SPECS[spec]]
    apart = [
        Placer(made).streams(tokens[:, part], None)[SPECS[spec]]
        for part in (slice(0, 10), slice(10, None))
    ]
    np.testing.assert_array_equal(whole, np.concatenate(apart, axis=1))
    state, parts = start_streams(made, 1), []
    for low, high in ((0, 3), (3, 4), (4, 13), (13, len(text))):
        part = jnp.asarray(tokens[:, low:high]), jnp.asarray(segments[:, low:high])
        streams, state = step_streams(made, *part, state)
        parts.append(streams[SPECS[spec]])
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.fast
def test_training_moves_numbers_alike_and_within_the_table():
    tokens = np.repeat(ids("12+34=64 "), 400, axis=0)
    ones, rows = np.ones_like(tokens), range(400)
    still = Placer(encodings("abacus")).streams(tokens, None)["digit_place"]
    for spec, alike in (
        ("abacus(max_k=5, rows=9)", True),
        ("abacus(max_k=5, rows=9, per=example)", False),
    ):
        _, streams = Placer(encodings(spec)).place(tokens, ones, rows, (0, 3), training=True)
        moved = streams["digit_place"] - still
        assert (moved[still == 0] == 0).all()
        per_row = moved[:, 0]
        np.testing.assert_array_equal(
            moved[still > 0].reshape(400, -1), per_row[:, None].repeat(6, 1)
        )
        assert len(set(per_row.tolist())) == (1 if alike else 6)
        assert set(per_row.tolist()) <= set(range(6))
    _, streams = Placer(encodings("coupled(max_position=7)")).place(
        tokens, ones, rows, (0, 3), training=True
    )
    assert set(streams["significance"].max(axis=1).tolist()) == {4, 5, 6, 7}
    _, streams = Placer(encodings("abacus")).place(tokens, ones, rows, (0, 3), training=False)
    np.testing.assert_array_equal(streams["digit_place"], still)


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_adds_the_row_of_each_value(spec):
    made = encodings(spec)
    part = made.parts[0]
    tokens = ids("12+34=64 ")
    streams = Placer(made).streams(tokens, None)
    x = np.random.default_rng(0).standard_normal((1, tokens.shape[1], 8)).astype(np.float32)
    got = made.embed(jnp.asarray(x), jnp.arange(9)[None], jax.tree.map(jnp.asarray, streams))
    rows = np.asarray(part.table)[streams[SPECS[spec]]]
    np.testing.assert_array_equal(got, x + rows)


def model_of_digits(spec):
    """Give a model that can say nothing but digits, so that its numbers grow."""
    merge, parameters = split(Transformer(CONFIG, spec, 24, seed=3))
    table = parameters["embedding.embedding"]
    digits = jnp.where((jnp.arange(96) // 10 == 5)[:, None], table, 0.05 * table)
    return merge({**parameters, "embedding.embedding": digits})


@pytest.mark.parametrize("spec", SPECS)
def test_decoding_carries_the_streams_on(spec):
    """Greedy decoding equals reading all of it at once."""
    model = model_of_digits(f"{spec}+rope")
    prompts = [list(b"12+34="), list(b"7=")]
    got = posenc.generate(model, prompts, 5)
    for prompt, row in zip(prompts, got, strict=True):
        tokens = np.asarray([[*prompt, *row[:-1]]], np.int32)
        streams = posenc.token_streams(model, tokens)
        logits = jax.jit(model)(tokens, np.arange(tokens.shape[1])[None], streams=streams)
        np.testing.assert_array_equal(jnp.argmax(logits[0, len(prompt) - 1 :], axis=-1), row)


def test_missing_streams_and_missing_rows_are_refused():
    model = Transformer(CONFIG, "abacus(rows=4, max_k=2)", 24)
    tokens, positions = ids("12 345 6789"), np.arange(11)[None]
    with pytest.raises(EncodingError, match=r"abacus reads the stream 'digit_place'"):
        model(tokens, positions)
    streams = posenc.token_streams(model, tokens)
    long = "abacus has 4 rows, and a number needs row 4"
    with pytest.raises(posenc.PositionOutOfRange, match=long):
        model(tokens, positions, streams=streams)
    placer, ones = Placer(model.encoding), np.ones_like(tokens)
    for training in (True, False):
        with pytest.raises(posenc.PositionOutOfRange, match=long):
            placer.place(tokens, ones, [0], (0, 1), training=training)
    placer.place(tokens, np.where(np.arange(11) < 7, 1, 0)[None], [0], (0, 1), training=False)
    # A prompt's number, and one that grows while it is decoded.
    with pytest.raises(posenc.PositionOutOfRange, match=long):
        posenc.generate(model, [list(b"1234")], 1)
    talks = model_of_digits("abacus(rows=4, max_k=2)")
    assert posenc.generate(talks, [list(b"12")], 2).shape == (1, 2)
    with pytest.raises(posenc.PositionOutOfRange, match=long):
        posenc.generate(talks, [list(b"12")], 3)
    # On the device, rows from that digit on are NaN, and none before it.
    got = jax.jit(lambda tokens, streams: model(tokens, positions, streams=streams))(
        tokens, streams
    )
    np.testing.assert_array_equal(np.isnan(got).any(axis=-1)[0], np.arange(11) >= 10)
    # What lies beyond in padding harms nobody.
    segments = np.where(np.arange(11) < 10, 1, 0)[None]
    assert np.isfinite(model(tokens, positions, segments, streams=streams)[0, :10]).all()
    with pytest.raises(EncodingError, match="abacus twice"):
        build("abacus,abacus(rows=9, max_k=1)", 2, Dimensions(8, 2, 4, 8), jax.random.key(0))
    with pytest.raises(EncodingError, match=r"abacus\(max_k=3\): from 0 to 2, for 4 rows"):
        encodings("abacus(max_k=3, rows=4)")
