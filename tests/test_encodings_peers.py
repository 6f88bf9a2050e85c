"""Encodings against the libraries that have them, live: arrays made again, attention modules."""

from __future__ import annotations

import dataclasses
import importlib
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from golden.weights import uniform
from test_golden_encodings import FILE, golden

from posenc.attention import Attention
from posenc.encodings import Dimensions, Side, build, sequential_positions
from posenc.training import split

pytestmark = pytest.mark.peers

EPS = reference.EPS
BATCH, LENGTH, HEADS, HEAD_WIDTH = 3, 24, 4, 8
WIDTH = HEADS * HEAD_WIDTH

# None, some, and nearly all of a row is padding, on the left.
REAL = np.arange(LENGTH)[None] >= np.array([[0], [5], [LENGTH - 2]])


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    with torch.no_grad():
        yield torch


# The arrays of ``golden/encodings.npz``.


@pytest.fixture(scope="module")
def live(torch):
    for name in ("x_transformers", "rotary_embedding_torch", "PoPE_pytorch"):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(FILE.parent)
        return importlib.import_module("make_encodings").arrays(elsewhere=False)


def test_only_what_other_peers_made_is_not_made_again(live):
    left = {name.rsplit("/", 1)[0] for name in set(golden()) - set(live) - {"versions"}}
    others = ("xpos/torchscale", "kerple/nemo", "sandwich/nemo")
    assert {name for name in left if not name.startswith(others)} == set()
    assert set(live) < set(golden())
    assert len(live) > 200


def last_position(name: str) -> int:
    """Give the last position by which a variant's arrays are turned."""
    method, kind, _ = name.split("/")
    if method == "rope":
        return int(golden()["inputs/rotary/positions"][-1])
    if method in ("xpos", "pope"):
        given = json.loads(str(golden()[f"{method}/{kind}/settings"]))
        return 1023 if given.get("positions") == "far" else 19
    return 1023 if method == "sinusoidal" else 0


def test_live_arrays_are_the_golden_ones(live):
    for name, value in live.items():
        wanted = golden()[name]
        assert value.dtype == wanted.dtype or value.dtype.kind == wanted.dtype.kind == "U", name
        assert value.shape == wanted.shape, name
        if value.dtype.kind != "f":
            assert np.array_equal(value, wanted), name
            continue
        # The same operations, perhaps on another CPU: some roundings of sums of 32 terms, and
        # phases. Frequencies and slopes are each compared by its own size.
        unit = EPS if value.dtype == np.float32 else 2.0**-53
        alone = name.endswith(("/inv_freq", "/slopes", "/attention_factor"))
        size = np.abs(wanted) if alone else np.abs(wanted).max(initial=1.0)
        bound = unit * size * (64 + 2 * 4 * last_position(name))
        assert (np.abs(value - wanted) <= bound).all(), name


# Attention modules, with weights from the integer hash.


def given(name: str, *shape: int) -> np.ndarray:
    """Give numbers of mean 0 and variance 1."""
    return uniform(f"attention.{name}", *shape).astype(np.float32)


def projections(kind: str, bias: bool) -> dict[str, np.ndarray]:
    """Give our projections' weights, kernels ``[inputs, outputs]``; logits are about 2 wide."""
    result = {}
    for name in ("query", "key", "value", "out"):
        result[f"{name}.kernel"] = 1.5 * given(f"{kind}.{name}", WIDTH, WIDTH) / WIDTH**0.5
        if bias:
            result[f"{name}.bias"] = 0.3 * given(f"{kind}.{name}.bias", WIDTH)
    return result


def load(torch, linear, values: dict[str, np.ndarray], *names: str, scale: float = 1.0) -> None:
    """Write projections of ours side by side into a linear module of torch."""
    for theirs, ours in (("weight", "kernel"), ("bias", "bias")):
        if getattr(linear, theirs) is None:
            assert f"{names[0]}.{ours}" not in values
            continue
        joined = np.concatenate([values[f"{name}.{ours}"] for name in names], axis=-1)
        getattr(linear, theirs).copy_(torch.from_numpy(scale * joined.T))


def hidden(torch, x: np.ndarray) -> tuple:
    """Give a layer's input, and the mask that is added to logits."""
    seen = np.tri(LENGTH, dtype=bool) & REAL[:, None, :]
    mask = np.where(seen, 0.0, np.finfo(np.float32).min)[:, None].astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(mask)


def attended(
    spec: str,
    values: dict[str, np.ndarray],
    x: np.ndarray,
    positions: np.ndarray,
    parameters: dict[str, np.ndarray] | None = None,
) -> np.ndarray:
    """Give the output of our attention, ``[B, T, M]``; ``x`` is embedded by the encoding first."""
    dims = Dimensions(WIDTH, HEADS, HEAD_WIDTH, 64)
    attention = Attention(
        width=WIDTH,
        heads=HEADS,
        kv_heads=HEADS,
        head_width=HEAD_WIDTH,
        bias="query.bias" in values,
        qk_norm=False,
        norm_eps=1e-5,
        init_std=0.02,
        out_std=0.02,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    merge, own = split(attention)
    assert {n: v.shape for n, v in own.items()} == {n: v.shape for n, v in values.items()}
    attention = merge(values)
    merge, own = split(build(spec, 1, dims, jax.random.key(0)))
    parameters = {f"parts.0.{name}": value for name, value in (parameters or {}).items()}
    assert {n: v.shape for n, v in own.items()} == {n: v.shape for n, v in parameters.items()}
    encodings = merge({name: jnp.asarray(value) for name, value in parameters.items()})
    positions = jnp.asarray(positions)
    side = Side(
        x=None,
        rotated=None,
        positions=positions,
        streams={},
        slots=jnp.arange(LENGTH, dtype=jnp.int32)[None],
        segments=jnp.asarray(REAL.astype(np.int32)),
        prepared=encodings.prepared_at(encodings.prepare(positions, {}), 0),
    )
    x = encodings.embed(jnp.asarray(x), positions, {})
    out, _ = attention(x, encodings.at(0), side, dataclasses.replace(side))
    return np.asarray(out)


def assert_same_outputs(got: np.ndarray, peer, turned: int = 0) -> None:
    """Compare where there is a token.

    Logits are sums of sizes of about 20, off by a phase and some roundings on either side; the
    softmax turns that into an error as large of what it mixes, which a projection mixes again.
    """
    expected = peer.numpy()
    size = np.abs(expected).max()
    assert size > 1
    bound = EPS * size * 2 * (2 * 32 + 2 * 2 * 4 * turned)
    error = np.where(REAL[..., None], np.abs(got - expected), 0).max()
    assert error <= bound, f"{error / bound:.3g} times the bound"


def told_apart(got: np.ndarray, other: np.ndarray) -> bool:
    """Say whether another encoding would not have passed."""
    return np.abs(np.where(REAL[..., None], got - other, 0)).max() > 0.1


def test_gpt_neox_attention(torch):
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox

    config = GPTNeoXConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        attn_implementation="eager",
    )
    peer = gpt_neox.GPTNeoXAttention(config, 0).eval()
    values = projections("gpt-neox", bias=True)
    # The heads' queries, keys and values lie side by side head by head.
    heads = {
        f"{name}.{head}.{part}": np.split(values[f"{name}.{part}"], HEADS, axis=-1)[head]
        for name in ("query", "key", "value")
        for part in ("kernel", "bias")
        for head in range(HEADS)
    }
    order = [f"{name}.{head}" for head in range(HEADS) for name in ("query", "key", "value")]
    load(torch, peer.query_key_value, heads, *order)
    load(torch, peer.dense, values, "out")

    x = given("gpt-neox.x", BATCH, LENGTH, WIDTH)
    states, mask = hidden(torch, x)
    positions = 2 * sequential_positions(REAL.astype(np.int32)) + 3
    turn = gpt_neox.GPTNeoXRotaryEmbedding(config)(states, torch.from_numpy(positions).long())
    expected, _ = peer(states, mask, position_embeddings=turn)
    got = attended("rope(partial=0.25)", values, x, positions)
    assert_same_outputs(got, expected, turned=positions.max())
    assert told_apart(got, attended("rope", values, x, positions))


def test_mpt_attention(torch):
    from transformers import MptConfig
    from transformers.models.mpt import modeling_mpt as mpt

    peer = mpt.MptAttention(MptConfig(d_model=WIDTH, n_heads=HEADS), 0).eval()
    values = projections("mpt", bias=False)
    load(torch, peer.Wqkv, values, "query", "key", "value")
    load(torch, peer.out_proj, values, "out")
    x = given("mpt.x", BATCH, LENGTH, WIDTH)
    states, mask = hidden(torch, x)
    bias = mpt.build_mpt_alibi_tensor(HEADS, LENGTH)
    expected, _ = peer(states, bias, attention_mask=mask != 0)
    positions = sequential_positions(REAL.astype(np.int32))
    got = attended("alibi", values, x, positions)
    assert_same_outputs(got, expected)
    assert told_apart(got, attended("nope", values, x, positions))


def test_opt_attention(torch):
    from transformers import OPTConfig
    from transformers.models.opt import modeling_opt as opt

    config = OPTConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, attn_implementation="eager", dropout=0.0
    )
    peer = opt.OPTAttention(config, 0).eval()
    values = projections("opt", bias=True)
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "out")):
        load(torch, getattr(peer, f"{theirs}_proj"), values, ours)
    table = given("opt.table", 64 + 2, WIDTH)
    rows = opt.OPTLearnedPositionalEmbedding(64, WIDTH)
    rows.weight.copy_(torch.from_numpy(table))
    x = given("opt.x", BATCH, LENGTH, WIDTH)
    states, mask = hidden(torch, x)
    placed = states + rows(torch.from_numpy(REAL.astype(np.int64)))
    expected, _ = peer(placed, attention_mask=mask)
    positions = sequential_positions(REAL.astype(np.int32))
    got = attended("wpe(offset=2)", values, x, positions, {"table": table})
    assert_same_outputs(got, expected)
    assert told_apart(got, attended("wpe(offset=2)", values, x, positions + 1, {"table": table}))


def test_t5_attention(torch):
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(
        d_model=WIDTH,
        d_kv=HEAD_WIDTH,
        num_heads=HEADS,
        is_decoder=True,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        attn_implementation="eager",
    )
    peer = T5Attention(config, has_relative_attention_bias=True, layer_idx=0, is_causal=True).eval()
    values = projections("t5", bias=False)
    # T5 does not scale its logits: its queries are ours by sqrt(D).
    for theirs, ours, scale in (
        ("q", "query", HEAD_WIDTH**-0.5),
        ("k", "key", 1.0),
        ("v", "value", 1.0),
        ("o", "out", 1.0),
    ):
        load(torch, getattr(peer, theirs), values, ours, scale=scale)
    table = given("t5.table", 8, HEADS)
    peer.relative_attention_bias.weight.copy_(torch.from_numpy(table))
    x = given("t5.x", BATCH, LENGTH, WIDTH)
    states, mask = hidden(torch, x)
    expected, *_ = peer(states, mask=mask)
    positions = sequential_positions(REAL.astype(np.int32))
    spec = "t5(buckets=8, max_distance=16)"
    got = attended(spec, values, x, positions, {"table": table})
    assert_same_outputs(got, expected)
    assert told_apart(got, attended(spec, values, x, positions, {"table": table[::-1]}))
