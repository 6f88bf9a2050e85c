"""What boards are shown is what metrics.jsonl has, and their failures end nothing."""

import importlib.machinery
import json
import struct
import sys
import types

import numpy as np
import pytest

import train
from posenc.errors import UserError


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def shown(rows):
    """Give what rows are on a board: a dictionary a step, with names of their own for seeds."""
    steps = {}
    for row in rows:
        suffix = f"/seed{row['seed']}" if "seed" in row else ""
        for name, value in row.items():
            if name not in ("step", "seed") and value is not None:
                steps.setdefault(row["step"], {})[name + suffix] = value
    return steps


def events(folder):
    """Read TensorBoard's scalars: records of a length, two checksums and a protocol buffer."""
    from tensorboardX.proto.event_pb2 import Event

    steps = {}
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            for value in event.summary.value:
                own = steps.setdefault(event.step, {})
                assert value.tag not in own
                own[value.tag] = value.simple_value
    return steps


@pytest.mark.fast
def test_tensorboard_is_shown_each_seed_under_a_name_of_its_own(common, tmp_path):
    (folder,) = train.main(arguments(common, tmp_path, wandb=None, seeds=2))
    rows = shown(rows_of(folder))
    assert {"loss/seed0", "loss/seed1"} <= set(rows[6])
    assert events(folder) == {
        step: {name: float(np.float32(value)) for name, value in values.items()}
        for step, values in rows.items()
    }


class FakeRun:
    """What ``wandb.init`` gives, which may fail."""

    def __init__(self, known, failing):
        self.starting_step, self._failing = known, failing
        self.shown, self.finished = {}, False

    def log(self, values, step):
        if self._failing:
            raise OSError("no route\nto host")
        self.shown.setdefault(step, {}).update(values)

    def finish(self):
        if self._failing:
            raise TimeoutError
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, which keeps what it is told."""
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    fake.begun, fake.refused, fake.failing, fake.known = [], (), False, 0

    def init(mode=None, **options):
        if mode in fake.refused:
            raise RuntimeError("no API key")
        fake.begun.append((mode, options, FakeRun(fake.known, fake.failing)))
        return fake.begun[-1][2]

    fake.init, fake.Settings, fake.teardown = init, dict, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def arguments(common, tmp_path, **changed):
    return train.Arguments(**{**common, "out": tmp_path, "wandb": "project", **changed})


@pytest.mark.fast
def test_wandb_that_is_missing_is_refused_before_anything_is_made(common, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"--wandb project needs wandb: pip install .*\[wandb\]"):
        train.main(arguments(common, tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fast
def test_a_run_that_goes_on_is_the_same_and_is_shown_what_is_new(common, tmp_path, wandb):
    (folder,) = train.main(arguments(common, tmp_path))
    whole = shown(rows_of(folder))
    saved = json.loads((folder / "config.json").read_text())
    # From step 3, where W&B knows of all steps until 4 already.
    wandb.known = 5
    train.main(arguments(common, tmp_path, checkpoint=3))
    (mode, options, run), (_, again, rest) = wandb.begun
    assert mode is None
    assert (options["project"], options["resume"]) == ("project", "allow")
    assert options["config"]["hash"] == saved["hash"]
    assert options["config"]["model"] == saved["config"]["model"]
    assert again["id"] == options["id"]
    assert run.shown == whole
    assert run.finished
    assert rest.shown == {6: shown(rows_of(folder))[6]}
    # The same trained anew is another one; and the option is not of the run's identity.
    (other,) = train.main(arguments(common, tmp_path / "other", name=folder.name))
    assert json.loads((other / "config.json").read_text()) == saved
    path = other / "provenance.json"
    began = json.loads(path.read_text())["starts"][0]["time"]
    first = json.loads((folder / "provenance.json").read_text())["starts"][0]["time"]
    assert (wandb.begun[2][1]["id"] == options["id"]) == (began == first)


@pytest.mark.fast
def test_what_fails_there_is_said_and_ends_nothing(common, tmp_path, wandb, capsys):
    (plain,) = train.main(arguments(common, tmp_path / "plain", wandb=None))
    losses = [row.get("loss") for row in rows_of(plain)]

    def trained(name):
        (folder,) = train.main(arguments(common, tmp_path, name=name))
        assert [row.get("loss") for row in rows_of(folder)] == losses
        return [line for line in capsys.readouterr().err.splitlines() if "Biases" in line]

    wandb.refused = (None,)  # online; offline it begins
    (line,) = trained("refused")
    assert "no API key; training goes on, numbers are kept for `wandb sync` in" in line
    ((mode, _, run),) = wandb.begun
    assert (mode, sorted(run.shown)) == ("offline", [3, 6])
    wandb.refused = (None, "offline")
    assert trained("never")[1].endswith("no API key; training goes on, nothing is kept for it")
    wandb.refused, wandb.failing = (), True
    (line,) = trained("fails")
    assert line.endswith("no route to host; training goes on, no more is shown there")


# --- The package itself, offline ------------------------------------------------------------------


def history(path):
    """Read the history of an offline run: LevelDB's log of protocol buffers, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, steps, ids = path.read_bytes(), 7, b"", {}, set()
    while at < len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # no header fits into the rest of a block
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind not in (1, 4):  # whole, or the last of several
            continue
        found, record = Record.FromString(record), b""
        if found.WhichOneof("record_type") == "run":
            ids.add((found.run.run_id, found.run.project, found.run.display_name))
        if found.WhichOneof("record_type") == "history":
            values = {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in found.history.item
            }
            step = values["_step"]
            assert step not in steps
            steps[step] = {k: v for k, v in values.items() if not k.startswith("_")}
    return steps, ids


@pytest.mark.peers
def test_offline_files_of_wandb_have_the_same_numbers(common, tmp_path, monkeypatch, capfd):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for kind in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{kind}_DIR", str(tmp_path / "wandb-home"))
    options = {"encoding": ("kerple_log",), "seeds": 2, "steps": 24, "checkpoint_every": 8}

    def newest():
        (path,) = set((folder / "wandb").glob("offline-run-*/*.wandb")) - before
        before.add(path)
        return history(path)

    before = set()
    (folder,) = train.main(arguments(common, tmp_path, **options))
    steps, ids = newest()
    whole = shown(rows_of(folder))
    assert steps == whole
    assert sorted(steps) == [3, 6, 8, 9, 10, 12, 15, 16, 18, 20, 21, 24]
    assert {"loss/seed0", "loss/seed1", "encoding.parts.0.r1.mean/seed1"} <= set(steps[24])

    train.main(arguments(common, tmp_path, checkpoint=16, **options))
    rest, same = newest()
    assert same == ids
    assert [run[1:] for run in ids] == [("project", folder.name)]
    assert rest == {step: values for step, values in shown(rows_of(folder)).items() if step > 16}
    assert rest[24]["loss/seed1"] == whole[24]["loss/seed1"]

    # Where no server answers, the numbers are kept offline.
    wandb.teardown()  # it has read its variables
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    train.main(arguments(common, tmp_path, checkpoint=16, **options))
    assert "training goes on, numbers are kept" in capfd.readouterr().err
    assert newest()[0] == {s: v for s, v in shown(rows_of(folder)).items() if s > 16}
    wandb.teardown()
