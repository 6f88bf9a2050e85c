"""Train blocks that all positions share, that groups share, and that none share, and compare.

    make study-weight-sharing            (or: python -m studies.weight_sharing)

Three experiments at length 32, with three seeds: (a) text: the loss against the tokens trained on,
at equal width and at an equal number of parameters; (b) a fact taught at some places of the window
and asked for at all of them; (c) the loss by position. And how many positions of one sequence teach
a weight. Cost: about 25 minutes on two slow CPU cores. What is finished is not run again.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from eval.report.rows import Row, write_file, write_rows
from posenc.cli import parse
from posenc.compilation import keep_compiled
from posenc.errors import UserError, one_line_errors
from posenc.optimizer import OptimizerConfig
from studies.weight_sharing import contributions, facts, text
from studies.weight_sharing.report import EXPERIMENTS, draw, table


@dataclasses.dataclass(frozen=True)
class Study:
    """Compare blocks whose weights all positions share, groups of them, or none."""

    out: Path = Path("weight_sharing")
    """Where runs and results go."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of parameters and data."""
    steps: int = 1280
    """Of training on text; a multiple of 8."""
    fact_steps: int = 640
    """Of training on text with facts in it."""
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Peak learning rates: each model on text gets its best, by a run of a quarter of --steps."""
    fact_rate: float = 3e-3
    """The peak learning rate of all models that are taught facts."""
    width: int = 64
    """Of the models at equal width."""
    length: int = 32
    """Tokens of a window; a multiple of 16."""
    batch_size: int = 32
    """Windows of a step."""
    tokens_per_document: int = 2048
    """Of each test document, for the loss by position."""
    data: str = "manuals-small"
    """A corpus by name, or a glob of files."""


def main(arguments: Study) -> None:
    """Run what is not finished, write rows, table and figure, and print the table."""
    for option, value, part in (
        ("--steps", arguments.steps, 8),
        ("--length", arguments.length, 16),
    ):
        if value < part or value % part:
            raise UserError(f"{option} is {value}: give a multiple of {part}")
    for option, value, least in (
        ("--fact-steps", arguments.fact_steps, 1),
        ("--batch-size", arguments.batch_size, 1),
        ("--tokens-per-document", arguments.tokens_per_document, 2),
    ):
        if value < least:
            raise UserError(f"{option} is {value}: it must be at least {least}")
    if not arguments.seeds:
        raise UserError("--seeds names none: give at least one, such as 0 1 2")
    if not arguments.rates:
        raise UserError("--rates names none: give at least one, such as 0.001 0.003")
    for rate in (*arguments.rates, arguments.fact_rate):
        OptimizerConfig(rate)  # which refuses what is no rate
    keep_compiled()
    print(
        f"weight sharing: windows of {arguments.length}, seeds "
        f"{', '.join(map(str, arguments.seeds))}. With the default settings this takes about 25 "
        "minutes on two slow CPU cores. After Ctrl-C the same command does what is missing.",
        flush=True,
    )
    began = time.monotonic()
    rows: dict[str, list[Row]] = {
        "contributions": contributions.measure(arguments),
        "text": text.run(arguments),
        "facts": facts.run(arguments),
    }
    results = arguments.out / "results"
    for name in EXPERIMENTS:
        write_rows(rows[name], results / name)
    words = table(rows)
    write_file(results / "table.md", words.encode())
    draw(rows, results / "figure.png")
    print(words)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; figure: {results / 'figure.png'}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse(Study, __doc__))
