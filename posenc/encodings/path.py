"""PaTH: keys transported to their queries by a product of what all tokens between them do.

Let B denote the batch, n the tokens of a side, t the query rows of one block, S the keys, H the
heads and D the head width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from posenc.encodings.base import HIGHEST, Dimensions, EncodingError, PositionalEncoding, Side
from posenc.encodings.convolution import ShortConvolution

# Keys that are taken at once, a power of two: what is done for each chunk grows with its square,
# and there is a step of a loop for each.
CHUNK = 64

einsum = functools.partial(jnp.einsum, precision=HIGHEST)
matmul = functools.partial(jnp.matmul, precision=HIGHEST)


def inverse(matrix: Float[Array, "*n C C"]) -> Float[Array, "*n C C"]:
    """Invert an upper triangular matrix with ones on its diagonal, C a power of two.

    From blocks of one to blocks of twice as many, by a few products of small matrices, where
    solving row by row takes C steps one after another.
    """
    size = matrix.shape[-1]
    fixed = jax.lax.stop_gradient(matrix)
    found = jnp.ones((*matrix.shape[:-1], 1, 1))
    for half in (2**n for n in range(size.bit_length() - 1)):
        count = size // (2 * half)
        blocks = fixed.reshape(*matrix.shape[:-2], count, 2 * half, count, 2 * half)
        blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -matmul(matmul(first, blocks[..., :half, half:]), second)
        upper = jnp.concatenate([first, corner], axis=-1)
        lower = jnp.concatenate([jnp.zeros_like(corner), second], axis=-1)
        found = jnp.concatenate([upper, lower], axis=-2)
    found = found[..., 0, :, :]
    # A step of Newton's method, whose gradient is that of the inverse.
    return 2 * found - matmul(matmul(found, matrix), found)


class PaTH(PositionalEncoding):
    """PaTH attention (Yang et al., 2025, section 2.2).

    A score is ``q_i . H_i H_(i-1) ... H_(j+1) k_j / sqrt(D)``, ``H_l = I - b_l w_l w_l^T``. The
    unit vector w of each head is the layer's input through a map of low rank, a short causal
    convolution and SiLU; b, between 0 and 2, is twice a sigmoid of the input. As released; there,
    too, queries and keys have no norm of their own unless the model gives them one, and ``1e-6`` is
    added to the square of w's length before w is divided by it: at widths below 256, w begins
    shorter than 1 (0.75 at 64).

    A block of rows passes over the keys from the last to the first, a chunk at a time, and never
    forms a product of matrices: within a chunk, what each token takes off the rows is the solution
    of one triangular system (the UT transform), so that memory is linear in S.

    With FoX's gates, ``path+fox`` is the paper's PaTH-FoX. (The released code multiplies the gates
    by ``1/sqrt(D)`` too.)

    Args:
        dims: of the model.
        rngs: for the weights.
        rank: of the map from the layer's input to w.
        conv: how many tokens the convolution reads.
    """

    name = "path"
    pointwise = False
    bidirectional = False
    between = True
    per_layer = True
    shift_invariant = "exact"
    reference = """@inproceedings{yang2025path,
  title={{PaTH} Attention: Position Encoding via Accumulating Householder Transformations},
  author={Yang, Songlin and Shen, Yikang and Wen, Kaiyue and Tan, Shawn and Mishra, Mayank and
          Ren, Liliang and Panda, Rameswar and Kim, Yoon},
  booktitle={Advances in Neural Information Processing Systems},
  year={2025}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, rank: int = 32, conv: int = 3):
        super().__init__(dims, rngs)
        for option, value in (("rank", rank), ("conv", conv)):
            if value < 1:
                raise EncodingError(f"path({option}={value}): it must be at least 1")

        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(
                inputs,
                outputs,
                use_bias=bias,
                kernel_init=nnx.initializers.normal(0.02),
                dtype=jnp.float32,
                precision=HIGHEST,
                rngs=rngs,
            )

        channels = dims.heads * dims.head_width
        self.down = linear(dims.width, rank, bias=False)
        self.up = linear(rank, channels, bias=False)
        self.conv = ShortConvolution(conv, channels, rngs)
        self.beta = linear(dims.width, dims.heads, bias=True)

    def start_state(self, batch):
        """Start the convolution."""
        return self.conv.start(batch)

    def features(self, x, positions, segments, state):
        """Give w and b."""
        x = x.astype(jnp.float32)
        mixed, state = self.conv(self.up(self.down(x)), segments, state)
        w = jax.nn.silu(mixed).reshape(*x.shape[:2], self.dims.heads, self.dims.head_width)
        w = w * jax.lax.rsqrt(jnp.sum(w**2, axis=-1, keepdims=True) + 1e-6)
        return (w, 2 * jax.nn.sigmoid(self.beta(x))), state

    def scores(self, queries: Side, keys: Side, visible):
        """Carry the rows from the last key to the first, past one token after another."""
        width = queries.rotated.shape[-1]
        if width != self.dims.head_width:
            raise EncodingError(
                f"path transports channels as projected, {self.dims.head_width} a head, and here "
                f"are {width}: leave out what widens them"
            )
        size = keys.slots.shape[1]
        chunk = min(CHUNK, 2 ** (size - 1).bit_length())
        count = -(-size // chunk)

        def chunks(leaf: Array, axis: int = 1) -> Array:
            pad = [(0, 0)] * leaf.ndim
            pad[axis] = (0, count * chunk - size)
            shape = (*leaf.shape[:axis], count, chunk, *leaf.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(leaf, pad).reshape(shape), axis, 0)

        w, beta = keys.features
        beta = jnp.where((keys.segments != 0)[..., None], beta, 0.0)
        sides = [chunks(jnp.swapaxes(leaf, 1, 2), axis=2) for leaf in (keys.rotated, w, beta)]
        parts = (*sides, chunks(visible, 3))

        def step(rows, part):
            k, w, beta, seen = part
            past = jnp.triu(einsum("bhcd,bhed->bhce", w, w), 1)
            solve = inverse(jnp.eye(chunk) + beta[..., None] * past) * beta[:, :, None]
            # A row passes the tokens that it sees, none behind it.
            taken = jnp.where(seen, einsum("bhtd,bhcd->bhtc", rows, w), 0.0)
            taken = einsum("bhte,bhce->bhtc", taken, solve)
            k = k.astype(jnp.float32)
            passed = jnp.triu(einsum("bhcd,bhed->bhce", k, w), 1)
            scores = einsum("bhtd,bhcd->bhtc", rows, k) - einsum("bhte,bhce->bhtc", taken, passed)
            return rows - einsum("bhtc,bhcd->bhtd", taken, w), scores

        rows = jnp.swapaxes(queries.rotated, 1, 2).astype(jnp.float32)
        # Kept for the backward pass are the rows at each chunk alone.
        step = jax.checkpoint(step, prevent_cse=False)
        _, scores = jax.lax.scan(step, rows, parts, reverse=True)
        scores = jnp.moveaxis(scores, 0, 3)
        scores = scores.reshape(*scores.shape[:3], count * chunk)[..., :size]
        return scores * queries.x.shape[-1] ** -0.5
