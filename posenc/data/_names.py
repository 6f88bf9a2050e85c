"""How an unknown name is met: with the names that come nearest."""

from __future__ import annotations

from collections.abc import Iterable

from posenc.encodings.registry import nearest
from posenc.errors import UserError


def unknown(kind: str, name: str, known: Iterable[str], way_out: str = "") -> UserError:
    """Build the error for a name that is not among `known`, nearest names first."""
    return UserError(f"unknown {kind} {name!r}: {nearest(name, sorted(known))}{way_out}")
