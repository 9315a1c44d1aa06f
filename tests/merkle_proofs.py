"""Proofs of RFC 6962 that a leaf is in a tree and that a tree grew, as others make and verify them from our roots."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.ledger.trees import EMPTY_ROOT, HASH_BYTES, Tree, node_hash


def inclusion_proof(tree: Tree, index: int, size: int) -> list[bytes]:
    """PATH(index, D[0:size]) of RFC 6962 §2.1.1: the siblings from the leaf up."""
    first, last = 0, size
    if not 0 <= index < last:
        raise ValueError(f"leaf {index} is not among the first {last}")
    path: list[bytes] = []
    while last - first > 1:
        split = first + _split(last - first)
        if index < split:
            path.append(_subtree(tree, split, last))
            last = split
        else:
            path.append(_subtree(tree, first, split))
            first = split
    return path[::-1]


def consistency_proof(tree: Tree, old: int, size: int) -> list[bytes]:
    """PROOF(old, D[0:size]) of RFC 6962 §2.1.2; empty where `old` is 0 or `size`."""
    first, last, whole = 0, size, True
    if not 0 <= old <= last:
        raise ValueError(f"a tree of {last} leaves never had {old}")
    if old in (0, last):
        return []
    path: list[bytes] = []
    while old != last:
        split = first + _split(last - first)
        if old <= split:
            path.append(_subtree(tree, split, last))
            last = split
        else:
            path.append(_subtree(tree, first, split))
            first, whole = split, False
    return ([] if whole else [_subtree(tree, first, last)]) + path[::-1]


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


def _subtree(tree: Tree, first: int, last: int) -> bytes:
    hashes = bytes(tree._levels[0])
    leaves = (hashes[at : at + HASH_BYTES] for at in range(HASH_BYTES * first, HASH_BYTES * last, HASH_BYTES))
    return Tree(leaves).root()


def _split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << ((count - 1).bit_length() - 1)
