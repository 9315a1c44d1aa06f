"""When things go wrong: exponential gaps from the plan's own generator; what stops everybody, what going on takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.plan.permutation import derive
from shardkit_tools.simulation.cluster import Cluster

__all__ = ["Draws", "Recovery", "Stops", "arrivals", "recovery"]

YEAR_S = 365 * 86400.0
FAILURES, OUTAGES, SLOWNESS = 11, 12, 13  # what a key below the seed is for


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


@dataclass(frozen=True)
class Recovery:
    """What a failed node costs; seconds.

    Attributes:
        detect, restart, restore, redo: until the run is where it was.
        refill_bytes: what the new node reads again into its cache, beside the training.
        refill_s: how long that takes it.
    """

    detect: float
    restart: float
    restore: float
    redo: float
    refill_bytes: float
    refill_s: float

    @property
    def seconds(self) -> float:
        """Time to recover."""
        return self.detect + self.restart + self.restore + self.redo


def recovery(
    cluster: Cluster, step_s: float, cached_bytes: float, steps_lost: float | None = None
) -> Recovery:
    """What a failed node costs.

    Args:
        cluster: the cluster.
        step_s: seconds of a step.
        cached_bytes: that a node's cache holds.
        steps_lost: since the last checkpoint; half of the interval by default.
    """
    nodes, store, faults = cluster.nodes, cluster.store, cluster.faults
    everybody = min(store.bandwidth * store.copies, nodes.nic * nodes.nodes)
    alone = min(nodes.nic, store.bandwidth * store.copies / nodes.nodes,
                nodes.ranks * store.concurrency * store.stream)  # fmt: skip
    lost = faults.checkpoint_steps / 2 if steps_lost is None else steps_lost
    return Recovery(
        faults.detect,
        faults.restart,
        store.latency + faults.checkpoint / everybody,
        lost * step_s,
        cached_bytes,
        cached_bytes / alone,
    )


class Stops:
    """Called after every step; see `timing.Interruptions`.

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
        """Seconds that everybody stands still after a step.

        Raises:
            ConfigurationError: nodes fail faster than the run recovers, so that it would never end.
        """
        stopped = 0.0
        while self._next_failure <= now + stopped:
            lost = step % self._cluster.faults.checkpoint_steps
            takes = recovery(self._cluster, step_s, self._cached, lost).seconds
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
