"""Blocks whose weights not all positions share, against a loop over tokens and the shared block."""

import dataclasses
import functools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from eval.evaluate import evaluate
from eval.report.lines import lines_of
from posenc import PositionOutOfRange, generate
from posenc.encodings import sequential_positions
from posenc.errors import UserError
from posenc.sharing import Unshared, canonical_sharing, copies_of, unshare
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig, count_parameters

EPS = 2.0**-24
LENGTH, BATCH = 12, 3
# Everything that a block may have: biases, QK-norm, grouped keys.
SHAPE = TransformerConfig(
    vocab_size=11, layers=2, width=16, heads=4, kv_heads=2, bias=True, qk_norm=True, init_std=0.3
)
WAYS = ("none", "groups(copies=4)")


@functools.cache
def model_of(sharing, encoding="rope", seed=0, different=False):
    """Give a small model; ``different`` shifts every copy by noise of its own."""
    config = dataclasses.replace(SHAPE, sharing=sharing)
    model = Transformer(config, encoding, LENGTH, seed=seed)
    if not different:
        return model
    merge, parameters = split(model)
    return merge(
        {
            name: value + 0.2 * jax.random.normal(jax.random.key(n), value.shape)
            if name.startswith("blocks.")
            else value
            for n, (name, value) in enumerate(parameters.items())
        }
    )


class OneByOne:
    """Applies parts by the definition: to each token alone, with the weights of its position."""

    def __init__(self, copy):
        self.copy = copy

    @classmethod
    def at(cls, positions, copies, length):
        return cls(jnp.clip(positions, 0, length - 1) // (length // copies))

    def __call__(self, part, x):
        graph, weights = nnx.split(part)

        def to_token(copy, token):
            own = jax.tree.map(lambda w: w[copy], weights)
            return nnx.merge(graph, own)(token[None, None])[0, 0]

        return jax.vmap(jax.vmap(to_token))(self.copy, x)


SEGMENTS = {
    "whole": np.ones((BATCH, LENGTH), np.int32),
    "packed": np.repeat([[1, 2, 3], [1, 2, 4], [2, 5, 6]], [5, 1, 6], axis=1).astype(np.int32),
    "padded": (np.arange(LENGTH) >= np.array([[0], [5], [11]])).astype(np.int32),
}
TOKENS = np.asarray(jax.random.randint(jax.random.key(3), (BATCH, LENGTH), 0, 11))


@functools.cache
def readouts(sharing):
    """Give the model's and the definition's hidden states and gradients: compiled once."""
    model = model_of(sharing, different=True)
    merge, parameters = split(model)

    def readout(parameters, positions, segments):
        hidden, _ = merge(parameters).hidden(TOKENS, positions, segments)
        hidden = jnp.where(segments[..., None] != 0, hidden, 0)
        return jnp.sum(jnp.sin(hidden)), hidden

    def both(positions, segments):
        def gradient():
            return jax.value_and_grad(readout, has_aux=True)(parameters, positions, segments)

        ours = gradient()
        with mock.patch("posenc.transformer.Unshared", OneByOne):
            return ours, gradient()

    return jax.jit(both)


@pytest.mark.parametrize("sharing", WAYS)
def test_each_token_meets_the_weights_of_its_own_position(sharing):
    for kind, segments in SEGMENTS.items():
        positions = jnp.asarray(sequential_positions(segments))
        ours, expected = readouts(sharing)(positions, jnp.asarray(segments))
        # Float32: the same sums in another order, through two layers.
        np.testing.assert_allclose(
            ours[0][1], expected[0][1], rtol=0, atol=128 * EPS * 4, err_msg=kind
        )
        for name, value in expected[1].items():
            atol = 512 * EPS * float(jnp.abs(value).max())
            np.testing.assert_allclose(
                ours[1][name], value, rtol=0, atol=atol, err_msg=f"{kind} {name}"
            )


@pytest.mark.fast
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_positions_go_to_their_copies(data):
    copies = data.draw(st.integers(1, 6))
    length = copies * data.draw(st.integers(1, 4))
    batch, tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 20))
    places = st.integers(0, length - 1)
    row = st.lists(places, min_size=tokens, max_size=tokens)
    positions = np.array(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    x = jnp.asarray(positions[..., None] * 100.0 + np.arange(tokens)[None, :, None])

    class Named(nnx.Module):  # says which copy it is
        def __init__(self):
            self.name = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            return jnp.concatenate([x, jnp.broadcast_to(self.name[...], x.shape)], axis=-1)

    part = unshare(Named(), copies)
    part.name[...] = jnp.arange(copies, dtype=jnp.float32)
    out = Unshared.at(jnp.asarray(positions), copies, length)(part, x)
    np.testing.assert_array_equal(out[..., 0], x[..., 0])
    np.testing.assert_array_equal(out[..., 1], positions // (length // copies))


@pytest.mark.fast
@pytest.mark.parametrize("sharing", WAYS)
def test_before_the_first_step_it_computes_what_the_shared_model_computes(sharing):
    positions = np.arange(LENGTH)[None]

    def logits(model):
        merge, parameters = split(model)
        return jax.jit(lambda p: merge(p)(TOKENS, positions))(parameters)

    np.testing.assert_allclose(
        logits(model_of(sharing)), logits(model_of("all")), rtol=0, atol=128 * EPS
    )
    blocks = sum(v.size for k, v in split(model_of("all"))[1].items() if k.startswith("blocks."))
    more = count_parameters(model_of(sharing)) - count_parameters(model_of("all"))
    assert more == (model_of(sharing).copies - 1) * blocks


@pytest.mark.parametrize("sharing", WAYS)
def test_the_shared_gradient_is_the_sum_of_the_copies_gradients(sharing):
    """Backprop identity: sharing adds up, over positions, what each would have been taught."""
    positions = np.arange(LENGTH)[None]

    def gradient(model):
        merge, parameters = split(model)

        def loss(parameters):
            logits = merge(parameters)(TOKENS, positions)
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

        return jax.jit(jax.grad(loss))(parameters)

    whole, parts = gradient(model_of("all")), gradient(model_of(sharing))
    for name, value in whole.items():
        if not name.startswith("blocks."):
            continue
        assert parts[name].shape == (model_of(sharing).copies, *value.shape)
        # To rounding: a sum of so many tokens, whose terms are as large as this.
        terms = float(jnp.abs(parts[name]).sum(0).max())
        np.testing.assert_allclose(
            parts[name].sum(0), value, rtol=0, atol=BATCH * LENGTH * EPS * terms, err_msg=name
        )
        assert float(jnp.abs(value).max()) > 100 * BATCH * LENGTH * EPS * terms or terms == 0, name


def test_decoding_on_a_cache_equals_the_whole_pass():
    model = model_of("none", different=True)
    prompts = [[1, 2, 3, 4], [5], [7, 8]]
    new = generate(model, prompts, 8)
    texts = np.zeros((3, LENGTH), np.int32)
    for row, prompt in enumerate(prompts):
        texts[row, : len(prompt) + 8] = [*prompt, *new[row]]
    merge, parameters = split(model)
    positions = jnp.arange(LENGTH)[None]
    logits = jax.jit(lambda p, texts: merge(p)(texts, positions))(parameters, texts)
    likeliest = np.asarray(jnp.argmax(logits, -1))
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(likeliest[row, len(prompt) - 1 :][:8], new[row])
    assert len(np.unique(new)) > 3


@jax.jit
def on_device(positions):
    return model_of("none")(TOKENS[:1, :3], positions)


@pytest.mark.fast
@pytest.mark.parametrize("culprit", [LENGTH, LENGTH + 1000, -1])
def test_a_position_without_weights_is_refused(culprit):
    model = model_of("none")
    positions = np.array([[0, 1, culprit]])
    with pytest.raises(PositionOutOfRange) as refusal:
        model(TOKENS[:1, :3], positions)
    assert f"position {culprit} has no weights" in str(refusal.value)
    assert f"positions 0 to {LENGTH - 1}" in str(refusal.value)
    # Known on the device alone: no number, in the row itself and in those that see it.
    places = jnp.asarray([[0, culprit, 2]])
    logits = on_device(places)
    np.testing.assert_array_equal(np.isnan(logits).all(-1), [[False, True, True]])
    # Padding may stand anywhere, and weights that all positions share know of no limit.
    model.check_positions(np.array([0, 1]))
    model_of("all").check_positions(positions)


@pytest.mark.fast
def test_the_smaller_of_two_limits_holds():
    config = dataclasses.replace(SHAPE, sharing="none")
    assert Transformer(config, "wpe(max_position=7)", 8).max_position == 7
    assert Transformer(config, "wpe(max_position=9)", 8).max_position == 8
    assert Transformer(SHAPE, "wpe(max_position=9)", 8).max_position == 9
    assert Transformer(SHAPE, "rope", 8).max_position is None
    with pytest.raises(PositionOutOfRange, match="no representation in wpe"):
        Transformer(config, "wpe(max_position=7)", 8).check_positions(np.arange(8))


@pytest.mark.fast
def test_ways_of_sharing_are_read_and_have_one_spelling():
    assert [copies_of(text, 32) for text in ("all", "none", " groups( copies = 8 )")] == [1, 32, 8]
    assert canonical_sharing("groups(copies=1)", 32) == "all"
    assert canonical_sharing("groups(copies=32)", 32) == "none"
    assert canonical_sharing("groups( copies=8 )", 32) == "groups(copies=8)"
    for text, words in (
        ("nome", "did you mean none"),
        ("groups", "the form is groups(copies=8)"),
        ("groups(size=8)", "the form is groups(copies=8)"),
        ("none(copies=3)", "the form is none"),
        (
            "groups(copies=5)",
            "32 positions cannot be shared out among 5 copies evenly: take 2, 4, 8",
        ),
        ("groups(copies=0)", "among 0 copies"),
        ("groups(copies=64)", "take 8, 16, 32"),
        ("groups(copies=2.5)", "among 2.5 copies"),
        ("groups(copies=many)", "among many copies"),
        ("groups(copies=", "the forms are all, none, groups(copies=8)"),
        ("", "--sharing '' cannot be read"),
    ):
        with pytest.raises(UserError) as refusal:
            copies_of(text, 32)
        assert words in str(refusal.value), text


def test_a_run_without_sharing_trains_is_scored_and_ends_where_its_weights_end(tmp_path):
    folders = train.main(
        train.Arguments(
            encoding=("rope", "wpe(max_position=8)"),
            model="nano",
            layers=1,
            train_length=8,
            steps=2,
            batch_size=4,
            eval_tokens=64,
            sharing="groups(copies=8)",
            out=tmp_path / "runs",
        )
    )
    assert folders[0].name == "rope-T8-sharing-none-seed0"
    saved = json.loads((folders[0] / "config.json").read_text())
    assert saved["config"]["model"]["sharing"] == "none"
    options = {"blocks": 1, "tokens_per_document": 8, "extend": ("clamp",)}
    rows = evaluate(folders, (8, 16), tmp_path / "scores", **options)
    primary = [row for row in rows if row["protocol"] == "nll_by_context"]
    at = {(row["run"], row["length"], row["extend"]): row for row in primary}
    for folder in folders:
        assert at[folder.name, 8, None]["sharing"] == "none"
        assert at[folder.name, 8, None]["defined"]
        assert at[folder.name, 16, None]["reason"] == "no weights beyond 7"
        assert (folder.name, 16, "clamp") not in at


@pytest.mark.fast
def test_rows_of_before_sharing_could_be_chosen_mean_all():
    row = {
        **{"schema": 1, "run": "r", "encoding": "rope", "protocol": "nll_by_context", "length": 8},
        **{"extend": None, "defined": True, "reason": None, "nll": 1.0, "excess_nll": None},
        **{"notes": [], "seed": 0, "train_length": 8},
    }
    every = {"sharing": "all"}, {}, {"sharing": "none"}
    old, new, unshared = ({**row, **own} for own in every)
    assert [line.label for line in lines_of([old, new], "nll_by_context")] == ["rope"]
    labels = ["rope, sharing=all", "rope, sharing=none"]
    assert [line.label for line in lines_of([new, unshared], "nll_by_context")] == labels
    # What is unusual is named though all rows have it.
    assert [line.label for line in lines_of([unshared], "nll_by_context")] == labels[1:]
