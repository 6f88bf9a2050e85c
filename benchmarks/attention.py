"""Attention in blocks of query rows against the dense path: time and memory, in one run.

    python -m benchmarks.attention              the table
    python -m benchmarks.attention --blocks     time by block size, relative to the usual one

The two are timed in turn, so that a machine whose speed drifts slows both; quoted are medians of
the ratios pair by pair, and the compiler's own account of temporary memory.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from posenc import attention
from posenc.encodings import Dimensions, Side, build
from posenc.errors import one_line_errors


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Compare attention in blocks with the dense path."""

    encoding: str = "alibi"
    """A spec."""
    heads: int = 8
    head_width: int = 32
    batch: int = 1
    forward: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Lengths of the forward pass."""
    backward: tuple[int, ...] = (256, 1024, 4096)
    """Lengths of forward and backward."""
    repeats: int = 5
    """Pairs of runs; lengths over 2,048 take 3."""
    blocks: bool = False
    """Compare block sizes instead, at each length."""


def attend_with(how: Callable[..., Any], spec: str, shape: tuple[int, ...], **options: Any):
    """Give a function of queries, keys and values that attends by one of the paths."""
    batch, length, heads, width = shape
    dims = Dimensions(heads * width, heads, width, length)
    encoding = build(spec, 1, dims, jax.random.key(0)).at(0)

    def run(q, k, v):
        slots = jnp.arange(length, dtype=jnp.int32)[None]
        shared = {
            "positions": slots,
            "streams": {},
            "slots": slots,
            "segments": jnp.ones((1, length), jnp.int32),
            "prepared": encoding.prepare(slots, {}),
        }
        queries, keys = (Side(x=x, rotated=x, **shared) for x in (q, k))
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        carry = encoding.start_carry(batch, length)
        return how(encoding, queries, keys, v, carry, **options)[0]

    return run


def compiled(run: Callable, shape: tuple[int, ...], gradient: bool):
    """Compile a path, with or without its gradient, and give its temporary bytes too."""
    function = run
    if gradient:
        function = jax.grad(lambda *a: jnp.sum(run(*a) ** 2), argnums=(0, 1, 2))
    one = jax.ShapeDtypeStruct(shape, jnp.float32)
    program = jax.jit(function).lower(one, one, one).compile()
    return program, program.memory_analysis().temp_size_in_bytes


def seconds(program: Callable, arguments: tuple) -> float:
    """Time one run."""
    began = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - began


def compare(settings: Benchmark, length: int, gradient: bool) -> str:
    """Give one row of the table."""
    shape = (settings.batch, length, settings.heads, settings.head_width)
    arguments = tuple(jax.random.normal(jax.random.key(1), (3, *shape)))
    dense, dense_bytes = compiled(
        attend_with(attention.attend_dense, settings.encoding, shape), shape, gradient
    )
    blocks, block_bytes = compiled(
        attend_with(attention.attend, settings.encoding, shape, aligned=True), shape, gradient
    )
    for program in (dense, blocks):
        seconds(program, arguments)
    pairs = 3 if length > 2048 else settings.repeats
    ratios = [seconds(dense, arguments) / seconds(blocks, arguments) for _ in range(pairs)]
    return (
        f"| {length} | {'forward and backward' if gradient else 'forward'} "
        f"| {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f}) "
        f"| {dense_bytes / 2**20:,.1f} | {block_bytes / 2**20:,.1f} "
        f"| {dense_bytes / block_bytes:.1f} |"
    )


def sweep(settings: Benchmark, length: int) -> str:
    """Give the time of several block sizes at one length, relative to the default one."""
    shape = (settings.batch, length, settings.heads, settings.head_width)
    arguments = tuple(jax.random.normal(jax.random.key(1), (3, *shape)))
    sizes = [size for size in (32, 64, 128, 256, 512) if size <= length]
    programs = {
        size: compiled(
            attend_with(attention.attend, settings.encoding, shape, aligned=True, block=size),
            shape,
            gradient=False,
        )[0]
        for size in sizes
    }
    for program in programs.values():
        seconds(program, arguments)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(settings.repeats):
        for size in sizes:
            times[size].append(seconds(programs[size], arguments))
    median = {size: statistics.median(times[size]) for size in sizes}
    usual = median[min(attention.BLOCK, length)]
    cells = " | ".join(f"{median[size] / usual:.2f}" for size in sizes)
    return f"| {length} | {cells} |" + "  |" * (5 - len(sizes))


def main(settings: Benchmark) -> None:
    """Print a Markdown table."""
    device = jax.devices()[0]
    print(
        f"{settings.encoding}, {settings.heads} heads of {settings.head_width}, batch "
        f"{settings.batch}, float32, {device.device_kind}, jax {jax.__version__}\n"
    )
    if settings.blocks:
        print(f"time relative to blocks of {attention.BLOCK}\n")
        print("| tokens | 32 | 64 | 128 | 256 | 512 |\n| ---: | ---: | ---: | ---: | ---: | ---: |")
        for length in settings.forward:
            print(sweep(settings, length), flush=True)
        return
    print("| tokens | pass | dense time / blocks time | dense MiB | blocks MiB | ratio |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for lengths, gradient in ((settings.forward, False), (settings.backward, True)):
        for length in lengths:
            print(compare(settings, length, gradient), flush=True)


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Benchmark, description=__doc__))
