"""What a run measures while it trains, line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from posenc.boards import Board
from posenc.files import Appended, naming


class Metrics:
    """``metrics.jsonl``, a row an entry, and the same on boards.

    Where a row is of one seed of several, its name there ends in the seed's: ``loss/seed1``.

    Args:
        folder: of the run.
        after: rows of later steps are dropped, when a run goes on from this one.
        boards: that show the numbers too.

    Attributes:
        seconds: of training until that step.
    """

    def __init__(self, folder: Path, after: int, boards: Iterable[Board] = ()):
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
        self._boards = tuple(boards)

    def write(self, step: int, *, seed: int | None = None, **values: float | None) -> None:
        """Append one row.

        Args:
            step: of the run.
            seed: that it is of, where several are trained at once.
            values: by name; None where there is none.

        Raises:
            OSError: the disk is full; nothing of the row is left in the file.
        """
        own = {} if seed is None else {"seed": seed}
        self._file.append((json.dumps({"step": step, **own, **values}) + "\n").encode())
        suffix = "" if seed is None else f"/seed{seed}"
        shown = {name + suffix: value for name, value in values.items() if value is not None}
        for board in self._boards:
            board.write(step, shown)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        for board in self._boards:
            board.close()
