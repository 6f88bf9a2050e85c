"""Which positions the tokens of a window get: one after another, or drawn.

Let B denote the windows of a batch, T the slots of a window and N the layers. Samplers work on the
host, before a batch reaches the model; what they draw is a function of the generator alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from posenc.encodings.base import EncodingError

# The stream that holds positions of every layer's own, [B, T, N]; without it all layers share one.
LAYER_POSITIONS = "layer_positions"

# What draws of positions are a function of beside their seed: not what those of streams are.
PLACES = 0x706C6163


def sequential_positions(segments: np.ndarray) -> np.ndarray:
    """Count from 0 at the first slot of each segment.

    Args:
        segments: integers ``[..., T]``; equal neighbours belong together, 0 is padding.

    Returns:
        int32 ``[..., T]``; padding gets 0.
    """
    segments = np.asarray(segments)
    places = np.broadcast_to(np.arange(segments.shape[-1], dtype=np.int32), segments.shape)
    begins = np.ones(segments.shape, bool)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    start = np.maximum.accumulate(np.where(begins, places, 0), axis=-1)
    return np.where(segments == 0, 0, places - start).astype(np.int32)


class Sampler:
    """A way to give positions to the tokens of windows, in training and in evaluation.

    Attributes:
        name: how ``--positions`` calls it.
        max_position: positions lie below it; None is no limit but the number of tokens.
        per: ``example``: each segment draws its own; ``batch``: in training, all segments of a
            batch draw alike.
        layers: ``shared``: one draw for all layers; ``each``: a draw of its own for every layer.
        evaluation: ``sequential``, ``resample`` (drawn as in training) or ``even`` (spread evenly
            over all positions).
        drawn: whether training draws at all.
        reference: a BibTeX entry.
    """

    name: ClassVar[str] = "sampler"
    reference: ClassVar[str] = ""
    drawn: ClassVar[bool] = True

    max_position: int | None = None
    per: str = "example"
    layers: str = "shared"
    evaluation: str = "sequential"

    def _choose(self, **choices: tuple[str, tuple[str, ...]]) -> None:
        for option, (value, known) in choices.items():
            if value not in known:
                raise EncodingError(f"{self.name} has no {option} {value!r}: {', '.join(known)}")
            setattr(self, option, value)

    def limit(self, tokens: int) -> int:
        """Give what the positions of a segment of so many tokens lie below.

        Raises:
            EncodingError: the segment has more tokens than there are positions.
        """
        if self.max_position is not None and tokens > self.max_position:
            raise EncodingError(
                f"{tokens} tokens do not find {tokens} positions below {self.max_position}: give "
                f"{self.name}(max_position=...) at least as many, or a shorter length"
            )
        return tokens if self.max_position is None else self.max_position

    def draw(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Draw the positions of one segment, integers ``[tokens]``."""
        return np.arange(tokens)

    def spread(self, tokens: int) -> np.ndarray:
        """Give the positions of one segment that lie evenly, integers ``[tokens]``."""
        # Distinct, as there are no fewer positions than tokens.
        return np.round(np.linspace(0, self.limit(tokens) - 1, tokens)).astype(np.int64)

    def extent(self, tokens: int, *, training: bool) -> int:
        """Give what the positions of a window of so many tokens lie below, as ``limit`` does."""
        sequential = not training and self.evaluation == "sequential"
        return tokens if sequential else self.limit(tokens)

    def place(
        self,
        segments: np.ndarray,
        rows: Sequence[int],
        seed: tuple[int, ...],
        layers: int,
        *,
        training: bool,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Give the positions of a batch, and the streams that belong to them.

        Args:
            segments: ``[B, T]``.
            rows: a number for each window, of which its draw is a function (not of the windows
                beside it, which other processes may hold).
            seed: what else the draw is a function of, such as (seed, step).
            layers: N.
            training: or evaluation.

        Returns:
            Positions int32 ``[B, T]``, and no stream, or ``LAYER_POSITIONS`` int32 ``[B, T, N]``
            (the positions are then those of layer 0).
        """
        way = "resample" if training and self.drawn else self.evaluation
        if way == "sequential":
            return sequential_positions(segments), {}
        own = self.layers == "each" and way == "resample"
        placed = np.zeros((*segments.shape, layers if own else 1), np.int32)
        # In evaluation every window has its own draw: one for all of them would be a sample of one.
        alike = self.per == "batch" and training
        for layer in range(placed.shape[-1]):
            for owners, row, out in zip(segments, rows, placed[..., layer], strict=True):
                key = [*seed, layer, 0 if alike else 1 + row, PLACES]
                rng = np.random.default_rng(key)
                for low, high in runs(owners):
                    if alike:
                        rng = np.random.default_rng(key)
                    tokens = high - low
                    drawn = way == "resample"
                    out[low:high] = self.draw(tokens, rng) if drawn else self.spread(tokens)
        return placed[..., 0], {LAYER_POSITIONS: placed} if own else {}


def runs(owners: np.ndarray) -> list[tuple[int, int]]:
    """Give begin and end of every segment of one window, padding left out."""
    borders = np.flatnonzero(np.diff(owners)) + 1
    every = zip([0, *borders], [*borders, len(owners)], strict=True)
    return [(int(low), int(high)) for low, high in every if owners[low] != 0]


class Randomized(Sampler):
    """Distinct positions drawn from ``0 .. max_position - 1`` and sorted (Ruoss et al., 2023).

    The authors draw one set for a whole batch (``per=batch``), one for every layer where the
    encoding acts in attention (``layers=each``), and draw again when they evaluate.

    Args:
        max_position: L_max.
        per: ``example`` or ``batch``.
        layers: ``shared`` or ``each``.
        evaluation: ``resample``, ``even`` or ``sequential``.
    """

    name = "randomized"
    reference = """@inproceedings{ruoss2023randomized,
  title={Randomized Positional Encodings Boost Length Generalization of Transformers},
  author={Ruoss, Anian and Del{\\'e}tang, Gr{\\'e}goire and Genewein, Tim and Grau-Moya, Jordi and
          Csord{\\'a}s, R{\\'o}bert and Bennani, Mehdi and Legg, Shane and Veness, Joel},
  booktitle={Annual Meeting of the Association for Computational Linguistics},
  year={2023}
}"""

    def __init__(
        self,
        *,
        max_position: int = 2048,
        per: str = "example",
        layers: str = "shared",
        evaluation: str = "resample",
    ):
        self.max_position = max_position
        self._choose(
            per=(per, ("example", "batch")),
            layers=(layers, ("shared", "each")),
            evaluation=(evaluation, ("resample", "even", "sequential")),
        )

    def draw(self, tokens, rng):
        """Draw without replacement, and sort."""
        return np.sort(rng.permutation(self.limit(tokens))[:tokens])


class Shifted(Sampler):
    """One offset from ``0 .. max_shift - 1`` added to all positions (SHAPE; Kiyono et al., 2021).

    Evaluation has no offset.

    Args:
        max_shift: K.
        per: ``example`` or ``batch``.
    """

    name = "shape"
    reference = """@inproceedings{kiyono2021shape,
  title={{SHAPE}: Shifted Absolute Position Embedding for Transformers},
  author={Kiyono, Shun and Kobayashi, Sosuke and Suzuki, Jun and Inui, Kentaro},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2021}
}"""

    def __init__(self, *, max_shift: int = 500, per: str = "example"):
        if max_shift < 1:
            raise EncodingError(f"shape(max_shift={max_shift}): it must be at least 1")
        self.max_shift = max_shift
        self._choose(per=(per, ("example", "batch")))

    def limit(self, tokens):
        """Give the end of the longest shift."""
        return tokens + self.max_shift - 1

    def draw(self, tokens, rng):
        """Shift all alike."""
        return rng.integers(self.max_shift) + np.arange(tokens)


class SkipWise(Sampler):
    """Chunks of consecutive positions with skips between them (PoSE; Zhu et al., 2024, section 3).

    A segment is cut into chunks at random; chunk c is moved by ``u_c``, 0 for the first one and
    uniform from ``u_{c-1}`` to what keeps the last position below ``max_position`` for the others.
    So short training windows show all distances of a long one. Evaluation is sequential.

    Args:
        max_position: the target length.
        chunks: into how many a segment is cut, if it has as many tokens.
        per: ``example`` or ``batch``.
    """

    name = "pose"
    reference = """@inproceedings{zhu2024pose,
  title={{PoSE}: Efficient Context Window Extension of {LLMs} via Positional Skip-wise Training},
  author={Zhu, Dawei and Yang, Nan and Wang, Liang and Song, Yifan and Wu, Wenhao and Wei, Furu and
          Li, Sujian},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""

    def __init__(self, *, max_position: int = 2048, chunks: int = 2, per: str = "example"):
        if chunks < 2:
            raise EncodingError(f"pose(chunks={chunks}): it must be at least 2")
        self.max_position, self.chunks = max_position, chunks
        self._choose(per=(per, ("example", "batch")))

    def draw(self, tokens, rng):
        """Cut, and move every chunk at least as far as the one before."""
        room = self.limit(tokens) - tokens
        cuts = np.sort(rng.permutation(np.arange(1, tokens))[: self.chunks - 1])
        positions, moved = np.arange(tokens), 0
        for low, high in itertools.pairwise([*cuts, tokens]):
            moved = int(rng.integers(moved, room + 1))
            positions[low:high] += moved
        return positions


class Sequential(Sampler):
    """Positions one after another from 0."""

    name = "sequential"
    drawn = False

    def __init__(self) -> None:
        pass


SAMPLERS: dict[str, type[Any]] = {
    cls.name: cls for cls in (Sequential, Randomized, Shifted, SkipWise)
}
