"""train.py as a user runs it: real processes, killed and resumed; folders; bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import train
from posenc.checkpoints import Checkpoints
from posenc.data import cache_folder
from posenc.encodings import EncodingError
from posenc.errors import UserError
from posenc.runs import RunConfig, open_run, start_run
from posenc.transformer import preset

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(1)
    for index in range(160):
        words = rng.choice(["one", "two", "three", "four", "five"], 120)
        (folder / f"{index}.txt").write_text(" ".join(words))
    return str(folder / "*.txt")


def options(corpus, out, **changed):
    given = {
        "encoding": ("wpe",),
        "model": "nano",
        "data": corpus,
        "train_length": 16,
        "batch_size": 4,
        "steps": 40,
        "warmup_steps": 5,
        "eval_every": 20,
        "eval_tokens": 64,
        "checkpoint_every": 4,
        "out": Path(out),
    }
    return train.Arguments(**{**given, **changed})


def command(corpus, out, *more):
    return [
        *(sys.executable, "train.py", "--encoding", "wpe", "--model", "nano", "--data", corpus),
        *("--train-length", "16", "--batch-size", "4", "--steps", "40", "--warmup-steps", "5"),
        *("--eval-every", "20", "--eval-tokens", "64", "--checkpoint-every", "4"),
        *("--dropout", "0.1", "--out", str(out), *more),
    ]


def run_command(*words):
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)


def one_line(done):
    """Check that a refused command said one line, and give it."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def parameter_bytes(folder):
    run = open_run(folder)
    from posenc.runs import load_model
    from posenc.training import split

    parameters = split(load_model(run, run.config.steps))[1]
    return {name: np.asarray(value).tobytes() for name, value in parameters.items()}


@pytest.fixture(scope="session")
def uninterrupted(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    done = run_command(*command(corpus, out))
    assert done.returncode == 0, done.stderr
    return out / "wpe-T16-seed0"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_killed_at_a_random_moment_and_resumed_gives_the_same_bits(
    corpus, uninterrupted, tmp_path, number
):
    seed = random.randrange(10**6)
    print("moments from seed", seed)  # shown where the test fails
    moment = random.Random(seed)
    folder = tmp_path / "wpe-T16-seed0"
    for attempt in range(4):
        process = subprocess.Popen(
            command(corpus, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        # Wait for a step that was logged, so that something is under way; twice at the most.
        metrics, target = folder / "metrics.jsonl", 10 * (attempt + 1)
        while process.poll() is None and attempt < 2:
            rows = metrics.read_text().splitlines() if metrics.exists() else []
            if any(f'"step": {target}' in row for row in rows):
                time.sleep(moment.random() * 0.1)
                process.send_signal(number)
                break
            time.sleep(0.005)
        _, errors = process.communicate(timeout=300)
        if process.returncode == 0:
            break
        expected = -number if number == signal.SIGKILL else 128 + number
        assert process.returncode == expected, errors.decode()
    assert process.returncode == 0, errors.decode()
    assert parameter_bytes(folder) == parameter_bytes(uninterrupted)
    starts = json.loads((folder / "provenance.json").read_text())["starts"]
    assert len(starts) == attempt + 1
    # The metrics are those of a run never interrupted, each step once.
    values = {}
    for path in (folder, uninterrupted):
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            for name in ("seconds", "tokens_per_second", "tokens_per_second_per_device"):
                row.pop(name, None)
        values[path] = rows
    assert values[folder] == values[uninterrupted]


@pytest.mark.slow
def test_killed_at_twenty_moments_nothing_that_was_finished_is_lost(corpus, tmp_path):
    """One run, ended twenty times at seeded moments; it saves at every second step, in threads."""
    more = ("--steps", "600", "--checkpoint-every", "2", "--eval-every", "200")
    done = run_command(*command(corpus, tmp_path / "whole", *more))
    assert done.returncode == 0, done.stderr
    folder, moment, ended = tmp_path / "many" / "wpe-T16-seed0", random.Random(5), 0
    while True:
        process = subprocess.Popen(
            command(corpus, folder.parent, *more),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        number = moment.choice([signal.SIGKILL, signal.SIGTERM])
        before = max(Checkpoints(folder / "checkpoints").steps(), default=0)
        # From the first checkpoint that it adds on, so that it is at work.
        while process.poll() is None and ended < 20:
            if max(Checkpoints(folder / "checkpoints").steps(), default=0) > before:
                time.sleep(moment.random() * 0.05)
                process.send_signal(number)
                ended += 1
                break
            time.sleep(0.002)
        _, errors = process.communicate(timeout=300)
        starts = json.loads((folder / "provenance.json").read_text())["starts"]
        assert starts[-1]["resumed_from"] == (before or None)
        if process.returncode == 0:
            break
        expected = -number if number == signal.SIGKILL else 128 + number
        assert process.returncode == expected, errors.decode()
    assert ended == 20
    assert parameter_bytes(folder) == parameter_bytes(tmp_path / "whole" / "wpe-T16-seed0")


def test_a_finished_run_is_left_as_it_is_and_another_config_refused(corpus, uninterrupted):
    before = {
        path: path.stat().st_mtime_ns
        for path in uninterrupted.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    again = run_command(*command(corpus, uninterrupted.parent))
    assert again.returncode == 0
    assert "finished before, left as it is" in again.stdout
    line = one_line(run_command(*command(corpus, uninterrupted.parent, "--learning-rate", "0.5")))
    assert "optimizer.learning_rate (0.001 there, 0.5 now)" in line
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before


def test_a_run_folder_holds_what_it_should(uninterrupted):
    config = json.loads((uninterrupted / "config.json").read_text())
    run = open_run(uninterrupted)
    assert RunConfig.from_json(config["config"]) == run.config
    assert config["hash"] == run.hash
    start = run.last_start
    assert start["versions"]["jax"]
    assert start["device"].endswith("(cpu)")
    assert run.checkpoints.steps() == sorted({36, 40, run.checkpoints.best()})
    rows = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    valid = [row for row in rows if "valid_nll_16" in row]
    assert [row["step"] for row in valid] == list(range(4, 41, 4))  # at every checkpoint
    # wpe ends at the training length: no loss is made up beyond it.
    assert all(row["valid_nll_32"] is None and row["valid_nll_64"] is None for row in valid)
    assert valid[-1]["valid_nll_16"] < valid[0]["valid_nll_16"]
    assert list(uninterrupted.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("how", ["altered", "truncated", "missing", "added"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_offered(uninterrupted, tmp_path, how):
    copy = Path(shutil.copytree(uninterrupted, tmp_path / "run"))
    folder = copy / "checkpoints" / "40"
    victim = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    if how == "altered":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif how == "truncated":
        victim.write_bytes(content[:-1])
    elif how == "missing":
        victim.unlink()
    else:
        (folder / "stray").write_text("x")
    run = open_run(copy)
    with pytest.raises(UserError, match=r"checkpoint 40 .* is damaged .*--checkpoint 36"):
        run.checkpoints.verify(40)
    run.checkpoints.verify(36)
    # As offered: training goes on from 36 and ends in the same bits.
    config = run.config
    arguments = options(config.data, tmp_path, name="run", checkpoint=36, dropout=0.1)
    assert train.configs_of(arguments) == [config]
    train.main(arguments)
    assert parameter_bytes(copy) == parameter_bytes(uninterrupted)


def test_one_command_trains_several_and_differs_in_nothing_else(corpus, tmp_path):
    folders = train.main(
        options(corpus, tmp_path, encoding=("nope", "alibi"), steps=4, seed=(0, 1), eval_every=4)
    )
    assert [f.name for f in folders] == [
        *("nope-T16-seed0", "alibi-T16-seed0", "nope-T16-seed1", "alibi-T16-seed1")
    ]
    configs = [json.loads((f / "config.json").read_text())["config"] for f in folders]
    for config in configs:
        config.pop("encoding")
    assert configs[0] == configs[1]
    assert configs[0] != configs[2]


def test_a_folder_that_is_in_the_way_is_found_before_the_first_run_trains(corpus, tmp_path):
    (tmp_path / "alibi-T16-seed0").mkdir()
    (tmp_path / "alibi-T16-seed0" / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="alibi-T16-seed0 is not empty and no run"):
        train.main(options(corpus, tmp_path, encoding=("nope", "alibi")))
    assert not (tmp_path / "nope-T16-seed0").exists()


@pytest.mark.fast
def test_one_thing_has_one_spec_and_two_things_two_names():
    def config(encoding):
        return RunConfig(encoding=encoding, preset="nano", model=preset("nano"), data="x")

    assert config("rope(theta=10000.0)") == config(" rope( theta = 1e4 )")
    assert config("rope(theta=10000.0)").encoding == "rope(theta=10000)"
    names = [config(spec).default_name for spec in ("rope+alibi", "rope,alibi", "rope*2,alibi")]
    assert len(set(names)) == 3
    assert config("rope(theta=10000, pairing=half),nope").default_name == (
        "rope-pairing-half_then_-theta-10000-_then_nope-T64-seed0"
    )


@pytest.mark.fast
def test_a_spec_given_twice_is_one_run(corpus, tmp_path):
    configs = train.configs_of(options(corpus, tmp_path, encoding=("rope", "alibi", "rope()")))
    assert [config.encoding for config in configs] == ["rope", "alibi"]


def test_a_signal_in_the_last_step_is_heard(corpus, tmp_path, monkeypatch):
    step = train.Trainer.step
    seen = []

    def signalled(self, state, batch):
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, state, batch)

    monkeypatch.setattr(train.Trainer, "step", signalled)
    with pytest.raises(SystemExit) as stopped:
        train.main(options(corpus, tmp_path, encoding=("nope", "alibi"), steps=3))
    assert stopped.value.code == 128 + signal.SIGTERM
    assert open_run(tmp_path / "nope-T16-seed0").finished
    assert not (tmp_path / "alibi-T16-seed0").exists()


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        train.main(options(corpus, tmp_path, learning_rate=1e30, checkpoint_every=1))
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert "at step" in said
    assert "last good checkpoint: step 1;" in said
    assert "wpe-T16-seed0/config.json" in said
    # What was saved is good: nothing that is not finite was.
    checkpoints = Checkpoints(tmp_path / "wpe-T16-seed0" / "checkpoints")
    assert checkpoints.steps() == [1]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoding": ("ropee",)}, r"unknown encoding 'ropee': did you mean rope"),
        ({"model": "gpt2-smal"}, r"unknown model 'gpt2-smal': did you mean gpt2-small"),
        ({"encoding": ("rope(thta=1)",)}, r"rope has no option 'thta': did you mean theta"),
        ({"encoding": ("rope",), "width": 6, "heads": 2}, r"head width is 3 .*choose an even one"),
        ({"heads": 5}, r"width 32 is not divisible by 5 heads: try heads of"),
        ({"kv_heads": 3}, r"2 heads cannot share 3 key-value heads"),
        ({"data": "manuels"}, r"manuels.*manuals"),
        ({"data": "/nowhere/*.txt"}, r"/nowhere"),
        ({"tokenizer": "byte"}, r"byte.*bytes"),
        ({"train_length": 100_000}, r"100000 tokens.*100001"),
        ({"train_length": 0}, r"--train-length is 0: it must be at least 1"),
        ({"steps": 0}, r"--steps is 0"),
        ({"batch_size": 0}, r"--batch-size is 0"),
        ({"seed": (-1,)}, r"seed -1"),
        ({"dropout": 1.5}, r"dropout is 1.5"),
        ({"keep": 0}, r"--keep is 0"),
        ({"learning_rate": -1.0}, r"--learning-rate is -1.0: it must be above 0"),
        ({"warmup_steps": -5}, r"--warmup-steps is -5"),
        ({"encoding": ("wpe(max_position=8)",)}, r"position 8 has no representation in wpe"),
        ({"encoding": ("rope", "alibi"), "checkpoint": 4}, r"--checkpoint 4 is of one run"),
        ({"checkpoint": 4}, r"--checkpoint 4: .* has no such step; it has: none"),
        ({"encoding": ("rope", "alibi"), "name": "x"}, r"--name x is of one run, and these are 2"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(corpus, tmp_path, changed, message):
    out = tmp_path / "out"
    with pytest.raises((UserError, EncodingError), match=message):
        train.main(options(corpus, out, **changed))
    assert not out.exists()


def test_refusals_are_one_line_and_exit_code_2(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    cases = {
        ("--encoding", "ropee"): "did you mean rope",
        ("--out", str(tmp_path / "file" / "runs")): "Not a directory",
        ("--encodng", "rope"): "--encoding",
        ("--steps", "3", "b.txt"): "must be one quoted glob",
    }
    for more, message in cases.items():
        words = command(corpus, tmp_path / "out", *more)
        assert message in one_line(run_command(*words))
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_and_loses_nothing(corpus, tmp_path):
    limited = "import resource, signal, sys, runpy; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
    limited += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = command(corpus, tmp_path)
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", limited, *words[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    line = one_line(done)
    assert "could not be written" in line
    assert "File too large; there is no earlier one" in line
    folder = tmp_path / "wpe-T16-seed0"
    assert Checkpoints(folder / "checkpoints").steps() == []
    # With room again, the same command goes on.
    again = run_command(*words)
    assert again.returncode == 0, again.stderr
    assert open_run(folder).finished


@pytest.mark.fast
def test_two_processes_do_not_train_in_one_folder(tmp_path):
    config = RunConfig(encoding="nope", preset="nano", model=preset("nano"), data="x")
    first = start_run(tmp_path, None, config, {"name": "x"})
    with pytest.raises(UserError, match="is being trained by another process"):
        start_run(tmp_path, None, config, {"name": "x"})
    first._lock.close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(UserError, match="is not empty and no run"):
        start_run(tmp_path, "other", config, {"name": "x"})
    with pytest.raises(UserError, match=r"data identity\.name"):
        start_run(tmp_path, None, config, {"name": "y"})


@pytest.mark.fast
def test_the_compilation_cache_is_stated(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    from posenc.compilation import keep_compiled

    assert keep_compiled() == cache_folder() / "compiled"
