"""The pluggable positional modules: a ground floor that imports nothing else of posenc."""

from posenc.encodings.absolute import LearnedAbsolute, Sinusoidal
from posenc.encodings.base import (
    Dimensions,
    EncodingError,
    PositionalEncoding,
    PositionOutOfRange,
    Side,
    Sum,
)
from posenc.encodings.bias import ALiBi, alibi_slopes
from posenc.encodings.nope import NoPE
from posenc.encodings.registry import (
    REGISTRY,
    Encodings,
    SpecError,
    build,
    find_class,
    format_spec,
    make_sampler,
    parse_part,
    parse_spec,
)
from posenc.encodings.rotary import RoPE
from posenc.encodings.sampling import sequential_positions

__all__ = [
    "REGISTRY",
    "ALiBi",
    "Dimensions",
    "EncodingError",
    "Encodings",
    "LearnedAbsolute",
    "NoPE",
    "PositionOutOfRange",
    "PositionalEncoding",
    "RoPE",
    "Side",
    "Sinusoidal",
    "SpecError",
    "Sum",
    "alibi_slopes",
    "build",
    "find_class",
    "format_spec",
    "make_sampler",
    "parse_part",
    "parse_spec",
    "sequential_positions",
]
