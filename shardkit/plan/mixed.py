"""The endless grid of a plan whose weights are decided while the run takes steps (SPEC.md §12)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from shardkit.arrays import Bools, Int64s
from shardkit.errors import PlanError
from shardkit.ranges import shown

from .deal import chunk_steps
from .deck import Recent
from .population import Population
from .settings import MAX_WEIGHT, Settings
from .stage import RoundRobin, Stage, plan_groups, whole_turn
from .weighted import HAND, Leg, StageDeal, WeightedGrid, Weights, pool_trees

_LEGS = 64  # stages kept ready


def weight_total(every: int, batch: int) -> int:
    """Return the sum of the integer weights of a decision: the least power of two of at least one per sample."""
    return int(min(MAX_WEIGHT // 2, 1 << (every * batch - 1).bit_length()))


def whole_weights(shares: Sequence[float], has_rows: Sequence[bool], total: int) -> tuple[int, ...]:
    """Return shares as whole numbers with the given sum, by largest remainder.

    A share above 0 of a stratum with rows becomes at least 1. Equal remainders are served in the order of strata.

    Args:
        shares: one finite number >= 0 per stratum.
        has_rows: False for strata without rows, which get 0.
        total: sum of the result.

    Raises:
        PlanError: a share is negative or not finite, none is above 0, or there are too many strata.
    """
    if len(shares) != len(has_rows):
        raise PlanError(f"mixer: {len(shares)} weights, expected {len(has_rows)}, one per stratum")
    for one in shares:
        if not 0 <= one < float("inf"):
            raise PlanError(f"mixer: a weight is {shown(one)}, expected finite numbers >= 0")
    exact = [Fraction(one) if some else Fraction(0) for one, some in zip(shares, has_rows, strict=True)]
    whole = sum(exact)
    alive = [s for s, one in enumerate(exact) if one]
    if not alive or len(alive) > total:
        raise PlanError(f"mixer: {len(alive)} strata with rows have a weight above 0, expected 1 to {total}")
    quotas = [one * total / whole for one in exact]
    counts = [max(1, int(quota)) if quota else 0 for quota in quotas]
    by_rest = sorted(alive, key=lambda s: (int(quotas[s]) - quotas[s], s))
    for s in by_rest[: max(0, total - sum(counts))]:
        counts[s] += 1
    largest = sorted(alive, key=lambda s: (-counts[s], s))
    while (excess := sum(counts) - total) > 0:  # shares below 1 were raised
        for s in largest[:excess]:
            counts[s] -= counts[s] > 1
    return tuple(counts)


class _LevelRobin(RoundRobin):
    """Draws of a stratum over all lanes, lane after lane, continued after ``drawn`` draws."""

    def __init__(self, lanes: int, drawn: int) -> None:
        super().__init__(np.zeros(lanes, dtype=np.int64))
        self._drawn = drawn

    def at(self, number: Int64s) -> tuple[Int64s, Int64s]:
        return super().at(number + self._drawn)

    def standing(self, number: int) -> Int64s:
        return super().standing(number + self._drawn)

    def number(self, tape: int, position: int) -> int:
        return super().number(tape, position) - self._drawn


class MixedGrid(WeightedGrid):
    """Cells of a run with a mixer: stage i is steps [i·every, (i + 1)·every) and has the weights of a decision.

    A stage is one turn, so lanes are level at its end and a stratum's number of draws is all that later stages need.
    Stages are independent of each other: each is distributed once it is decided and used.

    Args:
        population: rows of the plan.
        settings: settings with one stage, the first weights, and ``mix_every``, a multiple of the lanes.
    """

    def __init__(self, population: Population, settings: Settings) -> None:
        assert settings.mix_every is not None
        self.every = settings.mix_every
        super().__init__(population, settings)

    def _begin(self, stages: Sequence[Weights]) -> None:
        self._masses: list[tuple[int, ...]] = []
        self._totals: list[Int64s] = [np.zeros(len(self.rows), dtype=np.int64)]  # draws before each stage
        self._deals: Recent[tuple[int, ...], tuple[StageDeal, Int64s]] = Recent(_LEGS)
        self._ready: Recent[int, Leg] = Recent(_LEGS)
        for _ in range(2):  # the first decision needs the losses of a stage, and is made during the next one
            self.decide(stages[0].masses)

    @property
    def decided(self) -> int:
        """Number of stages whose weights are known."""
        return len(self._masses)

    def masses(self, number: int) -> tuple[int, ...]:
        """Return the integer weights of a stage."""
        return self._masses[number]

    def drawn_in(self, number: int) -> Int64s:
        """Return the samples of each stratum that all lanes have drawn by the end of a stage: int64[strata]."""
        return self._totals[number + 1]

    def decide(self, masses: tuple[int, ...], drawn: Int64s | None = None) -> None:
        """Give the next stage its weights; ``drawn`` is `drawn_in` of the stage if it is known."""
        if drawn is None:
            drawn = self._totals[-1] + self._deals.get(masses, self._stage_deal)[1]
        self._totals.append(drawn)
        self._masses.append(masses)

    def undecide(self, stages: int) -> None:
        """Forget the decisions after the first ``stages`` stages."""
        del self._masses[stages:], self._totals[stages + 1 :]
        self._ready = Recent(_LEGS)
        self._cells = Recent(3 * self.lanes)

    def _shared_strata(self, stages: Sequence[Weights]) -> Bools:
        return np.asarray(self.rows < HAND * self.lanes)

    def _deal(self, weights: Weights, shared: Bools, stages: int, planned: int | None = None) -> StageDeal:
        groups = plan_groups(weights.masses, self.population.strata, shared, self.global_batch)
        return groups, whole_turn(groups, self.global_batch, 0, fixed=self.every // self.lanes)

    def _stage_deal(self, masses: tuple[int, ...]) -> tuple[StageDeal, Int64s]:
        """Return the deal of a stage with these weights, and its draws of each stratum over all lanes."""
        weights = Weights(0, masses)
        border = np.zeros((2, len(masses)), dtype=np.int64)
        border[1] = 1  # tapes differ by at most one draw
        dealt = self._level(weights, self._deal(weights, self.shared, 1), border, 1)
        groups, (_, counts) = dealt
        trees, draws = pool_trees(groups, masses), np.zeros(len(masses), dtype=np.int64)
        for i, group in enumerate(groups):
            number = np.array([counts[i] * (self.lanes if group.shared else 1)])
            split = trees[i].totals(number)[0] if i in trees else number
            draws[list(group.strata)] += split if group.shared else split * self.lanes
        return dealt, draws

    def _leg(self, index: int) -> Leg:
        return self._ready.get(index, self._make_leg)

    def _make_leg(self, index: int) -> Leg:
        masses, drawn = self._masses[index], self._totals[index]
        dealt, _ = self._deals.get(masses, self._stage_deal)
        stage = Stage(index * self.every, *dealt, self.global_batch, self.lanes)
        chunk = min(self.every, chunk_steps(self.global_batch, self.lanes, max(64, self.loop_steps)))
        whole, ahead = np.divmod(drawn, self.lanes)
        handed = whole + (np.arange(self.lanes)[:, None] < ahead)
        robins: dict[int, RoundRobin] = {
            s: _LevelRobin(self.lanes, int(drawn[s])) for s in self._over_all(stage.groups)
        }
        return Leg(stage, chunk, pool_trees(stage.groups, masses), robins, handed, drawn)

    def _end_of(self, index: int) -> int:
        return (index + 1) * self.every

    def _leg_of(self, step: int) -> int:
        index = step // self.every
        if index >= self.decided:
            raise PlanError(
                f"plan: step {step} is not decided: the mixer has set the weights of steps 0 to "
                f"{self.decided * self.every - 1}"
            )
        return index

    def _legs_at(self, lane: int, stratum: int, place: int) -> range:
        """Return the stage that draws a tape position, by bisection; empty if it is not decided."""

        def start(index: int) -> int:
            drawn = int(self._totals[index][stratum])
            return drawn if lane < 0 else drawn // self.lanes + (lane < drawn % self.lanes)

        index = bisect_right(range(self.decided + 1), place, key=start) - 1
        return range(index, min(index + 1, self.decided))

    def dealt_over_all(self) -> Bools:
        return self.shared.copy()
