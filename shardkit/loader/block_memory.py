"""Memory for blocks: how much a loader may take, and a pool that lends it while something refers to it."""

from __future__ import annotations

import math
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.loader.batch import EpochCounts
from shardkit.loader.settings import LoaderSetup

__all__ = ["BlockMemory", "Loan", "MemoryBound", "capacity_of", "check_memory", "memory_needed"]

_AHEAD: Final = 0.25  # share of the windows that is added for the next blocks
_LEAST: Final = 1 << 20
_PAGE: Final = 4096
_WHOLE: Final = 2 << 30  # default bound if rows of all blocks are mixed

_LOADS_BEFORE_ROOM: Final = 16
_LOADS_BEFORE_TELLING: Final = 256  # too few loads would say nothing about the epoch
# factor over the blocks that lanes mix at once, because consecutive windows overlap
_ROOM_OF_WINDOWS: Final = 1.5
_LEAST_PIECE: Final = 1 << 16  # bytes; the allocator already reuses smaller blocks


def memory_needed(setup: LoaderSetup, lanes: int) -> int:
    """Return the bytes of the blocks that `lanes` lanes mix at a time, plus a quarter (SPEC.md §2).

    With less memory the same blocks would be read repeatedly. The result is at most the size of the dataset plus a
    quarter. With ``shuffle="full"`` it is the minimum of 1 MiB, because only the whole dataset would be enough.
    """
    plan, sources = setup.plan, setup.sources
    blocks = 0 if plan.settings.shuffle == "full" else min(sources.rows.blocks, lanes * plan.open_blocks)
    size = -(-max(1, sources.mean_block_bytes) // _PAGE) * _PAGE
    return max(_LEAST, int(blocks * size * (1 + _AHEAD)))


def check_memory(setup: LoaderSetup, lanes: int) -> None:
    """Raise ConfigurationError if `config.memory` is less than `lanes` lanes need; workers of a rank share it."""
    config, plan, sources = setup.config, setup.plan, setup.sources
    if config.memory is None:
        return
    needed, bound = memory_needed(setup, lanes), config.memory // config.stride
    if bound < needed:
        workers = f" for each of {config.stride} workers" if config.stride > 1 else ""
        raise ConfigurationError(
            f"memory={config.memory} is {bound} bytes{workers}; {lanes} lanes mix rows of {plan.open_blocks} "
            f"blocks of {sources.mean_block_bytes} bytes each and need {needed}{workers}: leave memory out, pass "
            f"at least {needed * config.stride}, or give the plan fewer lanes or a smaller window_blocks"
        )


class _Piece:
    """An anonymous mapping with its address and capacity."""

    __slots__ = ("__weakref__", "address", "capacity", "mapping")

    def __init__(self, capacity: int, *, inherited: bool) -> None:
        # without MAP_POPULATE, for which Python would hold the interpreter for a millisecond per megabyte
        try:
            self.mapping = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for a block of {capacity} bytes: {error.strerror}") from error
        if not inherited and hasattr(mmap, "MADV_DONTFORK"):
            self.mapping.madvise(mmap.MADV_DONTFORK)
            _pieces.add(self)
        self.capacity = capacity
        self.address: int = np.frombuffer(self.mapping, np.uint8).__array_interface__["data"][0]


_pieces: weakref.WeakSet[_Piece] = weakref.WeakSet()
_of_parent: list[_Piece] = []


def _leave_pieces() -> None:
    """Keep the parent's pieces in a forked child: unmapping them could unmap other memory at the same address."""
    _of_parent.extend(_pieces)


os.register_at_fork(after_in_child=_leave_pieces)


class Loan:
    """Memory that is not reused while this object or an array over it is referenced."""

    __slots__ = ("_piece", "_returned", "address", "size")

    def __init__(self, address: int, size: int, piece: Any, returned: deque[_Piece] | None) -> None:
        self.address, self.size = address, size
        self._piece, self._returned = piece, returned

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._returned is not None:
            self._returned.append(self._piece)  # without a lock: this runs on any thread at any moment


class BlockMemory:
    """Thread-safe pool of memory for blocks and batches.

    Memory is recycled because touching new pages costs more than a copy into them. It is recycled only when no array
    refers to it, so a row is never copied out of a block that was loaded later.

    Args:
        limit: bytes that are lent or kept; more may be lent.
        inherited: a forked child gets a copy of the memory, which batches need because the program may hold them.
    """

    def __init__(self, limit: int, *, inherited: bool = False) -> None:
        self._limit, self._inherited = limit, inherited
        self._lock = threading.Lock()
        self._returned: deque[_Piece] = deque()
        self._free: dict[int, list[_Piece]] = {}  # by capacity
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes lent or kept."""
        return self._bytes

    @property
    def limit(self) -> int:
        """Bytes that are lent or kept; of a smaller value, memory is freed as it is returned."""
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        with self._lock:
            self._limit = value
            self._collect()
            self._shrink(0)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Return (size,) uint8 with arbitrary content."""
        return np.asarray(self.lend(size))

    def lend(self, size: int) -> Loan:
        """Return a loan of `size` bytes with arbitrary content."""
        return self.lend_all([size])[0]

    def lend_all(self, sizes: Sequence[int]) -> list[Loan]:
        """Return a loan of each size."""
        with self._lock:
            self._collect()
            return [self._lend(size) for size in sizes]

    def _lend(self, size: int) -> Loan:
        if size < _LEAST_PIECE:
            small = np.empty(size, np.uint8)
            return Loan(small.__array_interface__["data"][0], size, small, None)
        capacity = capacity_of(size)
        free = self._free.get(capacity)
        piece = free.pop() if free else self._larger(capacity)
        if piece is None:
            self._shrink(capacity)
            piece = _Piece(capacity, inherited=self._inherited)
            self._bytes += capacity
        return Loan(piece.address, size, piece, self._returned)

    def _larger(self, capacity: int) -> _Piece | None:
        """Return a free piece of up to twice the capacity, because touching new memory costs more than the waste."""
        fitting = (more for more, some in self._free.items() if some and capacity < more <= 2 * capacity)
        free = self._free.get(min(fitting, default=0))
        return free.pop() if free else None

    def close(self) -> None:
        """Free the kept memory; lent memory is freed when nothing refers to it."""
        self.limit = 0

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._free.setdefault(piece.capacity, []).append(piece)

    def _shrink(self, coming: int) -> None:
        """Unmap free pieces until `coming` more bytes fit within the limit."""
        for capacity in sorted(self._free, reverse=True):
            pieces = self._free[capacity]
            while pieces and self._bytes + coming > self._limit:
                pieces.pop().mapping.close()
                self._bytes -= capacity


@lru_cache(maxsize=1 << 12)
def capacity_of(size: int) -> int:
    """Return `size` rounded up by at most a sixteenth, so that blocks of similar sizes can share pieces."""
    grain = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 5))
    return -(-size // grain) * grain


class MemoryBound:
    """How many bytes the blocks of a loader take (SPEC.md §2): `pool.limit`, which grows where steps need more.

    Args:
        setup: setup of the loader.
        lanes: number of lanes that the rank works.
        over_network: blocks may come over a network.

    Attributes:
        pool: lends the memory.
    """

    def __init__(self, setup: LoaderSetup, lanes: int, *, over_network: bool) -> None:
        config, sources = setup.config, setup.sources
        self._setup, self._lanes = setup, lanes
        self._told: set[str] = set()  # names of warnings that were given
        self._is_full = setup.plan.settings.shuffle == "full"
        # blocks after use are kept up to the bound, because they came over a network or any step may need them again
        self._fills = over_network or self._is_full
        # bytes that blocks may ever take, if the user has set it
        self._bound = None if config.memory is None else config.memory // config.stride
        start = memory_needed(setup, lanes)
        if self._bound is None:
            if self._is_full:
                start = max(start, min(_WHOLE, sources.rows.blocks * 2 * sources.mean_block_bytes))
            if over_network:  # reading ahead expects blocks that are used again in memory
                start = start * 3 // 2
        elif self._fills:
            start = self._bound
        self.pool = BlockMemory(start)

    @property
    def bound(self) -> int:
        """Bytes that blocks may ever take, if the user has set it; otherwise what they may take now."""
        return self.pool.limit if self._bound is None else self._bound

    @bound.setter
    def bound(self, num_bytes: int) -> None:
        self._bound = num_bytes
        self.pool.limit = num_bytes if self._fills else min(self.pool.limit, num_bytes)

    def serve(self, lanes: int) -> None:
        """Have room for the windows of `lanes` lanes from now on."""
        self._lanes = lanes
        self.pool.limit = max(self.pool.limit, memory_needed(self._setup, lanes))

    def _grow(self, num_bytes: int) -> bool:
        """Raise the limit to 1.5 times `num_bytes`, within the bound.

        Returns False if it cannot grow or `num_bytes` would exceed the bound.
        """
        room = max(self.pool.limit, num_bytes * 3 // 2)
        if self._bound is not None:
            room = min(room, self._bound)
        if room < num_bytes or room <= self.pool.limit:
            return False
        self.pool.limit = room
        return True

    def over_memory(self, step: int, needed: int) -> None:
        """Have room for a single step that exceeds the limit; if the user has set the bound, warn once."""
        before = self.pool.limit
        if self._grow(needed) or "over_memory" in self._told:
            return
        self._told.add("over_memory")
        self._setup.events.record("over_memory", step=step, needed_bytes=needed, memory_bytes=before)
        warnings.warn(
            f"shardkit: the blocks of step {step} take {needed / 2**20:.1f} MiB, memory={before / 2**20:.1f} MiB; they "
            "are loaded all the same. Give the loader more memory, the plan fewer lanes, or the dataset smaller blocks "
            "(shardkit rebuild --block-size)",
            RuntimeWarning,
            stacklevel=2,
        )

    def note_admission(self, epoch: EpochCounts, mean_block: float) -> bool:
        """Check whether most loads of the epoch are of blocks that were evicted before.

        If so, memory grows and True is returned; if the user has bounded it, a warning is given once.
        """
        loads, before, full = epoch.loads, self.pool.limit, self._is_full
        again = epoch.reloads if full else epoch.soon_again
        if "rereading" in self._told or loads < _LOADS_BEFORE_ROOM or 2 * again < loads:
            return False
        if not full and self._grow(before):
            return True
        if loads < _LOADS_BEFORE_TELLING:
            return False
        self._told.add("rereading")
        self._setup.events.record("rereading", loads=loads, reloads=again, memory_bytes=before)
        if full:
            advice = (
                'rows of all blocks are mixed with shuffle="full", so that only the whole dataset would do'
            )
        else:
            # many strata need more than the windows
            window = self._setup.plan.settings.window_blocks
            needed = max(2 * before, _ROOM_OF_WINDOWS * self._lanes * window * mean_block)
            advice = (
                f"{self._lanes} lanes mix rows of {window} blocks each: give the loader "
                f"memory={_in_mib(needed)!r}, or the plan fewer lanes or a smaller window_blocks"
            )
        warnings.warn(
            f"shardkit: memory={_in_mib(before)!r} is too little: of {loads} blocks that were read, {again} had been "
            f"read and dropped before in the same epoch; {advice}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def _in_mib(size: float) -> str:
    return f"{math.ceil(size / 2**20)}MiB"
