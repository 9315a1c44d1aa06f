"""Decisions of a mixer: the losses given to it, the weights that result, and their events (SPEC.md, "Decisions")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Float64s, Int64s
from shardkit.errors import IntegrityError, PlanError
from shardkit.ledger.losses import Losses
from shardkit.plan import Mixer, Plan
from shardkit.plan.mixed import weight_total, whole_weights
from shardkit.ranges import shown

DECISION: Final = "decision"
"""Kind of the event of a decision, journaled before its stage begins."""

_UNIT: Final = 1 << 20  # losses are added as multiples of 1 / _UNIT
_MOST: Final = float(1 << 20)  # larger losses count as this one


class LossSums(NamedTuple):
    """Losses of a stage by stratum, exact and independent of the order of addition."""

    sums: Int64s  # (strata,) int64, sums of finite losses in units of 2**-20; a loss counts as at most 2**20
    counts: Int64s  # (strata,) int64, number of finite losses

    @classmethod
    def none(cls, strata: int) -> LossSums:
        """Return the sums of no loss."""
        return cls(np.zeros(strata, dtype=np.int64), np.zeros(strata, dtype=np.int64))

    @classmethod
    def of(cls, strata_of: Int64s, losses: NDArray[np.float32], strata: int) -> LossSums:
        """Return the sums of losses, (n,), of samples in these strata, (n,)."""
        finite = np.isfinite(losses)
        strata_of, values = strata_of[finite], np.clip(losses[finite].astype(np.float64), -_MOST, _MOST)
        found = cls.none(strata)
        np.add.at(found.sums, strata_of, np.rint(values * _UNIT).astype(np.int64))
        np.add.at(found.counts, strata_of, 1)
        return found

    def equals(self, other: LossSums) -> bool:
        """Return True if sums and counts are equal."""
        return np.array_equal(self.sums, other.sums) and np.array_equal(self.counts, other.counts)

    def __add__(self, other: object) -> LossSums:
        assert isinstance(other, LossSums)
        return LossSums(self.sums + other.sums, self.counts + other.counts)

    @property
    def means(self) -> list[float]:
        """Mean loss of each stratum, correctly rounded; NaN without a loss."""
        pairs = zip(self.sums.tolist(), self.counts.tolist(), strict=True)
        return [total / (count * _UNIT) if count else float("nan") for total, count in pairs]


def recorded_sums(losses: Losses, plan: Plan, first: int, end: int) -> tuple[LossSums, int]:
    """Return the sums of the recorded losses of steps [first, end), and the number of samples with a loss."""
    found, num_samples = LossSums.none(len(plan.population.strata)), 0
    rows = losses.of_steps(first, end)
    if not len(rows.steps):
        return found, 0
    cells = plan.steps(first, end)
    lanes, slots = np.divmod(rows.places, plan.cell_size)
    inside = lanes < plan.lanes
    samples = cells[rows.steps[inside] - first, lanes[inside], slots[inside]]
    values = rows.losses[inside]
    present = samples >= 0
    strata_of = plan.grid.order.strata_of(samples[present])
    num_samples = int(present.sum())
    return LossSums.of(strata_of, values[present], len(found.sums)), num_samples


@dataclass(frozen=True)
class Decision:
    """A decision of a mixer."""

    stage: int  # number of the stage that gets the weights
    weights: tuple[int, ...]  # one whole number per stratum
    drawn: tuple[int, ...]  # samples of each stratum that all lanes have drawn by the end of the stage
    losses: LossSums  # losses of stage − 2, given to the mixer

    @property
    def details(self) -> dict[str, Any]:
        """The fields of the event, without the fields that the journal adds."""
        return {
            "stage": self.stage, "weights": list(self.weights), "drawn": list(self.drawn),
            "sums": self.losses.sums.tolist(), "counts": self.losses.counts.tolist(),
        }  # fmt: skip

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Decision:
        """Return the decision of an event."""
        sums, counts = (np.array(event[name], dtype=np.int64) for name in ("sums", "counts"))
        return cls(event["stage"], tuple(event["weights"]), tuple(event["drawn"]), LossSums(sums, counts))


def recorded_decisions(events: Iterable[Mapping[str, Any]], plan: str) -> list[Decision]:
    """Return the decisions about a plan, by stage from stage 2 on, up to the first one that is missing.

    Args:
        events: of a ledger, in order.
        plan: hex digest of the plan.
    """
    found: list[Decision] = []
    for event in events:
        if event["kind"] == DECISION and event["plan"] == plan and event["stage"] == len(found) + 2:
            found.append(Decision.of(event))
    return found


class _Rows:
    """A growing table of float64 rows."""

    def __init__(self, width: int) -> None:
        self._data = np.empty((16, width))
        self.count = 0

    def append(self, row: Sequence[float]) -> None:
        if self.count == len(self._data):
            self._data = np.concatenate((self._data, np.empty_like(self._data)))
        self._data[self.count] = row
        self.count += 1

    @property
    def rows(self) -> Float64s:
        found = self._data[: self.count]
        found.flags.writeable = False
        return found


class MixHistory:
    """Input of a mixer: the losses of the stages of a run, and their weights.

    The stages of the plan from 2 on are decided with the losses that are added.
    """

    def __init__(self, mixer: Mixer, plan: Plan) -> None:
        self._mixer, self._plan = mixer, plan
        width = len(plan.population.strata)
        self._means, self._shares = _Rows(width), _Rows(width)

    def add(self, losses: LossSums) -> None:
        """Add the losses of the next stage."""
        self._means.append(losses.means)

    def weights_of(self, stage: int) -> tuple[int, ...]:
        """Return the weights of a stage, given the losses of all stages up to two before it.

        Raises:
            PlanError: the mixer returned no weights.
        """
        grid = self._plan.mixture
        for number in range(self._shares.count, stage):
            masses = grid.masses(number)
            total = sum(masses)
            self._shares.append([mass / total for mass in masses])
        returned = self._mixer(self._means.rows, self._shares.rows[:stage], stage * grid.every)
        try:
            shares = [float(one) for one in returned]
        except (TypeError, ValueError, OverflowError) as error:
            raise PlanError(
                f"mixer {self._plan.settings.mixer}: it returned {shown(returned)}, expected one number per stratum"
            ) from error
        rows = [one > 0 for one in grid.rows.tolist()]
        return whole_weights(shares, rows, weight_total(grid.every, self._plan.global_batch))

    def decide(self, losses: LossSums) -> Decision:
        """Add the losses of a stage, give the stage after the next its weights and return the decision."""
        self.add(losses)
        grid = self._plan.mixture
        stage = grid.decided
        weights = self.weights_of(stage)
        self._plan.decide(weights)
        return Decision(stage, weights, tuple(grid.drawn_in(stage).tolist()), losses)


def apply_decisions(plan: Plan, decisions: Sequence[Decision]) -> None:
    """Give the stages of a plan the weights of recorded decisions, in place of their own.

    Raises:
        IntegrityError: a decision is of a plan with other strata.
    """
    grid = plan.mixture
    grid.undecide(2)
    strata = len(plan.population.strata)
    for one in decisions:
        if {len(one.weights), len(one.drawn), len(one.losses.sums), len(one.losses.counts)} != {strata}:
            raise IntegrityError(
                f"the decision about stage {one.stage} is not about {strata} strata: the ledger was changed; run: "
                "shardkit audit RUN"
            )
        plan.decide(one.weights, drawn=np.array(one.drawn, dtype=np.int64))
