"""Moving lanes away from slow ranks: a pure function of telemetry and journal (SPEC.md §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from numpy.typing import ArrayLike

from shardkit.ranges import Range

from .assignment import Assignment, assign, quotas
from .settings import check_range

__all__ = ["Decision", "RankTelemetry", "Rules", "in_force", "rebalance", "step_seconds"]


@dataclass(frozen=True)
class RankTelemetry:
    """What one rank saw lately.

    Attributes:
        compute_s: seconds per cell spent computing, one entry per recent step.
        wait_s: seconds per cell spent waiting for data, alike.
    """

    compute_s: tuple[float, ...]
    wait_s: tuple[float, ...] = ()

    @property
    def cell_s(self) -> float:
        """Seconds per cell: medians, so that single hiccups count for nothing."""
        return median(self.compute_s) + (median(self.wait_s) if self.wait_s else 0.0)

    @property
    def doubt(self) -> float:
        """Standard error of `cell_s` as a share of it, from the median deviation: what noise alone may explain."""
        error = 0.0
        for values in (self.compute_s, self.wait_s):
            if values:
                middle = median(values)
                # 1.4826: deviation to sigma of a normal law; 1.2533: error of a median beside that of a mean
                error += (1.4826 * 1.2533 * median(abs(v - middle) for v in values) / len(values) ** 0.5) ** 2
        return error**0.5 / self.cell_s if self.cell_s else 0.0


@dataclass(frozen=True)
class Decision:
    """A numbered change of owners, journaled; every rank applies it at the same later step.

    Attributes:
        number: counts up from 1.
        decided_at: step at which it was taken.
        assignment: owners from ``assignment.from_step`` on.
        before_s: seconds per step that telemetry showed before.
        expected_s: seconds per step that it should lead to.
        undoes: number of the decision that it takes back, or 0.
    """

    number: int
    decided_at: int
    assignment: Assignment
    before_s: float
    expected_s: float
    undoes: int = 0


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When to act.

    Attributes:
        lead: steps between a decision and its effect: every rank must have heard of it.
        settle: steps after an effect during which nothing is decided; telemetry must be of that time.
        gain: least share of the step time that a decision must promise to save, twice the noise on top.
        worse: share by which the step time may exceed the one before, else the decision is undone.
        backoff: steps without a decision after one was undone; doubled by each further one.
    """

    lead: int = 8
    settle: int = 32
    gain: float = 0.1
    worse: float = 0.05
    backoff: int = 512

    def __post_init__(self) -> None:
        for name, least in (("lead", 1), ("settle", 0), ("backoff", 0)):
            check_range(f"rebalancing: {name}", getattr(self, name), Range(least, 10**9))
        check_range("rebalancing: gain", self.gain, Range(0, 1, above=True, below=True), float)
        check_range("rebalancing: worse", self.worse, Range(0, 1000), float)


def step_seconds(assignment: Assignment, telemetry: Sequence[RankTelemetry]) -> float:
    """Seconds per step: lanes times seconds per lane on the slowest rank."""
    return max(len(assignment.lanes_of(r)) * t.cell_s for r, t in enumerate(telemetry))


def in_force(start: Assignment, journal: Sequence[Decision], step: int) -> Assignment:
    """The assignment at a step: replaying a journal gives every rank the same answer."""
    current = start
    for decision in journal:
        if decision.assignment.from_step <= step:
            current = decision.assignment
    return current


def rebalance(
    step: int,
    telemetry: Sequence[RankTelemetry],
    start: Assignment,
    journal: Sequence[Decision] = (),
    *,
    local_bytes: ArrayLike | None = None,
    rules: Rules | None = None,
) -> Decision | None:
    """What to do at a step, if anything.

    Min-max of lanes times seconds per lane, for identical jobs on machines of different speed: solved exactly by
    `quotas`; the lanes that move go to ranks of nodes that hold their bytes. Nothing is done while a decision is under
    way or fresh, for a gain that noise could explain, or soon after a decision had to be undone.

    Args:
        step: the step that the run is at.
        telemetry: of every rank, since the last change took effect.
        start: owners before the first decision.
        journal: all decisions so far.
        local_bytes: (lanes, nodes) bytes of each lane that lie on each node.
        rules: when to act.

    Returns:
        The next decision, to be journaled before it is published; None to leave things as they are.
    """
    rules = rules or Rules()
    current = in_force(start, journal, step)
    last = journal[-1] if journal else None
    if last is not None and step < last.assignment.from_step + rules.settle:
        return None
    now, doubt = step_seconds(current, telemetry), 2 * max(t.doubt for t in telemetry)
    number, effect = len(journal) + 1, step + rules.lead
    if last is not None and not last.undoes and now > last.before_s * (1 + rules.worse + doubt):
        before = in_force(start, journal[:-1], step)
        back = Assignment(before.owner, before.node_of, effect)
        # undone only where the old owners would do better by what is seen now: a rank may have become slow since
        if step_seconds(back, telemetry) < now:
            return Decision(number, step, back, now, step_seconds(back, telemetry), last.number)
    undone = [d for d in journal if d.undoes]
    if undone and step < undone[-1].assignment.from_step + rules.backoff * 2 ** (len(undone) - 1):
        return None
    speeds = [1.0 / t.cell_s for t in telemetry]
    lanes = len(current.owner)
    held = [len(current.lanes_of(r)) for r in range(current.ranks)]
    share = quotas(lanes, speeds, held)
    expected = max(n * t.cell_s for n, t in zip(share, telemetry, strict=True))
    if expected > now * (1 - rules.gain - doubt):
        return None
    moved = assign(
        lanes,
        current.ranks,
        nodes=current.node_of,
        speeds=speeds,
        local_bytes=local_bytes,
        previous=current,
        from_step=effect,
        prefer="moves",
    )
    return Decision(number, step, moved, now, step_seconds(moved, telemetry))
