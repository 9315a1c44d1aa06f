"""What stops the whole run: nodes that fail, locations that are silent."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit_tools.simulation.cluster import Cluster
from shardkit_tools.simulation.faults import FAILURES, OUTAGES, YEAR_S, Draws, arrivals, recovery

__all__ = ["Stops"]


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
