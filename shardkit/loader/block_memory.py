"""Private memory for blocks: taken for a load, and again for another one once nothing refers to it any more."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockMemory"]

_LEAST: Final = 1 << 16  # smaller blocks are the allocator's: it keeps what is freed


class _Piece:
    """An anonymous mapping, where it begins and how much it holds. A forked child does not get it."""

    __slots__ = ("address", "capacity", "mapping")

    def __init__(self, capacity: int) -> None:
        try:
            self.mapping = mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for a block of {capacity} bytes: {error.strerror}") from error
        if hasattr(mmap, "MADV_DONTFORK"):
            self.mapping.madvise(mmap.MADV_DONTFORK)
        self.capacity = capacity
        self.address: int = np.frombuffer(self.mapping, np.uint8).__array_interface__["data"][0]


class _Loan:
    """What arrays over a piece keep alive; gives it back when the last of them goes."""

    __slots__ = ("__array_interface__", "_piece", "_returned")

    def __init__(self, piece: _Piece, size: int, returned: deque[_Piece]) -> None:
        self._piece, self._returned = piece, returned
        self.__array_interface__: dict[str, Any] = {
            "data": (piece.address, False), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def __del__(self) -> None:
        self._returned.append(self._piece)  # on any thread, at any moment


class BlockMemory:
    """Hands out memory that nobody else writes to; safe to call from many threads.

    It grows on demand, for memory that was never touched costs more than a copy into it, and is recycled only when no
    array refers to it, so that a row can never be copied out of a block that was loaded after its own.

    Args:
        limit: bytes that it keeps; what is lent may be more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
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
        """`size` bytes; their content is that of whatever they held before.

        Raises:
            MemoryError: there are none.
        """
        if size < _LEAST:
            return np.empty(size, np.uint8)
        capacity = _capacity(size)
        with self._lock:
            self._collect()
            free = self._free.get(capacity)
            piece = free.pop() if free else None
            if piece is None:
                self._shrink(capacity)
                piece = _Piece(capacity)
                self._bytes += capacity
        return np.asarray(_Loan(piece, size, self._returned))

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


def _capacity(size: int) -> int:
    """At most an eighth more: blocks of one dataset differ a little, and take each other's places."""
    grain = max(mmap.PAGESIZE, 1 << (size.bit_length() - 4))
    return -(-size // grain) * grain
