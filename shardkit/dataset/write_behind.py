"""Writing and hashing in threads of their own, so that they overlap with reading and encoding."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from shardkit.formats import Sink

__all__ = ["WriteBehind"]

T = TypeVar("T")
_MAX_UNWRITTEN = 4
_SYNC_BYTES = 32 * 2**20


class WriteBehind:
    """A sink that hands on what it is given, in order, from a thread of its own; a context manager.

    hashlib, xxhash and write(2) let go of the interpreter lock. Buffers are borrowed until they are written; `flush`
    before the bytes are counted on. Leaving waits for the threads, so that nothing is written to a sink that was
    dropped.

    Args:
        sink: that everything goes to.
        sync: makes durable what the sink has; called now and then, so that the disk works while there is more to come.
        is_small: there is so little to come that threads would not pay: then it is written at once.

    Attributes:
        hashing: runs the hashes of blocks; None where they are made at once.
    """

    def __init__(self, sink: Sink, sync: Callable[[], None], *, is_small: bool) -> None:
        self._sink = sink
        self._sync = sync
        self._syncing = None if is_small else ThreadPoolExecutor(1, "sync")
        self._unsynced = 0
        self._synced: Future[None] | None = None
        self._writing = None if is_small else ThreadPoolExecutor(1, "write")
        self._unwritten: deque[Future[None]] = deque()
        self.hashing: Executor | None = None if is_small else ThreadPoolExecutor(1, "hash")

    def write(self, data: bytes | memoryview, /) -> None:
        """Take bytes.

        Raises:
            StoreError: an earlier piece could not be written.
        """
        if self._writing is None:
            self._put(data)
            return
        while len(self._unwritten) >= _MAX_UNWRITTEN:
            self._unwritten.popleft().result()
        self._unwritten.append(self._writing.submit(self._put, data))
        self._begin_sync(len(data))

    def beside(self, work: Callable[[], T]) -> Callable[[], T]:
        """Begin other work, in a thread where there are any; what is returned waits for it, and raises what it does."""
        if self.hashing is None:
            return work
        return self.hashing.submit(work).result

    def flush(self) -> None:
        """Wait until everything is with the sink.

        Raises:
            StoreError: a piece could not be written.
        """
        while self._unwritten:
            self._unwritten.popleft().result()
        if self._synced is not None:
            self._synced.result()

    def _begin_sync(self, size: int) -> None:
        """Sync once in a while, unless that is still going on; its errors are the writer's."""
        self._unsynced += size
        if self._syncing is None or self._unsynced < _SYNC_BYTES:
            return
        if self._synced is not None:
            if not self._synced.done():
                return
            self._synced.result()
        self._synced, self._unsynced = self._syncing.submit(self._sync), 0

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in (self._writing, self.hashing, self._syncing):
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=True)

    def _put(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            taken = self._sink.write(rest)
            rest = rest[len(rest) if taken is None else taken :]
