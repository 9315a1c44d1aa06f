"""Memory for blocks: lent while something refers to it, then reused."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockMemory", "Loan", "capacity_of"]

_LEAST_PIECE: Final = 1 << 16  # bytes; the allocator already reuses smaller blocks


class _Piece:
    """An anonymous mapping with its address and capacity."""

    __slots__ = ("__weakref__", "address", "capacity", "mapping")

    def __init__(self, capacity: int, *, inherited: bool, touched: bool) -> None:
        # touching all pages at once costs two thirds of touching them one by one
        populate = getattr(mmap, "MAP_POPULATE", 0) if touched else 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate
        try:
            self.mapping = mmap.mmap(-1, capacity, flags)
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
        limit: bytes to keep; more may be lent.
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
        """Bytes to keep."""
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

    def lend(self, size: int, *, touched: bool = True) -> Loan:
        """Return a loan of `size` bytes; new pages are touched now if `touched`, otherwise at the first write."""
        with self._lock:
            self._collect()
            return self._lend(size, touched)

    def _lend(self, size: int, touched: bool) -> Loan:
        if size < _LEAST_PIECE:
            small = np.empty(size, np.uint8)
            return Loan(small.__array_interface__["data"][0], size, small, None)
        capacity = capacity_of(size)
        free = self._free.get(capacity)
        piece = free.pop() if free else self._larger(capacity)
        if piece is None:
            self._shrink(capacity)
            piece = _Piece(capacity, inherited=self._inherited, touched=touched)
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
