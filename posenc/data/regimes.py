"""How long the pieces are that training windows are cut into, and how far queries look in them.

Let T denote the tokens of a window. A window is always T tokens, so that all regimes see as many; a
piece of it is a sequence of its own: its positions begin at 0, and it sees no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from posenc.encodings.base import EncodingError
from posenc.encodings.options import SpecError, checked, nearest
from posenc.encodings.registry import Part, parse_part

# What draws of pieces are a function of beside their seed: not what those of positions are.
PIECES = 0x70696563
# Queries of a row that distances are counted for.
QUERIES = 256


class Fixed:
    """Every window is one piece: the training length is T."""

    name: ClassVar[str] = "fixed"

    def check(self, length: int) -> None:
        """Raise ``EncodingError`` where windows of ``length`` tokens have no such pieces."""

    def pieces(self, length: int, share: float, rng: np.random.Generator) -> np.ndarray:
        """Give the sizes of pieces that fill a window; what is beyond its end is cut off.

        Args:
            length: T.
            share: how much of the run is done, from 0 to 1.
            rng: what draws.
        """
        return np.array([length])


class _Drawn(Fixed):
    """Pieces of sizes that are drawn until they fill the window."""

    def __init__(self, *, least: int = 1):
        if least < 1:
            raise EncodingError(f"{self.name}(least={least}): it must be at least 1")
        self.least = least

    def check(self, length):
        """Refuse a shortest piece that is no shorter than the window."""
        if self.least >= length:
            raise EncodingError(
                f"{self.name}(least={self.least}): it must be below the training length {length}"
            )

    def _sizes(self, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
        raise NotImplementedError

    def pieces(self, length, share, rng):
        """Draw as many as fill it at the least."""
        return self._sizes(length, -(-length // self.least), rng)


class Uniform(_Drawn):
    """Pieces of sizes drawn uniformly from ``least .. T``.

    Args:
        least: the shortest.
    """

    name = "uniform"

    def _sizes(self, length, count, rng):
        return rng.integers(self.least, length + 1, count)


class LogUniform(_Drawn):
    """Pieces whose sizes' logarithms are drawn uniformly, from ``least .. T``.

    Args:
        least: the shortest.
    """

    name = "log_uniform"

    def _sizes(self, length, count, rng):
        low, high = math.log(self.least), math.log(length + 1)
        return np.floor(np.exp(rng.uniform(low, high, count))).astype(np.int64)


class Ramp(Fixed):
    """Pieces that grow from ``first`` tokens to T over the run, by equal factors.

    Args:
        first: their size at the first step.
    """

    name = "ramp"

    def __init__(self, *, first: int = 16):
        if first < 1:
            raise EncodingError(f"ramp(first={first}): it must be at least 1")
        self.first = first

    def check(self, length):
        """Refuse a ramp that falls."""
        if self.first > length:
            raise EncodingError(
                f"ramp(first={self.first}): it must be at most the training length {length}"
            )

    def pieces(self, length, share, rng):
        """Give equal ones."""
        size = round(self.first * (length / self.first) ** share)
        return np.full(-(-length // size), size)


class Mixture(Fixed):
    """Each window in pieces of one of several sizes, which have given shares of all tokens.

    ``--train-length "64:0.5,256:0.5"`` is ``mixture(lengths=[64, 256], shares=[0.5, 0.5])``.

    Args:
        lengths: the sizes; the longest is T.
        shares: of each; scaled to add up to 1.
    """

    name = "mixture"

    def __init__(self, *, lengths: tuple[int, ...], shares: tuple[float, ...]):
        good = all(n >= 1 for n in lengths) and all(share > 0 for share in shares)
        if not good or len(lengths) != len(shares) or not lengths:
            raise EncodingError(
                f"mixture(lengths={list(lengths)}, shares={list(shares)}): give as many shares "
                "above 0 as lengths of at least 1"
            )
        self.lengths, self.shares = lengths, np.array(shares) / sum(shares)

    def check(self, length):
        """Refuse one whose longest piece is not the window."""
        if max(self.lengths) != length:
            raise EncodingError(
                f"mixture(lengths={list(self.lengths)}): the longest must be the training length, "
                f"{length}"
            )

    def pieces(self, length, share, rng):
        """Draw a size for the whole window."""
        size = self.lengths[rng.choice(len(self.lengths), p=self.shares)]
        return np.full(-(-length // size), size)


REGIMES: dict[str, type[Fixed]] = {
    cls.name: cls for cls in (Fixed, Uniform, LogUniform, Ramp, Mixture)
}


def make_regime(text: str, length: int) -> Fixed:
    """Make a regime from how ``--lengths`` names it, for windows of ``length`` tokens.

    Raises:
        EncodingError: an unknown name or option, or one that does not suit the length.
    """
    part = parse_part(text)
    if part.name not in REGIMES:
        raise SpecError(f"unknown lengths {part.name!r}: {nearest(part.name, REGIMES)}")
    cls = REGIMES[part.name]
    regime = cls(**checked(cls, part.name, dict(part.options)))
    regime.check(length)
    return regime


def read_train_length(text: str | int) -> tuple[int, str]:
    """Give training length and regime of ``64``, or of a mixture such as ``64:0.5,256:0.5``.

    Raises:
        EncodingError: it is neither.
    """
    try:
        if ":" not in str(text):
            return int(text), Fixed.name
        pairs = [pair.split(":") for pair in str(text).split(",")]
        lengths, shares = tuple(int(n) for n, _ in pairs), tuple(float(s) for _, s in pairs)
    except ValueError:
        raise EncodingError(
            f"--train-length {text}: give tokens, such as 64, or lengths with their shares, such "
            "as 64:0.5,256:0.5"
        ) from None
    return max(lengths), str(Part(Mixture.name, (("lengths", lengths), ("shares", shares))))


def cut(segments: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Cut the segments of one window where pieces end; padding stays 0.

    Args:
        segments: ``[T]``, equal neighbours belonging together.
        sizes: of the pieces, in order; together at least T.
    """
    piece = np.searchsorted(np.cumsum(sizes), np.arange(len(segments)), side="right")
    begins = np.diff(segments, prepend=segments[:1]) != 0
    begins |= np.diff(piece, prepend=piece[:1]) != 0
    return np.where(segments == 0, 0, 1 + np.cumsum(begins)).astype(np.int32)


def attended_distances(batches: Iterable[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Give how far the queries of some batches could look: shares of all pairs, by distance.

    Distances are those of positions; a key whose position is higher counts as 0. Of each row, up to
    256 evenly spread queries are counted.

    Args:
        batches: with ``positions`` and ``segments``, ``[B, T]``.
        length: T.

    Returns:
        For 0, 1, 2 to 3, 4 to 7, ...: ``from``, ``to`` and ``share``.
    """
    counts = np.zeros(64, np.int64)
    chosen = np.unique(np.linspace(0, length - 1, min(length, QUERIES)).round().astype(np.int64))
    for batch in batches:
        for positions, segments in zip(batch["positions"], batch["segments"], strict=True):
            for query in chosen:
                if segments[query] == 0:
                    continue
                keys = positions[: query + 1][segments[: query + 1] == segments[query]]
                apart = np.maximum(positions[query].astype(np.int64) - keys, 0)
                bins = np.where(apart == 0, 0, np.floor(np.log2(np.maximum(apart, 1))) + 1)
                counts += np.bincount(bins.astype(np.int64), minlength=64)
    used = np.flatnonzero(counts)
    last = int(used[-1]) if len(used) else 0
    total = max(int(counts.sum()), 1)
    return [
        {
            "from": 0 if n == 0 else 2 ** (n - 1),
            "to": 0 if n == 0 else 2**n - 1,
            "share": int(counts[n]) / total,
        }
        for n in range(last + 1)
    ]
