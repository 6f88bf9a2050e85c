"""What a run measures while it trains, line by line."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

from posenc.files import Appended, naming


class Events:
    """A file of TensorBoard events.

    Written where it is called, not by tensorboardX's own writer: that has a thread, for which
    training would wait for ever once a full disk has ended it.

    Args:
        folder: for the file.
        after: events of later steps, in older files, are hidden when a run goes on from this one.

    Raises:
        ImportError: tensorboardX is not installed.
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


class Metrics:
    """``metrics.jsonl``, a row an entry, and TensorBoard events where tensorboardX is installed.

    Args:
        folder: of the run.
        after: rows of later steps are dropped, when a run goes on from this one.

    Attributes:
        seconds: of training until that step.
    """

    def __init__(self, folder: Path, after: int):
        path = folder / "metrics.jsonl"
        kept, self.seconds = [], 0.0
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the last line of a process that was killed
                    continue
                if row["step"] <= after:
                    kept.append(line)
                    self.seconds = row.get("seconds", self.seconds)
        part = path.with_name(".metrics.part")
        with naming(path):
            part.write_text("".join(line + "\n" for line in kept))
        os.replace(part, path)
        self._file = Appended(path)
        try:
            self._events: Events | None = Events(folder, after)
        except ImportError:
            self._events = None

    def write(self, step: int, **values: float | None) -> None:
        """Append one row.

        Raises:
            OSError: the disk is full; nothing of the row is left in the file.
        """
        self._file.append((json.dumps({"step": step, **values}) + "\n").encode())
        if self._events is not None:
            known = {name: value for name, value in values.items() if value is not None}
            self._events.write(step, known)

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()
