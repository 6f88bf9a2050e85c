"""What each encoding costs in training: time and memory of a step beside no encoding, in one run.

    python -m benchmarks.encodings --out docs/encodings/benchmark.md        (15 minutes)

An encoding's step and that of no encoding are timed in turn, so that a machine whose speed drifts
slows both; quoted are medians of the ratios pair by pair, and the compiler's own account of
temporary memory.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from posenc.encodings.registry import examples
from posenc.errors import make_folder, one_line_errors
from posenc.optimizer import OptimizerConfig
from posenc.placing import Placer
from posenc.training import Trainer
from posenc.transformer import Transformer, preset


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Time train steps of every registered encoding, each in turn with one of no encoding."""

    model: str = "mini"
    """A preset."""
    lengths: tuple[int, ...] = (256, 1024)
    """Tokens of a window."""
    tokens: int = 2048
    """Tokens of a batch."""
    encodings: tuple[str, ...] = ()
    """Specs; one of every registered encoding unless told otherwise."""
    repeats: int = 5
    """Pairs of steps."""
    out: Path | None = None
    """Where the table goes, beside the screen."""


class Step:
    """A compiled train step of one encoding, on one batch."""

    def __init__(self, spec: str, arguments: Benchmark, length: int):
        config = preset(arguments.model)
        model = Transformer(config, spec, length)
        trainer = Trainer(model, OptimizerConfig(), 1000, 0)
        rows = max(1, arguments.tokens // length)
        random = np.random.default_rng(0)
        tokens = random.integers(0, 256, (rows, length + 1)).astype(np.int32)
        ones = np.ones((rows, length), np.int32)
        positions, streams = Placer(model.encoding).place(
            tokens[:, :-1], ones, range(rows), (0,), training=True
        )
        self.batch: dict[str, Any] = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "positions": positions,
            "segments": ones,
            "mask": ones.astype(bool),
            **({"streams": streams} if streams else {}),
        }
        self.trainer, self.state = trainer, trainer.start()
        lowered = trainer._step.lower(self.state, jax.tree.map(np.asarray, self.batch))
        analysis = lowered.compile().memory_analysis()
        self.memory = analysis.temp_size_in_bytes
        self.seconds()  # compiled and warm

    def seconds(self) -> float:
        """Take one step, and say how long it took."""
        begin = time.perf_counter()
        self.state, values = self.trainer.step(self.state, self.batch)
        jax.block_until_ready((self.state, values))
        return time.perf_counter() - begin


def main(arguments: Benchmark) -> None:
    """Print the table, and write it where it is asked for."""
    specs = arguments.encodings or tuple(s for s in examples().values() if s != "nope")
    head = ["encoding"]
    for length in arguments.lengths:
        head += [f"time, T = {length:,}", f"memory, T = {length:,}"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    print("\n".join(lines), flush=True)
    plain = {length: Step("nope", arguments, length) for length in arguments.lengths}
    for spec in specs:
        cells = [f"`{spec}`"]
        for length in arguments.lengths:
            step = Step(spec, arguments, length)
            pairs = [(step.seconds(), plain[length].seconds()) for _ in range(arguments.repeats)]
            ratio = statistics.median(own / other for own, other in pairs)
            cells += [f"{ratio:.2f}", f"{step.memory / plain[length].memory:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    if arguments.out is not None:
        make_folder(arguments.out.parent)
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Benchmark, description=__doc__))
