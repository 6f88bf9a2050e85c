"""Slices: the primary protocol's tokens by what they need, since most need little context.

Which tokens a slice has is told by the text or by a file, never by a model that is compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.protocols import Scores, mean_of
from posenc.data import TokenArray
from posenc.errors import UserError


def last_occurrences(document: np.ndarray, n: int) -> np.ndarray:
    """Give for each token how far back the n tokens that end with it last ended.

    Args:
        document: token ids ``[size]``.
        n: of the n-gram; occurrences may overlap.

    Returns:
        int64 ``[size]``; 0 where they occur for the first time.
    """
    size = len(document)
    apart = np.zeros(size, np.int64)
    if size < n:
        return apart
    grams = np.lib.stride_tricks.sliding_window_view(document, n)
    _, which = np.unique(grams, axis=0, return_inverse=True)
    order = np.argsort(which, kind="stable")  # equal ones by place
    same = np.concatenate([[False], which[order][1:] == which[order][:-1]])
    ends = order + n - 1
    apart[ends[same]] = (ends - np.concatenate([[0], ends[:-1]]))[same]
    return apart


def edges_of(train_length: int, longest: int) -> list[int]:
    """Give the borders of buckets of distances: L / 2 and its doublings up to the longest T."""
    edges = [1, max(2, train_length // 2)]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


class Slices:
    """Sorts the target tokens of a test text.

    Args:
        documents: of the test split, in tokens.
        ngram: n, of repeated n-grams; 0 looks for none.
        mask: of tokens that need long context, for all documents one after another; or None.
    """

    def __init__(self, documents: Sequence[TokenArray], ngram: int, mask: np.ndarray | None):
        sizes = [len(document) for document in documents]
        if mask is not None and mask.shape != (sum(sizes),):
            raise UserError(
                f"the mask has shape {mask.shape}, and the test split {sum(sizes)} tokens in "
                f"{len(sizes)} documents: give one value for each of them, in order"
            )
        self._documents, self._ngram = documents, ngram
        self._mask = None if mask is None else np.split(mask, np.cumsum(sizes)[:-1])
        self._sha256 = None if mask is None else hashlib.sha256(mask.tobytes()).hexdigest()
        self._apart: dict[int, np.ndarray] = {}

    def _last(self, document: int) -> np.ndarray:
        if document not in self._apart:
            self._apart[document] = last_occurrences(
                np.asarray(self._documents[document]), self._ngram
            )
        return self._apart[document]

    def rows(self, scores: Scores, edges: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Give a row for each slice of the scored tokens that has any.

        Args:
            scores: of whole blocks.
            edges: of distances, ascending.
        """
        if not scores.windows:
            return
        stops = [w.start + w.length - w.bos for w in scores.windows]
        places = [
            (w.document, slice(stop - w.length + w.first, stop))
            for w, stop in zip(scores.windows, stops, strict=True)
        ]
        owners = np.repeat(np.arange(len(places)), [w.length - w.first for w in scores.windows])
        chosen: list[tuple[dict[str, Any], np.ndarray]] = []
        if self._ngram:
            apart = np.concatenate([self._last(document)[part] for document, part in places])
            grams = {"ngram": self._ngram}
            chosen.append(({"slice": "novel", **grams}, apart == 0))
            for low, high in itertools.pairwise([*edges, None]):
                bounds = {"distance_from": low, "distance_to": high}
                within = (apart >= low) & (apart < (np.inf if high is None else high))
                chosen.append(({"slice": "repeated", **bounds, **grams}, within))
        if self._mask is not None:
            masked = np.concatenate([self._mask[document][part] for document, part in places])
            which = {"mask_sha256": self._sha256}
            chosen.append(({"slice": "mask", **which}, masked))
            chosen.append(({"slice": "outside the mask", **which}, ~masked))
        for words, some in chosen:
            if some.any():
                windows = [scores.windows[n] for n in np.unique(owners[some])]
                row = mean_of(scores.nll[some], windows)
                yield {**row, "ngram": None, **words}


def read_mask(path: Path | None) -> np.ndarray | None:
    """Read a mask, ``.npy`` of booleans.

    Raises:
        UserError: it cannot be read, or is of another type.
    """
    if path is None:
        return None
    try:
        mask = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read the mask {path} ({error}): give a .npy file") from None
    if not isinstance(mask, np.ndarray) or mask.dtype != bool:
        kind = getattr(mask, "dtype", type(mask).__name__)
        raise UserError(f"the mask {path} is of {kind}: give booleans")
    return mask
