"""What holds for every simulated cluster."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import ConfigurationError
from shardkit.plan import make_plan
from shardkit_tools.simulation.cluster import Cluster, with_changes
from shardkit_tools.simulation.reading import BlockMap, open_population
from shardkit_tools.simulation.run import prepare, simulate_lanes, simulate_shuffle

SMALL = [
    "model=none",
    "latency=20ms",
    "rows=6000",
    "bytes=60MB",
    "shards=12",
    "strata=3",
    "block=100KB",
    "global_batch=60",
    "lanes=12",
    "memory=1MiB",
    "epochs=2",
]

shapes = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))


def cluster(nodes: int, ranks: int, *changes: str) -> Cluster:
    return with_changes(Cluster(), [*SMALL, f"nodes={nodes}", f"ranks={ranks}", *changes])


def needed_bytes(described: Cluster) -> int:
    """What an epoch of the plan needs of the store at least: the blocks of its samples, once."""
    population = open_population(described.data)
    plan = make_plan(population, global_batch=60, lanes=12, seed=described.work.seed)
    blocks = BlockMap.of(population)
    samples = plan.steps(0, plan.loop_steps).ravel()
    return int(blocks.weigh(np.unique(blocks.locate(samples)[2]))[0].sum())


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(shapes, st.integers(0, 100), st.lists(st.integers(0, 80), min_size=2, max_size=4))
def test_more_cache_never_reads_more_and_all_that_is_needed_is_read(
    shape: tuple[int, int], seed: int, sizes: list[int]
) -> None:
    plain = cluster(*shape, f"seed={seed}")
    prepared, least = prepare(plain), needed_bytes(plain)
    egress = []
    for size in sorted(sizes):
        result = simulate_lanes(with_changes(plain, [f"cache={size}MB"]), prepared)
        read = [one["egress_bytes"] for one in result["epochs"]]
        assert read[0] >= least
        egress.append(sum(read))
        assert result["cache_bytes_per_node"] <= size * 10**6
    # blocks differ in size and evicting makes room for 2 % at a time: a little slack
    assert all(b <= a * 1.02 for a, b in itertools.pairwise(egress))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(shapes, st.integers(0, 100))
def test_equal_seeds_give_equal_output(shape: tuple[int, int], seed: int) -> None:
    described = cluster(
        *shape, f"seed={seed}", "cache=5MB", "slow_share=0.2", "slow_for=1s", "node_failures_per_year=20000"
    )
    twice = [
        json.dumps(
            [simulate_lanes(described, prepare(described)), simulate_shuffle(described, prepare(described))]
        )
        for _ in range(2)
    ]
    assert twice[0] == twice[1]


def test_a_cluster_that_fails_faster_than_it_recovers_is_refused() -> None:
    described = cluster(3, 2, "node_failures_per_year=3000000")
    with pytest.raises(ConfigurationError, match="never gets on"):
        simulate_lanes(described, prepare(described))


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 100))
def test_a_sample_of_the_nodes_agrees_with_all_of_them(seed: int) -> None:
    described = cluster(6, 1, f"seed={seed}", "cache=3MB")
    prepared = prepare(described)
    whole = simulate_lanes(described, prepared)
    part = simulate_lanes(described, prepared, budget=6 * 100_500)
    assert part["sample"]["nodes"] < 6 == whole["sample"]["nodes"]
    assert whole["error"] == {"egress": 0.0, "stall": 0.0}
    for one, other in zip(part["epochs"], whole["epochs"], strict=True):
        assert abs(one["egress_bytes"] / other["egress_bytes"] - 1) < 0.15


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(["sample", "block"]), st.integers(0, 100))
def test_a_full_shuffle_reads_at_least_the_dataset_once(unit: str, seed: int) -> None:
    described = cluster(2, 1, f"seed={seed}", "cache=100MB")
    result = simulate_shuffle(
        described, prepare(described), unit="block" if unit == "block" else "sample", budget=10**9
    )
    first, second = result["epochs"]
    assert first["egress_bytes"] >= 60_000_000
    assert second["egress_bytes"] <= first["egress_bytes"]
    one_node = cluster(1, 1, f"seed={seed}", "cache=100MB")
    again = simulate_shuffle(one_node, prepare(one_node), unit="sample", budget=10**9)["epochs"]
    assert [one["egress_bytes"] for one in again] == [60_000_000, 0]
