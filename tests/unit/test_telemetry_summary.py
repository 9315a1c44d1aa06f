"""The document that `top` and the page show: rates, sources, lanes over time."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.telemetry import Record, RunTelemetry, summarise
from shardkit.telemetry.recorder import BlockTimes
from shardkit.telemetry.summary import chart_series, lane_history, lane_moves
from shardkit_tools.commands.top import _rank_row
from tests.unit.telemetry_series import made_series

STEADY = {
    "loader.steps": 10.0, "loader.samples": 320.0, "loader.cells": 20.0, "loader.consumer_wait_s": 0.5,
    "reads.bytes_from_cache": 2_000.0, "blocks.local_bytes": 4_000.0,
}  # fmt: skip


def of(*series: list[Record]) -> RunTelemetry:
    return RunTelemetry({(records[-1].rank, records[-1].worker): records for records in series})


def test_rates_are_per_second_and_summed_over_ranks_and_workers() -> None:
    ranks = [made_series(rank, world=2, per_interval=STEADY) for rank in range(2)]
    worker = made_series(0, world=2, per_interval=STEADY, worker=1)
    view = summarise(of(*ranks, worker), [], ranks[0][-1].time)
    assert view["samples_per_s"] == pytest.approx(3 * 160)
    assert [row["samples_per_s"] for row in view["ranks"]] == pytest.approx([320, 160])
    assert view["ranks"][0]["bytes_per_s"] == pytest.approx(6_000)
    assert view["ranks"][1]["data_share"] == pytest.approx(0.25)
    assert view["ranks"][1]["step_s"] == pytest.approx(0.2)
    assert view["bytes"] == {"disk": 3 * 39 * 4_000, "cache": 3 * 39 * 2_000}
    assert view["state"] == "running"
    assert view["world"] == 2


def test_own_work_is_not_measured_unless_the_loop_reports_it() -> None:
    for reported, own in (({}, None), ({"loader.computed_s": 1.0}, 0.15)):
        series = made_series(per_interval=STEADY | reported)
        (row,) = summarise(of(series), [], series[-1].time)["ranks"]
        assert row["busy_step_s"] == (None if own is None else pytest.approx(own))
        assert ("not measured" in _rank_row(row)) == (own is None)


@pytest.mark.parametrize(("state", "age", "shown"), [
    ("running", 5.0, "running"), ("running", 20.0, "silent"), ("ended", 1e5, "ended"),
])  # fmt: skip
def test_the_state_of_a_run(state: str, age: float, shown: str) -> None:
    series = made_series(per_interval=STEADY, state=state)
    assert summarise(of(series), [], series[-1].time + age)["state"] == shown


def test_a_run_without_records_is_shown_as_that() -> None:
    view = summarise(RunTelemetry(), [{"time": 1.0, "event": "start"}], 5.0)
    assert view["state"] == "no records yet"
    assert (view["ranks"], view["bottleneck"], view["anomalies"], view["lane_owners"]) == ([], None, [], [])
    assert len(view["events"]) == 1


def test_what_grew_is_spread_over_the_points_that_it_covers() -> None:
    """Nothing is lost and nothing is counted twice, however points and records lie."""
    for interval_s, records in ((2.0, 500), (0.3, 20), (7.0, 1000)):
        series = made_series(records=records, interval_s=interval_s, per_interval=STEADY)
        found = chart_series(of(series), series[-1].time)
        assert sum(found["samples_per_s"]) * found["width_s"] == pytest.approx(320 * (records - 1), rel=1e-6)
        assert len(found["time"]) == len(found["samples_per_s"]) <= 91
        assert found["bytes_per_s"].keys() == {"cache", "disk"}
        assert max(one for one in found["wait_share"] if one is not None) <= 1.0


def test_lane_moves_are_seen_in_the_records_whoever_speaks_first() -> None:
    for first, second in ((0.0, 1.5), (1.5, 0.0)):
        before = [
            made_series(0, world=2, records=5, lanes=(0, 1), begin=10.0 + first),
            made_series(1, world=2, records=5, lanes=(2, 3), begin=10.0 + second),
        ]
        after = [
            made_series(0, world=2, records=5, lanes=(0, 1, 2), begin=30.0 + first),
            made_series(1, world=2, records=5, lanes=(3,), begin=30.0 + second),
        ]
        ranks = {rank: [*before[rank], *after[rank]] for rank in range(2)}
        assert [(one["lane"], one["from"], one["to"]) for one in lane_moves(ranks)] == [(2, 1, 0)]
        assert [row["owners"] for row in lane_history(ranks)] == [[0, 0, 1, 1], [0, 0, 0, 1]]


def test_shards_are_summed_over_ranks() -> None:
    tables: list[dict[str, Any]] = [
        {"hot_shards": [["aa", 2, 100], ["bb", 1, 500]]},
        {"hot_shards": [["aa", 3, 50], ["cc"], ["dd", "x", 1]]},
    ]
    records = [
        Record(time=5.0, rank=rank, world=2, session=str(rank), tables=tables[rank]) for rank in range(2)
    ]
    view = summarise(of(*([one] for one in records)), [], 5.0)
    assert view["hot_shards"] == [["bb", 1, 500], ["aa", 5, 150]]


def test_a_lane_that_two_ranks_have_worked_is_one_lane() -> None:
    rows: list[list[list[Any]]] = [
        [[3, 2, 0.5, 100], [1, 1, 0.25, 50]],
        [[3, 1, 1.0, 50], ["x", 1, 1.0, 1], [7, 1], [-1, 1, 1.0, 1], [2.0, 1, 0.125, 8]],
    ]
    records = [
        Record(time=5.0, rank=rank, world=2, session=str(rank), tables={"lane_loads": rows[rank]})
        for rank in range(2)
    ]
    view = summarise(of(*([one] for one in records)), [], 5.0)
    assert view["lane_loads"] == [[1, 1, 0.25, 50], [2, 1, 0.125, 8], [3, 3, 1.5, 150]]


def test_loads_are_counted_for_the_lane_that_needs_the_block_first() -> None:
    times = BlockTimes(lambda shard: f"shard {shard}", lambda _: True)
    times.expect([10, 11, 12], [0, 0, 5])
    for number, seconds in ((10, 0.5), (11, 0.25), (12, 3.0), (13, 9.0)):  # of 13 nobody has spoken
        times.note(0, number, seconds, 100, number=number)
    times.note(0, 12, 1.0, 100, number=12)  # loaded again: after an eviction, or because lanes moved
    times.expect([12], [4])
    times.note(0, 12, 0.125, 100, number=12)
    assert times.lane_loads() == [[5, 2, 4.0, 200], [0, 2, 0.75, 200], [4, 1, 0.125, 100]]
    assert times.hot_shards() == [["shard 0", 6, 600]]


def test_lanes_of_the_blocks_named_last_are_known() -> None:
    times = BlockTimes(lambda shard: f"shard {shard}", lambda _: True)
    times.expect(range(40_000), [1] * 40_000)
    times.expect(range(10), [2] * 10)
    times.expect(range(40_000, 70_000), [3] * 30_000)
    for block in (5, 15, 39_999, 69_999):  # 15 has been forgotten
        times.note(0, block, 1.0, 100, number=block)
    assert sorted(times.lane_loads()) == [[1, 1, 1.0, 100], [2, 1, 1.0, 100], [3, 1, 1.0, 100]]
