"""Command lines made from dataclasses by tyro, whose refusals are one line as well."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from posenc.encodings.registry import nearest

T = TypeVar("T")


def parse(cls: Callable[..., T], description: str, arguments: Sequence[str] | None = None) -> T:
    """Read the command line into a dataclass.

    Raises:
        SystemExit: help was asked for, or with code 2 after one line that names what is wrong.
    """
    return _one_line(lambda: tyro.cli(cls, description=description, args=arguments))


def parse_subcommand(
    commands: Mapping[str, Callable[..., Any]],
    program: str,
    arguments: Sequence[str] | None = None,
) -> Any:
    """Read the command line into the dataclass of one of several subcommands."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or (arguments[0] not in commands and not arguments[0].startswith("-")):
        given = repr(arguments[0]) if arguments else "nothing"
        known = nearest(arguments[0] if arguments else "", commands)
        print(f"posenc: {program} takes a subcommand, not {given}: {known}", file=sys.stderr)
        raise SystemExit(2)
    every = dict(commands)
    return _one_line(
        lambda: tyro.extras.subcommand_cli_from_dict(every, prog=program, args=arguments)
    )


def _one_line(read: Callable[[], T]) -> T:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read()
    except SystemExit as stop:
        if stop.code != 2:
            sys.stderr.write(said.getvalue())
            raise
    # tyro draws a box of several sections: what is wrong, what may have been meant, where help is.
    # Where the output is ASCII, the box is rules alone, and its title stands above the first.
    text = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    lines = [line.strip("│╭╮╰╯ \n") for line in text.splitlines()]
    sections: list[list[str]] = [[]]
    for number, line in enumerate(lines):
        if line.startswith("─") or not line.strip("-"):
            sections.append([])
        elif number or lines[1:2] == [] or lines[1].strip("-"):
            sections[-1].append(line)
    kept = [" ".join(section) for section in sections if section]
    message = kept[0] if kept else "the command line cannot be read"
    close = [s for s in kept[1:] if s.startswith("Perhaps you meant")]
    names = dict.fromkeys(re.findall(r"(?:^|\s)(--[a-z][\w-]*)", close[0])) if close else ()
    if names:
        message += "; did you mean " + " or ".join(names) + "?"
    if message.startswith("Unrecognized") and not re.search(r"(^|\s)--", message):
        message += "; a list of files must be one quoted glob, such as 'texts/*.txt'"
    print(f"posenc: {message} (--help lists all options)", file=sys.stderr)
    raise SystemExit(2)
