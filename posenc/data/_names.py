"""How an unknown name is met: with the names that come nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from posenc.errors import UserError


def unknown(kind: str, name: str, known: Iterable[str], way_out: str = "") -> UserError:
    """Build the error for a name that is not among `known`, nearest names first."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} {name!r}: {hint}{way_out}")
