"""Dollars and joules (SPEC.md §6)."""

from __future__ import annotations

from dataclasses import dataclass

from shardkit_tools.simulation.cluster import Cluster

__all__ = ["Costs", "costs"]

_MONTH_S = 30 * 86400.0


@dataclass(frozen=True)
class Costs:
    """Of some time.

    Attributes:
        machines, requests, egress, storage: dollars.
        joules: of the nodes.
    """

    machines: float
    requests: float
    egress: float
    storage: float
    joules: float

    @property
    def dollars(self) -> float:
        """All of them."""
        return self.machines + self.requests + self.egress + self.storage


def costs(
    cluster: Cluster,
    *,
    seconds: float,
    computing_s: float,
    requests: float,
    egress_bytes: float,
    stored_bytes: float,
) -> Costs:
    """What some time costs.

    Args:
        cluster: the cluster, with its prices.
        seconds: how long.
        computing_s: of it, a rank's mean time of computation.
        requests: to the store.
        egress_bytes: out of the store.
        stored_bytes: of the dataset, once.
    """
    nodes, store = cluster.nodes, cluster.store
    busy = min(1.0, computing_s / seconds) if seconds else 0.0
    watts = nodes.power_idle + (nodes.power_busy - nodes.power_idle) * busy
    return Costs(
        machines=seconds / 3600 * nodes.nodes * nodes.price_per_hour,
        requests=requests / 1e6 * store.price_per_million_requests,
        egress=egress_bytes / 1e9 * store.price_per_gb,
        storage=stored_bytes / 1e9 * store.copies * store.price_per_gb_month * seconds / _MONTH_S,
        joules=nodes.nodes * watts * seconds,
    )
