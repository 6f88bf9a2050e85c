"""Train five encodings at length 64 on embedded text, and draw how each extrapolates to 16x.

    make demo            (or: python -m studies.demo)

Cost: about 10 minutes on two slow CPU cores. One seed: the order of encodings that are close means
nothing. What is finished is not run again.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import train
from eval.evaluate import evaluate
from eval.report import write_report
from eval.report.table import print_table
from eval.results import Row
from posenc.cli import parse
from posenc.errors import UserError, one_line_errors

ENCODINGS = ("wpe", "sinusoidal", "rope", "alibi", "nope")


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train five encodings on embedded text, and draw how each extrapolates."""

    out: Path = Path("demo")
    """Where runs and report go."""
    steps: int = 1000
    """Of training, each encoding."""
    model: str = "tiny"
    """A preset."""
    data: str = "manuals-small"
    """A corpus by name, or a glob of files."""
    train_length: int = 64
    """Tokens of a training window."""
    multiples: tuple[float, ...] = (0.5, 1, 2, 4, 8, 16)
    """Evaluation lengths, in training lengths."""
    batch_size: int = 32
    """Windows of a step."""
    tokens_per_document: int = 4096
    """Of each test document, for the non-overlapping windows."""


def expectations(rows: list[Row], train_length: int, longest: int) -> list[tuple[str, str, bool]]:
    """Hold what the field would predict against what came out.

    Returns:
        For each prediction: what it says, the number that came out, and whether it was seen.
    """
    primary = [row for row in rows if row["protocol"] == "nll_by_context"]
    at = {(row["encoding"], row["length"]): row for row in primary}
    found = []
    for name in ("rope", "sinusoidal"):
        excess = at[name, longest]["excess_nll"]
        found.append(
            (
                f"{name} loses heavily beyond the training length",
                f"{excess:+.2f} nats",
                excess > 0.5,
            )
        )
    excess = at["alibi", longest]["excess_nll"]
    found.append(
        ("alibi hardly loses beyond the training length", f"{excess:+.2f} nats", abs(excess) < 0.1)
    )
    beyond = [row for row in primary if row["encoding"] == "wpe" and row["length"] > train_length]
    undefined = sum(not row["defined"] for row in beyond)
    found.append(
        (
            "wpe has no vector to offer beyond its table",
            f"{undefined} of {len(beyond)} longer lengths undefined",
            undefined == len(beyond),
        )
    )
    return found


def main(arguments: Demo) -> None:
    """Train, evaluate, print the table and the predictions, name the figure."""
    lengths = tuple(round(m * arguments.train_length) for m in arguments.multiples)
    if not min(lengths) <= arguments.train_length < max(lengths):
        raise UserError(
            f"--multiples gives lengths {', '.join(map(str, lengths))}: at least one must be "
            f"within the training length {arguments.train_length}, and one beyond"
        )
    print(
        f"demo: train {', '.join(ENCODINGS)} (model {arguments.model}) on {arguments.data} at "
        f"length {arguments.train_length} for {arguments.steps} steps each, then score them at "
        f"{', '.join(map(str, lengths))} tokens.\n"
        "With the default settings this takes about 10 minutes on two slow CPU cores. Ctrl-C "
        "saves; the same command goes on from there.",
        flush=True,
    )
    began = time.monotonic()
    folders = train.main(
        train.Arguments(
            encoding=ENCODINGS,
            model=arguments.model,
            data=arguments.data,
            train_length=arguments.train_length,
            batch_size=arguments.batch_size,
            steps=arguments.steps,
            learning_rate=3e-3,
            eval_every=max(1, arguments.steps // 4),
            checkpoint_every=max(1, arguments.steps // 4),
            out=arguments.out / "runs",
        )
    )
    rows = evaluate(
        folders,
        lengths,
        arguments.out / "report" / "scores",
        tokens_per_document=arguments.tokens_per_document,
    )
    paths = write_report(rows, arguments.out / "report")
    print_table(rows)
    print(f"what the field would predict, and what came out at {max(lengths)} tokens (one seed):")
    for claim, outcome, seen in expectations(rows, arguments.train_length, max(lengths)):
        print(f"  {'seen' if seen else 'not seen':<9} {claim}: {outcome}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes; files:")
    for path in paths.values():
        print(f"  {path}")
    print(f"figure: {paths['figure.png']}")


if __name__ == "__main__":
    with one_line_errors():
        main(parse(Demo, __doc__))
