"""The decoder-only transformer: its config, its presets and its forward pass.

Let B denote the batch, T the tokens of a call, S the slots of a cache, M the model width and V the
vocabulary. Nothing here knows about position: positions are an argument, and the encodings act on
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Num

from posenc.attention import Attention, LayerCache, poisoned_rows, write_slots
from posenc.encodings.base import Dimensions, PositionalEncoding, PositionOutOfRange, Side
from posenc.encodings.registry import build, nearest
from posenc.encodings.sampling import LAYER_POSITIONS
from posenc.errors import UserError
from posenc.repeats import Repeats, find_repeats, scan_repeats
from posenc.sharing import Apply, Unshared, copies_of, shared, unshare

Tensor = Array | np.ndarray


DType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """A transformer's shape; the defaults are the modern ones.

    Attributes:
        vocab_size: V.
        layers: depth.
        width: M.
        heads: query heads; ``width`` must be divisible by them.
        kv_heads: key-value heads, a divisor of ``heads``; 0 is as many as ``heads``.
        mlp_width: inner width; 0 is ``4 M``, or for SwiGLU ``8 M / 3`` rounded up to a multiple
            of 8, which has as many parameters.
        norm: ``rms`` or ``layer`` (with biases if ``bias``).
        norm_eps: of every norm.
        bias: whether projections and norms have biases.
        activation: ``swiglu``, ``gelu``, or ``gelu_tanh``, GPT-2's approximation.
        qk_norm: RMSNorm of queries and keys, before they are cached.
        tied_head: whether the head is the token embedding.
        init_std: of embeddings and projections; those that write into the residual stream are
            scaled by ``1 / sqrt(2 layers)``.
        dropout: of embeddings and residual branches, in training.
        dtype: of activations; parameters, positions, logits and softmax are float32.
        sharing: ``all`` positions share a block's weights, ``none`` does, or groups of consecutive
            ones do, ``groups(copies=8)``; see ``posenc.sharing``.
        remat: what a block computes again in the backward pass instead of keeping it: ``none``,
            all but its matrix products (``dots``), or all (``full``).
        scan: whether a forward pass without a cache runs the repeats of the pattern of layers in
            one loop, compiled once; see ``posenc.repeats``.
    """

    vocab_size: int = 257
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 0
    mlp_width: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    bias: bool = False
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    qk_norm: bool = False
    tied_head: bool = True
    init_std: float = 0.02
    dropout: float = 0.0
    dtype: DType = "float32"
    sharing: str = "all"
    remat: Literal["none", "dots", "full"] = "none"
    scan: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.mlp_width < 0:
            raise UserError(f"mlp_width is {self.mlp_width}: it must be at least 0 (0: the usual)")
        if self.width % self.heads:
            near = [h for h in range(1, self.width + 1) if self.width % h == 0]
            near = sorted(near, key=lambda h: abs(h - self.heads))[:3]
            raise UserError(
                f"width {self.width} is not divisible by {self.heads} heads: "
                f"try heads of {', '.join(map(str, sorted(near)))}"
            )
        if self.kv_heads < 0 or (self.kv_heads and self.heads % self.kv_heads):
            raise UserError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads: "
                "take a divisor of the heads"
            )
        if self.remat not in ("none", "dots", "full"):
            raise UserError(f"remat is {self.remat!r}: it is none, dots or full")
        if not isinstance(self.sharing, str):
            raise UserError(f"sharing is {self.sharing!r}: give text, such as all or none")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}: it must be at least 0 and below 1")

    @property
    def head_width(self) -> int:
        """Width of one head, D."""
        return self.width // self.heads

    @property
    def inner_width(self) -> int:
        """Width of the MLP between its projections."""
        if self.mlp_width:
            return self.mlp_width
        if self.activation == "swiglu":
            return -(-self.width * 8 // 3 // 8) * 8
        return 4 * self.width


def _gpt2(layers: int, width: int, heads: int) -> TransformerConfig:
    """GPT-2 to the letter (Radford et al., 2019, and the released code)."""
    return TransformerConfig(
        vocab_size=50_257,
        layers=layers,
        width=width,
        heads=heads,
        norm="layer",
        bias=True,
        activation="gelu_tanh",
    )


PRESETS: dict[str, TransformerConfig] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "modern-small": TransformerConfig(50_257, layers=12, width=768, heads=12),
    "nano": TransformerConfig(layers=2, width=32, heads=2),
    "tiny": TransformerConfig(layers=2, width=64, heads=4),
    "mini": TransformerConfig(layers=4, width=128, heads=4),
    "base-cpu": TransformerConfig(layers=6, width=256, heads=8),
}


def preset(name: str) -> TransformerConfig:
    """Give a preset by name.

    Raises:
        UserError: an unknown name, with the nearest ones.
    """
    if name not in PRESETS:
        raise UserError(f"unknown model {name!r}: {nearest(name, PRESETS)}")
    return PRESETS[name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What decoding keeps of the tokens so far.

    Attributes:
        layers: one cache a layer.
        positions: ``[B, S]``.
        segments: ``[B, S]``; slots that are not filled yet are padding.
        streams: other per-token numbers, each ``[B, S]``.
        length: how many slots are filled.
    """

    layers: tuple[LayerCache, ...]
    positions: Any
    segments: Any
    streams: Any
    length: Any


def _check_fits(cache: Cache, positions: Array, streams: dict[str, Array]) -> None:
    """Raise ``UserError`` for positions or streams that a cache would lose or truncate."""
    if cache.positions.dtype != positions.dtype:
        raise UserError(
            f"positions of {positions.dtype} do not go into a cache of "
            f"{cache.positions.dtype}: start it with positions={positions.dtype}"
        )
    held = {name: str(stream.dtype) for name, stream in cache.streams.items()}
    given = {name: str(stream.dtype) for name, stream in streams.items()}
    if held != given:
        raise UserError(
            f"streams {given or 'none'} do not go into a cache that holds {held or 'none'}: "
            f"start it with streams={given}"
        )


# What rematerialised blocks keep for the backward pass.
_KEPT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def dropped(x: Array, rate: float, key: Array | None) -> Array:
    """Zero a share of ``x`` and scale up the rest; ``x`` itself without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class MLP(nnx.Module):
    """The position-wise feed-forward network of a block."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        def project(inputs: int, outputs: int, std: float) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=config.bias,
                kernel_init=nnx.initializers.normal(std),
                dtype=config.dtype,
                rngs=rngs,
            )

        inner = config.inner_width
        self.activation = config.activation
        self.up = project(config.width, inner, config.init_std)
        self.gate = (
            project(config.width, inner, config.init_std) if config.activation == "swiglu" else None
        )
        self.down = project(inner, config.width, config.init_std * (2 * config.layers) ** -0.5)

    def __call__(self, x: Float[Array, "B T M"]) -> Float[Array, "B T M"]:
        """Apply it to every token."""
        if self.gate is not None:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
        return self.down(jax.nn.gelu(self.up(x), approximate=self.activation == "gelu_tanh"))


def _norm(config: TransformerConfig, rngs: nnx.Rngs) -> nnx.Module:
    if config.norm == "layer":
        # The variance of differences, as in GPT-2: the fast form cancels where the mean is large.
        return nnx.LayerNorm(
            config.width,
            epsilon=config.norm_eps,
            use_bias=config.bias,
            use_fast_variance=False,
            dtype=config.dtype,
            rngs=rngs,
        )
    return nnx.RMSNorm(config.width, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


class Block(nnx.Module):
    """A pre-norm block: attention, then the MLP, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_width=config.head_width,
            bias=config.bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            init_std=config.init_std,
            out_std=config.init_std * (2 * config.layers) ** -0.5,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, encoding, queries, keys, cache, start, *, causal, dense, key, apply):
        """Give the residual stream after the block, and the layer's cache."""
        keys_of = (None, None) if key is None else tuple(jax.random.split(key))
        mixed, cache = self.attention(
            apply(self.attention_norm, x),
            encoding,
            queries,
            keys,
            cache,
            start,
            causal=causal,
            dense=dense,
            apply=apply,
        )
        x = x + dropped(mixed, self.dropout, keys_of[0])
        fed = apply(self.mlp, apply(self.mlp_norm, x))
        return x + dropped(fed, self.dropout, keys_of[1]), cache


class Transformer(nnx.Module):
    """A decoder-only transformer that is told where its tokens stand by an encoding alone.

    Args:
        config: its shape.
        encoding: a spec, such as ``rope(theta=500000)`` or ``rope*3,nope``.
        context_length: the number of tokens that it is built for; only an encoding may use it, and
            blocks whose weights not all positions share.
        seed: of all parameters. The encoding draws from a stream of its own, so that all others
            are the same bits whatever the encoding is.
        encoding_seed: of that stream, if another.
        allow_plugins: whether a spec may name ``module:Class``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        encoding: str,
        context_length: int,
        *,
        seed: int | Array = 0,
        encoding_seed: int | Array | None = None,
        allow_plugins: bool = True,
    ):
        if context_length < 1:
            raise UserError(f"context length {context_length}: it must be at least 1")
        shared_key, encoding_key = jax.random.split(jax.random.key(seed))
        if encoding_seed is not None:
            encoding_key = jax.random.split(jax.random.key(encoding_seed))[1]
        rngs = nnx.Rngs(shared_key)
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nnx.initializers.normal(config.init_std),
            dtype=config.dtype,
            rngs=rngs,
        )
        self.context_length = context_length
        self.copies = copies_of(config.sharing, context_length)
        blocks = [Block(config, rngs) for _ in range(config.layers)]
        if self.copies > 1:
            blocks = [unshare(block, self.copies) for block in blocks]
        self.blocks = nnx.List(blocks)
        self.final_norm = _norm(config, rngs)
        table = (config.vocab_size, config.width)
        self.head = (
            None
            if config.tied_head
            else nnx.Param(config.init_std * jax.random.normal(rngs.params(), table))
        )
        dims = Dimensions(config.width, config.heads, config.head_width, context_length)
        self.encoding = build(
            encoding, config.layers, dims, encoding_key, allow_plugins=allow_plugins
        )

    @property
    def max_position(self) -> int | None:
        """The smaller limit of the encoding and of unshared blocks, or None."""
        limits = [self.encoding.max_position, self.context_length if self.copies > 1 else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def representable(
        self, positions: Num[Tensor, "*n"], streams: dict[str, Tensor] | None = None
    ) -> Bool[Tensor, "*#n"] | None:
        """Say which tokens the model has weights for; None when all, known beforehand."""
        within = self.encoding.representable(positions, streams)
        if self.copies == 1:
            return within
        own = (positions >= 0) & (positions < self.context_length)
        return own if within is None else own & within

    def check_positions(
        self, positions: np.ndarray, streams: dict[str, np.ndarray] | None = None
    ) -> None:
        """Raise ``PositionOutOfRange`` for the first position that the model has no weights for.

        For positions that are known on the host; padding must have been taken out.
        """
        outside = np.asarray((positions < 0) | (positions >= self.context_length))
        if self.copies > 1 and outside.any():
            raise PositionOutOfRange(
                f"position {np.asarray(positions)[outside].flat[0]} has no weights: with sharing "
                f"{self.config.sharing!r} the blocks have weights for positions 0 to "
                f"{self.context_length - 1} and no others: stay below {self.context_length}, or "
                "train with --sharing all, whose weights serve every position"
            )
        self.encoding.check_positions(positions, streams)

    def hidden(
        self,
        tokens: Int[Tensor, "B T"],
        positions: Num[Tensor, "#B T"],
        segments: Int[Tensor, "#B T"] | None = None,
        streams: dict[str, Tensor] | None = None,
        cache: Cache | None = None,
        *,
        causal: bool = True,
        dense: bool = False,
        key: Array | None = None,
    ) -> tuple[Float[Array, "B T M"], Cache | None]:
        """Give the final normed states, from which ``logits`` makes the logits.

        Args:
            tokens: token ids.
            positions: of the tokens, int32, or float32 for an encoding that takes fractions.
            segments: runs of tokens that may see each other; 0 is padding; all one if left out.
            streams: other per-token numbers that an encoding names.
            cache: of earlier tokens, to go on from.
            causal: whether a token sees earlier ones only.
            dense: take the dense attention path, the readable reference.
            key: of dropout; none without it.

        Returns:
            ``[B, T, M]``, NaN in every row that sees an unrepresentable position; and the cache
            with these tokens written, or None.

        Raises:
            PositionOutOfRange: a position, known on the host, that the encoding cannot represent
                or the blocks have no weights for.
            EncodingError: the encoding has no form without the causal mask.
            UserError: more tokens than the cache has slots for, or positions of another type.
        """
        batch, length = tokens.shape
        if not causal:
            self.encoding.check_bidirectional()
        segments = jnp.ones((1, length), jnp.int32) if segments is None else segments
        self._check_on_host(positions, streams or {}, segments, cache, length)
        tokens, positions, segments = map(jnp.asarray, (tokens, positions, segments))
        given = {name: jnp.asarray(stream) for name, stream in (streams or {}).items()}
        if cache is not None:
            _check_fits(cache, positions, given)
        start = jnp.zeros((), jnp.int32) if cache is None else cache.length
        slots = (start + jnp.arange(length, dtype=jnp.int32))[None]
        queries = self._side(positions, given, slots, segments)
        keys, bad_write = queries, jnp.zeros((), bool)
        if cache is not None:
            every = cache.positions.shape[1]
            bad_write = start + length > every
            held = {
                name: write_slots(kept, given[name], start) for name, kept in cache.streams.items()
            }
            cache = dataclasses.replace(
                cache,
                positions=write_slots(cache.positions, positions, start),
                segments=write_slots(cache.segments, segments, start),
                streams=held,
                length=start + length,
            )
            every_slot = jnp.arange(every, dtype=jnp.int32)[None]
            keys = self._side(cache.positions, held, every_slot, cache.segments)

        apply: Apply = shared
        if self.copies > 1:
            own = jnp.broadcast_to(positions, (batch, length))
            apply = Unshared.at(own, self.copies, self.context_length)
        x = self.encoding.embed(self.embedding(tokens), positions, queries.streams)
        x = dropped(x, self.config.dropout, key)

        def run(x, depth, modules, queries, keys, cache=None, *, looped=False):
            """Pass the stream through one layer, whose number may be traced."""
            block, encoding = modules

            def layer(x, queries, keys, key):
                return block(
                    x,
                    encoding,
                    queries,
                    keys,
                    cache,
                    start,
                    causal=causal,
                    dense=dense,
                    key=key,
                    apply=apply,
                )

            if self.config.remat != "none" and cache is None:
                # Inside a scan nothing can be shared with the forward pass by accident.
                policy = _KEPT[self.config.remat]
                layer = jax.checkpoint(layer, policy=policy, prevent_cse=not looped)
            own = None if key is None else jax.random.fold_in(key, depth)
            return layer(x, queries, keys, own)

        repeats = self.repeats() if self.config.scan and cache is None else None
        layers = []
        for depth in range(self.config.layers):
            if repeats is not None and depth in repeats:
                if depth == repeats.first:
                    x = self._scan(x, run, repeats, queries)
                continue
            modules, kept = self._modules(depth), None if cache is None else cache.layers[depth]
            asking, asked = (self._at(side, depth, modules[1], [depth]) for side in (queries, keys))
            x, after = run(x, depth, modules, asking, asked, kept)
            layers.append(after)
        x = self.final_norm(x)

        representable = self.representable(keys.positions, keys.streams)
        if representable is not None:
            shape = (batch, keys.segments.shape[1])
            every = jnp.broadcast_to(keys.segments, shape)
            poisoned = poisoned_rows(~jnp.broadcast_to(representable, shape), every, causal)
            if cache is not None:
                poisoned = jax.lax.dynamic_slice_in_dim(poisoned, start, length, axis=1)
            x = jnp.where(poisoned[..., None], jnp.nan, x)
        if cache is None:
            return x, None
        # A write beyond the last slot is clamped by the device: never a silent number.
        return jnp.where(bad_write, jnp.nan, x), dataclasses.replace(cache, layers=tuple(layers))

    def logits(self, hidden: Float[Array, "*N M"]) -> Float[Array, "*N V"]:
        """Give float32 logits of final states."""
        table = self.embedding.embedding[...] if self.head is None else self.head[...]
        return jnp.einsum(
            "...m,vm->...v", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32
        )

    def __call__(self, tokens: Int[Tensor, "B T"], positions: Num[Tensor, "#B T"], *args, **kwargs):
        """Give float32 logits ``[B, T, V]``; with a cache, logits and the cache.

        The arguments are those of ``hidden``.
        """
        hidden, cache = self.hidden(tokens, positions, *args, **kwargs)
        logits = self.logits(hidden)
        return logits if cache is None else (logits, cache)

    def start_cache(
        self,
        batch: int,
        slots: int,
        *,
        positions: Any = jnp.int32,
        streams: dict[str, Any] | None = None,
    ) -> Cache:
        """Give an empty cache for ``slots`` tokens.

        Args:
            batch: B.
            slots: S.
            positions: their type, float32 for an encoding that takes fractions.
            streams: the type of every per-token stream, by name (``LAYER_POSITIONS`` has the
                layers on a last axis).
        """
        config = self.config
        shape = (batch, slots, config.kv_heads or config.heads, config.head_width)
        layers = []
        for depth in range(config.layers):
            encoding = self.encoding.at(depth)
            state = encoding.start_state(batch)
            # What a layer's features look like is told by the encoding, on one token.
            features, _ = jax.eval_shape(
                encoding.features,
                jax.ShapeDtypeStruct((batch, 1, config.width), config.dtype),
                jax.ShapeDtypeStruct((batch, 1), jnp.int32),
                jax.ShapeDtypeStruct((batch, 1), jnp.int32),
                state,
            )
            layers.append(
                LayerCache(
                    jnp.zeros(shape, config.dtype),
                    jnp.zeros(shape, config.dtype),
                    jax.tree.map(
                        lambda leaf: jnp.zeros((batch, slots, *leaf.shape[2:]), leaf.dtype),
                        features,
                    ),
                    state,
                    encoding.start_carry(batch, slots),
                )
            )
        shape_2d = (batch, slots)
        return Cache(
            tuple(layers),
            positions=jnp.zeros(shape_2d, positions),
            segments=jnp.zeros(shape_2d, jnp.int32),
            streams={
                name: jnp.zeros(
                    (*shape_2d, config.layers) if name == LAYER_POSITIONS else shape_2d, dtype
                )
                for name, dtype in (streams or {}).items()
            },
            length=jnp.zeros((), jnp.int32),
        )

    def _side(self, positions: Array, streams: Any, slots: Array, segments: Array) -> Side:
        prepared = self.encoding.prepare(positions, streams)
        return Side(None, None, positions, streams, slots, segments, prepared=prepared)

    def _modules(self, depth: int) -> tuple[nnx.Module, PositionalEncoding]:
        """Give the block and the encoding of one layer."""
        return self.blocks[depth], self.encoding.at(depth)

    def repeats(self) -> Repeats | None:
        """Say which layers ``config.scan`` runs in a loop; None where none in a row are alike."""
        return find_repeats([self._modules(depth) for depth in range(self.config.layers)])

    def _scan(self, x: Array, run: Any, repeats: Repeats, side: Side) -> Array:
        """Pass the stream through all repeats of the pattern of layers."""

        def one(x: Array, number: Array, layers: list[Any]) -> Array:
            for offset, modules in enumerate(layers):
                alike = repeats.layers(offset)
                depth = alike.start + number * alike.step
                own = self._at(side, depth, modules[1], alike)
                x, _ = run(x, depth, modules, own, own, looped=True)
            return x

        places = [repeats.layers(offset) for offset in range(repeats.period)]
        every = [[self._modules(depth) for depth in layers] for layers in zip(*places, strict=True)]
        return scan_repeats(one, x, every)

    def _at(
        self, side: Side, depth: int | Array, encoding: PositionalEncoding, alike: Sequence[int]
    ) -> Side:
        """Give a side as one layer sees it.

        Args:
            side: as all layers see it.
            depth: the layer's number, traced where it is one of several.
            encoding: the layer's.
            alike: the layers that it may be.
        """
        positions, streams = side.positions, side.streams
        if LAYER_POSITIONS in streams:
            positions = streams[LAYER_POSITIONS][..., depth]
            prepared = encoding.prepare(positions, streams)
        else:
            prepared = self.encoding.prepared_in(side.prepared, alike, encoding, positions, streams)
        return dataclasses.replace(side, positions=positions, prepared=prepared)

    def _check_on_host(
        self, positions: Any, streams: Any, segments: Any, cache: Cache | None, length: int
    ) -> None:
        given = (positions, segments, *streams.values())
        if not any(isinstance(value, jax.core.Tracer) for value in given):
            # Everything is told for the same tokens, and padding is taken out.
            size = np.broadcast_shapes(*(np.shape(value)[:2] for value in given))
            real = np.broadcast_to(np.asarray(segments), size) != 0

            def tokens(value: Any) -> np.ndarray:
                return np.broadcast_to(np.asarray(value), (*size, *np.shape(value)[2:]))[real]

            named = {name: tokens(stream) for name, stream in streams.items()}
            self.check_positions(tokens(positions), named)
        if cache is not None and not isinstance(cache.length, jax.core.Tracer):
            slots = cache.positions.shape[1]
            if int(cache.length) + length > slots:
                raise UserError(
                    f"{int(cache.length)} cached tokens and {length} new ones do not fit into a "
                    f"cache of {slots} slots: start one with more"
                )


def count_parameters(model: nnx.Module) -> int:
    """Count the numbers that training may change."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
