"""The grid for natural weights: every selected row once per epoch (SPEC.md §2, §3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .base_order import BaseOrder
from .cells import assemble, chunk_steps, permute_cells
from .deal import Deal
from .deck import Deck, Hands, build_deck
from .permutation import derive, derive_each
from .population import Population
from .recent import Recent
from .rounding import floor_sum, golden_step
from .strata import Groups

__all__ = ["Epoch", "NaturalGrid"]

_LARGE_CHUNK = 1 << 13  # samples
_HANDS, _CELLS, _DROPS = 1, 2, 3  # what a key below the seed is for


@dataclass(frozen=True, eq=False)
class Epoch:
    """What one epoch fixes.

    Attributes:
        deal: counts before every step.
        cut: int64[L + 1, groups], where each lane's hand starts in the group's order without the dropped
            rows.
        drop_at, dropped: int64[groups], the circular range of base positions that this epoch leaves out.
    """

    deal: Deal
    cut: NDArray[np.int64]
    drop_at: NDArray[np.int64]
    dropped: NDArray[np.int64]


class NaturalGrid:
    """Cells of all epochs.

    Args:
        population, groups: what is dealt.
        global_batch, lanes: B and L; L divides B.
        seed: of every shuffle.
        remainder: ``"drop"`` or ``"short"``.
        window_blocks: a lane's budget of open blocks.
        shuffle: ``"window"``, ``"full"`` or ``"none"``.
    """

    def __init__(
        self,
        population: Population,
        groups: Groups,
        *,
        global_batch: int,
        lanes: int,
        seed: int,
        remainder: str,
        window_blocks: int,
        shuffle: str,
    ) -> None:
        self.population, self.groups = population, groups
        self.global_batch, self.lanes, self.seed, self.shuffle = global_batch, lanes, seed, shuffle
        self.cell_size = global_batch // lanes
        self.rows = groups.total
        self.full_steps, self.left = divmod(self.rows, global_batch)
        self.remainder = remainder
        self.short = remainder == "short" and self.left > 0
        self.steps_per_epoch = self.full_steps + self.short
        self.windows = window_sizes(groups, global_batch, lanes, window_blocks)
        self.order = BaseOrder(population, groups)
        self._golden = golden_step(self.rows)
        self._chunk = chunk_steps(global_batch, lanes, self.full_steps)
        # a part is worth its own draw where it saves many samples
        self._part = max(1, self._chunk // 8) if self._chunk * self.cell_size >= _LARGE_CHUNK else 0
        self._epochs: Recent[int, Epoch] = Recent(4)
        self._decks: Recent[tuple[int, int], Deck] = Recent(2 * lanes)
        self._cells: Recent[tuple[int, int, int], NDArray[np.int64]] = Recent(3 * lanes)
        self._parts: Recent[tuple[int, int, int], NDArray[np.int64]] = Recent(lanes)

    def epoch(self, number: int) -> Epoch:
        """Tables of one epoch: O(L x groups)."""
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
        """Rows of each group dropped in epochs 0..number-1, modulo its rows: two lattice sums per group."""
        sums, last = [], 0
        steps = floor_sum(number, self.rows, self._golden, 0)
        for cumulative, rows in zip(self.groups.cumulative(), self.groups.rows, strict=True):
            total = steps - floor_sum(number, self.rows, self._golden, -cumulative * self.left)
            sums.append((total - last) % rows)
            last = total
        return np.array(sums, dtype=np.int64)

    def hand(self, number: int, lane: int) -> Hands:
        """The base ranges of a lane's hands in an epoch: at most two per group, around the dropped rows."""
        epoch = self.epoch(number)
        lo, hi = epoch.cut[lane], epoch.cut[lane + 1]
        at, gone = epoch.drop_at, epoch.dropped
        rows = np.array(self.groups.rows, dtype=np.int64)
        wraps = np.maximum(0, at + gone - rows)  # dropped rows at the front of the base order
        middle = np.where(
            (wraps > 0) | (gone == 0), rows, at
        )  # reduced positions from here on lie behind the dropped rows
        skip = np.where(wraps > 0, wraps, 0)
        group = np.arange(len(rows), dtype=np.int64)
        return Hands(
            np.concatenate((group, group)),
            np.concatenate((np.minimum(lo, middle) + skip, np.maximum(lo, middle) + gone)),
            np.concatenate((np.minimum(hi, middle) + skip, np.maximum(hi, middle) + gone)),
            derive_each(derive(self.seed, _HANDS, number, lane), group),
            self.windows,
        )

    def deck(self, number: int, lane: int) -> Deck:
        """A lane's hands of an epoch, shuffled: O(segments / L) once, then kept."""
        return self._decks.get(
            (number, lane), lambda key: build_deck(self.order, self.hand(*key), self.shuffle)
        )

    def cells(self, start: int, stop: int, lane: int) -> NDArray[np.int64]:
        """Cells of one lane for steps [start, stop): (steps, m) int64.

        A view of kept memory where it can be.
        """
        parts = []
        while start < stop:
            epoch, step = divmod(start, self.steps_per_epoch)
            first, last, cells = self._cells_at(epoch, step, step + stop - start, lane)
            count = min(stop - start, last - step)
            parts.append(cells[step - first : step - first + count])
            start += count
        return (
            parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, self.cell_size), np.int64), *parts])
        )

    def draw(self, epoch: int, lane: int, first: int, last: int) -> NDArray[np.int64]:
        """Cells of full steps [first, last) of an epoch, drawn for this call and not kept.

        For walks of few lanes through whole epochs, where the chunks that `cells` keeps for all lanes are short.
        """
        return self._draw(epoch, lane, first, last)

    def _cells_at(self, epoch: int, step: int, stop: int, lane: int) -> tuple[int, int, NDArray[np.int64]]:
        """Some steps of an epoch around a step, drawn at once: the first, the end, and their cells.

        Which ones is a matter of cost only: cells are the same however many are drawn together.
        """
        if step == self.full_steps:
            return step, step + 1, self._cells.get((epoch, lane, -1), self._short_cell)
        # chunk borders are staggered over lanes, so that a walk over all lanes never draws all of them at
        # once; where a chunk holds the epoch there is no border
        shift = lane * self._chunk // self.lanes if self._chunk < self.full_steps else 0
        number = (step + shift) // self._chunk
        if stop - step <= self._part and self._is_landing((epoch, lane, number), step):
            first = step - step % self._part
            last = min(self.full_steps, first + self._part)
            kept, key = self._parts, (epoch, lane, first)
        else:
            first = max(0, number * self._chunk - shift)
            last = min(self.full_steps, (number + 1) * self._chunk - shift)
            kept, key = self._cells, (epoch, lane, number)
        return first, last, kept.get(key, lambda _: self._draw(epoch, lane, first, last))

    def _is_landing(self, chunk: tuple[int, int, int], step: int) -> bool:
        """Whether a step was jumped to: then a part of its chunk will do, and resuming costs no more than that.

        A walk goes over to whole chunks at the second part.
        """
        epoch, lane, number = chunk
        walking = (epoch, lane, step - step % self._part - self._part) in self._parts
        return not (walking or chunk in self._cells or (epoch, lane, number - 1) in self._cells)

    def _draw(self, epoch: int, lane: int, first: int, last: int) -> NDArray[np.int64]:
        deal, deck = self.epoch(epoch).deal, self.deck(epoch, lane)
        ends = np.diff(deal.lane_prefix(np.array([first, last]), lane), axis=1, prepend=0)
        active = np.flatnonzero(ends[1] > ends[0])  # with many strata a lane draws from few at a time
        before = deal.lane_counts(np.arange(first, last + 1, dtype=np.int64), lane, active)
        offset = deck.start[active]
        draws = deck.take(offset + ends[0, active], offset + ends[1, active])
        cells = assemble(draws, np.diff(before, axis=0), self.cell_size)
        return self._finish(cells, epoch, lane, first, self.cell_size)

    def _short_cell(self, key: tuple[int, int, int]) -> NDArray[np.int64]:
        epoch, lane, _ = key
        tables, deck = self.epoch(epoch), self.deck(epoch, lane)
        drawn = tables.deal.lane_prefix(np.array([self.full_steps]), lane)
        drawn = np.diff(drawn, axis=1, prepend=0)[0]
        hand = tables.cut[lane + 1] - tables.cut[lane]
        active = np.flatnonzero(hand > drawn)
        offset = deck.start[active]
        draws = deck.take(offset + drawn[active], offset + hand[active])
        cells = assemble(draws, (hand - drawn)[None, active], self.cell_size)
        return self._finish(cells, epoch, lane, self.full_steps, len(draws))

    def locate(self, sample: int, epoch: int) -> tuple[int, int, int] | None:
        """(step, lane, slot) of a sample in an epoch.

        None where it is dropped. O(log S) counts and one hand.
        """
        place = self.place(sample, epoch)
        if place is None:
            return None
        group, lane, number = place
        step = self._step_of(self.epoch(epoch).deal, lane, group, number)
        first, _, cells = self._cells_at(epoch, step, step + 1, lane)
        slot = int(np.flatnonzero(cells[step - first] == sample)[0])
        return epoch * self.steps_per_epoch + step, lane, slot

    def place(self, sample: int, epoch: int) -> tuple[int, int, int] | None:
        """(group, lane, number of the draw in the lane's hand) of a sample in an epoch; None where it is dropped."""
        found = self.order.find(sample)
        if found is None:
            return None
        group, base = found
        tables = self.epoch(epoch)
        rows, gone = self.groups.rows[group], int(tables.dropped[group])
        behind = (base - int(tables.drop_at[group])) % rows  # distance behind the first dropped row
        if behind < gone:
            return None
        wraps = max(0, int(tables.drop_at[group]) + gone - rows)
        reduced = base - wraps if wraps or base < int(tables.drop_at[group]) else base - gone
        lane = int(np.searchsorted(tables.cut[:, group], reduced, side="right")) - 1
        deck = self.deck(epoch, lane)
        return group, lane, deck.place(sample, group) - int(deck.start[group])

    def bounds(self, step: int) -> tuple[int, int]:
        """First and end step of the epoch that holds a step."""
        first = step - step % self.steps_per_epoch
        return first, first + self.steps_per_epoch

    def _step_of(self, deal: Deal, lane: int, group: int, place: int) -> int:
        """The step in which a lane draws its draw number ``place`` of a group.

        Bisection on the closed form.
        """
        chosen = np.array([group])
        low, high = 0, self.full_steps  # draws before `low` <= place; before `high` + 1 possibly more
        while low < high:
            middle = (low + high + 1) // 2
            if int(deal.lane_counts(np.array([middle]), lane, chosen)[0, 0]) <= place:
                low = middle
            else:
                high = middle - 1
        return low

    def _finish(
        self, cells: NDArray[np.int64], epoch: int, lane: int, first: int, filled: int
    ) -> NDArray[np.int64]:
        if self.shuffle != "none":
            steps = epoch * self.steps_per_epoch + np.arange(first, first + len(cells), dtype=np.int64)
            cells = permute_cells(cells, derive_each(derive(self.seed, _CELLS, lane), steps), filled)
        cells.flags.writeable = False
        return cells


def window_sizes(groups: Groups, global_batch: int, lanes: int, window_blocks: int) -> NDArray[np.int64]:
    """Blocks per window of each group's hands: a lane's budget shared out (SPEC.md §4).

    Groups that every cell draws from share by mass. A smaller group is drawn from in few phases of a turn,
    by one sample a cell; at most two such groups per slot are open at a time. Everyone gets at least one
    block.
    """
    size = global_batch // lanes
    total = groups.total
    sizes = [
        window_blocks * mass // total if global_batch * mass >= lanes * total else window_blocks // (2 * size)
        for mass in groups.masses
    ]
    return np.maximum(1, np.array(sizes, dtype=np.int64))
