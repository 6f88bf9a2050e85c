"""Tokens to batches by index arithmetic: nothing here has a state to save or lose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grain
import numpy as np

from posenc.data._names import unknown
from posenc.data.corpora import Document
from posenc.data.regimes import PIECES, Fixed, cut
from posenc.data.shards import TokenArray
from posenc.data.splits import Block
from posenc.data.tokens import Tokenizer
from posenc.encodings.sampling import sequential_positions
from posenc.errors import UserError
from posenc.placing import Placer

BOS_RULES = ("document", "none")

Batch = dict[str, Any]


class TokenStream:
    """All documents of a split, one after another, as one array of tokens.

    Attributes:
        tokens: uint16 (int32 where the vocabulary is larger) `[n]`; `np.asarray` reads a slice.
        offsets: int64 `[documents + 1]`: document d is `tokens[offsets[d]:offsets[d + 1]]`.
        regions: int64 `[regions, 2]`, begin and end of what windows may span: everything, or, where
            the split is by block, each block.

    Args:
        documents: a split's documents, in order.
        tokenizer: gives the ids.
        bos: "document" begins each document (or block) with the tokenizer's `bos`; "none" does not.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, bos: str = "document"):
        if bos not in BOS_RULES:
            raise unknown("bos rule", bos, BOS_RULES)
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        head = np.array([tokenizer.bos] if bos == "document" else [], dtype)
        parts: list[np.ndarray] = []
        sizes = [0]
        for document in documents:
            ids = tokenizer.encode(document.text).astype(dtype, copy=False)
            parts += [head, ids]
            sizes.append(len(head) + len(ids))
        self.tokens: TokenArray = np.concatenate(parts) if parts else np.zeros(0, dtype)
        self.offsets = np.cumsum(sizes, dtype=np.int64)
        if any(isinstance(document, Block) for document in documents):
            self.regions = np.stack([self.offsets[:-1], self.offsets[1:]], axis=1)
        else:
            self.regions = np.array([[0, len(self.tokens)]], np.int64)

    @classmethod
    def of_tokens(cls, tokens: TokenArray, offsets: np.ndarray) -> TokenStream:
        """Give a stream of tokens that are there already; windows may span everything.

        Args:
            tokens: integers `[n]`, perhaps mapped from files.
            offsets: int64 `[documents + 1]`, from 0 to n.
        """
        stream = cls.__new__(cls)
        stream.tokens, stream.offsets = tokens, offsets
        stream.regions = np.array([[0, len(tokens)]], np.int64)
        return stream


class Windows:
    """The windows of a stream, random access.

    Window k of a region covers its tokens `[k * length, k * length + length + 1)`: `length` inputs
    and one more, so that every input has a target and every token but a region's first is a target
    once (the rest at a region's end, shorter than a window, is left out).

    Args:
        stream: the tokens.
        length: inputs a window, T.

    Raises:
        UserError: `length` is below 1, or no region holds T + 1 tokens.
    """

    def __init__(self, stream: TokenStream, length: int):
        if length < 1:
            raise UserError(f"window length {length} is below 1; give at least 1 token")
        self.stream = stream
        self.length = length
        sizes = stream.regions[:, 1] - stream.regions[:, 0]
        self._first = np.cumsum([0, *np.maximum(sizes - 1, 0) // length])
        if not len(self):
            many = len(sizes) > 1
            what = f"none of its {len(sizes)} blocks has more than" if many else "it has"
            raise UserError(
                f"the split is too short for one window of {length} tokens: {what} "
                f"{sizes.max(initial=0)} tokens and {length + 1} are needed; "
                "give more text or a shorter length"
            )

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Give a window: `tokens` and `segments`, int32 `[T + 1]`; segments count from 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        region = int(np.searchsorted(self._first, index, side="right")) - 1
        start = self.stream.regions[region, 0] + (index - self._first[region]) * self.length
        stop = start + self.length + 1
        document = np.searchsorted(self.stream.offsets, np.arange(start, stop), side="right")
        # Counting the changes numbers segments 1, 2, 3 even where an empty document lies between.
        segments = 1 + np.cumsum(np.diff(document, prepend=document[:1]) != 0)
        return {
            "tokens": np.array(self.stream.tokens[start:stop], np.int32),
            "segments": segments.astype(np.int32),
        }


class Rows(Windows):
    """Windows that begin with their document or go on in it, and end with it: padded, not packed.

    Window k of a document covers its tokens `[k * length, k * length + length + 1)`, as far as
    there are any; what is lacking is padding, of token and segment 0.

    Args:
        stream: the tokens.
        length: inputs a window, T.

    Raises:
        UserError: `length` is below 1, or no document holds 2 tokens.
    """

    def __init__(self, stream: TokenStream, length: int):
        if length < 1:
            raise UserError(f"window length {length} is below 1; give at least 1 token")
        self.stream, self.length = stream, length
        sizes = np.diff(stream.offsets)
        self._first = np.cumsum([0, *-(-np.maximum(sizes - 1, 0) // length)])
        if not len(self):
            raise UserError("no document of the split has 2 tokens: give more text")

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Give a window: `tokens` and `segments`, int32 `[T + 1]`; segment 1, and 0 for padding."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        document = int(np.searchsorted(self._first, index, side="right")) - 1
        low, end = self.stream.offsets[document : document + 2]
        low += (index - self._first[document]) * self.length
        some = np.asarray(self.stream.tokens[low : min(low + self.length + 1, end)])
        tokens = np.zeros(self.length + 1, np.int32)
        segments = np.zeros(self.length + 1, np.int32)
        tokens[: len(some)], segments[: len(some)] = some, 1
        return {"tokens": tokens, "segments": segments}


class Unmasked(Windows):
    """Windows whose documents see each other: one segment each, whatever lies in them."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Give a window: `tokens` and `segments`, int32 `[T + 1]`; all of segment 1."""
        window = super().__getitem__(index)
        return {**window, "segments": np.ones_like(window["segments"])}


# How documents share windows.
PACKINGS: dict[str, type[Windows]] = {"masked": Windows, "unmasked": Unmasked, "none": Rows}


def make_batch(windows: Iterable[dict[str, np.ndarray]]) -> Batch:
    """Stack windows into a batch.

    Returns:
        `inputs`, `targets`, `positions`, `segments`, int32 `[B, T]`, and `mask`, bool `[B, T]`.
        Positions count from 0 where a segment begins in the window; segments count from 1; `mask`
        is true where the target lies in the input's own segment.
    """
    rows = list(windows)
    tokens = np.stack([row["tokens"] for row in rows])
    segments = np.stack([row["segments"] for row in rows])
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": sequential_positions(segments[:, :-1]),
        "segments": segments[:, :-1],
        "mask": (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] != 0),
    }


class Batches:
    """Training batches, a pure function of (seed, step).

    Row r of step s is place `s * batch_size + r` of an endless order in which every epoch is a
    fresh permutation of the windows; a process reads its contiguous rows of it. Nothing depends on
    what was read before, nor on how many processes read.

    Args:
        windows: what to draw from.
        batch_size: rows of the global batch, over all processes.
        seed: 0 <= seed < 2**32.
        process_index: which process this is.
        process_count: how many there are; must divide `batch_size`.
        placer: what gives positions and streams; positions one after another without one.
        regime: into what pieces windows are cut; into none without one.
        steps: of the whole run, which a regime may spread over.
    """

    def __init__(
        self,
        windows: Windows,
        batch_size: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        placer: Placer | None = None,
        regime: Fixed | None = None,
        steps: int = 1,
    ):
        if process_count < 1 or not 0 <= process_index < process_count:
            raise UserError(f"process {process_index} of {process_count}: give 0 <= index < count")
        if batch_size < 1 or batch_size % process_count:
            near = max(1, round(batch_size / process_count)) * process_count
            raise UserError(
                f"batch size {batch_size} cannot be shared by {process_count} process(es): it must "
                f"be a positive multiple of {process_count}, such as {near}"
            )
        if not 0 <= seed < 2**32:
            raise UserError(f"seed {seed} is outside 0 <= seed < 2**32; give one inside")
        self.batch_size = batch_size
        self._rows = batch_size // process_count
        self._offset = process_index * self._rows
        self._seed, self._placer = int(seed), placer
        self._regime, self._steps = regime or Fixed(), steps
        # grain's map datasets are read by index: `shuffle` permutes by arithmetic, and `repeat`
        # after it reseeds the permutation every epoch.
        self._order = grain.MapDataset.source(windows).seed(int(seed)).shuffle().repeat()

    def __getitem__(self, step: int) -> Batch:
        """Give this process's rows of a step's batch; see `make_batch` for the fields."""
        if step < 0:
            # Not an IndexError, which would quietly end a loop.
            raise ValueError(f"step {step} is negative; steps count from 0")
        first = int(step) * self.batch_size + self._offset
        batch = make_batch(self._order[first + row] for row in range(self._rows))
        rows = range(self._offset, self._offset + self._rows)
        if type(self._regime) is not Fixed:
            batch = self._cut(batch, rows, int(step))
        if self._placer is None:
            return batch
        return placed(batch, self._placer, rows, (self._seed, int(step)), training=True)

    def _cut(self, batch: Batch, rows: Sequence[int], step: int) -> Batch:
        # Every token's target is still the one after it, also where a piece ends.
        share = step / max(self._steps - 1, 1)
        length = batch["inputs"].shape[1]
        segments = np.stack(
            [
                cut(own, self._regime.pieces(length, share, _rng(self._seed, step, row)))
                for row, own in zip(rows, batch["segments"], strict=True)
            ]
        )
        return {**batch, "segments": segments, "positions": sequential_positions(segments)}


def _rng(seed: int, step: int, row: int) -> np.random.Generator:
    return np.random.default_rng([seed, step, 1 + row, PIECES])


def placed(
    batch: Batch,
    placer: Placer,
    rows: Sequence[int],
    seed: tuple[int, ...],
    *,
    training: bool,
) -> Batch:
    """Give a batch with a placer's positions, and `streams` where there are any."""
    places = batch["inputs"], batch["segments"]
    positions, streams = placer.place(*places, rows, seed, training=training)
    return {**batch, "positions": positions, **({"streams": streams} if streams else {})}


def fixed_windows(stream: TokenStream, length: int, count: int) -> Batch:
    """Give the same `count` windows, evenly spread, at every call: for validation.

    Args:
        stream: the validation split.
        length: inputs a window; validation uses 1, 2 and 4 times the training length.
        count: how many; all there are where there are fewer.

    Raises:
        UserError: `count` is below 1, or there is no window of this length.
    """
    if count < 1:
        raise UserError(f"{count} validation windows: give at least 1")
    windows = Windows(stream, length)
    count = min(count, len(windows))
    # The middle of each of `count` equal shares: neither end is favoured.
    return make_batch(windows[(2 * k + 1) * len(windows) // (2 * count)] for k in range(count))
