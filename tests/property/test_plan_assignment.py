"""Assignments: every lane once, shares by speed, most local bytes, fewest moves; worlds 1..17, every remainder."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.errors import PlanError
from shardkit.plan import Assignment, assign, data_coordinates

some = settings(max_examples=60, deadline=None)
worlds = st.integers(1, 64).flatmap(lambda lanes: st.tuples(st.just(lanes), st.integers(1, lanes)))


@some
@given(worlds)
def test_all_lanes_evenly_and_in_runs(world):  # type: ignore[no-untyped-def]
    lanes, ranks = world
    given_out = assign(lanes, ranks)
    counts = [len(given_out.lanes_of(r)) for r in range(ranks)]
    assert sum(counts) == lanes
    assert max(counts) - min(counts) <= 1
    assert list(given_out.owner) == sorted(given_out.owner)
    assert given_out.even == (lanes % ranks == 0)
    # what 0.1's loader dealt: a run that goes on has the same lanes on the same ranks
    assert given_out.shares() == [
        list(range(r * lanes // ranks, (r + 1) * lanes // ranks)) for r in range(ranks)
    ]
    assert [list(given_out.lanes_of(r)) for r in range(ranks)] == given_out.shares()
    alone = assign(lanes, ranks, nodes=range(ranks), local_bytes=np.zeros((lanes, ranks)))
    assert alone.owner == given_out.owner, "an empty table changes nothing"


@some
@given(worlds, st.integers(1, 64), st.integers(1, 8))
def test_a_changed_world_moves_no_lane_without_need(world, then, per_node):  # type: ignore[no-untyped-def]
    lanes, ranks = world
    then = min(then, lanes)
    before = assign(lanes, ranks, nodes=[r // per_node for r in range(ranks)])
    after = assign(lanes, then, nodes=[r // per_node for r in range(then)], previous=before)
    moves = sum(a != b for a, b in zip(before.owner, after.owner, strict=True))
    held = [len(before.lanes_of(r)) for r in range(max(ranks, then))]
    # the least number of moves over all even shares: the fullest ranks keep the larger shares
    keep = sorted(held[:then], reverse=True)
    shares = sorted((lanes // then + (i < lanes % then) for i in range(then)), reverse=True)
    assert moves == lanes - sum(min(h, s) for h, s in zip(keep, shares, strict=True))


def test_most_bytes_are_local_by_exhaustion():  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(5)
    for _ in range(25):
        table = rng.integers(0, 1024, size=(6, 3))
        table[0, 0] = 1024  # 1024ths of the largest entry are whole numbers: nothing is rounded
        found = assign(6, 3, nodes=[0, 1, 2], local_bytes=table)
        got = sum(table[lane, owner] for lane, owner in enumerate(found.owner))
        best = max(
            sum(table[lane, owner] for lane, owner in enumerate(p))
            for p in set(itertools.permutations([0, 0, 1, 1, 2, 2]))
        )
        assert got == best


@some
@given(st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.0, 3.0]), min_size=1, max_size=6), st.integers(6, 20))
def test_shares_by_speed_end_as_early_as_any(speeds, lanes):  # type: ignore[no-untyped-def]
    found = assign(lanes, len(speeds), speeds=speeds)
    slowest = max(len(found.lanes_of(r)) / s for r, s in enumerate(speeds))
    # no share can end earlier: at any earlier time all ranks together had worked fewer lanes
    earlier = slowest * (1 - 1e-9)
    assert sum(max(1, int(earlier * s)) for s in speeds) < lanes or slowest == max(1 / s for s in speeds)


def test_mesh_axes_that_share_data():  # type: ignore[no-untyped-def]
    got = data_coordinates(np.arange(8).reshape(2, 2, 2), ("dp", "pp", "tp"))
    assert [got[r] for r in range(8)] == [(0, 2)] * 4 + [(1, 2)] * 4
    hybrid = data_coordinates(np.arange(8).reshape(2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    assert [hybrid[r][0] for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data_coordinates(np.arange(4), ("tp",))[3] == (0, 1)
    with pytest.raises(PlanError, match="one different name per axis"):
        data_coordinates(np.arange(8).reshape(2, 4), ("dp",))


def test_what_cannot_be_assigned_is_refused():  # type: ignore[no-untyped-def]
    with pytest.raises(PlanError, match="9 ranks for 8 lanes"):
        assign(8, 9)
    with pytest.raises(PlanError, match="one for each rank"):
        assign(8, 2, nodes=[0])
    with pytest.raises(PlanError, match="8 lanes, expected 4"):
        assign(4, 2, previous=Assignment((0,) * 8, (0,)))
