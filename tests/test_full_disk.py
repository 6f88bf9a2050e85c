"""Commands on a disk that is really full: a small file system of their own, or a limit on files.

A file system is mounted in a mount namespace of the commands alone, so that nothing stays mounted.
Where neither root nor a user namespace may do that, files may not grow beyond some size instead.
"""

import asyncio
import dataclasses
import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX import SummaryWriter

from posenc import checkpoints
from posenc.boards import tensorboard
from posenc.checkpoints import Checkpoints
from posenc.files import Appended
from posenc.metrics import Metrics
from posenc.runs import load_model, open_run
from posenc.training import split

ROOT = Path(__file__).parent.parent
WAYS = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])
STAGES = """
mount -t tmpfs -o size=4k posenc "$DISK" || exit 9
number=0
for options in $STAGES; do
    mount -o "remount,$options" "$DISK" || exit 8
    "$@" >"$KEPT/$number.out" 2>"$KEPT/$number.err"
    echo $? >"$KEPT/$number.code"
    cp -a "$DISK" "$KEPT/$number" || exit 7
    number=$((number + 1))
done
"""


@dataclasses.dataclass(frozen=True)
class Stage:
    """How little room there is while a command runs.

    Attributes:
        options: of the file system.
        largest: bytes of a file, where no file system can be mounted.
        after: the file, below the disk, from whose presence on there is so little.
    """

    options: str
    largest: int | None = None
    after: str | None = None


ENOUGH = Stage("size=64m,nr_inodes=9999")


@dataclasses.dataclass(frozen=True)
class Done:
    """What a stage left: the command's exit code and output, and a copy of the disk."""

    code: int
    out: str
    err: str
    disk: Path

    def one_line(self):
        assert self.code == 2, self.err
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("posenc: ")
        return lines[0]


@pytest.fixture(scope="session")
def way(tmp_path_factory):
    """The words before a command that may mount, or None."""
    for words in WAYS:
        mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "posenc", tmp_path_factory.mktemp("m")]
        if shutil.which("unshare") and not subprocess.run([*words, *mount]).returncode:
            return words
    return None


def run_stages(way, words, folder, stages):
    """Run the same command once a stage, `DISK` in it being the disk."""
    disk, kept = folder / "disk", folder / "kept"
    disk.mkdir(parents=True)
    kept.mkdir()
    words = [word.replace("DISK", str(disk)) for word in map(str, words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    if way is None:
        # Programs that were compiled are no part of this.
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        for number, stage in enumerate(stages):
            run_limited(words, environment, disk, stage, kept / str(number))
    else:
        environment["STAGES"] = " ".join(stage.options for stage in stages)
        environment |= {"DISK": str(disk), "KEPT": str(kept)}
        script = [*way, "sh", "-c", STAGES, "stages", *words]
        done = subprocess.run(script, cwd=ROOT, env=environment, timeout=300)
        assert done.returncode == 0
        assert not list(disk.iterdir())  # outside, nothing was mounted
    return [
        Done(
            int(Path(f"{kept}/{n}.code").read_text()),
            Path(f"{kept}/{n}.out").read_text(),
            Path(f"{kept}/{n}.err").read_text(),
            kept / str(n),
        )
        for n in range(len(stages))
    ]


def run_limited(words, environment, disk, stage, kept):
    with open(f"{kept}.out", "w") as out, open(f"{kept}.err", "w") as err:
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=out, stderr=err)
        while stage.after and not (disk / stage.after).exists() and process.poll() is None:
            time.sleep(0.001)
        if stage.largest is not None:
            limits = stage.largest, stage.largest
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        Path(f"{kept}.code").write_text(str(process.wait(timeout=300)))
    shutil.copytree(disk, kept)


# --- training -------------------------------------------------------------------------------

RUN = "wpe-T16-seed0"


@pytest.fixture(scope="module")
def train(common):
    options = {**common, "encoding": "wpe", "dropout": 0.1, "steps": 40, "checkpoint_every": 4}
    words = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return [sys.executable, "train.py", *(word for pair in words for word in pair), "--out", "DISK"]


@pytest.fixture(scope="module")
def alone(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone")
    words = [str(word).replace("DISK", str(out)) for word in train]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=300)
    return out / RUN


def measured(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows]


def parameter_bytes(folder):
    parameters = split(load_model(open_run(folder)))[1]
    return {name: np.asarray(value).tobytes() for name, value in parameters.items()}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["bytes", "files", "largest file"])
def test_training_goes_on_once_there_is_room(way, train, alone, tmp_path, what):
    every = list((alone / "checkpoints" / "40").rglob("*"))
    blocks = sum(path.stat().st_blocks for path in every) * 512
    others = sum(path.stat().st_blocks for path in alone.iterdir() if path.is_file()) * 512
    # One checkpoint has room, and a half of the next.
    stage = Stage(
        {
            "bytes": f"size={others + 3 * blocks // 2},nr_inodes=9999",
            "files": f"size=64m,nr_inodes={12 + 3 * len(every) // 2}",
        }.get(what, ""),
        20_000,
        f"{RUN}/checkpoints/4.json",
    )
    way = None if what == "largest file" else way
    full, again = run_stages(way, train, tmp_path, [stage, ENOUGH])
    line = full.one_line()
    saved = Checkpoints(full.disk / RUN / "checkpoints")
    good = saved.steps()
    found = re.search(
        r"the checkpoint of step (\d+) could not be written to .*: (No space left on device|File "
        r"too large); the last good one is step (\d+); make room or choose another --out, and give "
        "the same command again to go on",
        line,
    )
    assert found, line
    assert good[-1] == int(found[3]) == int(found[1]) - 4
    if way is not None:
        assert good == [4]
    for step in good:
        saved.verify(step)
    assert again.code == 0, again.err
    folder = again.disk / RUN
    starts = json.loads((folder / "provenance.json").read_text())["starts"]
    assert [start["resumed_from"] for start in starts] == [None, good[-1]]
    assert measured(folder) == measured(alone)
    assert parameter_bytes(folder) == parameter_bytes(alone)
    kept = Checkpoints(folder / "checkpoints").steps()
    assert {path.name for path in (folder / "checkpoints").iterdir() if path.is_dir()} == {
        str(step) for step in kept
    }


@pytest.mark.slow
def test_no_room_even_to_begin(way, train, tmp_path):
    few = [Stage(f"size={4 * n}k", 500 + 100 * n) for n in (1, 3)]
    for full in run_stages(way, train, tmp_path, few):
        assert re.search(
            rf"/{RUN}/[\w.]+: (No space left on device|File too large); make room",
            full.one_line(),
        )


# --- evaluation and token files -------------------------------------------------------------


@pytest.mark.slow
def test_scoring_goes_on_once_there_is_room(way, alone, tmp_path):
    words = [sys.executable, "-m", "eval", "score", alone, "--lengths", 8, 16, "--report"]
    report = tmp_path / "report"
    subprocess.run([*map(str, words), report], cwd=ROOT, check=True, timeout=300)
    # No room for a window's scores; for them, but not for the figure; for all.
    figure = (report / "figure.png").stat().st_size
    scores = sum(path.stat().st_blocks for path in (report / "scores").iterdir()) * 512
    little = Stage("size=4k,nr_inodes=9999", 1000)
    more = Stage(f"size={scores + 4096 + figure},nr_inodes=9999", figure // 2)
    stages = run_stages(way, [*words, "DISK/report"], tmp_path, [little, more, ENOUGH])
    assert re.search(r"scores/\w+\.\w+: (No space|File too large)", stages[0].one_line())
    assert re.search(r"figure\.\w+: cannot write .*: make room", stages[1].one_line())
    for full in stages[:2]:
        assert not (full.disk / "report" / "rows.jsonl").exists()
        assert not list(full.disk.rglob("*part*"))
    assert stages[2].code == 0, stages[2].err
    for name in ("rows.jsonl", "table.md", "figure.png"):
        assert (stages[2].disk / "report" / name).read_bytes() == (report / name).read_bytes()


@pytest.mark.slow
def test_token_files_go_on_once_there_is_room(way, tmp_path):
    rng = np.random.default_rng(0)
    texts = {
        name: [rng.integers(97, 123, 100_000, np.uint8) for _ in range(count)]
        for name, count in (("validation", 1), ("test", 1), ("train", 60))
    }
    for name, rows in texts.items():
        lines = [json.dumps({"text": row.tobytes().decode()}) + "\n" for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    words = [sys.executable, "-m", "posenc.data", "tokens", "--data", f"hub:{tmp_path}"]
    # Room for what is recorded after four million tokens, and not for all.
    few = Stage("size=10m,nr_inodes=9999", 10 * 2**20)
    folder = tmp_path / "limited"
    full, again = run_stages(way, [*words, "--out", "DISK/out"], folder, [few, ENOUGH])
    line = full.one_line()
    assert re.search(r"out/train\.npy: (No space left on device|File too large); make room", line)
    record = json.loads((full.disk / "out" / "tokens.json").read_text())
    assert not record["done"]
    assert record["tokens"]["train"] > 2**21
    assert not list((full.disk / "out").glob("*.npy"))
    assert again.code == 0, again.err
    for name, rows in texts.items():
        expected = np.concatenate([part for row in rows for part in ([256], row)])
        file = again.disk / "out" / f"{name.replace('validation', 'valid')}.npy"
        np.testing.assert_array_equal(np.load(file), expected)
    assert not list((again.disk / "out").glob("*.part"))


def test_an_output_that_has_no_room(tmp_path):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "posenc", "list"]
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "posenc: cannot write: No space left on device; make room, or choose another folder\n"
    )


# --- what is said once, and what is said all the same ----------------------------------------


@pytest.mark.fast
def test_only_what_a_failed_save_leaves_behind_is_not_told(monkeypatch, caplog):
    heard = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: heard.append(str(error)))
    monkeypatch.setattr(sys, "unraisablehook", lambda found: heard.append(str(found.exc_value)))
    checkpoints._say_failures_once.__wrapped__()
    loop = asyncio.new_event_loop()
    loop.close()
    for call in (lambda: loop.call_soon_threadsafe(print), lambda: int("x")):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            own, late = error.__traceback__, error.__traceback__.tb_next.tb_next
            sys.excepthook(type(error), error, own)
            found = SimpleNamespace(exc_type=type(error), exc_value=error, exc_traceback=own)
            sys.unraisablehook(found)
            if late is not None:  # as it looks where no Python called
                sys.excepthook(type(error), error, late)
                found.exc_traceback = late
                sys.unraisablehook(found)
    assert (
        heard == ["Event loop is closed"] * 2 + ["invalid literal for int() with base 10: 'x'"] * 2
    )
    for name in ("asyncio", "absl"):
        for text in ("4.orbax-checkpoint-tmp/d: no room", "another"):
            logging.getLogger(name).error("failed", exc_info=ValueError(text))
        logging.getLogger(name).error("orbax/checkpoint without an error")
    told = [record.exc_info and str(record.exc_info[1]) for record in caplog.records]
    assert told == ["another", None] * 2


# --- what is appended -----------------------------------------------------------------------


@pytest.mark.fast
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.integers(0, 60))
def test_a_piece_is_whole_or_not_there(tmp_path_factory, pieces, kept):
    path = tmp_path_factory.mktemp("a") / "file"
    path.write_bytes(b"." * 60)
    expected = b"." * kept
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Appended(path, kept) as file:
        for piece in pieces:
            refused = False
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            try:
                file.append(piece)
            except OSError as error:
                refused = error.filename == str(path)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert refused == (len(expected + piece) > 100)
            expected += b"" if refused else piece
            assert path.read_bytes() == expected
        file.append(b"end")
    assert path.read_bytes() == expected + b"end"


@pytest.mark.fast
@pytest.mark.parametrize("after", [0, 7])
def test_events_are_those_of_tensorboardx(tmp_path, monkeypatch, after):
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    rows = [{"loss": 2.5, "valid_nll_32": None}, {"encoding.slopes.mean": -1e-3}]
    metrics = Metrics(tmp_path, after, tensorboard(tmp_path, after))
    for step, row in enumerate(rows, start=after + 1):
        metrics.write(step, **row)
    metrics.close()
    (ours,) = tmp_path.glob("events.out.tfevents.*")
    writer = SummaryWriter(str(tmp_path / "theirs"), purge_step=after + 1 if after else None)
    for step, row in enumerate(rows, start=after + 1):
        for name, value in row.items():
            if value is not None:
                writer.add_scalar(name, value, step)
    monkeypatch.undo()  # its thread waits by the clock
    writer.close()
    (theirs,) = (tmp_path / "theirs").iterdir()
    assert ours.read_bytes() == theirs.read_bytes()
