"""Monitoring of a loader with a run directory, and settings that change while it runs (telemetry/SPEC.md §8)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from shardkit.copies.replicate import ReplicationLag
from shardkit.errors import ConfigurationError
from shardkit.loader.live import LiveLoader
from shardkit.loader.remote_blocks import RemoteBlocks
from shardkit.loader.settings import LoaderSetup
from shardkit.ranges import Range, parse_size
from shardkit.telemetry import Record, Telemetry, TelemetrySettings
from shardkit.telemetry.control import Control, Knob
from shardkit.telemetry.recorder import RunWatch

__all__ = ["count_in", "flag_of", "loader_knobs", "open_watch", "size_of"]

_LEAST_CACHE: Final = 16 << 20


def open_watch(setup: LoaderSetup, live: LiveLoader, telemetry: Telemetry) -> RunWatch | None:
    """Start monitoring a loader whose resources are open; None without a run directory or with telemetry off."""
    config, rank = setup.config, setup.topology.rank
    run, settings = config.run, TelemetrySettings() if config.telemetry is True else config.telemetry
    if run is None or settings is None:
        return None
    hooks: list[Callable[[Record], None]] = []
    if settings.control:
        knobs = loader_knobs(live, setup.memory_needed(len(live.lanes)))
        control = Control(run, rank, knobs, setup.events.record)
        telemetry.add_source("control", control.numbers)
        hooks.append(control)
    if rank == 0 and config.offset == 0:
        lag = ReplicationLag(setup.sources.reader.urls, [setup.sources.manifest])
        telemetry.add_source("replication", lag.numbers)
        hooks.append(lag)
    return RunWatch(run, telemetry, settings, setup.events, hooks)


def loader_knobs(live: LiveLoader, memory_needed: int) -> Mapping[str, Knob]:
    """Return the adjustable settings of a loader whose resources are open, by their names in control.toml."""
    resources = live.resources
    assert resources is not None
    knobs = {
        "loader.memory": Knob.of(resources, "bound", size_of(memory_needed), gradual=True),
        "loader.prefetch": Knob.of(live, "prefetch", count_in(Range(1, 1024)), gradual=True),
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
