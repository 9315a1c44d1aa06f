"""One rank of a run is slowed: records, rules, events, `top` and metrics tell the same story; what watching costs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.telemetry import TelemetrySettings, find_anomalies, read_events, read_run
from shardkit.telemetry.serving import run_metrics
from shardkit.telemetry.summary import lane_moves
from shardkit_tools.observing.run_view import view_run
from tests.command_line import document_of, output_of

CANARY = "Zq7canary9Xw2LongEnough"


# ---- the story


def test_the_records_show_the_slow_rank_and_the_lanes_that_left_it(slowed_run: Path) -> None:
    telemetry = read_run(slowed_run, tail_bytes=8 << 20)
    assert telemetry.world == 2
    assert telemetry.ended
    [anomaly] = find_anomalies(telemetry.ranks, telemetry.newest)
    assert (anomaly.kind, anomaly.rank, anomaly.action) == ("straggler", 1, "rebalance")
    assert anomaly.evidence["times"] >= 1.5
    first, last = telemetry.ranks[1][1], telemetry.ranks[1][-1]
    assert (len(first.lanes), len(last.lanes)) == (6, len(telemetry.ranks[1][-1].lanes))
    assert len(last.lanes) < 4


def test_loading_is_told_by_lane(slowed_run: Path) -> None:
    view = view_run(slowed_run)
    assert [row[0] for row in view["lane_loads"]] == list(range(12)), "every lane has loaded blocks"
    assert sum(row[3] for row in view["lane_loads"]) == view["bytes"]["disk"], "each load is one lane's"
    assert all(row[2] > 0 for row in view["lane_loads"])


def test_the_events_tell_the_finding_and_what_followed(slowed_run: Path) -> None:
    events = read_events(slowed_run)
    kinds = [event["event"] for event in events]
    # on a busy machine a slow rank may be seen as skew before it is known to be the straggler
    straggler = next(event for event in events if event.get("anomaly") == "straggler")
    assert (straggler["rank"], straggler["action"]) == (1, "rebalance")
    moved = next(event for event in events if event["event"] == "rebalance")
    assert moved["owner"].count(1) < 6
    assert kinds.index("start") < kinds.index("anomaly")
    view = view_run(slowed_run)
    assert view["lane_owners"].count(1) == moved_owners(events).count(1)
    moves = lane_moves(read_run(slowed_run, tail_bytes=8 << 20).ranks)  # a page reads the newest records only
    assert {(one["from"], one["to"]) for one in moves} == {(1, 0)}


def moved_owners(events: list[dict[str, Any]]) -> list[int]:
    """Owners after the last decision that took effect."""
    decisions = [event for event in events if event["event"] == "rebalance" and event["from_step"] < 70]
    return list(decisions[-1]["owner"])


def test_top_names_the_rank_and_the_bottleneck(slowed_run: Path) -> None:
    page = output_of("top", slowed_run, "--once")
    said = re.search(r"^(\w+-bound, \d+ %) \(rank ([01])\) ", page, re.MULTILINE)
    assert said is not None
    assert re.search(r"^▲ straggler: rank 1 takes [\d.]+ ms per cell, .*→ rebalance", page, re.MULTILINE)
    assert re.search(r"^[\d:]{8} .* rebalance ", page, re.MULTILINE)
    document = document_of("top", slowed_run)
    assert (document["bottleneck"]["text"], str(document["bottleneck"]["rank"])) == said.groups()
    assert document["bottleneck"]["kind"] not in ("store", "disk"), "the machine is what is slow"
    assert [one["kind"] for one in document["anomalies"]] == ["straggler"]
    assert document["ranks"][1]["cell_s"] > 1.5 * document["ranks"][0]["cell_s"]
    assert document["step"] == document["steps"] == 70
    assert document["samples_per_s"] > 0
    assert sum(document["bottleneck"]["shares"].values()) == pytest.approx(1.0)


def test_top_on_a_terminal(slowed_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "180")
    page = output_of("top", slowed_run, "--once")
    assert "straggler" in page
    assert "▲" in page


def test_the_metrics_tell_it_too(slowed_run: Path) -> None:
    pytest.importorskip("prometheus_client")
    telemetry = read_run(slowed_run)
    text = run_metrics(telemetry, telemetry.newest)[2].decode()
    values = {name: float(value) for name, value in re.findall(r"^(shardkit\S*) (\S+)$", text, re.MULTILINE)}
    assert values['shardkit_anomalies{kind="straggler"}'] == 1
    assert values['shardkit_anomalies{kind="stall"}'] == 0

    def busy(rank: int) -> float:
        stages = ("data", "prepare", "compute", "update")
        name = 'shardkit_trainer_stage_seconds_total{{rank="{}",stage="{}",worker="0"}}'
        seconds = sum(values[name.format(rank, stage)] for stage in stages)
        return seconds / values[f'shardkit_trainer_cells_total{{rank="{rank}",worker="0"}}']

    assert busy(1) > 1.5 * busy(0)
    assert values['shardkit_trainer_steps_total{rank="0",worker="0"}'] == 70


def test_what_is_no_run_is_said_without_a_traceback(tmp_path: Path) -> None:
    for command in ("top", "dashboard"):
        assert "is no run directory" in output_of(command, tmp_path, code=1)


# ---- the price


def calls(work: Callable[[], object]) -> int:
    """Number of functions that `work` calls in this thread."""
    seen = Counter[str]()
    sys.setprofile(lambda _frame, event, _argument: seen.update([event]))
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen["call"] + seen["c_call"]


def test_telemetry_costs_few_calls(tmp_path: Path) -> None:
    """A step's telemetry takes no more than 100 µs, and a record, of which there is one in some seconds, 10 ms."""
    from shardkit.telemetry.recorder import Recorder
    from shardkit_trainer.reporting import StageMeter

    dataset = small_dataset(tmp_path)
    loader = dataset.loader(dataset.plan(global_batch=16, lanes=4), run=tmp_path / "run", tensors=False)
    for _ in loader:
        pass
    world: Any = SimpleNamespace(stage="compute")
    meter = StageMeter(100, world)
    meter.seconds |= dict.fromkeys(("data", "prepare", "exchange", "compute", "reduce", "update"), 0.001)
    loader.telemetry.add_source("trainer", meter.numbers)
    recorder = Recorder(loader.telemetry, tmp_path / "other", TelemetrySettings(interval_s=1000))
    of_step = calls(lambda: meter.step(computed_s=0.001, cells=4, loss=1.0, moved_bytes=1.0))
    of_record = calls(lambda: recorder._record("running"))
    recorder.close()
    loader.close()
    assert 0 < of_step < 50
    assert of_step < of_record < 5_000


def small_dataset(tmp_path: Path) -> Any:
    with shardkit.create(
        tmp_path / "data", {"x": "int64[64]"}, shard_size="64KiB", block_size="8KiB"
    ) as writer:
        for number in range(640):
            writer.add({"x": np.full(64, number)})
    return shardkit.open(str(tmp_path / "data"))


def test_what_a_loop_says_that_it_computed_is_counted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dataset = small_dataset(tmp_path)
    plan = dataset.plan(global_batch=16, lanes=4)
    with dataset.loader(plan, run=tmp_path / "run", tensors=False) as loader:
        for _ in loader:
            pass
        assert loader.telemetry.read().value("loader.computed_s") == 0.0
        for number, _ in enumerate(loader):
            loader.computed(0.25)
            if number % 2:
                loader.computed(0.5)  # of several calls the last holds
        assert loader.telemetry.read().value("loader.computed_s") == pytest.approx(40 * 0.375)
        assert loader.stats()["computed_s"] == pytest.approx(40 * 0.375)
        model = torch.nn.Linear(64, 1)
        loader.watch(model)
        for batch in loader:
            model(torch.from_numpy(batch["x"]).float()).sum().backward()
        told = loader.stats()["computed_s"]
        assert 0.0 < told < loader.stats()["elapsed_s"]


def test_counters_grow_over_loops_and_a_loader_without_a_run_writes_nothing(tmp_path: Path) -> None:
    dataset = small_dataset(tmp_path)
    plan = dataset.plan(global_batch=16, lanes=4)
    with dataset.loader(plan, run=tmp_path / "run", tensors=False) as loader:
        for epoch in range(1, 4):
            for _ in loader:
                pass
            record = loader.telemetry.read()
            assert record.value("loader.steps") == 40 * epoch
            assert record.value("loader.samples") == 640 * epoch
            assert record.value("loader.cells") == 160 * epoch
            assert record.value("loader.step") == 40 * epoch
        loader.resources.window.close()  # waits for what is being read for a fourth loop
        record = loader.telemetry.read()
        assert record.value("blocks.local_bytes") == record.value("loader.bytes_loaded") > 0
        assert record.lanes == (0, 1, 2, 3)
    with dataset.loader(plan, tensors=False) as plain:
        list(plain)
        assert plain.resources.watch is None
    with dataset.loader(plan, run=tmp_path / "quiet", telemetry=None, tensors=False) as quiet:
        list(quiet)
    assert not (tmp_path / "quiet" / "telemetry").exists()
    assert (tmp_path / "quiet" / "journal").exists()
