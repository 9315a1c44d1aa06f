"""Merkle trees against the published certificate-transparency vectors, and against the recursive definition."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.ledger.ledger import Frontier, Tree, leaf_hash

# The reference inputs of the certificate-transparency project, carried over into transparency-dev/merkle: entries,
# and roots of sizes 0 to 8, for the hash of RFC 6962 §2.1 / RFC 9162 §2.1.
ENTRIES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    bytes.fromhex(text)
    for text in (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
        "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
        "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
        "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
        "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
        "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
    )
]


@pytest.fixture
def tree() -> Tree:
    return Tree(map(leaf_hash, ENTRIES))


@pytest.mark.parametrize("size", range(9))
def test_roots_are_the_published_ones(tree: Tree, size: int) -> None:
    assert tree.root(size) == ROOTS[size]
    frontier = Frontier()
    for entry in ENTRIES[:size]:
        frontier.append(leaf_hash(entry))
    assert frontier.root() == ROOTS[size]
    assert len(frontier.peaks) <= 3


def _defined_root(entries: list[bytes]) -> bytes:
    """MTH of RFC 6962 §2.1, word for word."""
    if not entries:
        return hashlib.sha256(b"").digest()
    if len(entries) == 1:
        return hashlib.sha256(b"\x00" + entries[0]).digest()
    k = 1
    while 2 * k < len(entries):
        k *= 2
    return hashlib.sha256(b"\x01" + _defined_root(entries[:k]) + _defined_root(entries[k:])).digest()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 70), st.data())
def test_roots_of_all_sizes_are_the_defined_ones(count: int, data: st.DataObject) -> None:
    entries = [bytes([i, i * 7 % 251]) for i in range(count)]
    tree = Tree(map(leaf_hash, entries))
    size = data.draw(st.integers(0, count))
    assert tree.root(size) == tree.frontier(size).root() == _defined_root(entries[:size])
    assert tree.root() == _defined_root(entries)


def test_a_frontier_with_other_peaks_than_its_size_has_is_refused() -> None:
    with pytest.raises(ValueError, match="2 peaks for 4 leaves"):
        Frontier(4, [bytes(32), bytes(32)])
