"""How devices share the work, and how arrays lie on them.

Let N denote the seeds that are trained at once, B the windows of a batch.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from posenc.errors import UserError

# Of smaller arrays every device holds a copy: to gather them costs more than they take.
LEAST_SHARDED = 1024


def mesh_of(fsdp: int = 1, seeds: int = 1) -> Mesh:
    """Arrange all devices along the axes ``seeds``, ``data`` and ``fsdp``.

    Args:
        fsdp: how many devices share one copy of parameters and optimiser state.
        seeds: N; as far as the other devices can be divided by it, seeds have devices of their own.

    Raises:
        UserError: ``fsdp`` does not divide the number of devices.
    """
    devices = jax.device_count()
    if fsdp < 1 or devices % fsdp:
        divisors = [n for n in range(1, devices + 1) if devices % n == 0]
        raise UserError(
            f"--fsdp {fsdp} does not divide the {devices} device(s): give one of "
            f"{', '.join(map(str, divisors))}"
        )
    rest = devices // fsdp
    # A process reads rows of its own, of all seeds.
    apart = math.gcd(seeds, rest) if jax.process_count() == 1 else 1
    return jax.make_mesh(
        (apart, rest // apart, fsdp), ("seeds", "data", "fsdp"), axis_types=(AxisType.Auto,) * 3
    )


def check_batch_size(batch_size: int, fsdp: int = 1, seeds: int = 1, accumulate: int = 1) -> None:
    """Raise ``UserError`` if the devices cannot share a batch, or each part of it, evenly."""
    mesh = mesh_of(fsdp, seeds)
    shares = mesh.shape["data"] * mesh.shape["fsdp"] * accumulate
    if accumulate < 1:
        raise UserError(f"--accumulate is {accumulate}: it must be at least 1")
    if batch_size % shares:
        parts = f" in {accumulate} parts" if accumulate > 1 else ""
        raise UserError(
            f"--batch-size {batch_size} cannot be shared by {shares // accumulate} devices{parts}: "
            f"make it a multiple of {shares}"
        )


def batch_sharding(mesh: Mesh, several: bool) -> NamedSharding:
    """Say how a batch lies, ``[B, ...]``, or ``[N, B, ...]`` of several seeds: by row."""
    rows = ("data", "fsdp")
    return NamedSharding(mesh, PartitionSpec("seeds", rows) if several else PartitionSpec(rows))


def sharding_of(shape: tuple[int, ...], mesh: Mesh, several: bool) -> NamedSharding:
    """Say how a parameter, or a moment of it, lies: its longest axis that divides, on ``fsdp``.

    Args:
        shape: of the array, beginning with N where there are several seeds.
        mesh: of all devices.
        several: whether it does.
    """
    own = shape[1:] if several else shape
    share = mesh.shape["fsdp"]
    spec: list[Any] = [None] * len(own)
    whole = [axis for axis, size in enumerate(own) if size % share == 0]
    if share > 1 and whole and math.prod(own) >= LEAST_SHARDED:
        spec[max(whole, key=lambda axis: own[axis])] = "fsdp"
    return NamedSharding(mesh, PartitionSpec(*(["seeds"] if several else []), *spec))
