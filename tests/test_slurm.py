"""A sweep on a real Slurm: requeued, preempted, out of time, cancelled; and as one left alone."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from one_node_slurm import one_node_slurm, until
from test_sweep import ROOT, TRAIN, swept

from eval.report.rows import read_rows
from posenc.checkpoints import Checkpoints
from studies.cells import STOPPED, cell_file, is_held, last_attempt, state

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm():
    with one_node_slurm() as environment:
        yield environment


class Sweeping:
    """A sweep, and the commands that a user gives about it."""

    def __init__(self, sweep, environment):
        self.sweep, self._environment = sweep, environment
        self.cells = {cell.name: cell for cell in sweep.cells}

    def call(self, *words):
        done = subprocess.run(
            words,
            cwd=ROOT,
            env={**self._environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def signal(self, name, kind):
        """Let Slurm signal all processes of a job's step: the cell's, too."""
        self.call("scancel", f"--signal={kind}", f"{self.job(name)}.0")

    def studies(self, command, *more):
        return self.call(sys.executable, "-m", "studies", command, str(self.sweep.path), *more)

    def words(self):
        """Give what ``status`` calls each cell."""
        lines = self.studies("status").splitlines()[1 : 1 + len(self.cells)]
        return {name: word for name, word, *_ in map(str.split, lines)}

    def job(self, name):
        return last_attempt(self.sweep, name)["job"]

    def log(self, name):
        return next((self.sweep.out / "jobs").glob(f"{self.job(name)}_0_log.err")).read_text()

    @contextlib.contextmanager
    def halted(self, name):
        """Halt a cell at its first checkpoint, and let it go on when Slurm has been told."""
        folder = self.cells[name].folder / "checkpoints"
        until(lambda: Checkpoints(folder).steps(), f"a checkpoint of {name}", 300, look=0.002)
        attempt = last_attempt(self.sweep, name)
        os.kill(attempt["pid"], signal.SIGSTOP)
        assert is_held(cell_file(self.sweep, name, "lock")), f"{name} ended before it was halted"
        yield attempt
        with contextlib.suppress(ProcessLookupError):
            os.kill(attempt["pid"], signal.SIGCONT)
        until(lambda: last_attempt(self.sweep, name).get("code") in STOPPED, f"a stop of {name}")

    def goes_on(self, name):
        """Wait until a cell is queued again, and let it begin without Slurm's two minutes."""

        def pending():
            return "JobState=PENDING" in self.call("scontrol", "show", "job", self.job(name))

        until(pending, f"{name} in the queue")
        assert state(self.sweep, self.cells[name], lambda job: True).word == "queued"
        self.call("scontrol", "update", f"JobId={self.job(name)}", "StartTime=now", "TimeLimit=5")


def test_a_sweep_on_slurm_ends_as_one_left_alone(slurm, common, tmp_path):
    given = {
        "train": {**TRAIN, "data": common["data"], "checkpoint_every": 4},
        "score": {"blocks": 2, "tokens_per_document": 64},
        "encodings": ["wpe", "alibi", "nope"],
    }
    folders = tmp_path / "alone", tmp_path / "jobs"
    for folder in folders:
        folder.mkdir()
    alone, jobs = (Sweeping(swept(folder, **given), slurm) for folder in folders)
    alone.studies("run")
    before, requeued, told, late, preempted, cancelled = jobs.cells
    shutil.copytree(alone.cells[before].folder, jobs.cells[before].folder)

    options = ("--executor", "slurm", "--partition", "low", "--minutes", "5", "--parallel", "1")
    said = jobs.studies("run", *options)
    assert "5 jobs submitted, 1 cells finished" in said
    with jobs.halted(requeued):
        assert jobs.words() == {
            before: "finished",
            requeued: "running",
            **dict.fromkeys((told, late, preempted, cancelled), "queued"),
        }
        assert "0 jobs submitted, 6 cells finished or under way" in jobs.studies("run", *options)
        jobs.call("scontrol", "requeue", jobs.job(requeued))
    jobs.goes_on(requeued)

    with jobs.halted(told):  # as clusters do that tell jobs by both signals
        jobs.signal(told, "TERM")
        jobs.signal(told, "USR2")
        until(lambda: "Caught signal SIGUSR2" in jobs.log(told), "the signal")
    jobs.goes_on(told)

    with jobs.halted(late):
        jobs.call("scontrol", "update", f"JobId={jobs.job(late)}", "TimeLimit=2")
        until(lambda: "Caught signal SIGUSR2" in jobs.log(late), "the end of time", 120)
    jobs.goes_on(late)

    with jobs.halted(preempted):
        job = ("sbatch", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=sleep 3")
        jobs.call(*job)
        until(lambda: "Caught signal SIGUSR2" in jobs.log(preempted), "the preemption")
    jobs.goes_on(preempted)

    with jobs.halted(cancelled):
        jobs.call("scancel", jobs.job(cancelled))
    until(lambda: jobs.words()[cancelled] == "partial", "its job's end")
    assert "1 jobs submitted, 5 cells finished or under way" in jobs.studies("run", *options)

    until(lambda: not jobs.call("squeue", "--me", "-h"), "the end of all jobs", 400)
    assert set(jobs.words().values()) == {"finished"}

    def starts(cell):
        found = json.loads((cell.folder / "provenance.json").read_text())["starts"]
        return [start["resumed_from"] is not None for start in found]

    assert {name: starts(cell) for name, cell in jobs.cells.items()} == {
        before: [False],
        **{name: [False, True] for name in (requeued, told, late, preempted, cancelled)},
    }
    # The last job made the report.
    assert read_rows(jobs.sweep.out / "report") == read_rows(alone.sweep.out / "report")


def test_what_sbatch_refuses_is_said_in_a_line_and_leaves_nothing_queued(slurm, common, tmp_path):
    sweep = swept(tmp_path, train={**TRAIN, "data": common["data"]})
    options = ("--executor", "slurm", "--partition", "none")
    done = subprocess.run(
        [sys.executable, "-m", "studies", "run", str(sweep.path), *options],
        cwd=ROOT,
        env={**slurm, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("posenc: ")]
    assert len(said) == 1
    assert "Invalid partition name" in said[0]
    assert {cell.name: state(sweep, cell).word for cell in sweep.cells} == dict.fromkeys(
        (cell.name for cell in sweep.cells), "missing"
    )
