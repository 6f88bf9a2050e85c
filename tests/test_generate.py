"""Decoding: greedy and by draws, against decoding without a cache and definitions in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from posenc.__main__ import main
from posenc.continuation import continuations
from posenc.data import tokenizer
from posenc.encodings import PositionOutOfRange, parse_part
from posenc.errors import UserError
from posenc.generate import Sampling, filtered, generate, left_padded
from posenc.runs import RunConfig, load, start_run
from posenc.training import Trainer
from posenc.transformer import Transformer, TransformerConfig, preset

CONFIG = TransformerConfig(vocab_size=31, layers=2, width=16, heads=2, init_std=0.3)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def naive_greedy(model, prompt, new_tokens, length=24):
    """Decode without a cache: the whole sequence again for every token."""
    forward = jax.jit(lambda ids: model(ids, jnp.arange(length)[None]))
    ids = list(prompt)
    for _ in range(new_tokens):
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(np.argmax(np.asarray(forward(padded))[0, len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.mark.fast
@pytest.mark.parametrize("encoding", ["wpe", "rope"])
def test_greedy_decoding_equals_decoding_without_a_cache(encoding):
    model = Transformer(CONFIG, encoding, 24, seed=2)
    expected = [naive_greedy(model, prompt, 9) for prompt in PROMPTS]
    assert generate(model, PROMPTS, 9).tolist() == expected
    assert generate(model, PROMPTS[:1], 1).tolist() == [expected[0][:1]]


@pytest.mark.fast
def test_a_row_ends_at_its_stop_token_and_a_temperature_near_0_is_greedy():
    model = Transformer(CONFIG, "rope", 24, seed=2)
    expected = generate(model, PROMPTS, 9).tolist()
    assert generate(model, PROMPTS, 9, Sampling(1e-6, seed=5)).tolist() == expected
    stop = next(t for t in expected[0][2:] if t not in expected[0][:2])
    cut = [row[: row.index(stop)] if stop in row else row for row in expected]
    assert {len(row) for row in cut} > {9}  # one ends, another goes on
    ended = [row + [stop] * (9 - len(row)) for row in cut]
    assert generate(model, PROMPTS, 9, stop=stop).tolist() == ended


@pytest.mark.fast
def test_generation_stops_where_the_encoding_does():
    model = Transformer(CONFIG, "wpe", 8, seed=2)
    # Of six new tokens the last but one is fed, at position 7: the table's last row.
    assert generate(model, [[1, 2, 3]], 6).tolist() == [naive_greedy(model, [1, 2, 3], 6, 8)]
    with pytest.raises(PositionOutOfRange, match="position 8 has no representation in wpe"):
        generate(model, [[1, 2, 3]], 7)


@pytest.mark.fast
def test_left_padding_aligns_on_the_right():
    tokens, segments = left_padded([[5], [1, 2, 3]])
    np.testing.assert_array_equal(tokens, [[0, 0, 5], [1, 2, 3]])
    np.testing.assert_array_equal(segments, [[0, 0, 1], [1, 1, 1]])


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def drawn_from(logits, temperature, top_k=None, top_p=1.0):
    """The distribution by its definition, a token at a time, in float64."""
    logits = np.asarray(logits, np.float64)
    left = [
        token
        for token in range(len(logits))
        if top_k is None or sum(other > logits[token] for other in logits) < top_k
    ]
    p = np.zeros(len(logits))
    p[left] = softmax(logits[left] / temperature)
    if top_p < 1:
        nucleus = [t for t in left if sum(p[o] for o in left if logits[o] > logits[t]) < top_p]
        p = np.where(np.isin(np.arange(len(p)), nucleus), p, 0) / p[nucleus].sum()
    return p


# Logits on a coarse grid are often equal.
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=9, max_size=9),
    st.sampled_from([1e-6, 0.3, 1.0, 2.5, 1e4]),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.just(1.0), st.just(1e-30), st.floats(0.01, 0.999)),
)
def test_what_is_drawn_from_equals_its_definition(grid, temperature, top_k, top_p):
    logits = np.asarray(grid, np.float32) / 2
    # At a border that rounding decides, both sides are right.
    for nudge in (-1e-6, 1e-6):
        near = min(max(top_p + nudge, 1e-30), 1.0) if top_p not in (1.0, 1e-30) else top_p
        expected = drawn_from(logits, temperature, top_k, near)
        got = jax.nn.softmax(filtered(jnp.asarray(logits), Sampling(temperature, top_k, top_p)))
        if np.array_equal(got > 0, expected > 0) or nudge > 0:
            break
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.fast
def test_what_is_drawn_from_in_cases_worked_by_hand():
    logits = jnp.log(jnp.asarray([0.1, 0.4, 0.1, 0.4]))

    def left(*values):
        p = jax.nn.softmax(filtered(logits, Sampling(*values)))
        return np.asarray(p).round(6).tolist()

    assert left(1.0) == left(1.0, 4) == left(1.0, 99) == pytest.approx([0.1, 0.4, 0.1, 0.4])
    assert left(1.0, 1) == left(1.0, 2) == left(1.0, None, 1e-9) == [0, 0.5, 0, 0.5]  # equal ones
    assert left(1.0, 3) == pytest.approx([0.1, 0.4, 0.1, 0.4])
    assert left(1.0, None, 0.79) == [0, 0.5, 0, 0.5]
    assert left(1.0, None, 0.81) == pytest.approx([0.1, 0.4, 0.1, 0.4])
    assert left(0.5) == pytest.approx([1 / 34, 16 / 34, 1 / 34, 16 / 34], abs=1e-6)
    # Temperature acts first: at 0.5 the two likeliest have 0.94, and at 1 only 0.8.
    assert left(0.5, None, 0.9) == [0, 0.5, 0, 0.5]


def exceeds(counts, p, chance=1e-3):
    """Say whether counts differ from a distribution more than a sample of it does by chance."""
    if counts[p == 0].any():
        return True
    expected = counts.sum() * p[p > 0]
    rare = expected < 5  # too few for the statistic's law: taken together
    got, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts[p > 0], expected))
    got, expected = got[expected > 0], expected[expected > 0]
    return ((got - expected) ** 2 / expected).sum() > chi2.ppf(1 - chance, len(got) - 1)


@pytest.mark.parametrize("choice", [(0.7, None, 1.0), (0.4, 5, 1.0), (0.5, 12, 0.7)])
def test_samples_are_as_frequent_as_the_model_says(choice):
    model = Transformer(CONFIG, "rope", 24, seed=2)
    prompt = [3, 1, 4]
    drawn = generate(model, [prompt] * 3000, 2, Sampling(*choice, seed=11))
    forward = jax.jit(lambda ids: model(ids, jnp.arange(ids.shape[1])[None])[0, -1])

    def counted(tokens):
        return np.bincount(tokens, minlength=31)

    first = np.asarray(forward(np.asarray([prompt])))
    assert not exceeds(counted(drawn[:, 0]), drawn_from(first, *choice))
    # The statistic would tell twice the temperature.
    assert exceeds(counted(drawn[:, 0]), drawn_from(first, choice[0] * 2, *choice[1:]))
    likeliest = int(counted(drawn[:, 0]).argmax())
    second = np.asarray(forward(np.asarray([[*prompt, likeliest]])))
    chosen = drawn[drawn[:, 0] == likeliest, 1]
    assert len(chosen) > 300
    assert not exceeds(counted(chosen), drawn_from(second, *choice))


def test_a_rows_sample_does_not_depend_on_the_rows_beside_it():
    model = Transformer(CONFIG, "rope", 24, seed=2)
    how = Sampling(0.9, 20, 0.95, seed=3)
    every = generate(model, PROMPTS, 9, how)
    # The shortest, without its padding.
    np.testing.assert_array_equal(generate(model, PROMPTS[1:2], 9, how), every[1:2])
    again = generate(model, [PROMPTS[2], PROMPTS[0], PROMPTS[2]], 9, how)
    np.testing.assert_array_equal(again[:2], every[[2, 0]])
    assert (again[2] != again[0]).any()  # the same prompt for the second time
    other = generate(model, PROMPTS, 9, dataclasses.replace(how, seed=4))
    assert (other != every).any(axis=1).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, r"--temperature is -0.5: give 0 \(greedy\)"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"temperature": 1e-9}, "at least 1e-06"),
        ({"temperature": 1, "top_k": 0}, "--top-k is 0: it must be at least 1"),
        ({"temperature": 1, "top_p": 0.0}, r"--top-p is 0.0: it must be above 0"),
        ({"temperature": 1, "top_p": 1.5}, r"--top-p is 1.5"),
        ({"temperature": 1, "top_p": float("nan")}, r"--top-p is nan"),
        ({"seed": -1}, "seed -1"),
        ({"top_k": 4}, "nothing is drawn at --temperature 0"),
    ],
)
def test_a_way_to_sample_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)


@pytest.mark.fast
def test_prompts_that_cannot_be_continued_are_refused():
    model = Transformer(CONFIG, "rope", 8)
    for prompts, count, stop, message in (
        ([[1], []], 2, None, "a prompt is empty"),
        ([], 2, None, "a prompt is empty"),
        ([[1]], 0, None, "0 new tokens"),
        ([[1]], 2, 31, "stop token 31 is none of the 31"),
    ):
        with pytest.raises(UserError, match=message):
            generate(model, prompts, count, stop=stop)


def finished_run(out, encoding="rope", **changed):
    """A run as training leaves it, of parameters as they were drawn."""
    shape = dataclasses.replace(preset("nano"), vocab_size=257, init_std=0.3)
    config = RunConfig(encoding, "nano", shape, "x", train_length=16, steps=1, **changed)
    run = start_run(out, None, config, {"name": "x"})
    model = Transformer(shape, encoding, 16, seed=0)
    run.record_start([model], None)
    run.checkpoints.save(1, Trainer(model, config.optimizer, 1, 0).start())
    run.checkpoints.finish()
    return run.folder


def test_the_command_continues_texts_of_a_run(tmp_path, capsys, monkeypatch):
    folder = finished_run(tmp_path)

    def said(*words):
        monkeypatch.setattr("sys.argv", ["posenc", "generate", str(folder), *words])
        main()
        return capsys.readouterr().out

    made, model = tokenizer("bytes"), load(folder)
    ids = [[256, *"one é".encode()], [256, *b"tw"]]
    how = Sampling(0.8, 40, 0.95, seed=7)
    rows = generate(model, ids, 12, how, stop=256)
    texts = [made.decode([*old, *row]) for old, row in zip(ids, rows.tolist(), strict=True)]

    def printable(text):
        return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)

    options = ["--tokens", "12", "--temperature", "0.8", "--top-k", "40", "--top-p", "0.95"]
    options += ["--seed", "7"]
    printed = said("--prompt", "one é", "--prompt", "tw", *options)
    assert printed == f"--- 1\n{printable(texts[0])}\n--- 2\n{printable(texts[1])}\n"
    assert said("--prompt", "tw", *options) == f"{printable(texts[1])}\n"
    # Without a prompt a document begins, here greedily.
    begun = made.decode(generate(model, [[256]], 5, stop=256)[0])
    assert said("--tokens", "5") == printable(begun) + "\n"


def test_runs_that_cannot_go_on_are_refused_and_policies_lead_on(tmp_path, capsys):
    greedy = Sampling()
    table = finished_run(tmp_path, "wpe", positions="shape(max_shift=1)")
    with pytest.raises(PositionOutOfRange, match="position 16 has no representation in wpe"):
        continuations(table, ["0123456789"], 7, greedy)
    # Eleven tokens with BOS; the policy changes nothing while the table reaches so far.
    within = continuations(table, ["0123456789"], 5, greedy)
    assert within == continuations(table, ["0123456789"], 5, greedy, extend="clamp")
    assert "clamp changes nothing at 16 tokens" in capsys.readouterr().out
    model = load(table)
    model.encoding.extend(parse_part("clamp"), 31)
    ids = [256, *b"0123456789"]
    expected = tokenizer("bytes").decode([*ids, *generate(model, [ids], 20, stop=256)[0].tolist()])
    assert continuations(table, ["0123456789"], 20, greedy, extend="clamp") == [expected]
    drawn = finished_run(tmp_path, "rope", positions="randomized(max_position=64)")
    with pytest.raises(UserError, match=r"positions randomized\(max_position=64\), .*resample"):
        continuations(drawn, ["x"], 2, greedy)
    even = finished_run(tmp_path, positions="randomized(evaluation=sequential, max_position=64)")
    assert continuations(even, ["x"], 2, greedy)[0].startswith("x")
    (even / "checkpoints" / "1.json").unlink()
    with pytest.raises(UserError, match=r"is unfinished \(no checkpoint of 1 steps\)"):
        continuations(even, ["x"], 2, greedy)
