"""posenc against arrays that Hugging Face transformers computed, and against GPT-2's sizes.

``golden/make_golden.py`` wrote the arrays; neither it nor torch is needed here.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden.weights import CONTEXT, KINDS, posenc_model, tolerance, weights

from posenc.encodings import alibi_slopes
from posenc.training import split
from posenc.transformer import Transformer, count_parameters, preset

EPS = 2.0**-24  # unit roundoff of float32
FOLDER = pathlib.Path(__file__).parent / "golden"
POSITIONS = jnp.arange(CONTEXT, dtype=jnp.int32)[None]

kinds = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return dict(arrays)


# Logits.


@functools.partial(jax.jit, static_argnames=("merge", "dense"))
def forward(merge, parameters, tokens, positions, dense=False):
    return merge(parameters)(tokens, positions, dense=dense)


def logits_of(model, kind, shift=0, dense=False):
    tokens = jnp.asarray(golden(kind)["tokens"])
    return np.asarray(forward(*split(model), tokens, POSITIONS + shift, dense))


@pytest.mark.fast
@kinds
@pytest.mark.parametrize("dense", [False, True], ids=["blocks", "dense"])
def test_logits_are_those_of_transformers(kind, dense):
    expected = golden(kind)["logits"]
    assert expected.dtype == np.float32
    assert expected.std() > 1  # far from uniform
    logits = logits_of(posenc_model(kind), kind, dense=dense)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance(kind, expected))


@pytest.mark.fast
def test_gpt2_logits_are_those_of_float64():
    expected = golden("gpt2")["logits64"]
    assert expected.dtype == np.float64
    # Called as it stands, not compiled as a whole.
    logits = posenc_model("gpt2")(jnp.asarray(golden("gpt2")["tokens"]), POSITIONS)
    # One float32 computation instead of two.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance("gpt2", expected) / 2)


@kinds
@pytest.mark.parametrize("pieces", [[1] * CONTEXT, [5, 1, 1, 1, 8]], ids=["single", "prefill"])
def test_cached_decoding_gives_the_logits_of_transformers(kind, pieces):
    assert sum(pieces) == CONTEXT
    tokens, expected = jnp.asarray(golden(kind)["tokens"]), golden(kind)["logits"]
    model = posenc_model(kind)
    merge, parameters = split(model)

    @jax.jit
    def decode(parameters, tokens, positions, cache):
        return merge(parameters)(tokens, positions, cache=cache)

    # More slots than tokens: what is not filled yet must not be seen.
    cache, logits, start = model.start_cache(len(tokens), CONTEXT + 3), [], 0
    for piece in pieces:
        here = slice(start, start + piece)
        some, cache = decode(parameters, tokens[:, here], POSITIONS[:, here], cache)
        logits.append(some)
        start += piece
    logits = np.concatenate(logits, axis=1)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance(kind, expected))


def swapped(kind, first, second):
    """Give a model whose weights of two names are exchanged in every block."""
    values = weights(kind)
    given = {
        name.replace(first, "*").replace(second, first).replace("*", second) for name in values
    }
    assert given == set(values)
    exchanged = {
        name.replace(first, "*").replace(second, first).replace("*", second): value
        for name, value in values.items()
    }
    return posenc_model(kind, values=exchanged)


def regrouped():
    """Give a Llama whose query heads take the two key-value heads in turn, not in runs."""
    values = weights("llama")
    for name in values:
        if name.endswith("q_proj.weight"):
            values[name] = values[name].reshape(4, 4, -1)[[0, 2, 1, 3]].reshape(16, -1)
        if name.endswith("o_proj.weight"):
            values[name] = values[name].reshape(-1, 4, 4)[:, [0, 2, 1, 3]].reshape(-1, 16)
    return posenc_model("llama", values=values)


MUTANTS = {
    "gpt2, GELU by erf": ("gpt2", lambda: posenc_model("gpt2", activation="gelu"), 0),
    "gpt2, eps 20% larger": ("gpt2", lambda: posenc_model("gpt2", norm_eps=1.2e-5), 0),
    "gpt2, positions from 1": ("gpt2", lambda: posenc_model("gpt2", rows=CONTEXT + 1), 1),
    "gpt2, norms exchanged": ("gpt2", lambda: swapped("gpt2", "ln_1", "ln_2"), 0),
    "llama, eps 20% larger": ("llama", lambda: posenc_model("llama", norm_eps=1.2e-5), 0),
    "llama, theta 0.1% larger": ("llama", lambda: posenc_model("llama", "rope(theta=10010.0)"), 0),
    "llama, neighbours paired": (
        "llama",
        lambda: posenc_model("llama", "rope(pairing=interleaved)"),
        0,
    ),
    "llama, gate and up exchanged": ("llama", lambda: swapped("llama", "gate_", "up_"), 0),
    "llama, groups by turns": ("llama", regrouped, 0),
}


@pytest.mark.parametrize(("kind", "mutant", "shift"), MUTANTS.values(), ids=MUTANTS)
def test_the_tolerance_tells_a_small_departure_apart(kind, mutant, shift):
    expected = golden(kind)["logits"]
    logits = logits_of(mutant(), kind, shift)
    assert np.abs(logits - expected).max() > 5 * tolerance(kind, expected)


@pytest.mark.fast
def test_alibi_slopes_are_those_of_transformers():
    arrays = golden("alibi_slopes")
    assert set(arrays["heads"].tolist()) == {*range(1, 17), 20, 25}
    for heads in arrays["heads"].tolist():
        # Bloom rounds a base to float32 and raises it to the n-th power, n at most 17 here: n
        # roundings of the base and two of the power.
        np.testing.assert_allclose(
            alibi_slopes(heads), arrays[f"slopes_{heads}"], rtol=(17 + 2) * EPS
        )


# Sizes.


def abstract(name, encoding="wpe", context_length=1024, **changes):
    config = dataclasses.replace(preset(name), **changes)
    return nnx.eval_shape(lambda: Transformer(config, encoding, context_length))


SIZES = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.fast
@pytest.mark.parametrize("name", SIZES)
def test_gpt2_has_the_published_number_of_parameters(name):
    config = preset(name)
    m, layers = config.width, config.layers
    formula = layers * (12 * m**2 + 13 * m) + 2 * m + 50_257 * m + 1024 * m
    assert formula == SIZES[name]
    # All blocks are alike: two depths tell every other.
    one, two = (count_parameters(abstract(name, layers=n)) for n in (1, 2))
    assert one + (layers - 1) * (two - one) == SIZES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_gpt2_has_the_published_number_of_parameters_at_its_depth(name):
    assert count_parameters(abstract(name)) == SIZES[name]


@pytest.mark.fast
def test_gpt2_small_is_accounted_for_item_by_item():
    model = abstract("gpt2-small")
    _, parameters = split(model)
    sizes = {name: int(np.prod(value.shape)) for name, value in parameters.items()}

    def total(*beginnings):
        return sum(size for name, size in sizes.items() if name.startswith(beginnings))

    for n in range(12):
        block = f"blocks.{n}."
        assert total(block + "attention_norm.") == total(block + "mlp_norm.") == 1536
        qkv = [f"{block}attention.{name}." for name in ("query", "key", "value")]
        assert total(*qkv) == 1_771_776
        assert total(block + "attention.out.") == 590_592
        assert total(block + "mlp.up.") == 2_362_368
        assert total(block + "mlp.down.") == 2_360_064
        assert total(block) == 7_087_872
    assert total("blocks.") == 85_054_464
    assert total("final_norm.") == 1536
    assert total("embedding.") == 38_597_376
    assert total("encoding.") == 786_432
    assert sum(sizes.values()) == 124_439_808
    assert model.head is None


ACCOUNTS = {
    "wpe at 512": ({"context_length": 512}, 123_653_376 + 393_216),
    "wpe at 2048": ({"context_length": 2048}, 125_226_240),
    "wpe at 4096": ({"context_length": 4096}, 126_799_104),
    "wpe at 8192": ({"context_length": 8192}, 129_944_832),
    "nope": ({"encoding": "nope"}, 123_653_376),
    "rope": ({"encoding": "rope"}, 123_653_376),
    "alibi": ({"encoding": "alibi"}, 123_653_376),
    "sinusoidal": ({"encoding": "sinusoidal"}, 123_653_376),
    "padded vocabulary": ({"vocab_size": 50_304}, 124_439_808 + 36_096),
    "untied head": ({"tied_head": False}, 124_439_808 + 38_597_376),
}


@pytest.mark.parametrize(("changes", "expected"), ACCOUNTS.values(), ids=ACCOUNTS)
def test_gpt2_small_grows_by_what_is_changed(changes, expected):
    # The other eleven blocks know nothing of the change.
    assert count_parameters(abstract("gpt2-small", layers=1, **changes)) == (
        expected - 11 * 7_087_872
    )


# Initial weights.


@pytest.mark.fast
@pytest.mark.parametrize("layers", [2, 5])
def test_gpt2_initial_weights_have_the_released_spread(layers):
    config = dataclasses.replace(
        preset("gpt2-small"), vocab_size=1000, layers=layers, width=96, heads=4
    )
    _, parameters = split(Transformer(config, "wpe", 512, seed=0))
    for name, value in parameters.items():
        value = np.asarray(value, np.float64)
        if name.endswith(".bias"):
            assert not value.any(), name
            continue
        if name.endswith(".scale"):
            assert (value == 1).all(), name
            continue
        std = 0.02
        if name == "encoding.parts.0.table":
            std = 0.01
        elif name.endswith(("attention.out.kernel", "mlp.down.kernel")):
            std = 0.02 / (2 * layers) ** 0.5
        # Over n normal numbers a standard deviation errs by std / sqrt(2 n) and a mean by
        # std / sqrt(n): 5 of them, for some 40 arrays, is exceeded once in 20,000 seeds.
        assert abs(value.std() / std - 1) < 5 / (2 * value.size) ** 0.5, name
        assert abs(value.mean()) < 5 * std / value.size**0.5, name
        # Normal, not truncated: beyond 3 deviations lies a share of 0.0027.
        share = (np.abs(value) > 3 * std).mean()
        assert abs(share - 0.0027) < 5 * (0.0027 / value.size) ** 0.5, name
