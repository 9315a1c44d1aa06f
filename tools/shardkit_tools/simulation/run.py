"""One simulation: reads, times and costs of a described cluster, by epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardkit.errors import ConfigurationError
from shardkit.plan import Plan, make_plan
from shardkit_tools.simulation.cluster import Cluster, changed
from shardkit_tools.simulation.faults import Moves, Stops, recovery, restart
from shardkit_tools.simulation.full_shuffle import Unit, shuffled_reads
from shardkit_tools.simulation.reading import (
    BlockMap,
    Prepared,
    Reads,
    Tell,
    choose_sample,
    open_population,
    read_lanes,
)
from shardkit_tools.simulation.timing import Times, time_steps

DEFAULT_BUDGET = 12_000_000
"""Rows an epoch that are drawn exactly."""

_SHUFFLE_SHARE = 12  # of the budget: items that are followed through the caches of a full shuffle

_MONTH_S = 30 * 86400.0


def prepare(cluster: Cluster) -> Prepared:
    """The population and the plan.

    Raises:
        ConfigurationError: fewer lanes than ranks.
        PlanError: batch and lanes do not fit.
    """
    work = cluster.work
    population = open_population(cluster.data)
    if not work.lanes and work.global_batch < cluster.world:
        raise ConfigurationError(
            f"global_batch is {work.global_batch}, the cluster has {cluster.world} ranks: at least one sample for each "
            "is expected; take a larger global_batch"
        )
    plan = make_plan(population, global_batch=work.global_batch, seed=work.seed, lanes=work.lanes or None,
                     window_blocks=work.window_blocks)  # fmt: skip
    check_world(plan, cluster)
    return Prepared(population, BlockMap.of(population), plan)


def check_world(plan: Plan, cluster: Cluster) -> None:
    """Every rank needs a lane."""
    if plan.lanes < cluster.world:
        raise ConfigurationError(
            f"{plan.lanes} lanes for {cluster.world} ranks: at least one each is expected; set lanes, a divisor of "
            f"global_batch={plan.global_batch}"
        )


def simulate_lanes(
    cluster: Cluster,
    prepared: Prepared,
    *,
    budget: int = DEFAULT_BUDGET,
    slow: Mapping[int, float] | None = None,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """Our lanes, and a cache that knows the plan.

    Args:
        cluster: the description.
        prepared: see `prepare`.
        budget: rows an epoch that are drawn.
        slow: ranks that are slow all the time, with their factor.
        tell: gets a line on what is being done.
    """
    check_world(prepared.plan, cluster)
    plan = prepared.plan
    sample = choose_sample(cluster, plan.lanes, prepared.population.rows, budget)
    reads = read_lanes(cluster, prepared, sample, tell)
    tell("walking the steps")
    moves = Moves(cluster, plan.lanes, dict(slow or {}))
    result = _timed(cluster, prepared, reads, plan.loop_steps, moves)
    lane_bytes = prepared.stored_bytes / plan.lanes
    moved = [(step, lanes) for step, lanes in moves.moved_lanes if lanes]
    left = sum(lanes * lane_bytes * (1 - step % plan.loop_steps / plan.loop_steps) for step, lanes in moved)
    result["rebalancing"] = {
        "decisions": moves.decisions,
        "lanes_to_other_nodes": sum(n for _, n in moved),
        "bytes": left,
    }
    result["restart"] = restart(cluster, plan.lanes, reads.held_bytes)
    result["plan"] = {"digest": plan.digest, "lanes": plan.lanes, "cell_size": plan.cell_size,
                      "global_batch": plan.global_batch, "steps_per_epoch": plan.loop_steps}  # fmt: skip
    result["sample"] = {
        "nodes": len(sample.nodes),
        "ranks": len(reads.loads),
        "lanes": sum(map(len, sample.lanes.values())),
    }
    return result


def simulate_shuffle(
    cluster: Cluster,
    prepared: Prepared,
    *,
    unit: Unit = "sample",
    budget: int = DEFAULT_BUDGET,
    tell: Tell = lambda _: None,
) -> dict[str, Any]:
    """A full shuffle with caches that drop what was used least recently."""
    tell(f"shuffling all rows, reading {unit}s")
    reads = shuffled_reads(cluster, prepared, unit=unit, budget=budget // _SHUFFLE_SHARE)
    moves = Moves(changed(cluster, ["rebalance=false"]), prepared.plan.lanes)
    return _timed(cluster, prepared, reads, prepared.blocks.num_samples // cluster.work.global_batch, moves)


def _timed(cluster: Cluster, prepared: Prepared, reads: Reads, steps: int, moves: Moves) -> dict[str, Any]:
    """Figures by epoch of so many steps, and of what goes wrong."""
    total = steps * cluster.work.epochs
    by_step = [np.bincount(one.step, one.store_bytes, total) for one in reads.loads]
    stops = Stops(cluster, reads.held_bytes, np.mean(by_step, axis=0))
    times = time_steps(cluster, reads.loads, total, moves, stops=stops)
    epochs = []
    computing_s = cluster.work.cell * prepared.plan.lanes / cluster.world * steps
    for number in range(cluster.work.epochs):
        part = slice(number * steps, (number + 1) * steps)
        seconds, stall = float(times.step_s[part].sum()), float(times.stall_s[part].sum())
        read = {
            "egress_bytes": float(reads.store_bytes[number]),
            "requests": float(reads.requests[number]),
        }
        epochs.append({
            "seconds": seconds,
            "step_s": seconds / steps,
            "stall_s": stall,
            "stall_share": stall / seconds if seconds else 0.0,
            **read,
            "cache_hit_rate": float(reads.hit_rate[number]),
            **costs(cluster, seconds=seconds, computing_s=computing_s, stored_bytes=prepared.stored_bytes, **read),
        })  # fmt: skip
    step_s = float(times.step_s.mean())
    return {
        "epochs": epochs,
        "dataset": {
            "rows": prepared.blocks.num_samples,
            "shards": prepared.population.num_shards,
            "bytes": prepared.stored_bytes,
        },
        "rank_stall_s": float(times.rank_stall_s.mean()),
        "cache_hits": reads.cache_hits,
        "reduce_s": times.reduce_s,
        "compute_s": float(times.compute_s.mean()),
        "cache_bytes_per_node": reads.held_bytes,
        "distinct_bytes_per_node": reads.distinct_bytes,
        "recovery": recovery(cluster, step_s, reads.held_bytes),
        "failures": stops.failures,
        "outages": stops.outages,
        "stood_s": times.stood_s,
        "error": {"egress": reads.error, "stall": _stall_error(cluster, reads, times)},
    }


def _stall_error(cluster: Cluster, reads: Reads, times: Times) -> float | None:
    """What more doublings of the sampled ranks may add to the stall, relative."""
    whole, looked = float(times.stall_s.sum()), len(reads.loads)
    if looked == cluster.world or not whole:
        return 0.0
    if looked < 2:
        return None
    gained = whole - float(times.halves.sum(axis=1).mean())
    return gained * math.log2(cluster.world / looked) / whole


# ---- Dollars and joules (SPEC.md §6)


def costs(
    cluster: Cluster,
    *,
    seconds: float,
    computing_s: float,
    requests: float,
    egress_bytes: float,
    stored_bytes: float,
) -> dict[str, float]:
    """What some time costs: ``dollars``, those of them for requests and egress, ``joules`` of the nodes.

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
    machines = seconds / 3600 * nodes.nodes * nodes.price_per_hour
    asked = requests / 1e6 * store.price_per_million_requests
    egress = egress_bytes / 1e9 * store.price_per_gb
    storage = stored_bytes / 1e9 * store.copies * store.price_per_gb_month * seconds / _MONTH_S
    return {
        "dollars": machines + asked + egress + storage,
        "dollars_requests_and_egress": asked + egress,
        "joules": nodes.nodes * watts * seconds,
    }
