"""A loader that stalls says so by itself: an event, a counter, and what its threads were doing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import shardkit
from shardkit.telemetry import TelemetrySettings, read_events, read_run


def test_a_stall_leaves_the_stacks_that_explain_it(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(root, {"x": "int64[8]"}, shard_size="16KiB", block_size="2KiB") as writer:
        for number in range(64):
            writer.add({"x": np.full(8, number)})
    dataset = shardkit.open(root)
    released = threading.Event()

    def a_transform_that_hangs(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        assert released.wait(60)
        return sample

    reports: list[Any] = []
    run = tmp_path / "run"
    stacks = run / "telemetry" / "rank-00000.stacks.txt"
    with dataset.loader(
        dataset.plan(global_batch=8, lanes=2), run=run, tensors=False, transform=a_transform_that_hangs, stall_s=0.1,
        on_stall=reports.append, telemetry=TelemetrySettings(interval_s=0.05),
    ) as loader:  # fmt: skip
        steps = iter(loader)
        waiting = threading.Thread(target=next, args=(steps,))
        waiting.start()
        deadline = time.monotonic() + 60
        while not stacks.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        released.set()
        waiting.join()
        assert sum(1 for _ in steps) == 7, "and the run goes on"
    text = stacks.read_text()
    assert "a_transform_that_hangs" in text
    assert reports
    [stall, *_] = [event for event in read_events(run) if event["event"] == "stall"]
    assert stall["stage"] == "transform"
    last = read_run(run).series[0, 0][-1]
    assert last.value("loader.stalls") >= 1
    assert last.value("loader.steps") == 8
    assert last.value("recorder.failures") == 0
