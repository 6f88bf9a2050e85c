"""Controls: what a model does with its targets when something else about the window changes.

All score the blocks of ``NllByContext``. L is the training length, T the evaluated one, k the
tokens of a block. What a user would do instead, the last L tokens alone, is ``NllByContext`` at L.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.protocols import NllByContext, Settings, Window


def _longer(length: int, settings: Settings) -> bool:
    return length > settings.train_length


class ForeignPrefix(NllByContext):
    """``T - L`` tokens of another document, then the last L true ones.

    The loss beyond that of the last L tokens alone is the *tax* of mere length; the loss beyond
    that of T true tokens is the *information* that the far context gives. Each block has a document
    of its own before it, the same one at every T, of which a longer T shows an earlier beginning.
    """

    name = "foreign_prefix"
    control = True

    def sources(self, sizes: Sequence[int], settings: Settings) -> list[int]:
        """Give the documents that are long enough to stand before another one's block."""
        room = max(settings.lengths) - settings.train_length
        return [number for number, size in enumerate(sizes) if size >= room]

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length; none where no other document is long enough."""
        if not _longer(length, settings):
            return []
        room = max(settings.lengths) - settings.train_length
        foreign, sources = length - settings.train_length, self.sources(sizes, settings)
        windows = []
        for index, window in enumerate(super().plan(sizes, length, settings, trained_with_bos)):
            others = [number for number in sources if number != window.document]
            if not others:
                return []
            other = others[index % len(others)]
            windows.append(
                window._replace(foreign=foreign, other=other, other_start=room - foreign)
            )
        return windows


class _Positions(NllByContext):
    """True tokens at other positions than theirs."""

    control = True

    def tokens(self, length: int, settings: Settings) -> int:
        """Give the places of a window; 0 where the control says nothing at this length."""
        return settings.train_length if _longer(length, settings) else 0

    def plan(
        self, sizes: Sequence[int], length: int, settings: Settings, trained_with_bos: bool
    ) -> list[Window]:
        """Give the windows of one length."""
        places = self.tokens(length, settings)
        return super().plan(sizes, places, settings, trained_with_bos) if places else []


class IndexProbe(_Positions):
    """The last L tokens, all positions moved by ``T - L``: only the index is new."""

    name = "index_probe"

    def positions(self, length: int, settings: Settings) -> np.ndarray:
        """Give the positions of a window's places."""
        places = settings.train_length
        return np.arange(places) + length - places


class DistanceProbe(_Positions):
    """The last L tokens, with a gap of ``T - L`` positions in their middle.

    As many keys as in training, of which the far half is farther away than ever. Positions behind
    the gap are new as well, which only an encoding notices that is not shift-invariant.
    """

    name = "distance_probe"

    def positions(self, length: int, settings: Settings) -> np.ndarray:
        """Give the positions of a window's places."""
        places = np.arange(settings.train_length)
        return places + (places >= settings.train_length // 2) * (length - settings.train_length)


class KeysProbe(_Positions):
    """The last T tokens within L positions: only the number of keys is new.

    The last ``L - L // 2`` tokens have positions one after another; all before share those that are
    left, evenly, so that positions repeat.
    """

    name = "keys_probe"

    def tokens(self, length: int, settings: Settings) -> int:
        """Give the places of a window; 0 where the control says nothing at this length."""
        return length if _longer(length, settings) else 0

    def positions(self, length: int, settings: Settings) -> np.ndarray:
        """Give the positions of a window's places."""
        low = settings.train_length // 2
        far = length - (settings.train_length - low)
        near = np.arange(low, settings.train_length)
        return np.concatenate([np.arange(far) * low // far, near])


class Aligned(_Positions):
    """T tokens, fewer than L, at the positions that they have at the end of L.

    Blocks then have the same index at every T up to L: what differs is how much they see.
    """

    name = "aligned"

    def tokens(self, length: int, settings: Settings) -> int:
        """Give the places of a window; 0 where the control says nothing at this length."""
        return length if length < settings.train_length else 0

    def positions(self, length: int, settings: Settings) -> np.ndarray:
        """Give the positions of a window's places."""
        return np.arange(length) + settings.train_length - length


CONTROLS = {
    control.name: control
    for control in (ForeignPrefix(), IndexProbe(), DistanceProbe(), KeysProbe(), Aligned())
}
