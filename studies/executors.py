"""Where the cells of a sweep run: here, one after another, or as jobs of a scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from posenc.checkpoints import write_json
from posenc.errors import UserError, make_folder
from studies.cells import (
    LOOK,
    STOPPED,
    Busy,
    Child,
    Signals,
    attempt,
    cell_file,
    finished,
    is_held,
    last_attempt,
    score,
    state,
)
from studies.sweep import Cell, Sweep, read_sweep
from studies.tuning import all_finished, choices, known, runs_of, write_tuning

# A job that comes to the end of its time is queued again so many times: practically always.
TIMEOUTS = 1000
# Seconds of a job's time that are left for it to save, and no more than half of its time.
TO_SAVE = 120


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a job asks the scheduler for, as ``submitit`` passes it on."""

    partition: str | None = None
    """Of Slurm."""
    minutes: int = 240
    """A job's time; when it is over, the job saves, is queued again and goes on."""
    gpus: int = 0
    """Of a job."""
    cpus: int | None = None
    """Of a job."""
    memory_gb: float | None = None
    """Of a job."""
    parallel: int | None = None
    """Jobs at a time: as many as Slurm grants, or one with submitit-local, unless given."""
    slurm: tuple[str, ...] = ()
    """More options of sbatch, such as account=lab qos=low."""

    def __post_init__(self) -> None:
        for name, least in (("minutes", 1), ("gpus", 0), ("cpus", 1), ("parallel", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"--{name} is {value}: it must be at least {least}")
        for option in self.slurm:
            if "=" not in option:
                raise UserError(f"--slurm {option}: write KEY=VALUE, such as account=lab")

    def parameters(self) -> dict[str, Any]:
        """Give the parameters of submitit's executor."""
        given = {
            "slurm_partition": self.partition,
            "timeout_min": self.minutes,
            "gpus_per_node": self.gpus or None,
            "cpus_per_task": self.cpus,
            "mem_gb": self.memory_gb,
            "slurm_array_parallelism": self.parallel,
            "slurm_signal_delay_s": min(TO_SAVE, 30 * self.minutes),
            "slurm_additional_parameters": dict(o.split("=", 1) for o in self.slurm) or None,
        }
        return {name: value for name, value in given.items() if value is not None}


def _score(sweep: Sweep, started: Callable[[Child], None] = lambda child: None) -> int:
    """Score, when nobody else does, print what that printed, and give its exit code."""
    print(f"{sweep.name}: all {len(known(sweep))} cells are there; scoring", flush=True)
    tuning = write_tuning(sweep)
    more = () if tuning is None else ("--tuning", str(tuning))
    while True:
        try:
            child = score(sweep, runs_of(sweep), more, started)
            break
        except Busy:
            time.sleep(LOOK)
    print(child.printed(), end="", flush=True)
    return child.process.returncode


def _check(code: int) -> None:
    """Raise ``SystemExit`` for the code of a process that did not end well."""
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def run_local(sweep: Sweep) -> None:
    """Train one cell after another, and score them when all are there.

    The same command beside this one shares the work: neither takes what the other is at.

    Raises:
        SystemExit: a signal came (what was reached is saved), or a cell failed (with 1).
    """
    every: list[Cell] = known(sweep)
    waiting, failed = list(every), []
    with Signals() as signals:

        def started(child: Child) -> None:
            signals.child = child
            if signals.number is not None:  # it came while the process started
                child.signal(signals.number)

        while waiting:
            busy = []
            for cell in waiting:
                signals.check()
                place = f"{every.index(cell) + 1}/{len(every)} {cell.name}"
                if finished(cell):
                    print(f"{place}: finished", flush=True)
                    continue

                def begun(child: Child, place: str = place, name: str = cell.name) -> None:
                    started(child)
                    print(f"{place}: training, log {cell_file(sweep, name, 'log')}", flush=True)

                try:
                    code = attempt(sweep, cell, begun)
                except Busy:
                    busy.append(cell)
                    continue
                signals.check()
                if code in STOPPED:  # by somebody who told the cell and not us
                    _check(code)
                if code and not finished(cell):
                    failed.append(cell)
                print(f"{place}: {_word(sweep, cell)}", flush=True)
            if busy and len(busy) == len(waiting):
                time.sleep(LOOK)
            # Where trials are done, what they lead to.
            waiting = busy or [cell for cell in known(sweep) if cell not in every]
            every += [cell for cell in waiting if cell not in every]
        signals.child = None
        if not failed:
            code = _score(sweep, started)
            signals.check()
            _check(code)
    _end(sweep, len(every), failed)


def _word(sweep: Sweep, cell: Cell) -> str:
    now = state(sweep, cell)
    return now.word + (f": {now.reason}" if now.reason else "")


def _end(sweep: Sweep, count: int, failed: list[Cell]) -> None:
    if failed:
        print(
            f"{sweep.name}: {len(failed)} of {count} cells failed, and there is no "
            f"report yet; their logs are in {sweep.out / 'cells'}; the same command tries them "
            "again"
        )
        raise SystemExit(1)


class CellJob:
    """What a scheduler's job does: one cell, and the report where it is the last one.

    Args:
        path: of the config.
        name: of the cell.
    """

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self._child: Child | None = None

    def __call__(self) -> int:
        """Give train.py's exit code."""
        import submitit

        sweep = read_sweep(self.path)
        (cell,) = (cell for cell in known(sweep) if cell.name == self.name)
        job = submitit.JobEnvironment()
        try:
            code = attempt(sweep, cell, self._note, job.job_id if job.cluster == "slurm" else None)
        except Busy:
            print(f"{self.name}: another process trains it; nothing to do")
            return 0
        if finished(cell) and all_finished(sweep):
            code = _score(sweep, self._note)
        return code

    def _note(self, child: Child) -> None:
        self._child = child

    def checkpoint(self) -> Any:
        """Let the cell save, and give the job that goes on; called when the time is up."""
        from submitit.helpers import DelayedSubmission

        if self._child is not None:
            self._child.stop()
        return DelayedSubmission(CellJob(self.path, self.name))


def _executor(kind: Literal["slurm", "submitit-local"], sweep: Sweep, resources: Resources) -> Any:
    try:
        import submitit
    except ImportError:
        raise UserError(
            f'--executor {kind} needs submitit: pip install "posenc[slurm] @ ."'
        ) from None
    if kind == "slurm" and shutil.which("sbatch") is None:
        raise UserError(
            "--executor slurm: there is no sbatch here; give the command where Slurm is, or "
            "--executor local"
        )
    executor = submitit.AutoExecutor(
        sweep.out / "jobs",
        cluster="slurm" if kind == "slurm" else "local",
        slurm_max_num_timeout=TIMEOUTS,
    )
    try:
        executor.update_parameters(name=sweep.name, **resources.parameters())
    except (TypeError, ValueError, NameError) as error:
        raise UserError(f"{kind} refuses its options: {error}") from None
    return executor


def queued() -> Callable[[str], bool]:
    """Give what says whether a job of Slurm waits or runs; none does where there is no Slurm.

    squeue is asked once, when there is a job to ask about. It knows of a job at once and on every
    cluster, where sacct needs accounts to be kept and is late.

    Raises:
        UserError: (what is given) squeue does not answer.
    """

    @functools.cache
    def jobs() -> frozenset[str]:
        words = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
        asked = subprocess.run(words, capture_output=True, text=True)
        if asked.returncode:
            raise UserError(f"squeue cannot say which jobs wait: {_last_line(asked.stderr)}")
        return frozenset(asked.stdout.split())

    there = shutil.which("squeue") is not None
    return lambda job: there and job in jobs()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it did not say why"])[-1]


def submit(kind: Literal["slurm", "submitit-local"], sweep: Sweep, resources: Resources) -> None:
    """Give every cell that is neither finished nor queued to the scheduler.

    Slurm's jobs go on by themselves, and the last one makes the report. Local ones are waited for.

    Raises:
        UserError: submitit or Slurm is missing, or refuses an option.
        SystemExit: a signal came, or a cell failed (with 1).
    """
    executor, waits = _executor(kind, sweep, resources), queued()
    every = known(sweep)

    def left_of(cells: list[Cell]) -> list[Cell]:
        words = "finished", "running", "queued"
        return [cell for cell in cells if state(sweep, cell, waits).word not in words]

    left = left_of(every)
    path = sweep.path.resolve()
    if kind == "slurm":
        jobs = _submitted(executor, left, path) if left else []
        for cell, job in zip(left, jobs, strict=True):
            _record_job(sweep, cell, job.job_id)
            print(f"{cell.name}: job {job.job_id}")
        print(
            f"{sweep.name}: {len(jobs)} jobs submitted, {len(every) - len(left)} cells "
            f"finished or under way before; python -m studies status {sweep.path}"
        )
        if choices(sweep) is None:
            print(f"{sweep.name}: once all trials are done, the same command submits what is tuned")
        if all_finished(sweep):
            _check(_score(sweep))
        return
    running: list[Any] = []
    told = False
    with Signals() as signals:
        waiting = list(left)
        while (waiting and signals.number is None) or running:
            while signals.number is None and waiting and len(running) < (resources.parallel or 1):
                running += _submitted(executor, [waiting.pop(0)], path)
            if signals.number == signal.SIGTERM and not told:  # Ctrl-C reaches jobs by itself
                told = True
                for cell in left:
                    _tell(sweep, cell)
            running = [job for job in running if not job.done()]
            if not running and not waiting:  # where trials are done, what they lead to
                waiting = left_of([cell for cell in known(sweep) if cell not in every])
                every += [cell for cell in known(sweep) if cell not in every]
                left += waiting
            time.sleep(LOOK)
        signals.check()
    for cell in every:
        print(f"{cell.name}: {_word(sweep, cell)}")
    _end(sweep, len(every), [cell for cell in every if not finished(cell)])
    if not left:  # otherwise the last job did
        _check(_score(sweep))


def _submitted(executor: Any, cells: list[Cell], path: Path) -> list[Any]:
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        return executor.submit_array([CellJob(path, cell.name) for cell in cells])
    except (FailedJobError, FailedSubmissionError) as error:
        raise UserError(f"no job is submitted: {_last_line(str(error))}") from None


def _record_job(sweep: Sweep, cell: Cell, job: str) -> None:
    if last_attempt(sweep, cell.name).get("job") == job:
        return  # it has begun, and says more itself
    kept = cell_file(sweep, cell.name, "json")
    make_folder(kept.parent)
    write_json(kept, {"job": job, "code": None, "reason": ""})


def _tell(sweep: Sweep, cell: Cell) -> None:
    """Send SIGINT to the process that trains a cell, for it to save and stop."""
    last = last_attempt(sweep, cell.name)
    if last.get("pid") and is_held(cell_file(sweep, cell.name, "lock")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(last["pid"], signal.SIGINT)
