"""Block supply of a loader: read-ahead by plan, from this machine's cache, other nodes' caches or the locations."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Answer
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.arrays import Buffer, Int64s
from shardkit.errors import ShardkitError
from shardkit.reading.attestations import ReadEvents
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.eviction import Future
from shardkit.reading.located_store import LocatedStore, wanted_block
from shardkit.reading.objects import BlockRequest, Location, block_name
from shardkit.reading.read_path import ReadPath, ReadSettings
from shardkit.stores.remote.cache_client import CacheClient

Uses = Callable[[int], Iterator[tuple[Int64s, Int64s]]]
"""Maps a first step to runs of (steps, dataset-wide blocks), ordered by the first use of each block in its run."""

Request = Callable[[int], tuple[LocatedStore, BlockRequest] | None]
"""Maps a dataset-wide block number to its store and request; None for blocks in local files or in memory."""


class _Ahead(NamedTuple):
    """A block that is being, or has been, read ahead."""

    answer: Answer[Any]
    size: int
    step: int  # first step that uses the block


class BlockFetcher:
    """Reads blocks for one loader in one process.

    Reading ahead follows the order in which the plan uses blocks, as far as `ahead_bytes` allows. A block that was read
    ahead waits in memory until the loader asks for it, and is stored in the cache if its next use is near enough.

    Args:
        cache: cache of this machine; None to stream.
        ahead_bytes: memory for blocks that were read ahead.
        threads: largest number of blocks read ahead concurrently.
        nearby: caches of other nodes, asked before the locations.
    """

    def __init__(
        self,
        cache: BlockCache | None,
        *,
        ahead_bytes: int = 256 << 20,
        threads: int = 16,
        nearby: NearbyCaches | None = None,
    ) -> None:
        self.cache = cache
        self._nearby, self._ahead_bytes = nearby, ahead_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-ahead")
        self._changed = threading.Condition()  # guards everything below
        self._ahead: dict[int, _Ahead] = {}  # by place
        self._ahead_size = 0
        self._reading: set[int] = set()  # places that the loader reads without reading ahead
        self._step = 0
        self._in_flight = 0  # blocks that are being read ahead
        self._is_full = False  # no room until an eighth of the memory is free
        self._awaited: Callable[[], bool] = lambda: False  # condition that the reading ahead waits for
        self._stopped = threading.Event()  # ends the threads of the last `follow`

    def read(self, store: LocatedStore, request: BlockRequest) -> Buffer:
        """Return the block's bytes, verified."""
        with self._changed:
            found = self._ahead.pop(request.place, None)
            if found is not None:
                self._ahead_size -= found.size
                self._wake()
            self._reading.add(request.place)
        try:
            if found is not None:
                # a block whose reading ahead failed or was cancelled is read again below, where errors are raised
                with contextlib.suppress(Exception):
                    return found.answer.result()
            return self.obtain(request, lambda: store.read_block(request))
        finally:
            with self._changed:
                self._reading.discard(request.place)

    def obtain(self, request: BlockRequest, fetch: Callable[[], Buffer]) -> Buffer:
        """Return verified bytes from a cache; otherwise call `fetch` and cache its result."""

        def fetch_nearby() -> Buffer:
            data = None if self._nearby is None else self._nearby.read(request)
            return fetch() if data is None else data

        return fetch_nearby() if self.cache is None else self.cache.fetch(request, fetch_nearby)

    def follow(
        self,
        uses: Uses,
        request: Request,
        places: Callable[[Int64s], NDArray[np.uint64]],
        *,
        step: int,
        horizon: int,
    ) -> None:
        """Read ahead from `step`, and publish to the cache which blocks are used until `horizon`."""
        with self._changed:
            self._stopped.set()
            stopped = self._stopped = threading.Event()
            self._step = step
            self._drop_past()
            self._changed.notify_all()
        if self.cache is not None:
            self.cache.lease.restart(step)
            _start("shardkit-future", lambda: self._publish(stopped, uses(step), places, horizon))
        _start("shardkit-ahead", lambda: self._read_ahead(stopped, uses(step), request, horizon - step))

    def advance(self, step: int) -> None:
        """Record that the trainer has received `step`."""
        with self._changed:
            self._step = step
            self._drop_past()
            self._wake()
        if self.cache is not None:
            self.cache.lease.tick(step)

    def close(self) -> None:
        """Stop reading ahead; may be called twice. Cached blocks stay."""
        with self._changed:
            self._stopped.set()
            for one in self._ahead.values():
                one.answer.cancel()
            self._ahead.clear()
            self._ahead_size = 0
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._nearby is not None:
            self._nearby.close()
        if self.cache is not None:
            self.cache.close()

    def _read_ahead(
        self, stopped: threading.Event, uses: Iterator[tuple[Int64s, Int64s]], request: Request, lead: int
    ) -> None:
        """Submit blocks in plan order; planning stays at most `lead` steps ahead of the trainer."""
        for steps, blocks in uses:
            for step, block in zip(steps.tolist(), blocks.tolist(), strict=True):
                with self._changed:
                    self._wait_for(lambda step=step: stopped.is_set() or step - lead < self._step)  # type: ignore[misc]
                if stopped.is_set():
                    return
                where = request(block) if step >= self._step else None
                if where is not None:
                    self._submit(stopped, step, *where)

    def _submit(
        self, stopped: threading.Event, step: int, store: LocatedStore, request: BlockRequest
    ) -> None:
        """Start reading a block once there is memory for it."""
        size, place = request.length, request.place
        with self._changed:
            # more reads than the locations may have in flight would only delay `close`
            self._wait_for(
                lambda: (
                    stopped.is_set() or (self._in_flight < store.path.concurrency and self._has_room(size))
                )
            )
            if stopped.is_set() or place in self._ahead or place in self._reading:
                return
            if self.cache is not None:
                self.cache.lease.advance(step)
            answer = self._pool.submit(self.obtain, request, lambda: store.read_block(request))
            self._ahead[place] = _Ahead(answer, size, step)
            self._ahead_size += size
            self._in_flight += 1
            answer.add_done_callback(self._note_end)

    def _note_end(self, _: Answer[Any]) -> None:
        with self._changed:
            self._in_flight -= 1
            self._wake()

    def _has_room(self, size: int) -> bool:
        most = self._ahead_bytes * 7 // 8 if self._is_full else self._ahead_bytes
        self._is_full = bool(self._ahead) and self._ahead_size + size > most
        return not self._is_full

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        self._awaited = ready
        self._changed.wait_for(ready)

    def _wake(self) -> None:
        """Wake the reading ahead if it can continue; waking it for every block would cost more than its work."""
        if self._awaited():
            self._changed.notify_all()

    def _drop_past(self) -> None:
        for place, one in list(self._ahead.items()):
            if one.step < self._step:
                del self._ahead[place]
                self._ahead_size -= one.size

    def _publish(
        self,
        stopped: threading.Event,
        uses: Iterator[tuple[Int64s, Int64s]],
        places: Callable[[Int64s], NDArray[np.uint64]],
        horizon: int,
    ) -> None:
        assert self.cache is not None
        used_steps: list[Int64s] = []
        used_places: list[NDArray[np.uint64]] = []
        for steps, blocks in uses:
            if stopped.is_set():
                return
            used_steps.append(steps)
            used_places.append(places(blocks))
            if len(steps) and int(steps[-1]) >= horizon:
                break
        if used_steps and not stopped.is_set():
            future = Future.of(np.concatenate(used_places), np.concatenate(used_steps))
            self.cache.lease.publish(future)


def _start(name: str, work: Callable[[], None]) -> None:
    """Run `work` on a thread and drop its errors; they cost only speed, as reading the block raises them again."""

    def run() -> None:
        with contextlib.suppress(ShardkitError, RuntimeError):
            work()

    threading.Thread(target=run, name=name, daemon=True).start()


# a neighbour only saves a request to the bucket, so waits are short and one failure makes it rest
_SETTINGS: Final = ReadSettings(deadline_s=4, attempt_s=2, hedge=False, trip_after=1, cool_down_s=10)


class NearbyCaches:
    """Reads blocks from the caches of other nodes, which are asked before the locations.

    Args:
        urls: URLs of the cache servers, by number.
        holders: maps a block to the numbers of the servers that may have it, in the order to ask.
        read_events: receives counts and events under the names ``neighbour-0``, ``neighbour-1`` …
    """

    def __init__(
        self, urls: Sequence[str], holders: Callable[[BlockRequest], Sequence[int]], read_events: ReadEvents
    ) -> None:
        self._names = [f"neighbour-{number}" for number in range(len(urls))]
        self._holders = holders
        self._path = ReadPath(
            [Location(name=name, store=CacheClient(url), domain=url)
             for name, url in zip(self._names, urls, strict=True)],
            settings=_SETTINGS, read_events=read_events,
        )  # fmt: skip

    def read(self, request: BlockRequest) -> Buffer | None:
        """Return the block's bytes, verified by SHA-256, or None if no neighbour provides them."""
        among = [self._names[number] for number in self._holders(request)]
        if not among:
            return None

        def read(location: Location) -> Buffer:
            return location.store.get(block_name(request.sha256), max_bytes=request.length)

        try:
            return self._path.fetch(wanted_block(request)._replace(read=read, among=among))
        except ShardkitError:
            return None

    def close(self) -> None:
        """Send no more requests; running ones finish in the background."""
        self._path.close()
