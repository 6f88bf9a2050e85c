"""Runs that begin with the weights of another, and the checkpoints that are kept for them."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from test_seeds import batches_of, stacked
from test_training import CONFIG

import train
from eval.evaluate import evaluate
from posenc.continuing import carry_over, check_child, parent_of
from posenc.errors import UserError
from posenc.optimizer import OptimizerConfig
from posenc.runs import RunConfig, open_run, recipe_hash, start_run
from posenc.training import Trainer

# Its rate is the same at every step but the last.
FLAT = OptimizerConfig(warmup_steps=0, schedule="wsd", decay_share=1e-6)


def trainer_of(config):
    models = [config.model_of(member) for member in config.members]
    several = config.seeds > 1
    seeds = [member.seed for member in config.members]
    return Trainer(models if several else models[0], FLAT, 50, seeds if several else seeds[0])


def trained(folder, encoding, seeds=1, steps=3):
    """Train a parent for some steps; give its folder, its state and its trainer."""
    config = RunConfig(
        encoding, "", CONFIG, "", train_length=12, steps=steps, optimizer=FLAT, seeds=seeds
    )
    run = start_run(folder, None, config, {"tokenizer": "bytes"})
    trainer = trainer_of(config)
    state = trainer.start()
    for step in range(steps):
        batch = stacked([batches_of(s)[step] for s in range(seeds)])
        state, _ = trainer.step(state, batch if seeds > 1 else batches_of(0)[step])
    run.checkpoints.save(steps, state)
    run.checkpoints.finish()
    return run.folder, state, trainer


def child_of(folder, encoding, keep=False, length=12, **changes):
    run, parent = parent_of(folder, None, keep)
    config = dataclasses.replace(
        run.config, encoding=encoding, train_length=length, parent=parent, **changes
    )
    trainer = trainer_of(config)
    state, carried = carry_over(run, config, trainer.start())
    return trainer, state, carried


def equal(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_has_a_place_is_carried_over_and_the_rest_is_named(tmp_path):
    folder, parent, _ = trained(tmp_path, "wpe+t5")
    shared = {name for name in parent["parameters"] if not name.startswith("encoding.")}
    table, bias = "encoding.parts.0.table", "encoding.parts.1.table"
    bias = next(n for n in parent["parameters"] if n.startswith("encoding.parts.1."))
    for encoding, length, own, new, left in (
        ("wpe+t5", 12, {table, bias}, {}, ()),
        ("wpe+t5", 24, {bias}, {table: "[12, 16] there, [24, 16] here"}, ()),
        ("nope", 12, set(), {}, (table, bias)),
        ("t5", 12, set(), {bias.replace("1", "0", 1): ""}, (table, bias)),
    ):
        trainer, state, carried = child_of(folder, encoding, length=length)
        assert set(carried.over) == shared | own
        assert (carried.new, set(carried.left) - set(carried.new)) == (
            new,
            set(left) - set(new),
        )
        fresh = trainer.start()["parameters"]
        for name, value in state["parameters"].items():
            wanted = parent["parameters"] if name in carried.over else fresh
            np.testing.assert_array_equal(value, wanted[name])
    said = str(child_of(folder, "wpe+t5", length=24)[2])
    assert said.endswith(
        "new: encoding.parts.0.table ([12, 16] there, [24, 16] here); left out: none"
    )


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_its_moments_a_child_steps_as_its_parent_would_have(tmp_path, seeds):
    folder, parent, trainer = trained(tmp_path, "t5", seeds)
    batch = stacked([batches_of(s)[4] for s in range(seeds)]) if seeds > 1 else batches_of(0)[4]
    own, state, _ = child_of(folder, "t5", keep=True)
    fresh, plain, _ = child_of(folder, "t5")
    # Before the parent's state is used up.
    equal(state["parameters"], parent["parameters"])
    equal(plain["optimizer"], fresh.start()["optimizer"])
    wanted, _ = trainer.step(parent, batch)
    got, _ = own.step(state, batch)
    equal(got["parameters"], wanted["parameters"])
    np.testing.assert_array_equal(got["step"], np.ones_like(wanted["step"]))
    other, _ = fresh.step(plain, batch)
    apart = [
        float(np.abs(np.asarray(a) - np.asarray(b)).max())
        for a, b in zip(*(jax.tree.leaves(s["parameters"]) for s in (other, wanted)), strict=True)
    ]
    assert max(apart) > 1e-4


def test_what_cannot_be_continued_is_refused(tmp_path):
    folder, _, _ = trained(tmp_path, "rope")
    run, parent = parent_of(folder, None, False)
    assert (parent.step, parent.tokens, parent.encoding) == (3, 3 * 32 * 12, "rope")
    with pytest.raises(UserError, match=r"has no checkpoint of step 7; it has: 3"):
        parent_of(folder, 7, False)
    config = dataclasses.replace(run.config, parent=parent)
    check_child(run, config, {"tokenizer": "bytes"})
    with pytest.raises(UserError, match="was trained with tokenizer bytes, and this run has bpe"):
        check_child(run, config, {"tokenizer": "bpe"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "frozen", lambda self, step: {4: 2})
        with pytest.raises(UserError, match="the loss of seed 4 was not finite after 2 steps"):
            check_child(run, config, {"tokenizer": "bytes"})
    # Runs that go on from each encoding's own parent have one recipe.
    other = dataclasses.replace(parent, run="elsewhere", encoding="alibi", weights="0")
    recipes = [
        recipe_hash(dataclasses.replace(config, encoding=encoding, parent=own))
        for encoding, own in (
            ("rope", parent),
            ("alibi", other),
            ("rope", dataclasses.replace(parent, step=2)),
            ("rope", None),
        )
    ]
    assert recipes[0] == recipes[1]
    assert len(set(recipes)) == 3
    with pytest.raises(UserError, match=r"trained 1 seed\(s\) at once, and this run has 2"):
        check_child(run, dataclasses.replace(config, seeds=2), {"tokenizer": "bytes"})


def test_a_run_is_continued_without_its_encoding_at_another_length(tmp_path, common, capsys):
    keep = {"keep_at": ("1", "50%"), "keep": 1}
    (folder,) = train.main(
        train.Arguments(out=tmp_path, **{**common, **keep, "encoding": ("rope",)})
    )
    steps = open_run(folder).checkpoints.steps()
    assert {1, 3, 6} <= set(steps)
    capsys.readouterr()
    options = {**common, "encoding": ("nope",), "train_length": 24, "init_from": folder}
    arguments = train.Arguments(out=tmp_path, init_step=3, optimizer="keep", **options)
    (child,) = train.main(arguments)
    assert child.name == f"nope-T24-seed0-from-{folder.name}"
    assert "at step 3: 20 parameters carried over; new: none; left out: none" in (
        capsys.readouterr().out
    )
    train.main(arguments)
    assert "finished before" in capsys.readouterr().out
    rows = evaluate([child], (24,), tmp_path / "scores")
    for row in rows:
        parent = row["parent"]
        assert (parent["step"], parent["encoding"], parent["optimizer"]) == (3, "rope", "keep")
        assert parent["tokens"] == 3 * 4 * 16
    losses = [json.loads(line) for line in (child / "metrics.jsonl").read_text().splitlines()]
    assert losses
    for wrong, message in (
        ({"width": 48}, "--width 48 is not that of --init-from"),
        ({"model": "mini"}, "--model mini is not that of --init-from"),
        ({"init_step": 2}, "has no checkpoint of step 2; it has: 1, 3"),
        ({"init_from": None, "init_step": 2}, "--init-step and --optimizer are of --init-from"),
    ):
        with pytest.raises(UserError, match=message):
            train.main(train.Arguments(out=tmp_path, **{**options, **wrong}))


@pytest.mark.fast
def test_steps_to_keep_are_named_in_three_ways():
    assert train.kept_steps(("10%", "25%", "100%"), 600) == {60, 150, 600}
    assert train.kept_steps(("log",), 20) == {1, 2, 4, 8, 16}
    assert train.kept_steps(("7", "50%"), 20) == {7, 10}
    for wrong in ("0", "21", "101%", "half", "1%"):
        with pytest.raises(UserError, match=f"--keep-at {wrong}: give a step from 1 to 20"):
            train.kept_steps((wrong,), 20)
