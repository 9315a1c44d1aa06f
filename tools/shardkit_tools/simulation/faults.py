"""When things go wrong: exponential gaps from the plan's own integer generator; and what it takes to go on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shardkit.plan.permutation import derive
from shardkit_tools.simulation.cluster import Cluster

__all__ = ["Draws", "Recovery", "arrivals", "recovery"]

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
