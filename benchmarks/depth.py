"""A gradient compiled with and without --scan, by depth: processor time, and memory when it runs.

    python -m benchmarks.depth

Nothing is run: memory is the compiler's own account of what a program needs beside its arguments
and results. Seconds are of the processor, from the model to its program, and the ratio is that of
the two in turn; JAX's cache of compiled programs is not used.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from posenc.errors import one_line_errors
from posenc.training import mean_nll, pieces
from posenc.transformer import Transformer, preset


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Compile the gradient of a model's loss."""

    encoding: str = "rope"
    """A spec."""
    model: str = "tiny"
    """A preset, but for its depth."""
    layers: tuple[int, ...] = (4, 16, 48)
    remat: tuple[str, ...] = ("none", "full")
    length: int = 256
    batch: int = 8


def compiled(settings: Benchmark, layers: int, remat: str, scan: bool) -> tuple[float, int]:
    """Give the seconds that tracing and compiling take, and the program's temporary bytes."""
    shape = dataclasses.replace(preset(settings.model), layers=layers, remat=remat, scan=scan)
    like = nnx.eval_shape(lambda: Transformer(shape, settings.encoding, settings.length))
    merge, parameters, constants = pieces(like)
    places = (settings.batch, settings.length)
    batch = {
        name: jax.ShapeDtypeStruct(places, kind)
        for name, kind in [
            *((name, jnp.int32) for name in ("inputs", "targets", "positions", "segments")),
            ("mask", jnp.bool_),
        ]
    }
    began = time.process_time()
    gradient = jax.jit(jax.grad(lambda own, fixed, batch: mean_nll(merge(own, fixed), batch)))
    program = gradient.lower(parameters, constants, batch).compile()
    return time.process_time() - began, program.memory_analysis().temp_size_in_bytes


def main(settings: Benchmark) -> None:
    """Print a table."""
    device = jax.devices()[0]
    print(f"{settings.encoding}, {settings.model}, {settings.batch} x {settings.length} tokens")
    print(f"{device.device_kind} ({device.platform}), jax {jax.__version__}\n")
    print("| layers | remat | s | s, scan | ratio | MiB | MiB, scan |")
    print("|---|---|---|---|---|---|---|")
    compiled(settings, 1, "none", False)  # what only the first program pays for
    for layers in settings.layers:
        for remat in settings.remat:
            (plain, bytes_), (looped, looped_bytes) = (
                compiled(settings, layers, remat, scan) for scan in (False, True)
            )
            print(
                f"| {layers} | {remat} | {plain:.1f} | {looped:.1f} | {plain / looped:.1f} "
                f"| {bytes_ / 2**20:.0f} | {looped_bytes / 2**20:.0f} |"
            )


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Benchmark, description=__doc__))
