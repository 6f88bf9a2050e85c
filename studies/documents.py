"""Put results into documents: tables between markers, and what commands print beneath them.

    python -m studies.documents README.md docs/weight-sharing.md        (make docs does so)

A table stands between ``<!-- table N of FILE -->`` and ``<!-- end of table -->``; a command is the
first line of a block of kind ``console``, after ``$``, and what it prints on stdout is the rest.
The list of all encodings stands between ``<!-- list -->`` and ``<!-- end of list -->``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from posenc.catalogue import catalogue, markdown
from posenc.errors import UserError, one_line_errors

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(
    r"^(?P<begin><!-- table (?P<number>\d+) of (?P<file>\S+) -->\n)"
    r"(?:(?!<!-- table ).)*?^(?P<end><!-- end of table -->)$",
    re.DOTALL | re.MULTILINE,
)
LIST = re.compile(r"^<!-- list -->\n.*?^<!-- end of list -->$", re.DOTALL | re.MULTILINE)
# A command goes on where its line ends in a backslash.
CONSOLE = re.compile(
    r"```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<printed>.*?)```\n", re.DOTALL
)


def nth_table(markdown: str, number: int) -> str:
    """Give the n-th table of a Markdown text, counted from 1."""
    parts = [part.strip() for part in markdown.split("\n\n")]
    return [part for part in parts if part.startswith("|")][number - 1]


def with_tables(text: str) -> str:
    """Give a document with its tables as the files have them."""

    def fresh(match: re.Match[str]) -> str:
        table = (ROOT / match["file"]).read_text()
        return f"{match['begin']}{nth_table(table, int(match['number']))}\n{match['end']}"

    return TABLE.sub(fresh, text)


def with_list(text: str) -> str:
    """Give a document with the list of encodings as it is now."""
    if not LIST.search(text):
        return text
    listed = f"<!-- list -->\n{markdown(catalogue())}\n<!-- end of list -->"
    return LIST.sub(lambda match: listed, text)


def commands(text: str) -> list[tuple[list[str], str]]:
    """Give the words of every command that a document shows, and what it prints there."""
    return [
        (shlex.split(match["command"].replace("\\\n", " ")), match["printed"])
        for match in CONSOLE.finditer(text)
    ]


def with_outputs(text: str) -> str:
    """Give a document whose commands were run just now.

    Raises:
        UserError: one of them failed.
    """

    def fresh(match: re.Match[str]) -> str:
        ((words, _),) = commands(match[0])
        program = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise UserError(f"{' '.join(words)} failed: {why}")
        return f"```console\n$ {match['command']}\n{done.stdout.rstrip()}\n```\n"

    return CONSOLE.sub(fresh, text)


def main(paths: list[str]) -> None:
    """Rewrite documents."""
    for path in map(Path, paths):
        path.write_text(with_outputs(with_list(with_tables(path.read_text()))))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
