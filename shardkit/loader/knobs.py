"""What of a loader can be changed while it runs, by the names that control.toml knows (SPEC.md §10)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from shardkit.errors import ConfigurationError
from shardkit.loader.control import Knob
from shardkit.ranges import parse_size

if TYPE_CHECKING:
    from shardkit.loader.remote_blocks import RemoteBlocks
    from shardkit.loader.telemetry_sources import LiveLoader

__all__ = ["count_of", "flag_of", "loader_knobs", "size_of"]

_LEAST_CACHE: Final = 16 << 20
_MOST_PREFETCH: Final = 1024
_FARTHEST: Final = 1000


def loader_knobs(loader: LiveLoader) -> Mapping[str, Knob]:
    """The knobs of a loader whose resources are open; they hold it weakly."""
    live = _Live(loader)
    knobs = {
        "loader.memory": Knob(live.memory, live.set_memory, size_of(loader.memory_needed), gradual=True),
        "loader.prefetch": Knob(live.prefetch, live.set_prefetch, count_of(1, _MOST_PREFETCH), gradual=True),
    }
    remote = live.remote()
    if remote is not None:
        knobs["reading.hedge"] = Knob(live.hedge, live.set_hedge, flag_of)
        knobs["cache.size"] = Knob(live.cache_size, live.set_cache_size, size_of(_LEAST_CACHE), gradual=True)
        for name in remote.location_names:
            rank, off = partial(live.rank, name), partial(live.off, name)
            knobs[f"locations.{name}.rank"] = Knob(
                rank, partial(live.set_rank, name), count_of(-_FARTHEST, _FARTHEST)
            )
            knobs[f"locations.{name}.off"] = Knob(off, partial(live.set_off, name), flag_of)
    return knobs


class _Live:
    """A loader as it is now; everything is None once it is gone."""

    def __init__(self, loader: LiveLoader) -> None:
        self._loader = weakref.ref(loader)

    def remote(self) -> RemoteBlocks | None:
        loader = self._loader()
        return None if loader is None or loader.resources is None else loader.resources.remote

    def memory(self) -> int | None:
        loader = self._loader()
        return None if loader is None or loader.resources is None else loader.resources.memory

    def set_memory(self, num_bytes: int) -> None:
        loader = self._loader()
        if loader is not None and loader.resources is not None:
            loader.resources.is_bounded, loader.resources.memory = True, num_bytes

    def prefetch(self) -> int | None:
        loader = self._loader()
        return None if loader is None else loader.prefetch

    def set_prefetch(self, steps: int) -> None:
        loader = self._loader()
        if loader is not None:
            loader.prefetch = steps

    def hedge(self) -> bool | None:
        remote = self.remote()
        return None if remote is None else remote.hedge

    def set_hedge(self, on: bool) -> None:
        remote = self.remote()
        if remote is not None:
            remote.hedge = on

    def cache_size(self) -> int | None:
        remote = self.remote()
        return None if remote is None or remote.supply.cache is None else remote.supply.cache.limit

    def set_cache_size(self, num_bytes: int) -> None:
        remote = self.remote()
        if remote is not None and remote.supply.cache is not None:
            remote.supply.cache.limit = num_bytes

    def rank(self, name: str) -> int | None:
        remote = self.remote()
        return None if remote is None else remote.location(name)[0]

    def set_rank(self, name: str, rank: int) -> None:
        remote = self.remote()
        if remote is not None:
            remote.tune_location(name, rank=rank)

    def off(self, name: str) -> bool | None:
        remote = self.remote()
        return None if remote is None else remote.location(name)[1]

    def set_off(self, name: str, off: bool) -> None:
        remote = self.remote()
        if remote is not None:
            remote.tune_location(name, off=off)


def size_of(least: int) -> Callable[[str, Any], int]:
    """A parser of sizes from so many bytes on."""

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


def count_of(least: int, most: int) -> Callable[[str, Any], int]:
    """A parser of whole numbers between these."""

    def parse(key: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ConfigurationError(
                f"control.toml: {key} = {value!r}: expected a whole number from {least} to {most}"
            )
        return value

    return parse


def flag_of(key: str, value: Any) -> bool:
    """A parser of true and false."""
    if type(value) is not bool:
        raise ConfigurationError(f"control.toml: {key} = {value!r}: expected true or false")
    return value
