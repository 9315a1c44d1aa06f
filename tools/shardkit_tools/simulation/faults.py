"""What goes wrong and what is done about it: failed nodes, silent locations, slow ranks and lanes that leave them.

Gaps are exponential, from the plan's own generator; rebalancing is the real `rebalance`, asked as a leader asks it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.plan import Assignment, assign
from shardkit.plan.assignment import Decision, RankTelemetry, in_force, rebalance
from shardkit.plan.permutation import derive, order
from shardkit_tools.simulation.cluster import Cluster

YEAR_S = 365 * 86400.0
FAILURES, OUTAGES, SLOWNESS, HOSTS = 11, 12, 13, 14  # what a key below the seed is for


class Draws:
    """A stream of numbers under a key: splitmix64 output i, as `plan.permutation.derive` gives it."""

    def __init__(self, seed: int, purpose: int) -> None:
        self._key, self._count = derive(seed, purpose), 0

    def below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        return self._next() * n >> 64

    def uniform(self) -> float:
        """A number between 0 and 1, neither of them."""
        return ((self._next() >> 12) + 0.5) / 2**52

    def gap(self, mean: float) -> float:
        """An exponential time of that mean."""
        return -math.log(self.uniform()) * mean

    def _next(self) -> int:
        self._count += 1
        return derive(self._key, self._count)


def arrivals(draws: Draws, per_second: float) -> Iterator[float]:
    """Times of a Poisson stream; none where the rate is 0."""
    now = 0.0
    while per_second > 0:
        now += draws.gap(1 / per_second)
        yield now


def recovery(
    cluster: Cluster, step_s: float, cached_bytes: float, steps_lost: float | None = None
) -> dict[str, float]:
    """What a failed node costs.

    Returns:
        ``seconds`` until the run is where it was, and its parts ``detect_s``, ``restart_s``, ``restore_s``, ``redo_s``;
        ``refill_bytes`` that the new node reads again into its cache, beside the training, in ``refill_s``.
    """
    nodes, store, faults = cluster.nodes, cluster.store, cluster.faults
    everybody = min(store.bandwidth * store.copies, nodes.nic * nodes.nodes)
    alone = min(nodes.nic, store.bandwidth * store.copies / nodes.nodes,
                nodes.ranks * store.concurrency * store.stream)  # fmt: skip
    lost = faults.checkpoint_steps / 2 if steps_lost is None else steps_lost
    parts = {
        "detect_s": faults.detect,
        "restart_s": faults.restart,
        "restore_s": store.latency + faults.checkpoint / everybody,
        "redo_s": lost * step_s,
    }
    return {
        "seconds": sum(parts.values()),
        **parts,
        "refill_bytes": cached_bytes,
        "refill_s": cached_bytes / alone,
    }


def restart(cluster: Cluster, lanes: int, cached_bytes: float) -> dict[str, float]:
    """What the nodes fetch again after a restart on permuted hosts of which one is new.

    Returns:
        ``refetched_bytes`` where lanes go to the nodes that have their bytes (`assign`), ``fixed_bytes`` where ranks
        have fixed shares.
    """
    world, nodes, draws = cluster.world, cluster.nodes.nodes, Draws(cluster.work.seed, HOSTS)
    node_of = np.arange(world) // cluster.nodes.ranks
    fixed = node_of[np.array(assign(lanes, world).owner)]  # node that works each lane
    place = order(derive(cluster.work.seed, HOSTS), nodes)
    had = np.zeros((lanes, nodes))
    had[np.arange(lanes), place[fixed]] = (cached_bytes / np.bincount(fixed))[fixed]
    whole = had.sum()
    had[:, draws.below(nodes)] = 0  # no node has what the lost one had
    near = assign(lanes, world, nodes=node_of.tolist(), local_bytes=had).owner
    there = [had[np.arange(lanes), held].sum() for held in (node_of[np.array(near)], fixed)]
    return {"refetched_bytes": float(whole - there[0]), "fixed_bytes": float(whole - there[1])}


class Stops:
    """What stops everybody: failed nodes, silent locations.

    Args:
        cluster: the cluster.
        cached_bytes: of a node.
        store_bytes: float64[steps], what a rank reads from the store in each.
    """

    def __init__(self, cluster: Cluster, cached_bytes: float, store_bytes: NDArray[np.float64]) -> None:
        self._cluster, self._cached = cluster, cached_bytes
        self._ahead = min(cluster.store.ahead, cluster.nodes.memory // 4)
        self._reads = np.concatenate((np.cumsum(store_bytes), [np.inf]))  # the run goes on behind its end
        self._rate = cluster.faults.node_failures_per_year * cluster.nodes.nodes / YEAR_S
        self._failures = arrivals(Draws(cluster.work.seed, FAILURES), self._rate)
        outages = cluster.store.outages_per_year * cluster.store.copies / YEAR_S
        self._outages = arrivals(Draws(cluster.work.seed, OUTAGES), outages)
        self._next_failure, self._next_outage = next(self._failures, np.inf), next(self._outages, np.inf)
        self.failures = self.outages = 0

    def __call__(self, step: int, now: float, step_s: float) -> float:
        """Seconds that everybody stands still after a step that ends ``now``; steps take ``step_s`` on average."""
        stopped = 0.0
        while self._next_failure <= now + stopped:
            lost = step % self._cluster.faults.checkpoint_steps
            takes = recovery(self._cluster, step_s, self._cached, lost)["seconds"]
            if self._rate * takes >= 1:
                raise ConfigurationError(
                    f"a node fails every {1 / self._rate:.0f} s and recovering takes {takes:.0f} s: this cluster never "
                    "gets on; lower node_failures_per_year, or detect, restart and checkpoint_steps"
                )
            stopped += takes
            self.failures += 1
            self._next_failure = next(self._failures)
        while self._next_outage <= now + stopped:
            self.outages += 1
            if self._cluster.store.copies == 1:
                stopped += max(0.0, self._cluster.store.outage - self._lasts(step, step_s))
            self._next_outage = next(self._outages)
        return stopped

    def _lasts(self, step: int, step_s: float) -> float:
        """Seconds that what was read ahead, and what needs no store, lasts."""
        until = int(np.searchsorted(self._reads, self._reads[step] + self._ahead, side="right"))
        return (until - step) * step_s


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
