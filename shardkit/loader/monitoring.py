"""Telemetry of a loader, the watch over its run, and the settings of control.toml (telemetry/SPEC.md §8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from shardkit.copies.replicate import ReplicationLag
from shardkit.errors import ConfigurationError
from shardkit.loader.block_memory import memory_needed
from shardkit.loader.remote_blocks import RemoteBlocks
from shardkit.loader.resources import LiveLoader
from shardkit.loader.settings import LoaderSetup, Topology
from shardkit.plan import Plan
from shardkit.plan.natural import NaturalGrid
from shardkit.plan.weighted import WeightedGrid
from shardkit.ranges import Range, parse_size
from shardkit.telemetry import Record, Telemetry, TelemetrySettings
from shardkit.telemetry.control import Control, Knob
from shardkit.telemetry.recorder import RunWatch

__all__ = ["count_in", "flag_of", "loader_knobs", "make_telemetry", "open_watch", "size_of"]

_LEAST_CACHE: Final = 16 << 20
_RECENT, _SPARSE, _EVERY = 32, 32, 16  # number of last steps, and of earlier steps that are multiples of 16


def make_telemetry(live: LiveLoader, plan: Plan, topology: Topology, worker: int) -> Telemetry:
    """Return the numbers and tables of this loader that telemetry polls."""
    telemetry = Telemetry(
        rank=topology.rank, world=topology.world, worker=worker, lanes=lambda: list(live.lanes)
    )
    costs = StepCosts(plan, lambda: live.lanes, lambda: live.handed_out)
    telemetry.add_table("step_costs", costs.table)

    def of_blocks(name: str, default: Any) -> Callable[[], Any]:
        def read() -> Any:
            resources = live.resources
            if resources is None or resources.times is None:
                return default
            return getattr(resources.times, name)()

        return read

    telemetry.add_source("loader", live.of_all_loops)
    telemetry.add_source("reads", live.reads)
    telemetry.add_source("blocks", of_blocks("numbers", {}))
    telemetry.add_table("hot_shards", of_blocks("hot_shards", []))
    telemetry.add_table("slow_blocks", of_blocks("slowest", []))
    telemetry.add_table("lane_loads", of_blocks("lane_loads", []))
    return telemetry


class StepCosts:
    """Costs of recent steps, computed when telemetry polls them, so that making a step costs nothing."""

    def __init__(self, plan: Plan, lanes: Callable[[], Sequence[int]], handed_out: Callable[[], int]) -> None:
        self._plan, self._lanes, self._handed_out = plan, lanes, handed_out
        self._plain: Plan | None = None
        self._known: dict[int, tuple[float, float]] = {}

    def table(self) -> list[list[float]]:
        """Return rows of (step, cost, cost if the plan ignored costs); empty if the plan has no costs.

        Ranks are polled at different moments. Earlier multiples of 16 are included so that the ranks of a fast run
        have steps in common.
        """
        grid, end = self._plan.grid, self._handed_out()
        if not isinstance(grid, NaturalGrid | WeightedGrid) or grid.costs is None:
            return []
        recent = range(max(self._plan.from_step, end - _RECENT), end)
        sparse = range(recent.start // _EVERY * _EVERY, self._plan.from_step - 1, -_EVERY)[:_SPARSE]
        wanted = sorted({*recent, *(step for step in sparse if step < end)})
        missing = [step for step in wanted if step not in self._known]
        if self._plain is None:
            self._plain = self._plan.without_costs()
        lanes = list(self._lanes())
        for span in _runs(missing):
            both = [
                grid.costs.of_cells(plan.steps(span.start, span.stop, lanes)).sum(axis=1)
                for plan in (self._plan, self._plain)
            ]
            self._known |= zip(span, zip(*(one.tolist() for one in both), strict=True), strict=True)
        self._known = {step: self._known[step] for step in wanted}
        return [[step, *self._known[step]] for step in wanted]


def _runs(steps: Sequence[int]) -> list[range]:
    """Group ascending numbers into runs of consecutive ones."""
    found: list[range] = []
    for step in steps:
        if found and found[-1].stop == step:
            found[-1] = range(found[-1].start, step + 1)
        else:
            found.append(range(step, step + 1))
    return found


def open_watch(setup: LoaderSetup, live: LiveLoader, telemetry: Telemetry) -> RunWatch | None:
    """Start monitoring a loader whose resources are open; None without a run directory or with telemetry off."""
    config, rank = setup.config, setup.topology.rank
    run, settings = config.run, TelemetrySettings() if config.telemetry is True else config.telemetry
    if run is None or settings is None:
        return None
    hooks: list[Callable[[Record], None]] = []
    if settings.control:
        knobs = loader_knobs(live, memory_needed(setup, len(live.lanes)))
        control = Control(run, rank, knobs, setup.events.record)
        telemetry.add_source("control", control.numbers)
        hooks.append(control)
    if rank == 0 and config.offset == 0:
        lag = ReplicationLag(setup.sources.reader.urls, [setup.sources.manifest])
        telemetry.add_source("replication", lag.numbers)
        hooks.append(lag)
    return RunWatch(run, telemetry, settings, setup.events, hooks)


def loader_knobs(live: LiveLoader, least_memory: int) -> Mapping[str, Knob]:
    """Return the adjustable settings of a loader whose resources are open, by their names in control.toml."""
    resources = live.resources
    assert resources is not None
    knobs = {
        "loader.memory": Knob.of(resources.memory, "bound", size_of(least_memory), gradual=True),
        "loader.prefetch": Knob.of(resources, "prefetch", count_in(Range(1, 1024)), gradual=True),
    }
    remote = resources.remote
    if remote is None:
        return knobs
    knobs["reading.hedge"] = Knob.of(remote, "hedge", flag_of)
    knobs["cache.size"] = Knob.of(remote.supply.cache, "limit", size_of(_LEAST_CACHE), gradual=True)
    for name in remote.location_names:
        knobs |= _location_knobs(remote, name)
    return knobs


def _location_knobs(remote: RemoteBlocks, name: str) -> dict[str, Knob]:
    rank = Knob(
        lambda: remote.location(name)[0],
        lambda value: remote.tune_location(name, rank=value),
        count_in(Range(-1000, 1000)),
    )
    off = Knob(lambda: remote.location(name)[1], lambda value: remote.tune_location(name, off=value), flag_of)
    return {f"locations.{name}.rank": rank, f"locations.{name}.off": off}


def size_of(least: int) -> Callable[[str, Any], int]:
    """Return a parser of sizes of at least `least` bytes."""

    def parse(key: str, value: Any) -> int:
        try:
            size = parse_size(value) if type(value) in (int, str) else -1
        except ConfigurationError:
            size = -1
        if size < least:
            raise ConfigurationError(
                f'control.toml: {key} = {value!r}: expected a size such as "512MiB", at least {least} bytes'
            )
        return size

    return parse


def count_in(allowed: Range) -> Callable[[str, Any], int]:
    """Return a parser of integers in a range."""
    return lambda key, value: int(allowed.check(f"control.toml: {key}", value))


def flag_of(key: str, value: Any) -> bool:
    """Parse true or false."""
    if type(value) is not bool:
        raise ConfigurationError(f"control.toml: {key} = {value!r}: expected true or false")
    return value
