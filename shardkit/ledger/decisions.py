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
    lanes = np.where(rows.by_cell, rows.places, rows.places // plan.cell_size)
    slots = np.where(rows.by_cell, 0, rows.places % plan.cell_size)
    inside = lanes < plan.lanes
    steps, lanes, slots = rows.steps[inside] - first, lanes[inside], slots[inside]
    values, by_cell = rows.losses[inside], rows.by_cell[inside]
    samples = np.concatenate((cells[steps, lanes, slots][~by_cell], cells[steps, lanes][by_cell].ravel()))
    values = np.concatenate((values[~by_cell], np.repeat(values[by_cell], plan.cell_size)))
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
    step: int = 0  # step after which it was journaled
    start: int = 0  # number of the start that made it

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
        return cls(
            event["stage"], tuple(event["weights"]), tuple(event["drawn"]), LossSums(sums, counts), event["step"],
            event["start"],
        )  # fmt: skip


@dataclass
class _Pass:
    """Steps that rank 0 took without going back: from a start or a return to an earlier step on."""

    begin: int  # first step
    start: int  # number of the start
    known: dict[int, Decision]  # stage → decision; those before `begin` are inherited
    end: int = 0  # step after the last one
    own: int = 0  # step after the last decision of its own; `begin` if there is none


class DecisionLines:
    """Decisions of a mixer about a plan, by the passes of the run over its steps.

    A run that goes back decides again. Its earlier decisions stay in force for the steps that it took earlier and
    does not take again: a start may continue from there.

    Args:
        events: of a ledger, in order.
        plan: hex digest of the plan.
        reached: for each start, the step after its highest one.
        now: the step after the last one of the newest pass; None if the events and `reached` must do.
    """

    def __init__(
        self, events: Iterable[Mapping[str, Any]], plan: str, reached: Sequence[int], now: int | None = None
    ) -> None:
        self._passes: list[_Pass] = []
        self._found: dict[tuple[int, int], list[Decision]] = {}
        for event in events:
            kind = event["kind"]
            if kind == "start" or (kind == "rewind" and event["rank"] == 0):
                self._close(reached, event["reached"] if kind == "rewind" else None)
                self._begin(event["step"], event["start"])
            elif kind == "fork":
                for one in self._passes[:-1]:
                    one.end = min(one.end, event["step"])
            elif kind == DECISION and event["plan"] == plan:
                self._decide(Decision.of(event), reached)
        self._close(reached, now)

    def at(self, step: int) -> list[Decision]:
        """Return the decisions in force before a step, by stage from stage 2 on, of the newest pass that reached it."""
        number, known = self._newest(step)
        key = number, sum(one.step < step for one in known.values())
        if key not in self._found:
            found = self._found[key] = []
            while (one := known.get(len(found) + 2)) is not None and one.step < step:
                found.append(one)
        return self._found[key]

    def _newest(self, step: int) -> tuple[int, dict[int, Decision]]:
        """Return number and decisions of the newest pass that reached a step, otherwise of the newest before."""
        before = [number for number, one in enumerate(self._passes) if one.begin < step]
        reaching = [number for number in before if self._passes[number].end >= step]
        number = (reaching or before or [-1])[-1]
        return number, {} if number < 0 else self._passes[number].known

    def _begin(self, step: int, start: int) -> None:
        known = {stage: one for stage, one in self._newest(step)[1].items() if one.step < step}
        self._passes.append(_Pass(step, start, known, own=step))

    def _decide(self, decision: Decision, reached: Sequence[int]) -> None:
        last = self._passes[-1] if self._passes else None
        is_next = last is not None and (last.own == last.begin or decision.stage - 1 in last.known)
        if last is None or not is_next:  # it went forward, which is not recorded
            self._close(reached, None if last is None else last.own)
            self._begin(decision.step, decision.start)
        self._passes[-1].known[decision.stage] = decision
        self._passes[-1].own = decision.step + 1

    def _close(self, reached: Sequence[int], end: int | None) -> None:
        """Note the end of the newest pass. If it is not known, it reached its own last decision."""
        if not self._passes:
            return
        last = self._passes[-1]
        if end is None:
            earlier = max((one.end for one in self._passes[:-1] if one.start == last.start), default=0)
            end = reached[last.start] if last.start < len(reached) else 0
            end = end if end > earlier else last.own
        last.end = max(end, last.begin)


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
