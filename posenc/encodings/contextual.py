"""Encodings made of the attention logits themselves.

Let B denote the batch, t the query rows of one block, S the keys and H the heads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding
from posenc.encodings.running import sums_after


class StickBreaking(PositionalEncoding):
    """Stick-breaking attention (Tan et al., 2025).

    Instead of a softmax: a query breaks off its keys' weights from a stick, the nearest key first,
    and each time the share ``sigmoid(logit)`` of what is left. Weights fall with the number of keys
    in between that want theirs, and tell their order; they add up to 1 at the most, and what is
    left is dropped. The first token, which sees none before it, attends to nothing.

    Args:
        dims: of the model.
        rngs: unused.
        attend_current: whether a query sees itself as well; otherwise only keys before it.
    """

    name = "stick_breaking"
    pointwise = False
    bidirectional = False
    shift_invariant = "exact"
    reference = """@inproceedings{tan2025scaling,
  title={Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study},
  author={Tan, Shawn and Yang, Songlin and Courville, Aaron and Panda, Rameswar and
          Shen, Yikang},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, attend_current: bool = False):
        super().__init__(dims, rngs)
        self.attend_current = attend_current

    def weights(self, logits, visible):
        """Break the stick, in logarithms."""
        if not self.attend_current:
            # The last key that a row sees is itself.
            places = jnp.arange(visible.shape[-1])
            own = jnp.max(jnp.where(visible, places, -1), axis=-1, keepdims=True)
            visible = visible & (places < own)
        logits = jnp.where(visible, logits.astype(jnp.float32), 0.0)
        kept = jnp.where(visible, jax.nn.log_sigmoid(-logits), 0.0)
        log_weights = jax.nn.log_sigmoid(logits) + sums_after(kept)
        return jnp.where(visible, jnp.exp(log_weights), 0.0)


class Selective(PositionalEncoding):
    """Selective attention (Leviathan, Kalman and Matias, 2025).

    A token may mask an earlier one for all queries after it: every head's logit of key j is less by
    the sum of ``max(logit, 0)`` of the first head between j and each token after j and before the
    query. No token masks itself, and none the first token of its segment (the paper's BOS). It has
    no parameters and is written beside an encoding, whose logits it takes: ``rope+selective``.

    In training each block of rows keeps the sums that it started from.

    Args:
        dims: of the model.
        rngs: unused.
    """

    name = "selective"
    pointwise = False
    bidirectional = False
    shift_invariant = "exact"
    reference = """@inproceedings{leviathan2025selective,
  title={Selective Attention Improves Transformer},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={International Conference on Learning Representations},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs):
        super().__init__(dims, rngs)

    def start_state(self, batch):
        """Start without a token before the first."""
        return jnp.zeros((batch,), jnp.int32)

    def features(self, x, positions, segments, state):
        """Say which tokens are the first of their segments; the state is the last one's segment."""
        segments = jnp.broadcast_to(segments, x.shape[:2])
        before = jnp.concatenate([state[:, None], segments[:, :-1]], axis=1)
        return (segments != before) & (segments != 0), segments[:, -1]

    def start_carry(self, batch, slots):
        """Start with no slot masked."""
        return jnp.zeros((batch, slots), jnp.float32)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Subtract how far the tokens before each query mask each key."""
        other = keys.slots[:, None, :] != queries.slots[:, :, None]
        may = visible[:, 0] & other & ~keys.features[:, None, :]
        selected = jnp.where(may, jnp.maximum(logits[:, 0], 0.0), 0.0)
        total = jax.lax.cumsum(selected, axis=1)
        slots = jnp.broadcast_to(keys.slots, (len(carry), keys.slots.shape[1]))
        earlier = jnp.take_along_axis(carry, slots, axis=1)[:, None]
        before = jnp.pad(total[:, :-1], ((0, 0), (1, 0), (0, 0)))
        carry = carry.at[jnp.arange(len(carry))[:, None], slots].add(total[:, -1])
        return logits - (earlier + before)[:, None], carry


class CoPE(PositionalEncoding):
    """Contextual position encoding (Golovneva et al., 2024).

    The distance to key j is a count of gates ``sigmoid(q_i . k / sqrt(D))`` over the keys from j up
    to the query, itself included, and at most ``positions - 1``. The query's product with the
    embedding of that distance, interpolated between whole ones, is added to the logit. The
    embeddings are shared by all heads and start at zero.

    The gates are sigmoids of the scores, so that a rotation beside it turns them too. Beside a
    window with sinks, keys that are not seen are not counted.

    Args:
        dims: of the model.
        rngs: unused.
        positions: how many distances have an embedding.
        scale: whether that product is divided by ``sqrt(D)`` as content is (``ram``, as in the
            released code) or not (``paper``, as in the paper's listing).
    """

    name = "cope"
    pointwise = False
    bidirectional = False
    per_layer = True
    shift_invariant = "exact"
    reference = """@article{golovneva2024contextual,
  title={Contextual Position Encoding: Learning to Count What's Important},
  author={Golovneva, Olga and Wang, Tianlu and Weston, Jason and Sukhbaatar, Sainbayar},
  journal={arXiv preprint arXiv:2405.18719},
  year={2024}
}"""

    def __init__(
        self, dims: Dimensions, rngs: nnx.Rngs, *, positions: int = 64, scale: str = "ram"
    ):
        super().__init__(dims, rngs)
        if positions < 1:
            raise EncodingError(f"cope(positions={positions}): it must be at least 1")
        if scale not in ("ram", "paper"):
            raise EncodingError(f"cope has no scale {scale!r}: ram, paper")
        self.positions = positions
        self.scale = scale
        self.table = nnx.Param(jnp.zeros((dims.head_width, positions)))

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add the product of each query with the embedding at its distance to each key."""
        gates = jnp.where(visible, jax.nn.sigmoid(scores), 0.0)
        distance = jnp.minimum(sums_after(gates) + gates, self.positions - 1)
        products = jnp.einsum(
            "bthd,dp->bhtp",
            queries.x.astype(jnp.float32),
            self.table[...],
            precision=HIGHEST,
        )
        if self.scale == "ram":
            products = products * queries.x.shape[-1] ** -0.5
        below, above = (
            jax.lax.stop_gradient(whole(distance)).astype(jnp.int32)
            for whole in (jnp.floor, jnp.ceil)
        )
        share = distance - below
        low, high = (jnp.take_along_axis(products, at, axis=3) for at in (below, above))
        return logits + (1 - share) * low + share * high, carry


class DAPE(PositionalEncoding):
    """Data-adaptive positional encoding (Zheng et al., 2024, section 3; version 2: 2025).

    To score and bias is added what a small network makes of all heads' scores and biases at once:
    ``a + b + f([a; b])``, f a linear map to ``width``, LeakyReLU, and a linear map to the heads. In
    version 2 both maps are convolutions over three neighbouring keys.

    The bias is that of ``base``, and what stands before it in a sum (``alibi+dape``).

    What a query cannot see is zero before each convolution. The release of version 2 leaves it in
    before the second one (``remask=false``), so that a row changes with the length of the array:
    cached decoding and attention in blocks then differ from one dense pass.

    Args:
        dims: of the model.
        rngs: for the weights.
        base: the encoding whose bias it adapts, with parameters for every layer, if any; none
            unless told otherwise.
        version: 1 or 2.
        width: between the two maps.
        residual: whether the bias itself is added too, beside f of it.
        remask: whether what cannot be seen is zero before version 2's second convolution.
    """

    name = "dape"
    per_layer = True
    bidirectional = False
    reference = """@inproceedings{zheng2024dape,
  title={DAPE: Data-Adaptive Positional Encoding for Length Extrapolation},
  author={Zheng, Chuanyang and Gao, Yihang and Shi, Han and Huang, Minbin and Li, Jingyao and
          Xiong, Jing and Ren, Xiaozhe and Ng, Michael and Jiang, Xin and Li, Zhenguo and Li, Yu},
  booktitle={Advances in Neural Information Processing Systems},
  year={2024}
}
@inproceedings{zheng2025dape,
  title={{DAPE} V2: Process Attention Score as Feature Map for Length Extrapolation},
  author={Zheng, Chuanyang and Gao, Yihang and Shi, Han and Xiong, Jing and Sun, Jiankai and
          Li, Jingyao and Huang, Minbin and Ren, Xiaozhe and Ng, Michael and Jiang, Xin and
          Li, Zhenguo and Li, Yu},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2025}
}"""

    def __init__(
        self,
        dims: Dimensions,
        rngs: nnx.Rngs,
        *,
        base: PositionalEncoding | None = None,
        version: int = 1,
        width: int = 32,
        residual: bool = True,
        remask: bool = True,
    ):
        super().__init__(dims, rngs)
        if version not in (1, 2):
            raise EncodingError(f"dape(version={version}): it is 1 or 2")
        if width < 1:
            raise EncodingError(f"dape(width={width}): it must be at least 1")
        if version == 1 and not remask:
            raise EncodingError("dape(remask=false) is of version 2: version 1 has nothing to mask")
        if base is not None and base.replaces("embed"):
            raise EncodingError(
                f"dape(base={base.name}): it acts on the token embeddings and has no bias; add the "
                f"two, {base.name}+dape"
            )
        self.version, self.residual, self.remask = version, residual, remask
        self._rest_on(PositionalEncoding(dims, rngs) if base is None else base)
        if base is None:
            self.shift_invariant = "exact"
        maps = nnx.Linear if version == 1 else functools.partial(nnx.Conv, kernel_size=3)

        def layer(inputs: int, outputs: int) -> nnx.Module:
            # As torch does: all within 1/sqrt(fan in).
            bound = (inputs * (1 if version == 1 else 3)) ** -0.5
            uniform = functools.partial(jax.random.uniform, minval=-bound, maxval=bound)
            return maps(
                inputs,
                outputs,
                kernel_init=uniform,
                bias_init=uniform,
                dtype=jnp.float32,
                precision=HIGHEST,
                rngs=rngs,
            )

        self.hidden = layer(2 * dims.heads, width)
        self.out = layer(width, dims.heads)

    def _rest_on(self, base: PositionalEncoding) -> None:
        """Take a base, and whatever follows from what it is."""
        self.base = base
        self.shift_invariant = base.shift_invariant
        self.pointwise = self.version == 1 and base.pointwise
        self.between = self.version == 2 or base.between
        self.sparse, self.widens = base.sparse, base.widens
        self.reach, self.sinks = base.reach, base.sinks
        self.max_position, self.extensions = base.max_position, base.extensions

    def replaces(self, hook: str) -> bool:
        """Say whether the base has the hook."""
        return hook == "logits" or self.base.replaces(hook)

    def prepare(self, positions, streams):
        """Prepare the base."""
        return self.base.prepare(positions, streams)

    def start_state(self, batch):
        """Start the base."""
        return self.base.start_state(batch)

    def features(self, x, positions, segments, state):
        """Give the base's features."""
        return self.base.features(x, positions, segments, state)

    def rotate_queries(self, queries):
        """Rotate as the base does."""
        return self.base.rotate_queries(queries)

    def rotate_keys(self, keys):
        """Rotate as the base does."""
        return self.base.rotate_keys(keys)

    def scores(self, queries, keys, visible):
        """Score as the base does."""
        return self.base.scores(queries, keys, visible)

    def start_carry(self, batch, slots):
        """Start the base."""
        return self.base.start_carry(batch, slots)

    def logits(self, logits, scores, queries, keys, visible, carry):
        """Add what the network makes of scores and biases."""
        logits, carry = self.base.logits(logits, scores, queries, keys, visible, carry)
        seen = jnp.moveaxis(visible, 1, -1)
        pairs = jnp.moveaxis(jnp.concatenate([scores, logits - scores], axis=1), 1, -1)
        hidden = jax.nn.leaky_relu(self.hidden(jnp.where(seen, pairs, 0.0)))
        if self.version == 2 and self.remask:
            hidden = jnp.where(seen, hidden, 0.0)
        adapted = jnp.moveaxis(self.out(hidden), -1, 1)
        return (logits if self.residual else scores) + adapted, carry

    def weights(self, logits: Float[Array, "B H t S"], visible: Bool[Array, "#B 1 t S"]):
        """Weigh as the base does."""
        return self.base.weights(logits, visible)

    def mix(self, weights, values, queries, keys):
        """Mix as the base does."""
        return self.base.mix(weights, values, queries, keys)

    def representable(self, positions):
        """Say which positions the base can represent."""
        return self.base.representable(positions)

    def check_positions(self, positions):
        """Raise what the base raises."""
        self.base.check_positions(positions)

    def extended(self, policy: str, length: int, /, **options: Any) -> PositionalEncoding:
        """Give this encoding with its base extended."""
        extended = nnx.clone(self)
        extended._rest_on(self.base.extended(policy, length, **options))
        return extended
