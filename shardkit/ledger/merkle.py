"""Merkle trees of RFC 6962 §2.1 (unchanged in RFC 9162 §2.1), so that any library for these proves what they hold.

`Frontier` appends with a state of one hash per set bit of the size; `Tree` keeps all hashes and every root there was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

HASH_BYTES = 32

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of a tree without leaves (RFC 6962 §2.1)."""

_sha256 = hashlib.sha256


def leaf_hash(entry: bytes) -> bytes:
    """Hash of a leaf; the prefix keeps a leaf from being passed off as a node."""
    return _sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Hash of two subtrees."""
    return _sha256(b"\1" + left + right).digest()


class Frontier:
    """The right edge of a tree: enough to append to it and to know its root.

    Args:
        size: leaves so far.
        peaks: hashes of the complete subtrees that the leaves make, the largest first: one per set bit of `size`.

    Raises:
        ValueError: another number of peaks than the size has.
    """

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count():
            raise ValueError(f"{len(self.peaks)} peaks for {size} leaves, expected {size.bit_count()}")

    def append(self, leaf: bytes) -> None:
        """Add a leaf by its `leaf_hash`; amortised two hashes."""
        node, rest = leaf, self.size
        while rest & 1:
            node = node_hash(self.peaks.pop(), node)
            rest >>= 1
        self.peaks.append(node)
        self.size += 1

    def root(self) -> bytes:
        if not self.peaks:
            return EMPTY_ROOT
        node = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            node = node_hash(peak, node)
        return node


class Tree:
    """A whole tree in memory, 64 bytes a leaf: the roots of every size it ever had."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        # level h: hashes of the complete subtrees of 2**h leaves
        self._levels: list[bytearray] = [bytearray()]
        self.extend(leaves)

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def extend(self, leaves: Iterable[bytes]) -> None:
        for leaf in leaves:
            self._levels[0] += leaf
        below, height = self._levels[0], 1
        while len(below) >= 2 * HASH_BYTES:
            if height == len(self._levels):
                self._levels.append(bytearray())
            level = self._levels[height]
            for first in range(2 * len(level), len(below) - 2 * HASH_BYTES + 1, 2 * HASH_BYTES):
                level += _sha256(b"\1" + below[first : first + 2 * HASH_BYTES]).digest()
            below, height = level, height + 1

    def root(self, size: int | None = None) -> bytes:
        """Root of the first `size` leaves; of all by default."""
        size = self._size(size)
        return self._subtree(0, size) if size else EMPTY_ROOT

    def frontier(self, size: int | None = None) -> Frontier:
        """What is needed to append to the first `size` leaves."""
        size = self._size(size)
        peaks, first = [], 0
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                peaks.append(self._subtree(first, first + (1 << height)))
                first += 1 << height
        return Frontier(size, peaks)

    def _size(self, size: int | None) -> int:
        if size is None:
            return len(self)
        if not 0 <= size <= len(self):
            raise ValueError(f"size {size}: the tree has {len(self)} leaves")
        return size

    def _subtree(self, first: int, last: int) -> bytes:
        """Hash over leaves [first, last); `first` is a multiple of the largest power of two that fits."""
        count = last - first
        if count & (count - 1) == 0:
            height = count.bit_length() - 1
            at = (first >> height) * HASH_BYTES
            return bytes(self._levels[height][at : at + HASH_BYTES])
        split = first + _split(count)
        return node_hash(self._subtree(first, split), self._subtree(split, last))


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)
