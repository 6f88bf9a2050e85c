"""Who shares the weights of a block: all positions, groups of consecutive ones, or none.

A transformer uses the same weights at every position. Here is the counterfactual, built from the
ordinary block: each of its parts that act on one token at a time (norms, projections, MLP) holds
several copies of its weights, and is mapped over the tokens of each copy. Attention stays whole.

Let B denote the batch, T the tokens of a call, N = B T, C the copies and M the model width. This is
the one module outside the encodings that reads positions, and unless sharing is ``all`` the blocks
end, as a table of positions does, where the training length ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Num

from posenc.encodings.base import EncodingError
from posenc.encodings.registry import Part, nearest, parse_part
from posenc.errors import UserError

# How a part that acts on one token at a time is applied to the tokens of a call.
Apply = Callable[[Callable[[Array], Array], Array], Array]

FORMS = {"all": "all", "none": "none", "groups": "groups(copies=8)"}


def _parse(text: str) -> Part:
    try:
        part = parse_part(text)
    except EncodingError:
        forms = ", ".join(FORMS.values())
        raise UserError(f"--sharing {text!r} cannot be read: the forms are {forms}") from None
    if part.name not in FORMS:
        raise UserError(f"unknown sharing {text!r}: {nearest(part.name, FORMS)}")
    form = FORMS[part.name]
    wanted = {"copies"} if part.name == "groups" else set()
    if dict(part.options).keys() != wanted:
        raise UserError(f"--sharing {text} cannot be read: the form is {form}")
    return part


def copies_of(text: str, length: int) -> int:
    """Give the number of copies that a way of sharing makes of every block.

    Args:
        text: ``all`` (1 copy), ``none`` (a copy for each position), or ``groups(copies=8)``, each
            copy being used by as many consecutive positions.
        length: positions that the blocks are built for.

    Raises:
        UserError: an unknown way of sharing, or copies that do not divide the positions.
    """
    part = _parse(text)
    if part.name != "groups":
        return 1 if part.name == "all" else length
    copies = dict(part.options)["copies"]
    if not isinstance(copies, int) or isinstance(copies, bool) or copies < 1 or length % copies:
        near = [c for c in range(1, length + 1) if length % c == 0]
        if isinstance(copies, int):
            near = sorted(sorted(near, key=lambda c: abs(c - copies))[:3])
        raise UserError(
            f"--sharing {text}: {length} positions cannot be shared out among {copies} copies "
            f"evenly: take {', '.join(map(str, near[:3]))}"
        )
    return copies


def canonical_sharing(text: str, length: int) -> str:
    """Give the one spelling of a way of sharing: one copy is ``all``, one for each is ``none``."""
    copies = copies_of(text, length)
    if copies == 1:
        return "all"
    return "none" if copies == length else f"groups(copies={copies})"


def shared(part: Callable[[Array], Array], x: Array) -> Array:
    """Apply a part to all tokens alike: what a transformer does."""
    return part(x)


def unshare(module: Any, copies: int) -> Any:
    """Give a module with ``copies`` equal copies of its weights, on a leading axis.

    Equal: before the first step, the model computes what the one that shares computes.
    """
    graph, weights = nnx.split(module)
    return nnx.merge(
        graph, jax.tree.map(lambda w: jnp.broadcast_to(w, (copies, *w.shape)), weights)
    )


@dataclasses.dataclass(frozen=True)
class Unshared:
    """Applies parts that hold copies of their weights: each token meets the copy of its position.

    Tokens are gathered by copy into chunks of one size, padded with zeros, and the part is mapped
    over the chunks. So any positions will do (packed, padded, cached), and no token is computed
    with a weight that is not its own; with T positions in order, half of the chunks stay empty.

    Attributes:
        owner: ``[K]``, the copy that each chunk meets; K is at most 2 C.
        place: ``[N]``, where each token stands among the K chunks of equal size.
        size: tokens of a chunk.
    """

    owner: Array
    place: Array
    size: int

    @classmethod
    def at(cls, positions: Num[Array, "B T"], copies: int, length: int) -> Unshared:
        """Gather the tokens of a call by copy.

        Args:
            positions: of the tokens; one outside 0 .. length - 1 meets the nearest copy, and its
                output has to be discarded.
            copies: C.
            length: positions that the copies are shared out among.
        """
        per_copy = length // copies
        whole = jnp.clip(positions, 0, length - 1).astype(jnp.int32)
        copy = (whole // per_copy).reshape(-1)
        tokens = copy.size
        size = -(-tokens // copies)
        # Each copy fills whole chunks, and wastes less than one.
        chunks = min(tokens, tokens // size + copies)
        counts = jnp.bincount(copy, length=copies)
        filled = -(-counts // size)
        owner = jnp.repeat(jnp.arange(copies), filled, total_repeat_length=chunks)
        order = jnp.argsort(copy, stable=True)
        rank = jnp.argsort(order) - (jnp.cumsum(counts) - counts)[copy]
        return cls(owner, (jnp.cumsum(filled) - filled)[copy] * size + rank, size)

    def __call__(self, part: Any, x: Float[Array, "B T *rest"]) -> Float[Array, "B T *out"]:
        """Apply a part, whose weights have a leading axis of C copies, to every token of ``x``."""
        graph, weights = nnx.split(part)
        chunks, rest = len(self.owner), x.shape[2:]
        gathered = jnp.zeros((chunks * self.size, *rest), x.dtype)
        gathered = gathered.at[self.place].set(x.reshape(-1, *rest), unique_indices=True)
        applied = jax.vmap(lambda own, some: nnx.merge(graph, own)(some))(
            jax.tree.map(lambda w: w[self.owner], weights),
            gathered.reshape(chunks, 1, self.size, *rest),
        )
        out = applied.shape[3:]
        return applied.reshape(-1, *out)[self.place].reshape(*x.shape[:2], *out)
