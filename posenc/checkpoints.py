"""Save and restore weights, optimiser and step, and notice a damaged file.

A checkpoint is the folder ``STEP`` that orbax writes, and ``STEP.json`` beside it with the SHA-256
of every file in it. The second is written last: without it the first does not count.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from posenc.errors import UserError
from posenc.files import naming
from posenc.processes import is_first, wait

# What is restored on its own: an evaluation needs the parameters and nothing else.
ITEMS = ("parameters", "optimizer", "step")


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that the file is either the old one or the new one, whole."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path), open(part, "w") as file:
            json.dump(value, file, indent=1, sort_keys=True)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def file_hashes(folder: Path) -> dict[str, str]:
    """Give the SHA-256 of every file below a folder, by its relative path."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(
                    file, "sha256"
                ).hexdigest()
    return hashes


def _is_other(record: logging.LogRecord) -> bool:
    """Say whether a log record is anything but orbax's account of a failed save."""
    if record.exc_info is None or record.exc_info[1] is None:
        return True
    told = [record.pathname, record.getMessage(), *traceback.format_exception(record.exc_info[1])]
    return not re.search(r"orbax[-/]checkpoint", "".join(told))


@functools.cache
def _say_failures_once() -> None:
    """Keep a failed save, which `Checkpoints` raises, from being told some hundred times besides.

    orbax's threads and tasks log it, and what tensorstore still has in hand finds their event loops
    closed, one traceback an array.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_other)
    unheard, unraisable = sys.excepthook, sys.unraisablehook

    def is_late(kind: type[BaseException], at: TracebackType | None) -> bool:
        # Of all calls only tensorstore's own come from no Python frame.
        caller = at.tb_frame.f_code.co_name if at is not None else ""
        return kind is RuntimeError and caller == "call_soon_threadsafe"

    def hear(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        if not is_late(kind, at):
            unheard(kind, error, at)

    def raise_late(found: Any) -> None:
        if not is_late(found.exc_type, found.exc_traceback):
            unraisable(found)

    sys.excepthook, sys.unraisablehook = hear, raise_late


class Checkpoints:
    """The checkpoints of a run: the last ``keep``, and the best by validation loss.

    Args:
        folder: where they live; made at the first save.
        keep: how many of the last to keep.
        always: steps whose checkpoints are kept whatever comes after them.
    """

    def __init__(self, folder: Path, keep: int = 2, always: Iterable[int] = ()):
        self.folder = Path(folder).absolute()
        self.keep, self.always = keep, frozenset(always)
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending: tuple[int, concurrent.futures.Future] | None = None

    def steps(self) -> list[int]:
        """Give the steps of all complete checkpoints, ascending."""
        found = self.folder.glob("*.json") if self.folder.is_dir() else ()
        steps = [int(path.stem) for path in found if path.stem.isdigit()]
        return sorted(step for step in steps if (self.folder / str(step)).is_dir())

    def valid_loss(self, step: int) -> float | None:
        """Give the 1x validation loss that was measured at a checkpoint, or None."""
        return json.loads((self.folder / f"{step}.json").read_text())["valid_loss"]

    def best(self) -> int | None:
        """Give the step of the lowest 1x validation loss; never the default for an evaluation."""
        losses = {step: self.valid_loss(step) for step in self.steps()}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        return min(known, key=lambda step: known[step]) if known else None

    def save(self, step: int, state: dict[str, Any], valid_loss: float | None = None) -> None:
        """Begin to save; returns as soon as ``state`` may be used up.

        Raises:
            UserError: this or the previous checkpoint could not be written.
        """
        self.finish()
        try:
            if is_first():
                self._remove_incomplete()
                self.folder.mkdir(parents=True, exist_ok=True)
                # Tried here because orbax, writing in threads, takes minutes to notice.
                write_json(self.folder / "probe", step)
                (self.folder / "probe").unlink()
            wait(f"{self.folder} is ready for step {step}")
            if self._orbax is None:
                _say_failures_once()
                self._orbax = ocp.AsyncCheckpointer(
                    ocp.CompositeCheckpointHandler(*ITEMS), timeout_secs=600
                )
            items = {name: ocp.args.StandardSave({"value": state[name]}) for name in ITEMS}
            self._orbax.save(self.folder / str(step), args=ocp.args.Composite(**items))
        except Exception as error:
            raise self._unwritten(step, error) from error
        self._pending = step, self._thread.submit(self._complete, step, valid_loss)

    def finish(self) -> None:
        """Wait until all that was begun is complete.

        Raises:
            UserError: it could not be written.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        try:
            future.result()
        except Exception as error:
            raise self._unwritten(step, error) from error

    def verify(self, step: int) -> None:
        """Compare every file of a checkpoint with its SHA-256 (orbax itself restores flipped bits).

        Raises:
            UserError: a file is missing, altered or added; a good earlier step is offered.
        """
        try:
            kept = json.loads((self.folder / f"{step}.json").read_text())["files"]
        except (OSError, ValueError, KeyError):
            raise self._damaged(step, f"{step}.json cannot be read") from None
        found = file_hashes(self.folder / str(step))
        for name in sorted(kept.keys() | found.keys()):
            if kept.get(name) != found.get(name):
                what = (
                    "is missing"
                    if name not in found
                    else "was added"
                    if name not in kept
                    else "has another SHA-256"
                )
                raise self._damaged(step, f"file {name} {what}")

    def restore(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """Verify a checkpoint, then read the items of ``like``, placed as ``like`` says.

        Args:
            step: which one.
            like: some of ``parameters``, ``optimizer`` and ``step``, as arrays or abstract arrays.

        Raises:
            UserError: it is not there, damaged, or of another shape.
        """
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; it has: {there}")
        self.verify(step)
        handler = ocp.CompositeCheckpointHandler(*like)
        items = {name: ocp.args.StandardRestore({"value": tree}) for name, tree in like.items()}
        with ocp.Checkpointer(handler) as reader:
            try:
                read = reader.restore(self.folder / str(step), args=ocp.args.Composite(**items))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"checkpoint {step} in {self.folder} does not fit the run's config: {error}"
                ) from error
        return {name: read[name]["value"] for name in like}

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints behind a step from which a run goes on."""
        for later in self.steps() if is_first() else ():
            if later > step:
                self._remove(later)

    def good_before(self, step: int) -> int | None:
        """Give the last undamaged checkpoint before a step, or None."""
        for earlier in reversed([s for s in self.steps() if s < step]):
            try:
                kept = json.loads((self.folder / f"{earlier}.json").read_text())["files"]
            except (OSError, ValueError, KeyError):
                continue
            if kept == file_hashes(self.folder / str(earlier)):
                return earlier
        return None

    def _complete(self, step: int, valid_loss: float | None) -> None:
        assert self._orbax is not None
        self._orbax.wait_until_finished()
        if not is_first():
            return
        files = file_hashes(self.folder / str(step))
        write_json(
            self.folder / f"{step}.json", {"step": step, "valid_loss": valid_loss, "files": files}
        )
        kept = {*self.steps()[-self.keep :], self.best(), *self.always}
        for old in self.steps():
            if old not in kept:
                self._remove(old)

    def _remove(self, step: int) -> None:
        # The list first: a folder without it does not count, a list without its folder neither.
        (self.folder / f"{step}.json").unlink()
        shutil.rmtree(self.folder / str(step))

    def _remove_incomplete(self) -> None:
        complete = {str(step) for step in self.steps()}
        for path in self.folder.glob("*") if self.folder.is_dir() else ():
            if path.is_dir() and path.name not in complete:
                shutil.rmtree(path)

    def _unwritten(self, step: int, error: Exception) -> UserError:
        good = self.steps()
        # What tensorstore says has pages around the machine's own word.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        what = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or error
        last = f"the last good one is step {good[-1]}" if good else "there is no earlier one"
        return UserError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {what}; "
            f"{last}; make room or choose another --out, and give the same command again to go on"
        )

    def _damaged(self, step: int, what: str) -> UserError:
        good = self.good_before(step)
        way = (
            f"the previous good one is step {good}: give --checkpoint {good}"
            if good is not None
            else "there is no earlier good one"
        )
        return UserError(f"checkpoint {step} in {self.folder} is damaged ({what}); {way}")


def abstract(tree: Any, sharding: Any) -> Any:
    """Give the shapes of a tree, to be restored with a sharding, or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own), tree, sharding
    )
