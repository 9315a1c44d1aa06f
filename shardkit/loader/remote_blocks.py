"""Blocks read over a network by one loader in one process: cache, reading ahead, and events for the run."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Int64s
from shardkit.errors import ShardkitError
from shardkit.formats import separate_fields
from shardkit.ledger import Journal
from shardkit.loader.gather import plan_group
from shardkit.loader.settings import LoaderSetup
from shardkit.loader.sharing import Holders
from shardkit.plan.assignment import LaneOfBlock
from shardkit.reading.attestations import Attestation, ReadEvent, ReadEvents, put_attestations
from shardkit.reading.blocks import BlockReader
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.supply import BlockFetcher, NearbyCaches
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import BlockRequest
from shardkit.stores.local import LocalStore
from shardkit.telemetry.recorder import EventLog

__all__ = ["RemoteBlocks"]


_GROUP_ROWS: Final = 65536
_AHEAD_BYTES: Final = 256 << 20
_AHEAD_THREADS: Final = 64  # the read path limits the requests in flight
_SHARDS_KNOWN: Final = 4096
_HORIZON_LOOPS: Final = 2  # future uses known to the cache: the rest of this loop and the next loop
_SHARE_OF_DISK: Final = 0.8
_JOURNALED: Final = {
    "failovers": "failover",
    "mismatches": "mismatch",
    "missing": "missing",
    "rebuilt": "rebuild",
    "healed": "repair",
    "heal_failed": "repair_failed",
    "circuit_opened": "location_lost",
    "circuit_closed": "location_back",
}
_STEPS: Final = 64  # steps between two journal entries of one kind and location


class RemoteBlocks:
    """Network reads of a loader: a reader through the cache, reading ahead, and events.

    Args:
        setup: setup of the loader.
        memory: bytes of its window; up to a quarter as much is read ahead.

    Attributes:
        reader: reads the dataset's blocks through the cache.
        supply: the cache, and the threads that read ahead.
        journaled: read events that are recorded in the ledger.
    """

    def __init__(self, setup: LoaderSetup, memory: int) -> None:
        plan, sources, config = setup.plan, setup.sources, setup.config
        self._plan, self._rows, self._config = plan, sources.rows, config
        self._fields = setup.fields
        self._lanes: list[int] = []
        self._stores = [store for store in sources.reader.stores if isinstance(store, LocatedStore)]
        self._read_events = self._stores[0].read_events if self._stores else ReadEvents()
        cache = None if config.cache is None else BlockCache(
            config.cache, limit=config.cache_size or _default_limit(str(config.cache)), read_events=self._read_events
        )  # fmt: skip
        ahead = min(_AHEAD_BYTES, memory // 4)
        self.supply = BlockFetcher(
            cache,
            ahead_bytes=ahead,
            threads=_AHEAD_THREADS,
            nearby=None if setup.holders is None else self._nearby(setup.holders),
        )
        self.reader: BlockReader = sources.reader.through(self.supply)
        self.journaled = JournaledEvents()
        self._listen(setup.events, config.run)

    def _nearby(self, holders: Holders) -> NearbyCaches:
        """Return a client for the caches of other nodes, which asks a cache only for blocks of lanes that it holds."""
        plan, rows = self._plan, self._rows
        lane_of = LaneOfBlock(plan.population, plan.lanes, rows.segment_blocks)

        def of_block(request: BlockRequest) -> Sequence[int]:
            block = rows.shard_first_block[request.shard] + request.block
            return holders.lanes[int(lane_of(np.array([block]))[0])]

        return NearbyCaches(holders.urls, of_block, self._read_events)

    def _listen(self, events: EventLog, run: Path | None) -> None:
        def record(event: ReadEvent) -> None:
            events.record(f"read_{event.kind}", location=event.location, **event.details)
            self.journaled.note(event)

        def attest(found: Attestation) -> None:
            if run is not None:  # kept in the run for a repair: a reader may lack write access to the root
                with contextlib.suppress(ShardkitError):
                    put_attestations(LocalStore(run), [found])

        for store in self._stores:
            healing = any(location.heal for location in store.locations)
            store.listen(events=record, attest=None if healing or run is None else attest)

    def start(self, step: int, lanes: list[int], is_loaded: Callable[[int], bool]) -> None:
        """Read ahead for these lanes from `step` on; blocks for which `is_loaded(block)` is True are skipped."""
        self._lanes = lanes
        reader, rows = self.reader, self._rows
        shards = rows.shard_first_block

        @functools.lru_cache(maxsize=_SHARDS_KNOWN)
        def far_store(shard: int) -> LocatedStore | None:
            store = reader.located(shard)
            if store is None or reader.has_file(shard):
                return None
            if separate_fields(reader.index(shard), self._fields) is not None:
                return None  # read when the block is loaded, a range per field
            return store

        def request(block: int) -> tuple[LocatedStore, BlockRequest] | None:
            shard, inside = rows.shard_of_block(block)
            store = None if is_loaded(block) else far_store(shard)
            return None if store is None else (store, reader.request(shard, inside))

        def places(blocks: Int64s) -> NDArray[np.uint64]:
            shard = np.searchsorted(shards, blocks, side="right") - 1
            return reader.places(shard, blocks - shards[shard])

        loop = self._plan.steps_per_pass or self._plan.loop_steps
        horizon = (step // loop + _HORIZON_LOOPS) * loop
        self.supply.follow(self._uses, request, places, step=step, horizon=horizon)

    def _is_far(self) -> bool:
        """Return True if any shard is not a local file; a local root with copies elsewhere may need none of them."""
        if any(store.local_path("shardkit.json") is None for store in self.reader.stores):
            return True
        return not all(self.reader.has_file(shard) for shard in range(len(self._rows.shard_first_block) - 1))

    @property
    def location_names(self) -> list[str]:
        """Distinct names of all locations that blocks may come from."""
        return list(dict.fromkeys(location.name for store in self._stores for location in store.locations))

    @property
    def hedge(self) -> bool:
        """True if a late request is sent a second time."""
        return any(store.path.settings.hedge for store in self._stores)

    @hedge.setter
    def hedge(self, on: bool) -> None:
        for store in self._stores:
            store.path.settings = replace(store.path.settings, hedge=on)

    def location(self, name: str) -> tuple[int, bool]:
        """Return (rank of a location, True if it is switched off)."""
        return next(
            store.path.tuning_of(name)
            for store in self._stores
            if any(location.name == name for location in store.locations)
        )

    def tune_location(self, name: str, *, rank: int | None = None, off: bool | None = None) -> None:
        """Change the rank of a location, or turn it off or on, from the next read on."""
        for store in self._stores:
            store.path.tune(name, rank=rank, off=off)

    def stats(self) -> dict[str, float]:
        """Return counters of this process's network reads and of the cache, for `Loader.stats`."""
        found: Counter[str] = Counter()
        for counted in {
            id(one): one for one in (self._read_events, *(store.read_events for store in self._stores))
        }.values():
            found.update(counted.stats())
        return dict(found)

    def close(self) -> None:
        """Stop reading ahead; may be called twice."""
        self.supply.close()
        for store in self._stores:
            store.listen()

    def _uses(self, first: int) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield arrays of steps and blocks: each block at the first step that needs it, in that order.

        Blocks of the previous group of steps are left out, because they are still in memory.
        """
        if not self._is_far():
            return
        plan, stride, loop = self._plan, self._config.stride, self._plan.loop_steps
        most = max(1, _GROUP_ROWS // max(1, plan.cell_size * len(self._lanes)))
        step, size = first, 1
        before = np.zeros(0, np.int64)
        while True:
            end = min(step + size * stride, (step // loop + 1) * loop)
            if plan.decided is not None:
                end = min(end, plan.decided)
            if end <= step:
                return  # the loader follows again when a mixer has decided
            numbers = range(step, end, stride)
            group = plan_group(plan, self._rows.locate, self._lanes, numbers)
            if not len(group.samples):
                return
            _, rows = np.unique(group.which, return_index=True)
            steps = np.asarray(numbers)[np.searchsorted(group.borders, rows, side="right") - 1]
            new = ~np.isin(group.blocks, before)
            yield steps[new], group.blocks[new]
            step = numbers[-1] + stride
            before = group.blocks if step % loop >= stride else before[:0]
            size = min(most, size * 4)


class JournaledEvents:
    """Counts read events by kind and location; `flush` journals the first at once and later ones in batches."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # events come from several reading threads
        self._waiting: dict[tuple[str, str], tuple[int, str]] = {}  # count, the first object
        self._written: dict[tuple[str, str], int] = {}

    def note(self, event: ReadEvent) -> None:
        """Count an event."""
        kind = _JOURNALED.get(event.kind)
        if kind is None:
            return
        key = (kind, event.location)
        with self._lock:
            count, what = self._waiting.get(key, (0, str(event.details.get("what", ""))))
            self._waiting[key] = (count + 1, what)

    def flush(self, step: int, journal: Journal, *, everything: bool = False) -> None:
        """Journal pending events without an entry in the last 64 steps, or with `everything` all of them."""
        if not self._waiting:
            return
        with self._lock:
            due = [
                key
                for key in self._waiting
                if everything or step - self._written.get(key, step - _STEPS) >= _STEPS
            ]
            entries = [(key, self._waiting.pop(key)) for key in sorted(due)]
            self._written |= dict.fromkeys(due, step)
        for (kind, location), (count, what) in entries:
            journal.event(step, kind, location=location, count=count, what=what)


def _default_limit(path: str) -> int:
    """Return the default cache size: 80 % of the free bytes of the disk, at least 1 MiB."""
    place = os.path.abspath(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    return max(1 << 20, int(shutil.disk_usage(place).free * _SHARE_OF_DISK))
