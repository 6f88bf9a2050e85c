"""Which weights know about position: an account of a model's parameters by context length.

Shapes are evaluated abstractly, and blocks are alike, so that one block and one layer of each kind
speak for all: any model takes seconds and no memory.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.encodings.base import Dimensions, PositionalEncoding, PositionOutOfRange
from posenc.encodings.registry import build, canonical_spec, format_spec, parse_part, parse_spec
from posenc.errors import UserError
from posenc.sharing import copies_of
from posenc.training import split
from posenc.transformer import Transformer, TransformerConfig

BLOCK, ENCODING = "blocks.", "encoding."
Shapes = dict[str, jax.ShapeDtypeStruct]


def check_lengths(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Give the context lengths ascending, each once.

    Raises:
        UserError: fewer than two, which are needed to tell what depends on the length.
    """
    ascending = tuple(sorted(set(lengths)))
    if len(ascending) < 2 or ascending[0] < 1:
        raise UserError(
            f"--lengths {' '.join(map(str, lengths)) or '(none)'}: give two or more lengths, at "
            "least 1, such as 1024 4096: what depends on the length is found by comparing them"
        )
    return ascending


def parameter_shapes(
    config: TransformerConfig, encoding: str, length: int, *, allow_plugins: bool = False
) -> Shapes:
    """Give the shape of every parameter of a model built for ``length`` tokens, by its name.

    One block is evaluated and stands for all layers; the encoding is evaluated for all of them,
    since its layers may differ.
    """

    def one_layer() -> Transformer:
        return Transformer(
            dataclasses.replace(config, layers=1), encoding, length, allow_plugins=allow_plugins
        )

    def whole_encoding() -> nnx.Module:
        dims = Dimensions(config.width, config.heads, config.head_width, length)
        key = jax.random.key(0)
        return build(encoding, config.layers, dims, key, allow_plugins=allow_plugins)

    shapes: Shapes = {}
    for name, leaf in split(nnx.eval_shape(one_layer))[1].items():
        if name.startswith(BLOCK):
            within = name.removeprefix(f"{BLOCK}0.")
            shapes |= {f"{BLOCK}{layer}.{within}": leaf for layer in range(config.layers)}
        elif not name.startswith(ENCODING):
            shapes[name] = leaf
    own = split(nnx.eval_shape(whole_encoding))[1]
    return shapes | {ENCODING + name: leaf for name, leaf in own.items()}


def count(shapes: Shapes, prefix: str = "") -> int:
    """Count the numbers in the parameters whose name begins with ``prefix``."""
    return sum(leaf.size for name, leaf in shapes.items() if name.startswith(prefix))


def account(shapes: Shapes) -> dict[str, int]:
    """Give the number of parameters by part of the model."""
    parts = {
        "one block": count(shapes, f"{BLOCK}0."),
        "all blocks": count(shapes, BLOCK),
        "token embedding": count(shapes, "embedding."),
        "head": count(shapes, "head"),
        "final norm": count(shapes, "final_norm."),
        "encoding": count(shapes, ENCODING),
        "total": count(shapes),
    }
    return {part: number for part, number in parts.items() if part != "head" or number}


def layer_kinds(encoding: str, layers: int) -> dict[str, int]:
    """Count how many layers have each of the encodings that a spec lists."""
    spec = parse_spec(canonical_spec(encoding))
    every = (format_spec((spec[depth % len(spec)],)) for depth in range(layers))
    return dict(collections.Counter(every))


def visible_pairs(length: int, reach: int | None, sinks: int) -> int:
    """Count the pairs of a query and a key that it sees, among ``length`` tokens in order."""

    def up_to(least: int) -> int:
        """Sum the keys before each query, none counted beyond ``least``."""
        rising = min(length, least + 1)
        return rising * (rising - 1) // 2 + (length - rising) * least

    if reach is None:
        return length + up_to(length)
    # The sinks of a query are those before its window: what min(t, reach + sinks) adds to it.
    return length + up_to(reach + sinks)


def growth(
    config: TransformerConfig, encoding: str, length: int, batch: int, *, allow_plugins: bool
) -> dict[str, int]:
    """Give what grows with the length: bytes of a full cache, and attention's work.

    Returns:
        ``kv_cache_bytes`` of keys and values; ``other_cache_bytes`` (positions, segments, and what
        encodings keep); ``attention_flops`` of one forward pass: scores and weighted sums of the
        pairs that see each other, a multiply-add counted as two; an encoding's own work is not
        counted.
    """
    kept = other = flops = 0
    for kind, layers in layer_kinds(encoding, config.layers).items():

        def one_layer(kind: str = kind) -> tuple[Transformer, Any]:
            one = dataclasses.replace(config, layers=1)
            model = Transformer(one, kind, length, allow_plugins=allow_plugins)
            return model, model.start_cache(batch, length)

        model, cache = nnx.eval_shape(one_layer)
        (layer,) = cache.layers
        kept += layers * _bytes((layer.keys, layer.values))
        other += layers * _bytes((layer.features, layer.state, layer.carry))
        own = model.encoding.at(0)
        pairs = visible_pairs(length, own.reach, own.sinks)
        flops += layers * 4 * batch * config.heads * config.head_width * pairs
        shared = _bytes(dataclasses.replace(cache, layers=()))
    return {
        "kv_cache_bytes": kept,
        "other_cache_bytes": other + shared,
        "attention_flops": flops,
    }


def _shape(leaf: jax.ShapeDtypeStruct | None) -> list[int] | None:
    return None if leaf is None else list(leaf.shape)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def audit_model(
    config: TransformerConfig,
    encoding: str,
    lengths: tuple[int, ...],
    *,
    batch: int = 1,
    allow_plugins: bool = False,
) -> dict[str, Any]:
    """Say which parameters of a model know the context length, and what a longer one costs.

    Args:
        config: the model's shape.
        encoding: a spec.
        lengths: two or more context lengths, ascending; lists below have an entry for each.
        batch: sequences, for the cache and attention.
        allow_plugins: whether the spec may name ``module:Class``.

    Returns:
        ``copies`` of every block, each for a run of consecutive positions. ``changing``: every
        parameter whose shape differs between two of the lengths.
        ``containing``: every parameter with the length itself among its dimensions, which may be
        there by chance (a width of 1024). ``parameters``: the account. ``block_bytes`` of one
        block. ``growth``. ``without_sharing``: parameters of the same model's blocks, had every
        position weights of its own.
    """
    if batch < 1:
        raise UserError(f"--batch is {batch}: it must be at least 1")
    every = [parameter_shapes(config, encoding, n, allow_plugins=allow_plugins) for n in lengths]
    counterfactual = dataclasses.replace(config, sharing="none", layers=1)
    names = dict.fromkeys(name for shapes in every for name in shapes)
    by_name = {name: [_shape(shapes.get(name)) for shapes in every] for name in names}
    return {
        "encoding": canonical_spec(encoding),
        "sharing": str(parse_part(config.sharing)),
        "copies": [copies_of(config.sharing, n) for n in lengths],
        "layers": config.layers,
        "dtype": config.dtype,
        "batch": batch,
        "lengths": list(lengths),
        "changing": [
            {"name": name, "shapes": shapes}
            for name, shapes in by_name.items()
            if any(shape != shapes[0] for shape in shapes)
        ],
        "containing": [
            [
                {"name": name, "shape": list(leaf.shape)}
                for name, leaf in shapes.items()
                if length in leaf.shape
            ]
            for length, shapes in zip(lengths, every, strict=True)
        ],
        "parameters": [account(shapes) for shapes in every],
        "block_bytes": [
            _bytes([leaf for name, leaf in shapes.items() if name.startswith(f"{BLOCK}0.")])
            for shapes in every
        ],
        "growth": [
            growth(config, encoding, n, batch, allow_plugins=allow_plugins) for n in lengths
        ],
        "without_sharing": [
            config.layers
            * count(
                parameter_shapes(counterfactual, encoding, n, allow_plugins=allow_plugins),
                f"{BLOCK}0.",
            )
            for n in lengths
        ],
    }


def blocks_hash(parameters: dict[str, Any]) -> str:
    """Give the SHA-256 of all blocks' parameters: names, shapes, types and bytes."""
    digest = hashlib.sha256()
    for name in sorted(name for name in parameters if name.startswith(BLOCK)):
        value = np.asarray(parameters[name])
        digest.update(f"{name} {value.shape} {value.dtype}\0".encode() + value.tobytes())
    return digest.hexdigest()


def lengthened(
    model: Transformer, encoding: str, length: int, *, allow_plugins: bool = False
) -> Transformer:
    """Give a model built for ``length`` tokens, with a trained one's weights and no encoding.

    Raises:
        UserError: the blocks belong to the positions that they were trained at, or the two models
            differ in the name, shape or type of a weight outside the encoding.
    """
    if model.copies > 1:
        raise UserError(
            f"with sharing {model.config.sharing!r} they are weights of the positions 0 to "
            f"{model.context_length - 1}, and others have none"
        )
    longer = nnx.eval_shape(
        lambda: Transformer(model.config, encoding, length, allow_plugins=allow_plugins)
    )
    merge, wanted = split(without_encoding(longer))
    trained = {n: v for n, v in split(model)[1].items() if not n.startswith(ENCODING)}
    for name in sorted(wanted.keys() | trained.keys()):
        here, there = (
            f"{list(some[name].shape)} of {some[name].dtype}" if name in some else "missing"
            for some in (trained, wanted)
        )
        if here != there:
            raise UserError(f"{name} is {here} as trained, and {there} at {length} tokens")
    return merge(trained)


def without_encoding(model: Transformer) -> Transformer:
    """Give a copy of a model that is told nothing about position."""
    blank = nnx.clone(model)
    blank.encoding.parts = nnx.List(
        [PositionalEncoding(part.dims, nnx.Rngs(0)) for part in model.encoding.parts]
    )
    return blank


def audit_trained(
    model: Transformer,
    encoding: str,
    tokens: np.ndarray,
    length: int,
    position: int,
    *,
    allow_plugins: bool = False,
) -> dict[str, Any]:
    """Take a trained model's blocks to a longer context, and tokens through them far out.

    Args:
        model: as trained.
        encoding: its spec.
        tokens: ``[T]``, token ids to send through.
        length: the longer context.
        position: where the first token is to stand, instead of at 0.
        allow_plugins: whether the spec may name ``module:Class``.

    Returns:
        ``blocks_sha256`` as trained and in the longer model (``fit`` says why not, if they do not
        fit); and the largest difference, as a share of the largest value, between the final states
        of the tokens at ``position`` and at 0: through the longer model's ``blocks_alone``, and
        through the trained one with its encoding (``with_encoding``), or the ``error`` where it has
        no representation.
    """
    found: dict[str, Any] = {
        "trained_length": model.context_length,
        "tokens": len(tokens),
        "length": length,
        "position": position,
        "blocks_sha256": blocks_hash(split(model)[1]),
        "longer_blocks_sha256": None,
        "fit": None,
        "blocks_alone": None,
        "with_encoding": None,
        "error": None,
    }
    try:
        longer = lengthened(model, encoding, length, allow_plugins=allow_plugins)
        found["longer_blocks_sha256"] = blocks_hash(split(longer)[1])
        found["blocks_alone"] = moved(longer, tokens, position)
    except UserError as error:
        found["fit"] = str(error)
    try:
        found["with_encoding"] = moved(model, tokens, position)
    except PositionOutOfRange as error:
        found["error"] = str(error)
    return found


def moved(model: Transformer, tokens: np.ndarray, position: int) -> float:
    """Give the largest change of final states, as a share, when all tokens stand further on.

    Raises:
        PositionOutOfRange: they cannot stand there.
    """
    near = np.arange(len(tokens), dtype=np.int32)[None]
    for positions in (near, near + position):
        model.check_positions(positions)
    merge, parameters = split(model)
    states: Callable[..., jax.Array] = jax.jit(
        lambda parameters, positions: merge(parameters).hidden(tokens[None], positions)[0]
    )
    here = states(parameters, jnp.asarray(near))
    there = states(parameters, jnp.asarray(near + position))
    return float(jnp.max(jnp.abs(there - here)) / jnp.max(jnp.abs(here)))
