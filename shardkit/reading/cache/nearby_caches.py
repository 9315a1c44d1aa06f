"""Blocks from the caches of other nodes of a job, asked by what each is known to have (SPEC.md, "The cache")."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from shardkit.errors import ShardkitError
from shardkit.reading.located_store import wanted_block
from shardkit.reading.locations import BlockRequest, Location
from shardkit.reading.read_events import ReadEvents
from shardkit.reading.read_path import ReadPath, ReadSettings
from shardkit.stores.remote.cache_client import CacheClient

Buffer = Any

# a neighbour saves a request to the bucket and is worth no long wait: the first failure leaves it out for a while
_SETTINGS: Final = ReadSettings(deadline_s=4, attempt_s=2, hedge=False, trip_after=1, cool_down_s=10)


class NearbyCaches:
    """Implements the part of the read path that comes before the locations, for one process.

    Args:
        urls: of the cache servers, by number.
        holders: block → the numbers of those that may have it, to be asked in this order.
        read_events: where counts and events go, under the names ``neighbour-0``, ``neighbour-1`` …
    """

    def __init__(
        self, urls: Sequence[str], holders: Callable[[BlockRequest], Sequence[int]], read_events: ReadEvents
    ) -> None:
        self._names = [f"neighbour-{number}" for number in range(len(urls))]
        self._holders = holders
        self._path = ReadPath(
            [Location(name=name, store=CacheClient(url), domain=url, holds="blocks")
             for name, url in zip(self._names, urls, strict=True)],
            settings=_SETTINGS, read_events=read_events,
        )  # fmt: skip

    def read(self, request: BlockRequest) -> Buffer | None:
        """The block's bytes, verified by SHA-256; None where no neighbour that is asked gives them."""
        among = [self._names[number] for number in self._holders(request)]
        if not among:
            return None
        try:
            return self._path.fetch(wanted_block(request)._replace(among=among))
        except ShardkitError:
            return None

    def close(self) -> None:
        """Ask nobody any more; what is under way ends by itself."""
        self._path.close()
