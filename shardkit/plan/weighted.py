"""The endless grid of a plan with explicit weights, stage after stage (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s

from .costs import BALANCES, ROUND_PARTS, Balance, Costs, arrange_bins, step_classes
from .deal import assemble, chunk_steps, permute_cells, ragged
from .deck import Recent
from .natural import window_sizes
from .permutation import derive, derive_each, order
from .population import BaseOrder, Population, each_alone, stratum_rows
from .settings import Settings
from .stage import RoundRobin, Stage, StageGroup, Tree, first_step, plan_groups, whole_turn
from .tapes import ByCost, Heads, Tapes

StageDeal = tuple[list[StageGroup], tuple[int, list[int]]]

_CELLS, _CLASSES = 2, 5  # purposes of keys derived from the seed
_WINDOW = 1 << 14  # fewest rows of a window of a shared stratum that is arranged by cost
_WINDOW_CELLS = 64  # fewest cells of each lane in such a window
HAND = 8  # fewest rows per lane of a handed stratum


class Weights(NamedTuple):
    """Integer weights of strata from a step on, and the global batch if it changes there."""

    from_step: int
    masses: tuple[int, ...]
    global_batch: int | None = None


class Leg(NamedTuple):
    """A stage, and the positions of all tapes at its start.

    ``robins`` holds the handed strata whose draws are numbered over all lanes and come from the tapes of all lanes.
    """

    stage: Stage
    chunk: int  # steps drawn at once
    trees: dict[int, Tree]
    robins: dict[int, RoundRobin]
    handed: Int64s  # (lanes, strata)
    shared: Int64s  # (strata,)


def pool_trees(groups: Sequence[StageGroup], masses: Sequence[int]) -> dict[int, Tree]:
    """Return the tree of each group that is a pool, by the number of the group."""
    return {i: Tree([masses[s] for s in g.strata]) for i, g in enumerate(groups) if len(g.strata) > 1}


class WeightedGrid:
    """Cells of a run with explicit weights.

    Args:
        population: rows of the plan.
        settings: settings of the plan, with stages.
        heads: rows that come before the first whole pass.
        costs: costs of samples if windows are arranged by cost; then without `heads`, and not `extended`.
    """

    def __init__(
        self,
        population: Population,
        settings: Settings,
        heads: Heads | None = None,
        costs: Costs | None = None,
    ) -> None:
        global_batch, lanes = settings.global_batch, settings.lanes
        stages = [Weights(*stage) for stage in settings.stages]
        self.population, self.weights = population, tuple(stages)
        self.global_batch, self.lanes = global_batch, lanes
        self.seed, self.shuffle, self.costs = settings.seed, settings.shuffle, costs
        self._how = settings.balance or BALANCES[0]
        self.cell_size = global_batch // lanes
        self.rows: Int64s = np.array(stratum_rows(population), dtype=np.int64)
        self.order = BaseOrder(population, each_alone(self.rows.tolist()))
        self.shared = self._shared_strata(stages)
        windows = window_sizes(stages[0].masses, global_batch, lanes, settings.window_blocks)
        balance = None
        if costs is not None:
            taken = np.array([self._per_cell(stages[0], s) for s in range(len(self.rows))], dtype=np.int64)
            window = np.maximum(_WINDOW, _WINDOW_CELLS * lanes * taken)
            balance = ByCost(self._balance, window, self._arrange_shared)
        self.tapes = Tapes(self.order, self.rows, lanes, self.seed, windows, self.shuffle, heads, balance)
        self.loop_steps = -(-int(self.rows.sum()) // global_batch)
        self._legs: list[Leg] = []
        self._cells: Recent[tuple[int, int, int], Int64s] = Recent(3 * lanes)
        self._begin(stages)

    def _begin(self, stages: Sequence[Weights]) -> None:
        """Deal the stages that are known from the start."""
        for weights in stages:
            self._append(weights, self._deal(weights, self.shared, len(stages)))

    def _leg(self, index: int) -> Leg:
        return self._legs[index]

    def _end_of(self, index: int) -> int | None:
        """Return the end step of a leg; None for the last one."""
        return self._legs[index + 1].stage.start if index + 1 < len(self._legs) else None

    def _target(self, masses: Sequence[int], batch: int, stages: int) -> int:
        """Return the steps of a phase in which no large stratum uses more than a quarter of a hand per turn."""
        total, target = sum(masses), 1 << 40
        for mass, rows in zip(masses, self.rows.tolist(), strict=True):
            if mass and rows >= 4 * HAND * self.lanes:
                target = min(target, rows * total // (4 * stages * mass * batch * self.lanes))
        return max(1, min(target, -(-int(self.rows.sum()) // (batch * self.lanes))))

    def _shared_strata(self, stages: Sequence[Weights]) -> NDArray[np.bool_]:
        """Return the strata that are too small for one tape per lane: lanes would be passes apart within a turn."""
        shared = self.rows < HAND * self.lanes
        known = -1
        while known < int(shared.sum()):  # pools depend on the result: repeat until it is stable
            known = int(shared.sum())
            for weights in stages:
                total = sum(weights.masses)
                groups, (steps, _) = self._deal(weights, shared, len(stages))
                for group in groups:
                    shared[list(group.strata)] |= group.shared
                for stratum, mass in enumerate(weights.masses):
                    drawn = steps * self.lanes * self.global_batch * mass  # in one turn, times the total
                    shared[stratum] |= 4 * len(stages) * drawn > int(self.rows[stratum]) * total
        return shared

    def _deal(
        self, weights: Weights, shared: NDArray[np.bool_], stages: int, planned: int | None = None
    ) -> StageDeal:
        """Return groups, and the steps and samples of a phase; ``planned`` is the batch that sets the phase's length.

        By default that is the batch of ``weights``.
        """
        batch = weights.global_batch or self.global_batch
        groups = plan_groups(weights.masses, self.population.strata, shared, batch)
        target = self._target(weights.masses, planned or batch, stages)
        return groups, whole_turn(groups, batch, target)

    def extended(self, weights: Weights) -> WeightedGrid:
        """Return a copy of the grid that has other weights or another batch from a step on; tapes continue."""
        return copy(self).go_on(weights)

    def go_on(self, weights: Weights) -> WeightedGrid:
        """Apply `extended` in place; the grid must not be used elsewhere."""
        handed, shared = self.drawn(weights.from_step)
        self._legs = [leg for leg in self._legs if leg.stage.start < weights.from_step]
        self.weights = (*(w for w in self.weights if w.from_step < weights.from_step), weights)
        self._cells = Recent(3 * self.lanes)
        stages = len(self.weights)
        dealt = self._deal(weights, self.shared, stages, self.global_batch)
        if self._apart(weights, dealt, handed).any():
            dealt = self._deal(weights, self.shared, stages)
        self._append(weights, self._level(weights, dealt, handed, stages), (handed, shared))
        return self

    def _level(self, weights: Weights, dealt: StageDeal, handed: Int64s, stages: int) -> StageDeal:
        """Return the deal with strata drawn over all lanes if lanes would come too far apart."""
        over_all = self.shared.copy()
        while (apart := self._apart(weights, dealt, handed) & ~over_all).any():
            over_all |= apart
            dealt = self._deal(weights, over_all, stages)
        return dealt

    def _apart(self, weights: Weights, dealt: StageDeal, handed: Int64s) -> NDArray[np.bool_]:
        """Return the handed strata whose lanes could come more than half a hand apart in a turn of this deal."""
        groups, (steps, counts) = dealt
        apart = np.zeros(len(self.rows), dtype=np.bool_)
        if self.lanes == 1:
            return apart
        spread = np.ptp(handed, axis=0)
        batch = weights.global_batch or self.global_batch
        stage: Stage | None = None
        for i, group in enumerate(groups):
            if group.shared:
                continue
            strata = np.array(group.strata)
            masses, rows = np.array([weights.masses[s] for s in group.strata]), self.rows[strata]
            room = rows // (2 * self.lanes) - spread[strata]
            drawn = counts[i] * self.lanes  # by one lane, in a turn
            if (drawn * masses > room * group.mass).any():  # the cheap bound fails: count exactly
                stage = stage or Stage(0, groups, (steps, counts), batch, self.lanes)
                drift = stage.drift(i)
                apart[strata] = (drift + 2) * masses > room * group.mass
        return apart

    def weights_at(self, step: int) -> tuple[Weights, ...]:
        """Return the weights at a step, followed by all later ones."""
        now = max(i for i, w in enumerate(self.weights) if w.from_step <= step or i == 0)
        return self.weights[now:]

    def dealt_over_all(self) -> NDArray[np.bool_]:
        """Return the strata whose rows any lane may draw in the last stage: bool[strata]."""
        out = self.shared.copy()
        out[list(self._legs[-1].robins)] = True
        return out

    def last_pass(self, step: int) -> int:
        """Return a number of passes that no tape has completed before a step; keys of its passes are below it."""
        handed, shared = self.drawn(step)
        rows = np.maximum(1, self.rows)
        done = np.where(self.shared, shared // rows, (handed.max(axis=0) * self.lanes) // rows + 1)
        return self.tapes.heads.key + int(done[self.rows > 0].max(initial=0))

    def drawn(self, step: int) -> tuple[Int64s, Int64s]:
        """Return the positions of all tapes before a step: (lanes, strata) if handed, (strata,) if shared."""
        return self._drawn(self._leg(self._leg_of(step)), step)

    def bounds(self, step: int) -> tuple[int, int]:
        """Return the first and end step of the loop that contains a step; a loop has ceil(N / B) steps."""
        first = step - step % self.loop_steps
        return first, first + self.loop_steps

    def _append(
        self, weights: Weights, dealt: StageDeal, standing: tuple[Int64s, Int64s] | None = None
    ) -> None:
        batch = weights.global_batch or self.global_batch
        stage = Stage(weights.from_step, *dealt, batch, self.lanes)
        if standing is not None:
            handed, shared = standing
        elif self._legs:
            handed, shared = self._drawn(self._legs[-1], stage.start)
        else:
            handed = np.zeros((self.lanes, len(self.rows)), dtype=np.int64)
            shared = handed[0].copy()
        robins = {s: RoundRobin(handed[:, s]) for s in self._over_all(stage.groups)}
        chunk = chunk_steps(batch, self.lanes, max(64, self.loop_steps))
        trees = pool_trees(stage.groups, weights.masses)
        self._legs.append(Leg(stage, chunk, trees, robins, handed, shared))

    def _over_all(self, groups: Sequence[StageGroup]) -> list[int]:
        """Return the handed strata that all lanes draw in one order."""
        return [s for g in groups if g.shared for s in g.strata if not self.shared[s]]

    def _drawn(self, last: Leg, step: int) -> tuple[Int64s, Int64s]:
        handed, shared = last.handed.copy(), last.shared.copy()
        steps = np.full(self.lanes, step - last.stage.start, dtype=np.int64)
        for i, group in enumerate(last.stage.groups):
            chosen, strata = np.array([i]), list(group.strata)
            drawn = last.stage.lane_counts(steps, np.arange(self.lanes), chosen)[:, 0]
            if group.shared:
                drawn = drawn.sum(keepdims=True)
            split = last.trees[i].totals(drawn) if i in last.trees else drawn[:, None]
            if not group.shared:
                handed[:, strata] += split
                continue
            for s, count in zip(strata, split[0].tolist(), strict=True):
                if s in last.robins:
                    handed[:, s] = last.robins[s].standing(count)
                else:
                    shared[s] += count
        return handed, shared

    def cells(self, start: int, stop: int, lane: int) -> Int64s:
        """Return cells of one lane for steps [start, stop): (steps, m) int64, a view of cached memory if possible."""
        parts = []
        while start < stop:
            index = self._leg_of(start)
            leg = self._leg(index)
            shift = lane * leg.chunk // self.lanes
            number = (start - leg.stage.start + shift) // leg.chunk
            first = max(0, number * leg.chunk - shift) + leg.stage.start
            last = (number + 1) * leg.chunk - shift + leg.stage.start
            if (end := self._end_of(index)) is not None:
                last = min(last, end)
            key = (index, lane, number)
            cells = self._cells.get(key, lambda key, f=first, t=last: self._draw(key[0], key[1], f, t))  # type: ignore[misc]
            count = min(stop, last) - start
            parts.append(cells[start - first : start - first + count])
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _leg_of(self, step: int) -> int:
        index = len(self._legs) - 1
        while index and self._legs[index].stage.start > step:
            index -= 1
        return index

    def _draw(self, index: int, lane: int, first: int, last: int) -> Int64s:
        leg = self._leg(index)
        stage, start = leg.stage, leg.stage.start
        steps = np.arange(first - start, last - start + 1, dtype=np.int64)
        ends = stage.lane_counts(steps[[0, -1]], lane, np.arange(len(stage.groups)))
        active = np.flatnonzero(ends[1] > ends[0])
        counts = np.diff(stage.lane_counts(steps, lane, active), axis=0)
        lo, hi = ends[0, active], ends[1, active]
        draws: list[Int64s | None] = [None] * len(active)
        single = [
            i for i, g in enumerate(active.tolist()) if not stage.groups[g].shared and g not in leg.trees
        ]
        if single:
            strata = np.array([stage.groups[active[i]].strata[0] for i in single])
            base = leg.handed[lane, strata]
            taken = self.tapes.take(lane, strata, lo[single] + base, hi[single] + base)
            for i, part in zip(single, np.split(taken, np.cumsum(hi[single] - lo[single])[:-1]), strict=True):
                draws[i] = part
        for i, g in enumerate(active.tolist()):
            if draws[i] is None:
                draws[i] = self._pool(leg, g, lane, steps[:-1], np.arange(lo[i], hi[i], dtype=np.int64))
        size = stage.batch // self.lanes
        cells: Int64s = assemble(np.concatenate([d for d in draws if d is not None]), counts[None], size)[0]
        if self.shuffle != "none":
            keys = derive_each(derive(self.seed, _CELLS, lane), np.arange(first, last, dtype=np.int64))
            cells = permute_cells(cells, keys, size)
        cells.flags.writeable = False
        return cells

    def _pool(self, leg: Leg, index: int, lane: int, steps: Int64s, numbers: Int64s) -> Int64s:
        """Return a lane's draws from a pool or a shared stratum, in drawing order."""
        group = leg.stage.groups[index]
        if group.shared:
            _, numbers = leg.stage.slots(steps, lane, index)
        if index in leg.trees:
            member, count = leg.trees[index].draws(numbers)
            stratum = np.array(group.strata)[member]
        else:
            stratum, count = np.full(len(numbers), group.strata[0]), numbers
        ranks = np.argsort(stratum, kind="stable")
        sorted_strata, sorted_count = stratum[ranks], count[ranks]
        starts = np.flatnonzero(np.diff(sorted_strata, prepend=-1))
        strata, ends = sorted_strata[starts], np.append(starts[1:], len(ranks))
        out = np.empty(len(numbers), dtype=np.int64)
        if not group.shared:
            base = leg.handed[lane, strata]
            out[ranks] = self.tapes.take(
                lane, strata, base + sorted_count[starts], base + sorted_count[ends - 1] + 1
            )
            return out
        for s, a, b in zip(strata.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if s in leg.robins:
                out[ranks[a:b]] = self.tapes.take_at(s, *leg.robins[s].at(sorted_count[a:b]))
            else:
                out[ranks[a:b]] = self.tapes.take_shared(s, leg.shared[s] + sorted_count[a:b])
        return out

    # ---- arrangement by cost (SPEC.md §11)

    def _balance(self, lane: int, strata: Int64s, passes: Int64s) -> Balance:
        """Return the arrangement of a lane's hands of one pass of each stratum; hand s belongs to stratum s."""
        assert self.costs is not None
        begin, sizes = np.zeros(len(self.rows), dtype=np.int64), np.ones(len(self.rows), dtype=np.int64)
        begin[strata] = self.tapes.pass_start(lane, strata, passes)
        legs = self._legs_of(lane, strata, begin[strata])
        for stratum, index in zip(strata.tolist(), legs.tolist(), strict=True):
            sizes[stratum] = self._per_cell(self.weights[index], stratum)
        return Balance(
            self.costs.codes,
            sizes,
            ROUND_PARTS,
            derive(self.seed, _CLASSES),
            Balance.offsets(np.array([lane]), len(self.rows), self._how),
            lambda hand, draw: self._steps_of(lane, hand, begin[hand] + draw),
        )

    def _per_cell(self, weights: Weights, stratum: int) -> int:
        """Return the rows of a stratum that a cell takes on average, at least 1."""
        total = sum(weights.masses)
        return max(1, (2 * self.cell_size * weights.masses[stratum] + total) // (2 * total))

    def _arrange_shared(self, stratum: int, first: int, samples: Int64s) -> Int64s:
        """Reorder a window of a shared tape, so that each lane's draws from it have nearly equal cost per cell."""
        assert self.costs is not None
        positions = np.arange(first, first + len(samples), dtype=np.int64)
        steps, lanes = np.zeros_like(positions), np.full_like(positions, self.lanes)
        begins = np.array([leg.shared[stratum] for leg in self._legs])
        legs = np.searchsorted(begins, positions, side="right") - 1
        for index in np.unique(legs).tolist():
            here, leg = np.flatnonzero(legs == index), self._legs[index]
            group = next((i for i, one in enumerate(leg.stage.groups) if one.strata == (stratum,)), None)
            if group is not None:  # draws of a pool keep their order
                steps[here], lanes[here] = leg.stage.shared_draws(positions[here] - begins[index], group)
        size = self._per_cell(self.weights[int(legs[0])], stratum)
        order_ = np.argsort(lanes, kind="stable")  # places of the window, lane by lane
        counts = np.bincount(lanes, minlength=self.lanes)[: self.lanes]
        inside = ragged(np.zeros(self.lanes, dtype=np.int64), counts)
        is_whole = inside < np.repeat(counts // size * size, counts)
        bins = order_[: len(inside)][is_whole].reshape(-1, size)
        if not len(bins):
            return samples
        of_lanes = Balance.offsets(np.arange(self.lanes), len(self.rows), self._how)
        offset = of_lanes[lanes[bins[:, 0]] * len(self.rows) + stratum]
        classes = step_classes(derive(self.seed, _CLASSES), steps[bins[:, 0]]) + offset
        return arrange_bins(samples, self.costs.codes[samples], bins, classes, ROUND_PARTS)

    def _legs_of(self, lane: int, strata: Int64s, positions: Int64s) -> Int64s:
        """Return the number of the last leg that begins at or before positions of a lane's tapes, elementwise."""
        begins = np.array([leg.handed[lane] for leg in self._legs])  # (legs, strata)
        legs: Int64s = (begins[:, strata] <= positions).sum(axis=0) - 1
        return legs

    def _steps_of(self, lane: int, strata: Int64s, positions: Int64s) -> Int64s:
        """Return the step in which a lane draws positions of its tapes, elementwise; for pools about that step."""
        out, legs = np.zeros(len(positions), dtype=np.int64), self._legs_of(lane, strata, positions)
        for index, stratum in np.unique(np.stack((legs, strata)), axis=1).T.tolist():
            here = np.flatnonzero((legs == index) & (strata == stratum))
            leg = self._legs[index]
            draws = positions[here] - leg.handed[lane, stratum]
            group = next((i for i, one in enumerate(leg.stage.groups) if stratum in one.strata), None)
            if group is None:  # never drawn again
                out[here] = leg.stage.start
                continue
            if group in leg.trees:
                tree = leg.trees[group]
                mass = int(tree.masses[leg.stage.groups[group].strata.index(stratum)])
                turns, rest = np.divmod(draws, mass)
                draws = turns * tree.period + rest * tree.period // mass
            out[here] = leg.stage.start + leg.stage.steps_of(draws, lane, group)
        return out

    # ---- look-ups

    def locate(self, sample: int, number: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a sample in pass ``number`` of its stratum, or None if it is not drawn."""
        stratum = int(self.order.strata_of(np.array([sample]))[0])
        place = self.tapes.find(sample, stratum, number, shared=bool(self.shared[stratum]))
        if place is None:
            return None
        for index in self._legs_at(place[0], stratum, place[1]):
            at = self._locate_in(index, place[0], stratum, place[1])
            if at is not None:
                return at
        return None

    def _legs_at(self, lane: int, stratum: int, place: int) -> range:
        """Return the legs that may draw a tape position."""
        return range(len(self._legs))

    def _locate_in(self, index: int, lane: int, stratum: int, place: int) -> tuple[int, int, int] | None:
        """Return (step, lane, slot) of a tape position, or None if it is not drawn in this leg."""
        leg = self._leg(index)
        stage = leg.stage
        g = next((i for i, group in enumerate(stage.groups) if stratum in group.strata), None)
        place -= int(leg.shared[stratum] if lane < 0 else leg.handed[lane, stratum])
        if g is None or place < 0:
            return None
        if stratum in leg.robins:
            place = leg.robins[stratum].number(lane, place + int(leg.handed[lane, stratum]))
        end = self._end_of(index)
        limit = None if end is None else end - stage.start
        if g in leg.trees:  # find the draw of the pool that is draw `place` of this stratum
            member, tree = stage.groups[g].strata.index(stratum), leg.trees[g]
            turns, rest = divmod(place, int(tree.masses[member]))
            inside = first_step(lambda n: int(tree.totals(np.array([n]))[0, member]), rest, tree.period)
            place = turns * tree.period + (inside or 0)
        if not stage.groups[g].shared:
            chosen = np.array([g])
            step = first_step(
                lambda k: int(stage.lane_counts(np.array([k]), lane, chosen)[0, 0]), place, limit
            )
            if step is None:
                return None
            rank = place - int(stage.lane_counts(np.array([step]), lane, chosen)[0, 0])
            return step + stage.start, lane, self._slot(stage, step, lane, g, rank)

        def drawn(k: int) -> int:
            sums = stage.prefix(np.array([k]))[0]
            return int(sums[g] - (sums[g - 1] if g else 0))

        step = first_step(drawn, place, limit)
        if step is None:
            return None
        lane = stage.lane_of(step, g, place)
        rank = int(np.flatnonzero(stage.slots(np.array([step]), lane, g)[1] == place)[0])
        return step + stage.start, lane, self._slot(stage, step, lane, g, rank)

    def _slot(self, stage: Stage, step: int, lane: int, group: int, rank: int) -> int:
        """Return the slot of a cell's draw ``rank`` of a group; computed, because a row may come twice in a cell."""
        counts = np.diff(stage.lane_counts(np.array([step, step + 1]), lane, np.arange(group)), axis=0)
        before = int(counts.sum()) + rank
        if self.shuffle == "none":
            return before
        key = derive(self.seed, _CELLS, lane, step + stage.start)
        return int(np.flatnonzero(order(key, stage.batch // self.lanes) == before)[0])
