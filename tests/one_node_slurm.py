"""A Slurm of this machine alone, in a folder of its own, ended with all that it started.

    python tests/one_node_slurm.py bash   # a shell, or any command, that finds it

Needs Debian's slurmctld, slurmd, slurm-client and munge: their programs, not their services, and no
right but the user's own. There are two slots. Jobs of the partition ``high`` preempt those of
``low``, which are told by their own signal a minute before.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
WAY_OUT = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
# Where daemons are, which is in no user's path.
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
PATIENCE = 60  # seconds, for each thing that is waited for

CONFIG = """
ClusterName=one
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=low Nodes=localhost Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=localhost PriorityTier=2 PreemptMode=OFF
"""


def missing() -> list[str]:
    """Give the programs that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in taken:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in taken]


def until(holds, what: str, patience: float = PATIENCE, look: float = 0.1) -> None:
    """Wait until something holds, and look every so many seconds.

    Raises:
        TimeoutError: it does not come to.
    """
    end = time.monotonic() + patience
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {patience:.0f} seconds")
        time.sleep(look)


@contextlib.contextmanager
def one_node_slurm() -> Iterator[dict[str, str]]:
    """Start it, and give the environment in which its commands find it.

    Raises:
        RuntimeError: its programs are missing, or it does not start; with what they printed.
    """
    if missing():
        raise RuntimeError(f"there is no {', '.join(missing())} here: {WAY_OUT}")
    # Short, because the path of a socket has to be.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    config, key, log = folder / "slurm.conf", folder / "munge.key", folder / "log"
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    host, user = platform.node().split(".")[0], getpass.getuser()
    config.write_text(CONFIG.format(folder=folder, ports=_free_ports(2), user=user, host=host))
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(config)}
    begun: list[subprocess.Popen] = []

    def begin(*words: str) -> None:
        with open(log, "ab") as file:
            process = subprocess.Popen(words, stdout=file, stderr=file, env=environment)
        begun.append(process)

    def says(*words: str) -> str:
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    try:
        begin(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--{kind}-file={folder}/munge.{kind}" for kind in ("pid", "seed", "log")),
            f"--socket={folder}/munge.socket",
        )
        try:
            until((folder / "munge.socket").exists, "munged's socket")
            begin("slurmctld", "-D", "-i")
            begin("slurmd", "-D", "-N", "localhost")
            until(lambda: set(says("sinfo", "-h", "-o%T").split()) == {"idle"}, "an idle node")
        except TimeoutError as error:
            raise RuntimeError(f"Slurm does not start: {error}\n{log.read_text()}") from None
        yield environment
    finally:
        if len(begun) == 3:
            says("scancel", "--me", "--signal=KILL", "--full")
            says("scancel", "--me")
            with contextlib.suppress(TimeoutError):
                until(lambda: not says("squeue", "--me", "-h"), "the end of all jobs")
        for process in reversed(begun):
            process.terminate()
            process.wait(PATIENCE)
        shutil.rmtree(folder)


if __name__ == "__main__":
    if missing():
        raise SystemExit(f"there is no {', '.join(missing())} here: {WAY_OUT}")
    with one_node_slurm() as found:
        code = subprocess.run(sys.argv[1:], env=found).returncode
    raise SystemExit(code)
