"""Progress of a long job: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

# Where the output is no terminal, at most one line in so many seconds.
SECONDS_A_LINE = 10.0


class Reporter:
    """Where a job says how far it is.

    Args:
        title: what is going on.
        total: units of work.
        done: of them, done before.
        bar: the live bar, or None for plain lines.
    """

    def __init__(self, title: str, total: int, done: int, bar: Progress | None):
        self.title, self.total = title, total
        self._bar = bar
        self._task = None
        if bar is not None:
            self._task = bar.add_task(title, total=total, completed=done, note="", left="")
        self._began, self._before = time.monotonic(), done
        self._last = self._last_line = self._began

    def update(self, done: int, note: str = "", kept: int = 0) -> None:
        """Say that ``done`` units are done.

        Args:
            done: of all.
            note: what else there is to say.
            kept: of those that are new since the last time, how many were only found done: they,
                and the time it took to find them, tell nothing of the time that is left.
        """
        now = time.monotonic()
        if kept:
            self._before += kept
            self._began += now - self._last
        self._last = now
        fresh = done - self._before
        left = (now - self._began) / fresh * (self.total - done) if fresh > 0 else None
        if self._bar is not None and self._task is not None:
            clock = "" if left is None else f"{datetime.timedelta(seconds=round(left))} left"
            self._bar.update(self._task, completed=done, note=note, left=clock)
            return
        if done < self.total and now - self._last_line < SECONDS_A_LINE:
            return
        self._last_line = now
        clock = "" if left is None else f" {left:.0f} s left"
        print(f"{self.title}: {done}/{self.total} {note}{clock}", flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)


@contextmanager
def reporting(title: str, total: int, done: int = 0) -> Iterator[Reporter]:
    """Report on a job of ``total`` units, ``done`` of which were done before."""
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        yield Reporter(title, total, done, None)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield Reporter(title, total, done, bar)
