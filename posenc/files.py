"""Files that are written while a disk may be full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give the machine's refusal to write the name of the file, which it does not say itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class Appended:
    """A file that grows by whole pieces: one that does not fit is taken back.

    Nothing is buffered: a full disk would bring that up again at every later call, last at exit.

    Args:
        path: of the file; a new one if it is not there.
        size: bytes to keep of it; all unless given.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        with naming(path):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by `close`)
            if size is not None:
                self._file.truncate(size)
            self._size = path.stat().st_size

    def append(self, piece: bytes) -> None:
        """Write a piece at the end.

        Raises:
            OSError: it does not fit; nothing of it is left in the file.
        """
        rest = memoryview(piece)
        with naming(self.path):
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                self._file.truncate(self._size)
                raise
        self._size += len(piece)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Appended:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
