"""Several processes that train one run together, each with devices and data of its own.

What every process has to agree on is decided by the first one, or by all of them at the same step.
The first one writes; the others are silent.
"""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils

from posenc.errors import UserError


def in_a_job(environment: dict[str, str]) -> bool:
    """Say whether this process is one of several that a scheduler has started."""
    # An allocation of Slurm has tasks, too; only within a step do they all run this program.
    counts = [environment.get("OMPI_COMM_WORLD_SIZE", "")]
    if "SLURM_STEP_NODELIST" in environment:
        counts.append(environment.get("SLURM_NTASKS", ""))
    several = any(count.isdigit() and int(count) > 1 for count in counts)
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").count(",") > 0
    indexed = "JOB_COMPLETION_INDEX" in environment and "KUBERNETES_SERVICE_HOST" in environment
    return several or hosts or indexed


def join(coordinator: str | None, count: int | None, index: int | None) -> None:
    """Join the other processes, before any device is touched.

    Args:
        coordinator: ``HOST:PORT`` of the first process, or None where a scheduler tells it.
        count: of processes.
        index: of this one.

    Raises:
        UserError: only some of the three are given, or the others cannot be reached.
    """
    given = (coordinator, count, index)
    if all(value is None for value in given):
        if not in_a_job(dict(os.environ)):
            return
    elif any(value is None for value in given):
        raise UserError("--coordinator, --processes and --process belong together: give all three")
    elif not 0 <= index < count:  # type: ignore[operator]
        raise UserError(f"--process {index} of --processes {count}: give 0 to {count - 1}")  # type: ignore[operator]
    try:
        jax.distributed.initialize(coordinator, count, index)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the other processes cannot be joined: {error}; give --coordinator HOST:PORT, "
            "--processes and --process, the same coordinator to all"
        ) from error
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)


def is_first() -> bool:
    """Say whether this is the process that writes."""
    return jax.process_index() == 0


def wait(name: str) -> None:
    """Wait until every process has come to this point."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_of(flag: bool) -> bool:
    """Say whether a flag is set in any process; all have to ask at the same step."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))
