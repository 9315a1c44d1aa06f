"""A loader while it runs, as those see it that watch and steer it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from shardkit.loader.block_window import WindowCounts
from shardkit.loader.pipeline import LoaderCounts, Pipeline
from shardkit.loader.resources import LoaderResources
from shardkit.telemetry import Telemetry

__all__ = ["LiveLoader"]


class LiveLoader:
    """What of a loader changes while it runs: whoever watches or steers it holds this and not the loader.

    Attributes:
        lanes: that the rank works now.
        counts, pipeline: of the current or last loop.
        resources: that are open in this process.
        handed_out: the step after the last one handed out.
        cells: handed out in all loops.
        chosen_prefetch: how many finished steps may wait, where that was changed on the way; else 0.
    """

    def __init__(self, lanes: list[int]) -> None:
        self.lanes = lanes
        self.counts = LoaderCounts()
        self.pipeline: Pipeline | None = None
        self.resources: LoaderResources | None = None
        self.handed_out = self.cells = self.chosen_prefetch = 0
        self._lock = threading.Lock()
        self._past: Counter[str] = Counter()  # counts of loops that are over

    def begin_loop(self, counts: LoaderCounts, pipeline: Pipeline) -> None:
        """Counters of the loop before will not change any more, and others take their place."""
        with self._lock:
            self._past.update(_numbers(self.counts, but="last_wait_s"))
            self.counts, self.pipeline = counts, pipeline

    @property
    def prefetch(self) -> int | None:
        """How many finished steps may wait; None where each is gathered when it is asked for."""
        return None if self.pipeline is None else self.pipeline.prefetch or None

    @prefetch.setter
    def prefetch(self, steps: int) -> None:
        self.chosen_prefetch = steps
        if self.pipeline is not None:
            self.pipeline.prefetch = steps

    def of_loop(self) -> dict[str, float]:
        """`Loader.stats`: counters of the loop, and of all block loads."""
        counts, pipeline = self.counts, self.pipeline
        found = _numbers(counts) | self._now() | {"lanes": float(len(self.lanes))}
        found["wait_per_step_s"] = counts.consumer_wait_s / max(1, counts.steps)
        if pipeline is not None:
            elapsed = found["elapsed_s"] = pipeline.elapsed_s
            found["samples_per_s"] = counts.samples / elapsed if elapsed else 0.0
        return found | self.reads()

    def of_all_loops(self) -> dict[str, float]:
        """The same for telemetry, whose counters only grow."""
        with self._lock:
            found: Counter[str] = self._past.copy()
            counts = self.counts
            found.update(_numbers(counts, but="last_wait_s"))
        more = {"cells": float(self.cells), "last_wait_s": counts.last_wait_s}
        if self.resources is not None:
            more["memory_bytes"] = float(self.resources.memory)
            more["verification_failures"] = float(self.resources.verification_failures)
        return dict(found) | self._now() | more

    def _now(self) -> dict[str, float]:
        found = {"step": float(self.handed_out)}
        if self.pipeline is not None:
            found["queued_groups"] = float(self.pipeline.queued_groups)
            found["queued_steps"] = float(self.pipeline.queued_steps)
        if self.resources is not None:
            window = self.resources.window
            found |= _numbers(window.counts)
            found["window_bytes"] = float(window.nbytes)
        return found

    def reads(self) -> dict[str, float]:
        """Of reads over a network, and of the cache; empty where all is local."""
        return (
            {} if self.resources is None or self.resources.remote is None else self.resources.remote.stats()
        )

    def register(self, telemetry: Telemetry) -> None:
        """Be polled from now on."""

        def of_blocks(name: str, default: Any) -> Callable[[], Any]:
            def read() -> Any:
                resources = self.resources
                if resources is None or resources.times is None:
                    return default
                resources.note_times()
                return getattr(resources.times, name)()

            return read

        telemetry.add_source("loader", self.of_all_loops)
        telemetry.add_source("reads", self.reads)
        telemetry.add_source("blocks", of_blocks("numbers", {}))
        telemetry.add_table("hot_shards", of_blocks("hot_shards", []))
        telemetry.add_table("slow_blocks", of_blocks("slowest", []))
        telemetry.add_table("lane_loads", of_blocks("lane_loads", []))


def _numbers(counts: LoaderCounts | WindowCounts, but: str = "") -> dict[str, float]:
    names = (one.name for one in fields(counts))
    return {name: float(getattr(counts, name)) for name in names if name != but}
