"""GPT-2's weights read and written; transformers itself is asked in test_pretrained_peers."""

import dataclasses
import json
import os
import pathlib
import pickle
import stat
import sys
import weakref

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from golden.weights import CONTEXT, LAYERS, VOCABULARY, posenc_model, to_posenc, tolerance, weights
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from test_golden import golden, logits_of

import posenc
from posenc.errors import UserError
from posenc.pretrained import gpt2_config, gpt2_layout, load_gpt2, save_gpt2
from posenc.training import split
from posenc.transformer import Transformer, preset

THEIRS = {
    "model_type": "gpt2",
    "n_layer": LAYERS,
    "n_embd": 12,
    "n_head": 3,
    "n_positions": CONTEXT,
    "vocab_size": VOCABULARY,
}


def bare(values):
    """Give weights the names that they have in the files of the hub."""
    return {name.removeprefix("transformer."): value for name, value in values.items()}


def write(folder, values, config=THEIRS, shards=0):
    """Write a folder as transformers does, whole or in shards, without posenc."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        safetensors.numpy.save_file(values, folder / "model.safetensors", {"format": "pt"})
        return folder
    places = {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        some = dict(list(values.items())[n::shards])
        safetensors.numpy.save_file(some, folder / file, {"format": "pt"})
        places |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_same_bits(parameters, expected):
    assert parameters.keys() == expected.keys()
    for name, value in parameters.items():
        value, other = np.asarray(value), np.asarray(expected[name])
        assert value.dtype == np.float32, name
        assert value.shape == other.shape, name
        np.testing.assert_array_equal(value.view(np.uint32), other.view(np.uint32), err_msg=name)


def refusal(source):
    with pytest.raises(UserError) as caught:
        load_gpt2(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Reading.


def masked(values):
    """Add what older files hold besides: masks, and the tied head."""
    mask = np.tril(np.ones((1, 1, CONTEXT, CONTEXT), np.float32))
    masks = {f"h.{n}.attn.bias": mask for n in range(LAYERS)}
    masks |= {f"h.{n}.attn.masked_bias": np.float32([-1e4]) for n in range(LAYERS)}
    return values | masks | {"lm_head.weight": values["wte.weight"].copy()}


FORMS = {
    "as saved": (lambda values: values, 0),
    "as on the hub": (lambda values: masked(bare(values)), 0),
    "in shards": (lambda values: values, 3),
    "in shards, as on the hub": (bare, 2),
}


@pytest.mark.fast
@pytest.mark.parametrize(("form", "shards"), FORMS.values(), ids=FORMS)
def test_every_weight_goes_to_its_place(tmp_path, form, shards):
    model = load_gpt2(str(write(tmp_path, form(weights("gpt2")), shards=shards)))
    assert_same_bits(split(model)[1], to_posenc("gpt2", weights("gpt2")))


@pytest.mark.parametrize("form", [lambda values: values, bare], ids=["as saved", "as on the hub"])
def test_a_file_gives_the_logits_of_transformers(tmp_path, form):
    model = posenc.load_gpt2(write(tmp_path, form(weights("gpt2"))))
    expected = golden("gpt2")["logits"]
    logits = logits_of(model, "gpt2")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance("gpt2", expected))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16], ids=["float16", "bfloat16"])
def test_half_precision_becomes_float32(tmp_path, dtype):
    halves = {name: value.astype(dtype) for name, value in weights("gpt2").items()}
    # Half precision is another number, or this would show nothing.
    rounded = {name: value.astype(np.float32) for name, value in halves.items()}
    name = "transformer.wte.weight"
    assert (rounded[name] != weights("gpt2")[name]).mean() > 0.9
    parameters = split(load_gpt2(str(write(tmp_path, halves))))[1]
    assert_same_bits(parameters, to_posenc("gpt2", rounded))


def test_an_untied_head_is_a_head_of_its_own(tmp_path):
    head = weights("llama")["lm_head.weight"][:, :12].copy()
    values = weights("gpt2") | {"lm_head.weight": head}
    model = load_gpt2(write(tmp_path, values, THEIRS | {"tie_word_embeddings": False}))
    assert not model.config.tied_head
    assert_same_bits(split(model)[1], to_posenc("gpt2", weights("gpt2")) | {"head": head})


@pytest.mark.fast
def test_no_second_copy_of_the_model_is_held(tmp_path, monkeypatch):
    read, made, alive = posenc.pretrained._read, [], []

    def watched(stored):
        alive.append(sum(array() is not None for array in made))
        value = read(stored)
        made.append(weakref.ref(value))
        return value

    monkeypatch.setattr(posenc.pretrained, "_read", watched)
    load_gpt2(write(tmp_path, weights("gpt2")))
    assert len(made) == len(weights("gpt2")) == 28
    assert max(alive) <= 2


# What is the same in the four config.json of the hub.
RELEASED = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
SIZES = {
    "gpt2-small": {"n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt2-medium": {"n_embd": 1024, "n_head": 16, "n_layer": 24, "n_special": 0},
    "gpt2-large": {"n_embd": 1280, "n_head": 20, "n_layer": 36, "n_special": 0},
    "gpt2-xl": {"n_embd": 1600, "n_head": 25, "n_layer": 48, "output_past": True},
}


@pytest.mark.fast
@pytest.mark.parametrize("name", SIZES)
def test_the_released_sizes_are_the_presets(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | SIZES[name]))
    assert gpt2_config(tmp_path) == (preset(name), 1024)


@pytest.mark.fast
def test_every_key_that_shapes_the_model_is_read(tmp_path):
    changes = {
        "n_inner": 20,
        "layer_norm_epsilon": 1e-6,
        "activation_function": "gelu",
        "tie_word_embeddings": False,
        "reorder_and_upcast_attn": True,  # harmless: it is the order of two exact steps
        "scale_attn_weights": True,
        "resid_pdrop": 0.3,
    }
    (tmp_path / "config.json").write_text(json.dumps(THEIRS | changes))
    expected = dataclasses.replace(
        preset("gpt2-small"),
        vocab_size=VOCABULARY,
        layers=LAYERS,
        width=12,
        heads=3,
        mlp_width=20,
        norm_eps=1e-6,
        activation="gelu",
        tied_head=False,
    )
    assert gpt2_config(tmp_path) == (expected, CONTEXT)
    for changes in (
        {"n_inner": None},
        {"n_inner": 48},
        {"activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "gelu_new"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(THEIRS | changes))
        config, _ = gpt2_config(tmp_path)
        assert (config.mlp_width, config.activation) == (0, "gelu_tanh")


# Refusals of a config.

ABSENT = object()
COUNTS = "whole numbers from 1"
BAD_KEYS = [
    ("model_type", "llama", 'is "llama"; posenc supports "gpt2" only'),
    ("model_type", ABSENT, 'is missing; posenc supports "gpt2" only'),
    ("scale_attn_weights", False, "is false; posenc supports true only"),
    ("scale_attn_by_inverse_layer_idx", True, "is true; posenc supports false only"),
    ("add_cross_attention", True, "is true; posenc supports false only"),
    ("n_layer", ABSENT, f"is missing; posenc supports {COUNTS}"),
    ("n_embd", "12", f'is "12"; posenc supports {COUNTS}'),
    ("n_positions", 0, f"is 0; posenc supports {COUNTS}"),
    ("n_head", True, f"is true; posenc supports {COUNTS}"),
    ("vocab_size", 17.0, f"is 17.0; posenc supports {COUNTS}"),
    ("n_inner", -1, f"is -1; posenc supports {COUNTS}, and null for 4 n_embd"),
    ("n_head", 5, "is 5; posenc supports divisors of n_embd, which is 12"),
    (
        "activation_function",
        "relu",
        'is "relu"; posenc supports gelu_new, gelu_pytorch_tanh, gelu',
    ),
    (
        "activation_function",
        ["gelu"],
        'is ["gelu"]; posenc supports gelu_new, gelu_pytorch_tanh, gelu',
    ),
    ("layer_norm_epsilon", 0, "is 0; posenc supports numbers above 0 and below 1"),
    ("layer_norm_epsilon", float("nan"), "is NaN; posenc supports numbers above 0 and below 1"),
    ("tie_word_embeddings", "no", 'is "no"; posenc supports true and false'),
]


@pytest.mark.fast
@pytest.mark.parametrize(("key", "value", "message"), BAD_KEYS)
def test_a_config_that_posenc_does_not_compute_is_refused(tmp_path, key, value, message):
    config = {name: kept for name, kept in (THEIRS | {key: value}).items() if kept is not ABSENT}
    write(tmp_path, weights("gpt2"), config)
    assert refusal(tmp_path) == f"{tmp_path / 'config.json'}: {key} {message}"


@pytest.mark.fast
@pytest.mark.parametrize("content", ["", "{", "[]", '"gpt2"', "[" * 100_000, b"\xff\xfe"])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, content):
    write(tmp_path, weights("gpt2"))
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "config.json").write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'config.json'} cannot be read: ")
    assert message.endswith("; fetch or write it again")


@pytest.mark.fast
def test_a_folder_without_a_config_is_refused(tmp_path):
    assert refusal(tmp_path) == (
        f"{tmp_path} has no config.json: give a folder that save_pretrained or save_gpt2 wrote"
    )


# Refusals of weights. `{file}` is model.safetensors.

DESCRIBED = "parameter of the GPT-2 that config.json describes"
FC = "transformer.h.1.mlp.c_fc.weight"


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


BAD_WEIGHTS = {
    "a vocabulary of another size": (
        lambda v: v,
        {"vocab_size": 18},
        "{file}: transformer.wte.weight has shape (17, 12), where config.json asks for (18, 12)",
    ),
    "another context length": (
        bare,
        {"n_positions": 15},
        "{file}: wpe.weight has shape (16, 12), where config.json asks for (15, 12)",
    ),
    "a Linear's kernel": (
        lambda v: v | {FC: v[FC].T.copy()},
        {},
        "{file}: " + FC + " has shape (48, 12), where config.json asks for (12, 48)",
    ),
    "one bias for three": (
        lambda v: v | {"transformer.h.0.attn.c_attn.bias": np.zeros(12, np.float32)},
        {},
        "{file}: transformer.h.0.attn.c_attn.bias has shape (12,), where config.json asks for "
        "(36,)",
    ),
    "another rank": (
        lambda v: v | {"transformer.ln_f.bias": np.zeros((1, 12), np.float32)},
        {},
        "{file}: transformer.ln_f.bias has shape (1, 12), where config.json asks for (12,)",
    ),
    "a tied head of another shape": (
        lambda v: v | {"lm_head.weight": np.zeros((16, 12), np.float32)},
        {},
        "{file}: lm_head.weight has shape (16, 12), where config.json asks for (17, 12)",
    ),
    "a missing parameter": (
        lambda v: without(v, FC),
        {},
        "{folder} lacks " + FC + f" of shape (12, 48), a {DESCRIBED}",
    ),
    "a missing parameter, as on the hub": (
        lambda v: bare(without(v, FC)),
        {},
        "{folder} lacks h.1.mlp.c_fc.weight of shape (12, 48), a " + DESCRIBED,
    ),
    "a missing head": (
        lambda v: v,
        {"tie_word_embeddings": False},
        "{folder} lacks lm_head.weight of shape (17, 12), a " + DESCRIBED,
    ),
    "a missing layer": (
        lambda v: v,
        {"n_layer": LAYERS + 1},
        "{folder} lacks transformer.h.2.attn.c_attn.weight of shape (12, 36) (and 11 more), a "
        + DESCRIBED,
    ),
    "no parameter at all": (
        lambda v: {},
        {},
        "{folder} lacks wte.weight of shape (17, 12) (and 27 more), a " + DESCRIBED,
    ),
    "a layer too many": (
        lambda v: v,
        {"n_layer": LAYERS - 1},
        "{file}: transformer.h.1.attn.c_attn.bias of shape (36,) (and 11 more) is no " + DESCRIBED,
    ),
    "an unknown parameter": (
        lambda v: v | {"transformer.h.0.adapter.weight": np.zeros((2, 3), np.float32)},
        {},
        "{file}: transformer.h.0.adapter.weight of shape (2, 3) is no " + DESCRIBED,
    ),
    "a parameter twice": (
        lambda v: v | {"wte.weight": v["transformer.wte.weight"].copy()},
        {},
        "{file}: wte.weight is there twice, the first time as transformer.wte.weight in "
        "model.safetensors: write the model again",
    ),
    "float64": (
        lambda v: v | {FC: v[FC].astype(np.float64)},
        {},
        "{file}: " + FC + " is F64; posenc reads F32, F16 and BF16",
    ),
    "a tied head that is none": (
        lambda v: v | {"lm_head.weight": np.nextafter(v["transformer.wte.weight"], np.float32(9))},
        {},
        "{file}: lm_head.weight differs from transformer.wte.weight, while config.json ties them: "
        "set its tie_word_embeddings to false for a head of its own",
    ),
    "a tied head of another precision": (
        lambda v: v | {"lm_head.weight": v["transformer.wte.weight"].astype(np.float16)},
        {},
        "{file}: lm_head.weight differs from transformer.wte.weight, while config.json ties them: "
        "set its tie_word_embeddings to false for a head of its own",
    ),
}


@pytest.mark.parametrize(("change", "config", "message"), BAD_WEIGHTS.values(), ids=BAD_WEIGHTS)
def test_wrong_or_partial_weights_are_refused(tmp_path, monkeypatch, change, config, message):
    write(tmp_path, change(weights("gpt2")), THEIRS | config)
    if "differs" not in message:  # which the header cannot tell
        monkeypatch.setattr("posenc.pretrained._read", lambda stored: pytest.fail("it was read"))
    expected = message.format(file=tmp_path / "model.safetensors", folder=tmp_path)
    assert refusal(tmp_path) == expected


@pytest.mark.fast
@pytest.mark.parametrize("shards", [0, 2], ids=["whole", "shards"])
@pytest.mark.parametrize("kept", [0, 7, 300, -1], ids=["empty", "length", "header", "last byte"])
def test_a_damaged_file_is_refused(tmp_path, shards, kept):
    write(tmp_path, weights("gpt2"), shards=shards)
    path = max(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(tmp_path)
    assert message.startswith(f"{path} cannot be read (")
    assert message.endswith("): it is damaged or cut short, fetch or write it again")


@pytest.mark.fast
def test_a_damaged_index_is_refused(tmp_path):
    write(tmp_path, weights("gpt2"), shards=2)
    index = tmp_path / "model.safetensors.index.json"
    elsewhere = {"weight_map": {"wte.weight": "../model.safetensors"}}
    contents = ["", "{}", "[]", '{"weight_map": 1}', '{"weight_map": {"a": [1]}}']
    for content in [*contents, '{"weight_map": {}}', json.dumps(elsewhere)]:
        index.write_text(content)
        message = refusal(tmp_path)
        assert message.startswith(f"{index} cannot be read: ")
        assert message.endswith("; fetch or write it again")


@pytest.mark.fast
def test_a_missing_or_repeated_shard_is_refused(tmp_path):
    write(tmp_path, weights("gpt2"), shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    name = min(list(weights("gpt2"))[::2])
    assert refusal(tmp_path) == (
        f"{second}: {name} is there twice, the first time as {name} in {first.name}: write the "
        "model again"
    )
    second.unlink()
    assert refusal(tmp_path) == (
        f"{tmp_path} lacks {second.name}, which model.safetensors.index.json names: fetch it again"
    )


class Trap:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_never_read(tmp_path, name):
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))
    pickle.loads(trap)
    sprung.unlink()  # it was there: the trap works
    (tmp_path / "config.json").write_text(json.dumps(THEIRS))
    (tmp_path / name).write_bytes(trap)
    message = refusal(tmp_path)
    assert not sprung.exists()
    if name == "pytorch_model.bin":
        assert message == (
            f"{tmp_path} has no model.safetensors, only pytorch_model.bin, a pickle, which runs "
            "whatever code it holds when it is read; if you trust it, load it in "
            "transformers and save_pretrained it to another folder, as safetensors"
        )
    else:
        assert message.startswith(f"{tmp_path / name} cannot be read (")


@pytest.mark.fast
def test_a_pickled_shard_is_never_read(tmp_path):
    sprung = tmp_path / "sprung"
    (tmp_path / "config.json").write_text(json.dumps(THEIRS))
    (tmp_path / "shard.bin").write_bytes(pickle.dumps(Trap(sprung)))
    index = {"weight_map": {"wte.weight": "shard.bin"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(tmp_path).startswith(f"{tmp_path / 'shard.bin'} cannot be read (")
    assert not sprung.exists()


@pytest.mark.fast
def test_a_folder_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(THEIRS))
    assert refusal(tmp_path) == (
        f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json: give a folder "
        "that save_pretrained or save_gpt2 wrote"
    )


# The hub.


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Answer for the network: give a folder and note what was asked for."""
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append((repo_id, options))
        return str(write(tmp_path / "fetched", weights("gpt2")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-small", "openai-community/gpt2"),
        ("gpt2-medium", "openai-community/gpt2-medium"),
        ("gpt2-large", "openai-community/gpt2-large"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("someone/some.model", "someone/some.model"),
    ],
)
def test_a_name_is_fetched_from_the_hub(hub, name, repository):
    parameters = split(load_gpt2(name))[1]
    assert_same_bits(parameters, to_posenc("gpt2", weights("gpt2")))
    patterns = ["config.json", "*.safetensors", "model.safetensors.index.json"]
    assert hub == [(repository, {"allow_patterns": patterns})]


@pytest.mark.fast
def test_a_folder_comes_before_the_hub(hub, tmp_path):
    for name in ("gpt2", "someone/model"):
        write(tmp_path / name, weights("gpt2"))
        load_gpt2(name)
    assert hub == []


@pytest.mark.fast
def test_what_looks_like_a_path_is_not_fetched(hub, tmp_path):
    for source in ("./gpt2", "../gpt2", "/gpt2/small", "~/gpt2", "a/b/c", "a\\b"):
        assert refusal(source) == f"there is no folder {source}: give one that exists"
    assert refusal(pathlib.Path("gpt2")) == "there is no folder gpt2: give one that exists"
    (tmp_path / "here.safetensors").touch()
    assert refusal("here.safetensors") == (
        "here.safetensors is a file: give the folder that it lies in"
    )
    assert refusal("gpt2-smal") == (
        "'gpt2-smal' is neither a folder nor a model of the hub: did you mean gpt2-small or "
        "gpt2-xl or gpt2-large?; others are given as owner/name"
    )
    assert refusal("").startswith("'' is neither a folder nor a model of the hub: known: gpt2, ")
    assert hub == []


@pytest.mark.fast
@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no snapshot\nand no connection"),
        ConnectionError("no snapshot\n\n  and no connection"),
        RuntimeError("no snapshot\nand no connection"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_no_network_is_one_line(hub, monkeypatch, error):
    def snapshot_download(repo_id, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert refusal("gpt2") == (
        "openai-community/gpt2 could not be fetched from the Hugging Face hub "
        f"({type(error).__name__}: no snapshot and no connection); check the name and the network, "
        "or give a local folder"
    )


@pytest.mark.fast
def test_a_missing_package_is_one_line(hub, tmp_path, monkeypatch):
    way = "is not installed: pip install 'posenc[pretrained]'"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refusal("gpt2") == f"the package huggingface_hub {way}, or give a local folder"
    write(tmp_path / "local", weights("gpt2"))
    load_gpt2(tmp_path / "local")  # which needs no hub
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert refusal(tmp_path / "local") == f"the package safetensors {way}"
    with pytest.raises(UserError) as caught:
        save_gpt2(posenc_model("gpt2"), tmp_path / "out")
    assert str(caught.value) == f"the package safetensors {way}"
    assert not (tmp_path / "out").exists()


# Writing.


def stored(folder):
    with safe_open(folder / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping


@pytest.mark.fast
def test_what_is_written_is_what_transformers_has(tmp_path):
    posenc.save_gpt2(posenc_model("gpt2"), str(tmp_path / "new" / "folder"))
    folder = tmp_path / "new" / "folder"
    assert_same_bits(stored(folder), weights("gpt2"))
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((folder / "config.json").read_text()) == THEIRS | {
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": CONTEXT,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,  # 50256 is no token of 17
        "eos_token_id": None,
    }


FORMS_WRITTEN = {
    "gpt2": {},
    "untied": {"tied_head": False},
    "narrow": {"mlp_width": 20},
    "erf": {"activation": "gelu", "norm_eps": 1e-6},
    "kv heads as many as heads": {"kv_heads": 3},
}


@pytest.mark.parametrize("changes", FORMS_WRITTEN.values(), ids=FORMS_WRITTEN)
def test_a_round_trip_changes_no_bit(tmp_path, changes):
    config = dataclasses.replace(
        preset("gpt2-small"), vocab_size=VOCABULARY, layers=LAYERS, width=12, heads=3, **changes
    )
    merge, parameters = split(Transformer(config, "wpe", CONTEXT, seed=3))
    # Numbers that arithmetic would not leave as they are, in every parameter.
    odd = np.array([-0.0, 1e-40, np.inf, np.nan], np.float32)
    odd[3:].view(np.uint32)[:] |= 0x1234
    values = {}
    for name, value in parameters.items():
        values[name] = np.array(value)
        values[name].flat[: odd.size] = odd
    save_gpt2(merge(values), tmp_path)
    again = load_gpt2(tmp_path)
    assert_same_bits(split(again)[1], values)
    assert again.config == dataclasses.replace(config, kv_heads=0)
    assert again.encoding.max_position == CONTEXT
    # And what is read can be written: the same files.
    save_gpt2(again, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.fast
def test_the_layout_names_every_parameter_once():
    for tied in (True, False):
        config = dataclasses.replace(
            preset("gpt2-small"), vocab_size=17, layers=3, width=12, heads=3, tied_head=tied
        )
        named = [name for ours in gpt2_layout(config).values() for name in ours]
        parameters = split(Transformer(config, "wpe", 4))[1]
        assert len(named) == len(set(named))
        assert set(named) == set(parameters)


@pytest.mark.fast
def test_a_longer_table_is_written_as_it_is(tmp_path):
    from posenc.encodings.registry import Part

    model = posenc_model("gpt2")
    model.encoding.extend(Part("wrap"), 24)
    save_gpt2(model, tmp_path)
    assert gpt2_config(tmp_path)[1] == 24
    table = weights("gpt2")["transformer.wpe.weight"]
    longer = np.concatenate([table, table[:8]])
    np.testing.assert_array_equal(stored(tmp_path)["transformer.wpe.weight"], longer)


@pytest.mark.fast
def test_the_end_of_a_text_is_that_of_gpt2s_vocabulary(tmp_path):
    config = dataclasses.replace(
        preset("gpt2-small"), layers=1, width=2, heads=1, dropout=0.25, init_std=0.5
    )
    save_gpt2(Transformer(config, "wpe", 4), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["bos_token_id"] == written["eos_token_id"] == 50_256
    assert written["embd_pdrop"] == written["resid_pdrop"] == 0.25
    assert written["initializer_range"] == 0.5
    # What matters in training alone is not read.
    assert load_gpt2(tmp_path).config == dataclasses.replace(config, dropout=0.0, init_std=0.02)


def of(encoding="wpe", **changes):
    config = dataclasses.replace(
        preset("gpt2-small"), vocab_size=17, layers=2, width=12, heads=2, **changes
    )
    return Transformer(config, encoding, 8)


OTHER_FORMS = {
    "norm is rms: GPT-2's form has layer": lambda: of(norm="rms"),
    "bias is False: GPT-2's form has True": lambda: of(bias=False),
    "activation is swiglu: GPT-2's form has gelu_tanh or gelu": lambda: of(activation="swiglu"),
    "qk_norm is True: GPT-2's form has False": lambda: of(qk_norm=True),
    "kv_heads is 1: GPT-2's form has as many as heads": lambda: of(kv_heads=1),
    "sharing is groups(copies=8): GPT-2's form has all": lambda: of(sharing="groups(copies=8)"),
    "encoding is rope: GPT-2's form has wpe and nothing else": lambda: of("rope"),
    "encoding is wpe+rope: GPT-2's form has wpe and nothing else": lambda: of("wpe+rope"),
    "encoding is wpe+nope: GPT-2's form has wpe and nothing else": lambda: of("wpe,nope"),
}


@pytest.mark.parametrize(("message", "model"), OTHER_FORMS.items(), ids=OTHER_FORMS)
def test_another_form_is_not_written(tmp_path, message, model):
    with pytest.raises(UserError) as caught:
        save_gpt2(model(), tmp_path / "out")
    assert str(caught.value) == f"{message}, so this is not written"
    assert not (tmp_path / "out").exists()


@pytest.mark.fast
@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json"]
)
def test_nothing_is_written_over(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError) as caught:
        save_gpt2(posenc_model("gpt2"), tmp_path)
    assert str(caught.value) == f"{tmp_path} already holds {name}: choose another folder"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.fast
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        pathlib.Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", full)
        with pytest.raises(UserError) as caught:
            save_gpt2(posenc_model("gpt2"), tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} could not be written: [Errno 28] No space left on device; make room or choose "
        "another folder"
    )
    assert list(tmp_path.iterdir()) == []
    save_gpt2(posenc_model("gpt2"), tmp_path)  # the same again, with room
    assert_same_bits(stored(tmp_path), weights("gpt2"))


@pytest.mark.fast
def test_others_may_read_what_the_umask_lets_them(tmp_path):
    before = os.umask(0o027)
    try:
        save_gpt2(posenc_model("gpt2"), tmp_path)
    finally:
        os.umask(before)
    for name in ("config.json", "model.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
