"""What a user did wrong, said in one line, with exit code 2."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posenc.encodings.base import EncodingError

# The machine's refusals that a user can do something about; any other keeps its traceback.
_REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
}


class UserError(Exception):
    """Bad input: one clear line that names the value, the limit and the way out."""


def make_folder(path: Path) -> None:
    """Make a folder and those above it.

    Raises:
        UserError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder {path}: {error.strerror}; choose another"
        ) from None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an expected failure into one line on stderr and exit code 2.

    Everything else keeps its traceback: it is a fault of posenc, and the traceback is what a
    report of it needs.
    """
    try:
        yield
        sys.stdout.flush()  # while a full disk can still be said
    except (UserError, EncodingError) as error:
        message = str(error)
    except BrokenPipeError:  # whoever read the output has gone, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        where = f"{error.filename}: " if error.filename else "cannot write: "
        try:
            sys.stdout.flush()
        except OSError:  # where the output goes to a file, the full disk may be that file's
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        message = f"{where}{error.strerror}; make room, or choose another folder"
    except KeyboardInterrupt:
        print("posenc: interrupted; give the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None
    else:
        return
    print("posenc: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)
