"""What a run costs while it goes, and what its encoding learns."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import jaxprs_in_params

from posenc.encodings.sampling import Sampler
from posenc.placing import Placer
from posenc.transformer import Transformer

# Dense bfloat16 operations a second of one device, by JAX's name of it, as its maker states them.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def operations(jaxpr: Any) -> float:
    """Count the operations of a program's matrix products, two for each multiplication.

    Args:
        jaxpr: the program, as ``jax.make_jaxpr`` gives it.

    Raises:
        ValueError: a loop runs until something holds, so that nobody can count it beforehand.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, equation.params
        if name == "dot_general":
            ((contracted, _), _) = given["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            summed = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * summed * math.prod(equation.outvars[0].aval.shape)
            continue
        inner = [operations(part) for part in jaxprs_in_params(given)]
        if name == "while" and any(inner):
            raise ValueError("a loop of unknown length multiplies matrices")
        # Of branches one is taken.
        taken = max(inner) if name == "cond" else sum(inner)
        total += taken * (given["length"] if name == "scan" else 1)
    return total


def flops_a_token(model: Transformer, length: int, sampler: Sampler) -> float:
    """Give the floating-point operations that training takes for a token, forward and backward.

    Three times those of the forward pass's matrix products, the encoding's own among them, on a
    whole window, masked or not; nothing that is computed again. For a model whose encoding
    multiplies no matrices this is ``6 N + 12 L M T``, N the numbers in the matrices of its L layers
    and of its head, and M its width (Chowdhery et al., 2022, appendix B).

    Args:
        model: with or without arrays.
        length: T, of a window.
        sampler: of its positions.
    """
    window = np.zeros((1, length), np.int32)
    places = Placer(model.encoding, sampler).place(window, window + 1, [0], (0,), training=True)
    graph, state = nnx.split(model)

    def forward(state: Any, tokens: Any, positions: Any, streams: Any) -> Any:
        return nnx.merge(graph, state)(tokens, positions, None, streams)

    program = jax.make_jaxpr(forward)(nnx.to_pure_dict(state), window, *places)
    return 3.0 * operations(program.jaxpr) / length


def utilisation(flops_a_second: float) -> float | None:
    """Give the share of what all devices could do; None where that is not known of them."""
    peak = PEAK_FLOPS.get(jax.devices()[0].device_kind)
    return None if peak is None else flops_a_second / (peak * jax.device_count())


def peak_memory() -> int | None:
    """Give the most bytes that a device of this process has held; None where it does not count."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    known = [own["peak_bytes_in_use"] for own in stats if "peak_bytes_in_use" in own]
    return max(known) if known else None


def learned(parameters: dict[str, Any], several: bool = False) -> dict[str, jax.Array]:
    """Give mean and root mean square of every parameter of the encoding.

    Args:
        parameters: of a trained state.
        several: whether each begins with an axis of seeds.

    Returns:
        One number each, or one a seed.
    """
    numbers = {}
    for name, value in parameters.items():
        if not name.startswith("encoding."):
            continue
        every = value.reshape(len(value) if several else 1, -1)
        numbers[f"{name}.mean"] = jnp.mean(every, axis=-1)
        numbers[f"{name}.rms"] = jnp.sqrt(jnp.mean(every**2, axis=-1))
    return numbers
