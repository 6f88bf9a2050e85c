"""Loss, optimiser, sharing of data and devices."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import print_saved_residuals

from posenc import training
from posenc.errors import UserError
from posenc.optimizer import OptimizerConfig, decayed, optimizer, schedule
from posenc.runs import RunConfig, load_model, start_run
from posenc.training import Trainer, mean_nll, split, token_nll
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


def test_parts_of_a_batch_are_weighted_by_their_tokens():
    """Accumulated gradients are those of the whole batch, however the mask falls on its parts."""
    seen = {}
    for accumulate in (1, 2, 4):
        trainer = Trainer(Transformer(CONFIG, "wpe", 12), WARM, 10, 0, accumulate=accumulate)
        state = trainer.start()
        found = []
        for step in range(3):
            batch = batch_of(4, 12, seed=step)
            batch["mask"][1:, 3:] = False
            state, values = trainer.step(state, batch)
            found.append([float(values[name]) for name in ("loss", "gradient_norm")])
        seen[accumulate] = found
    np.testing.assert_allclose(seen[2], seen[1], rtol=1e-5)
    np.testing.assert_allclose(seen[4], seen[1], rtol=1e-5)


WARM = OptimizerConfig(warmup_steps=2)
KEY = jax.random.key(1)


def test_z_loss_is_minimised_and_not_reported():
    """By its definition, in float64, from the model's own logits."""
    merge, parameters = split(Transformer(CONFIG, "nope", 12))
    batch = batch_of(3, 12)
    logits = np.asarray(merge(parameters)(batch["inputs"], batch["positions"], batch["segments"]))
    log_z = np.log(np.sum(np.exp(logits.astype(np.float64)), axis=-1))
    chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    loss = np.mean((log_z - chosen)[batch["mask"]])
    weight = 0.3

    def minimised(parameters):
        logits = merge(parameters)(batch["inputs"], batch["positions"], batch["segments"])
        log_z = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        every = log_z - chosen + weight * log_z**2
        return jnp.sum(jnp.where(batch["mask"], every, 0.0)) / batch["mask"].sum()

    value, gradient = jax.jit(jax.value_and_grad(minimised))(parameters)
    squares = np.mean(log_z[batch["mask"]] ** 2)
    assert float(value) == pytest.approx(loss + weight * squares, rel=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradient)))
    trainer = Trainer(Transformer(CONFIG, "nope", 12), OptimizerConfig(z_loss=weight), 10, 0)
    _, values = trainer.step(trainer.start(), batch)
    assert float(values["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(values["gradient_norm"]) == pytest.approx(norm, rel=1e-4)


@pytest.mark.fast
def test_wsd_holds_the_peak_and_falls_linearly_to_its_end():
    config = OptimizerConfig(
        learning_rate=2.0, warmup_steps=4, schedule="wsd", decay_share=0.25, final_share=0.1
    )
    rate = schedule(config, 40)
    got = [float(rate(step)) for step in range(40)]
    wanted = [0.5, 1.0, 1.5, *[2.0] * 27, *(2.0 - 1.8 * np.arange(1, 11) / 10)]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    for options, message in (
        ({"decay_share": 0.0}, "--decay-share is 0.0: it is above 0 and at most 1"),
        ({"z_loss": -1.0}, "--z-loss is -1.0: it must be at least 0"),
        ({"encoding_decay": -0.1}, "--encoding-decay is -0.1: it must be at least 0"),
    ):
        with pytest.raises(UserError, match=message):
            OptimizerConfig(**options)


@pytest.mark.fast
def test_encodings_learn_at_a_rate_and_decay_of_their_own():
    """One step of AdamW by its formula: the first moments' quotient is the gradient's sign."""
    mask = {"head": True, "encoding.parts.0.table": False, "encoding.parts.1.kernel": True}
    parameters = {name: jnp.full((2,), 3.0) for name in mask}
    gradient = {name: jnp.asarray([0.01, -0.02]) for name in mask}
    common = {"learning_rate": 0.5, "warmup_steps": 1, "weight_decay": 0.1, "eps": 1e-30}
    sign = np.array([1.0, -1.0])
    for options, table, kernel in (
        ({}, sign, sign + 0.3),
        ({"encoding_rate": 4.0}, 4 * sign, 4 * (sign + 0.3)),
        ({"encoding_decay": 0.2}, sign + 0.6, sign + 0.6),
        ({"encoding_rate": 0.0, "encoding_decay": 0.2}, 0 * sign, 0 * sign),
    ):
        transform = optimizer(OptimizerConfig(**common, **options), 10, mask)
        updates, _ = transform.update(gradient, transform.init(parameters), parameters)
        wanted = dict(zip(mask, (sign + 0.3, table, kernel), strict=True))
        for name, update in updates.items():
            np.testing.assert_allclose(update, -0.5 * wanted[name], rtol=1e-5)


@pytest.mark.parametrize("encoding", ["rope+alibi,fox", "selective"])
def test_rematerialised_blocks_give_the_same_values_and_gradients(encoding):
    batch = batch_of(2, 40)
    seen = {}
    for remat in ("none", "dots", "full"):
        config = dataclasses.replace(CONFIG, remat=remat, dropout=0.2)
        merge, parameters = split(Transformer(config, encoding, 40))
        run = jax.jit(jax.value_and_grad(lambda p, m=merge: mean_nll(m(p), batch, KEY)))
        seen[remat] = run(parameters)
    for remat in ("dots", "full"):
        for got, wanted in zip(*map(jax.tree.leaves, (seen[remat], seen["none"])), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_rematerialised_blocks_keep_less_for_the_backward_pass(capsys):
    """By JAX's own account, of four layers; a compiler for CPUs may undo it."""
    kept = {}
    batch = batch_of(2, 64)
    for remat in ("none", "dots", "full"):
        config = dataclasses.replace(CONFIG, remat=remat, layers=4)
        merge, parameters = split(Transformer(config, "rope", 64))
        print_saved_residuals(lambda p, m=merge: mean_nll(m(p), batch), parameters)
        arrays = re.findall(
            r"^(?:f32|bool|i32)\[([\d,]+)\] (?!from the argument)", capsys.readouterr().out, re.M
        )
        sizes = [math.prod(map(int, shape.split(","))) for shape in arrays]
        kept[remat] = sum(sizes)
    assert kept["full"] < kept["dots"] < kept["none"]
    # Of each block its input, and of the whole what is not in any block.
    assert kept["full"] < 0.3 * kept["none"]


@pytest.mark.parametrize("encoding", ["fope(length=100)+rope(learned=true)", "pope,shaw"])
def test_a_model_loaded_from_a_run_is_the_trained_one(tmp_path, encoding):
    config = RunConfig(encoding, "", CONFIG, "", train_length=12, steps=2, seed=5)
    trainer = Trainer(Transformer(CONFIG, encoding, 12, seed=5), config.optimizer, 2, 5)
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
    run.record_start([Transformer(CONFIG, encoding, 12, seed=6)], None)
    if "fope" in encoding:
        for again in (
            lambda: load_model(run),
            lambda: run.record_start([Transformer(CONFIG, encoding, 12, seed=5)], 1),
        ):
            with pytest.raises(UserError, match="this version of JAX draws others than at first"):
                again()
    run.record_start([Transformer(CONFIG, encoding, 12, seed=5)], None)
    np.testing.assert_array_equal(forward(load_model(run)), wanted)
    # What is drawn at the start and not trained is told by the seed alone.
    merge, _ = split(Transformer(CONFIG, encoding, 12, seed=6))
    other = np.asarray(forward(merge(state["parameters"])))
    assert np.array_equal(other, wanted) == ("fope" not in encoding)
