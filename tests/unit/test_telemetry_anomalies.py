"""Each rule on series that it must find, and on such as differ from them by little."""

from __future__ import annotations

from typing import Any

import pytest

from shardkit.telemetry import Record, find_anomalies, find_bottleneck
from shardkit.telemetry.recorder import AnomalyWatch
from tests.unit.telemetry_series import made_series

# A rank that takes 10 steps of 200 ms every two seconds, two cells each.
STEADY = {
    "loader.steps": 10, "loader.samples": 320, "loader.cells": 20, "trainer.steps": 10, "trainer.cells": 20,
    "trainer.data_s": 0.2, "trainer.compute_s": 1.4, "trainer.reduce_s": 0.3, "trainer.update_s": 0.1,
}  # fmt: skip


def found(series: dict[int, list[Record]], now: float | None = None) -> list[tuple[str, int, str]]:
    at = max((one[-1].time for one in series.values()), default=0.0) if now is None else now
    return [(one.kind, one.rank, one.action) for one in find_anomalies(series, at)]


def test_a_steady_run_is_not_unusual() -> None:
    ranks = {rank: made_series(rank, world=4, per_interval=STEADY) for rank in range(4)}
    assert found(ranks) == []
    assert found({}) == []
    assert found({0: made_series(records=1)}) == []


def test_no_step_while_records_come_is_a_stall_of_the_stage() -> None:
    def stuck(number: int) -> dict[str, float]:
        return dict.fromkeys(STEADY, 0.0) if number > 20 else {}

    waiting = made_series(per_interval=STEADY, change=stuck, stage="data")
    assert found({0: waiting}) == [("stall", 0, "failover")]
    [anomaly] = find_anomalies({0: waiting}, waiting[-1].time)
    assert anomaly.evidence == {"stuck_s": 38.0, "step": 200, "stage": "data"}
    computing = made_series(per_interval=STEADY, change=stuck, stage="compute")
    assert found({0: computing}) == [("stall", 0, "advice")]
    for stage in ("evaluation", "checkpoint"):
        assert found({0: made_series(per_interval=STEADY, change=stuck, stage=stage)}) == []


def test_only_the_cause_of_a_stall_is_told() -> None:
    """One rank dies, the others wait for it in a collective; one waits for data, and the others for it."""

    def stuck(number: int) -> dict[str, float]:
        return dict.fromkeys(STEADY, 0.0) if number > 20 else {}

    waiting = {
        rank: made_series(rank, world=4, per_interval=STEADY, change=stuck, stage="reduce")
        for rank in range(4)
    }
    assert [rank for _, rank, _ in found(waiting)] == [0, 1, 2, 3]
    gone = {**waiting, 2: made_series(2, world=4, per_interval=STEADY, records=21)}
    assert found(gone) == [("stall", 2, "restart")]
    starved = {**waiting, 3: made_series(3, world=4, per_interval=STEADY, change=stuck, stage="data")}
    assert found(starved) == [("stall", 3, "failover")]


def test_slow_steps_are_no_stall() -> None:
    def every_twentieth(number: int) -> dict[str, float]:
        return {**STEADY, "loader.steps": 1} if number % 20 == 0 else dict.fromkeys(STEADY, 0.0)

    slow = made_series(records=80, per_interval=STEADY, change=every_twentieth)
    assert "stall" not in [kind for kind, _, _ in found({0: slow})]


def test_the_first_step_may_take_minutes() -> None:
    begun = dict.fromkeys(STEADY, 0.0)
    assert found({0: made_series(records=100, per_interval=begun)}) == []
    assert found({0: made_series(records=160, per_interval=begun)}) == [("stall", 0, "advice")]


@pytest.mark.parametrize(("silent_s", "state", "expected"), [
    (14.0, "running", []), (16.0, "running", [("stall", 0, "restart")]), (1e6, "ended", []),
])  # fmt: skip
def test_silence(silent_s: float, state: str, expected: list[Any]) -> None:
    series = made_series(per_interval=STEADY, state=state)
    assert found({0: series}, series[-1].time + silent_s) == expected


@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_whose_cells_take_longer_is_a_straggler(world: int) -> None:
    slow = {**STEADY, "trainer.compute_s": 3.0, "trainer.reduce_s": 0.0}
    ranks = {
        rank: made_series(rank, world=world, per_interval=slow if rank == 1 else STEADY)
        for rank in range(world)
    }
    assert found(ranks) == [("straggler", 1, "rebalance")]
    [anomaly] = find_anomalies(ranks, ranks[0][-1].time)
    assert anomaly.evidence["cell_s"] == pytest.approx(3.3 / 20)
    assert anomaly.evidence["others_cell_s"] == pytest.approx(1.7 / 20)
    assert anomaly.evidence["host"] == "node1"


def test_a_loop_of_ones_own_is_judged_by_what_it_says_that_it_computed() -> None:
    """In step all ranks take equally long: only `Loader.computed` tells the slow one from those that wait for it."""
    loop = {"loader.steps": 10, "loader.samples": 320, "loader.cells": 20, "loader.consumer_wait_s": 0.02}
    silent = {rank: made_series(rank, world=3, per_interval=loop) for rank in range(3)}
    assert found(silent) == []
    told = {
        rank: made_series(
            rank, world=3, per_interval={**loop, "loader.computed_s": 1.8 if rank == 2 else 0.4}
        )
        for rank in range(3)
    }
    assert found(told) == [("straggler", 2, "rebalance")]
    bottleneck = find_bottleneck(told)
    assert bottleneck is not None
    assert (bottleneck.kind, bottleneck.rank) == ("compute", 2)
    late = {
        rank: made_series(
            rank, world=3, per_interval={**loop, "loader.consumer_wait_s": 1.5 if rank else 0.02}
        )
        for rank in range(3)
    }
    assert found({0: late[0], 1: late[0], 2: late[2]}) == [("straggler", 2, "rebalance")]


def test_one_hiccup_is_no_straggler() -> None:
    def hiccup(number: int) -> dict[str, float]:
        return {"trainer.compute_s": 40.0} if number == 38 else {}

    ranks = {
        0: made_series(0, world=2, per_interval=STEADY),
        1: made_series(1, world=2, per_interval=STEADY, change=hiccup),
    }
    assert found(ranks) == []


def test_microseconds_do_not_matter() -> None:
    tiny = {**STEADY, "trainer.data_s": 0.0, "trainer.compute_s": 0.004, "trainer.update_s": 0.0}
    ranks = {0: made_series(0, world=2, per_interval=tiny),
             1: made_series(1, world=2, per_interval={**tiny, "trainer.compute_s": 0.012})}  # fmt: skip
    assert found(ranks) == []


def test_unequal_work_at_equal_pace_is_skew() -> None:
    """Rank 0 has three times the cells, and takes three times as long for its part of a step."""
    more = {**STEADY, "loader.cells": 60, "trainer.cells": 60, "trainer.compute_s": 1.5}
    less = {**STEADY, "trainer.compute_s": 0.3}
    ranks = {
        0: made_series(0, world=2, per_interval=more, lanes=range(6)),
        1: made_series(1, world=2, per_interval=less),
    }
    assert found(ranks) == [("skew", 0, "rebalance")]
    [anomaly] = find_anomalies(ranks, ranks[0][-1].time)
    assert (anomaly.evidence["lanes"], anomaly.evidence["fewest_lanes"]) == (6, 2)


def test_falling_throughput_names_what_it_waits_for() -> None:
    def later(number: int) -> dict[str, float]:
        slow = {"loader.samples": 150, "loader.steps": 5, "trainer.data_s": 1.6, "trainer.compute_s": 0.2,
                "loader.load_wait_s": 1.5, "reads.remote_requests": 9}  # fmt: skip
        return slow if number > 30 else {}

    series = {0: made_series(per_interval=STEADY, change=later)}
    assert found(series) == [("slowdown", -1, "failover")]
    [anomaly] = find_anomalies(series, series[0][-1].time)
    assert anomaly.evidence["samples_per_s"] == 75
    assert anomaly.evidence["before_samples_per_s"] == pytest.approx(160, rel=0.05)
    assert anomaly.evidence["bottleneck"].startswith("store-bound")


def test_an_evaluation_is_no_slowdown() -> None:
    def evaluating(number: int) -> dict[str, float]:
        return {**dict.fromkeys(STEADY, 0.0), "trainer.evaluation_s": 2.0} if 30 < number < 38 else {}

    assert found({0: made_series(per_interval=STEADY, change=evaluating)}) == []


@pytest.mark.parametrize(("counts", "expected"), [
    ({38: 3}, ["verification"]), ({37: 1, 38: 1}, []), ({14: 9, 38: 3}, []), ({14: 2, 36: 3}, ["verification"]),
])  # fmt: skip
def test_rising_verification_failures(counts: dict[int, int], expected: list[str]) -> None:
    """The window is the last 60 s: intervals 10 to 39, halves from 25 on."""
    series = made_series(
        per_interval=STEADY, change=lambda number: {"reads.remote_mismatches": float(counts.get(number, 0))}
    )
    assert [kind for kind, _, _ in found({0: series})] == expected


def test_another_session_starts_at_zero() -> None:
    """A restart resets counters: no negative rates, no slowdown across it."""
    before = made_series(per_interval=STEADY, session="one")
    after = made_series(per_interval=STEADY, session="two", begin=1_090.0, records=10)
    assert found({0: [*before, *after]}) == []


# ---- the bottleneck


def test_the_critical_rank_is_the_one_that_waits_least() -> None:
    slow = {**STEADY, "trainer.data_s": 1.42, "trainer.compute_s": 0.4, "trainer.reduce_s": 0.0}
    slow |= {"loader.load_wait_s": 1.3, "reads.remote_requests": 30.0}
    quick = {**STEADY, "trainer.compute_s": 0.4, "trainer.reduce_s": 1.2}
    ranks = {0: made_series(0, world=2, per_interval=quick), 1: made_series(1, world=2, per_interval=slow)}
    bottleneck = find_bottleneck(ranks)
    assert bottleneck is not None
    assert (bottleneck.rank, bottleneck.text) == (1, "store-bound, 71 %")
    assert sum(bottleneck.shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize(("counters", "kind"), [
    ({"loader.load_wait_s": 1.0}, "disk"), ({"loader.load_wait_s": 1.0, "reads.cache_misses": 3}, "store"),
    ({"loader.gather_s": 1.0}, "gather"), ({"loader.transform_s": 1.0}, "transform"),
    ({"loader.plan_starved_s": 1}, "plan"), ({}, "data"),
])  # fmt: skip
def test_the_wait_for_data_is_divided_by_stage(counters: dict[str, float], kind: str) -> None:
    waiting = {**STEADY, "trainer.data_s": 1.6, "trainer.compute_s": 0.1, "trainer.reduce_s": 0.1, **counters}
    bottleneck = find_bottleneck({0: made_series(per_interval=waiting)})
    assert bottleneck is not None
    assert (bottleneck.kind, round(bottleneck.share, 2)) == (kind, 0.8)


def test_a_trainer_that_does_not_report_is_what_is_not_waiting_for_data() -> None:
    series = [
        Record(
            time=2.0 * i,
            rank=0,
            values={"loader.steps": 10.0 * i, "loader.consumer_wait_s": 0.5 * i, "loader.gather_s": i},
        )
        for i in range(8)
    ]
    bottleneck = find_bottleneck({0: series})
    assert bottleneck is not None
    assert bottleneck.shares == pytest.approx({"gather": 0.25, "trainer": 0.75})
    assert find_bottleneck({}) is None


# ---- events


def test_an_anomaly_is_told_when_it_begins_and_when_it_is_over(tmp_path: Any) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    watch = AnomalyWatch(tmp_path, lambda kind, **details: told.append((kind, details)))
    slow = {**STEADY, "trainer.compute_s": 3.0}
    ranks = {0: made_series(0, world=2, per_interval=STEADY), 1: made_series(1, world=2, per_interval=slow)}
    unusual = find_anomalies(ranks, ranks[0][-1].time)
    for found_now, now in ((unusual, 10.0), (unusual, 20.0), ([], 31.5), ([], 40.0)):
        watch.settle(found_now, now)
    assert [(kind, details["anomaly"], details["rank"]) for kind, details in told] == [
        ("anomaly", "straggler", 1), ("anomaly_over", "straggler", 1)]  # fmt: skip
    assert told[0][1]["action"] == "rebalance"
    assert told[0][1]["evidence"]["times"] == pytest.approx(1.9, abs=0.1)
    assert told[1][1]["seconds"] == 21.5
