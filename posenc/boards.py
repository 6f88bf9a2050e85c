"""Where metrics are shown, beside the file that keeps them: TensorBoard and Weights & Biases."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from posenc.errors import UserError
from posenc.files import Appended

# Seconds that the end of a run waits for what is still to be uploaded.
UPLOAD_TIMEOUT = 60.0


@runtime_checkable
class Board(Protocol):
    """Shows numbers by name and step."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show what is known of a step; more of it may follow."""

    def close(self) -> None:
        """Write what is left, and end."""


def tensorboard(folder: Path, after: int) -> list[Board]:
    """Give TensorBoard events in a run's folder; nothing where tensorboardX is not installed.

    Args:
        folder: of the run.
        after: events of later steps, in older files, are hidden when a run goes on from this one.
    """
    return [] if importlib.util.find_spec("tensorboardX") is None else [Events(folder, after)]


class Events:
    """A file of TensorBoard events.

    Written where it is called, not by tensorboardX's own writer: that has a thread, for which
    training would wait for ever once a full disk has ended it.

    Args:
        folder: for the file.
        after: events of later steps, in older files, are hidden when a run goes on from this one.
    """

    def __init__(self, folder: Path, after: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import masked_crc32c
        from tensorboardX.summary import scalar

        self._event, self._scalar, self._crc = Event, scalar, masked_crc32c
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = Appended(folder / name)
        version, start = "brain.Event:2", SessionLog(status=SessionLog.START)
        first = [Event(wall_time=time.time(), file_version=version)]
        if after:
            at = {"step": after + 1, "wall_time": time.time()}
            first += [Event(**at, file_version=version), Event(**at, session_log=start)]
        self._append(first)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append a scalar each."""
        self._append(
            [
                self._event(step=step, wall_time=time.time(), summary=self._scalar(name, value))
                for name, value in values.items()
            ]
        )

    def _append(self, events: list[Any]) -> None:
        records = []
        for event in events:
            data = event.SerializeToString()
            size = struct.pack("<Q", len(data))
            crcs = (struct.pack("<I", self._crc(some)) for some in (size, data))
            records += [size, next(crcs), data, next(crcs)]
        self._file.append(b"".join(records))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_wandb(project: str | None) -> None:
    """Raise ``UserError`` where a project of Weights & Biases is named and wandb is missing."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise UserError(f'--wandb {project} needs wandb: pip install "posenc[wandb] @ ."')


class WeightsAndBiases:
    """A run of Weights & Biases, in the mode that WANDB_MODE says.

    A run that goes on is the same run there. Whatever fails there is said and ends nothing: where
    the run cannot begin online, its numbers are kept in ``RUN/wandb``.

    Args:
        project: there.
        folder: of the run.
        config: shown beside the numbers.
        identity: what the run is; its name there is made from it.
    """

    def __init__(self, project: str, folder: Path, config: dict[str, Any], identity: list[str]):
        import wandb

        def begin(**mode: Any) -> Any:
            return wandb.init(
                project=project,
                id=hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
                name=folder.name,
                dir=str(folder),
                config=config,
                resume="allow",
                reinit="finish_previous",  # that of a run which failed before this one
                settings=wandb.Settings(console="off", quiet=True, finish_timeout=UPLOAD_TIMEOUT),
                **mode,
            )

        self._run: Any = None
        try:
            self._run = begin()
        except Exception as error:
            _say(error, f"numbers are kept for `wandb sync` in {folder}/wandb")
            try:
                wandb.teardown()  # else it holds the name of what did not begin
                self._run = begin(mode="offline")
            except Exception as again:
                _say(again, "nothing is kept for it")
        # What is known there of steps that are done again is left as it is: it takes no second one.
        self._first = 0 if self._run is None else self._run.starting_step

    def write(self, step: int, values: dict[str, float]) -> None:
        """Show what is known of a step."""
        if self._run is None or step < self._first:
            return
        try:
            self._run.log(values, step=step)
        except Exception as error:
            self._run = None
            _say(error, "no more is shown there")

    def close(self) -> None:
        """Upload what is left, for a minute at most."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            _say(error, "the end may be missing there")


def _say(error: Exception, then: str) -> None:
    reason = " ".join(str(error).split()) or type(error).__name__
    print(f"posenc: Weights & Biases: {reason}; training goes on, {then}", file=sys.stderr)
