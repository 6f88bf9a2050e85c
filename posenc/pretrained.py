"""GPT-2's weights in the format of Hugging Face transformers, in and out.

A folder holds ``config.json`` and ``model.safetensors``, or shards of it and their index. Only
safetensors is read: a pickle runs whatever code it holds. Let M denote the model width.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.checkpoints import write_json
from posenc.encodings.absolute import LearnedAbsolute
from posenc.encodings.registry import nearest
from posenc.errors import UserError, make_folder
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig, preset

# How GPT-2 is told where a token stands.
ENCODING = "wpe"

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Where the hub keeps the released weights.
HUB = {
    "gpt2": "openai-community/gpt2",
    "gpt2-small": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}

# Their activation -> posenc's; of two that are the same, the first is written.
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}

# What would change the forward pass, and the one value that posenc computes. The released files
# leave out all but the first.
FIXED = {
    "model_type": "gpt2",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

# Every name below a block. Kernels are [inputs, outputs] there as here (a Conv1D, not a Linear);
# several of posenc's stand side by side on the last axis of one of theirs.
NORMS = {"ln_1": "attention_norm", "ln_2": "mlp_norm"}
PROJECTIONS = {
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.out",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}

# Buffers that older files keep beside the parameters: the causal mask, and what it masks with.
_MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

_PREFIX, _HEAD = "transformer.", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A parameter as the header of a file describes it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def load_gpt2(source: str | Path) -> Transformer:
    """Read a GPT-2 that transformers or ``save_gpt2`` wrote, as a model with the encoding ``wpe``.

    Parameters become float32. What matters in training alone (dropout, initialisation) is not
    read. Everything is checked, names and shapes included, before the first weight is read.

    Args:
        source: a folder; or a model of the Hugging Face hub, which is fetched once: ``owner/name``,
            or ``gpt2-small``, ``gpt2-medium``, ``gpt2-large`` or ``gpt2-xl`` as released.

    Raises:
        UserError: the source cannot be found or fetched, is damaged, or is no GPT-2.
    """
    folder = _folder(source)
    config, context_length = gpt2_config(folder)
    stored = _headers(_weight_files(folder))
    layout = gpt2_layout(config)
    merge, abstract = split(nnx.eval_shape(lambda: Transformer(config, ENCODING, context_length)))
    _check(stored, _shapes(layout, abstract), folder)
    if config.tied_head and _HEAD in stored:
        _check_tied(stored[_HEAD], stored["wte.weight"])
    parameters: dict[str, jax.Array] = {}
    # One at a time, so that what exists twice is a single parameter.
    for name, ours in layout.items():
        pieces = np.split(_read(stored[name]), len(ours), axis=-1)
        parameters |= {
            own: jnp.array(piece, jnp.float32) for own, piece in zip(ours, pieces, strict=True)
        }
    return merge(parameters)


def save_gpt2(model: Transformer, folder: str | Path) -> None:
    """Write a model of GPT-2's form so that transformers' ``GPT2LMHeadModel`` loads it.

    Raises:
        UserError: the model has another form, or the folder holds a model or cannot be written.
    """
    folder = Path(folder)
    _check_form(model)
    for name in (WEIGHTS, INDEX, CONFIG):
        if (folder / name).exists():
            raise UserError(f"{folder} already holds {name}: choose another folder")
    safetensors, numpy_format = _needed("safetensors"), _needed("safetensors.numpy")
    _, parameters = split(model)
    tensors = {
        name if name == _HEAD else _PREFIX + name: np.ascontiguousarray(
            np.concatenate([parameters[own] for own in ours], axis=-1)
            if len(ours) > 1
            else parameters[ours[0]]
        )
        for name, ours in gpt2_layout(model.config).items()
    }
    make_folder(folder)
    part = folder / f".{WEIGHTS}.{os.getpid()}.part"
    try:
        numpy_format.save_file(tensors, part, metadata={"format": "pt"})
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        write_json(folder / CONFIG, _their_config(model))
        # safetensors makes a file that its owner alone may read, whatever the umask says.
        shutil.copymode(folder / CONFIG, part)
        os.replace(part, folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder} could not be written: {error}; make room or choose another folder"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def gpt2_config(folder: Path) -> tuple[TransformerConfig, int]:
    """Read the shape of a GPT-2, and its context length, from a folder's ``config.json``.

    Raises:
        UserError: there is none, it cannot be read, or it asks for what posenc does not compute.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {CONFIG}: give a folder that save_pretrained or save_gpt2 wrote"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; fetch or write it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} cannot be read: it holds no object; fetch or write it again")

    def refuse(key: str, supported: str) -> UserError:
        given = f"is {json.dumps(values[key])}" if key in values else "is missing"
        return UserError(f"{path}: {key} {given}; posenc supports {supported}")

    for key, only in FIXED.items():
        if values.get(key, None if key == "model_type" else only) != only:
            raise refuse(key, f"{json.dumps(only)} only")
    for key in ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"):
        if type(values.get(key)) is not int or values[key] < 1:
            raise refuse(key, "whole numbers from 1")
    width, inner = values["n_embd"], values.get("n_inner")
    if inner is not None and (type(inner) is not int or inner < 1):
        raise refuse("n_inner", "whole numbers from 1, and null for 4 n_embd")
    eps = values.get("layer_norm_epsilon", 1e-5)
    if type(eps) not in (int, float) or not 0 < eps < 1:
        raise refuse("layer_norm_epsilon", "numbers above 0 and below 1")
    activation = values.get("activation_function", "gelu_new")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise refuse("activation_function", ", ".join(ACTIVATIONS))
    tied = values.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise refuse("tie_word_embeddings", "true and false")
    if width % values["n_head"]:
        raise refuse("n_head", f"divisors of n_embd, which is {width}")
    config = dataclasses.replace(
        preset("gpt2-small"),
        vocab_size=values["vocab_size"],
        layers=values["n_layer"],
        width=width,
        heads=values["n_head"],
        mlp_width=0 if inner in (None, 4 * width) else inner,
        norm_eps=float(eps),
        activation=ACTIVATIONS[activation],  # type: ignore[arg-type]
        tied_head=tied,
    )
    return config, values["n_positions"]


def gpt2_layout(config: TransformerConfig) -> dict[str, tuple[str, ...]]:
    """Give transformers' names, without ``transformer.``, each with those of posenc it holds.

    Several are split from one, equally, on its last axis.
    """
    names: dict[str, tuple[str, ...]] = {
        "wte.weight": ("embedding.embedding",),
        "wpe.weight": ("encoding.parts.0.table",),
    }
    norms = {"ln_f": "final_norm"}
    for n in range(config.layers):
        norms |= {f"h.{n}.{theirs}": f"blocks.{n}.{ours}" for theirs, ours in NORMS.items()}
        for theirs, ours in PROJECTIONS.items():
            for part, own in (("weight", "kernel"), ("bias", "bias")):
                names[f"h.{n}.{theirs}.{part}"] = tuple(f"blocks.{n}.{o}.{own}" for o in ours)
    for theirs, norm in norms.items():
        names |= {f"{theirs}.weight": (f"{norm}.scale",), f"{theirs}.bias": (f"{norm}.bias",)}
    return names if config.tied_head else names | {_HEAD: ("head",)}


def _needed(package: str, otherwise: str = "") -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise UserError(
            f"the package {name} is not installed: pip install 'posenc[pretrained]'{otherwise}"
        ) from None


def _folder(source: str | Path) -> Path:
    """Give the local folder of a source, fetched if need be."""
    path = Path(source)
    if source != "" and path.is_dir():
        return path
    if source != "" and path.exists():
        raise UserError(f"{source} is a file: give the folder that it lies in")
    if (
        isinstance(source, Path)
        or source.startswith((".", "/", "~"))
        or source.count("/") > 1
        or "\\" in source
    ):
        raise UserError(f"there is no folder {source}: give one that exists")
    if source not in HUB and "/" not in source:
        raise UserError(
            f"{source!r} is neither a folder nor a model of the hub: {nearest(source, HUB)}; "
            "others are given as owner/name"
        )
    return _fetch(HUB.get(source, source))


def _fetch(name: str) -> Path:
    hub = _needed("huggingface_hub", ", or give a local folder")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=[CONFIG, "*.safetensors", INDEX]))
    # A network fails in many ways, each with an exception of its own, and no two releases of the
    # package agree on them.
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{name} could not be fetched from the Hugging Face hub ({why}); check the name and "
            "the network, or give a local folder"
        ) from error


def _weight_files(folder: Path) -> list[Path]:
    """Give the safetensors files of a folder: the whole, or the shards that an index names."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.is_file():
        kinds = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
        pickles = sorted(path.name for kind in kinds for path in folder.glob(kind))
        if pickles:
            raise UserError(
                f"{folder} has no {WEIGHTS}, only {pickles[0]}, a pickle, which runs whatever code "
                "it holds when it is read; if you trust it, load it in transformers and "
                "save_pretrained it to another folder, as safetensors"
            )
        raise UserError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}: give a folder that save_pretrained or "
            "save_gpt2 wrote"
        )
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        # Files of this folder, not of any other.
        if not shards or any(Path(name).name != name for name in shards):
            raise ValueError("its weight_map must name files of the folder")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} cannot be read: {error}; fetch or write it again") from None
    for name in shards:
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which {INDEX} names: fetch it again")
    return [folder / name for name in shards]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    safetensors = _needed("safetensors")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged or cut short, fetch or write it again"
        ) from None


def _headers(files: list[Path]) -> dict[str, _Stored]:
    """Read what the files hold, by name without the prefix; masks are left out."""
    stored: dict[str, _Stored] = {}
    for path in files:
        with _opened(path) as file:
            for name in sorted(file.keys()):
                short = name.removeprefix(_PREFIX)
                if _MASK.fullmatch(short):
                    continue
                if short in stored:
                    first = stored[short]
                    raise UserError(
                        f"{path}: {name} is there twice, the first time as {first.name} in "
                        f"{first.file.name}: write the model again"
                    )
                part = file.get_slice(name)
                stored[short] = _Stored(path, name, tuple(part.get_shape()), part.get_dtype())
    return stored


def _shapes(
    layout: dict[str, tuple[str, ...]], abstract: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Give the shape that each of transformers' parameters must have."""
    shapes = {}
    for name, ours in layout.items():
        *outer, last = abstract[ours[0]].shape
        shapes[name] = (*outer, last * len(ours))
    return shapes


def _check(stored: dict[str, _Stored], shapes: dict[str, tuple[int, ...]], folder: Path) -> None:
    def and_more(names: list[str]) -> str:
        return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

    # A tied head may be written as well.
    known = {_HEAD: shapes["wte.weight"]} | shapes
    if unexpected := [name for name in stored if name not in known]:
        first = stored[unexpected[0]]
        raise UserError(
            f"{first.file}: {first.name} of shape {first.shape}{and_more(unexpected)} is no "
            f"parameter of the GPT-2 that {CONFIG} describes"
        )
    if missing := [name for name in shapes if name not in stored]:
        prefixed = any(own.name.startswith(_PREFIX) for own in stored.values())
        name = _PREFIX + missing[0] if prefixed and missing[0] != _HEAD else missing[0]
        raise UserError(
            f"{folder} lacks {name} of shape {shapes[missing[0]]}{and_more(missing)}, a parameter "
            f"of the GPT-2 that {CONFIG} describes"
        )
    for name, own in stored.items():
        if own.shape != known[name]:
            raise UserError(
                f"{own.file}: {own.name} has shape {own.shape}, where {CONFIG} asks for "
                f"{known[name]}"
            )
        if own.dtype not in ("F32", "F16", "BF16"):
            raise UserError(
                f"{own.file}: {own.name} is {own.dtype}; posenc reads F32, F16 and BF16"
            )


def _check_tied(head: _Stored, embedding: _Stored) -> None:
    # As bytes, so that a NaN is equal to itself.
    same = head.dtype == embedding.dtype and np.array_equal(
        _read(head).view(np.uint8), _read(embedding).view(np.uint8)
    )
    if not same:
        raise UserError(
            f"{head.file}: {head.name} differs from {embedding.name}, while {CONFIG} ties them: "
            "set its tie_word_embeddings to false for a head of its own"
        )


def _read(stored: _Stored) -> np.ndarray:
    with _opened(stored.file) as file:
        return file.get_tensor(stored.name)


def _check_form(model: Transformer) -> None:
    config, parts = model.config, list(model.encoding.parts)
    only_wpe = len(parts) == 1 and type(parts[0]) is LearnedAbsolute
    names = "+".join(part.name for part in parts)
    for field, value, fits, form in (
        ("norm", config.norm, config.norm == "layer", "layer"),
        ("bias", config.bias, config.bias, "True"),
        (
            "activation",
            config.activation,
            config.activation in ACTIVATIONS.values(),
            "gelu_tanh or gelu",
        ),
        ("qk_norm", config.qk_norm, not config.qk_norm, "False"),
        ("kv_heads", config.kv_heads, config.kv_heads in (0, config.heads), "as many as heads"),
        ("sharing", config.sharing, config.sharing == "all", "all"),
        ("encoding", names, only_wpe, "wpe and nothing else"),
    ):
        if not fits:
            raise UserError(f"{field} is {value}: GPT-2's form has {form}, so this is not written")


def _their_config(model: Transformer) -> dict[str, Any]:
    config = model.config
    rows = model.encoding.parts[0].max_position
    # The end of a text in GPT-2's vocabulary; another vocabulary's is the tokenizer's to say.
    end = 50_256 if config.vocab_size > 50_256 else None
    return FIXED | {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": rows,
        "n_ctx": rows,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": None if config.inner_width == 4 * config.width else config.inner_width,
        "activation_function": next(k for k, v in ACTIVATIONS.items() if v == config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.init_std,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": end,
        "eos_token_id": end,
    }
