"""Loss, optimiser, sharing of data and devices."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posenc import training
from posenc.errors import UserError
from posenc.runs import RunConfig, load_model, start_run
from posenc.training import OptimizerConfig, Trainer, decayed, mean_nll, schedule, split, token_nll
from posenc.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(vocab_size=31, layers=2, width=16, heads=2, init_std=0.2)


def batch_of(rows, length, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 31, (rows, length + 1)).astype(np.int32)
    segments = np.ones((rows, length), np.int32)
    segments[0, length // 2 :] = 2
    mask = np.ones((rows, length), bool)
    mask[0, length // 2 - 1] = False
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        "segments": segments,
        "mask": mask,
    }


@pytest.mark.fast
def test_the_loss_is_the_mean_over_admitted_targets():
    model = Transformer(CONFIG, "alibi", 12)
    batch = batch_of(3, 12)
    logits = np.asarray(model(batch["inputs"], batch["positions"], batch["segments"]), np.float64)
    total, count = 0.0, 0
    for row in range(3):
        for place in range(12):
            if batch["mask"][row, place]:
                one = logits[row, place]
                total += math.log(np.exp(one).sum()) - one[batch["targets"][row, place]]
                count += 1
    assert count == 35
    assert float(mean_nll(model, batch)) == pytest.approx(total / count, abs=1e-5)


@pytest.mark.fast
def test_stretches_of_logits_change_neither_loss_nor_gradient(monkeypatch):
    model = Transformer(CONFIG, "nope", 11)
    hidden = jax.random.normal(jax.random.key(0), (2, 11, 16))
    targets = jax.random.randint(jax.random.key(1), (2, 11), 0, 31)

    def loss(hidden):
        nll = token_nll(model, hidden, targets)
        return jnp.sum(nll * jnp.arange(11.0)), nll

    whole = jax.jit(jax.grad(loss, has_aux=True))(hidden)
    monkeypatch.setattr(training, "LOGITS_AT_A_TIME", 31 * 2 * 4)  # stretches of 4, 4 and 3
    stretched = jax.jit(jax.grad(lambda h: loss(h), has_aux=True))(hidden)
    for one, other in zip(stretched, whole, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.fast
def test_the_learning_rate_warms_up_and_decays_to_its_end():
    rate = schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_share=0.1), 20)
    by_formula = [(s + 1) / 4 for s in range(4)] + [
        0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (s + 1 - 4) / 16)) for s in range(4, 20)
    ]
    np.testing.assert_allclose([float(rate(s)) for s in range(20)], by_formula, atol=1e-6)
    assert float(rate(19)) == pytest.approx(0.1)


@pytest.mark.fast
def test_weight_decay_follows_the_role():
    config = TransformerConfig(vocab_size=31, layers=1, width=16, heads=2, bias=True, norm="layer")
    model = Transformer(config, "wpe", 8)
    roles = decayed(model, split(model)[1])
    kernels = {f"blocks.0.attention.{n}.kernel" for n in ("query", "key", "value", "out")}
    kernels |= {f"blocks.0.mlp.{n}.kernel" for n in ("up", "gate", "down")}
    assert {name for name, on in roles.items() if on} == kernels
    assert not roles["encoding.parts.0.table"]
    assert not roles["embedding.embedding"]
    assert not roles["blocks.0.attention.query.bias"]
    # What an encoding has decayed is so within another one too.
    for spec, own in (
        ("transformer_xl", "position.kernel"),
        ("heads(of=[nope, transformer_xl])", "parts.1.position.kernel"),
        ("dape(base=transformer_xl)", "base.position.kernel"),
    ):
        model = Transformer(config, spec, 8)
        roles = decayed(model, split(model)[1])
        chosen = {name for name, on in roles.items() if on and name.startswith("encoding.")}
        assert chosen == {f"encoding.parts.0.{own}"}


@pytest.mark.fast
@pytest.mark.parametrize("encoding", ["wpe", "sinusoidal", "rope", "alibi"])
def test_models_differ_in_the_encoding_and_in_nothing_else(encoding):
    _, shared = split(Transformer(CONFIG, "nope", 12, seed=5))
    model = Transformer(CONFIG, encoding, 12, seed=5)
    _, own = split(model)
    for name, value in shared.items():
        np.testing.assert_array_equal(own[name], value)
    extra = own.keys() - shared.keys()
    assert all(name.startswith("encoding.") for name in extra)
    plain = Transformer(CONFIG, "nope", 12)
    assert {k: decayed(model, own)[k] for k in shared} == decayed(plain, shared)


@pytest.mark.fast
def test_the_last_position_of_a_table_is_trained():
    model = Transformer(CONFIG, "wpe", 12)
    merge, parameters = split(model)
    gradient = jax.jit(jax.grad(lambda p: mean_nll(merge(p), batch_of(3, 12))))(parameters)
    by_row = np.abs(np.asarray(gradient["encoding.parts.0.table"])).max(axis=-1)
    assert (by_row > 0).all()


@pytest.mark.fast
def test_dropout_draws_from_a_stream_of_its_own():
    initial = {jax.random.key_data(k).tobytes() for k in jax.random.split(jax.random.key(0))}
    tagged = jax.random.fold_in(jax.random.key(0), training.DROPOUT_STREAM)
    steps = {jax.random.key_data(jax.random.fold_in(tagged, s)).tobytes() for s in range(64)}
    assert len(steps) == 64
    assert not initial & steps


def test_dropout_is_a_function_of_seed_and_step():
    config = TransformerConfig(vocab_size=31, layers=1, width=16, heads=2, dropout=0.5)
    losses = {}
    for seed in (0, 0, 1):
        trainer = Trainer(Transformer(config, "nope", 8), OptimizerConfig(), 10, seed)
        state = trainer.start()
        seen = []
        for _ in range(2):
            state, values = trainer.step(state, batch_of(2, 8))
            seen.append(float(values["loss"]))
        if seed in losses:
            assert losses[seed] == seen
        losses[seed] = seen
    assert losses[0] != losses[1]
    # Validation drops nothing.
    model = Transformer(config, "nope", 8)
    trainer = Trainer(model, OptimizerConfig(), 10, 0)
    plain = float(jax.jit(lambda: mean_nll(model, batch_of(2, 8)))())
    assert trainer.nll(trainer.start(), batch_of(2, 8)) == pytest.approx(plain, abs=1e-6)


ON_DEVICES = """
import sys; sys.path.insert(0, "tests")
import jax, numpy as np
from test_training import CONFIG, batch_of
from posenc.training import OptimizerConfig, Trainer
from posenc.transformer import Transformer
trainer = Trainer(Transformer(CONFIG, "wpe", 12), OptimizerConfig(), 10, 0)
state = trainer.start()
for step in range(3):
    state, values = trainer.step(state, batch_of(4, 12, seed=step))
for leaf in jax.tree.leaves(state):
    assert leaf.sharding.is_fully_replicated, leaf.sharding
print(jax.device_count(), repr(float(values["loss"])), repr(float(values["gradient_norm"])))
"""


def test_the_number_of_devices_changes_rounding_and_nothing_else():
    seen = {}
    for devices in (1, 4):
        flags = f"--xla_force_host_platform_device_count={devices}"
        done = subprocess.run(
            [sys.executable, "-c", ON_DEVICES],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        count, *numbers = done.stdout.split()
        assert int(count) == devices
        seen[devices] = [float(number) for number in numbers]
    np.testing.assert_allclose(seen[4], seen[1], rtol=1e-5)


@pytest.mark.parametrize("encoding", ["fope(length=100)+rope(learned=true)", "pope,shaw"])
def test_a_model_loaded_from_a_run_is_the_trained_one(tmp_path, encoding):
    config = RunConfig(encoding, "", CONFIG, "", train_length=12, steps=2, seed=5)
    trainer = Trainer(Transformer(CONFIG, encoding, 12, seed=5), config.optimizer, 2, seed=5)
    run = start_run(tmp_path, None, config, {})
    state = trainer.start()
    for step in (1, 2):
        state, _ = trainer.step(state, batch_of(2, 12, seed=step))
    run.checkpoints.save(2, state)
    run.checkpoints.finish()
    batch = batch_of(3, 30)
    forward = jax.jit(lambda model: model(batch["inputs"], batch["positions"], batch["segments"]))
    wanted = np.asarray(forward(trainer.merge(state["parameters"])))
    np.testing.assert_array_equal(forward(load_model(run)), wanted)
    # What is drawn and never trained is not in the file: other draws than then are noticed.
    run.record_start(Transformer(CONFIG, encoding, 12, seed=6), None)
    if "fope" in encoding:
        for again in (
            lambda: load_model(run),
            lambda: run.record_start(Transformer(CONFIG, encoding, 12, seed=5), 1),
        ):
            with pytest.raises(UserError, match="this version of JAX draws others than at first"):
                again()
    run.record_start(Transformer(CONFIG, encoding, 12, seed=5), None)
    np.testing.assert_array_equal(forward(load_model(run)), wanted)
    # What is drawn at the start and not trained is told by the seed alone.
    merge, _ = split(Transformer(CONFIG, encoding, 12, seed=6))
    other = np.asarray(forward(merge(state["parameters"])))
    assert np.array_equal(other, wanted) == ("fope" not in encoding)
