"""Repeats of layers in one loop: the numbers of the plain pass, in a program that does not grow."""

import collections
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from test_training import batch_of

import train
from eval.evaluate import evaluate
from eval.gradients import position_gradients
from posenc.encodings import PositionalEncoding
from posenc.encodings.registry import REGISTRY, examples
from posenc.encodings.sampling import LAYER_POSITIONS
from posenc.encodings.tokenwise import TokenStream
from posenc.optimizer import OptimizerConfig
from posenc.repeats import Repeats
from posenc.runs import load_model, open_run
from posenc.training import Trainer, mean_nll, split
from posenc.transformer import Transformer, TransformerConfig

SHAPE = TransformerConfig(vocab_size=31, layers=4, width=16, heads=2, init_std=0.2)
LENGTH = 12
KEY = jax.random.key(7)


def shape(scan=True, **options):
    return dataclasses.replace(SHAPE, scan=scan, **options)


class Numbered(PositionalEncoding):
    """Something static depends on which layer it is, and nothing else tells."""

    name = "numbered"
    per_layer = True
    made = 0

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        Numbered.made += 1
        self.scale = 1.0 + Numbered.made % 3

    def scores(self, queries, keys, visible):
        return self.scale * super().scores(queries, keys, visible)


@dataclasses.dataclass(frozen=True)
class Table:
    values: tuple[np.ndarray, ...]


class Undecided(PositionalEncoding):
    """Holds something that cannot say whether it is equal."""

    name = "undecided"
    per_layer = True

    def __init__(self, dims, rngs):
        super().__init__(dims, rngs)
        self.table = Table((np.zeros(2),))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("spec", "layers", "expected"),
    [
        ("rope", 5, Repeats(0, 1, 5)),
        ("fox", 4, Repeats(0, 1, 4)),
        ("rope,nope", 5, Repeats(0, 2, 2)),
        ("rope*3,nope", 10, Repeats(0, 4, 2)),
        ("alibi,rope*4", 5, Repeats(1, 1, 4)),
        ("alibi,rope,nope,rope,nope,t5", 6, Repeats(1, 2, 2)),
        ("rope,rope(theta=500)", 4, Repeats(0, 2, 2)),
        ("rope,alibi,nope", 5, None),
        ("rope", 1, None),
    ],
)
def test_the_longest_repeats_are_found(spec, layers, expected):
    made = nnx.eval_shape(lambda: Transformer(shape(layers=layers), spec, LENGTH))
    assert made.repeats() == expected


@pytest.mark.fast
def test_layers_that_differ_in_anything_static_are_no_repeats():
    model = Transformer(shape(layers=6), "rope", LENGTH)
    model.blocks[0].mlp.activation = "gelu"
    assert model.repeats() == Repeats(1, 1, 5)
    model.blocks[2].attention.key.kernel = nnx.Param(jnp.zeros((16, 16), jnp.bfloat16))
    assert model.repeats() == Repeats(3, 1, 3)
    assert Transformer(shape(), "test_scan:Undecided", LENGTH).repeats() is None
    assert Transformer(shape(layers=3), "test_scan:Numbered", LENGTH).repeats() is None
    # Every third layer has the same number again.
    numbered = Transformer(shape(layers=6), "test_scan:Numbered", LENGTH)
    assert numbered.repeats() == Repeats(0, 3, 2)


@pytest.mark.fast
def test_one_loop_runs_all_layers_of_every_registered_encoding():
    for spec in examples().values():
        made = nnx.eval_shape(lambda spec=spec: Transformer(shape(), spec, LENGTH))
        assert made.repeats() == Repeats(0, 1, 4), spec


def both_ways(spec, *batches, key=None, **options):
    """Give loss and gradients of each batch, without the loop and with it."""
    found = []
    for scan in (False, True):
        Numbered.made = 0
        merge, parameters = split(Transformer(shape(scan, **options), spec, LENGTH, seed=3))
        run = jax.jit(
            jax.value_and_grad(lambda p, batch, merge=merge: mean_nll(merge(p), batch, key))
        )
        with jax.default_matmul_precision("highest"):
            found.append([run(parameters, batch) for batch in batches])
    return list(zip(*found, strict=True))


def assert_equal(found):
    (wanted_loss, wanted), (loss, got) = found
    np.testing.assert_allclose(loss, wanted_loss, rtol=2e-7)
    assert got.keys() == wanted.keys()
    for name, own in wanted.items():
        np.testing.assert_allclose(got[name], own, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("rope", {"layers": 3, "dropout": 0.2}),
        ("rope,fox", {"layers": 5, "dropout": 0.2, "remat": "full"}),
        ("fope(length=100)+t5,rope(learned=true)", {"layers": 5, "remat": "dots"}),
        ("fox+rope", {"layers": 2, "sharing": "none", "norm": "layer", "bias": True}),
        ("alibi,heads(of=[rope, cope])*2", {"layers": 3, "kv_heads": 1, "qk_norm": True}),
        ("test_scan:Numbered", {"layers": 6}),
    ],
)
def test_values_and_gradients_are_those_of_the_plain_pass(spec, options):
    """Of packed windows, and with the same dropout."""
    key = KEY if "dropout" in options else None
    (found,) = both_ways(spec, batch_of(2, LENGTH), key=key, **options)
    for name, gradient in found[0][1].items():
        assert np.any(gradient), name
    assert_equal(found)


def test_layers_have_positions_of_their_own_in_the_loop():
    places = np.sort(np.random.default_rng(0).integers(0, 99, (2, LENGTH, 5)), axis=1)
    batches = [
        {**batch_of(2, LENGTH), "streams": {LAYER_POSITIONS: own.astype(np.int32)}}
        for own in (places, places[..., ::-1])
    ]
    ordered, reversed_ = both_ways("rope,t5", *batches, layers=5)
    assert_equal(ordered)
    assert_equal(reversed_)
    assert abs(float(ordered[0][0] - reversed_[0][0])) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("spec", examples().values(), ids=list(REGISTRY))
def test_every_registered_encoding_gives_the_numbers_of_the_plain_pass(spec):
    batch, cls = batch_of(2, LENGTH), REGISTRY[spec.partition("(")[0]]
    if issubclass(cls, TokenStream):
        digits = np.arange(LENGTH, dtype=np.int32) % 4
        batch["streams"] = {cls.stream: np.broadcast_to(digits, (2, LENGTH))}
    assert_equal(*both_ways(spec, batch, key=KEY, layers=3, dropout=0.1))


def primitives(jaxpr, counts):
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        for inner in jaxprs_in_params(equation.params):
            primitives(inner, counts)
        if equation.primitive.name == "scan":
            counts["passes"] += equation.params["length"]
    return counts


def test_the_program_does_not_grow_with_the_depth():
    batch, seen = batch_of(2, LENGTH), {}
    for layers in (4, 16):
        merge, parameters = split(Transformer(shape(layers=layers), "rope,fox", LENGTH))
        loss = lambda p, merge=merge: mean_nll(merge(p), batch)  # noqa: E731
        for name, function in (("loss", loss), ("gradient", jax.grad(loss))):
            jaxpr = jax.make_jaxpr(function)(parameters).jaxpr
            seen[layers, name] = primitives(jaxpr, collections.Counter())
    for name, loops in (("loss", 1), ("gradient", 2)):
        few, many = seen[4, name], seen[16, name]
        assert few["scan"] == many["scan"] == loops
        assert (few.pop("passes"), many.pop("passes")) == (2 * loops, 8 * loops)
        # Of the whole of it, and so of what is compiled for each layer.
        assert few == many
    assert seen[4, "loss"]["dot_general"] > 10


def test_seeds_at_once_learn_as_without_the_loop():
    losses, config = {}, OptimizerConfig(warmup_steps=2)
    batches = [
        jax.tree.map(lambda *own: np.stack(own), *(batch_of(4, LENGTH, 9 * s + n) for s in (0, 1)))
        for n in range(3)
    ]
    for scan in (False, True):
        own = shape(scan, layers=2, dropout=0.1)
        models = [Transformer(own, "fope(length=100)", LENGTH, seed=seed) for seed in (0, 1)]
        trainer = Trainer(models, config, 3, (0, 1))
        state, losses[scan] = trainer.start(), []
        for batch in batches:
            state, values = trainer.step(state, batch)
            losses[scan].append(values["loss"])
    assert np.shape(losses[True]) == (3, 2)
    np.testing.assert_allclose(losses[True], losses[False], atol=2e-6)


CODE = """
import dataclasses, json, sys, warnings
sys.path.insert(0, "tests")
warnings.filterwarnings("error", message=".*donated.*")
import jax, numpy as np
from test_training import CONFIG, batch_of
from posenc.training import OptimizerConfig, Trainer
from posenc.transformer import Transformer

losses = []
for scan in (False, True):
    config = dataclasses.replace(CONFIG, width=32, layers=3, scan=scan)
    model = Transformer(config, "t5+fox", 12)
    trainer = Trainer(model, OptimizerConfig(warmup_steps=2), 10, 0, fsdp=4)
    state = trainer.start()
    for step in range(3):
        state, values = trainer.step(state, batch_of(16, 12, seed=step))
        losses.append(float(values["loss"]))
    declared = jax.tree.leaves(trainer.shardings)
    for leaf, sharding in zip(jax.tree.leaves(state), declared, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert len({shard.data.nbytes for shard in leaf.addressable_shards}) == 1
    kernel = state["parameters"]["blocks.1.mlp.up.kernel"]
    assert kernel.nbytes == 4 * kernel.addressable_shards[0].data.nbytes
    assert trainer._step._cache_size() == 1
print(json.dumps(losses))
"""


def test_parameters_that_devices_share_stay_where_they_are():
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    losses = np.reshape(json.loads(done.stdout.splitlines()[-1]), (2, 3))
    np.testing.assert_allclose(losses[1], losses[0], atol=1e-5)


def test_a_run_with_the_loop_ends_where_one_without_it_does(tmp_path, common, capsys):
    metrics, rows, weights = [], [], []
    for scan in (False, True):
        given = {**common, "encoding": ("alibi,rope*2",), "layers": 3, "scan": scan}
        (folder,) = train.main(train.Arguments(**given, out=tmp_path / str(scan)))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        metrics.append([json.loads(line) for line in lines])
        rows.append(evaluate([folder], (16,), tmp_path / f"scores-{scan}", targets=2, blocks=2))
        run = open_run(folder)
        assert run.config.model.scan is scan
        weights.append(split(load_model(run))[1])
        said = "alibi,rope*2: scan over 2 repeats of 1 layer(s), the other 1 unrolled"
        assert (said in capsys.readouterr().out) is scan
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert value.shape == weights[1][name].shape, name
    assert len(metrics[0]) == len(metrics[1]) > 2
    for plain, looped in zip(*metrics, strict=True):
        losses = [name for name in plain if name == "loss" or name.startswith("valid_nll")]
        assert losses
        for name in losses:
            np.testing.assert_allclose(looped[name], plain[name], atol=2e-6)
    assert len(rows[0]) == len(rows[1]) > 0
    for plain, looped in zip(*rows, strict=True):
        np.testing.assert_allclose(looped["nll"], plain["nll"], atol=2e-6)
        assert plain["recipe_hash"] != looped["recipe_hash"]


def test_a_cache_decodes_as_the_loop_sees_the_whole():
    model, batch = Transformer(shape(), "rope+fox", LENGTH), batch_of(2, LENGTH)
    places = batch["positions"], batch["segments"]
    whole = jax.jit(lambda: model(batch["inputs"], *places))()

    @jax.jit
    def step(cache, at):
        now = [jax.lax.dynamic_slice_in_dim(x, at, 1, 1) for x in (batch["inputs"], *places)]
        return model(now[0], now[1], now[2], None, cache)

    cache = model.start_cache(2, LENGTH)
    for at in range(LENGTH):
        logits, cache = step(cache, at)
        np.testing.assert_allclose(logits[:, 0], whole[:, at], atol=2e-5)


def test_gradients_by_position_are_measured_of_such_models_too():
    tokens = np.random.default_rng(0).integers(0, 31, (1, 9))
    wanted, got = (
        position_gradients(Transformer(shape(scan, layers=2, remat=remat), "rope", 8), tokens)
        for scan, remat in ((False, "none"), (True, "full"))
    )
    assert got.keys() == wanted.keys()
    for name, own in wanted.items():
        assert np.all(own["norm"][1:] > 0)
        np.testing.assert_allclose(got[name]["norm"], own["norm"], rtol=1e-5, atol=1e-7)
