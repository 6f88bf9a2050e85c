"""Several seeds in one compiled step: each is the run that it would have been alone."""

import json
import shutil

import jax
import numpy as np
import pytest
from test_training import CONFIG, batch_of

import posenc
import train
from eval.__main__ import main
from eval.evaluate import evaluate
from posenc.encodings import EncodingError
from posenc.errors import UserError
from posenc.optimizer import OptimizerConfig
from posenc.runs import RunConfig, open_run
from posenc.training import Trainer, split
from posenc.transformer import Transformer, TransformerConfig

SHAPE = TransformerConfig(vocab_size=31, layers=2, width=16, heads=2, init_std=0.2, dropout=0.1)
SEEDS = (3, 4, 5)
STEPS = 5


def stacked(batches):
    return jax.tree.map(lambda *own: np.stack(own), *batches)


def batches_of(seed):
    return [batch_of(4, 12, seed=100 * seed + step) for step in range(STEPS)]


def losses_of(trainer, batches):
    state, found = trainer.start(), []
    for batch in batches:
        state, values = trainer.step(state, batch)
        found.append(np.asarray(values["loss"]))
    return np.stack(found), state


@pytest.mark.parametrize("encoding", ["wpe", "fope(length=100)+t5"])
def test_each_seed_is_the_run_that_it_would_have_been_alone(encoding):
    config = OptimizerConfig(warmup_steps=2)
    models = [Transformer(SHAPE, encoding, 12, seed=seed) for seed in SEEDS]
    together = Trainer(models, config, STEPS, SEEDS)
    for index, model in enumerate(models):
        for name, value in split(model)[1].items():
            np.testing.assert_array_equal(together.start()["parameters"][name][index], value)
    batches = [stacked([batches_of(seed)[step] for seed in SEEDS]) for step in range(STEPS)]
    got, state = losses_of(together, batches)
    validated = together.nll(state, stacked([batches_of(9)[0]] * 3))
    np.testing.assert_array_equal(state["step"], [STEPS] * 3)
    for index, seed in enumerate(SEEDS):
        alone = Trainer(Transformer(SHAPE, encoding, 12, seed=seed), config, STEPS, seed)
        wanted, own = losses_of(alone, batches_of(seed))
        # Products of several matrices at once are added up in another order.
        np.testing.assert_allclose(got[:, index], wanted, atol=2e-6)
        np.testing.assert_allclose(validated[index], alone.nll(own, batches_of(9)[0]), atol=2e-6)


def test_a_seed_whose_loss_is_not_finite_stays_as_it_was_and_the_others_go_on():
    models = [Transformer(CONFIG, "wpe", 12, seed=seed) for seed in SEEDS]
    trainer = Trainer(models, OptimizerConfig(), STEPS, SEEDS)
    batches = [stacked([batches_of(seed)[step] for seed in SEEDS]) for step in range(STEPS)]
    wanted, healthy = losses_of(trainer, batches)
    spoilt = [dict(batch) for batch in batches]
    # On the device, a position that the table lacks makes NaN.
    spoilt[2]["positions"] = spoilt[2]["positions"] + np.array([0, 99, 0])[:, None, None]
    got, state = losses_of(trainer, spoilt)
    np.testing.assert_array_equal(state["step"], [STEPS, ~2, STEPS])
    np.testing.assert_array_equal(got[:, [0, 2]], wanted[:, [0, 2]])
    _, two_steps = losses_of(trainer, batches[:2])
    for kind in ("parameters", "optimizer"):
        for after, then, well in zip(
            *(jax.tree.leaves(s[kind]) for s in (state, two_steps, healthy)), strict=True
        ):
            np.testing.assert_array_equal(after[1], then[1])
            np.testing.assert_array_equal(after[0], well[0])


def test_sources_of_randomness_are_fixed_one_by_one():
    config = RunConfig("wpe", "", CONFIG, "", train_length=12, seed=7, seeds=2)
    first, second = config.members
    assert (first.seed, first.init, first.data, first.encoding) == (7, 7, 7, 7)
    assert (second.seed, second.init, second.data, second.encoding) == (8, 8, 8, 8)
    plain = split(Transformer(CONFIG, "wpe", 12, seed=7))[1]
    for name, value in split(config.model_of(first))[1].items():
        np.testing.assert_array_equal(value, plain[name])

    def parameters(**fixed):
        own = RunConfig("wpe", "", CONFIG, "", train_length=12, seed=7, seeds=2, **fixed)
        assert own.default_name.endswith(
            "seed7to8"
            + "".join(f"-{name.removesuffix('_seed')}{seed}" for name, seed in fixed.items())
        )
        return [split(own.model_of(member))[1] for member in own.members], own.members

    table, kernel = "encoding.parts.0.table", "blocks.1.mlp.up.kernel"
    for fixed, alike in (("init_seed", kernel), ("encoding_seed", table)):
        (one, other), _ = parameters(**{fixed: 3})
        for name in (table, kernel):
            assert np.array_equal(one[name], other[name]) == (name == alike)
    _, members = parameters(data_seed=3)
    assert [member.data for member in members] == [3, 3]
    with pytest.raises(UserError, match=r"--seeds is 0: it must be at least 1"):
        RunConfig("wpe", "", CONFIG, "", seeds=0)
    with pytest.raises(UserError, match=r"seed 4294967296 is outside"):
        RunConfig("wpe", "", CONFIG, "", seed=2**32 - 1, seeds=2)


def metrics(folder, name="loss"):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], row.get("seed")): row[name] for row in rows if name in row}


def test_a_folder_of_seeds_is_resumed_and_scored_as_runs_of_one_seed_are(tmp_path, common):
    class Killed(Exception):
        pass

    def kill(batches, several, count=[0]):  # noqa: B006  (counts over calls)
        count[0] += 1
        if count[0] == 1 + 5:  # of validation one, then steps: after the checkpoint of the third
            raise Killed
        return KEPT(batches, several)

    arguments = train.Arguments(out=tmp_path, seed=(5,), seeds=2, **common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "together", kill)
        with pytest.raises(Killed):
            train.main(arguments)
    (folder,) = train.main(arguments)
    assert folder.name == "wpe-T16-seed5to6"
    starts = json.loads((folder / "provenance.json").read_text())["starts"]
    assert [start["resumed_from"] for start in starts] == [None, 3]
    alone = train.main(train.Arguments(out=tmp_path, seed=(5, 6), **common))
    for seed, own in zip((5, 6), alone, strict=True):
        for name in ("loss", "valid_nll_16"):
            wanted = metrics(own, name)
            got = {step: v for (step, s), v in metrics(folder, name).items() if s == seed}
            assert got.keys() == {step for step, _ in wanted}
            for step, value in got.items():
                assert value == pytest.approx(wanted[step, None], abs=5e-6)
    rows = evaluate([folder], (16, 32), tmp_path / "scores")
    lone = evaluate(alone, (16, 32), tmp_path / "scores")
    place = ("seed", "protocol", "length", "position_from")
    losses = [{tuple(row[p] for p in place): row["nll"] for row in some} for some in (rows, lone)]
    assert losses[0].keys() == losses[1].keys()
    assert {seed for seed, *_ in losses[0]} == {5, 6}
    for key, nll in losses[0].items():
        assert nll == (None if losses[1][key] is None else pytest.approx(losses[1][key], abs=2e-5))
    with pytest.raises(UserError, match=r"trained the seeds 5, 6 at once, and none of them is"):
        posenc.load(folder)
    with pytest.raises(UserError, match="at once, and not 7: name one of them"):
        posenc.load(folder, seed=7)
    one, other = (split(posenc.load(folder, seed=seed))[1] for seed in (5, 6))
    assert not np.array_equal(one["embedding.embedding"], other["embedding.embedding"])


KEPT = train.together


def test_a_frozen_seed_is_said_and_left_out_of_evaluations(tmp_path, common, capsys):
    def poison(batches, several, count=[0]):  # noqa: B006  (counts over calls)
        batch = KEPT(batches, several)
        count[0] += 1
        if count[0] == 1 + 4:  # of validation one, then the fourth step
            move = np.array([0, 99])[:, None, None]
            batch = {**batch, "positions": batch["positions"] + move}
        return batch

    arguments = train.Arguments(out=tmp_path, seeds=2, **common)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "together", poison)
        with pytest.raises(SystemExit) as stopped:
            train.main(arguments)
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert "seed 1 is frozen: loss nan and gradient norm nan at step 4" in said.out
    assert "seed 1, loss nan and gradient norm nan at step 4: frozen there" in said.err
    folder = tmp_path / "wpe-T16-seed0to1"
    run = open_run(folder)
    assert run.frozen(6) == {1: 3}
    assert {step for step, seed in metrics(folder, "valid_nll_16") if seed == 1} == {3}
    rows = evaluate([folder], (16,), tmp_path / "scores")
    assert {row["seed"] for row in rows} == {0}
    assert all(row["frozen_seeds"] == [1] for row in rows)
    said = capsys.readouterr().out
    assert "seed 1 is left out: its loss was not finite after 3 steps of 6" in said
    # Every seed of a run: the others are scored, and alone it is refused.
    ruined = tmp_path / "ruined"
    shutil.copytree(folder, ruined)
    with pytest.MonkeyPatch.context() as patch:
        found = {"ruined": {0: 2, 1: 3}, folder.name: {1: 3}}
        patch.setattr(type(run), "frozen", lambda self, step: found[self.name])
        rows = evaluate([ruined, folder], (16,), tmp_path / "scores")
        assert {(row["run"], row["seed"]) for row in rows} == {(folder.name, 0)}
        line = f"{ruined}: every seed diverged (2 of 2, after 2 to 3 steps of 6): it has no rows\n"
        assert capsys.readouterr().err.count(line) == 1
        with pytest.raises(SystemExit) as stopped:
            main(["score", f"{ruined}", "--lengths", "16", "--report", f"{tmp_path / 'report'}"])
        assert stopped.value.code == 2
        *_, last = capsys.readouterr().err.strip().splitlines()
        assert f"nothing to score: every seed of {ruined} diverged; train with a lower" in last


def test_a_sampler_that_cannot_place_a_seed_is_refused_before_anything_is_written(tmp_path, common):
    arguments = train.Arguments(
        out=tmp_path / "new", seeds=2, positions="randomized(max_position=9)", **common
    )
    with pytest.raises(EncodingError, match="16 tokens do not find 16 positions below 9"):
        train.main(arguments)
    assert not (tmp_path / "new").exists()
