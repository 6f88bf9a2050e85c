"""Cells of a sweep at work: each in a process of its own, its outcome and log kept beside it.

``OUT/cells/NAME.json`` says how the last attempt went, ``NAME.log`` what it printed, and
``NAME.lock`` is held while one is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from posenc.checkpoints import Checkpoints, write_json
from posenc.errors import UserError, make_folder
from posenc.runs import open_folder
from studies.sweep import Cell, Sweep

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = Path(__file__).resolve().parent / "launch.py"
# Codes of a process that was told to stop: by its own exit, as shells say it, or by the signal.
STOPPED = {128 + n for n in (signal.SIGINT, signal.SIGTERM)} | {-signal.SIGINT, -signal.SIGTERM}
# Seconds: between looks at a lock, and until it counts as held (``state`` holds it for an instant).
LOOK, PATIENCE = 0.1, 1.0


class Busy(Exception):
    """Another process is at it."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Hold a lock file, and give its descriptor: a process that inherits it holds it as well.

    Raises:
        Busy: another process holds it.
    """
    make_folder(path.parent)
    with open(path, "a") as file:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Busy(str(path)) from None
                time.sleep(LOOK)
        yield file.fileno()


def is_held(path: Path) -> bool:
    """Say whether a process holds a lock file."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        pass
    return False


class Child:
    """A process that signals reach through this one alone, and that stops when this one is gone.

    Args:
        words: after ``python``.
        log: the file that its output is appended to.
        inherited: descriptors that it keeps open.
    """

    def __init__(self, words: Sequence[str], log: Path, inherited: Sequence[int]):
        self._log = log
        with open(log, "ab") as file:
            self._begin = file.tell()
            # In a group of its own Ctrl-C does not reach it beside what we pass on: a second signal
            # would end it before it has saved.
            self.process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                process_group=0,
                pass_fds=inherited,
            )

    def signal(self, number: int) -> None:
        """Pass a signal on, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.returncode is None:
                os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Let it save, and wait until it has ended; for handlers of signals, too."""
        # A scheduler that ends a job sends SIGTERM to each of its processes: were this one the
        # second, it would end the cell before it has saved.
        self.signal(signal.SIGINT)
        # Not Popen.wait, whose lock the code that a handler interrupts may hold.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def printed(self) -> str:
        """Give what it printed so far."""
        with open(self._log, "rb") as file:
            file.seek(self._begin)
            return file.read().decode("utf-8", "replace")

    def reason(self) -> str:
        """Say in one line why it failed."""
        code = self.process.returncode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = [line.strip() for line in self.printed().splitlines() if line.strip()]
        said = [line.removeprefix("posenc: ") for line in lines if line.startswith("posenc: ")]
        return (said or lines or [f"exit code {code}"])[-1]


class Signals:
    """While entered, Ctrl-C and SIGTERM go on to the child of the moment, and are noted."""

    def __enter__(self) -> Signals:
        self.number: int | None = None
        self.child: Child | None = None
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._pass) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass(self, number: int, frame: object) -> None:
        self.number = number
        if self.child is not None:
            self.child.signal(number)

    def check(self) -> None:
        """Raise ``SystemExit`` with the code of the signal that came, if one did."""
        if self.number is not None:
            raise SystemExit(128 + self.number)


@dataclasses.dataclass(frozen=True)
class State:
    """How far a cell is.

    Attributes:
        word: what it is; ``queued`` is known of a scheduler's jobs alone.
        step: that it has reached, or would go on from.
        reason: why it failed, in one line.
    """

    word: Literal["finished", "running", "queued", "partial", "failed", "missing"]
    step: int = 0
    reason: str = ""


def cell_file(sweep: Sweep, name: str, kind: str) -> Path:
    """Give the file of a cell: ``json``, ``log`` or ``lock``."""
    return sweep.out / "cells" / f"{name}.{kind}"


def last_attempt(sweep: Sweep, name: str) -> dict[str, Any]:
    """Give what is kept of a cell's last attempt; empty where there was none."""
    try:
        return json.loads(cell_file(sweep, name, "json").read_text())
    except (OSError, ValueError):
        return {}


def finished(cell: Cell) -> bool:
    """Say whether the last checkpoint of just this run is there; or a trial has diverged."""
    try:
        run = open_folder(cell.folder)
    except UserError:
        return False
    return run.config == cell.config and (run.finished or (cell.is_trial and diverged(cell)))


def diverged(cell: Cell) -> bool:
    """Say whether the last attempt ended with a loss that was not finite."""
    return (cell.folder / "diverged.json").exists()


def _last_logged(folder: Path) -> int:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (OSError, ValueError):  # none yet, or a line is being written
        return 0


def state(sweep: Sweep, cell: Cell, queued: Callable[[str], bool] = lambda job: False) -> State:
    """Say how far a cell is.

    Args:
        sweep: of the cell.
        cell: to be looked at.
        queued: says whether a job of the scheduler still has to run, or is running elsewhere.
    """
    if finished(cell):
        if diverged(cell):
            return State("finished", _last_logged(cell.folder), "diverged")
        return State("finished", cell.config.steps)
    kept = max(Checkpoints(cell.folder / "checkpoints").steps(), default=0)
    if is_held(cell_file(sweep, cell.name, "lock")):
        return State("running", max(kept, _last_logged(cell.folder)))
    last = last_attempt(sweep, cell.name)
    ended = last.get("code") is not None and last["code"] not in STOPPED
    if last.get("job") and not ended and queued(last["job"]):
        return State("queued", kept)
    if ended:
        return State("failed", kept, last["reason"])
    return State("partial", kept) if cell.folder.exists() else State("missing")


def attempt(
    sweep: Sweep,
    cell: Cell,
    started: Callable[[Child], None] = lambda child: None,
    job: str | None = None,
) -> int:
    """Train a cell, or what is left of it, and keep how it went; give train.py's exit code.

    Args:
        sweep: of the cell.
        cell: to be trained.
        started: is told of the process.
        job: the scheduler's name for what does this.

    Raises:
        Busy: another process trains it.
    """
    with held(cell_file(sweep, cell.name, "lock")) as lock:
        if finished(cell):  # since it was last looked at
            return 0
        log, kept = (cell_file(sweep, cell.name, kind) for kind in ("log", "json"))
        child = Child([str(ROOT / "train.py"), *cell.words], log, [lock])
        record = {
            "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "pid": child.process.pid,
            "parent": os.getpid(),
            "job": job,
        }
        write_json(kept, {**record, "code": None, "reason": ""})
        started(child)
        try:
            code = child.process.wait()
        except BaseException:  # a scheduler ends this process: what was reached is saved first
            child.stop()
            raise
        finally:
            code = child.process.wait()
            reason = "" if code == 0 or code in STOPPED else child.reason()
            write_json(kept, {**record, "code": code, "reason": reason})
        return code


def score(
    sweep: Sweep,
    runs: Sequence[Cell],
    more: Sequence[str] = (),
    started: Callable[[Child], None] = lambda child: None,
) -> Child:
    """Score all runs of a sweep into its report; what is scored already is not scored again.

    Args:
        sweep: whose.
        runs: of it.
        more: options of ``python -m eval score``.
        started: is told of the process.

    Returns:
        The process, ended.

    Raises:
        Busy: another process scores them.
    """
    with held(cell_file(sweep, "report", "lock")) as lock:
        folders = [str(cell.folder) for cell in runs]
        words = ["-m", "eval", "score", *folders, *sweep.score_words, *more]
        child = Child(words, cell_file(sweep, "report", "log"), [lock])
        started(child)
        try:
            child.process.wait()
        except BaseException:
            child.stop()
            raise
        return child
