"""Tapes: endless streams of the rows of a stratum, pass after pass, for plans with explicit weights (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardkit.arrays import Int64s

from .costs import Balance
from .deal import ragged
from .deck import Deck, Hands, Recent, build_deck
from .permutation import Feistel, derive, derive_each
from .population import BaseOrder, Population, RowSet, each_alone, stratum_rows

_HANDS, _SHARED = 1, 4  # purposes of keys derived from the seed
_PIECE = 512  # positions drawn at once when single positions are requested
_PIECES = 8192
_WALK = (
    1 << 21
)  # rows of shared tapes that are kept in windows; a walk over all lanes draws half as many at a time


class Heads(NamedTuple):
    """Rows at the start of tapes: what passes of the parent plan have not drawn."""

    rests: tuple[RowSet, ...]  # rows of each pass, of all strata; empty if tapes begin with a whole pass
    number: Int64s  # int64[strata], the number of each stratum's first pass, for `locate`
    key: int  # key of the first whole pass, at least ``len(rests)``; earlier passes have lower keys


class ByCost(NamedTuple):
    """Arrangement of the rows of a pass by cost."""

    # (lane, strata, passes) → arrangement of the lane's hands of these passes
    of_hands: Callable[[int, Int64s, Int64s], Balance]
    window: Int64s  # int64[strata], rows of a window of a shared tape; 0: as many as a pass
    # (stratum, position on the tape, samples of a window from there on) → the samples in another order
    shared: Callable[[int, int, Int64s], Int64s]


class _Pass(NamedTuple):
    """One pass over strata: over the rows in ``rows``, or over all rows if ``rows`` is None."""

    order: BaseOrder  # base order of the rows
    counts: Int64s  # number of rows of each stratum
    rows: RowSet | None  # rows of the pass; None for all

    def samples(self, numbers: Int64s) -> Int64s:
        return numbers if self.rows is None else self.rows.members(numbers)


def _rest(rows: RowSet, population: Population) -> _Pass:
    left = rows.of(population)
    counts = stratum_rows(left)
    return _Pass(BaseOrder(left, each_alone(counts)), np.array(counts, dtype=np.int64), rows)


class Tapes:
    """Tapes of all strata; strata are numbered as in the population.

    A *handed* stratum has one tape per lane: whole pass j of lane l holds base positions
    [floor((l n + t) / L), floor(((l + 1) n + t) / L)) with t = j n mod L, so that after j passes every lane has drawn
    j n / L of its rows, within one. A *shared* stratum has one tape for all lanes; each pass is a permutation of its
    rows. Passes are counted from the start of the tape and include the rests in the heads, whose base order is cut
    evenly over the lanes.
    """

    def __init__(
        self,
        order: BaseOrder,
        rows: Int64s,
        lanes: int,
        seed: int,
        windows: Int64s,
        shuffle: str,
        heads: Heads | None = None,
        balance: ByCost | None = None,
    ) -> None:
        self._balance = balance
        self.order, self.rows, self.lanes, self.seed = order, rows, lanes, seed
        self.windows, self.shuffle = windows, shuffle
        self.heads = heads or Heads((), np.zeros(len(rows), dtype=np.int64), 0)
        self.rests = len(self.heads.rests)
        # the rests, then the whole passes
        self._kinds = [*(_rest(one, order.population) for one in self.heads.rests), _Pass(order, rows, None)]
        left = np.array([kind.counts for kind in self._kinds[:-1]], dtype=np.int64).reshape(
            self.rests, len(rows)
        )
        lane = np.arange(lanes + 1, dtype=np.int64)[:, None]
        self._cut: Int64s = lane * left[:, None] // lanes  # rows of a rest that each lane draws
        # position on a tape at which each rest begins, then the position of the first whole pass
        self._begin: Int64s = _prefix_sums(np.diff(self._cut, axis=1))  # (rests + 1, lanes, strata)
        self._begin_shared: Int64s = _prefix_sums(left)  # (rests + 1, strata)
        self._decks: Recent[tuple[int, bytes, bytes], Deck] = Recent(4 * lanes)
        self._pieces: Recent[tuple[int, int], Int64s] = Recent(_PIECES)
        self._shared: Recent[tuple[int, int], tuple[Int64s, Int64s]] = Recent(1024)
        least = 1 if balance is None else int(balance.window.min())
        self._windows: Recent[tuple[int, int, int], Int64s] = Recent(_WALK // least + 2 * len(rows))

    def pass_start(self, lane: int | Int64s, strata: Int64s, passes: Int64s) -> Int64s:
        """Return the position on a lane's tape at which a pass starts."""
        whole, part = np.divmod(self.rows[strata], self.lanes)
        number = np.maximum(0, passes - self.rests)
        start: Int64s = number * whole + (lane + number) * part // self.lanes - lane * part // self.lanes
        start += self._begin[np.clip(passes, 0, self.rests), lane, strata]
        return start

    def pass_of(self, lane: int | Int64s, strata: Int64s, position: Int64s) -> Int64s:
        """Return the pass that contains a position of a lane's tape; empty passes are skipped."""
        inside = position - self._begin[-1, lane, strata]
        guess = self.rests + np.maximum(0, inside * self.lanes // np.maximum(1, self.rows[strata]) - 1)
        number: Int64s = np.where(inside >= 0, guess, 0)
        while True:
            behind = self.pass_start(lane, strata, number + 1) <= position
            if not behind.any():
                return number
            number += behind

    def shared_start(self, strata: Int64s, passes: Int64s) -> Int64s:
        """Return the position on shared tapes at which a pass starts."""
        start: Int64s = np.maximum(0, passes - self.rests) * self.rows[strata]
        return start + self._begin_shared[np.clip(passes, 0, self.rests), strata]

    def shared_pass_of(self, strata: Int64s, position: Int64s) -> Int64s:
        """Return the pass that contains a position of shared tapes."""
        inside = position - self._begin_shared[-1, strata]
        early = (self._begin_shared[1:, strata] <= position).sum(axis=0)
        number: Int64s = np.where(inside >= 0, self.rests + inside // np.maximum(1, self.rows[strata]), early)
        return number

    def take(self, lane: int, strata: Int64s, lo: Int64s, hi: Int64s) -> Int64s:
        """Return the sample numbers at [lo, hi) of a lane's tape of each stratum, concatenated; no range is empty."""
        out = np.empty(int((hi - lo).sum()), dtype=np.int64)
        first = np.cumsum(hi - lo) - (hi - lo)  # index in out of each stratum's draws
        lo = lo.copy()
        todo = np.arange(len(strata))
        while len(todo):
            number = self.pass_of(lane, strata[todo], lo[todo])
            for kind in np.unique(np.minimum(number, self.rests)).tolist():
                some = np.minimum(number, self.rests) == kind
                at, passes = todo[some], number[some]
                chosen, begin = strata[at], lo[at]
                start = self.pass_start(lane, chosen, passes)
                end = np.minimum(hi[at], self.pass_start(lane, chosen, passes + 1))
                deck = self._deck(lane, chosen, passes)
                offset = deck.start[:-1][chosen] - start
                lengths = end - begin
                draws = deck.take(begin + offset, end + offset)
                out[ragged(first[at], lengths)] = self._kinds[kind].samples(draws)
                first[at] += lengths
                lo[at] = end
            todo = todo[lo[todo] < hi[todo]]
        return out

    def take_at(self, stratum: int, lanes: Int64s, positions: Int64s) -> Int64s:
        """Return the sample numbers at single positions of a stratum's tapes, elementwise for (lane, position)."""
        one = np.array([stratum])
        return self._pick(stratum, lanes, positions, lambda lane, lo: self.take(lane, one, lo, lo + _PIECE))

    def _pick(
        self, stratum: int, source: Int64s, position: Int64s, make: Callable[[int, Int64s], Int64s]
    ) -> Int64s:
        """Return single positions of streams; ``make`` computes whole pieces, which are cached."""
        out = np.empty(len(position), dtype=np.int64)
        pieces, of = np.unique(source << 48 | position // _PIECE, return_inverse=True)
        for i, piece in enumerate(pieces.tolist()):
            lo = (piece & ((1 << 48) - 1)) * _PIECE
            rows = self._pieces.get(
                (stratum, piece),
                lambda key, lo=lo: make(key[1] >> 48, np.array([lo])),  # type: ignore[misc]
            )
            here = np.flatnonzero(of == i)
            out[here] = rows[position[here] - lo]
        return out

    def hands(self, lane: int, strata: Int64s, passes: Int64s) -> tuple[Int64s, Int64s]:
        """Return the base ranges [lo, hi) that a lane holds in whole passes, counted from the first of them."""
        rows = self.rows[strata]
        turn = passes * (rows % self.lanes) % self.lanes
        return (lane * rows + turn) // self.lanes, ((lane + 1) * rows + turn) // self.lanes

    def holder(self, stratum: int, number: int, base: int) -> int:
        """Return the lane that holds a base position in a whole pass."""
        rows = int(self.rows[stratum])
        turn = number * (rows % self.lanes) % self.lanes
        lane = min(self.lanes - 1, base * self.lanes // rows)
        while (lane * rows + turn) // self.lanes > base:
            lane -= 1
        while ((lane + 1) * rows + turn) // self.lanes <= base:
            lane += 1
        return lane

    def find(self, sample: int, stratum: int, number: int, *, shared: bool) -> tuple[int, int] | None:
        """Return (lane, tape position) of a row in pass ``number`` of the run; the lane is -1 if the tape is shared.

        Return None if these tapes begin after that pass, or if its rest does not contain the row.
        """
        passes, one = number - int(self.heads.number[stratum]), np.array([stratum])
        if passes < 0:
            return None
        index, whole = min(passes, self.rests), sample
        kind = self._kinds[index]
        if kind.rows is not None:
            if sample not in kind.rows:
                return None
            sample = int(kind.rows.ranks(np.array([sample]))[0])
        found = kind.order.find(sample)
        assert found is not None, "every stratum is a group of its own"
        base = found[1]
        if shared:
            if self.shuffle != "none":
                key = derive(self.seed, _SHARED, stratum, passes + self._first_key)
                base = int(Feistel(key, int(kind.counts[stratum])).inverse(np.array([base]))[0])
            if self._balance is not None:
                size = int(self._balance.window[stratum])
                rows_there = self._windows.get((stratum, passes, base // size), self._window)
                base = base // size * size + int(np.flatnonzero(rows_there == whole)[0])
            return -1, int(self.shared_start(one, np.array([passes]))[0]) + base
        if index < self.rests:
            lane = int(np.searchsorted(self._cut[index, :, stratum], base, side="right")) - 1
        else:
            lane = self.holder(stratum, passes - self.rests, base)
        deck = self._deck(lane, one, np.array([passes]))
        inside = deck.place(sample, stratum) - int(deck.start[stratum])
        return lane, int(self.pass_start(lane, one, np.array([passes]))[0]) + inside

    @property
    def _first_key(self) -> int:
        return self.heads.key - self.rests

    def _deck(self, lane: int, strata: Int64s, passes: Int64s) -> Deck:
        """Return a lane's hands of one pass of each stratum: all in the same rest, or all in whole passes."""
        key = (lane, strata.tobytes(), passes.tobytes())
        return self._decks.get(key, lambda _: self._make_deck(lane, strata, passes))

    def _make_deck(self, lane: int, strata: Int64s, passes: Int64s) -> Deck:
        index = min(int(passes[0]), self.rests)
        if index < self.rests:
            lo, hi = self._cut[index, lane, strata], self._cut[index, lane + 1, strata]
        else:
            lo, hi = self.hands(lane, strata, passes - self.rests)
        keys = np.zeros(len(self.rows), dtype=np.uint64)
        of_pass = derive_each(derive(self.seed, _HANDS), passes + self._first_key)
        keys[strata] = derive_each(derive_each(of_pass, np.full(len(strata), lane)), strata)
        order = self._kinds[index].order
        balance = None if self._balance is None else self._balance.of_hands(lane, strata, passes)
        return build_deck(order, Hands(strata, lo, hi, strata, keys, self.windows), self.shuffle, balance)

    def take_shared(self, stratum: int, position: Int64s) -> Int64s:
        """Return the sample numbers at positions of a shared tape; positions may be in any order."""
        if self._balance is not None:
            return self._take_windows(stratum, position, int(self._balance.window[stratum]))
        out = np.empty_like(position)
        kinds = (self._begin_shared[1:, stratum, None] <= position).sum(axis=0)
        for index in np.unique(kinds).tolist():
            here = np.flatnonzero(kinds == index)
            out[here] = self._take_pass(stratum, index, position[here] - self._begin_shared[index, stratum])
        return out

    def _take_windows(self, stratum: int, position: Int64s, size: int) -> Int64s:
        """Return the sample numbers at positions of a shared tape whose windows are arranged by cost."""
        out = np.empty_like(position)
        passes, inside = np.divmod(position, self.rows[stratum])
        windows, of = np.unique(np.stack((passes, inside // size)), axis=1, return_inverse=True)
        for i, (number, window) in enumerate(windows.T.tolist()):
            here = np.flatnonzero(of.ravel() == i)
            rows = self._windows.get((stratum, number, window), self._window)
            out[here] = rows[inside[here] - window * size]
        return out

    def _window(self, key: tuple[int, int, int]) -> Int64s:
        assert self._balance is not None
        stratum, number, window = key
        rows, size = int(self.rows[stratum]), int(self._balance.window[stratum])
        first = number * rows + window * size
        places = np.arange(first, min(first + size, (number + 1) * rows), dtype=np.int64)
        return self._balance.shared(stratum, first, self._take_pass(stratum, 0, places))

    def _take_pass(self, stratum: int, index: int, position: Int64s) -> Int64s:
        kind = self._kinds[index]
        rows = int(kind.counts[stratum])
        passes, base = np.divmod(position, rows)
        if self.shuffle != "none":
            keys = derive_each(derive(self.seed, _SHARED, stratum), passes + index + self._first_key)
            base = Feistel(keys, rows)(base)
        starts, samples = self._shared.get((stratum, index), self._runs)
        run = np.searchsorted(starts, base, side="right") - 1
        return kind.samples(samples[run] + base - starts[run])

    def _runs(self, key: tuple[int, int]) -> tuple[Int64s, Int64s]:
        stratum, index = key
        kind = self._kinds[index]
        pieces = kind.order.pieces(np.array([stratum]), np.array([0]), kind.counts[stratum : stratum + 1])
        return pieces.base, pieces.sample


def _prefix_sums(parts: Int64s) -> Int64s:
    """Return the sums over axis 0 of the parts before each part, and of all parts."""
    return np.cumsum(np.concatenate((np.zeros_like(parts.sum(axis=0))[None], parts)), axis=0)
