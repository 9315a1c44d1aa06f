"""Tapes: endless streams of a stratum's rows, pass after pass, for plans with explicit weights (SPEC.md §5)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .base_order import BaseOrder
from .deck import Deck, Hands, build_deck
from .permutation import Feistel, derive, derive_each
from .recent import Recent

__all__ = ["Leftover", "Tapes"]

Numbers = NDArray[np.int64]

_HANDS, _SHARED = 1, 4  # what a key below the seed is for


class Leftover(Protocol):
    """Undrawn rows of a pass: per column (group or stratum) the rests of all lanes' streams, lane after lane.

    Attributes:
        starts: int64[sources + 1, columns], where each lane's rest starts in its column.
    """

    starts: Numbers

    def take(self, columns: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Sample numbers at [lo, hi) of each column, concatenated; no range is empty."""

    def index(self, sample: int) -> tuple[int, int] | None:
        """(column, place in it) of a sample; None where it has been drawn or dropped."""


class Tapes:
    """Streams of all strata; stratum numbers are those of the population.

    A *handed* stratum has one tape per lane: pass j of lane l holds base positions
    [floor((l n + t) / L), floor(((l + 1) n + t) / L)) with t = j n mod L, so that after j passes every lane had
    j n / L rows of it, within one. A *shared* stratum has one tape for all lanes, each pass a permutation of its rows.
    """

    def __init__(
        self,
        order: BaseOrder,
        rows: Numbers,
        lanes: int,
        seed: int,
        windows: Numbers,
        shuffle: str,
        first_pass: int = 0,
        head: Leftover | None = None,
    ) -> None:
        self.first_pass, self.head = first_pass, head
        left = head.starts[-1] if head is not None else np.zeros(len(rows), dtype=np.int64)
        self.left: Numbers = left  # rows of each stratum that come before the first whole pass
        lane = np.arange(lanes + 1, dtype=np.int64)[:, None]
        self._cut: Numbers = lane * left // lanes  # which of them each lane draws
        self.order, self.rows, self.lanes, self.seed = order, rows, lanes, seed
        self.windows, self.shuffle = windows, shuffle
        self._decks: Recent[tuple[int, bytes, bytes], Deck] = Recent(4 * lanes)
        self._heads: Recent[int, Numbers] = Recent(1024)
        self._shared: Recent[int, tuple[Numbers, Numbers]] = Recent(1024)

    def pass_start(self, lane: int, strata: Numbers, passes: Numbers) -> Numbers:
        """Tape position of a lane at which a pass starts."""
        whole, part = np.divmod(self.rows[strata], self.lanes)
        start: Numbers = passes * whole + (lane + passes) * part // self.lanes - lane * part // self.lanes
        return start

    def pass_of(self, lane: int, strata: Numbers, position: Numbers) -> Numbers:
        """The pass in which a lane's tape position lies."""
        number: Numbers = np.maximum(0, position * self.lanes // self.rows[strata] - 1)
        while True:
            behind = self.pass_start(lane, strata, number + 1) <= position
            if not behind.any():
                return number
            number += behind

    def pass_end(self, lane: int, strata: Numbers, position: Numbers) -> Numbers:
        """Tape position at which the pass of ``position`` ends; the same where it is just about to begin."""
        head = self.heads(lane, strata)
        inside = np.maximum(0, position - head)
        number = self.pass_of(lane, strata, inside)
        start = self.pass_start(lane, strata, number)
        end = np.where(start == inside, inside, self.pass_start(lane, strata, number + 1)) + head
        ends: Numbers = np.where(position < head, head, end)
        return ends

    def heads(self, lane: int, strata: Numbers) -> Numbers:
        """Rows of a lane's tapes that come before its first whole pass."""
        rows: Numbers = self._cut[lane + 1, strata] - self._cut[lane, strata]
        return rows

    def shared_end(self, strata: Numbers, position: Numbers) -> Numbers:
        """`pass_end` of shared tapes."""
        rows, head = np.maximum(1, self.rows[strata]), self.left[strata]
        end: Numbers = head + np.maximum(0, -(-(position - head) // rows)) * rows
        return end

    def take(self, lane: int, strata: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Sample numbers of a lane's tapes at positions [lo, hi) of each stratum, concatenated; none empty."""
        if self.head is None:
            return self._take_passes(lane, strata, lo, hi)
        head = self.heads(lane, strata)
        parts: list[Numbers] = [np.empty(0, dtype=np.int64)] * (2 * len(strata))
        early, late = np.flatnonzero(lo < head), np.flatnonzero(hi > head)
        if len(early):
            base, end = self._cut[lane, strata[early]], np.minimum(hi, head)[early]
            taken = self.head.take(strata[early], base + lo[early], base + end)
            for i, part in zip(early.tolist(), np.split(taken, np.cumsum(end - lo[early])[:-1]), strict=True):
                parts[2 * i] = part
        if len(late):
            first, end = np.maximum(lo, head)[late] - head[late], (hi - head)[late]
            taken = self._take_passes(lane, strata[late], first, end)
            for i, part in zip(late.tolist(), np.split(taken, np.cumsum(end - first)[:-1]), strict=True):
                parts[2 * i + 1] = part
        return np.concatenate(parts)

    def _take_passes(self, lane: int, strata: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        out = np.empty(int((hi - lo).sum()), dtype=np.int64)
        first = np.cumsum(hi - lo) - (hi - lo)  # where each stratum's draws go
        lo = lo.copy()
        todo = np.arange(len(strata))
        while len(todo):
            chosen, at = strata[todo], lo[todo]
            number = self.pass_of(lane, chosen, at)
            start = self.pass_start(lane, chosen, number)
            end = np.minimum(hi[todo], self.pass_start(lane, chosen, number + 1))
            deck = self._deck(lane, chosen, number)
            offset = deck.start[:-1][chosen] - start
            draws = deck.take(at + offset, end + offset)
            lengths = end - at
            ends = np.cumsum(lengths)
            out[np.arange(len(draws)) + np.repeat(first[todo] - (ends - lengths), lengths)] = draws
            first[todo] += lengths
            lo[todo] = end
            todo = todo[end < hi[todo]]
        return out

    def hands(self, lane: int, strata: Numbers, passes: Numbers) -> tuple[Numbers, Numbers]:
        """Base ranges [lo, hi) that a lane holds in a pass."""
        rows = self.rows[strata]
        turn = passes * (rows % self.lanes) % self.lanes
        return (lane * rows + turn) // self.lanes, ((lane + 1) * rows + turn) // self.lanes

    def holder(self, stratum: int, number: int, base: int) -> int:
        """The lane that holds a base position in a pass."""
        rows = int(self.rows[stratum])
        turn = number * (rows % self.lanes) % self.lanes
        lane = min(self.lanes - 1, base * self.lanes // rows)
        while (lane * rows + turn) // self.lanes > base:
            lane -= 1
        while ((lane + 1) * rows + turn) // self.lanes <= base:
            lane += 1
        return lane

    def place(self, lane: int, stratum: int, number: int, sample: int) -> int:
        """Tape position of a sample that ``lane`` holds in pass ``number``."""
        one = np.array([stratum])
        deck = self._deck(lane, one, np.array([number]))
        inside = deck.place(sample, stratum) - int(deck.start[stratum])
        return int(self.heads(lane, one)[0] + self.pass_start(lane, one, np.array([number]))[0]) + inside

    def _deck(self, lane: int, strata: Numbers, passes: Numbers) -> Deck:
        key = (lane, strata.tobytes(), passes.tobytes())
        return self._decks.get(key, lambda _: self._make_deck(lane, strata, passes))

    def _make_deck(self, lane: int, strata: Numbers, passes: Numbers) -> Deck:
        lo, hi = self.hands(lane, strata, passes)
        keys = np.zeros(len(self.rows), dtype=np.uint64)
        of_pass = derive_each(derive(self.seed, _HANDS), passes + self.first_pass)
        keys[strata] = derive_each(derive_each(of_pass, np.full(len(strata), lane)), strata)
        return build_deck(self.order, Hands(strata, lo, hi, strata, keys, self.windows), self.shuffle)

    def take_shared(self, stratum: int, position: Numbers) -> Numbers:
        """Sample numbers at positions of a shared tape, in any order."""
        left, rows = int(self.left[stratum]), int(self.rows[stratum])
        if self.head is not None and (position < left).any():
            out = np.empty_like(position)
            early = np.flatnonzero(position < left)
            out[early] = self._heads.get(stratum, self._head_rows)[position[early]]
            late = np.flatnonzero(position >= left)
            out[late] = self.take_shared(stratum, position[late])
            return out
        passes, base = np.divmod(position - left, rows)
        if self.shuffle != "none":
            keys = derive_each(derive(self.seed, _SHARED, stratum), passes + self.first_pass)
            base = Feistel(keys, rows)(base)
        starts, samples = self._shared.get(stratum, self._runs)
        run = np.searchsorted(starts, base, side="right") - 1
        numbers: Numbers = samples[run] + base - starts[run]
        return numbers

    def place_shared(self, stratum: int, number: int, base: int) -> int:
        """Position on a shared tape of a base position in pass ``number``."""
        rows = int(self.rows[stratum])
        if self.shuffle != "none":
            shuffle = Feistel(derive(self.seed, _SHARED, stratum, number + self.first_pass), rows)
            base = int(shuffle.inverse(np.array([base]))[0])
        return int(self.left[stratum]) + number * rows + base

    def place_head(self, sample: int, *, shared: bool) -> tuple[int, int, int] | None:
        """(stratum, lane, tape position) of a sample that comes before the first whole pass; lane -1 if shared."""
        found = self.head.index(sample) if self.head is not None else None
        if found is None:
            return None
        stratum, place = found
        if shared:
            return stratum, -1, place
        lane = int(np.searchsorted(self._cut[:, stratum], place, side="right")) - 1
        return stratum, lane, place - int(self._cut[lane, stratum])

    def _head_rows(self, stratum: int) -> Numbers:
        assert self.head is not None
        return self.head.take(np.array([stratum]), np.array([0]), self.left[stratum : stratum + 1])

    def _runs(self, stratum: int) -> tuple[Numbers, Numbers]:
        pieces = self.order.pieces(np.array([stratum]), np.array([0]), self.rows[stratum : stratum + 1])
        return pieces.base, pieces.sample
