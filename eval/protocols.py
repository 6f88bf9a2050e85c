"""Protocols: which windows are scored, and how the scores become numbers.

A protocol is a plan, windows and the first place scored in each, and a reduction of the negative
log-likelihoods to rows. A window has T places, of which the first may be a BOS token; the token at
place p is predicted from the places before it. Documents are counted without any BOS.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from posenc.data import TokenArray
from posenc.errors import UserError

Bos = Literal["keep", "prepend", "none"]

# Fewer documents than these are noted in table and figure, and warned of.
FEW_DOCUMENTS, VERY_FEW_DOCUMENTS = 50, 10


class Window(NamedTuple):
    """A stretch of a document that is fed to a model.

    Attributes:
        document: which one.
        start: the document's token at the first place that is not BOS.
        length: places, the BOS among them.
        first: the first place that is scored, at least 1; all after it are.
        bos: whether place 0 is a BOS token.
    """

    document: int
    start: int
    length: int
    first: int
    bos: bool

    def tokens(self, document: TokenArray, bos: int) -> np.ndarray:
        """Give the token ids of the window's places."""
        body = np.asarray(document[self.start : self.start + self.length - self.bos])
        return np.concatenate([[bos], body]) if self.bos else body


class Scores(NamedTuple):
    """Negative log-likelihoods of a plan, nats, flat: windows in order, each from ``first`` on."""

    windows: list[Window]
    nll: np.ndarray  # float32

    def by_window(self) -> list[np.ndarray]:
        """Give the scores of each window."""
        return np.split(self.nll, np.cumsum([w.length - w.first for w in self.windows])[:-1])


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all plans of an evaluation share.

    Attributes:
        lengths: the ladder of window lengths T, ascending.
        targets: k, tokens of a block; at most an eighth of the training length, so that every one
            of them has nearly the same context.
        spacing: tokens between the starts of two blocks of a document, at least.
        blocks: of a document, at most.
        tokens_per_document: of each document's beginning, for the non-overlapping windows.
        bos: ``keep`` places a BOS where training did, at a document's beginning, if the run was
            trained so (no window of NLL by context begins there: its places before the block are
            tokens); ``prepend`` places one at the start of every window, where it takes one of the
            places; ``none`` places none at all.
    """

    lengths: tuple[int, ...]
    targets: int
    spacing: int
    blocks: int
    tokens_per_document: int
    bos: Bos


def _kept(settings: Settings, trained_with_bos: bool) -> bool:
    return settings.bos == "keep" and trained_with_bos


class NllByContext:
    """NLL by context, on identical targets: the primary protocol.

    Fixed blocks of k tokens, several a document and spaced apart, in every document that is long
    enough for the longest context; the same blocks for every context c, each scored with exactly c
    places before it: T = c + k. Only the context differs along the curve.
    """

    name = "nll_by_context"

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length, for documents of these sizes in tokens."""
        context = length - settings.targets
        longest = max(settings.lengths) - settings.targets
        prepend = settings.bos == "prepend"
        windows = []
        for document, size in enumerate(sizes):
            room = size - settings.targets - longest  # places where a block may start, less one
            if room < 0:
                continue
            count = min(settings.blocks, 1 + room // settings.spacing)
            for block in range(count):
                start = longest + (block * room // (count - 1) if count > 1 else room // 2)
                windows.append(
                    Window(document, start - context + prepend, length, context, prepend)
                )
        return windows

    def reduce(self, scores: Scores, length: int, settings: Settings) -> list[dict[str, Any]]:
        """Give one row: the mean over all target tokens."""
        return [
            {
                **_mean(scores.nll, scores.windows),
                "context": length - settings.targets,
                "targets": settings.targets,
                "blocks": len(scores.windows),
            }
        ]


class NonOverlapping:
    """Windows that cut each document from its start, every token scored once.

    Consecutive windows share one token, the last of one being the unscored first of the next, so
    that the scored tokens are the same at every length (a document's first token is among them
    only after a BOS). The window at a document's end may be shorter. Most windows start without
    context, so that longer windows lower the loss even of a model that cannot use them.
    """

    name = "non_overlapping"

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length, for documents of these sizes in tokens."""
        windows = []
        for document, size in enumerate(sizes):
            size = min(size, settings.tokens_per_document)
            at = 0 if settings.bos == "prepend" or _kept(settings, trained_with_bos) else 1
            while at < size:
                bos = settings.bos == "prepend" or at == 0
                start = at if bos else at - 1
                places = min(length, size - start + bos)
                windows.append(Window(document, start, places, 1, bos))
                at += places - 1
        return windows

    def reduce(self, scores: Scores, length: int, settings: Settings) -> list[dict[str, Any]]:
        """Give one row: the mean over all scored tokens."""
        return [_mean(scores.nll, scores.windows)]


class PerPosition:
    """The mean by place in the window, over the full windows of ``NonOverlapping``.

    Places are gathered into buckets ``[from, to)``, four to a doubling.
    """

    name = "per_position"

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the full windows of one length."""
        every = NonOverlapping().plan(sizes, length, settings, trained_with_bos)
        return [window for window in every if window.length == length]

    def reduce(self, scores: Scores, length: int, settings: Settings) -> list[dict[str, Any]]:
        """Give one row a bucket."""
        if not scores.windows:
            return []
        by_place = scores.nll.reshape(len(scores.windows), length - 1)
        edges = np.unique(np.round(2 ** (np.arange(4 * np.log2(length) + 1) / 4)).astype(int))
        edges = np.append(edges[edges < length], length)
        rows = []
        for low, high in itertools.pairwise(edges):
            row = _mean(by_place[:, low - 1 : high - 1].ravel(), scores.windows)
            rows.append({**row, "position_from": int(low), "position_to": int(high)})
        return rows


PROTOCOLS = {p.name: p for p in (NllByContext(), NonOverlapping(), PerPosition())}


def _mean(nll: np.ndarray, windows: list[Window]) -> dict[str, Any]:
    """Sum in float64, divide once, and count what was summed."""
    documents = len({window.document for window in windows})
    return {
        "nll": float(np.sum(nll, dtype=np.float64) / nll.size),
        "tokens": int(nll.size),
        "windows": len(windows),
        "documents": documents,
        "notes": ["few documents"] if documents < FEW_DOCUMENTS else [],
    }


def check_ladder(lengths: Sequence[int], targets: int, train_length: int) -> tuple[int, ...]:
    """Give the ladder ascending, each length once.

    Raises:
        UserError: a length leaves no context, or the targets are too many for the training length.
    """
    if not lengths:
        raise UserError("no length to evaluate at: give --lengths, such as 64 128 256")
    if min(lengths) < 1:
        raise UserError(f"length {min(lengths)}: it must be at least 1")
    limit = max(1, train_length // 8)
    if not 1 <= targets <= limit:
        raise UserError(
            f"--targets is {targets}: give 1 to {limit}, an eighth of the training length "
            f"{train_length}, so that every target has nearly the same context"
        )
    short = min(lengths)
    if short <= targets:
        raise UserError(
            f"length {short} leaves no context before {targets} targets: "
            f"give lengths above {targets}, or fewer --targets"
        )
    return tuple(sorted(set(lengths)))
