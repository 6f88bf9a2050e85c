"""Encodings that add a bias to the logits, from positions alone.

Let B denote the batch, t the query rows of a block, S the keys and H the heads.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding

# A learned bias by distance is looked up in a row for every distance as long as these are no more,
# and else by way of each distance's bucket, which takes one more look-up.
DISTANCES = 1024


def distances(queries: Num[Array, "#B t"], keys: Num[Array, "#B S"]) -> Float[Array, "#B 1 t S"]:
    """Give ``max(p_i - p_j, 0)``, subtracted exactly and then cast to float32."""
    difference = queries[:, None, :, None] - keys[:, None, None, :]
    return jnp.maximum(difference, 0).astype(jnp.float32)


def by_head(values: Float[Array, " H"]) -> Float[Array, "1 H 1 1"]:
    """Give a number a head the shape of logits."""
    return values[None, :, None, None]


@jax.custom_vjp
def look_up(table: Float[Array, "n K"], index: Int[Array, "#B t S"]) -> Float[Array, "#B K t S"]:
    """Give the rows of a table that ``index`` names.

    Every query row has a copy of its own, to read and to add gradients up in: those of all pairs in
    one table would be one long queue for a few places in memory.
    """
    size = index.shape[1]
    copies = jnp.broadcast_to(table, (size, *table.shape))
    return jnp.moveaxis(copies[jnp.arange(size)[:, None], index], -1, 1)


def _look_up_gradient(inputs: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, index = inputs
    size = index.shape[1]
    copies = jnp.zeros((size, *table.shape), jnp.float32)
    added = copies.at[jnp.arange(size)[:, None], index].add(jnp.moveaxis(gradient, 1, -1))
    return jnp.sum(added, axis=0), None


# Written out: what is derived from the above by itself takes longer.
look_up.defvjp(lambda *inputs: (look_up(*inputs), inputs), _look_up_gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def over_heads(x: Float[Array, "#B t S"], heads: int) -> Float[Array, "#B H t S"]:
    """Repeat ``x`` for every head; the gradient adds up one head after another.

    A sum over an axis that is neither the first nor the last takes XLA on a CPU ten times longer.
    """
    return jnp.broadcast_to(x[:, None], (x.shape[0], heads, *x.shape[1:]))


def _add_heads(heads: int, _: None, gradient: Array) -> tuple[Array]:
    return (functools.reduce(jnp.add, [gradient[:, head] for head in range(heads)]),)


over_heads.defvjp(lambda x, heads: (over_heads(x, heads), None), _add_heads)


def held(free: Array, low: float, high: float) -> Array:
    """Hold a parameter within an interval; its gradient passes as though it were not held.

    So a parameter that has left comes back. (``clip`` alone has no gradient out there.)
    """
    inside = jax.lax.stop_gradient(jnp.clip(free, low, high))
    return inside + (free - jax.lax.stop_gradient(free))


def alibi_slopes(heads: int) -> np.ndarray:
    """Give ALiBi's slope for each head, float64 ``[H]``.

    For a power of two ``2^(-8h/H)``, h = 1..H; otherwise the slopes of the next lower power of two,
    then every second one of the next higher's (Press et al., 2022, released code, ``get_slopes``).
    The list is not sorted, and that is as released.
    """
    lower = 2 ** int(np.log2(heads))
    slopes = 2.0 ** (-8 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-8 * np.arange(1, 2 * lower + 1) / (2 * lower))[::2]
    return np.concatenate([slopes, between[: heads - lower]])


class ALiBi(PositionalEncoding):
    """Attention with linear biases (Press, Smith and Lewis, 2022, section 3).

    The logit falls by ``slope_h`` with every position between query and key; the bias is added
    after the scaling by ``1/sqrt(D)`` and not learned, unless asked for. (The authors found that
    slopes which are learned do not extrapolate well.)

    Args:
        dims: of the model.
        rngs: unused.
        learned: whether the slopes are a parameter, ``slopes``, shared by all layers, that starts
            from the fixed ones; nothing keeps them above 0.
    """

    name = "alibi"
    shift_invariant = "exact"
    bidirectional = False
    reference = """@inproceedings{press2022train,
  title={Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation},
  author={Press, Ofir and Smith, Noah A. and Lewis, Mike},
  booktitle={International Conference on Learning Representations},
  year={2022}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, learned: bool = False):
        super().__init__(dims, rngs)
        fixed = jnp.asarray(alibi_slopes(dims.heads), jnp.float32)
        self.slopes = nnx.Param(fixed) if learned else None

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract slope times distance."""
        fixed = jnp.asarray(alibi_slopes(self.dims.heads), jnp.float32)
        slopes = fixed if self.slopes is None else self.slopes[...]
        return logits - by_head(slopes) * distances(queries.positions, keys.positions), carry


def t5_buckets(buckets: int, max_distance: int) -> np.ndarray:
    """Give the bucket of each distance, int32 ``[n]``, up to the first one of the last bucket.

    Half of the buckets are single distances; the others widen as their logarithm says. Float32, as
    in the released code: another width could move a border.
    """
    single = buckets // 2
    distance = np.arange(max_distance + 1)
    ratio = np.maximum(distance, single).astype(np.float32) / np.float32(single)
    share = np.log(ratio) / np.float32(math.log(max_distance / single))
    step = (share * np.float32(buckets - single)).astype(np.int32)
    bucket = np.where(distance < single, distance, np.minimum(single + step, buckets - 1))
    return bucket[: int(np.argmax(bucket == buckets - 1)) + 1].astype(np.int32)


class T5(PositionalEncoding):
    """A learned bias for every bucket of distances (Raffel et al., 2020, section 2.1).

    The causal form of the released code: ``buckets // 2`` single distances, then ever wider ones up
    to ``max_distance``, beyond which all share the last. Layers share the table, as there. T5 has
    no ``1/sqrt(D)`` to its scores; here the bias is added after that scaling, as for all others.
    A distance that is no whole number is rounded down.

    Args:
        dims: of the model.
        rngs: where the initial table comes from.
        buckets: rows of the table, ``[buckets, H]``.
        max_distance: from which on there is one bucket.
        init_std: of the table.
    """

    name = "t5"
    shift_invariant = "exact"
    bidirectional = False
    reference = """@article{raffel2020exploring,
  title={Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer},
  author={Raffel, Colin and Shazeer, Noam and Roberts, Adam and Lee, Katherine and
          Narang, Sharan and Matena, Michael and Zhou, Yanqi and Li, Wei and Liu, Peter J.},
  journal={Journal of Machine Learning Research},
  volume={21},
  number={140},
  pages={1--67},
  year={2020}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        init_std: float = 0.02,
    ):
        super().__init__(dims, rngs)
        if buckets < 2:
            raise EncodingError(f"t5(buckets={buckets}): half are single distances, so at least 2")
        if max_distance <= buckets // 2:
            raise EncodingError(
                f"t5(buckets={buckets}, max_distance={max_distance}): {buckets // 2} buckets are "
                f"single distances, so it must be at least {buckets // 2 + 1}"
            )
        if init_std < 0:
            raise EncodingError(f"t5(init_std={init_std}): it must be at least 0")
        self.buckets, self.max_distance = buckets, max_distance
        shape = (buckets, dims.heads)
        self.table = nnx.Param(init_std * jax.random.normal(rngs.params(), shape))

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the bias of each distance's bucket."""
        bucket = t5_buckets(self.buckets, self.max_distance)
        apart = jnp.floor(distances(queries.positions, keys.positions)[:, 0])
        # Cut first: a float beyond int32 has no defined integer.
        index = jnp.minimum(apart, len(bucket) - 1).astype(jnp.int32)
        table = self.table[...]
        if len(bucket) <= DISTANCES:
            table = table[bucket]
        else:
            index = jnp.asarray(bucket)[index]
        return logits + look_up(table, index), carry


LEAST = 1e-2  # of KERPLE's parameters, in the released code


def _sums_by_head(*terms: Float[Array, "B H t S"]) -> list[Float[Array, " H"]]:
    """Add up every one of ``terms`` for each head, all in one pass over the pairs."""

    def add(sums, more):
        return tuple(a + b for a, b in zip(sums, more, strict=True))

    noughts = (jnp.zeros((), jnp.float32),) * len(terms)
    return list(jax.lax.reduce(terms, noughts, add, (0, 2, 3)))


# Gradients are written out for that one pass; those derived by themselves take two, twice as long.


@jax.custom_vjp
def _log_fall(
    r1: Float[Array, " H"], r2: Float[Array, " H"], apart: Float[Array, "#B 1 t S"]
) -> Float[Array, "#B H t S"]:
    """Give ``r1 ln(1 + r2 apart)``."""
    return by_head(r1) * jnp.log(1 + by_head(r2) * apart)


def _log_fall_gradient(inputs: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, None]:
    r1, r2, apart = inputs
    inner = 1 + by_head(r2) * apart
    by_r1, by_r2 = _sums_by_head(gradient * jnp.log(inner), gradient * (apart / inner))
    return by_r1, r1 * by_r2, None


_log_fall.defvjp(lambda *inputs: (_log_fall(*inputs), inputs), _log_fall_gradient)


@jax.custom_vjp
def _power_fall(
    r1: Float[Array, " H"], r2: Float[Array, " H"], log: Float[Array, "#B 1 t S"]
) -> Float[Array, "#B H t S"]:
    """Give ``r1 e^(r2 log)``."""
    return by_head(r1) * jnp.exp(by_head(r2) * log)


def _power_fall_gradient(inputs: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, None]:
    r1, r2, log = inputs
    share = gradient * jnp.exp(by_head(r2) * log)
    by_r1, by_r2 = _sums_by_head(share, share * log)
    return by_r1, r1 * by_r2, None


_power_fall.defvjp(lambda *inputs: (_power_fall(*inputs), inputs), _power_fall_gradient)

KERPLE = """@inproceedings{chi2022kerple,
  title={{KERPLE}: Kernelized Relative Positional Embedding for Length Extrapolation},
  author={Chi, Ta-Chung and Fan, Ting-Han and Ramadge, Peter J. and Rudnicky, Alexander I.},
  booktitle={Advances in Neural Information Processing Systems},
  year={2022}
}"""


def _uniform(rngs: nnx.Rngs, heads: int, high: float) -> nnx.Param:
    return nnx.Param(jnp.maximum(jax.random.uniform(rngs.params(), (heads,), maxval=high), LEAST))


class KerpleLog(PositionalEncoding):
    """A bias that falls with the logarithm of the distance, learned (Chi et al., 2022, section 4).

    ``-r1 ln(1 + r2 distance)``, with r1 and r2 for every head, shared by all layers. It is added
    after the scaling by ``1/sqrt(D)``, as in the released code and unlike the paper's equation.
    The released code cuts the stored parameters at 0.01 before every step; here they are cut where
    they are used and their gradients pass, so that one that has gone below comes back.

    Args:
        dims: of the model.
        rngs: where the initial values come from: r1 uniform up to 2, r2 up to 1.
    """

    name = "kerple_log"
    shift_invariant = "exact"
    bidirectional = False
    reference = KERPLE

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs):
        super().__init__(dims, rngs)
        self.r1, self.r2 = _uniform(rngs, dims.heads, 2.0), _uniform(rngs, dims.heads, 1.0)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract ``r1 ln(1 + r2 distance)``."""
        r1, r2 = (held(r[...], LEAST, jnp.inf) for r in (self.r1, self.r2))
        return logits - _log_fall(r1, r2, distances(queries.positions, keys.positions)), carry


class KerplePower(PositionalEncoding):
    """A bias that falls with a power of the distance, learned (Chi et al., 2022, section 4).

    ``-r1 distance^r2``, with r1 and r2 for every head, shared by all layers; r2 is at most 2, and
    with 1 it is ALiBi with learned slopes. Where the bias is added and how the parameters are held
    is as in ``kerple_log``.

    Args:
        dims: of the model.
        rngs: where the initial values come from: r1 uniform up to 1, r2 up to 2.
    """

    name = "kerple_power"
    shift_invariant = "exact"
    bidirectional = False
    reference = KERPLE

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs):
        super().__init__(dims, rngs)
        self.r1, self.r2 = _uniform(rngs, dims.heads, 1.0), _uniform(rngs, dims.heads, 2.0)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract ``r1 distance^r2``."""
        r1, r2 = held(self.r1[...], LEAST, jnp.inf), held(self.r2[...], LEAST, 2.0)
        # In place of ln 0 what every exponent takes to 0, and its gradient too: e^(-1e5 r2).
        log = jnp.maximum(jnp.log(distances(queries.positions, keys.positions)), -1e5)
        return logits - _power_fall(r1, r2, log), carry


class FIRE(PositionalEncoding):
    """A learned function of the distance as a share of the query's position (Li et al., 2024).

    ``MLP(psi(distance) / (psi(max(p_i, L)) + eps))`` with ``psi(x) = ln(|c| x + 1)`` and the
    threshold ``L = |multiplier| threshold``: an MLP of one number, with one ReLU layer, gives a
    bias for every head. c (0.1 at first) and the multiplier (1) are learned; the latter stays where
    it is until positions exceed L. Beyond L it matters where a query stands, not the distance only.

    Such an MLP is linear between its ``width`` kinks; here the piece is found and evaluated, which
    is the same function, and spares the hidden layer of every pair.

    Args:
        dims: of the model.
        rngs: where the initial weights come from: uniform up to ``1/sqrt(inputs)``, PyTorch's.
        threshold: what the multiplier multiplies.
        width: of the hidden layer.
        eps: added to the denominator.
        shared: whether all layers share the function (FIRE-S); else each has its own.
    """

    name = "fire"
    per_layer = True
    bidirectional = False
    reference = """@inproceedings{li2024functional,
  title={Functional Interpolation for Relative Positions Improves Long Context Transformers},
  author={Li, Shanda and You, Chong and Guruganesh, Guru and Ainslie, Joshua and
          Ontanon, Santiago and Zaheer, Manzil and Sanghai, Sumit and Yang, Yiming and
          Kumar, Sanjiv and Bhojanapalli, Srinadh},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        threshold: float = 512.0,
        width: int = 32,
        eps: float = 1e-6,
        shared: bool = False,
    ):
        super().__init__(dims, rngs)
        for name, value in (("threshold", threshold), ("width", width), ("eps", eps)):
            if value <= 0:
                raise EncodingError(f"fire({name}={value}): it must be above 0")
        self.threshold, self.eps = threshold, eps
        self.per_layer = not shared

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            def init(key, shape, dtype):
                return jax.random.uniform(key, shape, dtype, -(inputs**-0.5), inputs**-0.5)

            return nnx.Linear(inputs, outputs, kernel_init=init, bias_init=init, rngs=rngs)

        self.hidden, self.out = linear(1, width), linear(width, dims.heads)
        self.c, self.multiplier = (nnx.Param(jnp.float32(value)) for value in (0.1, 1.0))

    def _pieces(self):
        """Give the kinks ``[width]``, and base and slope after n of them, ``[width + 1, H]``."""
        weight, bias = self.hidden.kernel[...][0], self.hidden.bias[...]  # type: ignore[index]
        out = self.out.kernel[...]
        flat = weight == 0
        kinks = jax.lax.stop_gradient(jnp.where(flat, jnp.inf, -bias / jnp.where(flat, 1, weight)))
        rank = jnp.argsort(jnp.argsort(kinks))
        passed = rank < jnp.arange(len(kinks) + 1)[:, None]
        # A unit that rises is active once its kink is passed, one that falls until then.
        active = jnp.where(flat, bias > 0, passed == (weight > 0)).astype(jnp.float32)
        product = functools.partial(jnp.dot, precision=HIGHEST)
        base = product(active, bias[:, None] * out) + self.out.bias[...]  # type: ignore[index]
        return kinks, base, product(active, weight[:, None] * out)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the MLP's value at each pair's share."""
        c = jnp.abs(self.c[...])

        def psi(x):
            return jnp.log(c * x + 1)

        least = jnp.abs(self.multiplier[...] * self.threshold)
        most = jnp.maximum(queries.positions.astype(jnp.float32), least)
        apart = distances(queries.positions, keys.positions)[:, 0]
        share = psi(apart) / (psi(most) + self.eps)[:, :, None]
        kinks, base, slope = self._pieces()
        passed = functools.reduce(jnp.add, [(share > kink).astype(jnp.int32) for kink in kinks])
        base, slope = jnp.split(look_up(jnp.concatenate([base, slope], axis=-1), passed), 2, axis=1)
        return logits + base + slope * over_heads(share, self.dims.heads), carry


class Sandwich(PositionalEncoding):
    """The inner product of two sinusoidal embeddings as a bias (Chi et al., 2023).

    ``(sum_m cos(distance 10000^(-2m/w)) - w/2) / (8h/H)``, m = 1..w/2, for head h = 1..H: 0 at
    distance 0 and, but for ripples, ever lower. Nothing is learned. The sum is the product of the
    waves at either position, which all layers share.

    Args:
        dims: of the model.
        rngs: unused.
        width: w, of the sinusoidal embedding, whatever that of the model.
    """

    name = "sandwich"
    shift_invariant = "rounding"
    bidirectional = False
    reference = """@inproceedings{chi2023dissecting,
  title={Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis},
  author={Chi, Ta-Chung and Fan, Ting-Han and Rudnicky, Alexander I. and Ramadge, Peter J.},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2023}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, width: int = 128):
        super().__init__(dims, rngs)
        if width < 2 or width % 2:
            raise EncodingError(f"sandwich(width={width}): cosines and sines, so an even number")
        self.width = width

    def prepare(self, positions, streams):
        """Give the waves at each position, ``[#B, n, w]``, cosines and then sines.

        Phases are counted in 2^-32 of a turn, whose multiples by whole numbers an int32 holds
        exactly but for whole turns: so they err no more at position 100,000 than at 1.
        """
        turns = 10_000.0 ** (-2 * np.arange(1, self.width // 2 + 1) / self.width) / (2 * np.pi)
        steps, unit = np.round(turns * 2**32), 2 * np.pi / 2**32
        fractional = not jnp.issubdtype(positions.dtype, jnp.integer)
        whole = jnp.floor(positions).astype(jnp.int32) if fractional else positions
        angle = (whole[..., None] * steps.astype(np.int32)).astype(jnp.float32) * np.float32(unit)
        # What is lost by whole steps, and by whole positions.
        rest = (turns * 2**32 - steps) * unit
        angle += whole.astype(jnp.float32)[..., None] * rest.astype(np.float32)
        if fractional:
            angle += (positions - whole)[..., None] * (2 * np.pi * turns).astype(np.float32)
        return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the product of the waves, less what it is at distance 0."""
        product = jnp.matmul(
            queries.prepared,
            jnp.swapaxes(keys.prepared, 1, 2),
            precision=HIGHEST,
        )
        later = queries.positions[:, :, None] > keys.positions[:, None, :]
        total = jnp.where(later, product - self.width / 2, 0.0)
        heads = self.dims.heads
        weights = jnp.asarray(heads / (8 * np.arange(1, heads + 1)), jnp.float32)
        return logits + by_head(weights) * total[:, None], carry
