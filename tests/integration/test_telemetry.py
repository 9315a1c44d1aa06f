"""Telemetry of real runs: the slow rank, `control.toml`, and the lag of copies."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.replicate import ReplicationLag
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from shardkit.telemetry import (
    Record,
    RunTelemetry,
    TelemetrySettings,
    read_events,
    read_run,
    summarise,
)
from shardkit.telemetry.summary import lane_moves
from shardkit_tools.observing.run_view import view_run
from tests.command_line import document_of, output_of
from tests.servers.object_stores import moto, s3_environment
from tests.unit.telemetry_series import made_series

# ---- the story


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


# ---- `control.toml` on a real loader over real locations: it takes effect, is journaled, and has a way back


BUCKET = "shards"
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2, hedge=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def roots() -> Iterator[tuple[str, str]]:
    """The same objects in two places."""
    with moto(BUCKET) as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(endpoint).items():
            patch.setenv(name, value)
        urls = [f"s3://{BUCKET}/{uuid.uuid4().hex}" for _ in range(2)]
        for url in urls:
            with shardkit.create(url, {"x": "int64[1024]"}, shard_size="1MiB", block_size="64KiB") as writer:
                for number in range(320):
                    writer.add({"x": [number] * 1024})
        yield urls[0], urls[1]


class Trainer:
    """Loops over a loader until something has come true."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.samples = loader, list[list[int]]()
        self.steps = iter(loader)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            batch = next(self.steps, None)
            if batch is None:
                self.steps = iter(self.loader)
                continue
            self.samples.append(batch["samples"].tolist())
            time.sleep(0.002)


def test_settings_change_while_the_run_goes_on(roots: tuple[str, str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    dataset = shardkit.open(roots[0], locations={"mirror": roots[1]}, settings=SETTINGS)
    plan = dataset.plan(global_batch=16, seed=1, lanes=4, window_blocks=4)
    loader = dataset.loader(
        plan, tensors=False, memory="8MiB", prefetch=4, cache=tmp_path / "cache", cache_size="64MiB", run=run,
        telemetry=TelemetrySettings(interval_s=0.05),
    )  # fmt: skip

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(run) if event["event"] == kind]

    with contextlib.closing(loader):
        trainer = Trainer(loader)
        trainer.until(lambda: loader.stats()["bytes_from_root"] > 0)
        assert loader.stats().get("bytes_from_mirror", 0) == 0
        resources: Any = loader.resources
        window, memory, remote = resources.window, resources.memory, resources.remote
        (run / "control.toml").write_text(
            '[loader]\nmemory = "2MiB"\nprefetch = 9\n[reading]\nhedge = false\n[cache]\nsize = "16MiB"\n'
            "[locations.root]\noff = true\n[locations.mirror]\nrank = -3\n[change]\nguard_s = 0\n"
        )
        trainer.until(lambda: len(events("control_changed")) >= 9)
        # 8 → 4 → 2 MiB, 4 → 8 → 9 steps, 64 → 32 → 16 MiB, and three that change at once
        assert (memory.bound, resources.prefetch, remote.supply.cache.limit) == (2 * MIB, 9, 16 * MIB)
        assert (remote.hedge, remote.location("root"), remote.location("mirror")) == (
            False,
            (0, True),
            (-3, False),
        )

        def mirror_bytes() -> float:
            empty(Path(remote.supply.cache.path))  # else nothing would have to come from anywhere
            return float(loader.stats().get("bytes_from_mirror", 0))

        trainer.until(lambda: mirror_bytes() > 0)
        root_bytes, so_far = loader.stats()["bytes_from_root"], mirror_bytes()
        trainer.until(lambda: mirror_bytes() > so_far)
        assert loader.stats()["bytes_from_root"] == root_bytes, "it is off"
        assert window.nbytes <= 4 * MIB

        (run / "control.toml").unlink()
        trainer.until(lambda: len(events("control_changed")) >= 17)
        assert (memory.bound, resources.prefetch, remote.supply.cache.limit) == (8 * MIB, 4, 64 * MIB)
        assert (remote.hedge, remote.location("root"), remote.location("mirror")) == (
            True,
            (0, False),
            (1, False),
        )

        (run / "control.toml").write_text("[locations.mirrors]\noff = true\n")
        trainer.until(lambda: bool(events("control_refused")))
        assert "nearest known: locations.mirror.off" in events("control_refused")[0]["reason"]

        (run / "control.toml").write_text('[loader]\nmemory = "1MiB"\n')  # less than the windows need
        trainer.until(lambda: len(events("control_refused")) >= 2)
        assert f"at least {loader.memory_needed} bytes" in events("control_refused")[1]["reason"]
        assert memory.bound == 8 * MIB
    assert len(events("control")) == 2
    assert events("control")[0]["changes"]["locations.root.off"] == [False, True]
    # what was trained on is the plan's, whatever was changed
    for i, samples in enumerate(trainer.samples[: plan.loop_steps]):
        assert samples == plan.step(i).reshape(-1).tolist()


def empty(cache: Path) -> None:
    """Delete a cache's blocks, as whoever clears a disk may."""
    for path in (cache / "blocks").rglob("*"):
        if path.is_file() and len(path.name) == 64:
            path.unlink()


# ---- The lag that a run shows is what its dataset's copies are below the policy


def test_the_lag_is_what_copies_lack(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(
        root, {"x": "int64[64]"}, format="tar", shard_size="64KiB", block_size="8KiB"
    ) as writer:
        for number in range(400):
            writer.add({"x": [number] * 64})
    dataset = shardkit.open(root)
    lag = ReplicationLag(dataset.reader.urls, [dataset.manifest.id])
    lag.look()
    assert lag.numbers() == {}, "there is no policy"
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    copies = LocationRecord.parse(f"mirror={mirror},domain=rack-2")
    place(
        Repository.open(root),
        PlacementChange(locations=(copies,), policy=lambda policy: dataclasses.replace(policy, copies=2)),
    )
    lag.look()
    assert lag.numbers() == {"policies": 1.0, "lag_bytes": 0.0}
    shards = sorted(mirror.rglob("*.tar"))
    lost = shards[0].stat().st_size + shards[1].stat().st_size
    for path in shards[:2]:
        path.unlink()
    lag.look()
    assert lag.numbers() == {"policies": 1.0, "lag_bytes": float(lost)}
    values = {f"replication.{name}": value for name, value in lag.numbers().items()}
    series = [*made_series(per_interval={"loader.steps": 1}), Record(time=2_000.0, rank=0, values=values)]
    view = summarise(RunTelemetry({(0, 0): series}), [], 2_000.0)
    assert view["replication_lag_bytes"] == lost
