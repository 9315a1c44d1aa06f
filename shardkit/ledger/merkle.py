"""Merkle trees of RFC 6962 §2.1 (unchanged in RFC 9162 §2.1): roots, proofs that a leaf is in, proofs that a tree grew.

`Frontier` appends with a state of one hash per set bit of the size; `Tree` keeps all hashes and proves. The functions
that verify need neither: they take a proof and say yes or no.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

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
    """A whole tree in memory, 64 bytes a leaf: roots of every size it ever had, and proofs."""

    def __init__(self, leaves: Iterable[bytes] = ()) -> None:
        self._levels: list[bytearray] = [
            bytearray()
        ]  # level h: hashes of the complete subtrees of 2**h leaves
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

    def inclusion_proof(self, index: int, size: int | None = None) -> list[bytes]:
        """PATH(index, D[0:size]) of RFC 6962 §2.1.1: the siblings from the leaf up."""
        first, last = 0, self._size(size)
        if not 0 <= index < last:
            raise ValueError(f"leaf {index} is not among the first {last}")
        path: list[bytes] = []
        while last - first > 1:
            split = first + _split(last - first)
            if index < split:
                path.append(self._subtree(split, last))
                last = split
            else:
                path.append(self._subtree(first, split))
                first = split
        return path[::-1]

    def consistency_proof(self, old: int, size: int | None = None) -> list[bytes]:
        """PROOF(old, D[0:size]) of RFC 6962 §2.1.2; empty where `old` is 0 or `size`."""
        first, last, whole = 0, self._size(size), True
        if not 0 <= old <= last:
            raise ValueError(f"a tree of {last} leaves never had {old}")
        if old in (0, last):
            return []
        path: list[bytes] = []
        while old != last:
            split = first + _split(last - first)
            if old <= split:
                path.append(self._subtree(split, last))
                last = split
            else:
                path.append(self._subtree(first, split))
                first, whole = split, False
        return ([] if whole else [self._subtree(first, last)]) + path[::-1]

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


def verify_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether `proof` shows that the leaf with this hash is number `index` of `size` (RFC 9162 §2.1.3.2)."""
    if not 0 <= index < size:
        return False
    node, place, last = leaf, index, size - 1
    for sibling in proof:
        if len(sibling) != HASH_BYTES or last == 0:
            return False
        if place & 1 or place == last:
            node = node_hash(sibling, node)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            node = node_hash(node, sibling)
        place, last = place >> 1, last >> 1
    return last == 0 and node == root


def verify_consistency(old: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether `proof` shows that the tree of `size` leaves begins with that of `old` leaves (RFC 9162 §2.1.4.2)."""
    if not 0 <= old <= size:
        return False
    if old in (0, size):
        return not proof and old_root == (root if old else EMPTY_ROOT)
    rest = list(proof)
    if old & (old - 1) == 0:
        rest.insert(0, old_root)
    if not rest or any(len(one) != HASH_BYTES for one in rest):
        return False
    place, last = old - 1, size - 1
    while place & 1:
        place, last = place >> 1, last >> 1
    before = after = rest[0]
    for sibling in rest[1:]:
        if last == 0:
            return False
        if place & 1 or place == last:
            before, after = node_hash(sibling, before), node_hash(sibling, after)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            after = node_hash(after, sibling)
        place, last = place >> 1, last >> 1
    return last == 0 and before == old_root and after == root


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)
