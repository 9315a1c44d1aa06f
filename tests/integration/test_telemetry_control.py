"""`control.toml` on a real loader over real locations: it takes effect, is journaled, and has a way back."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.reading.read_path import ReadSettings
from shardkit.telemetry import TelemetrySettings, read_events
from tests.servers.object_stores import Unavailable, moto, s3_environment

BUCKET = "shards"
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2, hedge=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def roots() -> Iterator[tuple[str, str]]:
    """The same objects in two places."""
    try:
        with moto(BUCKET) as endpoint, pytest.MonkeyPatch.context() as patch:
            for name, value in s3_environment(endpoint).items():
                patch.setenv(name, value)
            urls = [f"s3://{BUCKET}/{uuid.uuid4().hex}" for _ in range(2)]
            for url in urls:
                with shardkit.create(
                    url, {"x": "int64[1024]"}, shard_size="1MiB", block_size="64KiB"
                ) as writer:
                    for number in range(320):
                        writer.add({"x": [number] * 1024})
            yield urls[0], urls[1]
    except Unavailable as reason:
        pytest.skip(str(reason))


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
        window, remote = resources.window, resources.remote
        (run / "control.toml").write_text(
            '[loader]\nmemory = "2MiB"\nprefetch = 9\n[reading]\nhedge = false\n[cache]\nsize = "16MiB"\n'
            "[locations.root]\noff = true\n[locations.mirror]\nrank = -3\n[change]\nguard_s = 0\n"
        )
        trainer.until(lambda: len(events("control_changed")) >= 9)
        # 8 → 4 → 2 MiB, 4 → 8 → 9 steps, 64 → 32 → 16 MiB, and three that change at once
        assert (window.budget, loader.live.prefetch, remote.supply.cache.limit) == (2 * MIB, 9, 16 * MIB)
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
        assert (window.budget, loader.live.prefetch, remote.supply.cache.limit) == (8 * MIB, 4, 64 * MIB)
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
        assert window.budget == 8 * MIB
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
