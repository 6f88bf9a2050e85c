"""Attention that sees the nearest slots only."""

from __future__ import annotations

from flax import nnx

from posenc.encodings.base import Dimensions, EncodingError, PositionalEncoding


class Window(PositionalEncoding):
    """A sliding window (Child et al., 2019; Beltagy et al., 2020): the nearest slots, and sinks.

    A query sees its own slot and the ``size - 1`` before it, and the first ``sinks`` slots of its
    segment (Xiao et al., 2024; positions stay those of the sequence, which is what their code for
    streaming changes). Attention computes no others: time and memory grow with the length.

    Beside an encoding on some layers it makes local ones: ``rope+window(size=256)*3,nope``.

    Args:
        dims: of the model.
        rngs: unused.
        size: how many slots, the query's own among them.
        sinks: how many of the segment's first slots.
    """

    name = "window"
    modifier = True
    shift_invariant = "exact"
    reference = """@article{beltagy2020longformer,
  title={Longformer: The Long-Document Transformer},
  author={Beltagy, Iz and Peters, Matthew E. and Cohan, Arman},
  journal={arXiv preprint arXiv:2004.05150},
  year={2020}
}
@inproceedings{xiao2024efficient,
  title={Efficient Streaming Language Models with Attention Sinks},
  author={Xiao, Guangxuan and Tian, Yuandong and Chen, Beidi and Han, Song and Lewis, Mike},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""

    def __init__(self, dims: Dimensions, rngs: nnx.Rngs, *, size: int, sinks: int = 0):
        super().__init__(dims, rngs)
        if size < 1:
            raise EncodingError(f"window(size={size}): a query sees itself, so at least 1")
        if sinks < 0:
            raise EncodingError(f"window(sinks={sinks}): it must be at least 0")
        self.reach, self.sinks = size - 1, sinks
