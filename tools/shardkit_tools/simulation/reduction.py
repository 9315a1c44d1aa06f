"""Seconds of one all-reduce, by the usual models (SPEC.md §2)."""

from __future__ import annotations

from shardkit_tools.simulation.cluster import Cluster

__all__ = ["exposed_seconds", "hierarchical_seconds", "reduce_seconds", "ring_seconds", "tree_seconds"]


def ring_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Reduce-scatter and all-gather round a ring: optimal in bytes (Patarasuk and Yuan 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * num_bytes / bandwidth


def tree_seconds(ranks: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Pipelined double binary tree: few hops, all links busy (Sanders, Speck, Träff 2009)."""
    if ranks < 2:
        return 0.0
    return 2 * (ranks - 1).bit_length() * latency + 2 * num_bytes / bandwidth


def hierarchical_seconds(
    nodes: int, ranks: int, num_bytes: float, *, inner: float, outer: float, latency: float
) -> float:
    """Reduce-scatter inside a node, rings over nodes for each part, all-gather inside.

    Args:
        nodes: of the world.
        ranks: of a node.
        num_bytes: that are summed.
        inner: bytes/s between ranks of a node.
        outer: bytes/s of a node to others; its ranks share them.
        latency: of a message.
    """
    inside = ring_seconds(ranks, num_bytes, inner, latency)
    return inside + ring_seconds(nodes, num_bytes / ranks, outer / ranks, latency)


def reduce_seconds(cluster: Cluster) -> float:
    """All-reduce of a step on this cluster."""
    reduce, nodes = cluster.reduce, cluster.nodes
    if reduce.model == "none" or not reduce.gradient:
        return 0.0
    outer = nodes.nic / reduce.oversubscription
    if reduce.model == "hierarchical":
        return hierarchical_seconds(nodes.nodes, nodes.ranks, reduce.gradient, inner=reduce.inner_bandwidth,
                                    outer=outer, latency=reduce.link_latency)  # fmt: skip
    slowest = reduce.inner_bandwidth if nodes.nodes == 1 else min(reduce.inner_bandwidth, outer)
    model = ring_seconds if reduce.model == "ring" else tree_seconds
    return model(cluster.world, reduce.gradient, slowest, reduce.link_latency)


def exposed_seconds(total: float, overlap: float, compute: float) -> float:
    """What is left of an all-reduce when a share of it hides behind the computation."""
    return total - min(total * overlap, compute)
