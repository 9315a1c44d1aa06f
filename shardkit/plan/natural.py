"""The grid of a plan with natural weights: every selected row at most once per epoch (SPEC.md §2, §3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .costs import BALANCES, ROUND_PARTS, Balance, Costs
from .deal import Deal, assemble, chunk_steps, floor_sum, golden_step, permute_cells
from .deck import Deck, Hands, Recent, build_deck
from .permutation import derive, derive_each
from .population import BaseOrder, Population, RowSet, group_strata, stratum_rows
from .settings import Settings, check_rows

Lanes = tuple[int, ...]
_Key = tuple[int, Lanes, int]  # epoch, lanes, number of a chunk or first step of a part

_LARGE_CHUNK = 1 << 13  # samples
_TOGETHER = 1 << 17  # samples drawn together for several lanes; small enough not to delay a step
_FEW_GROUPS = 32
_REST_ROWS = 1 << 20  # samples of a lane drawn at once in a walk over the rest of an epoch
_HANDS, _CELLS, _DROPS, _CLASSES = 1, 2, 3, 4  # purposes of keys derived from the seed


class Epoch(NamedTuple):
    """Tables of one epoch.

    Attributes:
        deal: sample counts before every step.
        cut: int64[L + 1, groups], start of each lane's hand in the group's base order without the dropped rows.
        drop_at, dropped: int64[groups], start and length of the circular range of base positions that the epoch drops.
    """

    deal: Deal
    cut: NDArray[np.int64]
    drop_at: NDArray[np.int64]
    dropped: NDArray[np.int64]


class _Caches:
    """Caches sized for a walk over all lanes in ``parts`` parts."""

    def __init__(self, parts: int) -> None:
        self.decks: Recent[tuple[int, Lanes], Deck] = Recent(2 * parts)
        self.chunks: Recent[_Key, NDArray[np.int64]] = Recent(3 * parts)
        self.landings: Recent[_Key, NDArray[np.int64]] = Recent(parts)


class NaturalGrid:
    """Grid of all epochs.

    Args:
        population: rows of the plan.
        settings: settings of the plan.
        rows: rows of each stratum; 0 excludes a stratum. All rows by default.
        costs: costs of samples if windows are arranged by cost.

    Raises:
        PlanError: there is no row, or the remainder is dropped and there is no full step.
    """

    def __init__(
        self,
        population: Population,
        settings: Settings,
        rows: Sequence[int] | None = None,
        costs: Costs | None = None,
    ) -> None:
        rows = stratum_rows(population) if rows is None else rows
        check_rows(sum(rows), settings)
        global_batch, lanes = settings.global_batch, settings.lanes
        groups = group_strata(population.strata, rows, rows, global_batch)
        self.population, self.settings, self.groups, self.costs = population, settings, groups, costs
        self.global_batch, self.lanes = global_batch, lanes
        self.seed, self.shuffle = settings.seed, settings.shuffle
        self.cell_size = global_batch // lanes
        self.rows = groups.total
        self.full_steps, self.left = divmod(self.rows, global_batch)
        self.short = settings.remainder == "short" and self.left > 0
        self.steps_per_epoch = self.full_steps + self.short
        self.windows = window_sizes(groups.masses, global_batch, lanes, settings.window_blocks)
        self.order = BaseOrder(population, groups)
        self._golden = golden_step(self.rows)
        self._chunk = chunk_steps(global_batch, lanes, self.full_steps)
        self._epochs: Recent[int, Epoch] = Recent(4)
        # several lanes drawn together cost little more than one, except with many groups
        together = _TOGETHER // (self._chunk * self.cell_size) if len(groups) <= _FEW_GROUPS else 1
        self._together = max(1, min(lanes, together))
        # a separate draw of a part pays only if the chunk has many samples
        is_large = self._chunk * self.cell_size * self._together >= _LARGE_CHUNK
        # with costs a part reads codes: keep it to a window or two
        self._part = max(1, self._chunk // (8 if costs is None else 64)) if is_large else 0
        self._alone, self._joint = _Caches(lanes), _Caches(-(-lanes // self._together))

    def epoch(self, number: int) -> Epoch:
        """Return the tables of one epoch, computed in O(L x groups)."""
        return self._epochs.get(number, self._make_epoch)

    def _make_epoch(self, number: int) -> Epoch:
        groups = self.groups
        dither = 0 if self.short else number * self._golden % self.rows
        deal = Deal(groups.cumulative(), self.global_batch, self.lanes, self.full_steps, dither)
        ends = np.full(self.lanes, self.full_steps, dtype=np.int64)
        hands = deal.lane_prefix(ends, np.arange(self.lanes))
        if self.short:
            hands = hands + deal.short_step(self.left)
        hands = np.diff(hands, axis=1, prepend=0)
        cut = np.concatenate((np.zeros((1, len(groups)), dtype=np.int64), np.cumsum(hands, axis=0)))
        rows = np.array(groups.rows, dtype=np.int64)
        key = derive(self.seed, _DROPS)
        start = derive_each(key, np.arange(len(groups))) % rows.astype(np.uint64)
        before = np.zeros(len(groups), dtype=np.int64) if self.short else self._dropped_before(number)
        return Epoch(deal, cut, (start.astype(np.int64) + before) % rows, rows - cut[-1])

    def _dropped_before(self, number: int) -> NDArray[np.int64]:
        """Return the rows of each group dropped in epochs 0..number-1, modulo its rows: two lattice sums per group."""
        sums, last = [], 0
        steps = floor_sum(number, self.rows, self._golden, 0)
        for cumulative, rows in zip(self.groups.cumulative(), self.groups.rows, strict=True):
            total = steps - floor_sum(number, self.rows, self._golden, -cumulative * self.left)
            sums.append((total - last) % rows)
            last = total
        return np.array(sums, dtype=np.int64)

    def hands(self, number: int, lanes: Lanes) -> Hands:
        """Return the hands of lanes in an epoch: at most two base ranges per hand, around the dropped rows.

        Hand ``i * groups + g`` belongs to lane ``lanes[i]`` and group g.
        """
        epoch, num = self.epoch(number), len(lanes)
        of = np.array(lanes, dtype=np.int64)
        lo, hi = epoch.cut[of], epoch.cut[of + 1]  # (lanes, groups)
        at, gone = epoch.drop_at, epoch.dropped
        rows = np.array(self.groups.rows, dtype=np.int64)
        wraps = np.maximum(0, at + gone - rows)  # dropped rows at the front of the base order
        middle = np.where(
            (wraps > 0) | (gone == 0), rows, at
        )  # positions without dropped rows, from here on after the dropped range
        skip = np.where(wraps > 0, wraps, 0)
        group = np.tile(np.arange(len(rows), dtype=np.int64), num)
        hand = np.arange(len(group), dtype=np.int64)
        keys = derive_each(derive(self.seed, _HANDS, number), of)
        lows = (np.minimum(lo, middle) + skip, np.maximum(lo, middle) + gone)
        highs = (np.minimum(hi, middle) + skip, np.maximum(hi, middle) + gone)
        return Hands(
            np.concatenate((group, group)),
            np.concatenate([one.ravel() for one in lows]),
            np.concatenate([one.ravel() for one in highs]),
            np.concatenate((hand, hand)),
            derive_each(np.repeat(keys, len(rows)), group),
            np.tile(self.windows, num),
        )

    def deck(self, number: int, lanes: Lanes) -> Deck:
        """Return the shuffled hands of lanes in an epoch; O(segments / L) per lane, then cached."""
        return self._caches(lanes).decks.get((number, lanes), self._make_deck)

    def _make_deck(self, key: tuple[int, Lanes]) -> Deck:
        return build_deck(self.order, self.hands(*key), self.shuffle, self._balance(*key))

    def _balance(self, number: int, lanes: Lanes) -> Balance | None:
        if self.costs is None:
            return None
        groups, of, deal = self.groups, np.array(lanes, dtype=np.int64), self.epoch(number).deal
        masses, total = groups.masses, groups.total
        taken = [max(1, (2 * self.cell_size * mass + total) // (2 * total)) for mass in masses]

        def steps(hand: NDArray[np.int64], draw: NDArray[np.int64]) -> NDArray[np.int64]:
            lane, group = of[hand // len(groups)], hand % len(groups)
            out = draw // self.cell_size  # with one group, every cell takes all its slots from it
            if len(groups) > 1:
                for one in np.unique(group).tolist():
                    mine = np.flatnonzero(group == one)
                    out[mine] = self._steps_of(deal, lane[mine], one, draw[mine])
            return out

        return Balance(
            self.costs.codes,
            np.tile(np.array(taken, dtype=np.int64), len(of)),
            ROUND_PARTS,
            derive(self.seed, _CLASSES, number),
            Balance.offsets(of, len(groups), self.settings.balance or BALANCES[0]),
            steps,
        )

    def _caches(self, lanes: Lanes) -> _Caches:
        return self._alone if len(lanes) == 1 else self._joint

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Return cells of one lane for steps [start, stop): (steps, m) int64, a view of cached memory if possible."""
        cells: NDArray[np.int64] = self._walk(start, stop, (lane,))[0]
        return cells

    def steps(self, start: int, stop: int, lanes: Sequence[int]) -> NDArray[np.int64]:
        """Return cells of lanes for steps [start, stop): (steps, lanes, m) int64."""
        out = np.empty((stop - start, len(lanes), self.cell_size), dtype=np.int64)
        for first in range(0, len(lanes), self._together):
            some = tuple(lanes[first : first + self._together])
            out[:, first : first + len(some)] = self._walk(start, stop, some).transpose(1, 0, 2)
        return out

    def _walk(self, start: int, stop: int, lanes: Lanes) -> NDArray[np.int64]:
        """Return cells (lanes, steps, m), epoch by epoch and chunk by chunk."""
        parts = []
        while start < stop:
            epoch, step = divmod(start, self.steps_per_epoch)
            first, last, cells = self._cells_at(epoch, step, step + stop - start, lanes)
            count = min(stop - start, last - step)
            parts.append(cells[:, step - first : step - first + count])
            start += count
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([np.empty((len(lanes), 0, self.cell_size), np.int64), *parts], axis=1)

    def draw(self, epoch: int, lane: int, first: int, last: int) -> NDArray[np.int64]:
        """Return cells of full steps [first, last) of an epoch without caching them.

        Use it to walk few lanes through whole epochs, for which the chunks of `cells` are too short.
        """
        cells: NDArray[np.int64] = self._draw(epoch, (lane,), first, last)[0]
        return cells

    def rest(self, epoch: int, step: int) -> RowSet:
        """Return the rows that an epoch draws from a step of it on; costs a walk over these steps."""
        return RowSet(self.population.rows, self._rest(epoch, step))

    def _rest(self, epoch: int, step: int) -> Iterator[NDArray[np.int64]]:
        count = max(1, _REST_ROWS // self.cell_size)
        for lane in range(self.lanes):
            for first in range(step, self.full_steps, count):
                yield self.draw(epoch, lane, first, min(self.full_steps, first + count)).ravel()
            if self.short:
                last = (epoch + 1) * self.steps_per_epoch
                cells = self.cells(last - 1, last, lane)
                yield cells[cells >= 0]

    def _cells_at(self, epoch: int, step: int, stop: int, lanes: Lanes) -> tuple[int, int, NDArray[np.int64]]:
        """Return the first step, the end step and the cells of a range of steps that contains ``step``.

        The range affects cost only: cells do not depend on which steps are drawn together.
        """
        if step == self.full_steps:
            return step, step + 1, self._caches(lanes).chunks.get((epoch, lanes, -1), self._short_cells)
        # Chunk borders are staggered over lanes, so that a walk over all lanes never draws all chunks in one step.
        # A chunk that covers the epoch has no border.
        shift = lanes[0] * self._chunk // self.lanes if self._chunk < self.full_steps else 0
        number = (step + shift) // self._chunk
        if stop - step <= self._part and self._is_landing((epoch, lanes, number), step):
            first = step - step % self._part
            last = min(self.full_steps, first + self._part)
            kept, key = self._caches(lanes).landings, (epoch, lanes, first)
        else:
            first = max(0, number * self._chunk - shift)
            last = min(self.full_steps, (number + 1) * self._chunk - shift)
            kept, key = self._caches(lanes).chunks, (epoch, lanes, number)
        return first, last, kept.get(key, lambda _: self._draw(epoch, lanes, first, last))

    def _is_landing(self, chunk: _Key, step: int) -> bool:
        """Return True if a step was jumped to: then only a part of its chunk is drawn, to make resuming cheap.

        A walk continues with whole chunks from the second part on.
        """
        epoch, lanes, number = chunk
        kept = self._caches(lanes)
        walking = (epoch, lanes, step - step % self._part - self._part) in kept.landings
        return not (walking or chunk in kept.chunks or (epoch, lanes, number - 1) in kept.chunks)

    def _draw(self, epoch: int, lanes: Lanes, first: int, last: int) -> NDArray[np.int64]:
        """Draw cells of full steps: (lanes, last - first, m)."""
        deal, deck, of = self.epoch(epoch).deal, self.deck(epoch, lanes), np.array(lanes, dtype=np.int64)
        num, groups = len(lanes), len(self.groups)
        ends = deal.lane_prefix(np.repeat([first, last], num), np.tile(of, 2))
        begin, end = np.diff(ends, axis=1, prepend=0).reshape(2, num, groups)
        active = np.flatnonzero((end > begin).any(axis=0))  # few of many strata
        offset = deck.start[:-1].reshape(num, groups)[:, active]
        lo, hi = (offset + begin[:, active]).ravel(), (offset + end[:, active]).ravel()
        some = hi > lo
        draws = deck.take(lo[some], hi[some])
        if groups == 1:  # no slots to distribute over groups
            cells = draws.reshape(num, last - first, self.cell_size)
        else:
            steps = np.arange(first, last + 1, dtype=np.int64)
            before = deal.lane_counts(np.tile(steps, num), np.repeat(of, len(steps)), active)
            counts = np.diff(before.reshape(num, len(steps), len(active)), axis=1)
            cells = assemble(draws, counts, self.cell_size)
        return self._finish(cells, epoch, of, first, self.cell_size)

    def _short_cells(self, key: _Key) -> NDArray[np.int64]:
        epoch, lanes, _ = key
        tables, deck, of = self.epoch(epoch), self.deck(epoch, lanes), np.array(lanes, dtype=np.int64)
        drawn = tables.deal.lane_prefix(np.full(len(of), self.full_steps), of)
        drawn = np.diff(drawn, axis=1, prepend=0)  # (lanes, groups)
        hand = tables.cut[of + 1] - tables.cut[of]
        offset = deck.start[:-1].reshape(hand.shape)
        lo, hi = (offset + drawn).ravel(), (offset + hand).ravel()
        some = hi > lo
        counts = (hand - drawn)[:, None]
        cells = assemble(deck.take(lo[some], hi[some]), counts, self.cell_size)
        for i, filled in enumerate(counts.sum(axis=(1, 2)).tolist()):  # lanes differ in remaining rows
            cells[i : i + 1] = self._finish(
                cells[i : i + 1].copy(), epoch, of[i : i + 1], self.full_steps, filled
            )
        cells.flags.writeable = False
        return cells

    def locate(self, sample: int, epoch: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a sample in an epoch, or None if it is dropped.

        Costs O(log S) counts and one hand.
        """
        place = self.place(sample, epoch)
        if place is None:
            return None
        group, lane, number = place
        one = np.array([lane]), group, np.array([number])
        step = int(self._steps_of(self.epoch(epoch).deal, *one)[0])
        first, _, cells = self._cells_at(epoch, step, step + 1, (lane,))
        slot = int(np.flatnonzero(cells[0, step - first] == sample)[0])
        return epoch * self.steps_per_epoch + step, lane, slot

    def place(self, sample: int, epoch: int) -> tuple[int, int, int] | None:
        """Return (group, lane, number of the draw in the hand) of a sample in an epoch, or None if it is dropped."""
        found = self.order.find(sample)
        if found is None:
            return None
        group, base = found
        tables = self.epoch(epoch)
        rows, gone = self.groups.rows[group], int(tables.dropped[group])
        behind = (base - int(tables.drop_at[group])) % rows  # distance from the first dropped row
        if behind < gone:
            return None
        wraps = max(0, int(tables.drop_at[group]) + gone - rows)
        reduced = base - wraps if wraps or base < int(tables.drop_at[group]) else base - gone
        lane = int(np.searchsorted(tables.cut[:, group], reduced, side="right")) - 1
        deck = self.deck(epoch, (lane,))
        return group, lane, deck.place(sample, group) - int(deck.start[group])

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the epoch that contains a step."""
        first = step - step % self.steps_per_epoch
        return first, first + self.steps_per_epoch

    def _steps_of(
        self, deal: Deal, lanes: NDArray[np.int64], group: int, places: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the step in which each of n lanes makes its draw number ``places`` of a group: int64[n].

        Bisection on the closed form; draws of the short step are in step S.
        """
        chosen = np.array([group])
        low = np.zeros(len(places), dtype=np.int64)  # draws before `low` <= place
        high = np.full(len(places), self.full_steps)  # the last step that may satisfy this
        while (low < high).any():
            middle = (low + high + 1) // 2
            there = deal.lane_counts(middle, lanes, chosen)[:, 0] <= places
            low, high = np.where(there, middle, low), np.where(there, high, middle - 1)
        return low

    def _finish(
        self, cells: NDArray[np.int64], epoch: int, lanes: NDArray[np.int64], first: int, filled: int
    ) -> NDArray[np.int64]:
        """Permute each of the cells (lanes, steps, m) under its key and make them read-only."""
        if self.shuffle != "none" and filled > 1:
            num, steps, size = cells.shape
            numbers = epoch * self.steps_per_epoch + np.arange(first, first + steps, dtype=np.int64)
            of_lane = derive_each(derive(self.seed, _CELLS), lanes)
            keys = derive_each(np.repeat(of_lane, steps), np.tile(numbers, num))
            cells = permute_cells(cells.reshape(num * steps, size), keys, filled).reshape(cells.shape)
        cells.flags.writeable = False
        return cells


def window_sizes(
    masses: Sequence[int], global_batch: int, lanes: int, window_blocks: int
) -> NDArray[np.int64]:
    """Return the blocks per window of each group, which divide a lane's ``window_blocks``: int64[groups] (SPEC.md §4).

    Groups that every cell draws from get shares proportional to mass. A smaller group is drawn in few phases of a turn,
    one sample per cell, and at most two such groups per slot are open at a time. Every group gets at least one block.
    """
    size = global_batch // lanes
    total = sum(masses)
    sizes = [
        window_blocks * mass // total if global_batch * mass >= lanes * total else window_blocks // (2 * size)
        for mass in masses
    ]
    return np.maximum(1, np.array(sizes, dtype=np.int64))
