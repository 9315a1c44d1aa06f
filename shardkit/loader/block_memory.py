"""Memory of blocks, lent while something refers to it and used again afterwards."""

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

_LEAST_PIECE: Final = 1 << 16  # bytes; the allocator keeps what is freed of smaller blocks


class _Piece:
    """An anonymous mapping, where it begins and how much it holds."""

    __slots__ = ("__weakref__", "address", "capacity", "mapping")

    def __init__(self, capacity: int, *, inherited: bool, touched: bool) -> None:
        # touched at once, which costs two thirds of touching it page by page
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
    """In a forked child other memory may lie where these did: they are never given back."""
    _of_parent.extend(_pieces)


os.register_at_fork(after_in_child=_leave_pieces)


class Loan:
    """Memory that nobody else writes to as long as this, or an array over it, is referred to."""

    __slots__ = ("_piece", "_returned", "address", "size")

    def __init__(self, address: int, size: int, piece: Any, returned: deque[_Piece] | None) -> None:
        self.address, self.size = address, size
        self._piece, self._returned = piece, returned

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._returned is not None:
            self._returned.append(self._piece)  # on any thread, at any moment


class BlockMemory:
    """Hands out memory that nobody else writes to; safe to call from many threads.

    It grows on demand, for memory that was never touched costs more than a copy into it, and is recycled only when no
    array refers to it, so that a row can never be copied out of a block that was loaded after its own.

    Args:
        limit: bytes that it keeps; what is lent may be more.
        inherited: whether a forked child gets it: what a program may hold it gets, as of any memory.
    """

    def __init__(self, limit: int, *, inherited: bool = False) -> None:
        self._limit, self._inherited = limit, inherited
        self._lock = threading.Lock()
        self._returned: deque[_Piece] = deque()
        self._free: dict[int, list[_Piece]] = {}  # by capacity
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are lent or kept."""
        return self._bytes

    @property
    def limit(self) -> int:
        """Bytes that it keeps."""
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        with self._lock:
            self._limit = value
            self._collect()
            self._shrink(0)

    def take(self, size: int) -> NDArray[np.uint8]:
        """`size` bytes; their content is that of whatever they held before."""
        return np.asarray(self.lend(size))

    def lend(self, size: int, *, touched: bool = True) -> Loan:
        """The same; pages of new memory are left to whoever writes to it first unless they are `touched`."""
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
        """A free piece that holds up to twice as much: to touch new memory costs more than what it wastes."""
        fitting = (more for more, some in self._free.items() if some and capacity < more <= 2 * capacity)
        free = self._free.get(min(fitting, default=0))
        return free.pop() if free else None

    def close(self) -> None:
        """Keep nothing; what is lent goes when nothing refers to it."""
        self.limit = 0

    def _collect(self) -> None:
        while self._returned:
            piece = self._returned.popleft()
            self._free.setdefault(piece.capacity, []).append(piece)

    def _shrink(self, coming: int) -> None:
        """Give back free pieces until so many bytes more are within the limit."""
        for capacity in sorted(self._free, reverse=True):
            pieces = self._free[capacity]
            while pieces and self._bytes + coming > self._limit:
                pieces.pop().mapping.close()
                self._bytes -= capacity


@lru_cache(maxsize=1 << 12)
def capacity_of(size: int) -> int:
    """Bytes of a piece, at most a sixteenth more: blocks of a dataset differ a little, and take each other's places."""
    grain = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 5))
    return -(-size // grain) * grain
