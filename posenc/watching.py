"""What a run costs while it goes, and what its encoding learns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from posenc.transformer import TransformerConfig

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


def flops_a_token(config: TransformerConfig, parameters: int, length: int) -> float:
    """Give the floating-point operations that training takes for a token, forward and backward.

    ``6 N + 12 L M T``, N the parameters that are multiplied by (Chowdhery et al., 2022, appendix
    B): the whole window is counted, masked or not, and nothing that is computed again.

    Args:
        config: the model's shape, of L layers and width M.
        parameters: of the model.
        length: T, of a window.
    """
    # A tied table is multiplied by as the head; another one is looked up in.
    looked_up = 0 if config.tied_head else config.vocab_size * config.width
    return 6.0 * (parameters - looked_up) + 12.0 * config.layers * config.width * length


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
