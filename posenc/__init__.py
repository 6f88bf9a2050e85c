"""posenc: train transformers that differ only in how they are told where a token stands.

import posenc
model = posenc.Transformer(posenc.preset("tiny"), "rope", context_length=64)
"""

from posenc.encodings import (
    Dimensions,
    PositionalEncoding,
    PositionOutOfRange,
    Side,
    build,
    sequential_positions,
)
from posenc.generate import Sampling, generate
from posenc.placing import token_streams
from posenc.pretrained import load_gpt2, save_gpt2
from posenc.runs import load
from posenc.transformer import (
    PRESETS,
    Transformer,
    TransformerConfig,
    count_parameters,
    preset,
)

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "Dimensions",
    "PositionOutOfRange",
    "PositionalEncoding",
    "Sampling",
    "Side",
    "Transformer",
    "TransformerConfig",
    "build",
    "count_parameters",
    "generate",
    "load",
    "load_gpt2",
    "preset",
    "save_gpt2",
    "sequential_positions",
    "token_streams",
]
