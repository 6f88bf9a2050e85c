"""posenc against Hugging Face transformers and torch, live and on the same weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from flax import nnx
from golden.weights import (
    CONTEXT,
    KINDS,
    peer_model,
    posenc_model,
    to_posenc,
    tokens,
    tolerance,
    uniform,
    weights,
)
from test_golden import golden

from posenc.encodings import Dimensions, RoPE, Side, alibi_slopes, sequential_positions
from posenc.optimizer import OptimizerConfig, decayed, optimizer
from posenc.training import mean_nll, split

pytestmark = pytest.mark.peers

EPS = 2.0**-24  # unit roundoff of float32

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    return torch


def peer_logits(torch, model, ids, **arguments):
    given = {name: torch.from_numpy(np.asarray(value)).long() for name, value in arguments.items()}
    with torch.no_grad():
        return model(torch.from_numpy(ids).long(), **given).logits.numpy()


@functools.partial(jax.jit, static_argnames="merge")
def forward(merge, parameters, ids, positions, segments):
    return merge(parameters)(ids, positions, segments)


def logits_of(model, ids, positions, segments=None):
    segments = np.ones_like(ids) if segments is None else segments
    return np.asarray(forward(*split(model), ids, jnp.asarray(positions), segments))


def assert_same_logits(kind, logits, expected, real=True):
    worst = np.abs(np.where(np.asarray(real)[..., None], logits - expected, 0)).max()
    # NaN is not below anything.
    assert worst <= tolerance(kind, expected), worst / tolerance(kind, expected)


# Logits.


@kinds
def test_live_logits_are_the_golden_ones(torch, kind):
    arrays = golden(kind)
    live = peer_logits(torch, peer_model(kind), arrays["tokens"])
    assert_same_logits(kind, live, arrays["logits"])
    if kind == "gpt2":
        live = peer_logits(torch, peer_model(kind).double(), arrays["tokens"])
        assert live.dtype == np.float64
        # Nothing but float64 rounding of numbers of size 1.
        np.testing.assert_allclose(live, arrays["logits64"], rtol=0, atol=1e-12)


def test_live_alibi_slopes_are_the_golden_ones_and_posencs(torch):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    for heads in golden("alibi_slopes")["heads"].tolist():
        live = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1].numpy()
        np.testing.assert_allclose(live, golden("alibi_slopes")[f"slopes_{heads}"], rtol=4 * EPS)
        # See test_golden: n roundings of the base and two of the n-th power, n at most 17.
        np.testing.assert_allclose(live, alibi_slopes(heads), rtol=19 * EPS)


@kinds
def test_logits_of_a_long_sequence(torch, kind):
    length = 300  # three blocks of query rows, the last one padded
    ids = tokens(f"{kind}.long", 2, length)
    expected = peer_logits(torch, peer_model(kind, rows=length), ids)
    model = posenc_model(kind, rows=length)
    assert_same_logits(kind, logits_of(model, ids, np.arange(length)[None]), expected)


def far_positions(batch, length, last):
    """Give increasing positions with gaps, from 0 to about ``last``."""
    gaps = 1 + np.abs(uniform("gaps", batch, length)) * last / length
    return np.minimum(np.cumsum(gaps, axis=1).astype(np.int32) - 1, last)


def test_llama_at_positions_up_to_5000(torch):
    length = 256
    ids, positions = tokens("llama.far", 2, length), far_positions(2, length, 5000)
    assert positions.max() > 4000
    # A mask keeps transformers from taking every gap for the border of a packed sequence.
    expected = peer_logits(
        torch, peer_model("llama"), ids, position_ids=positions, attention_mask=np.ones_like(ids)
    )
    assert_same_logits("llama", logits_of(posenc_model("llama"), ids, positions), expected)
    # And these positions matter.
    near = logits_of(posenc_model("llama"), ids, np.arange(length)[None])
    assert np.abs(near - expected).max() > 1


@kinds
@pytest.mark.parametrize("length", [CONTEXT, 160])
def test_a_left_padded_batch(torch, kind, length):
    ids = tokens(f"{kind}.padded", 3, length)
    real = np.arange(length)[None] >= np.array([[0], [5], [length - 2]])
    positions = sequential_positions(real.astype(np.int32))
    expected = peer_logits(
        torch,
        peer_model(kind, rows=length),
        ids,
        attention_mask=real,
        position_ids=positions,
    )
    model = posenc_model(kind, rows=length)
    logits = logits_of(model, ids, positions, real.astype(np.int32))
    assert_same_logits(kind, logits, expected, real)
    # And padding is not merely far away: whatever stands there changes nothing.
    other = np.where(real, ids, (ids + 1) % 17)
    again = logits_of(model, other, positions, real.astype(np.int32))
    np.testing.assert_array_equal(again[real], logits[real])


@kinds
def test_a_packed_window(torch, kind):
    segments = np.repeat([1, 2, 3], [60, 1, 99])[None].astype(np.int32)
    positions = sequential_positions(segments)
    ids = tokens(f"{kind}.packed", 1, segments.size)
    model = posenc_model(kind, rows=100)
    logits = logits_of(model, ids, positions, segments)
    peer = peer_model(kind, rows=100)
    for segment in (1, 2, 3):
        own = segments[0] == segment
        assert_same_logits(kind, logits[:, own], peer_logits(torch, peer, ids[:, own]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "theta"),
    [(4, 4, 10_000.0), (4, 1, 10_000.0), (2, 1, 500_000.0), (8, 4, 100.0)],
)
def test_llama_with_other_heads_and_bases(torch, heads, kv_heads, theta):
    ids = tokens("llama.heads", 2, 40)
    expected = peer_logits(
        torch, peer_model("llama", heads=heads, kv_heads=kv_heads, theta=theta), ids
    )
    model = posenc_model("llama", f"rope(theta={theta})", heads=heads, kv_heads=kv_heads)
    assert_same_logits("llama", logits_of(model, ids, np.arange(40)[None]), expected)


@pytest.mark.parametrize("width", [64, 128])
def test_rotations_at_the_head_widths_in_use(torch, width):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    positions = np.array([[0, 1, 2, 17, 255, 1000, 4097, 5000, 65_535, 131_071]], np.int32)
    x = uniform("rotated", 1, positions.size, 2, width).astype(np.float32)
    config = LlamaConfig(hidden_size=2 * width, num_attention_heads=2)
    states = torch.from_numpy(x).transpose(1, 2)
    cos, sin = LlamaRotaryEmbedding(config)(states, torch.from_numpy(positions).long())
    expected = apply_rotary_pos_emb(states, states, cos, sin)[0].transpose(1, 2).numpy()

    rope = RoPE(Dimensions(2 * width, 2, width, 8), nnx.Rngs(0))
    side = Side(
        x=jnp.asarray(x),
        rotated=None,
        positions=jnp.asarray(positions),
        streams={},
        slots=jnp.arange(positions.size, dtype=jnp.int32)[None],
        segments=jnp.ones(positions.shape, jnp.int32),
        prepared=rope.prepare(jnp.asarray(positions), {}),
    )
    rotated = np.asarray(rope.rotate_queries(side))
    # Both phases are float32: each may be off by the bound, and turns a pair by so much. Besides,
    # a few roundings of the pair itself.
    bound = 2 * reference.phase_bound(positions)[..., None, None] + 8 * EPS
    pair = np.hypot(*np.split(x.astype(np.float64), 2, axis=-1))
    assert (np.abs(rotated - expected) <= bound * np.concatenate([pair, pair], axis=-1)).all()


# Gradients.


@kinds
def test_gradients_of_the_loss(torch, kind):
    length = 160  # two blocks of query rows
    ids = tokens(f"{kind}.gradient", 2, length + 1)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    mask = uniform("mask", 2, length) > -1  # about a fifth of the targets do not count

    peer = peer_model(kind, rows=length)
    logits = peer(torch.from_numpy(inputs).long()).logits
    labels = torch.from_numpy(np.where(mask, targets, -100)).long()
    expected_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100
    )
    expected_loss.backward()
    expected = to_posenc(
        kind, {name: value.grad.numpy() for name, value in peer.named_parameters()}
    )

    merge, parameters = split(posenc_model(kind, rows=length))
    batch = {
        "inputs": jnp.asarray(inputs),
        "targets": jnp.asarray(targets),
        "mask": jnp.asarray(mask),
        "positions": jnp.arange(length, dtype=jnp.int32)[None],
        "segments": jnp.ones((1, length), jnp.int32),
    }
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: mean_nll(merge(p), batch)))(parameters)
    assert float(loss) == pytest.approx(float(expected_loss.detach()), rel=16 * EPS)
    assert set(gradient) == set(expected)
    # Sums over 320 tokens of both signs, each term off by the roundings that logits have: those,
    # taken of the largest number of a weight's gradient. A key's bias moves all logits of a row
    # alike, so that its gradient is 0 and both sides give their rounding, as large as in queries.
    for name, value in gradient.items():
        size = np.abs(expected[name.replace("key.bias", "query.bias")]).max()
        np.testing.assert_allclose(
            value, expected[name], rtol=0, atol=tolerance(kind, size), err_msg=name
        )
        assert size > 1e-4, name


# The optimiser.


@kinds
def test_adamw_takes_the_steps_of_torch(torch, kind):
    config = OptimizerConfig(learning_rate=0.03, warmup_steps=2, weight_decay=0.3)
    steps, run = 4, 8

    # The schedule by hand: half the peak, the peak, then a cosine to a tenth of it.
    def rate(step):
        if step < 2:
            return 0.03 * (step + 1) / 2
        return 0.003 + 0.027 * (1 + np.cos(np.pi * (step + 1 - 2) / (run - 2))) / 2

    # Large gradients, which are clipped, and small ones, which are not.
    gradients = [
        {
            name: (size * uniform(f"{name}.{step}", *value.shape)).astype(np.float32)
            for name, value in weights(kind).items()
        }
        for step, size in enumerate([1.0, 1e-3, 0.3, 1e-3])
    ]
    norms = [
        np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradient.values()))
        for gradient in gradients
    ]
    assert min(norms) < config.clip_norm < max(norms)

    kernels = ("attn.c_attn.weight", "c_proj.weight", "c_fc.weight", "_proj.weight")
    kernels += ("lm_head.weight",)  # untied, a projection like the others
    peer = {
        name: torch.nn.Parameter(torch.from_numpy(value.copy()))
        for name, value in weights(kind).items()
    }
    groups = [
        {
            "params": [value for name, value in peer.items() if name.endswith(kernels) == yes],
            "weight_decay": config.weight_decay * yes,
        }
        for yes in (True, False)
    ]
    assert len(groups[0]["params"]) == {"gpt2": 8, "llama": 15}[kind]
    adamw = torch.optim.AdamW(groups, betas=(config.b1, config.b2), eps=config.eps)

    model = posenc_model(kind)
    parameters = split(model)[1]
    transform = optimizer(config, run, decayed(model, parameters))
    state = transform.init(parameters)
    update = jax.jit(transform.update)

    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = rate(step)
        for name, value in peer.items():
            value.grad = torch.from_numpy(gradients[step][name].copy())
        torch.nn.utils.clip_grad_norm_(peer.values(), config.clip_norm)
        adamw.step()
        ours = to_posenc(kind, gradients[step])
        updates, state = update(ours, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        expected = to_posenc(kind, {name: value.detach().numpy() for name, value in peer.items()})
        for name, value in parameters.items():
            # A weight below 2 is rounded twice a step on either side. An update is at most a few
            # learning rates, and torch, which divides by the norm plus 1e-6, shortens a clipped
            # gradient by 1e-6 of it at the most: 1e-6 of the update, and some ten roundings.
            atol = (step + 1) * (4 * 2 * EPS + 3 * config.learning_rate * (1e-6 + 10 * EPS))
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=atol, err_msg=name)
    moved = {
        name: np.abs(expected[name] - value)
        for name, value in to_posenc(kind, weights(kind)).items()
    }
    assert min(value.max() for value in moved.values()) > 0.01
