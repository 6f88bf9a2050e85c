"""Put the demo's table into the README, between its two markers.

make docs           (trains and scores what is missing, copies the results, and runs this)
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- demo table: written by `make docs` -->", "<!-- end of demo table -->"


def first_table(markdown: str) -> str:
    """Give the first table of a Markdown text."""
    parts = [part.strip() for part in markdown.split("\n\n")]
    return next(part for part in parts if part.startswith("|"))


def main() -> None:
    """Rewrite the README."""
    table = first_table((ROOT / "docs/demo/table.md").read_text())
    readme = (ROOT / "README.md").read_text()
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    (ROOT / "README.md").write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


if __name__ == "__main__":
    main()
