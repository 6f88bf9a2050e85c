"""Two tiny models that posenc and Hugging Face transformers both build, weight for weight.

Weights and tokens come from an integer hash of their name and place, so that they are the same bits
on every machine and in every release of any library.
"""

import dataclasses
import zlib

import numpy as np

from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig, preset

KINDS = ("gpt2", "llama")
LAYERS, VOCABULARY, CONTEXT = 2, 17, 16
WIDTH = {"gpt2": 12, "llama": 16}
HEADS = {"gpt2": 3, "llama": 4}
KV_HEADS = 2  # of the Llama
INNER = {"gpt2": 48, "llama": 48}  # 4 M, and 8 M / 3 rounded up to a multiple of 8
ENCODING = {"gpt2": "wpe", "llama": "rope"}

# Wide enough that scores, activations and logits leave the linear regime.
SPREAD = 0.3

# What two float32 computations of the same logits may differ by, in roundings (2^-24) of the
# largest logit. Against float64 either side errs by up to 6 (GPT-2) and 17 (Llama, whose scores
# reach 9: the softmax turns their rounding into an error as many times as large); so the sum of
# both, and a margin of 2 for the order in which another CPU adds up.
ROUNDINGS = {"gpt2": 24, "llama": 64}


def hashed(name: str, count: int) -> np.ndarray:
    """Give integers in 0 .. 2^32 - 1: MurmurHash3's finaliser of a name's CRC and a counter."""
    low = np.uint64(0xFFFFFFFF)
    x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B1)
    x = (x + np.uint64(zlib.crc32(name.encode()))) & low
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & low
    return x


def uniform(name: str, *shape: int) -> np.ndarray:
    """Give float64 numbers of mean 0 and variance 1, uniform in +-sqrt(3)."""
    unit = hashed(name, int(np.prod(shape))) / 2.0**31 - 1
    return 3**0.5 * unit.reshape(shape)


def tokens(name: str, batch: int, length: int) -> np.ndarray:
    """Give token ids, int32 ``[B, T]``."""
    ids = hashed(name, batch * length) % np.uint64(VOCABULARY)
    return ids.astype(np.int32).reshape(batch, length)


def tolerance(kind: str, logits: np.ndarray) -> float:
    """Give the absolute tolerance for float32 logits of a kind."""
    return ROUNDINGS[kind] * 2.0**-24 * float(np.abs(logits).max())


def shapes(kind: str, rows: int = CONTEXT, heads: int = 0, kv_heads: int = 0) -> dict:
    """Give the shape of every weight, by the name and in the layout that transformers has it."""
    m, inner, result = WIDTH[kind], INNER[kind], {}
    if kind == "gpt2":
        for n in range(LAYERS):
            block = f"transformer.h.{n}"
            for norm in ("ln_1", "ln_2"):
                result |= {f"{block}.{norm}.weight": (m,), f"{block}.{norm}.bias": (m,)}
            for name, inputs, outputs in (
                ("attn.c_attn", m, 3 * m),
                ("attn.c_proj", m, m),
                ("mlp.c_fc", m, inner),
                ("mlp.c_proj", inner, m),
            ):
                result[f"{block}.{name}.weight"] = (inputs, outputs)
                result[f"{block}.{name}.bias"] = (outputs,)
        return result | {
            "transformer.wte.weight": (VOCABULARY, m),
            "transformer.wpe.weight": (rows, m),
            "transformer.ln_f.weight": (m,),
            "transformer.ln_f.bias": (m,),
        }
    few = m // (heads or HEADS[kind]) * (kv_heads or KV_HEADS)
    for n in range(LAYERS):
        block = f"model.layers.{n}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"{block}.{norm}.weight"] = (m,)
        for name, inputs, outputs in (
            ("self_attn.q_proj", m, m),
            ("self_attn.k_proj", m, few),
            ("self_attn.v_proj", m, few),
            ("self_attn.o_proj", m, m),
            ("mlp.gate_proj", m, inner),
            ("mlp.up_proj", m, inner),
            ("mlp.down_proj", inner, m),
        ):
            result[f"{block}.{name}.weight"] = (outputs, inputs)
    return result | {
        "model.embed_tokens.weight": (VOCABULARY, m),
        "model.norm.weight": (m,),
        "lm_head.weight": (VOCABULARY, m),
    }


def weights(kind: str, **changes: int) -> dict[str, np.ndarray]:
    """Give every weight, float32; a norm's scales lie about 1."""
    result = {}
    for name, shape in shapes(kind, **changes).items():
        value = SPREAD * uniform(f"{kind}.{name}", *shape)
        if name.endswith(".weight") and len(shape) == 1:
            value = 1 + value / 2
        result[name] = value.astype(np.float32)
    return result


def to_posenc(kind: str, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename (and transpose and cut) weights, or their gradients, to those of posenc."""
    result = {}
    if kind == "gpt2":
        for n in range(LAYERS):
            here, there = f"transformer.h.{n}", f"blocks.{n}"
            for ours, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
                result[f"{there}.{ours}.scale"] = values[f"{here}.{name}.weight"]
                result[f"{there}.{ours}.bias"] = values[f"{here}.{name}.bias"]
            # transformers keeps GPT-2's kernels as [inputs, outputs], as posenc does.
            for part, name in (("weight", "kernel"), ("bias", "bias")):
                for which, value in zip(
                    ("query", "key", "value"),
                    np.split(values[f"{here}.attn.c_attn.{part}"], 3, axis=-1),
                    strict=True,
                ):
                    result[f"{there}.attention.{which}.{name}"] = value
                result[f"{there}.attention.out.{name}"] = values[f"{here}.attn.c_proj.{part}"]
                result[f"{there}.mlp.up.{name}"] = values[f"{here}.mlp.c_fc.{part}"]
                result[f"{there}.mlp.down.{name}"] = values[f"{here}.mlp.c_proj.{part}"]
        return result | {
            "embedding.embedding": values["transformer.wte.weight"],
            "encoding.parts.0.table": values["transformer.wpe.weight"],
            "final_norm.scale": values["transformer.ln_f.weight"],
            "final_norm.bias": values["transformer.ln_f.bias"],
        }
    for n in range(LAYERS):
        here, there = f"model.layers.{n}", f"blocks.{n}"
        for ours, name in (
            ("attention.query", "self_attn.q_proj"),
            ("attention.key", "self_attn.k_proj"),
            ("attention.value", "self_attn.v_proj"),
            ("attention.out", "self_attn.o_proj"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            result[f"{there}.{ours}.kernel"] = values[f"{here}.{name}.weight"].T
        result[f"{there}.attention_norm.scale"] = values[f"{here}.input_layernorm.weight"]
        result[f"{there}.mlp_norm.scale"] = values[f"{here}.post_attention_layernorm.weight"]
    return result | {
        "embedding.embedding": values["model.embed_tokens.weight"],
        "final_norm.scale": values["model.norm.weight"],
        "head": values["lm_head.weight"],
    }


def posenc_config(kind: str, **changes) -> TransformerConfig:
    """Give the shape of posenc's model: ``gpt2-small`` cut down, or the modern defaults."""
    small = {"vocab_size": VOCABULARY, "layers": LAYERS, "width": WIDTH[kind], "heads": HEADS[kind]}
    if kind == "gpt2":
        return dataclasses.replace(preset("gpt2-small"), **small | changes)
    small |= {"kv_heads": KV_HEADS, "tied_head": False}
    return TransformerConfig(**small | changes)


def posenc_model(
    kind: str, encoding: str = "", rows: int = CONTEXT, values: dict | None = None, **changes
) -> Transformer:
    """Give posenc's model with the formula's weights, or with ``values`` in transformers' names."""
    config = posenc_config(kind, **changes)
    merge, parameters = split(Transformer(config, encoding or ENCODING[kind], rows))
    if values is None:
        different = {name: changes[name] for name in ("heads", "kv_heads") if name in changes}
        values = weights(kind, rows=rows, **different)
    loaded = to_posenc(kind, values)
    assert {name: value.shape for name, value in loaded.items()} == {
        name: value.shape for name, value in parameters.items()
    }
    return merge(loaded)


def peer_model(
    kind: str, rows: int = CONTEXT, heads: int = 0, kv_heads: int = 0, theta: float = 10_000.0
):
    """Give the model of transformers with the formula's weights: float32, eager, no dropout."""
    import torch
    import transformers

    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_positions=rows,
            n_embd=WIDTH[kind],
            n_layer=LAYERS,
            n_head=HEADS[kind],
            attn_implementation="eager",
            **common,
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=WIDTH[kind],
            intermediate_size=INNER[kind],
            num_hidden_layers=LAYERS,
            num_attention_heads=heads or HEADS[kind],
            num_key_value_heads=kv_heads or KV_HEADS,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            max_position_embeddings=2**17,
            tie_word_embeddings=False,
            attn_implementation="eager",
            **common,
        )
        model = transformers.LlamaForCausalLM(config)
    values = weights(kind, rows=rows, heads=heads, kv_heads=kv_heads)
    parameters = dict(model.named_parameters())
    assert {name: tuple(value.shape) for name, value in parameters.items()} == {
        name: value.shape for name, value in values.items()
    }
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(torch.from_numpy(value))
    return model.eval()
