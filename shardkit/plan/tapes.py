"""Tapes: endless streams of a stratum's rows, pass after pass, for plans with explicit weights (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .deal import ragged
from .deck import Deck, Hands, Recent, build_deck
from .permutation import Feistel, derive, derive_each
from .population import BaseOrder

Numbers = NDArray[np.int64]

_HANDS, _SHARED = 1, 4  # what a key below the seed is for
_PIECE = 512  # positions that are drawn together where single ones are asked for
_PIECES = 8192


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


class Heads:
    """What tapes begin with: rests of passes of an earlier plan, one after the other.

    Args:
        rests: of the passes, by stratum; none where whole passes come from the start.
        number: int64[strata], the number of each stratum's first pass, for `locate`.
        key: under which the first whole pass is shuffled; those before it had lower ones.
    """

    def __init__(self, rests: Sequence[Leftover], number: Numbers, key: int) -> None:
        self.rests, self.number, self.key = tuple(rests), number, key


class Tapes:
    """Streams of all strata; stratum numbers are those of the population.

    A *handed* stratum has one tape per lane: whole pass j of lane l holds base positions
    [floor((l n + t) / L), floor(((l + 1) n + t) / L)) with t = j n mod L, so that after j passes every lane had
    j n / L rows of it, within one. A *shared* stratum has one tape for all lanes, each pass a permutation of its rows.
    Passes are counted from the tape's start, the rests of heads among them; each is cut evenly over the lanes.
    """

    def __init__(
        self,
        order: BaseOrder,
        rows: Numbers,
        lanes: int,
        seed: int,
        windows: Numbers,
        shuffle: str,
        heads: Heads | None = None,
    ) -> None:
        self.order, self.rows, self.lanes, self.seed = order, rows, lanes, seed
        self.windows, self.shuffle = windows, shuffle
        self.heads = heads or Heads((), np.zeros(len(rows), dtype=np.int64), 0)
        self.rests = len(self.heads.rests)
        left = np.zeros((self.rests, len(rows)), dtype=np.int64)
        for i, rest in enumerate(self.heads.rests):
            left[i] = rest.starts[-1]
        lane = np.arange(lanes + 1, dtype=np.int64)[:, None]
        self._left = left
        self._cut: Numbers = lane * left[:, None] // lanes  # which rows of a rest each lane draws
        # where each rest begins on a tape, and behind the last the whole passes
        self._begin: Numbers = _summed(np.diff(self._cut, axis=1))  # (rests + 1, lanes, strata)
        self._begin_shared: Numbers = _summed(left)  # (rests + 1, strata)
        self._decks: Recent[tuple[int, bytes, bytes], Deck] = Recent(4 * lanes)
        self._pieces: Recent[tuple[int, int], Numbers] = Recent(_PIECES)
        self._shared: Recent[int, tuple[Numbers, Numbers]] = Recent(1024)

    def pass_start(self, lane: int | Numbers, strata: Numbers, passes: Numbers) -> Numbers:
        """Tape position of a lane at which a pass starts."""
        whole, part = np.divmod(self.rows[strata], self.lanes)
        number = np.maximum(0, passes - self.rests)
        start: Numbers = number * whole + (lane + number) * part // self.lanes - lane * part // self.lanes
        start += self._begin[np.clip(passes, 0, self.rests), lane, strata]
        return start

    def pass_of(self, lane: int | Numbers, strata: Numbers, position: Numbers) -> Numbers:
        """The pass in which a lane's tape position lies; where passes are empty, the one behind them."""
        inside = position - self._begin[-1, lane, strata]
        guess = self.rests + np.maximum(0, inside * self.lanes // np.maximum(1, self.rows[strata]) - 1)
        number: Numbers = np.where(inside >= 0, guess, 0)
        while True:
            behind = self.pass_start(lane, strata, number + 1) <= position
            if not behind.any():
                return number
            number += behind

    def shared_start(self, strata: Numbers, passes: Numbers) -> Numbers:
        """`pass_start` of shared tapes."""
        start: Numbers = np.maximum(0, passes - self.rests) * self.rows[strata]
        return start + self._begin_shared[np.clip(passes, 0, self.rests), strata]

    def shared_pass_of(self, strata: Numbers, position: Numbers) -> Numbers:
        """`pass_of` of shared tapes."""
        inside = position - self._begin_shared[-1, strata]
        early = (self._begin_shared[1:, strata] <= position).sum(axis=0)
        number: Numbers = np.where(
            inside >= 0, self.rests + inside // np.maximum(1, self.rows[strata]), early
        )
        return number

    def take(self, lane: int, strata: Numbers, lo: Numbers, hi: Numbers) -> Numbers:
        """Sample numbers of a lane's tapes at positions [lo, hi) of each stratum, concatenated; none empty."""
        out = np.empty(int((hi - lo).sum()), dtype=np.int64)
        first = np.cumsum(hi - lo) - (hi - lo)  # where each stratum's draws go
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
                if kind < self.rests:
                    offset = self._cut[kind, lane, chosen] - start
                    draws = self.heads.rests[kind].take(chosen, begin + offset, end + offset)
                else:
                    deck = self._deck(lane, chosen, passes - self.rests)
                    offset = deck.start[:-1][chosen] - start
                    draws = deck.take(begin + offset, end + offset)
                lengths = end - begin
                out[ragged(first[at], lengths)] = draws
                first[at] += lengths
                lo[at] = end
            todo = todo[lo[todo] < hi[todo]]
        return out

    def take_at(self, stratum: int, lanes: Numbers, positions: Numbers) -> Numbers:
        """Sample numbers at single positions of a stratum's tapes, each of some lane."""
        one = np.array([stratum])
        return self._picked(stratum, lanes, positions, lambda lane, lo: self.take(lane, one, lo, lo + _PIECE))

    def _picked(
        self, stratum: int, source: Numbers, position: Numbers, make: Callable[[int, Numbers], Numbers]
    ) -> Numbers:
        """Single positions of streams by pieces of them, which are made as a whole and kept."""
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

    def hands(self, lane: int, strata: Numbers, passes: Numbers) -> tuple[Numbers, Numbers]:
        """Base ranges [lo, hi) that a lane holds in a whole pass."""
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

    def find(
        self, sample: int, stratum: int, base: int, number: int, *, shared: bool
    ) -> tuple[int, int] | None:
        """(lane, tape position) of a row in pass ``number``, counted from the run's first; lane -1 if shared.

        None where these tapes begin behind that pass, or its rest does not hold the row.
        """
        passes, one = number - int(self.heads.number[stratum]), np.array([stratum])
        if passes < 0:
            return None
        if passes < self.rests:
            found = self.heads.rests[passes].index(sample)
            if found is None:
                return None
            if shared:
                return -1, int(self._begin_shared[passes, stratum]) + found[1]
            cut = self._cut[passes, :, stratum]
            lane = int(np.searchsorted(cut, found[1], side="right")) - 1
            return lane, int(self._begin[passes, lane, stratum]) + found[1] - int(cut[lane])
        whole = passes - self.rests
        if shared:
            if self.shuffle != "none":
                shuffle = Feistel(
                    derive(self.seed, _SHARED, stratum, whole + self.heads.key), int(self.rows[stratum])
                )
                base = int(shuffle.inverse(np.array([base]))[0])
            return -1, int(self.shared_start(one, np.array([passes]))[0]) + base
        lane = self.holder(stratum, whole, base)
        deck = self._deck(lane, one, np.array([whole]))
        inside = deck.place(sample, stratum) - int(deck.start[stratum])
        return lane, int(self.pass_start(lane, one, np.array([passes]))[0]) + inside

    def _deck(self, lane: int, strata: Numbers, passes: Numbers) -> Deck:
        key = (lane, strata.tobytes(), passes.tobytes())
        return self._decks.get(key, lambda _: self._make_deck(lane, strata, passes))

    def _make_deck(self, lane: int, strata: Numbers, passes: Numbers) -> Deck:
        lo, hi = self.hands(lane, strata, passes)
        keys = np.zeros(len(self.rows), dtype=np.uint64)
        of_pass = derive_each(derive(self.seed, _HANDS), passes + self.heads.key)
        keys[strata] = derive_each(derive_each(of_pass, np.full(len(strata), lane)), strata)
        return build_deck(self.order, Hands(strata, lo, hi, strata, keys, self.windows), self.shuffle)

    def take_shared(self, stratum: int, position: Numbers) -> Numbers:
        """Sample numbers at positions of a shared tape, in any order."""
        out = np.empty_like(position)
        kind = (self._begin_shared[1:, stratum, None] <= position).sum(axis=0)
        for rest in np.unique(kind).tolist():
            here = np.flatnonzero(kind == rest)
            inside = position[here] - self._begin_shared[rest, stratum]
            if rest < self.rests:
                out[here] = self._take_rest(stratum, rest, inside)
            else:
                out[here] = self._take_shared_passes(stratum, inside)
        return out

    def _take_rest(self, stratum: int, rest: int, position: Numbers) -> Numbers:
        one, end = np.array([stratum]), self._left[rest, stratum]
        take = self.heads.rests[rest].take
        return self._picked(
            stratum, np.full_like(position, rest), position,
            lambda _, lo: take(one, lo, np.minimum(end, lo + _PIECE)),
        )  # fmt: skip

    def _take_shared_passes(self, stratum: int, position: Numbers) -> Numbers:
        rows = int(self.rows[stratum])
        passes, base = np.divmod(position, rows)
        if self.shuffle != "none":
            keys = derive_each(derive(self.seed, _SHARED, stratum), passes + self.heads.key)
            base = Feistel(keys, rows)(base)
        starts, samples = self._shared.get(stratum, self._runs)
        run = np.searchsorted(starts, base, side="right") - 1
        numbers: Numbers = samples[run] + base - starts[run]
        return numbers

    def _runs(self, stratum: int) -> tuple[Numbers, Numbers]:
        pieces = self.order.pieces(np.array([stratum]), np.array([0]), self.rows[stratum : stratum + 1])
        return pieces.base, pieces.sample


def _summed(parts: Numbers) -> Numbers:
    """Sums of the parts before each, and of all."""
    return np.cumsum(np.concatenate((np.zeros_like(parts.sum(axis=0))[None], parts)), axis=0)
