"""Merkle trees of RFC 6962 §2.1 (unchanged in RFC 9162 §2.1), so that other libraries can verify their proofs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

HASH_BYTES = 32

EMPTY_ROOT = hashlib.sha256(b"").digest()
"""Root of a tree without leaves."""


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of a leaf. The prefix prevents a leaf from being presented as an inner node."""
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the parent of two subtrees."""
    return hashlib.sha256(b"\1" + left + right).digest()


class Frontier:
    """The right edge of a tree, sufficient to append leaves and compute the root.

    Args:
        size: number of leaves.
        peaks: hashes of the complete subtrees, the largest first: one per set bit of `size`.

    Raises:
        ValueError: the number of peaks does not fit the size.
    """

    def __init__(self, size: int = 0, peaks: Iterable[bytes] = ()) -> None:
        self.size, self.peaks = size, list(peaks)
        if len(self.peaks) != size.bit_count():
            raise ValueError(f"{len(self.peaks)} peaks for {size} leaves, expected {size.bit_count()}")

    def append(self, leaf: bytes) -> None:
        """Append a leaf, given its `leaf_hash`. Amortised cost: at most one hash."""
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
    """A whole tree in memory, 64 bytes per leaf, with the roots of all its sizes."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        sha256 = hashlib.sha256
        # level h: hashes of the complete subtrees of 2**h leaves
        self._levels = [b"".join(leaves)]
        while len(below := self._levels[-1]) >= 2 * HASH_BYTES:
            ends = range(2 * HASH_BYTES, len(below) + 1, 2 * HASH_BYTES)
            level = (sha256(b"\1" + below[end - 2 * HASH_BYTES : end]).digest() for end in ends)
            self._levels.append(b"".join(level))

    def __len__(self) -> int:
        return len(self._levels[0]) // HASH_BYTES

    def root(self, size: int | None = None) -> bytes:
        """Return the root of the first `size` leaves, by default of all."""
        return self.frontier(size).root()

    def frontier(self, size: int | None = None) -> Frontier:
        """Return the frontier of the first `size` leaves, by default of all."""
        size = len(self) if size is None else size
        if not 0 <= size <= len(self):
            raise ValueError(f"size {size}: the tree has {len(self)} leaves")
        peaks, first = [], 0
        for height in reversed(range(size.bit_length())):
            if size >> height & 1:
                at = (first >> height) * HASH_BYTES
                peaks.append(self._levels[height][at : at + HASH_BYTES])
                first += 1 << height
        return Frontier(size, peaks)
