"""``python -m studies run CONFIG`` and ``status CONFIG``: a sweep of runs and its report."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import tyro

from posenc.cli import parse_subcommand
from posenc.errors import one_line_errors
from studies.cells import state
from studies.executors import Resources, queued, run_local, submit
from studies.sweep import read_sweep
from studies.tuning import choices, known


@dataclasses.dataclass(frozen=True)
class RunSweep:
    """Train every cell of a sweep that is not there yet, then score all and write the report.

    Ctrl-C and SIGTERM save what the cell of the moment has reached; the same command goes on.
    """

    config: Annotated[Path, tyro.conf.Positional]
    """A TOML file, such as studies/small.toml."""
    executor: Literal["local", "slurm", "submitit-local"] = "local"
    """One cell after another here; jobs of Slurm; or jobs on this machine, to try jobs out."""
    resources: Annotated[Resources, tyro.conf.OmitArgPrefixes] = dataclasses.field(
        default_factory=Resources
    )
    """Of jobs."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Show how far every cell of a sweep is."""

    config: Annotated[Path, tyro.conf.Positional]
    """A TOML file."""


def run(arguments: RunSweep) -> None:
    """Run a sweep."""
    sweep = read_sweep(arguments.config)
    if arguments.executor == "local":
        run_local(sweep)
    else:
        submit(arguments.executor, sweep, arguments.resources)


def status(arguments: Status) -> None:
    """Print a line for each cell, and how many there are of each state."""
    sweep = read_sweep(arguments.config)
    waits = queued()
    cells = known(sweep)
    states = [state(sweep, cell, waits) for cell in cells]
    width = max(len(cell.name) for cell in cells)
    print(f"{'cell':<{width}}  {'state':<8}  {'step':>13}")
    for cell, now in zip(cells, states, strict=True):
        step = f"{now.step}/{cell.config.steps}"
        print(f"{cell.name:<{width}}  {now.word:<8}  {step:>13}  {now.reason}".rstrip())
    counts = Counter(now.word for now in states)
    print(f"{sweep.name}: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    chosen = choices(sweep)
    if chosen is None:
        print("tuned cells are known, and listed, once all trials are done")
    for group, choice in (chosen or {}).items():
        settings = ", ".join(f"{name} {value}" for name, value in choice.chosen.items())
        print(f"tuned: {', '.join(map(str, group))}: {settings}")
    report = sweep.out / "report" / "table.md"
    print(f"report: {report if report.exists() else 'none yet'}")


def main() -> None:
    """Run one subcommand."""
    chosen = parse_subcommand({"run": RunSweep, "status": Status}, "python -m studies")
    with one_line_errors():
        if isinstance(chosen, RunSweep):
            run(chosen)
        else:
            status(chosen)


if __name__ == "__main__":
    main()
