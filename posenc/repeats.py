"""The repeats of a pattern of layers, run as one loop: the compiler meets every layer of it once.

Parameters stay where they are, an array a layer. What differs between the repeats is stacked within
the computation, which keeps names, checkpoints and the optimiser what they are, and costs a copy of
the repeated layers' weights.

Let R denote the repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

# What belongs to one layer: its block and its encoding.
Modules = tuple[nnx.Module, ...]


@dataclasses.dataclass(frozen=True)
class Repeats:
    """Where a pattern of layers repeats.

    Attributes:
        first: the first layer of the first repeat.
        period: layers of the pattern.
        count: R, at least 2.
    """

    first: int
    period: int
    count: int

    def __contains__(self, layer: int) -> bool:
        """Say whether a layer is in one of the repeats."""
        return self.first <= layer < self.first + self.period * self.count

    def layers(self, offset: int) -> range:
        """Give the layers at one place of the pattern, one of each repeat."""
        start = self.first + offset
        return range(start, start + self.period * self.count, self.period)


def _static(modules: Modules) -> tuple[Any, Any, list[Any]]:
    """Give all that a program for some modules depends on, without the values of their arrays."""
    graph, state = nnx.split(modules)
    leaves, tree = jax.tree.flatten(state)
    return graph, tree, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # of what cannot say whether it is equal
        return False


def find_repeats(layers: Sequence[Modules]) -> Repeats | None:
    """Find the pattern whose repeats leave the fewest layers to be compiled.

    Layers are alike where their modules' classes, static attributes and the shapes and types of
    their arrays are equal. Of several such patterns it is the shortest, and the first.

    Args:
        layers: what belongs to each layer of a model, in order.

    Returns:
        The repeats, or None where no layers in a row are like those before them.
    """
    every = [_static(modules) for modules in layers]
    known: list[Any] = []
    kinds = []
    for one in every:
        kind = next((index for index, other in enumerate(known) if _equal(one, other)), len(known))
        if kind == len(known):
            known.append(one)
        kinds.append(kind)

    best, most = None, 0
    for period in range(1, len(kinds) // 2 + 1):
        alike = 0  # layers in a row, from this one, like those a period later
        found, saved = None, most
        for layer in reversed(range(len(kinds) - period)):
            alike = alike + 1 if kinds[layer] == kinds[layer + period] else 0
            own = alike // period * period
            if own > most and own >= saved:
                found, saved = Repeats(layer, period, own // period + 1), own
        if found is not None:
            best, most = found, saved
    return best


def scan_repeats(
    run: Callable[[Any, Array, list[Modules]], Any], x: Any, repeats: Sequence[Sequence[Modules]]
) -> Any:
    """Pass ``x`` through all repeats in one ``jax.lax.scan``.

    Args:
        run: passes ``x`` through one repeat, given its number and its layers' modules; it may read
            their arrays and must not write them.
        x: what the first repeat gets; its type stays the same.
        repeats: the layers' modules of each repeat, alike in all that is static.
    """
    parts = [[nnx.split(modules) for modules in layers] for layers in repeats]
    graphs = [graph for graph, _ in parts[0]]
    flat = [jax.tree.flatten([state for _, state in layers]) for layers in parts]
    tree = flat[0][1]
    columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
    # What all repeats share is one array, and its gradient one sum.
    own = [any(leaf is not column[0] for leaf in column) for column in columns]
    stacked = [jnp.stack(column) for column, differs in zip(columns, own, strict=True) if differs]

    def step(x: Any, now: tuple[Array, list[Array]]) -> tuple[Any, None]:
        number, mine = now
        rest = iter(mine)
        pairs = zip(columns, own, strict=True)
        states = jax.tree.unflatten(tree, [next(rest) if d else column[0] for column, d in pairs])
        made = [nnx.merge(graph, state) for graph, state in zip(graphs, states, strict=True)]
        return run(x, number, made), None

    return jax.lax.scan(step, x, (jnp.arange(len(repeats)), stacked))[0]
