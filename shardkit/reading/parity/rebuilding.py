"""A block of a shard from the same range of the others of its set: the last resort of a read (SPEC.md §5)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ShardkitError
from shardkit.reading.parity.galois import recover
from shardkit.reading.parity.sets import SetRecord

__all__ = ["ReadRange", "rebuild_range"]

Bytes = NDArray[np.uint8]

ReadRange = Callable[[str, int, int], bytes]
"""(object name, offset, length) → exactly these bytes; a ShardkitError where that is not possible."""

MAX_RANGE_BYTES: Final = 2**30


def rebuild_range(
    record: SetRecord,
    position: int,
    offset: int,
    length: int,
    sha256: bytes,
    read: ReadRange,
    pool: ThreadPoolExecutor,
) -> bytes | None:
    """Part of a member, from the same part of k others.

    Args:
        record: Of the set.
        position: Of the member that is lost.
        offset: Of the part, in the member.
        length: Of the part.
        sha256: 32 bytes, which the part must have: what the others give is trusted as far as this.
        read: Reads a range of an object, from wherever it lies.
        pool: For reads at the same time.

    Returns:
        The bytes, verified; None where too much is lost.
    """
    one = record.set
    if length > MAX_RANGE_BYTES or offset + length > one.members[position].size:
        return None
    ranges = _Ranges(record, offset, length, read, pool)
    ranges.fetch([i for i in range(one.k + 1) if i != position])
    if len(ranges.failed) <= 1:
        found = _attempt(ranges, position, (), sha256)
        if found is not None:
            return found
        if (
            not ranges.failed
        ):  # one of those that were read is silently wrong: with Q, each is done without in turn
            ranges.fetch([one.k + 1])
            for suspect in range(one.k + 1):
                if suspect != position and one.k + 1 not in ranges.failed:
                    found = _attempt(ranges, position, (suspect,), sha256)
                    if found is not None:
                        return found
    return None


class _Ranges:
    """The same range of several objects of a set."""

    def __init__(
        self, record: SetRecord, offset: int, length: int, read: ReadRange, pool: ThreadPoolExecutor
    ) -> None:
        self.record, self.offset, self.length = record, offset, length
        self._read, self._pool = read, pool
        self.pieces: dict[int, Bytes] = {}
        self.failed: set[int] = set()

    def fetch(self, positions: Sequence[int]) -> None:
        running: dict[int, Future[bytes]] = {}
        for i in positions:
            start, length = self._span(i)
            if length <= 0:
                self.pieces[i] = np.empty(0, dtype=np.uint8)
            else:
                running[i] = self._pool.submit(self._read, self.record.object_at(i).name, start, length)
        for i, future in running.items():
            try:
                self.pieces[i] = np.frombuffer(future.result(), dtype=np.uint8)
            except ShardkitError:
                self.failed.add(i)

    def _span(self, position: int) -> tuple[int, int]:
        """What of an object the range covers: members end early, parity objects begin with a header."""
        one = self.record.set
        if position >= one.k:
            return one.header_bytes + self.offset, self.length
        return self.offset, min(self.length, one.members[position].size - self.offset)


def _attempt(ranges: _Ranges, position: int, without: Sequence[int], sha256: bytes) -> bytes | None:
    """The part, if what was read without `without` gives it."""
    k = ranges.record.set.k
    if ranges.failed and k + 1 not in ranges.pieces:
        ranges.fetch([k + 1])
    usable: Mapping[int, Bytes] = {i: piece for i, piece in ranges.pieces.items() if i not in without}
    members = [None if i == position else usable.get(i) for i in range(k)]
    p, q = usable.get(k), usable.get(k + 1)
    if sum(piece is None for piece in (*members, p, q)) > 2:
        return None
    data = recover(members, p, q, ranges.length, ())[position].tobytes()
    return data if hashlib.sha256(data).digest() == sha256 else None
