"""Protocols: which windows are scored, and how the scores become numbers.

A protocol is a plan, windows and the first place scored in each, and a reduction of the negative
log-likelihoods to rows. A window has T places, of which the first may be a BOS token; the token at
place p is predicted from the places before it. Documents are counted without any BOS.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

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
        foreign: of the places after BOS, how many hold another document's tokens.
        other: that document.
        other_start: its token at the first of these places.
    """

    document: int
    start: int
    length: int
    first: int
    bos: bool
    foreign: int = 0
    other: int = 0
    other_start: int = 0

    def tokens(self, documents: Sequence[TokenArray], bos: int) -> np.ndarray:
        """Give the token ids of the window's places."""
        start, size = self.start + self.foreign, self.length - self.bos - self.foreign
        parts = [
            np.asarray([bos] * self.bos, np.int64),
            documents[self.other][self.other_start : self.other_start + self.foreign],
            documents[self.document][start : start + size],
        ]
        return np.concatenate([np.asarray(part) for part in parts])


class Scores(NamedTuple):
    """Negative log-likelihoods of a plan, nats, flat: windows in order, each from ``first`` on."""

    windows: list[Window]
    nll: np.ndarray  # float32

    def by_window(self) -> list[np.ndarray]:
        """Give the scores of each window."""
        ends = np.cumsum([w.length - w.first for w in self.windows], dtype=np.int64)
        return np.split(self.nll, ends)[:-1]


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
        train_length: L, of the run that is scored.
        stride: tokens that sliding windows advance by; None is no such windows.
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
    train_length: int = 0
    stride: int | None = None


def _kept(settings: Settings, trained_with_bos: bool) -> bool:
    return settings.bos == "keep" and trained_with_bos


class Protocol:
    """A plan and its reduction.

    Attributes:
        name: in rows.
        control: whether it feeds a model what no document holds, or other positions than its
            tokens have, and is asked for by name.
    """

    name: ClassVar[str]
    control: ClassVar[bool] = False

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length, for documents of these sizes in tokens.

        None where the protocol has nothing to say at this length.
        """
        raise NotImplementedError

    def positions(self, length: int, settings: Settings) -> np.ndarray | None:
        """Give the positions of a window's places; None are those that any window has."""
        return None

    def reduce(self, scores: Scores, length: int, settings: Settings) -> list[dict[str, Any]]:
        """Give the rows of one length."""
        raise NotImplementedError


class NllByContext(Protocol):
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
                **mean_of(scores.nll, scores.windows),
                "context": length - settings.targets,
                "targets": settings.targets,
                "blocks": len(scores.windows),
                **by_document(scores),
            }
        ]


class NonOverlapping(Protocol):
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
        return [mean_of(scores.nll, scores.windows)]


class PerPosition(Protocol):
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
            row = mean_of(by_place[:, low - 1 : high - 1].ravel(), scores.windows)
            rows.append({**row, "position_from": int(low), "position_to": int(high)})
        return rows


class Sliding(Protocol):
    """Windows that advance by a stride S, of which only what is new is scored.

    Of a document's first window all tokens but the first are scored, of any later one the last S;
    the last window ends where the document does and scores what is left, with no shorter context
    than the others. Only documents as long as the longest window take part: every window is full,
    and the scored tokens are the same at every length. With S = 1 every token has full context.
    """

    name = "sliding"

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length, for documents of these sizes in tokens."""
        if settings.stride is None:
            return []
        windows = []
        for document, size in enumerate(sizes):
            size = min(size, settings.tokens_per_document)
            if size < max(settings.lengths):
                continue
            kept = _kept(settings, trained_with_bos)
            # Places of the document, a BOS before it being one of them.
            places = size + (kept or settings.bos == "prepend")
            scored = 1
            while scored < places:
                end = min(max(length, scored + settings.stride), places)
                bos = settings.bos == "prepend" or (kept and end == length)
                start = end - length - (kept and not bos)
                windows.append(Window(document, start, length, scored - end + length, bos))
                scored = end
        return windows

    def reduce(self, scores: Scores, length: int, settings: Settings) -> list[dict[str, Any]]:
        """Give one row: the mean over all scored tokens."""
        row = mean_of(scores.nll, scores.windows)
        return [{**row, "stride": settings.stride, **by_document(scores)}]


def by_document(scores: Scores) -> dict[str, list[Any]]:
    """Give the sum and the number of every document's scores: what statistics are made from."""
    sums: dict[int, list[float]] = {}
    for window, nll in zip(scores.windows, scores.by_window(), strict=True):
        own = sums.setdefault(window.document, [0.0, 0])
        own[0] += float(np.sum(nll, dtype=np.float64))
        own[1] += len(nll)
    return {
        "document_index": list(sums),
        "document_nll": [total for total, _ in sums.values()],
        "document_tokens": [int(count) for _, count in sums.values()],
    }


def mean_of(nll: np.ndarray, windows: list[Window]) -> dict[str, Any]:
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
