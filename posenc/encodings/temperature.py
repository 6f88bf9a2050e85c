"""Parts that multiply logits, or stand in for the softmax, written beside an encoding.

All but one tell nothing of position, and many codebases add them unsaid; in a spec (``rope+logn``)
their gain is not credited to the encoding. Parts of a sum act in order: ``alibi+logn`` scales the
bias too, ``logn+alibi`` does not.

Let B denote the batch, t the query rows of one block, S the keys and H the heads.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding
from posenc.encodings.bias import distances


class LogN(PositionalEncoding):
    """Logits multiplied by ``max(1, ln(p + 1) / ln L)`` at position p (Chiang and Cholak, 2022).

    So that attention stays as sharp beyond L as within it; within L it does nothing.

    Args:
        dims: of the model.
        rngs: unused.
        length: L; the length that the model is built for unless told otherwise.
    """

    name = "logn"
    modifier = True
    reference = """@inproceedings{chiang2022overcoming,
  title={Overcoming a Theoretical Limitation of Self-Attention},
  author={Chiang, David and Cholak, Peter},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2022}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, length: int | None = None):
        super().__init__(dims, rngs)
        self.length = max(dims.context_length, 2) if length is None else length
        if self.length < 2:
            raise EncodingError(f"logn(length={length}): it must be at least 2")

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Multiply each row."""
        place = jnp.maximum(queries.positions.astype(jnp.float32) + 1, 1)
        factor = jnp.maximum(jnp.log(place) / np.float32(math.log(self.length)), 1.0)
        return logits * factor[:, None, :, None], carry


class SSMax(PositionalEncoding):
    """Scalable softmax: logits multiplied by ``s_h ln n``, n the visible keys (Nakanishi, 2025).

    s is learned for every head and layer. Where n is 1 the factor is 0, and the one key has all the
    weight anyway.

    Args:
        dims: of the model.
        rngs: unused.
        init: of s; unless told otherwise 1 over the mean of ``ln n`` within the length that the
            model is built for, so that at first logits are on average what they were.
    """

    name = "ssmax"
    modifier = True
    pointwise = False
    per_layer = True
    shift_invariant = "exact"
    reference = """@article{nakanishi2025scalable,
  title={Scalable-Softmax Is Superior for Attention},
  author={Nakanishi, Ken M.},
  journal={arXiv preprint arXiv:2501.19399},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, init: float | None = None):
        super().__init__(dims, rngs)
        mean = float(np.mean(np.log(np.arange(1, max(dims.context_length, 2) + 1))))
        self.s = nnx.Param(jnp.full((dims.heads,), 1 / mean if init is None else init))

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Multiply each row of each head."""
        seen = jnp.maximum(jnp.sum(visible, axis=-1, keepdims=True), 1).astype(jnp.float32)
        return logits * (self.s[...][None, :, None, None] * jnp.log(seen)), carry


class ScaleInvariant(PositionalEncoding):
    """Scale-invariant attention (Anson, Wang and Aitchison, 2025, equation 16).

    At distance t a logit S becomes ``a S - (a^2 - 1)``, ``a^2 = 1 + 2 ln(t/tau + 1)``. If logits
    are standard normal, the keys between t and 2t then have the same weight together for every t
    far beyond tau, on average; keys much nearer than tau are left alone.

    The paper writes it beside p-RoPE, ``p_rope+scale_invariant``, in models with QK-norm, and found
    it poor beside RoPE at lengths not trained on.

    Args:
        dims: of the model.
        rngs: unused.
        tau: the distance within which little changes; 10 was the best of five powers of ten.
    """

    name = "scale_invariant"
    shift_invariant = "exact"
    bidirectional = False
    reference = """@inproceedings{anson2025scale,
  title={Scale-invariant attention},
  author={Anson, Ben and Wang, Xi and Aitchison, Laurence},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, tau: float = 10.0):
        super().__init__(dims, rngs)
        if tau <= 0:
            raise EncodingError(f"scale_invariant(tau={tau}): it must be above 0")
        self.tau = tau

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Multiply and lower each logit as its distance says."""
        away = distances(queries.positions, keys.positions)
        more = 2 * jnp.log1p(away / np.float32(self.tau))
        return logits * jnp.sqrt(1 + more) - more, carry


class Temperature(PositionalEncoding):
    """Logits multiplied by a constant, ``(slope ln s + 1)^power`` for a context s times longer.

    By default YaRN's (Peng et al., 2024, eq. 21 and 22), without its change of frequencies. DroPE
    (Gelberg et al., 2025, appendix C.2) takes ``power=1`` and a slope tuned on text.

    Args:
        dims: of the model.
        rngs: unused.
        factor: s.
        slope: of the logarithm.
        power: 2 where queries and keys are both multiplied.
    """

    name = "temperature"
    modifier = True
    shift_invariant = "exact"
    reference = """@inproceedings{peng2024yarn,
  title={{YaRN}: Efficient Context Window Extension of Large Language Models},
  author={Peng, Bowen and Quesnelle, Jeffrey and Fan, Honglu and Shippole, Enrico},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        factor: float,
        slope: float = 0.1,
        power: float = 2.0,
    ):
        super().__init__(dims, rngs)
        if factor < 1:
            raise EncodingError(f"temperature(factor={factor}): it must be at least 1")
        self.scale = (slope * math.log(factor) + 1) ** power

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Multiply all alike."""
        return logits * np.float32(self.scale), carry


class Sink(PositionalEncoding):
    """An attention sink: one more logit in every softmax, whose weight goes to nothing.

    Learned for every head and layer, as in gpt-oss (OpenAI, 2025); or fixed at 0 (softmax off by
    one, Miller, 2023). What it takes away, a BOS token would take otherwise (Xiao et al., 2024).

    Args:
        dims: of the model.
        rngs: unused.
        learned: whether the logit is learned, from 0.
    """

    name = "sink"
    modifier = True
    per_layer = True
    shift_invariant = "exact"
    reference = """@article{openai2025gptoss,
  title={gpt-oss-120b and gpt-oss-20b Model Card},
  author={{OpenAI}},
  journal={arXiv preprint arXiv:2508.10925},
  year={2025}
}
@misc{miller2023attention,
  title={Attention Is Off By One},
  author={Miller, Evan},
  howpublished={Blog post},
  year={2023}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, learned: bool = True):
        super().__init__(dims, rngs)
        self.sink = nnx.Param(jnp.zeros(dims.heads)) if learned else None

    def weights(self, logits, visible):
        """Give the softmax over the visible keys and the sink, without the sink's own share."""
        zeros = jnp.zeros(self.dims.heads)
        sink = (zeros if self.sink is None else self.sink[...])[None, :, None, None]
        masked = jnp.where(visible, logits.astype(jnp.float32), -jnp.inf)
        top = jax.lax.stop_gradient(jnp.maximum(jnp.max(masked, -1, keepdims=True), sink))
        unnormalised = jnp.exp(masked - top)
        return unnormalised / (jnp.sum(unnormalised, -1, keepdims=True) + jnp.exp(sink - top))


@jax.custom_jvp
def entmax_threshold(x: Float[Array, "*rows S"]) -> Float[Array, "*rows 1"]:
    """Give the tau of which ``max(x - tau, 0)^2`` adds up to 1 in every row whose largest is 0.

    The square root of that sum is convex in tau and falls, so that Newton's steps for it rise from
    -1, where the largest alone weighs 1, to the solution and stop there: after a dozen at the most,
    of all rows tried, with up to millions of keys. (Sorting them, as Peters et al. do, takes 20
    times longer on a CPU.) A row that stands still is done, whatever the others do.
    """

    def rise(state):
        tau, _ = state
        over = jnp.maximum(x - tau, 0)
        norm = jnp.sqrt(jnp.sum(over**2, axis=-1, keepdims=True))
        total = jnp.sum(over, axis=-1, keepdims=True)
        higher = tau + (norm - 1) * norm / jnp.where(total == 0, 1.0, total)
        return jnp.maximum(higher, tau), higher > tau

    start = jnp.full((*x.shape[:-1], 1), -1.0, x.dtype)
    state = start, jnp.ones_like(start, bool)
    return jax.lax.while_loop(lambda state: jnp.any(state[1]), rise, state)[0]


@entmax_threshold.defjvp
def _entmax_threshold_jvp(primals, tangents):
    """Differentiate the sum, whose value stays 1."""
    (x,), (moved,) = primals, tangents
    tau = entmax_threshold(x)
    over = jnp.maximum(x - tau, 0)
    total = jnp.sum(over, axis=-1, keepdims=True)
    return tau, jnp.sum(over * moved, axis=-1, keepdims=True) / jnp.where(total == 0, 1.0, total)


def entmax15(
    logits: Float[Array, "B H t S"], visible: Bool[Array, "#B 1 t S"]
) -> Float[Array, "B H t S"]:
    """Give the 1.5-entmax of the visible keys (Peters, Niculae and Martins, 2019), in float32.

    That is ``max(z/2 - tau, 0)^2``, tau such that it adds up to 1. A row that sees nothing is zero.
    """
    half = logits.astype(jnp.float32) / 2
    top = jnp.max(jnp.where(visible, half, -jnp.inf), axis=-1, keepdims=True)
    top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
    # None as low as that has any weight.
    x = jnp.where(visible, half - top, -1.0)
    return jnp.maximum(x - entmax_threshold(x), 0) ** 2


class ASEntmax(PositionalEncoding):
    """Adaptive-scalable entmax, sparse instead of softmax (Vasylenko et al., 2026), as released.

    Weights are the 1.5-entmax of the logits, by which keys far enough below the largest have none
    at all. Before that, logits of every row and head are multiplied by
    ``1 + b (ln(n + 1))^g``, n the visible keys, ``b = softplus(x W_b)`` and ``g = 2 tanh(x W_g)``
    of the layer's input x at the query. So a head may grow sharper with the length, or more even.

    Scores are meant: write it before what adds a bias, ``asentmax+alibi``. The released models have
    it on half of the heads, without position, and plain entmax with ALiBi, of slopes 1/h, on the
    others; ``heads(of=[asentmax(adaptive=false), asentmax])+heads(of=[alibi, nope])`` has ALiBi's
    own slopes.

    Args:
        dims: of the model.
        rngs: for the weights.
        adaptive: whether logits are multiplied; otherwise it is plain 1.5-entmax.
    """

    name = "asentmax"
    modifier = True
    pointwise = False
    sparse = True
    shift_invariant = "exact"
    reference = """@inproceedings{vasylenko2026long,
  title={Long-Context Generalization with Sparse Attention},
  author={Vasylenko, Pavlo and Pitorro, Hugo and Martins, Andr{\\'e} F. T. and Treviso, Marcos},
  booktitle={International Conference on Learning Representations},
  year={2026}
}
@inproceedings{peters2019sparse,
  title={Sparse Sequence-to-Sequence Models},
  author={Peters, Ben and Niculae, Vlad and Martins, Andr{\\'e} F. T.},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2019}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, adaptive: bool = True):
        super().__init__(dims, rngs)

        def linear() -> nnx.Linear:
            return nnx.Linear(
                dims.width,
                dims.heads,
                use_bias=False,
                kernel_init=nnx.initializers.normal(0.02),
                dtype=jnp.float32,
                precision=HIGHEST,
                rngs=rngs,
            )

        self.per_layer = adaptive
        self.beta = linear() if adaptive else None
        self.gamma = linear() if adaptive else None

    def features(self, x, positions, segments, state):
        """Give b and g."""
        if self.beta is None or self.gamma is None:
            return None, state
        x = x.astype(jnp.float32)
        return (jax.nn.softplus(self.beta(x)), 2 * jnp.tanh(self.gamma(x))), state

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Multiply each row of each head."""
        if queries.features is None:
            return logits, carry
        beta, gamma = (jnp.swapaxes(own, 1, 2)[..., None] for own in queries.features)
        seen = jnp.maximum(jnp.sum(visible, axis=-1, keepdims=True), 1).astype(jnp.float32)
        return logits * (1 + beta * jnp.log1p(seen) ** gamma), carry

    def weights(self, logits, visible):
        """Give the sparse weights."""
        return entmax15(logits, visible)
