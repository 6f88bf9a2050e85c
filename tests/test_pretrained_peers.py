"""GPT-2 read from and written for Hugging Face transformers, live and on random weights."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc
from posenc.encodings import sequential_positions
from posenc.generate import left_padded
from posenc.training import split

pytestmark = pytest.mark.peers

EPS = 2.0**-24  # unit roundoff of float32

# What two float32 computations of the same logits may differ by, absolute; the largest logit of
# every model here is above 4, so that this is less than 3e-5 of it.
ATOL = 1e-4

# What posenc's float32 logits may differ by from float64, in roundings of the largest logit: they
# do by up to 18 here and those of transformers by up to 35, and another CPU adds in another order.
ROUNDINGS = 36

VOCABULARY, CONTEXT, NEW = 211, 64, 24
PROMPTS = [[7, 200, 31, 5, 5, 118, 90], [150], [3, 9, 27, 81]]


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def spread(torch, model, kernels, positions, vectors):
    """Draw every weight anew with these deviations: norms' scales about 1, all others about 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            std = vectors if value.ndim == 1 else positions if "wpe" in name else kernels
            value.normal_(0, std, generator=generator)
            if ".ln_" in name and name.endswith("weight"):
                value += 1
    return model.eval()


def peer_model(torch, **changes):
    """Give a small GPT-2 with positions strong enough for greedy decoding to wander."""
    import transformers

    small = {"vocab_size": VOCABULARY, "n_positions": CONTEXT, "n_layer": 3, "n_embd": 48}
    # No token ends a text: both sides add as many.
    small |= {"n_head": 4, "bos_token_id": None, "eos_token_id": None}
    config = transformers.GPT2Config(**small | changes)
    return spread(torch, transformers.GPT2LMHeadModel(config), 0.3, 1.0, 0.1)


def ids_of(batch, length, vocabulary=VOCABULARY):
    return np.random.default_rng(0).integers(0, vocabulary, (batch, length), dtype=np.int32)


def peer_logits(torch, model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids).long()).logits.numpy()


@functools.partial(jax.jit, static_argnames="merge")
def forward(merge, parameters, ids, positions, segments):
    return merge(parameters)(ids, positions, segments)


def logits_of(model, ids):
    positions = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return np.asarray(forward(*split(model), ids, positions, np.ones_like(ids)))


# Logits.

KINDS = {
    "gpt2": {},
    "erf": {"activation_function": "gelu"},
    "narrow": {"n_inner": 40, "layer_norm_epsilon": 1e-3},
    "untied": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_what_transformers_saves_gives_its_logits(torch, tmp_path, changes):
    peer = peer_model(torch, **changes)
    peer.save_pretrained(tmp_path)
    ids = ids_of(2, CONTEXT)
    logits = logits_of(posenc.load_gpt2(tmp_path), ids)
    expected = peer_logits(torch, peer, ids)
    exact = peer_logits(torch, peer.double(), ids)
    assert exact.dtype == np.float64
    largest = np.abs(exact).max()
    assert largest > 4
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(logits, exact, rtol=0, atol=ROUNDINGS * EPS * largest)


def test_the_base_model_and_shards_are_read(torch, tmp_path):
    peer = peer_model(torch)
    ids = ids_of(1, 20)
    expected = peer_logits(torch, peer, ids)
    peer.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    peer.transformer.save_pretrained(tmp_path / "base")  # names without a prefix
    first = logits_of(posenc.load_gpt2(tmp_path / "shards"), ids)
    np.testing.assert_allclose(first, expected, rtol=0, atol=ATOL)
    np.testing.assert_array_equal(logits_of(posenc.load_gpt2(tmp_path / "base"), ids), first)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_read(torch, tmp_path, dtype):
    peer = peer_model(torch).to(getattr(torch, dtype))
    peer.save_pretrained(tmp_path)
    ids = ids_of(1, 20)
    expected = peer_logits(torch, peer.float(), ids)
    logits = logits_of(posenc.load_gpt2(tmp_path), ids)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=ATOL)


def test_logits_of_gpt2_at_full_size(torch, tmp_path):
    import transformers

    peer = spread(torch, transformers.GPT2LMHeadModel(transformers.GPT2Config()), 0.04, 0.04, 0.04)
    peer.save_pretrained(tmp_path)
    ids = ids_of(1, 32, 50_257)
    expected = peer_logits(torch, peer, ids)
    del peer
    model = posenc.load_gpt2(tmp_path)
    assert model.config == posenc.preset("gpt2-small")
    assert posenc.count_parameters(model) == 124_439_808
    assert np.abs(expected).max() > 4
    np.testing.assert_allclose(logits_of(model, ids), expected, rtol=0, atol=ATOL)


# Greedy decoding.


def peer_greedy(torch, model, prompts, use_cache):
    """Give new tokens ``[B, N]``, and how far ahead of the second each of them was."""
    tokens, segments = left_padded(prompts)
    with torch.no_grad():
        made = model.generate(
            torch.from_numpy(tokens).long(),
            attention_mask=torch.from_numpy(segments).long(),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=use_cache,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack(made.logits).topk(2).values
    return made.sequences[:, tokens.shape[1] :].numpy(), (best[..., 0] - best[..., 1]).numpy()


def greedy_without_cache(model, prompts):
    """Continue by a full forward pass for every token."""
    tokens, segments = left_padded(prompts)
    length = tokens.shape[1]
    merge, parameters = split(model)  # once: each gives a function that is compiled anew
    # Room for the new ones: padding, until they are there.
    tokens, segments = (np.pad(x, [(0, 0), (0, NEW)]) for x in (tokens, segments))
    for place in range(length, length + NEW):
        logits = forward(merge, parameters, tokens, sequential_positions(segments), segments)
        tokens[:, place] = np.asarray(logits)[:, place - 1].argmax(axis=-1)
        segments[:, place] = 1
    return tokens[:, length:]


@pytest.mark.parametrize("use_cache", [True, False], ids=["peer's cache", "no cache of the peer"])
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "left-padded"])
def test_greedy_decoding_token_for_token(torch, tmp_path, prompts, use_cache):
    peer = peer_model(torch)
    peer.save_pretrained(tmp_path)
    expected, ahead = peer_greedy(torch, peer, prompts, use_cache)
    assert expected.shape == (len(prompts), NEW)
    # No token is chosen by a rounding, and no row settles on one token.
    assert ahead.min() > 1e-3
    assert min(len(set(row)) for row in expected.tolist()) >= NEW // 2
    model = posenc.load_gpt2(tmp_path)
    np.testing.assert_array_equal(posenc.generate(model, prompts, NEW), expected)
    np.testing.assert_array_equal(greedy_without_cache(model, prompts), expected)


# What posenc writes.


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_transformers_loads_what_posenc_writes(torch, tmp_path, changes):
    import transformers

    peer = peer_model(torch, **changes)
    peer.save_pretrained(tmp_path / "theirs")
    model = posenc.load_gpt2(tmp_path / "theirs")
    posenc.save_gpt2(model, tmp_path / "ours")
    again, report = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert set(report) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    # The same bits in the same model: so the logits are the same bits.
    for name, value in peer.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    ids = ids_of(2, 30)
    np.testing.assert_array_equal(
        peer_logits(torch, again.eval(), ids), peer_logits(torch, peer, ids)
    )
    # And its config means the same to transformers, but for training and tokenizer.
    written = again.config.to_dict()
    assert written["dtype"] == "float32"
    training = {"resid_pdrop", "embd_pdrop", "attn_pdrop"}
    about_file = {"_name_or_path", "n_ctx", "dtype", "architectures"}
    assert {
        name: value
        for name, value in peer.config.to_dict().items()
        if name not in training | about_file and value != written[name]
    } == {}


def test_a_model_of_posenc_generates_in_transformers(torch, tmp_path):
    import transformers

    config = posenc.TransformerConfig(
        vocab_size=VOCABULARY,
        layers=2,
        width=32,
        heads=2,
        norm="layer",
        bias=True,
        activation="gelu_tanh",
        init_std=0.3,
    )
    model = posenc.Transformer(config, "wpe(init_std=1.0)", CONTEXT, seed=1)
    posenc.save_gpt2(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] is None
    peer = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    expected, ahead = peer_greedy(torch, peer, PROMPTS, use_cache=True)
    assert ahead.min() > 1e-3
    assert min(len(set(row)) for row in expected.tolist()) >= NEW // 2
    np.testing.assert_array_equal(posenc.generate(model, PROMPTS, NEW), expected)
