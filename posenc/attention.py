"""One attention for every encoding: dense, in blocks of query rows, and on a cache.

Let B denote the batch, T the queries, t the rows of one block, S the keys, H the heads, G the
key-value heads, D the head width and M the model width. Attention calls the hooks of its encoding
and knows nothing of positions; who may see whom is decided by slots and segments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import einops
import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from posenc.encodings.base import PositionalEncoding, Side
from posenc.sharing import Apply, shared

# Rows of a block. Long enough for efficient matrix products, short enough that a block's logits
# stay near the cores; `python -m benchmarks.attention --blocks` compares sizes.
BLOCK = 128

# Row blocks are gathered into at most so many groups, each one compiled loop over blocks that see
# the same keys: those up to the group's last row. More groups compute less beyond the causal
# frontier (a share of 1/(2 GROUPS) of the square at the most) and take longer to compile. A group
# has two blocks at least: a loop of one is unrolled, and then the compiler may run all of them
# side by side and hold all their logits.
GROUPS = 8


def visibility(
    queries: Side,
    keys: Side,
    *,
    causal: bool,
    reach: int | None = None,
    sinks: int = 0,
    ranks: Int[Array, "#B S"] | None = None,
) -> Bool[Array, "#B 1 t S"]:
    """Say which keys each query row may see.

    A query sees the keys of its own segment in its own and earlier slots (in every slot, if not
    causal). With ``reach``, only those at most so many slots back, and the first ``sinks`` real
    slots of the segment, told by ``ranks``. Padding (segment 0) neither sees nor is seen.
    """
    rows, columns = queries.slots[:, :, None], keys.slots[:, None, :]
    own = queries.segments[:, :, None] == keys.segments[:, None, :]
    visible = own & (keys.segments[:, None, :] != 0)
    if causal:
        visible &= rows >= columns
    if reach is not None:
        near = rows - columns <= reach
        if not causal:
            near &= columns - rows <= reach
        if sinks and ranks is not None:
            near |= ranks[:, None, :] < sinks
        visible &= near
    return visible[:, None]


def _by_segment(segments: Int[Array, "B S"]) -> tuple[Array, Array, Array]:
    """Sort slots by segment: the order, each slot's place in it, and its segment's first place."""
    order = jnp.argsort(segments, axis=-1, stable=True)
    ordered = jnp.take_along_axis(segments, order, axis=-1)
    begins = jnp.ones_like(ordered, bool).at[:, 1:].set(ordered[:, 1:] != ordered[:, :-1])
    first = jax.lax.cummax(jnp.where(begins, jnp.arange(segments.shape[-1]), 0), axis=1)
    place = jnp.argsort(order, axis=-1)
    return order, place, jnp.take_along_axis(first, place, axis=-1)


def segment_ranks(segments: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Count, for every slot, the earlier slots of its own segment."""
    _, place, first = _by_segment(segments)
    return place - first


def poisoned_rows(
    bad: Bool[Array, "B S"], segments: Int[Array, "B S"], causal: bool
) -> Bool[Array, "B S"]:
    """Say which rows see a bad slot: one of their own segment, up to themselves if causal.

    In linear memory: slots are sorted by segment, and bad ones counted from each segment's start.
    """
    order, place, first = _by_segment(segments)
    counts = jnp.cumsum(jnp.take_along_axis(bad & (segments != 0), order, axis=-1), axis=-1)
    before = jnp.where(first > 0, jnp.take_along_axis(counts, jnp.maximum(first - 1, 0), -1), 0)
    last = place
    if not causal:
        ordered = jnp.take_along_axis(segments, order, axis=-1)
        last = jax.vmap(lambda row, own: jnp.searchsorted(row, own, side="right") - 1)(
            ordered, segments
        )
    return (jnp.take_along_axis(counts, last, axis=-1) > before) & (segments != 0)


# Is shown every attention of a forward pass, before it is computed: encoding, queries, keys, carry.
Watcher = Callable[[PositionalEncoding, Side, Side, Any], None]
_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Within this context, show a watcher every attention, layer by layer, as it is traced."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def attend_rows(
    encoding: PositionalEncoding,
    queries: Side,
    keys: Side,
    values: Float[Array, "B S H D"],
    visible: Bool[Array, "#B 1 t S"],
    carry: Any = None,
) -> tuple[Float[Array, "B t H D"], Any]:
    """Attend from some query rows to some keys: the whole of attention, to be read."""
    scores = encoding.scores(queries, keys, visible)
    logits, carry = encoding.logits(scores, scores, queries, keys, visible, carry)
    weights = encoding.weights(logits, visible)
    return encoding.mix(weights, values, queries, keys), carry


def attend_dense(
    encoding: PositionalEncoding,
    queries: Side,
    keys: Side,
    values: Float[Array, "B S H D"],
    carry: Any = None,
    *,
    causal: bool = True,
) -> tuple[Float[Array, "B T H D"], Any]:
    """Attend from all rows at once, in memory that grows with T times S: the reference."""
    ranks = segment_ranks(keys.segments) if encoding.sinks else None
    visible = visibility(
        queries, keys, causal=causal, reach=encoding.reach, sinks=encoding.sinks, ranks=ranks
    )
    return attend_rows(encoding, queries, keys, values, visible, carry)


def _slots_of(tree: Any, start: Any, size: int) -> Any:
    """Take ``size`` slots of every array of a side or the like, from a static or traced start."""

    def cut(leaf: Array) -> Array:
        if isinstance(start, int):
            return jax.lax.slice_in_dim(leaf, start, start + size, axis=1)
        return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis=1)

    return jax.tree.map(cut, tree)


def _pad_rows(tree: Any, rows: int) -> Any:
    """Append ``rows`` slots to every array; in a side they become padding, segment 0."""
    return jax.tree.map(
        lambda leaf: jnp.pad(leaf, [(0, 0), (0, rows)] + [(0, 0)] * (leaf.ndim - 2)), tree
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Sinks:
    """Where the first slots of every segment are: found once, used by every block.

    Attributes:
        ranks: ``[B, S]``, the earlier slots of each slot's own segment.
        slots: ``[B, S, sinks]``, the first slots of each slot's own segment; S where it has fewer.
    """

    ranks: Any
    slots: Any


def _find_sinks(segments: Int[Array, "B S"], sinks: int) -> _Sinks:
    order, place, first = _by_segment(segments)
    places = first[..., None] + jnp.arange(sinks)
    size = segments.shape[1]
    flat = jnp.minimum(places, size - 1).reshape(len(segments), -1)
    slots = jnp.take_along_axis(order, flat, axis=-1).reshape(places.shape)
    owner = jax.vmap(lambda row, at: row[at])(segments, slots)
    real = (places < size) & (owner == segments[..., None])
    return _Sinks(place - first, jnp.where(real, slots, size))


def _window(
    encoding: PositionalEncoding,
    queries: Side,
    keys: Side,
    values: Array,
    sinks: _Sinks | None,
) -> tuple[Side, Array, Array]:
    """Give the keys that a block of rows can reach, their values and who sees whom.

    These are the slots from ``reach`` before the first row to the last row, and, if the encoding
    has sinks, the first slots of the one segment that began before them and still goes on. (A
    segment is a run of slots, so that there is one at the most.)
    """
    assert encoding.reach is not None
    rows, slots = queries.slots.shape[1], keys.slots.shape[1]
    size = min(slots, encoding.reach + rows)
    start = jnp.clip(queries.slots[0, 0] - encoding.reach, 0, slots - size)
    near, near_values = _slots_of(keys, start, size), _slots_of(values, start, size)
    see = functools.partial(visibility, causal=True, reach=encoding.reach, sinks=encoding.sinks)
    if sinks is None:
        return near, near_values, see(queries, near)
    batch = values.shape[0]
    first = _slots_of(sinks.slots, start, 1)[:, 0]  # of the segment at the window's first slot
    # Those inside the window are there already.
    far_off = first < start
    first = jnp.minimum(first, slots - 1)

    def whole(leaf: Array) -> Array:
        return jnp.broadcast_to(leaf, (batch, *leaf.shape[1:]))

    def gather(leaf: Array) -> Array:
        index = whole(first).reshape(batch, encoding.sinks, *(1,) * (leaf.ndim - 2))
        return jnp.take_along_axis(whole(leaf), index, axis=1)

    far, far_values, far_ranks = jax.tree.map(gather, (keys, values, sinks.ranks))
    visible = [
        see(queries, far, ranks=far_ranks) & far_off[:, None, None, :],
        see(queries, near, ranks=_slots_of(sinks.ranks, start, size)),
    ]
    joined = jax.tree.map(
        lambda a, b: jnp.concatenate([a, whole(b)], axis=1), (far, far_values), (near, near_values)
    )
    return *joined, jnp.concatenate([whole(v) for v in visible], axis=-1)


def attend(
    encoding: PositionalEncoding,
    queries: Side,
    keys: Side,
    values: Float[Array, "B S H D"],
    carry: Any = None,
    *,
    causal: bool = True,
    aligned: bool = False,
    block: int | None = None,
    groups: int | None = None,
) -> tuple[Float[Array, "B T H D"], Any]:
    """Attend a block of query rows at a time, in memory that grows with S and not with its square.

    Each block takes an exact softmax over its whole rows and is computed again in the backward
    pass. What it gives equals ``attend_dense``.

    Args:
        encoding: the encoding of this layer.
        queries: of T rows.
        keys: of S slots; a key's slot is its place in the array.
        values: of the same slots, key-value heads repeated to H.
        carry: what the encoding's ``start_carry`` gave, or the cache kept.
        causal: whether a query sees earlier slots only.
        aligned: whether the queries' slots are known to be the keys' slots (no cache), so that
            keys beyond a group's last row are left out beforehand.
        block: rows of a block; ``BLOCK`` unless told otherwise.
        groups: see ``GROUPS``.

    Returns:
        ``[B, T, H, D]`` and the carry after the last row.
    """
    rows, slots = queries.x.shape[1], keys.x.shape[1]
    windowed = causal and encoding.reach is not None and encoding.reach < slots
    has_sinks = encoding.sinks > 0 and encoding.reach is not None
    sinks = _find_sinks(keys.segments, encoding.sinks) if has_sinks else None
    block = BLOCK if block is None else block

    def attend_block(
        some: Side, keys: Side, values: Array, sinks: _Sinks | None, carry: Any
    ) -> tuple[Array, Any]:
        if windowed:
            keys, values, visible = _window(encoding, some, keys, values, sinks)
        else:
            visible = visibility(
                some,
                keys,
                causal=causal,
                reach=encoding.reach,
                sinks=encoding.sinks,
                ranks=None if sinks is None else sinks.ranks,
            )
        return attend_rows(encoding, some, keys, values, visible, carry)

    if rows <= block:
        return jax.checkpoint(attend_block)(queries, keys, values, sinks, carry)

    count = -(-rows // block)
    block = -(-rows // count)
    queries = _pad_rows(queries, count * block - rows)
    # Padded rows go on counting: a window's start is told by its first row.
    queries = dataclasses.replace(
        queries, slots=queries.slots[:, :1] + jnp.arange(count * block, dtype=jnp.int32)[None]
    )
    cuts = causal and aligned and not windowed
    groups = min(max(count // 2, 1), (GROUPS if groups is None else groups) if cuts else 1)
    borders = [count * g // groups for g in range(groups + 1)]
    mixed = []
    for first, last in itertools.pairwise(borders):
        seen = min(last * block, slots) if cuts else slots
        some_keys, some_values = _slots_of(keys, 0, seen), _slots_of(values, 0, seen)
        some_sinks = None if sinks is None else _slots_of(sinks, 0, seen)

        def step(carry, index, keys=some_keys, values=some_values, sinks=some_sinks):
            some = _slots_of(queries, index * block, block)
            out, carry = attend_block(some, keys, values, sinks, carry)
            return carry, out

        # Inside a scan nothing can be shared with the forward pass by accident.
        step = jax.checkpoint(step, prevent_cse=False)
        carry, out = jax.lax.scan(step, carry, jnp.arange(first, last))
        mixed.append(jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:]))
    return jnp.concatenate(mixed, axis=1)[:, :rows], carry


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer keeps of the tokens so far; the keys as projected, before any encoding.

    Attributes:
        keys: ``[B, S, G, D]``, after QK-norm.
        values: ``[B, S, G, D]``.
        features: what the encoding's ``features`` gave, leaves ``[B, S, ...]``, or None.
        state: the state that ``features`` goes on from, or None.
        carry: the encoding's carry, or None.
    """

    keys: Any
    values: Any
    features: Any = None
    state: Any = None
    carry: Any = None


def write_slots(kept: Array, new: Array, start: Array | int) -> Array:
    """Write ``new`` into slots ``start ...`` of ``kept``, both with the slots on axis 1."""
    new = jnp.broadcast_to(new, (kept.shape[0], *new.shape[1:])).astype(kept.dtype)
    return jax.lax.dynamic_update_slice_in_dim(kept, new, start, axis=1)


class Attention(nnx.Module):
    """Multi-head attention whose only knowledge of position is the encoding it is called with.

    Args:
        width: M.
        heads: H.
        kv_heads: G, a divisor of H.
        head_width: D.
        bias: whether the projections have biases.
        qk_norm: whether queries and keys are normalised (RMSNorm over D) before the encoding.
        norm_eps: of that norm.
        init_std: of the projections.
        out_std: of the output projection.
        dtype: of activations.
        rngs: where the parameters come from.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int,
        head_width: int,
        bias: bool,
        qk_norm: bool,
        norm_eps: float,
        init_std: float,
        out_std: float,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        def project(inputs: int, outputs: int, std: float) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=bias,
                kernel_init=nnx.initializers.normal(std),
                dtype=dtype,
                rngs=rngs,
            )

        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.query = project(width, heads * head_width, init_std)
        self.key = project(width, kv_heads * head_width, init_std)
        self.value = project(width, kv_heads * head_width, init_std)
        self.out = project(heads * head_width, width, out_std)
        norm = {"epsilon": norm_eps, "dtype": dtype, "rngs": rngs}
        self.query_norm = nnx.RMSNorm(head_width, **norm) if qk_norm else None
        self.key_norm = nnx.RMSNorm(head_width, **norm) if qk_norm else None

    def __call__(
        self,
        x: Float[Array, "B T M"],
        encoding: PositionalEncoding,
        queries: Side,
        keys: Side,
        cache: LayerCache | None = None,
        start: Int[Array, ""] | int = 0,
        *,
        causal: bool = True,
        dense: bool = False,
        apply: Apply = shared,
    ) -> tuple[Float[Array, "B T M"], LayerCache | None]:
        """Attend from ``x`` to itself, or, with a cache, to all that the cache holds and itself.

        Args:
            x: the layer's normed input.
            encoding: the encoding of this layer.
            queries: positions, streams, slots, segments and prepared of the tokens of ``x``; the
                rest is filled in here.
            keys: likewise of all S slots (the same as ``queries`` without a cache).
            cache: this layer's, which is given back with the new tokens written.
            start: the slot of the first token of ``x``, with a cache.
            causal: whether a query sees earlier slots only.
            dense: take the dense path.
            apply: how projections and norms are applied to the tokens.
        """
        batch, length, _ = x.shape
        q, k, v = (
            einops.rearrange(apply(project, x), "b t (h d) -> b t h d", d=self.head_width)
            for project in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = apply(self.query_norm, q), apply(self.key_norm, k)

        state = encoding.start_state(batch) if cache is None else cache.state
        own, state = encoding.features(x, queries.positions, queries.segments, state)
        features = own
        if cache is None:
            carry = encoding.start_carry(batch, length)
        else:
            k, v = write_slots(cache.keys, k, start), write_slots(cache.values, v, start)
            features = jax.tree.map(
                lambda old, new: write_slots(old, new, start), cache.features, own
            )
            carry = cache.carry
        kept = (k, v)

        if self.kv_heads < self.heads:
            repeats = self.heads // self.kv_heads
            k, v = (einops.repeat(x, "b s g d -> b s (g r) d", r=repeats) for x in (k, v))
        queries = dataclasses.replace(queries, x=q, features=own)
        queries = dataclasses.replace(queries, rotated=encoding.rotate_queries(queries))
        keys = dataclasses.replace(keys, x=k, features=features)
        keys = dataclasses.replace(keys, rotated=encoding.rotate_keys(keys))
        if (watcher := _WATCHER.get()) is not None:
            watcher(encoding, queries, keys, carry)
        if dense:
            mixed, carry = attend_dense(encoding, queries, keys, v, carry, causal=causal)
        else:
            mixed, carry = attend(
                encoding, queries, keys, v, carry, causal=causal, aligned=cache is None
            )
        out = apply(self.out, einops.rearrange(mixed, "b t h d -> b t (h d)"))
        if cache is None:
            return out, None
        return out, LayerCache(*kept, features, state, carry)
