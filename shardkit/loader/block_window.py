"""The blocks that are in memory: loaded ahead by deadline, verified once per load, held within a byte budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from shardkit.loader.gather import GatherColumns

__all__ = ["BlockWindow", "WindowCounts"]


class WindowCounts:
    """Counters of one window; plain integers, read without a lock."""

    __slots__ = ("block_loads", "block_uses", "bytes_loaded", "evictions", "peak_bytes")

    def __init__(self) -> None:
        self.block_loads = 0
        self.block_uses = 0
        self.bytes_loaded = 0
        self.evictions = 0
        self.peak_bytes = 0


class BlockWindow:
    """Loads blocks on threads and keeps them until room is needed.

    Not a cache with a guess for a policy: what the next steps need is known and pinned; only blocks that no planned
    step needs are dropped, least recently used first.

    Args:
        load: reads and verifies one block; called on the pool's threads.
        size_of: upper bound of a block's bytes before it is loaded.
        budget: bytes. A step's own blocks are loaded even if they alone exceed it.
        threads: how many blocks are read at once.
    """

    def __init__(
        self,
        load: Callable[[int], GatherColumns],
        size_of: Callable[[int], int],
        budget: int,
        threads: int,
    ) -> None:
        self._load = load
        self._size_of = size_of
        self._budget = budget
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shardkit-blocks")
        self._entries: dict[int, Future[GatherColumns]] = {}  # insertion order is the order of last use
        self._sizes: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._bytes = 0
        self.counts = WindowCounts()

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are loaded or being loaded."""
        return self._bytes

    def holds(self, blocks: Sequence[int]) -> bool:
        """Whether all these blocks together fit into half of the budget."""
        return sum(map(self._size_of, blocks)) <= self._budget // 2

    def pin(self, blocks: Iterable[int]) -> None:
        """Announce that planned steps need these blocks; each call is undone by one `unpin`."""
        for block in blocks:
            self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, blocks: Iterable[int]) -> None:
        """Planned steps are done with these blocks."""
        for block in blocks:
            left = self._pins[block] - 1
            if left:
                self._pins[block] = left
            else:
                del self._pins[block]

    def request(self, blocks: Iterable[int], *, must: bool) -> bool:
        """Start loading what is missing.

        Args:
            blocks: in deadline order.
            must: load even beyond the budget (the very next step needs them).

        Returns:
            False where the budget stopped it: the caller tries again once steps have been handed out.
        """
        missing = [block for block in blocks if block not in self._entries]
        for block in missing:
            size = self._size_of(block)
            if self._bytes + size > self._budget:
                self._make_room(self._bytes + size - self._budget)
            if self._bytes + size > self._budget and not must:
                return False
            self._sizes[block] = size
            self._bytes += size
            self.counts.peak_bytes = max(self.counts.peak_bytes, self._bytes)
            self.counts.block_loads += 1
            self.counts.bytes_loaded += size
            self._entries[block] = self._pool.submit(self._load, block)
        return True

    def wait(self, blocks: Sequence[int]) -> list[GatherColumns]:
        """The loaded blocks, in that order; raises what loading one of them raised."""
        entries = self._entries
        loaded = []
        for block in blocks:
            entry = entries.pop(block)
            entries[block] = entry  # now the most recently used
            loaded.append(entry.result())
        self.counts.block_uses += len(loaded)
        return loaded

    def _make_room(self, wanted: int) -> None:
        for block in [b for b in self._entries if b not in self._pins]:
            if wanted <= 0:
                return
            future = self._entries[block]
            if not future.done() and not future.cancel():
                continue  # being read right now: its bytes are in use
            del self._entries[block]
            size = self._sizes.pop(block)
            self._bytes -= size
            wanted -= size
            self.counts.evictions += 1

    def close(self) -> None:
        """Cancel what has not begun, wait for what has, drop everything."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._entries.clear()
        self._sizes.clear()
        self._pins.clear()
        self._bytes = 0
