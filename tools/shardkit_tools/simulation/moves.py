"""Slow ranks, and the lanes that move away from them: the real `rebalance`, asked as the leader of a run asks it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardkit.plan import Assignment, assign
from shardkit.plan.rebalance import Decision, RankTelemetry, in_force, rebalance
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.faults import SLOWNESS, Draws

__all__ = ["Moves"]

_EVERY = 8  # steps between two questions
_MOST_LANES = 256  # of a linear assignment; more are moved in bundles, or in groups of nodes
_SAMPLES = 8  # of a rank's telemetry


@dataclass
class _Pod:
    """Neighbouring nodes among which lanes move."""

    first: int  # rank
    start: Assignment
    bundle: int  # lanes that move together
    journal: list[Decision] = field(default_factory=list)
    dirty: bool = True


class Moves:
    """How slow each rank is and how many lanes it works, as the run goes on.

    Args:
        cluster: the cluster.
        lanes: L.
        slow: ranks that are slow from the beginning to the end, with their factor; beside those that faults draw.
    """

    def __init__(self, cluster: Cluster, lanes: int, slow: dict[int, float] | None = None) -> None:
        self._cluster, self._cell = cluster, cluster.work.cell
        world = cluster.world
        self.lanes_of = np.bincount(assign(lanes, world).owner, minlength=world)
        self.slowness = np.ones(world)
        self.moved_lanes: list[tuple[int, int]] = []  # (step, lanes that went to another node)
        self.decisions = 0
        self._pods: dict[int, _Pod] = {}
        self._pod_ranks = self._size_of_pods(lanes, world)
        self._events: list[tuple[float, int, int, float]] = []  # (time, number, rank, factor)
        self._count = 0
        self._draws = Draws(cluster.work.seed, SLOWNESS)
        self._asked = -_EVERY
        for rank, factor in (slow or {}).items():
            self._push(0.0, rank, factor)
        self._begin()

    def at(self, step: int, now: float) -> bool:
        """Bring everything to a step that begins at ``now`` seconds; True where something changed."""
        changed = False
        while self._events and self._events[0][0] <= now:
            when, _, rank, factor = heapq.heappop(self._events)
            self._happen(when, rank, factor)
            changed = True
        for pod in self._pods.values():
            if pod.journal and pod.journal[-1].assignment.from_step == step:
                self._apply(pod, step)
                changed = True
        if self._cluster.faults.rebalance and step - self._asked >= _EVERY and self._pods:
            self._asked = step
            for pod in self._pods.values():
                if pod.dirty:
                    self._ask(pod, step)
        return changed

    @property
    def compute_s(self) -> NDArray[np.float64]:
        """Seconds of computation of each rank in a step."""
        seconds: NDArray[np.float64] = self.lanes_of * self.slowness * self._cell
        return seconds

    # Slow ranks

    def _begin(self) -> None:
        faults, world = self._cluster.faults, self._cluster.world
        if not faults.slow_share:
            return
        expected = world * faults.slow_share
        for _ in range(int(expected) + (self._draws.uniform() < expected % 1)):
            self._slow_down(0.0)
        self._arrive(0.0)

    def _arrive(self, now: float) -> None:
        faults = self._cluster.faults
        mean = faults.slow_for / (self._cluster.world * faults.slow_share)
        self._push(now + self._draws.gap(mean), -1, faults.slow_factor)

    def _slow_down(self, now: float) -> None:
        rank = self._draws.below(self._cluster.world)
        self._push(now, rank, self._cluster.faults.slow_factor)
        self._push(now + self._draws.gap(self._cluster.faults.slow_for), rank, 1.0)

    def _push(self, when: float, rank: int, factor: float) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, rank, factor))

    def _happen(self, when: float, rank: int, factor: float) -> None:
        if rank < 0:  # one more becomes slow
            self._slow_down(when)
            self._arrive(when)
            return
        self.slowness[rank] = factor
        number = rank // self._pod_ranks
        if number not in self._pods:
            self._pods[number] = self._make_pod(number)
        self._pods[number].dirty = True

    # Moves

    def _size_of_pods(self, lanes: int, world: int) -> int:
        """Ranks of whole nodes whose lanes fit a linear assignment."""
        per_node = self._cluster.nodes.ranks
        fit = max(1, _MOST_LANES * world // lanes // per_node)
        return min(world, fit * per_node)

    def _make_pod(self, number: int) -> _Pod:
        first = number * self._pod_ranks
        ranks = min(self._pod_ranks, len(self.lanes_of) - first)
        lanes = int(self.lanes_of[first : first + ranks].sum())
        bundle = -(-lanes // _MOST_LANES) if lanes // ranks > 1 else 1
        nodes = [(first + r) // self._cluster.nodes.ranks for r in range(ranks)]
        return _Pod(first, assign(max(ranks, lanes // bundle), ranks, nodes=nodes), bundle)

    def _ask(self, pod: _Pod, step: int) -> None:
        ranks = pod.start.ranks
        slow = self.slowness[pod.first : pod.first + ranks].tolist()
        seen = [RankTelemetry((self._cell * pod.bundle * s,) * _SAMPLES) for s in slow]
        decision = rebalance(step, seen, pod.start, pod.journal)
        if decision is not None:
            pod.journal.append(decision)
            self.decisions += 1
        elif not pod.journal or step >= pod.journal[-1].assignment.from_step + 64:
            pod.dirty = False  # nothing to gain until something changes

    def _apply(self, pod: _Pod, step: int) -> None:
        before, after = in_force(pod.start, pod.journal[:-1], step), pod.journal[-1].assignment
        node = np.array(after.node_of)
        left = node[np.array(before.owner)] != node[np.array(after.owner)]
        self.moved_lanes.append((step, int(left.sum()) * pod.bundle))
        change = np.bincount(after.owner, minlength=after.ranks) - np.bincount(
            before.owner, minlength=after.ranks
        )
        self.lanes_of[pod.first : pod.first + after.ranks] += change * pod.bundle
