"""Two real processes train one run, one of them is killed, and both go on."""

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from posenc.checkpoints import Checkpoints
from posenc.errors import UserError
from posenc.processes import in_a_job, join

ROOT = Path(__file__).parent.parent


def words_of(options, out):
    words = [sys.executable, str(ROOT / "train.py"), "--out", str(out)]
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


def start(options, out, count):
    """Start all processes of a run, and give them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        subprocess.Popen(
            [
                *words_of(options, out),
                *("--coordinator", address, "--processes", str(count), "--process", str(index)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(count)
    ]


def losses(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (row["step"], name): row[name]
        for row in rows
        for name in ("loss", "valid_nll_16")
        if name in row
    }


@pytest.mark.slow
def test_two_processes_are_one_run_and_go_on_where_one_was_killed(tmp_path, common):
    options = {**common, "steps": 240, "checkpoint_every": 20, "eval_every": 120}
    alone = subprocess.run(words_of(options, tmp_path / "one"), capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    out = tmp_path / "two"
    folder = out / "wpe-T16-seed0"
    processes = start(options, out, 2)
    try:
        while not (folder / "checkpoints" / "40.json").exists():
            assert all(process.poll() is None for process in processes), [
                process.communicate()[0] for process in processes if process.poll() is not None
            ]
            time.sleep(0.01)
    finally:
        # The one that is left would wait for the other; whoever started both ends it.
        for process in reversed(processes):
            process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()
    assert not (folder / "checkpoints" / "240.json").exists()
    said = [process.communicate()[0] for process in start(options, out, 2)]
    starts = json.loads((folder / "provenance.json").read_text())["starts"]
    assert len(starts) == 2, said
    assert starts[1]["resumed_from"] >= 40
    assert starts[1]["device"].startswith("2 x ")
    # The first process speaks, and no other.
    assert "240/240" in said[0]
    assert "wpe-T16" not in said[1]
    got, wanted = losses(folder), losses(tmp_path / "one" / "wpe-T16-seed0")
    assert got.keys() == wanted.keys()
    assert {step for step, _ in got} >= {240}
    for key, value in got.items():
        # Adam amplifies the rounding of sums over devices.
        np.testing.assert_allclose(value, wanted[key], atol=2e-3 if key[0] > 5 else 1e-5)


@pytest.mark.slow
def test_a_signal_to_one_process_saves_in_all(tmp_path, common):
    options = {**common, "steps": 20_000, "checkpoint_every": 10_000, "eval_every": 10_000}
    folder = tmp_path / "wpe-T16-seed0"
    processes = start(options, tmp_path, 2)
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and '"step": 20,' in metrics.read_text()):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, said
    (step,) = Checkpoints(folder / "checkpoints").steps()
    assert step >= 20
    assert step % 10 == 0
    assert f"saved step {step}; give the same command to go on" in said[0]


@pytest.mark.fast
def test_jobs_of_several_processes_are_known_by_their_environment():
    assert not in_a_job({})
    assert not in_a_job({"SLURM_NTASKS": "4", "TPU_WORKER_HOSTNAMES": "one"})
    assert not in_a_job({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "here"})
    assert in_a_job({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "here"})
    assert in_a_job({"OMPI_COMM_WORLD_SIZE": "2"})
    assert in_a_job({"TPU_WORKER_HOSTNAMES": "one,two"})
    assert in_a_job({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": "here"})
    with pytest.raises(UserError, match="belong together: give all three"):
        join("localhost:1", 2, None)
    with pytest.raises(UserError, match="--process 2 of --processes 2: give 0 to 1"):
        join("localhost:1", 2, 2)
