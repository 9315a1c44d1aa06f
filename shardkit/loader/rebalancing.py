"""Movement of lanes between ranks during a run: telemetry, decisions, and lanes from a given step on (SPEC.md §8).

Ranks communicate through the process group's store, without collectives: one small write every `every` steps and one
small read a few steps later. The pure function `shardkit.plan.assignment.rebalance` makes the decisions.
"""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardkit.errors import ConfigurationError
from shardkit.loader.agreement import Exchange
from shardkit.loader.ranks import LaneShares
from shardkit.plan import Assignment
from shardkit.plan.assignment import Decision, RankTelemetry, Rules, in_force, rebalance
from shardkit.ranges import Range

__all__ = ["Rebalancer", "Rebalancing", "make_rebalancer"]

Record = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Rebalancing:
    """Settings of rebalancing; ``rebalance=True`` stands for the defaults.

    Attributes:
        every: steps between two evaluations of the telemetry; each evaluates at most that many steps.
        rules: conditions for moving lanes.
        store: torch store that all ranks share and nothing else uses; by default a prefix of the process group's store.
        timeout_s: seconds that a rank waits for a decision of the leader. Ranks that train in step do not wait.
    """

    every: int = 16
    rules: Rules = field(default_factory=Rules)
    store: Any = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        Range(1, 10**6).check("rebalancing: every", self.every)
        Range(0, 604_800, above=True).check("rebalancing: timeout_s", self.timeout_s, float)


class Rebalancer:
    """One rank's part of rebalancing: it publishes its cell times and reads which lanes it works.

    Args:
        settings: the settings.
        exchange: connects all ranks; its rank 0 decides.
        rank: data-parallel rank.
        dealt: lanes at the start, and bytes stored on each node.
        record: called with (step, **details) to journal a decision before it is published.
        clock: returns the time in seconds.

    Attributes:
        moves: number of decisions that this rank has applied.
    """

    def __init__(
        self,
        settings: Rebalancing,
        exchange: Exchange,
        *,
        rank: int,
        dealt: LaneShares,
        record: Record,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings, self._exchange, self._rank = settings, exchange, rank
        self._record, self._clock = record, clock
        self._dealt, self._world = dealt.assignment, dealt.assignment.ranks
        self._node = dealt.nodes[rank] if dealt.nodes else platform.node()
        self._nearby = dealt.nearby
        self._loop = 0  # number of seeks to another step; part of the keys
        self._next = 0
        self._begin(0)

    def _begin(self, step: int) -> None:
        """Restore the lanes of the start and forget telemetry and decisions, in the same way on every rank."""
        self._first = step
        self._start = self._current = self._dealt
        self._journal: list[Decision] = []  # decisions made; only on the leader
        self.moves = 0
        self._forget()

    def _forget(self) -> None:
        """Clear the telemetry, which describes only the rank's present lanes."""
        kept = self._settings.every
        self._compute: deque[float] = deque(maxlen=kept)
        self._wait: deque[float] = deque(maxlen=kept)
        self._handed_at, self._cells, self._waited = 0.0, 0, 0.0
        self._computed: float | None = None
        self._silent = 0

    # ---- what the loader calls

    def seek(self, step: int) -> None:
        """Continue at `step`; if it is not the next step, restore the lanes of the start."""
        if step != self._next:
            self._loop += 1
            self._next = step
            self._begin(step)

    def lanes_now(self) -> list[int]:
        """Return this rank's lanes at the last step passed to `lanes_at`."""
        return list(self._current.lanes_of(self._rank))

    def lanes_ahead(self, step: int) -> list[int]:
        """Return this rank's lanes at the next step, or at the first step of the next loop, without side effects."""
        if step != self._next:
            return list(self._dealt.lanes_of(self._rank))
        moved = self._next_assignment(step)
        return self.lanes_now() if moved is None else list(moved.lanes_of(self._rank))

    def lanes_at(self, step: int) -> list[int]:
        """Apply decisions, publish telemetry and return this rank's lanes at `step`.

        Called for every step in order, before it is handed out.
        """
        every = self._settings.every
        moved = self._next_assignment(step)
        if moved is not None:
            self._current = moved
            self.moves += 1
            self._forget()
        if step % every == 0:
            self._tell(step)
            if self._exchange.rank == 0:
                self._decide(step)
        self._next = step + 1
        return self.lanes_now()

    def handed_out(self, cells: int, waited_s: float) -> None:
        """Note that the trainer gets a step of `cells` cells after waiting `waited_s` seconds."""
        self._cells, self._waited, self._computed = cells, waited_s, None
        self._handed_at = self._clock()

    def computed(self, seconds: float | None = None) -> None:
        """Note that this rank's part of the step took `seconds`; None for the time until now."""
        self._computed = self._clock() - self._handed_at if seconds is None else seconds

    def came_back(self) -> None:
        """Record the times of the last step; called when the trainer requests the next one."""
        if self._cells and self._computed is not None:
            self._compute.append(self._computed / self._cells)
            self._wait.append(self._waited / self._cells)
            self._silent = 0
            return
        self._silent += 1
        if self._silent == self._settings.every and not self._compute:
            warnings.warn(
                "shardkit: rebalance=True learns nothing: nobody says when a rank has computed its part. Call "
                "loader.watch(model) once, or loader.computed() before ranks wait for each other in every step",
                RuntimeWarning,
                stacklevel=2,
            )

    # ---- messages

    def _key(self, kind: str, number: int) -> str:
        return f"{self._loop}/{kind}/{number}"

    def _tell(self, step: int) -> None:
        if self._compute:
            told = {"step": step, "moves": self.moves, "node": self._node, "compute_s": list(self._compute),
                    "wait_s": list(self._wait)}  # fmt: skip
            self._exchange.put(self._key("telemetry", self._rank), json.dumps(told).encode())

    def _decide(self, step: int) -> None:
        """Publish the leader's decision for step + lead, also if nothing changes."""
        decision = self._decision(step)
        text = ""
        if decision is not None:
            self._journal.append(decision)
            moved = decision.assignment
            text = json.dumps({"from_step": moved.from_step, "owner": moved.owner})
            before = in_force(self._start, self._journal[:-1], step).owner
            self._record(
                step, number=decision.number, from_step=moved.from_step, owner=list(moved.owner),
                moved=sum(a != b for a, b in zip(before, moved.owner, strict=True)),
                before_us=round(1e6 * decision.before_s), expected_us=round(1e6 * decision.expected_s),
                undoes=decision.undoes,
            )  # fmt: skip
        self._exchange.put(self._key("decision", step), text.encode())

    def _decision(self, step: int) -> Decision | None:
        told = self._telemetry()
        if told is None:
            return None
        names = sorted({one["node"] for one in told})
        nodes = tuple(names.index(one["node"]) for one in told)
        self._start = Assignment(self._start.owner, nodes)
        self._journal = [
            Decision(d.number, d.decided_at, Assignment(d.assignment.owner, nodes, d.assignment.from_step),
                     d.before_s, d.expected_s, d.undoes) for d in self._journal
        ]  # fmt: skip
        seen = [RankTelemetry(tuple(one["compute_s"]), tuple(one["wait_s"])) for one in told]
        near = [self._nearby.get(name) for name in names]
        table = None
        if any(one is not None for one in near):
            none = np.zeros(len(self._start.owner), dtype=np.int64)
            table = np.stack([none if one is None else one for one in near], axis=1)
        return rebalance(
            step, seen, self._start, self._journal, local_bytes=table, rules=self._settings.rules
        )

    def _telemetry(self) -> list[dict[str, Any]] | None:
        """Return the telemetry of all ranks for their present lanes; None if a rank has not published it."""
        values = self._exchange.get_all([self._key("telemetry", rank) for rank in range(self._world)])
        if values is None:
            return None
        told = [json.loads(value) for value in values]
        return told if all(one["moves"] == self.moves for one in told) else None

    def _next_assignment(self, step: int) -> Assignment | None:
        """Return the assignment that takes effect at `step`; None if nothing changes.

        Raises:
            RunError: the leader has not published its decision in time.
        """
        asked = step - self._settings.rules.lead
        if asked < self._first or asked % self._settings.every:
            return None
        text = self._exchange.get(
            self._key("decision", asked), 0, late=f"has not come to step {asked}",
            advice="ranks that rebalance must take the same steps",
        )  # fmt: skip
        if not text:
            return None
        told = json.loads(text)
        return Assignment(tuple(told["owner"]), (0,) * self._world, told["from_step"])


def make_rebalancer(
    settings: Rebalancing | None, *, rank: int, dealt: LaneShares, record: Record
) -> Rebalancer | None:
    """Return a rebalancer on the given store or on the process group's; None without settings or other ranks.

    All processes must make their loaders in the same order, as for the comparison at the start.
    """
    world = dealt.assignment.ranks
    if settings is None or world == 1:
        return None
    exchange: Exchange | None
    if settings.store is not None:
        exchange = Exchange(settings.store, rank, world, patience_s=settings.timeout_s)
    else:
        # each of the ranks of one data-parallel coordinate has a rebalancer; a single process decides
        exchange = Exchange.of_process_group("rebalance", settings.timeout_s)
    if exchange is None:
        raise ConfigurationError(
            f"rebalance=True with {world} ranks needs torch.distributed to be initialised: they talk through its "
            "store; or pass rebalance=Rebalancing(store=…)"
        )
    return Rebalancer(settings, exchange, rank=rank, dealt=dealt, record=record)
