"""What a loader reports: its counters over all loops, block times, reads. Polled; the loader does nothing for it."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from shardkit.loader.statistics import LoaderCounts
from shardkit.telemetry import Telemetry

if TYPE_CHECKING:
    from shardkit.loader.pipeline import Pipeline
    from shardkit.loader.ranks import Topology
    from shardkit.loader.resources import LoaderResources

__all__ = ["LiveLoader", "LoaderSource"]

_SUMMED = tuple(name for name in LoaderCounts.__slots__ if name != "last_wait_s")


class LiveLoader(Protocol):
    """A loader as those see it that watch and steer it while it runs."""

    topology: Topology
    lanes: list[int]
    counts: LoaderCounts
    telemetry: Telemetry

    @property
    def prefetch(self) -> int | None:
        """How many finished steps may wait."""

    @prefetch.setter
    def prefetch(self, steps: int) -> None: ...

    @property
    def resources(self) -> LoaderResources | None:
        """What is open in this process."""

    @property
    def pipeline(self) -> Pipeline | None:
        """Of the current or last loop."""

    @property
    def handed_out(self) -> int:
        """The step after the last one handed out."""

    @property
    def memory_needed(self) -> int:
        """Bytes that the windows of its lanes need."""


class LoaderSource:
    """Counters that only grow, while a loader's own begin anew in each loop. Holds the loader weakly."""

    def __init__(self, loader: LiveLoader) -> None:
        self._loader = weakref.ref(loader)
        self._lock = threading.Lock()
        self._past: Counter[str] = Counter()  # of loops and pipelines that are over
        self._counted: set[int] = (
            set()
        )  # ids of the present counts or pipeline, when they are in `_past` already
        self.cells = 0  # handed out

    def register(self, telemetry: Telemetry) -> None:
        """Be polled from now on."""
        telemetry.add_source("loader", self.numbers)
        telemetry.add_source("reads", self.reads)
        telemetry.add_source("blocks", self.blocks)
        telemetry.add_table("hot_shards", self.hot_shards)
        telemetry.add_table("slow_blocks", self.slow_blocks)
        telemetry.add_table("lane_loads", self.lane_loads)

    def loop_is_over(self, counts: LoaderCounts) -> None:
        """These counters will not change any more, and others take their place."""
        with self._lock:
            self._past.update({name: getattr(counts, name) for name in _SUMMED})
            self._counted = {id(counts)}

    def pipeline_is_over(self, pipeline: Pipeline) -> None:
        """Nor will the waits of this one."""
        with self._lock:
            self._past.update(_waits(pipeline))

    def numbers(self) -> dict[str, float]:
        """Of the loader and its window."""
        loader = self._loader()
        if loader is None:
            return {}
        with self._lock:
            found: dict[str, float] = dict(self._past)
            counts, pipeline = loader.counts, loader.pipeline
            if id(counts) not in self._counted:
                for name in _SUMMED:
                    found[name] = found.get(name, 0.0) + getattr(counts, name)
        if pipeline is not None:
            for name, value in _waits(pipeline).items():
                found[name] = found.get(name, 0.0) + value
            found |= {"queued_steps": pipeline.queued_steps, "queued_groups": pipeline.queued_groups}
        found |= {"step": loader.handed_out, "cells": self.cells, "last_wait_s": counts.last_wait_s}
        resources = loader.resources
        if resources is not None:
            window = resources.window
            found |= {name: getattr(window.counts, name) for name in window.counts.__slots__}
            found |= {"window_bytes": window.nbytes, "memory_bytes": window.budget}
            found["verification_failures"] = resources.verification_failures
        return found

    def reads(self) -> dict[str, float]:
        """Of reads over a network, and of the cache; empty where all is local."""
        loader = self._loader()
        resources = None if loader is None else loader.resources
        return {} if resources is None or resources.remote is None else resources.remote.stats()

    def blocks(self) -> dict[str, float]:
        """Shards in use, bytes of local ones."""
        loader = self._loader()
        resources = None if loader is None else loader.resources
        return {} if resources is None or resources.times is None else resources.times.numbers()

    def hot_shards(self) -> list[list[object]]:
        """Rows of (shard, loads, bytes)."""
        loader = self._loader()
        resources = None if loader is None else loader.resources
        return [] if resources is None or resources.times is None else resources.times.hot_shards()

    def slow_blocks(self) -> list[list[object]]:
        """Rows of (seconds, time, shard, block)."""
        loader = self._loader()
        resources = None if loader is None else loader.resources
        return [] if resources is None or resources.times is None else resources.times.slowest()

    def lane_loads(self) -> list[list[object]]:
        """Rows of (lane, loads, seconds, bytes)."""
        loader = self._loader()
        resources = None if loader is None else loader.resources
        return [] if resources is None or resources.times is None else resources.times.lane_loads()

    def lanes(self) -> list[int]:
        """Of the rank, now."""
        loader = self._loader()
        return [] if loader is None else list(loader.lanes)


def _waits(pipeline: Pipeline) -> dict[str, float]:
    return {
        "plan_blocked_s": pipeline.plan_waits.blocked_s,
        "plan_starved_s": pipeline.plan_waits.starved_s,
        "assembly_blocked_s": pipeline.assembly_waits.blocked_s,
        "assembly_starved_s": pipeline.assembly_waits.starved_s,
    }
