"""How each position teaches a shared matrix: its share in the matrix's gradient, on real text.

A matrix W that every position uses, ``y_t = x_t W``, has the gradient ``sum_t g_t``, where
``g_t = x_t^T d_t`` is what position t adds and ``d_t`` the gradient of the loss by ``y_t``. Norms
and cosines of all T matrices follow from the inputs and the ``d_t`` alone:
``<g_s, g_t> = (x_s . x_t) (d_s . d_t)``, so that no g is ever made.

Let T denote the tokens of a sequence, I and O the widths of a matrix.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from posenc.errors import UserError
from posenc.training import token_nll
from posenc.transformer import Transformer


class Tap(nnx.Variable):
    """Zeros added to what a matrix gives, so that its gradient can be asked for."""


class Seen(nnx.Variable):
    """What went into a matrix."""


class Tapped(nnx.Module):
    """A linear layer that keeps its input and adds a tap to its output."""

    def __init__(self, linear: nnx.Linear, tokens: int):
        self.linear = linear
        self.tap = Tap(jnp.zeros((1, tokens, linear.out_features)))
        self.seen = Seen(jnp.zeros((1, tokens, linear.in_features)))

    def __call__(self, x: Float[Array, "1 T I"]) -> Float[Array, "1 T O"]:
        """Apply the layer."""
        self.seen[...] = x.astype(jnp.float32)
        y = self.linear(x)
        return y + self.tap[...].astype(y.dtype)


def tapped(model: Transformer, tokens: int) -> Transformer:
    """Give a copy of a model whose blocks' linear layers are tapped, for one sequence."""
    copy = nnx.clone(model)
    # What a layer keeps can be written by the plain pass alone.
    copy.config = dataclasses.replace(model.config, remat="none", scan=False)
    for block in copy.blocks:
        for owner in (block.attention, block.mlp):
            for name, part in list(vars(owner).items()):
                if isinstance(part, nnx.Linear):
                    setattr(owner, name, Tapped(part, tokens))
    return copy


def gram_of(seen: Float[Array, "T I"], back: Float[Array, "T O"]) -> Float[Array, "T T"]:
    """Give ``<g_s, g_t>`` for all pairs of positions."""
    return (seen @ seen.T) * (back @ back.T)


def position_gradients(model: Transformer, tokens: np.ndarray) -> dict[str, Any]:
    """Measure what each position of some sequences adds to the gradient of every shared matrix.

    Args:
        model: whose blocks' weights all positions share.
        tokens: ``[N, T + 1]``, token ids of N sequences; the loss is the mean over the T targets.

    Returns:
        By the name of each matrix, means over the sequences: ``norm`` ``[T]``, of ``g_t``;
        ``share`` ``[T]``, of ``<g_t, g> / <g, g>``, which sums to 1; ``cosine`` ``[T, T]``, between
        positions (0 where one adds nothing); ``gain``, the squared norm of the whole gradient over
        the sum of the squared norms of its parts: 1 if positions taught unrelated things, T if all
        taught the same; and ``contributions``, the fewest positions of a sequence that added more
        than rounding.

    Raises:
        UserError: not all positions share the blocks' weights, or there is no sequence.
    """
    if model.copies > 1:
        raise UserError(
            f"sharing is {model.config.sharing!r}: no matrix is shared by all positions, so that "
            "there is no gradient to share out; audit a run of --sharing all"
        )
    if tokens.ndim != 2 or not len(tokens) or tokens.shape[1] < 3:
        raise UserError(
            f"sequences of shape {list(tokens.shape)}: gradients are compared between positions; "
            "give at least one sequence of two inputs and a target after each"
        )
    length = tokens.shape[1] - 1
    positions = np.arange(length, dtype=np.int32)[None]
    model.check_positions(positions)
    graph, *states = nnx.split(tapped(model, length), Tap, Seen, ...)
    taps, seen, rest = states

    @jax.jit
    def grams(row: Array) -> dict[str, Array]:
        def loss(taps: Any) -> tuple[Array, Any]:
            some = nnx.merge(graph, taps, seen, rest, copy=True)
            hidden, _ = some.hidden(row[None, :-1], jnp.asarray(positions))
            kept = nnx.state(some, Seen)
            return jnp.mean(token_nll(some, hidden, row[None, 1:])), kept

        back, kept = jax.grad(loss, has_aux=True)(taps)
        inputs = {path[:-1]: leaf.get_value() for path, leaf in nnx.to_flat_state(kept)}
        return {
            ".".join(map(str, path[:-1])): gram_of(inputs[path[:-1]][0], leaf.get_value()[0])
            for path, leaf in nnx.to_flat_state(back)
        }

    sums: dict[str, dict[str, Any]] = {}
    for row in tokens:
        for name, gram in grams(jnp.asarray(row)).items():
            own = _reduce(np.asarray(gram, np.float64))
            before = sums.setdefault(name, dict.fromkeys(own, 0) | {"contributions": length})
            fewest = min(before["contributions"], own["contributions"])
            sums[name] = {key: before[key] + own[key] for key in own} | {"contributions": fewest}
    means = {"norm", "share", "cosine", "gain"}
    return {
        name: {key: v / len(tokens) if key in means else v for key, v in own.items()}
        for name, own in sums.items()
    }


def _reduce(gram: np.ndarray) -> dict[str, Any]:
    norm = np.sqrt(np.maximum(np.diagonal(gram), 0))
    # The first query sees one key, and its softmax has no gradient: what is left is rounding.
    adds = norm > 2.0**-20 * norm.max()
    scale = np.where(adds, norm, np.inf)
    whole = gram.sum()
    return {
        "norm": norm,
        "share": gram.sum(axis=1) / whole,
        "cosine": gram / scale[:, None] / scale[None, :],
        "gain": whole / np.sum(norm**2),
        "contributions": int(np.count_nonzero(adds)),
    }
