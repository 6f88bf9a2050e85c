"""BibTeX entries, read as far as a list of papers needs."""

from __future__ import annotations

import re
import unicodedata


class MalformedEntry(ValueError):
    """Text that is not one complete BibTeX entry."""


def fields_of(entry: str) -> dict[str, str]:
    """Give the fields of one entry by name, and its ``type`` and ``key``.

    Raises:
        MalformedEntry: it is no entry, a brace is open, or a field is given twice.
    """
    head = re.match(r"@(\w+)\{([^\s,{}]+),", entry)
    if not head or not entry.rstrip().endswith("}"):
        raise MalformedEntry(f"no BibTeX entry: {entry[:40]!r}")
    fields = {"type": head[1], "key": head[2]}
    place, end = head.end(), len(entry.rstrip()) - 1
    while entry[place:end].strip():
        start = re.compile(r"\s*(\w+)\s*=\s*\{").match(entry, place, end)
        if not start:
            raise MalformedEntry(f"{head[2]}: no field at {entry[place : place + 30]!r}")
        depth, place = 1, start.end()
        while depth and place < end:
            depth += {"{": 1, "}": -1}.get(entry[place], 0)
            place += 1
        if depth:
            raise MalformedEntry(f"{head[2]}: a brace is open in {start[1]}")
        if start[1] in fields:
            raise MalformedEntry(f"{head[2]}: {start[1]} given twice")
        fields[start[1]] = " ".join(entry[start.end() : place - 1].split())
        place = re.compile(r"\s*,?").match(entry, place).end()  # type: ignore[union-attr]
    return fields


def entries_of(reference: str) -> list[str]:
    """Give the entries of a reference, which may be of several papers."""
    return [entry.strip() for entry in re.split(r"(?m)^(?=@)", reference) if entry.strip()]


def short(reference: str) -> str:
    """Give ``Su et al., 2021`` of each entry of a reference; nothing of an empty one."""
    found = []
    for entry in entries_of(reference):
        fields = fields_of(entry)
        authors = re.split(r"\s+and\s+", fields["author"])
        names = [plain(name.split(",")[0]) for name in authors if name != "others"]
        who = " and ".join(names) if len(authors) < 3 else f"{names[0]} et al."
        found.append(f"{who}, {fields['year']}")
    return "; ".join(found)


def plain(text: str) -> str:
    """Give TeX text as plain text: accents as letters, braces gone."""
    accents = {"'": "\u0301", '"': "\u0308", "v": "\u030c", "`": "\u0300", "^": "\u0302"}

    def accented(match: re.Match) -> str:
        return (match[2] or match[3]) + accents[match[1]]

    text = re.sub(r"\\(['\"v`^])(?:\{(\w)\}|(\w))", accented, text)
    return unicodedata.normalize("NFC", re.sub(r"[{}]", "", text))
