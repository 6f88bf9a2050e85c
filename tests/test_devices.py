"""Several devices: the numbers of one, and every array where it is said to be."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from posenc.devices import check_batch_size, mesh_of
from posenc.errors import UserError

CODE = """
import json, sys, warnings
sys.path.insert(0, "tests")
warnings.filterwarnings("error", message=".*donated.*")
from pathlib import Path
import dataclasses, jax, numpy as np
from test_training import CONFIG, batch_of
from posenc.checkpoints import Checkpoints, abstract
from posenc.training import OptimizerConfig, Trainer
from posenc.transformer import Transformer

folder, fsdp, seeds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = OptimizerConfig(warmup_steps=2)
CONFIG = dataclasses.replace(CONFIG, width=32)
models = [Transformer(CONFIG, "wpe+t5", 128, seed=seed) for seed in range(max(seeds, 1))]

def trainer_of():
    if not seeds:
        return Trainer(models[0], config, 10, 0, fsdp=fsdp, accumulate=1)
    return Trainer(models, config, 10, list(range(seeds)), fsdp=fsdp)

def batch(step):
    if not seeds:
        return batch_of(16, 12, seed=step)
    own = [batch_of(16, 12, seed=99 * seed + step) for seed in range(seeds)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *own)

trainer = trainer_of()
state, losses, bytes_ = trainer.start(), [], {}
for step in range(5):
    state, values = trainer.step(state, batch(step))
    losses.append(np.asarray(values["loss"]).tolist())
    if step != 2:
        continue
    # Every leaf lies as declared, and takes its share of every device.
    declared = jax.tree.leaves(trainer.shardings)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), sharding in zip(leaves, declared, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (path, leaf.sharding)
        sizes = {shard.data.nbytes for shard in leaf.addressable_shards}
        assert len(sizes) == 1
        bytes_[jax.tree_util.keystr(path)] = [leaf.nbytes, sizes.pop()]
assert trainer._step._cache_size() == 1
# Go on from what another number of devices has saved, if there is any; else save.
checkpoints = Checkpoints(folder / "kept")
after = None
if checkpoints.steps():
    read = checkpoints.restore(5, abstract(trainer.start(), trainer.shardings))
    _, values = trainer.step(read, batch(5))
    after = np.asarray(values["loss"]).tolist()
else:
    checkpoints.save(5, state)
    checkpoints.finish()
    _, values = trainer.step(state, batch(5))
    after = np.asarray(values["loss"]).tolist()
valid = float(np.sum(trainer.nll(trainer.start(), batch(9))))
print(json.dumps({"devices": jax.device_count(), "mesh": dict(trainer.mesh.shape),
                  "losses": losses, "after": after, "valid": valid, "bytes": bytes_}))
"""


def on(devices, folder, fsdp, seeds):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), str(fsdp), str(seeds)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fsdp", "seeds", "mesh"),
    [
        (1, 0, {"seeds": 1, "data": 8, "fsdp": 1}),
        (4, 0, {"seeds": 1, "data": 2, "fsdp": 4}),
        (2, 2, {"seeds": 2, "data": 2, "fsdp": 2}),
    ],
)
def test_eight_devices_give_the_numbers_of_one_and_hold_their_shares(tmp_path, fsdp, seeds, mesh):
    one, eight = on(1, tmp_path, 1, seeds), on(8, tmp_path, fsdp, seeds)
    assert (one["devices"], eight["devices"], eight["mesh"]) == (1, 8, mesh)
    np.testing.assert_allclose(eight["losses"], one["losses"], atol=1e-5)
    np.testing.assert_allclose(eight["valid"], one["valid"], atol=1e-5)
    # The checkpoint of one device is read by eight.
    np.testing.assert_allclose(eight["after"], one["after"], atol=1e-5)
    assert one["bytes"].keys() == eight["bytes"].keys()
    for name, (whole, own) in eight["bytes"].items():
        split_by = mesh["seeds"] if seeds else 1
        if "kernel" in name or "embedding" in name or "table" in name:
            large = whole // max(seeds, 1) >= 4 * 1024
            split_by *= fsdp if large else 1
        assert whole == split_by * own, name
    shared = sum(own for name, (_, own) in eight["bytes"].items() if "kernel" in name)
    whole = sum(whole for name, (whole, _) in eight["bytes"].items() if "kernel" in name)
    if fsdp == 4:
        assert shared < 0.5 * whole


def test_what_the_devices_cannot_share_is_refused():
    with pytest.raises(UserError, match=r"--fsdp 3 does not divide the 1 device\(s\): give one"):
        mesh_of(3)
    with pytest.raises(UserError, match="--batch-size 6 cannot be shared by 1 devices in 4 parts"):
        check_batch_size(6, accumulate=4)
    with pytest.raises(UserError, match="--accumulate is 0: it must be at least 1"):
        check_batch_size(6, accumulate=0)


SCORE = """
import json, jax, numpy as np
from eval.scoring import Scorer
from posenc.transformer import Transformer, TransformerConfig

model = Transformer(TransformerConfig(vocab_size=31, layers=2, width=16, heads=2), "rope+t5", 16)
scorer = Scorer(model, 16, batch_tokens=16 * 24)
rng = np.random.default_rng(0)
windows = [rng.integers(0, 31, n) for n in [16] * 9 + [5, 12]]
nll = scorer.score(windows)
seen = scorer.nll(scorer._parameters, *jax.device_put(
    (np.zeros((scorer.rows, 16), np.int32),) * 3 + ({},), scorer._by_row))
print(json.dumps({"rows": scorer.rows, "nll": [own.tolist() for own in nll],
                  "devices": len(seen.sharding.device_set)}))
"""


@pytest.mark.slow
def test_scores_are_those_of_one_device_and_all_devices_make_them():
    found = {}
    for devices in (1, 8):
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        done = subprocess.run(
            [sys.executable, "-c", SCORE],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found[devices] = json.loads(done.stdout)
        assert (found[devices]["rows"], found[devices]["devices"]) == (24, devices)
    for one, eight in zip(found[1]["nll"], found[8]["nll"], strict=True):
        np.testing.assert_allclose(one, eight, atol=1e-5)
