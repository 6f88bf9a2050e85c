"""Sweeps: configs read and refused, cells stopped, failed, killed, preempted and resumed."""

import contextlib
import csv
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from eval.__main__ import main
from eval.report.rows import read_rows
from posenc.checkpoints import Checkpoints
from posenc.encodings import EncodingError
from posenc.errors import UserError
from posenc.runs import Run, recipe_hash
from studies import cells
from studies.__main__ import Status, status
from studies.cells import Busy, cell_file, held, is_held, state
from studies.executors import Resources, run_local, submit
from studies.sweep import read_sweep
from studies.tuning import CRITERION, choices, known, tuned, write_tuning

ROOT = Path(__file__).parent.parent
LISTS = {
    "encodings": ["wpe", "alibi"],
    "train_lengths": [16],
    "seeds": [0, 1],
    "models": ["nano"],
    "multiples": [1, 2],
}
TRAIN = {"steps": 60, "batch_size": 4, "warmup_steps": 5, "eval_every": 60, "eval_tokens": 64}


def written(folder, train=TRAIN, score=(), tune=None, **changed):
    """A config file: JSON's lists, numbers and texts are TOML's as well."""
    keys = {"name": "test", "out": str(folder / "out"), **LISTS, **changed}
    lines = [f"{k} = {json.dumps(v)}" for k, v in keys.items() if v is not None]
    lines += ["[train]", *(f"{k} = {json.dumps(v)}" for k, v in dict(train).items())]
    lines += ["[score]", *(f"{k} = {json.dumps(v)}" for k, v in dict(score).items())]
    if tune is not None:
        lines += ["[tune]", *(f"{k} = {json.dumps(v)}" for k, v in dict(tune).items())]
    path = folder / "config.toml"
    path.write_text("\n".join(lines))
    return path


def swept(folder, **changed):
    return read_sweep(written(folder, **changed))


@pytest.mark.fast
def test_a_config_is_its_cells_seed_by_seed(tmp_path):
    sweep = swept(
        tmp_path,
        train={**TRAIN, "learning-rate": 3e-3, "qk_norm": True},
        score={"bos": "prepend", "extend": ["clamp"], "allow_plugins": True},
        models=["nano", "tiny"],
        train_lengths=[16, 32],
        multiples=[0.5, 2],
    )
    names = [cell.name for cell in sweep.cells]
    assert len(names) == 16
    assert names[:3] == ["nano-wpe-T16-seed0", "nano-alibi-T16-seed0", "nano-wpe-T32-seed0"]
    assert names[8].endswith("seed1")
    for cell in sweep.cells:
        config = cell.config
        assert f"{config.preset}-{config.default_name}" == cell.name == cell.folder.name
        assert (config.steps, config.optimizer.learning_rate) == (60, 3e-3)
        assert config.model.qk_norm
        assert cell.words[-4:] == ("--out", str(tmp_path / "out/runs"), "--name", cell.name)
    # One ladder for all: of 16 and of 32.
    words = " ".join(sweep.score_words)
    assert words.startswith("--lengths 8 16 32 64 --report ")
    assert words.endswith("--bos prepend --extend clamp --allow-plugins")
    # A spec that is written in two ways is one cell.
    same = swept(tmp_path, encodings=["rope(theta=500.0)", "rope( theta=500 )"])
    assert [cell.config.encoding for cell in same.cells] == ["rope(theta=500)"] * 2


@pytest.mark.fast
def test_the_committed_config_is_as_its_comment_says():
    sweep = read_sweep(ROOT / "studies" / "small.toml")
    assert len({cell.config.encoding for cell in sweep.cells}) == 3
    assert len({cell.config.seed for cell in sweep.cells}) == 3
    assert len(sweep.cells) == 9
    # What the comment says came out stands beside it.
    table = (ROOT / "studies" / "small" / "table.md").read_text()
    assert "| `rope` | 1.301 | 1.301 |" in table


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoding": ["rope"]}, r"config.toml has no 'encoding': did you mean encodings"),
        ({"train": {"step": 3}}, r"\[train\] has no 'step': did you mean steps"),
        ({"score": {"block": 3}}, r"\[score\] has no 'block': did you mean blocks"),
        ({"train": {"seed": 3}}, r"\[train\] may not have seed: it is said by seeds = \[...\]"),
        ({"train": {"name": "x"}}, r"\[train\] may not have name"),
        ({"score": {"report": "x"}}, r"\[score\] may not have report"),
        ({"seeds": None}, "seeds is missing: give a list of whole numbers"),
        ({"seeds": [0.5]}, r"seeds is \[0.5\]: give a list of whole numbers"),
        ({"seeds": [True]}, r"seeds is \[True\]"),
        ({"models": []}, r"models is \[\]: give a list of texts"),
        ({"name": 3}, "name is 3: give a text"),
        ({"lengths": [16]}, "either lengths = .*or multiples"),
        ({"multiples": None}, "either lengths = .*or multiples"),
        ({"multiples": [1, 1.3]}, "1.3 times 16 is no whole number of tokens"),
        ({"multiples": [0.125]}, "length 2 leaves no context"),
        ({"encodings": ["ropee"]}, "unknown encoding 'ropee': did you mean rope"),
        ({"models": ["nanoo"]}, "unknown model 'nanoo': did you mean nano"),
        ({"train": {"positions": "posee"}}, "posee"),
        ({"score": {"extend": ["clmp"]}}, "extend has no 'clmp': did you mean clamp"),
        ({"tune": {}}, r"\[tune\] has nothing to try, such as learning_rate"),
        ({"tune": {"width": [8, 16]}}, r"\[tune\] has no 'width': "),
        ({"tune": {"learning_rate": 0.1}}, "learning_rate is 0.1: give a list of values to try"),
        ({"tune": {"learning_rate": [0.1]}}, r"learning_rate is \[0.1\]: give a list"),
        ({"tune": {"learning_rate": [0.1, -1]}}, "--learning-rate is -1.0: it must be above 0"),
        ({"tune": {"learning_rate": [0.1, 0.2], "seed": 1}}, "seed 1 is one of the seeds that are"),
        ({"tune": {"learning_rate": [0.1, 0.2], "steps": 1.5}}, "steps is 1.5: give one whole"),
        ({"train_long": [16]}, "train_long 16 is no longer than the training length 16"),
        ({"train_long": [128]}, "4 windows of 16 tokens are no whole number of windows of 128"),
        ({"train_long": "yes"}, "train_long is 'yes': give a list of whole numbers"),
    ],
)
def test_a_config_that_is_wrong_is_refused_before_anything_is_made(tmp_path, changed, message):
    with pytest.raises((UserError, EncodingError), match=message):
        swept(tmp_path, **changed)
    assert not (tmp_path / "out").exists()


@pytest.mark.fast
def test_files_and_values_that_cannot_be_read_are_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(UserError, match="No such file"):
        read_sweep(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(UserError, match="is no TOML"):
        read_sweep(tmp_path / "bad.toml")
    with pytest.raises(SystemExit, match="2"):
        swept(tmp_path, train={"steps": "many"})
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.fast
def test_a_cell_is_trained_long_on_as_many_tokens(tmp_path):
    longest = swept(tmp_path, train_long=True, multiples=[1, 4])
    assert [cell.name for cell in longest.cells[4:]] == [
        f"nano-{name}-T64-seed{seed}-for-T16" for seed in (0, 1) for name in ("wpe", "alibi")
    ]
    several = swept(tmp_path, train_long=[32, 64], multiples=[1, 4]).cells
    assert [cell.config.train_length for cell in several] == [16] * 4 + [32] * 4 + [64] * 4
    for short, long in zip(several[:4] * 2, several[4:], strict=True):
        windows = short.config.batch_size * 16 // long.config.train_length
        alone = {"train_length": long.config.train_length, "batch_size": windows}
        assert long.config == dataclasses.replace(short.config, **alone)


TUNE = {"learning_rate": [1e-3, 2e-3, 4e-3], "encoding_rate": [1, 10], "steps": 20}


@pytest.mark.fast
def test_every_encoding_has_the_same_trials_which_no_compared_run_is_among(tmp_path):
    sweep = swept(tmp_path, tune=TUNE, train_lengths=[16, 32], train_long=[64])
    assert len(sweep.cells) == 2 * 4 + 2 * 4
    tried = {}
    for trial in sweep.trials:
        config = trial.config
        assert (config.seed, config.steps, trial.is_trial) == (2, 20, True)
        assert trial.folder.parent == tmp_path / "out" / "trials"
        group = config.encoding, config.train_length
        optimizer = config.optimizer
        tried.setdefault(group, []).append((optimizer.learning_rate, optimizer.encoding_rate))
    every = [(rate, own) for rate in (1e-3, 2e-3, 4e-3) for own in (1, 10)]
    assert tried == {(name, n): every for name in ("wpe", "alibi") for n in (16, 32)}
    assert swept(tmp_path, tune={**TUNE, "seed": 7}).trials[0].config.seed == 7


def tried_out(sweep, losses):
    """Pretend that trials ended with losses: NaN is one that diverged."""
    for trial, loss in zip(sweep.trials, losses, strict=True):
        saved = {"config": dataclasses.asdict(trial.config), "data": {}}
        (trial.folder / "checkpoints").mkdir(parents=True)
        (trial.folder / "config.json").write_text(json.dumps(saved))
        rows = [{"step": 10, "valid_nll_16": 0.0}, {"step": 20, "loss": 0.0}]
        if loss == loss:
            rows.append({"step": 20, "valid_nll_16": loss, "valid_nll_32": 0.0})
        else:
            (trial.folder / "diverged.json").write_text("{}")
        (trial.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.fast
def test_the_lowest_loss_of_validation_chooses_for_each_encoding(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Run, "finished", property(lambda run: True))
    sweep = swept(tmp_path, tune=TUNE, train_long=[64], seeds=[0])
    assert choices(sweep) is None
    assert known(sweep) == [*sweep.cells, *sweep.trials]
    status(Status(sweep.path))
    assert "listed, once all trials are done" in capsys.readouterr().out
    # wpe: the first of two that are level; alibi: what all have anyway.
    nan = math.nan
    losses = {"wpe": [3.0, 2.5, nan, 2.0, 2.0, nan], "alibi": [1.0, 1.5, 1.25, nan, 2.0, 3.0]}
    tried_out(sweep, [*losses["wpe"], *losses["alibi"]])
    found = choices(sweep)
    assert found["nano", 16, "wpe"].chosen == {"learning_rate": 2e-3, "encoding_rate": 10}
    assert found["nano", 16, "wpe"].losses == [3.0, 2.5, math.inf, 2.0, 2.0, math.inf]
    assert found["nano", 16, "alibi"].chosen == {"learning_rate": 1e-3, "encoding_rate": 1}
    runs = [cell.name for cell in known(sweep) if not cell.is_trial]
    new = ["nano-wpe-T16-seed0-tuned", "nano-wpe-T64-seed0-for-T16-tuned"]
    assert runs == [*(cell.name for cell in sweep.cells), *new]
    for cell, own in tuned(sweep).items():
        rate, factor = (2e-3, 10.0) if cell.config.encoding == "wpe" else (1e-3, 1.0)
        settings = {"learning_rate": rate, "encoding_rate": factor}
        optimizer = dataclasses.replace(cell.config.optimizer, **settings)
        assert own.config == dataclasses.replace(cell.config, optimizer=optimizer)
    status(Status(sweep.path))
    line = "tuned: nano, 16, wpe: learning_rate 0.002, encoding_rate 10\n"
    assert line in capsys.readouterr().out

    said = json.loads(write_tuning(sweep).read_text())["runs"]
    assert [role["settings"] for role in said["nano-alibi-T16-seed0"]] == ["shared", "tuned"]
    assert [role["settings"] for role in said["nano-wpe-T16-seed0"]] == ["shared"]
    (role,) = said[new[0]]
    assert role["recipe_hash"] == recipe_hash(sweep.cells[0].config)
    assert role["tuning"] == {
        **{"trials": 6, "grid": {k: TUNE[k] for k in ("learning_rate", "encoding_rate")}},
        **{"seed": 1, "steps": 20, "criterion": CRITERION},
        **{"chosen": found["nano", 16, "wpe"].chosen, "losses": [3.0, 2.5, None, 2.0, 2.0, None]},
    }


@pytest.mark.fast
def test_an_encoding_of_which_all_trials_diverged_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "finished", property(lambda run: False))
    sweep = swept(tmp_path, tune={"learning_rate": [1, 2], "steps": 20}, encodings=["wpe"])
    tried_out(sweep, [math.nan, math.nan])
    with pytest.raises(UserError, match=r"all 2 trials of nano, 16, wpe diverged: give other"):
        run_local(dataclasses.replace(sweep, cells=()))


# --- Cells with a stand-in for train.py: how they end, and what is said of it -------------------

STAND_IN = """
import json, pathlib, signal, sys, time
name = sys.argv[sys.argv.index("--name") + 1]
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
def stop(number, frame):
    print("saved")
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
with open(out.parent / "started", "a") as file:
    file.write(name + "\\n")
if "wpe" in name and not (out.parent / "mended").exists():
    print("a line", file=sys.stderr)
    print("posenc: no room for wpe", file=sys.stderr)
    raise SystemExit(2)
if name.endswith("seed1"):
    time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A sweep whose cells run a script: wpe fails, and seed 1 waits for a signal."""
    (tmp_path / "train.py").write_text(STAND_IN)
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    return swept(tmp_path)


def when(condition, act):
    """Act in a thread as soon as a condition holds."""

    def wait():
        until = time.monotonic() + 30
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        if condition():
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.fast
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_cell_of_the_moment_and_its_code_is_passed_on(stand_in, number):
    started = stand_in.out / "started"

    def waits():
        return started.exists() and "alibi-T16-seed1" in started.read_text()

    thread = when(waits, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as stop:
        run_local(stand_in)
    thread.join()
    assert stop.value.code == 128 + number
    log = cell_file(stand_in, "nano-alibi-T16-seed1", "log")
    assert log.read_text() == "saved\n"  # once
    # A cell that failed did not keep the others from running, and says why.
    states = {cell.name: state(stand_in, cell) for cell in stand_in.cells}
    assert states["nano-wpe-T16-seed0"].word == "failed"
    assert states["nano-wpe-T16-seed0"].reason == "no room for wpe"
    assert states["nano-alibi-T16-seed1"].word == "missing"  # it was stopped, and left no run
    assert len(started.read_text().split()) == 4


@pytest.mark.fast
def test_failures_are_shown_and_tried_again(stand_in, capsys, monkeypatch):
    monkeypatch.setattr(cells, "finished", lambda cell: "alibi" in cell.name)
    for user in ("executors", "tuning"):
        monkeypatch.setattr(f"studies.{user}.finished", cells.finished)
    with pytest.raises(SystemExit) as stop:
        run_local(stand_in)
    assert stop.value.code == 1
    assert "2 of 4 cells failed" in capsys.readouterr().out
    monkeypatch.setattr("studies.__main__.read_sweep", lambda path: stand_in)
    status(Status(stand_in.path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=3) == ["nano-wpe-T16-seed0", "failed", "0/60", "no room for wpe"]
    assert "test: 2 failed, 2 finished" in lines
    # Told to be mended, and then killed by nobody that we know.
    (stand_in.out / "mended").touch()
    pid = cell_file(stand_in, "nano-wpe-T16-seed1", "json")

    def kill():
        os.kill(json.loads(pid.read_text())["pid"], signal.SIGKILL)

    def waits():
        return (stand_in.out / "started").read_text().split()[-1] == "nano-wpe-T16-seed1"

    (stand_in.out / "started").write_text("none\n")
    thread = when(waits, kill)
    with pytest.raises(SystemExit, match="1"):
        run_local(stand_in)
    thread.join()
    assert state(stand_in, stand_in.cells[2]).reason == "killed by SIGKILL"


@pytest.mark.fast
def test_a_cell_that_another_process_trains_is_running_and_left_to_it(stand_in):
    cell = stand_in.cells[1]
    cell.folder.mkdir(parents=True)
    (cell.folder / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n')
    assert state(stand_in, cell) == cells.State("partial", 0)
    with held(cell_file(stand_in, cell.name, "lock")):
        assert state(stand_in, cell) == cells.State("running", 20)
        with pytest.raises(Busy):
            cells.attempt(stand_in, cell)
    assert not (stand_in.out / "started").exists()
    assert cells.attempt(stand_in, cell) == 0


@pytest.mark.fast
def test_a_cell_without_its_parent_saves_and_stops(tmp_path):
    (tmp_path / "cell.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def stop(number, frame):\n"
        "    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)\n"
        "    raise SystemExit\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    words = [sys.executable, str(cells.LAUNCH), str(tmp_path / "cell.py"), str(tmp_path / "said")]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({words}, process_group=0)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    assert parent.stdout.read() == ""  # until the cell has gone, too
    assert (tmp_path / "said").read_text() == "SIGINT"


@pytest.mark.fast
def test_a_cell_that_a_scheduler_has_told_before_us_saves_all_the_same(tmp_path):
    (tmp_path / "cell.py").write_text(
        "import signal, time\n"
        "told = []\n"
        "def note(number, frame):  # as train.py does: a second one would end it at once\n"
        "    told.append(number)\n"
        "    signal.signal(number, signal.SIG_DFL)\n"
        "    print('told', flush=True)\n"
        "for number in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(number, note)\n"
        "print('ready', flush=True)\n"
        "while len(told) < 2:\n"
        "    time.sleep(0.01)\n"
        "print('saved')\n"
    )
    child = cells.Child([str(tmp_path / "cell.py")], tmp_path / "log", [])

    def said(word):
        until = time.monotonic() + 30
        while word not in child.printed() and time.monotonic() < until:
            time.sleep(0.01)
        return word in child.printed()

    assert said("ready")
    child.signal(signal.SIGTERM)
    assert said("told")
    child.stop()
    assert child.process.wait() == 0
    assert child.printed().split() == ["ready", "told", "told", "saved"]


# --- Slurm, as far as its commands go -------------------------------------------------------------


@pytest.mark.fast
def test_slurm_is_given_an_array_of_cells_once(tmp_path, monkeypatch, capsys):
    programs = {
        "sbatch": 'cp "$1" "$0.$(ls "$(dirname "$0")" | wc -l)"; echo Submitted batch job 77',
        "srun": "exit 1",
        "squeue": "for i in 0 1 2 3; do echo 77_$i; done",
    }
    # Where submitit sets up logging, it closes the handlers that pytest has.
    monkeypatch.setenv("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    sweep = swept(tmp_path)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="there is no sbatch here"):
        submit("slurm", sweep, Resources())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{path}")
    asked = Resources(partition="gpu", minutes=30, gpus=1, parallel=2, slurm=("account=lab",))
    submit("slurm", sweep, asked)
    (script,) = (tmp_path / "bin").glob("sbatch.*")
    lines = script.read_text().splitlines()
    for option in (
        *("--partition=gpu", "--array=0-3%2", "--signal=USR2@120", "--time=30"),
        *("--gpus-per-node=1", "--account=lab", "--job-name=test"),
    ):
        assert f"#SBATCH {option}" in lines
    assert "nano-alibi-T16-seed1: job 77_3" in capsys.readouterr().out
    # Again, while they wait: nothing.
    submit("slurm", sweep, asked)
    assert "0 jobs submitted, 4 cells finished or under way" in capsys.readouterr().out
    assert len(list((tmp_path / "bin").glob("sbatch.*"))) == 1
    # Where Slurm does not say what waits, nothing is submitted on a guess.
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text("#!/bin/sh\necho 'slurm_load_jobs error: no answer' >&2; exit 1\n")
    with pytest.raises(UserError, match="which jobs wait: slurm_load_jobs error: no answer"):
        submit("slurm", sweep, asked)
    # Nor where sbatch refuses; of jobs that have ended, the cells are left.
    squeue.write_text("#!/bin/sh\n")
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid account' >&2; exit 1\n")
    with pytest.raises(UserError, match="no job is submitted: sbatch: error: invalid account"):
        submit("slurm", sweep, asked)
    # Of a job of a minute or two, half is left for saving.
    asked = [Resources(minutes=minutes).parameters() for minutes in (1, 3, 4, 90)]
    assert [each["slurm_signal_delay_s"] for each in asked] == [30, 90, 120, 120]
    with pytest.raises(UserError, match="--slurm account: write KEY=VALUE"):
        Resources(slurm=("account",))
    with pytest.raises(UserError, match="--minutes is 0"):
        Resources(minutes=0)


# --- Real cells -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(1)
    for index in range(160):
        words = rng.choice(["one", "two", "three", "four", "five"], 60)
        (folder / f"{index}.txt").write_text(" ".join(words))
    return str(folder / "*.txt")


def begin(config, *more):
    return subprocess.Popen(
        [sys.executable, "-m", "studies", "run", str(config), *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process):
    """Give what a command printed, once it has ended well."""
    said = process.communicate(timeout=400)[0]
    assert process.returncode == 0, said
    return said


def reach(sweep, name, process):
    """Wait until a cell has a checkpoint, and give what is kept of the attempt."""
    (cell,) = (cell for cell in sweep.cells if cell.name == name)
    checkpoints = Checkpoints(cell.folder / "checkpoints")
    while not checkpoints.steps():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.002)
    return json.loads(cell_file(sweep, name, "json").read_text())


def test_killed_and_preempted_a_sweep_ends_as_one_left_alone(text, tmp_path):
    """By hand and by submitit, with no finished cell trained twice."""
    given = {
        "train": {**TRAIN, "data": text, "checkpoint_every": 4},
        "score": {"blocks": 2, "tokens_per_document": 64},
    }
    folders = tmp_path / "alone", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
    alone, killed = (swept(folder, **given) for folder in folders)
    said = ended(begin(alone.path))
    assert "all 4 cells are there" in said

    # The second cell is killed with all that belongs to it: nothing can be saved.
    first = begin(killed.path)
    attempt = reach(killed, "nano-alibi-T16-seed0", first)
    for group in (attempt["pid"], first.pid):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    first.communicate()
    while is_held(cell_file(killed, "nano-alibi-T16-seed0", "lock")):  # until the kernel is done
        time.sleep(0.01)
    words = [state(killed, cell).word for cell in killed.cells]
    assert words == ["finished", "partial", "missing", "missing"]

    # The rest as jobs; the third one's time is up before it is done.
    second = begin(killed.path, "--executor", "submitit-local")
    attempt = reach(killed, "nano-wpe-T16-seed1", second)
    os.kill(attempt["parent"], signal.SIGUSR2)
    ended(second)
    assert [state(killed, cell).word for cell in killed.cells] == ["finished"] * 4

    def resumed(cell):
        starts = json.loads((cell.folder / "provenance.json").read_text())["starts"]
        return [start["resumed_from"] is not None for start in starts]

    assert [resumed(cell) for cell in killed.cells] == [
        [False],
        [False, True],
        [False, True],
        [False],
    ]
    assert [resumed(cell) for cell in alone.cells] == [[False]] * 4
    assert told(killed) == told(alone)
    page_tells(alone.out / "report", tmp_path / "page")


def told(sweep):
    """Rows of a report without the time that training took."""
    return [{**row, "train_seconds": None} for row in read_rows(sweep.out / "report")]


def page_tells(rows, out):
    """Make the page of a sweep's rows, and hold its numbers against means of their sums."""
    main(["report", str(rows), "--out", str(out)])
    with (out / "table.csv").open() as file:
        table = {(line["label"], int(line["length"])): line for line in csv.DictReader(file)}
    assert set(table) == {(label, n) for label in ("wpe", "alibi") for n in (16, 32)}
    kept = [row for row in read_rows(rows) if row.get("document_nll")]
    page, values = (out / "index.html").read_text(), {}
    for (label, length), line in table.items():
        for name in ("nll_by_context", "foreign_prefix"):
            values[name] = [
                sum(row["document_nll"]) / sum(row["document_tokens"])
                for row in kept
                if (row["protocol"], row["encoding"], row["length"]) == (name, label, length)
            ]
        losses, foreign = values["nll_by_context"], values["foreign_prefix"]
        if (label, length) == ("wpe", 32):  # beyond its table
            assert losses == []
            assert "no position beyond 15" in line["why_undefined"]
            continue
        assert len(losses) == 2
        assert float(line["nll"]) == pytest.approx(sum(losses) / 2, abs=1e-9)
        half = 12.706204736 * abs(losses[0] - losses[1]) / 2  # Student's t of one degree
        assert float(line["nll_high"]) == pytest.approx(sum(losses) / 2 + half, abs=1e-8)
        assert f"{sum(losses) / 2:.3f}" in page
        if length == 32:
            info = (sum(foreign) - sum(losses)) / 2
            assert float(line["info"]) == pytest.approx(info, abs=1e-9)
            shown = f"{round(info, 3) + 0.0:.3f}"  # no minus before nought
            assert shown.replace("-", "\N{MINUS SIGN}") in page


@pytest.mark.slow
def test_a_sweep_is_tuned_and_trained_long_in_one_command(text, tmp_path):
    sweep = swept(
        tmp_path,
        encodings=["kerple_log"],
        seeds=[0],
        train={**TRAIN, "data": text, "learning_rate": 1e-3},
        tune={"learning_rate": [1e-3, 1e-2, 1e30], "steps": 20},
        train_long=True,
        score={"blocks": 2, "tokens_per_document": 64},
    )
    said = ended(begin(sweep.path))
    assert "nano-kerple_log-T16-seed1-learning_rate-1e+30: finished: diverged" in said
    assert "all 7 cells are there" in said
    rows = read_rows(sweep.out / "report")
    lines = {(row["settings"], row["train_length"]): row for row in rows}
    assert set(lines) == {(words, n) for words in ("shared", "tuned") for n in (16, 32)}
    assert len({row["train_tokens"] for row in rows}) == 1
    for (words, length), row in lines.items():
        name = "nano-kerple_log-T16-seed0" if length == 16 else "nano-kerple_log-T32-seed0-for-T16"
        assert row["run"] == name + ("-tuned" if words == "tuned" else "")
        assert row["recipe_hash"] == lines["shared", length]["recipe_hash"]
        kept = json.loads((sweep.out / "runs" / row["run"] / "config.json").read_text())["config"]
        rate = row["tuning"]["chosen"]["learning_rate"] if row["tuning"] else 1e-3
        assert kept["optimizer"]["learning_rate"] == rate
    losses = lines["tuned", 16]["tuning"]["losses"]
    assert losses[1] == min(losses[:2])
    assert losses[2] is None
    table = (sweep.out / "report" / "table.md").read_text()
    shown = ", ".join(f"{loss:.3f}" for loss in losses[:2])
    assert f"| learning_rate 0.01 | {shown}, diverged |" in table
    # All is there: nothing is trained, and the report is the same.
    assert "training" not in ended(begin(sweep.path)).split("scoring")[0]
    assert read_rows(sweep.out / "report") == rows
