"""Simulate faults: failed nodes, silent locations, slow ranks, and the lanes that move away from them.

Intervals are exponential and drawn with the plan's generator. Lanes are moved by the product's `rebalance`.
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
FAILURES, OUTAGES, SLOWNESS, HOSTS = 11, 12, 13, 14  # keys derived from the seed, one per purpose


class Draws:
    """A stream of pseudorandom numbers: successive splitmix64 outputs of `plan.permutation.derive` for one key."""

    def __init__(self, seed: int, purpose: int) -> None:
        self._key, self._count = derive(seed, purpose), 0

    def below(self, n: int) -> int:
        """Draw an integer from 0 to n - 1."""
        return self._next() * n >> 64

    def uniform(self) -> float:
        """Draw a number between 0 and 1, both excluded."""
        return ((self._next() >> 12) + 0.5) / 2**52

    def gap(self, mean: float) -> float:
        """Draw an exponential interval with the given mean."""
        return -math.log(self.uniform()) * mean

    def _next(self) -> int:
        self._count += 1
        return derive(self._key, self._count)


def arrivals(draws: Draws, per_second: float) -> Iterator[float]:
    """Yield the times of a Poisson process. A rate of 0 yields none."""
    now = 0.0
    while per_second > 0:
        now += draws.gap(1 / per_second)
        yield now


def recovery(
    cluster: Cluster, step_s: float, cached_bytes: float, steps_lost: float | None = None
) -> dict[str, float]:
    """Return the cost of a failed node.

    A step takes `step_s` seconds on average. Without `steps_lost`, half an interval of checkpoints is repeated.

    Returns:
        ``seconds`` until the run is back at the failed step, and its parts ``detect_s``, ``restart_s``, ``restore_s``
        and ``redo_s``. ``refill_bytes`` are read by the new node into its cache during training, in ``refill_s``.
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
    """Return the bytes fetched again after a restart on permuted hosts, one of them new.

    Returns:
        ``refetched_bytes`` if lanes go to the nodes that cache their bytes (`assign`), and ``fixed_bytes`` if ranks
        have fixed lanes.
    """
    world, nodes, draws = cluster.world, cluster.nodes.nodes, Draws(cluster.work.seed, HOSTS)
    node_of = np.arange(world) // cluster.nodes.ranks
    fixed = node_of[np.array(assign(lanes, world).owner)]  # node that works each lane
    place = order(derive(cluster.work.seed, HOSTS), nodes)
    had = np.zeros((lanes, nodes))
    had[np.arange(lanes), place[fixed]] = (cached_bytes / np.bincount(fixed))[fixed]
    whole = had.sum()
    had[:, draws.below(nodes)] = 0  # the new node has an empty cache
    near = assign(lanes, world, nodes=node_of.tolist(), local_bytes=had).owner
    there = [had[np.arange(lanes), held].sum() for held in (node_of[np.array(near)], fixed)]
    return {"refetched_bytes": float(whole - there[0]), "fixed_bytes": float(whole - there[1])}


class Stops:
    """Interruptions of all ranks: failed nodes and silent locations.

    `cached_bytes` are in the cache of a node; `store_bytes`, float64[steps], are read by a rank in each step.
    """

    def __init__(self, cluster: Cluster, cached_bytes: float, store_bytes: NDArray[np.float64]) -> None:
        self._cluster, self._cached = cluster, cached_bytes
        self._ahead = min(cluster.store.ahead, cluster.nodes.memory // 4)
        self._reads = np.concatenate((np.cumsum(store_bytes), [np.inf]))  # inf: the end of the run
        self._rate = cluster.faults.node_failures_per_year * cluster.nodes.nodes / YEAR_S
        self._failures = arrivals(Draws(cluster.work.seed, FAILURES), self._rate)
        outages = cluster.store.outages_per_year * cluster.store.copies / YEAR_S
        self._outages = arrivals(Draws(cluster.work.seed, OUTAGES), outages)
        self._next_failure, self._next_outage = next(self._failures, np.inf), next(self._outages, np.inf)
        self.failures = self.outages = 0

    def __call__(self, step: int, now: float, step_s: float) -> float:
        """Return the seconds of interruptions after a step."""
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
        """Return the seconds until the bytes read ahead are used up, including steps that need no store reads."""
        until = int(np.searchsorted(self._reads, self._reads[step] + self._ahead, side="right"))
        return (until - step) * step_s


_EVERY = 8  # steps between calls of `rebalance`
_MOST_LANES = 256  # lanes per linear assignment; more are moved in bundles, or in groups of nodes
_SAMPLES = 8  # cell times in the telemetry of a rank


@dataclass
class _Pod:
    """A group of neighbouring nodes among which lanes move."""

    first: int  # first rank
    start: Assignment
    bundle: int  # number of lanes that move together
    journal: list[Decision] = field(default_factory=list)
    dirty: bool = True  # a move may help


class Moves:
    """Slowness and number of lanes of each rank over the run.

    `slow` has the factors of ranks that are slow from the first step, in addition to randomly slow ranks.
    """

    def __init__(self, cluster: Cluster, lanes: int, slow: dict[int, float] | None = None) -> None:
        self._cluster, self._cell = cluster, cluster.work.cell
        world = cluster.world
        self.lanes_of = np.bincount(assign(lanes, world).owner, minlength=world)
        self.slowness = np.ones(world)
        self.moved_lanes: list[tuple[int, int]] = []  # (step, number of lanes that moved to another node)
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
        """Advance to a step that begins at `now` seconds. Return True if slowness or lanes of a rank changed."""
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
        """float64[ranks], seconds of computation of each rank in a step."""
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
        if rank < 0:  # the arrival of another slow rank
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
        """Return the number of ranks, in whole nodes, whose lanes fit a linear assignment."""
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
            pod.dirty = False  # no move helps until the slowness of a rank changes

    def _apply(self, pod: _Pod, step: int) -> None:
        before, after = in_force(pod.start, pod.journal[:-1], step), pod.journal[-1].assignment
        node = np.array(after.node_of)
        left = node[np.array(before.owner)] != node[np.array(after.owner)]
        self.moved_lanes.append((step, int(left.sum()) * pod.bundle))
        change = np.bincount(after.owner, minlength=after.ranks) - np.bincount(
            before.owner, minlength=after.ranks
        )
        self.lanes_of[pod.first : pod.first + after.ranks] += change * pod.bundle
