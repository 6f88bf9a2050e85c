"""The papers of whatever rows name, as BibTeX."""

from __future__ import annotations

from collections.abc import Iterable

from eval.report.rows import Row
from posenc.catalogue import names_in, reference_of
from posenc.citations import entries_of, fields_of
from posenc.encodings.registry import SpecError, parse_part, parse_spec


def references(rows: Iterable[Row]) -> str:
    """Give each paper of the rows' encodings, position samplers and policies once, by key.

    Comments above say which name has which keys, and what has no paper or is not known here: code
    that a row names (``module:Class``) is not imported.
    """
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(_names(row))
    comments: list[str] = []
    found: dict[str, str] = {}
    for name in sorted(names):
        try:
            if ":" in name:
                raise SpecError("code outside posenc")
            entries = entries_of(reference_of(name))
        except SpecError:
            comments.append(f"% {name}: not known here; add its paper")
            continue
        keys = {fields_of(entry)["key"]: entry for entry in entries}
        comments.append(f"% {name}: {', '.join(keys) or 'no paper of its own'}")
        found |= keys
    return "\n\n".join(["\n".join(comments), *(found[key] for key in sorted(found))]) + "\n"


def _names(row: Row) -> list[str]:
    names: list[str] = []
    for key, read in (("encoding", parse_spec), ("positions", parse_part), ("extend", parse_part)):
        text = row.get(key)
        if not text or (key, text) == ("positions", "sequential"):
            continue
        try:
            names += names_in(read(str(text)))
        except SpecError:
            names.append(" ".join(str(text).split()))
    return names
