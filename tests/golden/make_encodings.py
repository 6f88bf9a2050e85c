"""Write what other libraries compute for positional encodings, for tests that run without them.

    python tests/golden/make_encodings.py

``encodings.npz`` was made on a CPU under Python 3.11 with torch 2.13.0, numpy 2.4.6 and
transformers 5.24.0, and with

    pip install x-transformers==2.31.10 rotary-embedding-torch==0.9.1 PoPE-pytorch==0.2.1
    pip install fla-core==0.6.0
    pip install --no-deps torchscale==0.3.0
    pip install --no-deps --target FOLDER nemo-toolkit==2.2.1

and ``PYTHONPATH=FOLDER``. Else torchscale would bring a torch of its own and NeMo an old protobuf;
NeMo also installs a folder named ``tests``, hence ``--target``. The file names its makers under
``versions``. Nothing is downloaded, and all numbers come from the integer hash of ``weights.py``.

A key is ``method/variant/array``. Beside the inputs and outputs of a peer a variant has what the
peer was told: its parameters by name, and numbers and flags as JSON in ``settings``. Most variants
share the inputs ``inputs/layer/*``: ``x [T, M]``, ``q``, ``k``, ``v`` ``[H, T, D]``, and increasing
``positions [T]`` up to 1023, which only the variants with ``"positions": "far"`` read; the others
have 0 .. T-1. Outputs are float64 where the peer computed in float64, else float32:

* ``logits [H, T, T]``: all that enters the softmax, hence with the peer's scale, ``1/sqrt(D)``.
* ``bias [H, ...]``: what the peer adds to scaled logits.
* ``weights [H, T, T]``: what multiplies the values; the peer is called with the identity as values.

Of ``[T, T]`` only the lower triangle is kept; 0 stands above the diagonal.
"""

import importlib.metadata
import importlib.util
import json
import math
import pathlib
import platform
import sys
import types
import warnings

import numpy as np
import torch
import transformers
from PoPE_pytorch.attention import compute_attn_similarity_non_fused
from PoPE_pytorch.pope import PoPE
from rotary_embedding_torch import RotaryEmbedding as LucidRotary
from rotary_embedding_torch import apply_rotary_emb
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.inkling2.modeling_inkling2 import Inkling2LogScale
from transformers.models.llama import modeling_llama as llama
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.roformer.modeling_roformer import RoFormerSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as w2v_bert
from transformers.models.whisper.modeling_whisper import sinusoids
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings
from transformers.models.xlnet.modeling_xlnet import XLNetModel
from weights import uniform
from x_transformers import x_transformers
from x_transformers.attend import Attend

FOLDER = pathlib.Path(__file__).parent
PACKAGES = (
    *("transformers", "torch", "numpy", "x-transformers", "rotary-embedding-torch"),
    *("PoPE-pytorch", "torchscale", "fla-core", "nemo-toolkit"),
)

H, T, D = 2, 20, 16
M = H * D
# A prefix of neighbours, a gap, another run, and the last place of a context of 1024.
FAR = [0, 1, 2, 3, 4, 7, 11, 31, 64, 65, 127, 255, 256, 300, 511, 512, 700, 1000, 1022, 1023]
ROTARY = [0, 1, 2, 3, 17, 64, 255, 1023, 5000, 131_071]
DISTANCES = [*range(20), 31, 63, 127, 128, 511, 1024]
T5_DISTANCES = [*range(301), 10**6]
T5_BUCKETS = ((32, 128), (16, 64))  # and the distance from which on all are one
# As in a single left-padded batch: none, some and almost all of a row is padding.
PADDED = [[1] * 7, [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]]


# Inputs.


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give numbers of mean 0 and variance 1; in float64 too, they are float32 numbers."""
    return torch.from_numpy(uniform(f"encodings.{name}", *shape).astype(np.float32)).to(dtype)


def layer(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Give ``x [1, T, M]`` and ``q``, ``k``, ``v`` ``[1, H, T, D]``."""
    return [
        tensor("x", 1, T, M, dtype=dtype),
        *(tensor(name, 1, H, T, D, dtype=dtype) for name in ("q", "k", "v")),
    ]


def identity(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Give values ``[1, H, T, T]`` whose weighted sum shows the weights."""
    return torch.eye(T, dtype=dtype).expand(1, H, T, T)


def times_first(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """Put time before the heads, as fla has it."""
    return [array.transpose(1, 2) for array in arrays]


def inputs() -> dict:
    """Give what most variants share, and what the rotations of a head of 64 take."""
    names = ("x", "q", "k", "v")
    result = {f"layer/{name}": value[0] for name, value in zip(names, layer(), strict=True)}
    result["layer/positions"] = torch.tensor(FAR)
    for name in ("q", "k"):
        result[f"rotary/{name}"] = tensor(f"rotary.{name}", len(ROTARY), 64)
    return result | {"rotary/positions": torch.tensor(ROTARY)}


def settings(**values) -> np.ndarray:
    """Give numbers and flags as JSON."""
    return np.array(json.dumps(values))


# Peers that cannot be imported as they stand.


def load(package: str, path: str, **stand_ins: types.ModuleType) -> types.ModuleType:
    """Load one file of a package without what the package itself would import.

    fla's packages import triton, and NeMo's half of its requirements, which these files need not.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"No {package}: see the top of this file.")
    file = pathlib.Path(found.submodule_search_locations[0]) / path
    spec = importlib.util.spec_from_file_location(f"{package}_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, value in before.items():
            if value is None:
                del sys.modules[name]
            else:
                sys.modules[name] = value
    return module


def nemo(name: str) -> types.ModuleType:
    """Load NeMo's file of a relative encoding, the decorator ``experimental`` doing nothing."""
    folder = "collections/nlp/modules/common/megatron/position_embedding"
    path = f"{folder}/{{}}_relative_position_embedding.py"
    decorators = types.ModuleType("decorators")
    decorators.experimental = lambda decorated: decorated
    dotted = "nemo." + folder.replace("/", ".")
    stand_ins = {
        f"{dotted}.alibi_relative_position_embedding": load("nemo", path.format("alibi")),
        "nemo.utils.decorators": decorators,
    }
    return load("nemo", path.format(name), **stand_ins)


# Frequencies of RoPE: transformers 5.24.0, modeling_rope_utils.ROPE_INIT_FUNCTIONS, and of the
# default kind GPTNeoXRotaryEmbedding.compute_default_rope_parameters (Llama's ignores a partial
# rotary factor). ``attention_factor`` multiplies cos and sin, of queries and of keys. ``context``
# is the length of training throughout.

SMALL = {"head_dim": 64, "theta": 10_000.0, "context": 1024}
LARGE = {"head_dim": 128, "theta": 500_000.0, "context": 8192}


def rope_config(kind: str, head_dim: int, theta: float, context: int, **rope):
    """Give a Llama's configuration for a kind of RoPE."""
    scaled = {"rope_type": kind, "rope_theta": theta, **rope}
    longest = context
    if kind in ("yarn", "longrope", "llama3"):
        scaled["original_max_position_embeddings"] = context
        longest = int(context * rope.get("factor", 1))
    return transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=scaled,
    )


def frequencies(kind: str, lengths: tuple = (), **given) -> dict:
    """Give ``inv_freq``, one row for each of ``lengths`` if there are any, and the factor."""
    config = rope_config(kind, **given)
    default = gpt_neox.GPTNeoXRotaryEmbedding.compute_default_rope_parameters
    compute = ROPE_INIT_FUNCTIONS.get(kind, default)
    rows = [compute(config, torch.device("cpu"), seq_len=length) for length in lengths or (None,)]
    factors = {float(factor) for _, factor in rows}
    result = {
        "inv_freq": torch.stack([row for row, _ in rows]) if lengths else rows[0][0],
        "attention_factor": np.float64(factors.pop()),
        "settings": settings(**given),
    }
    assert not factors
    return result | ({"lengths": np.array(lengths)} if lengths else {})


def rope_frequencies() -> dict:
    """Give the frequencies of every kind of RoPE that transformers has."""
    result = {
        "rope_default/d64": frequencies("default", **SMALL),
        "rope_default/d128": frequencies("default", **LARGE),
        "rope_default/d64-partial25": frequencies("default", **SMALL, partial_rotary_factor=0.25),
        "rope_default/d64-partial75": frequencies("default", **SMALL, partial_rotary_factor=0.75),
    }
    # Of one length and factor 1 it is NTK with s = length / context.
    lengths = (512, 1024, 1025, 2048, 8192)
    for factor in (1.0, 2.0, 4.0, 8.0):
        here = f"d64-s{factor:.0f}"
        result |= {
            f"rope_linear/{here}": frequencies("linear", **SMALL, factor=factor),
            f"rope_dynamic/{here}": frequencies("dynamic", lengths, **SMALL, factor=factor),
            f"rope_yarn/{here}": frequencies("yarn", **SMALL, factor=factor),
            f"rope_llama3/{here}": frequencies(
                "llama3", **SMALL, factor=factor, low_freq_factor=1.0, high_freq_factor=4.0
            ),
        }
    result |= {
        "rope_linear/d128-s8": frequencies("linear", **LARGE, factor=8.0),
        "rope_dynamic/d128-s8": frequencies("dynamic", (8192, 65_536), **LARGE, factor=8.0),
        "rope_llama3/d128-s8": frequencies(  # Llama 3.1
            "llama3", **LARGE, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        "rope_llama3/d64-theta5e5-s32": frequencies(  # Llama 3.2
            "llama3",
            **LARGE | {"head_dim": 64},
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    }
    # YaRN. transformers ramps in the channel's index, not in rotations as the paper does, and clips
    # the ramp's end to dim - 1, not to dim / 2 - 1: "long" has its end at 41.6, past channel 31.
    # "tiny" has both ends at 0, and so a step of width 0.001.
    four = {**SMALL, "factor": 4.0}
    for name, given in {
        "d128-s8": {**LARGE, "factor": 8.0},
        "d64-s4-untruncated": {**four, "truncate": False},
        "d128-s8-untruncated": {**LARGE, "factor": 8.0, "truncate": False},
        "d64-s4-attention": {**four, "attention_factor": 1.25},
        "d64-s4-mscale": {**four, "mscale": 0.707, "mscale_all_dim": 1.0},
        "d64-s4-mscale-equal": {**four, "mscale": 1.0, "mscale_all_dim": 1.0},
        "d64-s4-mscale-alone": {**four, "mscale": 0.707},  # without the other it changes nothing
        "d64-s4-betas": {**four, "beta_fast": 16.0, "beta_slow": 2.0},
        "d64-s4-partial50": {**four, "partial_rotary_factor": 0.5},
        "d64-s4-long": {**four, "context": 2**20},
        "d8-s4-tiny": {**four, "head_dim": 8, "context": 4},
    }.items():
        result[f"rope_yarn/{name}"] = frequencies("yarn", **given)
    # LongRoPE: with a length above the context the long factors, else the short ones. Without
    # ``attention_factor`` it is sqrt(1 + ln s / ln L), s the factor.
    scales = {
        "short_factor": [float(value) for value in np.linspace(1.0, 1.25, 32).round(3)],
        "long_factor": [float(value) for value in np.geomspace(1.0, 9.75, 32).round(2)],
    }
    lengths = (1024, 1025)
    for name, given in {
        "d64-s8": {**SMALL, **scales, "factor": 8.0},
        "d64-s1": {**SMALL, **scales, "factor": 1.0},
        "d64-s8-attention": {**SMALL, **scales, "factor": 8.0, "attention_factor": 1.1},
    }.items():
        result[f"rope_longrope/{name}"] = frequencies("longrope", lengths, **given)
    # Proportional RoPE, Gemma 4's, is p-RoPE: all D/2 frequencies, the lowest of them set to 0.
    for p in (0.0, 0.25, 0.5, 0.75, 1.0):
        result[f"rope_proportional/d64-p{100 * p:.0f}"] = frequencies(
            "proportional", **SMALL, partial_rotary_factor=p
        )
    result["rope_proportional/d64-p25-s8"] = frequencies(
        "proportional", **SMALL, partial_rotary_factor=0.25, factor=8.0
    )
    # NTK with a fixed factor: x_transformers.RotaryEmbedding(base_rescale_factor) of x-transformers
    # 2.31.10, and RotaryEmbedding(theta_rescale_factor) of rotary-embedding-torch 0.9.1.
    for factor in (2.0, 4.0, 8.0):
        rotary = x_transformers.RotaryEmbedding(64, base_rescale_factor=factor)
        result[f"rope_ntk/x-transformers-d64-s{factor:.0f}"] = {
            "inv_freq": rotary.inv_freq,
            "settings": settings(head_dim=64, theta=10_000.0, factor=factor),
        }
    rotary = LucidRotary(128, theta=500_000.0, theta_rescale_factor=4.0)
    result["rope_ntk/rotary-embedding-torch-d128-s4"] = {
        "inv_freq": rotary.freqs,
        "settings": settings(head_dim=128, theta=500_000.0, factor=4.0),
    }
    return {f"{name}/{key}": value for name, some in result.items() for key, value in some.items()}


# RoPE applied.


def rope() -> dict:
    """Rotate ``inputs/rotary``'s queries and keys, each ``[10, 64]``, at its positions."""
    states = [tensor(f"rotary.{name}", 1, 1, len(ROTARY), 64) for name in ("q", "k")]
    positions = torch.tensor(ROTARY)[None]
    result = {}

    def keep(name: str, *rotated: torch.Tensor, **given) -> None:
        for key, value in zip(("q", "k"), rotated, strict=True):
            result[f"{name}/{key}_rotated"] = value.reshape(len(ROTARY), 64)
        result[f"{name}/settings"] = settings(**given)

    # transformers: LlamaRotaryEmbedding and apply_rotary_pos_emb of modeling_llama; halves paired.
    # With YaRN, cos and sin carry the attention factor.
    for name, kind, given in (
        ("llama", "default", SMALL),
        ("llama-yarn", "yarn", {**SMALL, "factor": 4.0}),
    ):
        cos, sin = llama.LlamaRotaryEmbedding(rope_config(kind, **given))(states[0], positions)
        rotated = llama.apply_rotary_pos_emb(*states, cos, sin)
        keep(name, *rotated, pairing="half", rope_type=kind, **given)
    # transformers: GPTNeoXRotaryEmbedding and apply_rotary_pos_emb of modeling_gpt_neox: the first
    # quarter is rotated, by the frequencies of a head of that width.
    config = transformers.GPTNeoXConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
    )
    cos, sin = gpt_neox.GPTNeoXRotaryEmbedding(config)(states[0], positions)
    assert cos.shape[-1] == 16
    rotated = gpt_neox.apply_rotary_pos_emb(*states, cos, sin)
    keep("gpt-neox", *rotated, pairing="half", rotary_width=16, head_dim=64, theta=10_000.0)
    # transformers: GPTJRotaryEmbedding and apply_rotary_pos_emb of modeling_gptj, neighbours
    # paired; what lies beyond rotary_dim is passed through, as in GPTJAttention.forward.
    for name, width in (("gptj", 64), ("gptj-partial", 16)):
        config = transformers.GPTJConfig(n_positions=2**17, n_embd=64, n_head=1, rotary_dim=width)
        sin, cos = gptj.GPTJRotaryEmbedding(config)(states[0], positions)
        rotated = [
            torch.cat(
                [gptj.apply_rotary_pos_emb(part[..., :width], sin, cos), part[..., width:]], -1
            )
            for part in times_first(*states)
        ]
        keep(name, *rotated, pairing="interleaved", rotary_width=width, head_dim=64, theta=10_000.0)
    # rotary-embedding-torch: RotaryEmbedding.forward and apply_rotary_emb; neighbours paired.
    phases = LucidRotary(64)(positions[0])
    rotated = [apply_rotary_emb(phases, part) for part in states]
    keep("rotary-embedding-torch", *rotated, pairing="interleaved", head_dim=64, theta=10_000.0)
    return result


def keep_xpos(result: dict, name: str, q: torch.Tensor, k: torch.Tensor, **given) -> None:
    """Keep the logits of queries and keys that are rotated and scaled."""
    result[f"xpos/{name}/logits"] = (q @ k.mT / math.sqrt(D)).reshape(H, T, T)
    result[f"xpos/{name}/settings"] = settings(pairing="interleaved", theta=10_000.0, **given)


def xpos() -> dict:
    """Give logits with xPos, neighbours paired."""
    _, q, k, _ = layer()
    result = {}
    # x-transformers: RotaryEmbedding(use_xpos=True) and apply_rotary_pos_emb, as in Attention.
    phases, scale = x_transformers.RotaryEmbedding(D, use_xpos=True)(torch.tensor(FAR))
    keep_xpos(
        result,
        "x-transformers-far",
        x_transformers.apply_rotary_pos_emb(q, phases, scale),
        x_transformers.apply_rotary_pos_emb(k, phases, scale**-1.0),
        scale_base=512,
        positions="far",
    )
    # rotary-embedding-torch: RotaryEmbedding(use_xpos=True).rotate_queries_and_keys.
    rotated = LucidRotary(D, use_xpos=True, xpos_scale_base=16).rotate_queries_and_keys(q, k)
    keep_xpos(result, "rotary-embedding-torch-base16", *rotated, scale_base=16)
    return result


def torchscale() -> dict:
    """Give torchscale's logits with xPos; of T5's buckets it has those of transformers."""
    from torchscale.component.relative_position_bias import RelativePositionBias
    from torchscale.component.xpos_relative_position import XPOS

    for given in T5_BUCKETS:
        distances = torch.tensor(T5_DISTANCES)
        assert torch.equal(
            RelativePositionBias._relative_position_bucket(-distances, False, *given),
            T5Attention._relative_position_bucket(-distances, False, *given),
        )
    _, q, k, _ = layer()
    result = {}
    # torchscale: XPOS, called as MultiheadAttention calls it. It takes positions 0 .. T-1 only; for
    # others, rows are laid in a longer sequence. It centres the decay at (T + 1) // 2, the others
    # at T // 2, which logits cannot tell.
    for name, base in (("torchscale", 512), ("torchscale-base16", 16)):
        encode = XPOS(D, scale_base=base)
        keep_xpos(result, name, encode(q[0]), encode(k[0], downscale=True), scale_base=base)
    encode, long = XPOS(D), torch.zeros(2, H, FAR[-1] + 1, D)
    long[0, :, FAR], long[1, :, FAR] = q[0], k[0]
    rotated = encode(long[0])[:, FAR], encode(long[1], downscale=True)[:, FAR]
    keep_xpos(result, "torchscale-far", *rotated, scale_base=512, positions="far")
    return result


def pope() -> dict:
    """Give logits with PoPE: softplus magnitudes, and phases whose bias is on the keys' side."""
    _, q, k, _ = layer()
    inner = (tensor("pope.bias", H, D) / 3**0.5 - 1) * torch.pi  # in [-2 pi, 0]
    outer = tensor("pope.outer", H, D) * 2 * torch.pi  # in part outside, where both peers clamp
    far = torch.tensor(FAR)
    result = {}

    def keep(name: str, bias: torch.Tensor, logits: torch.Tensor, **given) -> None:
        result[f"{name}/bias"] = bias
        result[f"{name}/logits"] = (logits / math.sqrt(D)).reshape(H, T, T)
        result[f"{name}/settings"] = settings(theta=10_000.0, **given)

    # PoPE-pytorch: PoPE and compute_attn_similarity_non_fused. With a dim below D only the first
    # channels are treated, by the frequencies of that dim; the others are multiplied as they are.
    for name, bias, where, given in (
        ("pope-pytorch", inner, torch.arange(T), {}),
        ("pope-pytorch-far", inner, far, {"positions": "far"}),
        ("pope-pytorch-clamped", outer, torch.arange(T), {}),
        ("pope-pytorch-partial", inner[:, : D // 2], torch.arange(T), {"rotary_width": D // 2}),
    ):
        encode = PoPE(bias.shape[1], heads=H)
        encode.bias.data.copy_(bias)
        keep(name, bias, compute_attn_similarity_non_fused(q, k, encode(where.float())), **given)
    # x-transformers: PolarEmbedding and apply_polar_pos_emb, as in Attention.
    encode = x_transformers.PolarEmbedding(D, H)
    encode.learned_bias.data.copy_(inner[:, None])
    phases, bias = encode(far)
    rotated_q = x_transformers.apply_polar_pos_emb(q, phases)
    rotated_k = x_transformers.apply_polar_pos_emb(k, phases + bias)
    keep("x-transformers-far", inner, rotated_q @ rotated_k.mT, positions="far")
    return result


# At the embedding.


def absolute() -> dict:
    """Give rows of tables at ``inputs/layer/positions``, and the rows that OPT looks up."""
    far, rows = torch.tensor(FAR), FAR[-1] + 1
    roformer = RoFormerSinusoidalPositionalEmbedding(rows, M)
    scaled = x_transformers.ScaledSinusoidalEmbedding(M)
    tables = {
        # transformers: modeling_xlm.create_sinusoidal_embeddings: Vaswani's, interleaved.
        "xlm": create_sinusoidal_embeddings(rows, M, torch.empty(rows, M))[far],
        # transformers: RoFormerSinusoidalPositionalEmbedding.create_weight: the same, sines first.
        "roformer": roformer.create_weight()[far],
        # transformers: M2M100SinusoidalPositionalEmbedding.get_embedding: fairseq's and
        # tensor2tensor's, sines first, and exponents m / (M/2 - 1). So has modeling_whisper.
        "m2m-100": M2M100SinusoidalPositionalEmbedding.get_embedding(rows, M)[far],
        # transformers: modeling_whisper.sinusoids.
        "whisper": sinusoids(rows, M)[far],
        # x-transformers: ScaledSinusoidalEmbedding: RoFormer's times a learned scale, at first
        # M ** -0.5. Vaswani scales the tokens by M ** 0.5 instead.
        "x-transformers": scaled(torch.zeros(1, T, M), pos=far),
    }
    result = {f"sinusoidal/{name}/table": value.reshape(T, M) for name, value in tables.items()}
    # transformers: OPTLearnedPositionalEmbedding of modeling_opt, its rows numbered: row 0 is never
    # read, row 1 by padding, row 2 by the first token.
    table = OPTLearnedPositionalEmbedding(16, 1)
    table.weight.data.copy_(torch.arange(18.0)[:, None])
    mask = torch.tensor(PADDED)
    for name, cached in (("left-padded", 0), ("left-padded-cached", 5)):
        result |= {
            f"opt/{name}/mask": mask,
            f"opt/{name}/rows": table(mask, cache_length=cached)[..., 0].long(),
            f"opt/{name}/settings": settings(cache_length=cached, offset=2),
        }
    return result


# Biases that depend on the distance alone.


def t5() -> dict:
    """Give T5's causal buckets, and a bias."""
    distances = torch.tensor(T5_DISTANCES)
    result = {}
    for buckets, longest in T5_BUCKETS:
        # transformers: T5Attention._relative_position_bucket. The other two agree with it.
        found = T5Attention._relative_position_bucket(-distances, False, buckets, longest)
        other = x_transformers.RelativePositionBias._relative_position_bucket(
            -distances, True, buckets, longest
        )
        assert torch.equal(other, found)
        result |= {
            f"t5/buckets-{buckets}-{longest}/distances": distances,
            f"t5/buckets-{buckets}-{longest}/buckets": found,
            f"t5/buckets-{buckets}-{longest}/settings": settings(
                buckets=buckets, max_distance=longest
            ),
        }
    # transformers: T5Attention.compute_bias of a decoder. T5 adds it to logits that are not scaled.
    table = tensor("t5.table", 8, H)
    config = transformers.T5Config(
        d_model=M,
        d_kv=D,
        num_heads=H,
        is_decoder=True,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight.data.copy_(table)
    bias = attention.compute_bias(T, T)[0]
    # x-transformers' RelativePositionBias multiplies it by sqrt(D): its logits are scaled.
    other = x_transformers.RelativePositionBias(D**0.5, True, 8, 16, H)
    other.relative_attention_bias.weight.data.copy_(table)
    assert torch.equal(other(T, T), bias * D**0.5)
    return result | {
        "t5/bias/table": table,
        "t5/bias/bias": bias,
        "t5/bias/settings": settings(buckets=8, max_distance=16),
    }


def alibi() -> dict:
    """Give ALiBi's slopes, of ``n`` heads in the first ``n`` columns, and a bias."""
    heads = (*range(1, 17), 25)
    slopes = {name: np.zeros((len(heads), 25), np.float32) for name in ("mpt", "falcon")}
    for row, n in enumerate(heads):
        # transformers: modeling_mpt.build_mpt_alibi_tensor; the first of two columns is place -1.
        slopes["mpt"][row, :n] = -build_mpt_alibi_tensor(n, 2)[:, 0, 0]
        # transformers: modeling_falcon.build_alibi_tensor: slopes rounded to bfloat16. The model
        # adds the bias before it scales, so that its slopes are these by sqrt(D).
        slopes["falcon"][row, :n] = falcon.build_alibi_tensor(
            torch.ones(1, 2, dtype=torch.long), n, torch.float32
        )[:, 0, 1]
    result = {
        f"alibi/{name}/{key}": value
        for name, some in slopes.items()
        for key, value in (("heads", np.array(heads)), ("slopes", some))
    }
    # x-transformers: AlibiPositionalBias.forward_custom_pos, at every fourth of the positions.
    some = torch.tensor(FAR[3::4])
    bias = x_transformers.AlibiPositionalBias(6).forward_custom_pos(some)
    return result | {"alibi/x-transformers/positions": some, "alibi/x-transformers/bias": bias}


def kerple_and_sandwich() -> dict:
    """Give biases at some distances, ``[H, distances]``."""
    distances = torch.tensor(DISTANCES)
    result = {}
    # The last row of a square holds all distances. Told that it is causal, NeMo keeps the lower
    # triangle of [queries, keys] whatever their numbers, and so loses all but the first key of a
    # single query; hence ``bidirectional``, which is the same at and below the diagonal.
    length = DISTANCES[-1] + 1
    places = length - 1 - distances
    # NeMo 2.2.1: KERPLERelativePositionEmbedding, which has KERPLE's three-parameter logarithm,
    # -b ln(1 + a d^p); p = 1 is the paper's logarithmic kernel with r1 = b and r2 = a.
    # NeMo starts from ALiBi's slopes as b, and a = p = 1; KERPLE's authors from random numbers.
    b, a = torch.tensor([0.7, 1.9]), torch.tensor([0.05, 0.9])
    for name, p in (("log", torch.ones(2)), ("three-parameters", torch.tensor([0.4, 1.6]))):
        kerple = nemo("kerple").KERPLERelativePositionEmbedding(True, H, None, max_seq_len=8)
        for key, value in {"a": a, "b": b, "p": p}.items():
            getattr(kerple, f"kerple_{key}").data = value.double()[:, None, None]
            result[f"kerple/nemo-{name}/{key}"] = value
        result[f"kerple/nemo-{name}/distances"] = distances
        result[f"kerple/nemo-{name}/bias"] = kerple(1, length)[0, :, 0, places]
    # NeMo 2.2.1: SandwichRelativePositionEmbedding; ``hidden_size`` is the number of sinusoids' d.
    for name, heads, width in (("d128-h12", 12, 128), ("d16-h2", H, D)):
        sandwich = nemo("sandwich").SandwichRelativePositionEmbedding(True, heads, None, width, 8)
        result |= {
            f"sandwich/nemo-{name}/distances": distances,
            f"sandwich/nemo-{name}/bias": sandwich(1, length)[0, :, 0, places],
            f"sandwich/nemo-{name}/settings": settings(heads=heads, dimension=width),
        }
    return result


def relative_keys() -> dict:
    """Give logits with Shaw's relative keys, and with Transformer-XL's terms."""
    double = torch.float64
    x, q, k, _ = layer(double)
    result = {}
    common = {"hidden_size": M, "num_attention_heads": H, "num_hidden_layers": 1}
    # transformers: Wav2Vec2BertSelfAttention of modeling_wav2vec2_bert. Kind "relative_key" is
    # Shaw's, on keys alone: row r of the table stands for j - i = r - left, clipped.
    config = transformers.Wav2Vec2BertConfig(
        **common,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=6,
        right_max_position_embeddings=0,
    )
    attention = w2v_bert.Wav2Vec2BertSelfAttention(config).double()
    table = tensor("shaw.table", 7, D)
    attention.distance_embedding.weight.data.copy_(table)
    query, bias = w2v_bert._apply_relative_key_position_encoding(attention, q, k)
    result |= {
        "shaw/wav2vec2-bert/table": table,
        "shaw/wav2vec2-bert/logits": (query @ k.mT * attention.scaling + bias)[0],
        "shaw/wav2vec2-bert/settings": settings(left=6, right=0),
    }
    # The same, kind "relative": Transformer-XL's four terms, with interleaved sinusoids.
    u, v = tensor("xl.u", H, D), tensor("xl.v", H, D)
    projection = tensor("xl.projection", M, H, D) / M**0.5
    config = transformers.Wav2Vec2BertConfig(
        **common, position_embeddings_type="relative", max_source_positions=64
    )
    attention = w2v_bert.Wav2Vec2BertSelfAttention(config).double()
    attention.pos_bias_u.data.copy_(u)
    attention.pos_bias_v.data.copy_(v)
    attention.linear_pos.weight.data.copy_(projection.reshape(M, M).T)
    relative = w2v_bert.Wav2Vec2BertRelPositionalEmbedding(config)(x)
    query, bias = w2v_bert._apply_relative_position_encoding(attention, q, k, relative)
    logits = {"wav2vec2-bert": ("logits", (query @ k.mT * attention.scaling + bias)[0])}
    # transformers: XLNetModel.relative_positional_encoding and XLNetRelativeAttention
    # .rel_attn_core of modeling_xlnet: sines first, as Transformer-XL has them.
    config = transformers.XLNetConfig(
        vocab_size=2, d_model=M, n_layer=1, n_head=H, d_inner=M, attn_type="uni", dropout=0.0
    )
    model = XLNetModel(config).double().eval()
    core = model.layer[0].rel_attn
    core.r_w_bias.data.copy_(u)
    core.r_r_bias.data.copy_(v)
    core.r.data.copy_(projection)
    relative = model.relative_positional_encoding(T, T, bsz=1).to(double)
    keys = torch.einsum("tbm,mhd->tbhd", relative, core.r)
    future = torch.ones(T, T, dtype=double).triu(1)[:, :, None, None]
    heads_last = [part.permute(2, 0, 1, 3) for part in (q, k, identity(double))]
    weights = core.rel_attn_core(*heads_last, keys, attn_mask=future, output_attentions=True)[1]
    logits["xlnet"] = ("weights", weights.permute(2, 3, 0, 1)[0])
    for name, (key, value) in logits.items():
        result |= {
            f"transformer_xl/{name}/u": u,
            f"transformer_xl/{name}/v": v,
            f"transformer_xl/{name}/projection": projection,
            f"transformer_xl/{name}/{key}": value,
            f"transformer_xl/{name}/settings": settings(
                sinusoids="concatenated" if name == "xlnet" else "interleaved"
            ),
        }
    return result


# Logits that depend on the tokens.


def attend(**kinds) -> torch.Tensor:
    """Give the causal logits ``[H, T, T]`` of x-transformers' Attend, in float64."""
    _, q, k, v = layer(torch.float64)
    return Attend(heads=H, causal=True, **kinds)(q, k, v)[1].pre_softmax_attn[0]


def cope() -> dict:
    """Give logits with CoPE."""
    table = tensor("cope.table", 8, D)
    # x-transformers: CoPE within Attend: gates of scaled logits, and q . e added unscaled, as in
    # the paper's listing; the authors' code adds before it scales. Positions reach 7 of about 10.
    encode = x_transformers.CoPE(D, H, 8).double()
    encode.pos_emb.data.copy_(table)
    return {
        "cope/x-transformers/table": table,
        "cope/x-transformers/logits": attend(cope=encode),
        "cope/x-transformers/settings": settings(positions=8, gate_scaled=True, scaled=False),
    }


def selective() -> dict:
    """Give logits with selective attention."""
    # x-transformers: attend.selective_attn within Attend: of head 0; no token masks itself or the
    # first.
    return {"selective/x-transformers/logits": attend(selective=True)}


def forgetting() -> dict:
    """Give FoX's bias and weights."""
    x, *_ = layer(torch.float64)
    # Biases as x-transformers starts them, and as FoX's authors do.
    kernel, bias = tensor("forgetting.kernel", H, M) / M**0.5, torch.tensor([5.0, 0.0])
    # x-transformers: DataDependentAlibi. The gates are sigmoid(kernel @ x + bias).
    gates = x_transformers.DataDependentAlibi(M, H).double()
    gates.to_forget_gates[0].weight.data.copy_(kernel)
    gates.to_forget_gates[0].bias.data.copy_(bias)
    # fla: ops.forgetting_attn.naive.naive_forgetting_attn, in float32.
    fla = load("fla", "ops/forgetting_attn/naive.py").naive_forgetting_attn
    x, q, k, _ = layer()
    logs = torch.nn.functional.logsigmoid(x @ kernel.T + bias)
    weights = fla(*times_first(q, k, identity()), logs)
    return {
        "forgetting/x-transformers/kernel": kernel,
        "forgetting/x-transformers/gate_bias": bias,
        "forgetting/x-transformers/bias": gates(x.double())[0],
        "forgetting/fla/kernel": kernel,
        "forgetting/fla/gate_bias": bias,
        "forgetting/fla/weights": weights[0].transpose(0, 1),
    }


def path() -> dict:
    """Give PaTH's weights, from ``w`` of norm 1 and ``beta`` between 0 and 2."""
    fla = load("fla", "ops/path_attn/naive.py").naive_path_attn
    _, q, k, _ = layer()
    w = torch.nn.functional.normalize(tensor("path.w", 1, H, T, D), dim=-1)
    beta = 2 * torch.sigmoid(tensor("path.beta", 1, H, T))
    logs = torch.nn.functional.logsigmoid(tensor("path.gate", 1, H, T) + 2)
    result = {}
    # fla: ops.path_attn.naive.naive_path_attn, in float32. It scales the gates' sum by 1/sqrt(D)
    # with the rest, as its kernels do; FoX does not scale it. Chunks do not change the result.
    for name, gate in (("fla", torch.zeros(1, H, T)), ("fla-gated", logs)):
        arguments = times_first(q, k, identity(), w, beta, gate)
        whole, cut = (fla(*arguments, D**-0.5, chunk_size=size) for size in (64, 8))
        torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-6)
        result |= {
            f"path/{name}/w": w[0],
            f"path/{name}/beta": beta[0],
            f"path/{name}/weights": whole[0].transpose(0, 1),
        }
    return result | {"path/fla-gated/log_gate": logs[0]}


def stick_breaking() -> dict:
    """Give stick-breaking weights, and what is left of the stick ``[H, T]``."""
    fla = load("fla", "ops/stickbreaking_attn/naive.py").naive_stickbreaking_attn
    _, q, k, _ = layer(torch.float64)
    result = {}
    # fla: ops.stickbreaking_attn.naive.naive_stickbreaking_attn, in float64.
    for name, current in (("fla", False), ("fla-current", True)):
        arguments = times_first(q, k, identity(torch.float64))
        weights, rest = fla(*arguments, attend_current=current)
        result |= {
            f"stick_breaking/{name}/weights": weights[0].transpose(0, 1),
            f"stick_breaking/{name}/remainder": rest[0].T,
            f"stick_breaking/{name}/settings": settings(attend_current=current),
        }
    return result


def log_n() -> dict:
    """Give factors on the queries that grow with the position."""
    positions = torch.tensor([0, 1, 2, 1022, 1023, 1024, 2047, 2048, 8191, 131_071])
    # transformers: Inkling2LogScale of modeling_inkling2, 1 + alpha ln(max((p + 1) / n, 1)). With
    # alpha = 1 / ln(n) it is log-n scaling, max(1, ln(p + 1) / ln(n)).
    alpha = 1 / math.log(1024)
    config = types.SimpleNamespace(log_scaling_alpha=alpha, log_scaling_n_floor=1024)
    scale = Inkling2LogScale(config)(torch.ones(len(positions), 1, 1), positions)[:, 0, 0]
    # transformers: modeling_ministral3.get_llama_4_attn_scale, in steps: 1 + beta ln(1 + [p / n]).
    steps = get_llama_4_attn_scale(positions[None], 0.1, 1024)[0, 0, :, 0]
    return {
        "log_n/inkling2/positions": positions,
        "log_n/inkling2/scale": scale,
        "log_n/inkling2/settings": settings(alpha=alpha, length=1024),
        "log_n/ministral3/positions": positions,
        "log_n/ministral3/scale": steps,
        "log_n/ministral3/settings": settings(beta=0.1, length=1024),
    }


def array(value) -> np.ndarray:
    """Give a NumPy array; of a matrix over time and time, the lower triangle."""
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().numpy()
    value = np.asarray(value)
    if value.dtype == np.int64:
        value = value.astype(np.int32)
    return np.tril(value) if value.shape[-2:] == (T, T) else value


def arrays(elsewhere: bool = True) -> dict[str, np.ndarray]:
    """Give all arrays; without ``elsewhere``, those of the peers in posenc's extra ``peers``."""
    made = rope_frequencies() | xpos() | absolute() | t5() | alibi()
    made |= relative_keys() | forgetting() | path() | stick_breaking() | cope() | selective()
    made |= log_n()
    for name, make in (("inputs", inputs), ("rope", rope), ("pope", pope)):
        made |= {f"{name}/{key}": value for key, value in make().items()}
    if elsewhere:
        made |= torchscale() | kerple_and_sandwich()
    made = {name: array(made[name]) for name in sorted(made)}
    for name, value in made.items():
        assert name.count("/") == 2, name
        assert value.dtype.kind in "fi" or name.endswith("/settings"), name
        assert value.dtype.kind != "f" or np.isfinite(value).all(), name
    return made


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    with torch.no_grad():
        made = arrays()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    versions.append(f"python {platform.python_version()}")
    np.savez_compressed(FOLDER / "encodings.npz", versions=np.array(versions), **made)


if __name__ == "__main__":
    main()
