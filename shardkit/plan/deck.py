"""Decks: hands of one pass in drawing order, for one or several lanes (SPEC.md §4).

`WindowDeck` shuffles within windows of blocks; `FullDeck` permutes each hand as a whole, in O(1) per sample. `Recent`
caches decks and cells.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from .costs import Balance
from .deal import ragged
from .permutation import Feistel, derive_each, grouped_order
from .population import BaseOrder, Blocks

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Cache of the last ``limit`` values made; safe to use from many threads without a lock.

    Values must be immutable and cheap enough to be made twice: two threads that miss at the same time both make the
    value, and one of the equal values is kept. Single dict operations are atomic, and the dict is copied before it is
    iterated.
    """

    def __init__(self, limit: int) -> None:
        self._limit = max(1, limit)
        self._values: dict[K, V] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of ``key``; call ``make(key)`` if it is not cached."""
        try:
            return self._values[key]
        except KeyError:
            pass
        value = make(key)
        values = self._values
        values[key] = value
        if len(values) > self._limit:
            for old in list(values)[: len(values) - self._limit]:
                values.pop(old, None)
        return value

    def __contains__(self, key: K) -> bool:
        """Return True if the value of ``key`` is cached."""
        return key in self._values

    def clear(self) -> None:
        """Remove all values."""
        self._values = {}

    def __len__(self) -> int:
        return len(self._values)


_BLOCKS, _WINDOWS, _STAGGER = 0, 1, 2  # purposes of keys derived from a hand's key
SHUFFLES = ("window", "full", "none")
"""Shuffle within windows of blocks, over each whole hand, or not at all (manifest order)."""


class Hands(NamedTuple):
    """Base ranges, shuffle keys and window sizes of hands, for one or several lanes.

    Attributes:
        group, lo, hi: int64[n], ranges [lo, hi) of base positions of a group; a hand may have several.
        hand: int64[n], hand to which each range belongs.
        keys: uint64[hands], one key per hand.
        window: int64[hands], blocks per window.
    """

    group: NDArray[np.int64]
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]
    hand: NDArray[np.int64]
    keys: NDArray[np.uint64]
    window: NDArray[np.int64]


class WindowDeck(msgspec.Struct, frozen=True, eq=False):
    """Hands whose rows are shuffled within windows of blocks.

    Positions count through all hands in drawing order.
    """

    start: NDArray[np.int64]  # int64[hands + 1], position at which each hand starts
    sample: NDArray[np.int64]  # int64[blocks], first sample number of each block, in drawing order
    rows: NDArray[np.int64]  # int64[blocks], rows of each block
    window_row: NDArray[np.int64]  # int64[windows + 1], position at which each window starts
    window_block: NDArray[np.int64]  # int64[windows + 1], block at which each window starts
    window_key: NDArray[np.uint64]  # uint64[windows]; empty if rows are not shuffled
    balance: Balance | None = None  # arrangement of windows by cost, or None

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by the deck."""
        return sum(
            a.nbytes for a in (self.sample, self.rows, self.window_row, self.window_block, self.window_key)
        )

    def windows(
        self, lo: NDArray[np.int64], hi: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and the end window of position ranges [lo, hi); no range may be empty."""
        return (
            np.searchsorted(self.window_row, lo, side="right") - 1,
            np.searchsorted(self.window_row, hi, side="left"),
        )

    def take(self, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample numbers at positions [lo, hi) of each range, concatenated; no range may be empty."""
        first, last = self.windows(lo, hi)
        rows, sizes = self._rows(first, last)
        if len(self.window_key):
            numbers = ragged(first, last - first)
            rows = rows[grouped_order(self.window_key[numbers], sizes)]
            if self.balance is not None:
                hand = np.searchsorted(self.start, self.window_row[numbers], side="right") - 1
                first_draw = self.window_row[numbers] - self.start[hand]
                rows = self.balance.arrange(rows, sizes, hand, first_draw)
        # windows extend beyond the ranges: cut them
        whole = self.window_row[last] - self.window_row[first]
        return rows[ragged(np.cumsum(whole) - whole + lo - self.window_row[first], hi - lo)]

    def place(self, sample: int, hand: int) -> int:
        """Return the position of a sample that the hand contains."""
        first, last = self.windows(self.start[hand : hand + 1], self.start[hand + 1 : hand + 2])
        begin, end = int(self.window_block[first[0]]), int(self.window_block[last[0]])
        inside = (self.sample[begin:end] <= sample) & (sample < self.sample[begin:end] + self.rows[begin:end])
        block = begin + int(np.flatnonzero(inside)[0])
        window = int(np.searchsorted(self.window_block, block, side="right")) - 1
        lo, hi = self.window_row[window : window + 1], self.window_row[window + 1 : window + 2]
        return int(lo[0]) + int(np.flatnonzero(self.take(lo, hi) == sample)[0])

    def _rows(
        self, first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sample numbers of windows [first, last) in block order, and the rows of each window."""
        begin, end = self.window_block[first], self.window_block[last]
        blocks = ragged(begin, end - begin)
        windows = ragged(first, last - first)
        return ragged(self.sample[blocks], self.rows[blocks]), self.window_row[windows + 1] - self.window_row[
            windows
        ]


class FullDeck(msgspec.Struct, frozen=True, eq=False):
    """Hands that are permuted as a whole; each row is computed when it is taken."""

    start: NDArray[np.int64]  # int64[hands + 1], position at which each hand starts
    sample: NDArray[np.int64]  # int64[pieces], first sample number of each run of rows, in base order
    begin: NDArray[np.int64]  # int64[pieces + 1], position of each run before shuffling
    keys: NDArray[np.uint64]  # uint64[hands], one key per hand

    def take(self, lo: NDArray[np.int64], hi: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample numbers at positions [lo, hi) of each range, concatenated; no range may be empty."""
        parts = []
        for a, b in zip(lo.tolist(), hi.tolist(), strict=True):
            hand = int(np.searchsorted(self.start, a, side="right")) - 1
            first, last = int(self.start[hand]), int(self.start[hand + 1])
            shuffle = Feistel(int(self.keys[hand]), last - first)
            parts.append(shuffle(np.arange(a - first, b - first, dtype=np.int64)) + first)
        position = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        piece = np.searchsorted(self.begin, position, side="right") - 1
        return self.sample[piece] + position - self.begin[piece]

    def place(self, sample: int, hand: int) -> int:
        """Return the position of a sample that the hand contains."""
        first, last = int(self.start[hand]), int(self.start[hand + 1])
        begin, end = np.searchsorted(self.begin, [first, last])
        inside = (self.sample[begin:end] <= sample) & (
            sample < self.sample[begin:end] + np.diff(self.begin[begin : end + 1])
        )
        piece = int(begin) + int(np.flatnonzero(inside)[0])
        before = np.array([int(self.begin[piece]) + sample - int(self.sample[piece]) - first])
        return first + int(Feistel(int(self.keys[hand]), last - first).inverse(before)[0])


Deck = WindowDeck | FullDeck
"""Shuffled hands."""


def build_deck(order: BaseOrder, hands: Hands, shuffle: str, balance: Balance | None = None) -> Deck:
    """Cut hands into blocks, permute the blocks, and divide them into windows.

    ``"window"`` permutes the blocks of a hand and takes ``hands.window`` of them at a time. The first window is shorter
    by a keyed amount, so that lanes change windows in different steps. ``"none"`` keeps blocks and rows in base order.
    With ``balance``, windows begin at cell borders and are arranged by cost; a hand of at most one window is not cut.
    """
    if shuffle == "full":
        return _full_deck(order, hands)
    num_hands = len(hands.keys)
    blocks = order.blocks(hands.group, hands.lo, hands.hi, hands.hand, num_hands)
    if shuffle == "window":
        ranks = grouped_order(
            derive_each(hands.keys, np.full(num_hands, _BLOCKS, dtype=np.int64)), blocks.per_hand
        )
        blocks = Blocks(blocks.sample[ranks], blocks.rows[ranks], blocks.per_hand)
    ends = np.cumsum(blocks.per_hand)
    firsts = ends - blocks.per_hand
    stagger = derive_each(hands.keys, np.full(num_hands, _STAGGER, dtype=np.int64)) % hands.window.astype(
        np.uint64
    )
    if (
        balance is not None and balance.parts > 1
    ):  # a hand that fits stays one window, because larger windows balance better
        stagger[blocks.per_hand <= hands.window] = 0
    head = hands.window - stagger.astype(np.int64)  # blocks of the first window: 1 .. window
    num = np.where(blocks.per_hand > 0, 1 + np.maximum(0, -((head - blocks.per_hand) // hands.window)), 0)
    hand = np.repeat(np.arange(num_hands), num)
    place = ragged(np.zeros(num_hands, dtype=np.int64), num)
    begin = firsts[hand] + np.where(place > 0, head[hand] + (place - 1) * hands.window[hand], 0)
    position = np.concatenate(([0], np.cumsum(blocks.rows)))
    window_block = np.append(begin, len(blocks.rows))
    keys = derive_each(hands.keys, np.full(num_hands, _WINDOWS, dtype=np.int64))
    start = np.append(position[firsts], position[-1])
    if balance is not None:
        before, size = position[begin] - start[hand], balance.sizes[hand]
        border = start[hand] + before // size * size
        which = np.flatnonzero(np.diff(border, prepend=-1))  # merges windows of less than a cell
        border = border[which]
        at = np.searchsorted(position, border)
        inside = position[at] != border
        pieces = np.insert(position, at[inside], border[inside])  # blocks, cut at windows that begin inside
        of = np.searchsorted(position, pieces[:-1], side="right") - 1
        border = np.append(border, position[-1])
        return WindowDeck(
            start,
            blocks.sample[of] + pieces[:-1] - position[of],
            np.diff(pieces),
            border,
            np.searchsorted(pieces, border),
            derive_each(keys[hand], place)[which],
            balance,
        )
    return WindowDeck(
        start,
        blocks.sample,
        blocks.rows,
        position[window_block],
        window_block,
        derive_each(keys[hand], place) if shuffle == "window" else np.empty(0, dtype=np.uint64),
    )


def _full_deck(order: BaseOrder, hands: Hands) -> FullDeck:
    pieces = order.pieces(hands.group, hands.lo, hands.hi, hands.hand)
    position = np.concatenate(([0], np.cumsum(pieces.rows)))
    sizes = np.zeros(len(hands.keys), dtype=np.int64)
    np.add.at(sizes, hands.hand, np.maximum(0, hands.hi - hands.lo))
    return FullDeck(np.concatenate(([0], np.cumsum(sizes))), pieces.sample, position, hands.keys)
