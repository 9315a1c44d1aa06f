"""Pieces of the simulation against closed forms, brute force and clusters small enough to work out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from shardkit.errors import ConfigurationError, NotFoundError
from shardkit.ranges import parse_duration
from shardkit_tools.simulation.cluster import (
    Cluster,
    load_cluster,
    parse_count,
    parse_rate,
    with_changes,
)
from shardkit_tools.simulation.faults import Moves, recovery, restart
from shardkit_tools.simulation.run import costs, least_recently_used, prepare, simulate_lanes
from shardkit_tools.simulation.timing import (
    RankLoads,
    exposed_seconds,
    hierarchical_seconds,
    reduce_seconds,
    ring_seconds,
    time_steps,
    tree_seconds,
)

FAST = ["verify=unlimited", "nic=unlimited", "disk_read=unlimited", "stream=unlimited", "model=none"]


def small(*changes: str) -> Cluster:
    return with_changes(Cluster(), [*FAST, "ranks=1", *changes])


# Quantities and descriptions


def test_quantities() -> None:
    assert parse_duration("30ms") == pytest.approx(0.03)
    assert parse_duration("2h") == 7200
    assert parse_rate("100Gbit/s") == 12.5e9
    assert parse_rate("6GB/s") == 6e9
    assert parse_rate(0) == parse_rate("unlimited") == math.inf
    assert parse_count("1e9") == parse_count("1_000_000k") == 10**9
    for parser, value in (
        (parse_duration, "3 weeks"),
        (parse_rate, "6GB"),
        (parse_count, "1.5"),
        (parse_count, -1),
    ):
        with pytest.raises(ConfigurationError):
            parser(value)


def test_a_description_is_checked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('name = "x"\n[nodes]\nnodes = 3\ncache = "2TB"\n[store]\nlatency = "5ms"\n')
    cluster = load_cluster(path)
    assert (cluster.name, cluster.nodes.nodes, cluster.nodes.cache, cluster.store.latency) == (
        "x",
        3,
        2 * 10**12,
        0.005,
    )
    path.write_text("[nodes]\nnodse = 3\n")
    with pytest.raises(ConfigurationError, match="did you mean nodes"):
        load_cluster(path)
    with pytest.raises(ConfigurationError, match="did you mean cache"):
        with_changes(cluster, ["cachesize=5GB"])
    with pytest.raises(ConfigurationError, match="share"):
        with_changes(cluster, ["overlap=2"])
    with pytest.raises(NotFoundError, match="examples/clusters"):
        load_cluster(tmp_path / "none.toml")


def test_every_example_can_be_simulated() -> None:
    found = sorted(Path(__file__).parents[2].joinpath("examples", "clusters").glob("*.toml"))
    assert len(found) >= 3
    for path in found:
        load_cluster(path)


# All-reduce


def test_reduction_closed_forms() -> None:
    assert ring_seconds(4, 8e9, 1e9, 0.0) == pytest.approx(12.0)  # 2 · 3/4 · 8 s
    assert ring_seconds(4, 0.0, 1e9, 1e-3) == pytest.approx(6e-3)
    assert tree_seconds(5, 8e9, 1e9, 1.0) == pytest.approx(22.0)  # 3 levels up and down, twice the bytes
    assert ring_seconds(1, 8e9, 1e9, 1.0) == tree_seconds(1, 8e9, 1e9, 1.0) == 0
    # 2 nodes of 4: inside 2·3/4·8 at 8 GB/s; then each rank rings 2 GB with one other at a quarter of 4 GB/s
    assert hierarchical_seconds(2, 4, 8e9, inner=8e9, outer=4e9, latency=0.0) == pytest.approx(1.5 + 2.0)
    assert exposed_seconds(2.0, 0.5, 10.0) == 1.0
    assert exposed_seconds(2.0, 1.0, 0.5) == 1.5, "no more hides than the computation lasts"
    slow = with_changes(
        Cluster(), ["nodes=2", "ranks=1", "model=ring", "gradient=1GB", "nic=1GB/s", "oversubscription=2"]
    )
    assert reduce_seconds(slow) == pytest.approx(2.0, rel=1e-3)


# Caches


def test_least_recently_used_by_hand() -> None:
    trace = "abcabdab"
    assert least_recently_used(trace, [1] * 8, 2).tolist() == [True] * 8
    assert least_recently_used(trace, [1] * 8, 3).tolist() == [
        True,
        True,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert least_recently_used("aab", [5, 5, 1], 4).tolist() == [True, True, True], "too large to be kept"


# Blocks


# Time


def by_hand(cluster: Cluster, blocks: list[list[int]]) -> np.ndarray:
    """One rank whose step k needs blocks of ``blocks[k]`` bytes from the store, for two of which memory has room."""
    step = np.repeat(np.arange(len(blocks)), [len(b) for b in blocks])
    size = np.concatenate([np.array(b, dtype=np.int64) for b in blocks])
    ones = np.ones(len(size), dtype=bool)
    loads = RankLoads(0, step, np.maximum(0, step - 2), size, ones, ones)
    return np.cumsum(time_steps(cluster, [loads], len(blocks), Moves(cluster, 1)).step_s)


def test_one_rank_waits_for_the_latency_once_and_then_reads_ahead() -> None:
    cluster = small("latency=1s", "cell=2s", "concurrency=1", "memory=1GiB")
    ends = by_hand(cluster, [[10], [10], [10]])
    assert ends.tolist() == [3.0, 5.0, 7.0]


def test_one_rank_that_is_bound_by_latency() -> None:
    cluster = small("latency=4s", "cell=1s", "concurrency=1", "memory=1GiB")
    ends = by_hand(cluster, [[10], [10], [10]])
    assert ends.tolist() == [5.0, 9.0, 13.0]
    more = small("latency=4s", "cell=1s", "concurrency=2", "memory=1GiB")
    assert by_hand(more, [[10], [10], [10]]).tolist() == [5.0, 6.0, 9.0]


def test_one_rank_that_is_bound_by_its_network() -> None:
    cluster = with_changes(small("latency=1s", "cell=1s", "memory=1GiB"), ["nic=10B/s"])
    assert by_hand(cluster, [[100], [100]]).tolist() == [12.0, 22.0]


def test_reading_ahead_is_bounded() -> None:
    cluster = small("latency=3s", "cell=1s", "concurrency=8", "memory=1GiB", "ahead=10B", "threads=1")
    # the second block is begun when the first was taken, the third when the second was
    assert by_hand(cluster, [[10], [10], [10]]).tolist() == [4.0, 5.0, 7.0]


# Faults, moves, money


def test_recovery_adds_up() -> None:
    cluster = with_changes(
        Cluster(),
        [
            "nodes=4",
            "nic=1GB/s",
            "bandwidth=2GB/s",
            "detect=10s",
            "restart=20s",
            "latency=0s",
            "checkpoint=8GB",
            "checkpoint_steps=100",
            "concurrency=64",
            "stream=1GB/s",
        ],
    )
    lost = recovery(cluster, 0.5, 1e9)
    assert (lost["restore_s"], lost["redo_s"]) == (4.0, 25.0)
    assert lost["seconds"] == 59.0
    assert lost["refill_s"] == pytest.approx(2.0), "a quarter of the store"
    twice = recovery(with_changes(cluster, ["copies=2"]), 0.5, 1e9)
    assert twice["restore_s"] == 2.0


@pytest.mark.slow
def test_a_restart_on_other_hosts_fetches_what_the_lost_one_had() -> None:
    pod = with_changes(Cluster(), ["nodes=1024", "ranks=8"])
    again = restart(pod, 32_768, 1e9)
    assert again["refetched_bytes"] == pytest.approx(1e9), "of 1,024 caches one"
    assert again["fixed_bytes"] >= 0.95 * 1024e9
    alone = restart(with_changes(Cluster(), ["nodes=1", "ranks=8"]), 64, 1e9)
    assert alone == {"refetched_bytes": 1e9, "fixed_bytes": 1e9}


def test_a_rank_at_half_speed_gives_lanes_away() -> None:
    """One of eight ranks at half speed, 64 lanes: 9 cells on the slowest instead of 16."""
    cluster = with_changes(Cluster(), ["ranks=8", "cell=1s"])
    moves = Moves(cluster, 64, {3: 2.0})
    moves.at(0, 0.0)
    assert moves.compute_s.max() == 16.0
    for step in range(1, 64):
        moves.at(step, step * 16.0)
    assert moves.lanes_of.sum() == 64
    assert moves.compute_s.max() <= 10.0
    assert moves.lanes_of.max() == 9
    still = Moves(with_changes(cluster, ["rebalance=false"]), 64, {3: 2.0})
    assert [still.at(step, step * 16.0) for step in range(64)] == [True] + [False] * 63


def test_costs_by_hand() -> None:
    cluster = with_changes(
        Cluster(),
        [
            "nodes=2",
            "price_per_hour=3",
            "power_idle=100",
            "power_busy=500",
            "copies=2",
            "price_per_million_requests=5",
            "price_per_gb=0.1",
            "price_per_gb_month=0.02",
        ],
    )
    paid = costs(cluster, seconds=3600, computing_s=1800, requests=2e6, egress_bytes=30e9, stored_bytes=720e9)
    assert paid["dollars_requests_and_egress"] == pytest.approx(10.0 + 3.0)
    assert paid["dollars"] == pytest.approx(6.0 + 10.0 + 3.0 + 720 * 2 * 0.02 / 720)
    assert paid["joules"] == 2 * 300 * 3600


# All of it


def test_a_cluster_worked_out_by_hand() -> None:
    """One node, one rank, no shuffle: 4 steps of 2 samples, a block of 2 samples each; nothing stays in memory."""
    cluster = with_changes(
        small("latency=1s", "cell=10s", "epochs=1", "global_batch=2", "lanes=1", "memory=1MiB"),
        ["rows=8", "shards=1", "bytes=8000000", "block=2000000"],
    )
    result = simulate_lanes(cluster, prepare(cluster))
    epoch = result["epochs"][0]
    assert epoch["egress_bytes"] == 8_000_000
    assert epoch["requests"] <= 4
    assert epoch["seconds"] == pytest.approx(41.0, abs=1.01)
    assert result["error"] == {"egress": 0.0, "stall": 0.0}


def test_too_few_lanes_are_told() -> None:
    with pytest.raises(ConfigurationError, match="set lanes"):
        prepare(with_changes(Cluster(), ["nodes=32", "global_batch=512", "lanes=64"]))
    with pytest.raises(ConfigurationError, match="larger global_batch"):
        prepare(with_changes(Cluster(), ["nodes=100", "global_batch=512"]))
