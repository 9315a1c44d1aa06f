"""Merkle trees against the published certificate-transparency vectors, and against the recursive definition."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.ledger.trees import EMPTY_ROOT, Frontier, Tree, leaf_hash
from tests.merkle_proofs import consistency_proof, inclusion_proof, verify_consistency, verify_inclusion

# The reference inputs of the certificate-transparency project, carried over into transparency-dev/merkle: entries,
# roots of sizes 0 to 8, audit paths and consistency proofs, all for the hash of RFC 6962 §2.1 / RFC 9162 §2.1.
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
NODE = {
    "1": "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
    "2-3": "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
    "4": "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "4-5": "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
    "6-7": "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "0-3": "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "0-1": "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "4-7": "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
    "0": "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
}
PATHS = [  # (leaf counted from 0, size, audit path)
    (0, 1, []),
    (0, 8, ["1", "2-3", "4-7"]),
    (5, 8, ["4", "6-7", "0-3"]),
    (2, 3, ["0-1"]),
    (1, 5, ["0", "2-3", "4"]),
]
PROOFS = [  # (old size, size, consistency proof)
    (1, 1, []),
    (1, 8, ["1", "2-3", "4-7"]),
    (6, 8, ["4-5", "6-7", "0-3"]),
    (2, 5, ["2-3", "4"]),
]


def _hashes(names: list[str]) -> list[bytes]:
    return [bytes.fromhex(NODE[name]) for name in names]


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


@pytest.mark.parametrize(("index", "size", "names"), PATHS)
def test_inclusion_proofs_are_the_published_ones(tree: Tree, index: int, size: int, names: list[str]) -> None:
    assert inclusion_proof(tree, index, size) == _hashes(names)
    assert verify_inclusion(leaf_hash(ENTRIES[index]), index, size, _hashes(names), ROOTS[size])


@pytest.mark.parametrize(("old", "size", "names"), PROOFS)
def test_consistency_proofs_are_the_published_ones(tree: Tree, old: int, size: int, names: list[str]) -> None:
    assert consistency_proof(tree, old, size) == _hashes(names)
    assert verify_consistency(old, size, ROOTS[old], ROOTS[size], _hashes(names))


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
def test_every_proof_verifies_and_no_changed_one_does(count: int, data: st.DataObject) -> None:
    entries = [bytes([i, i * 7 % 251]) for i in range(count)]
    tree = Tree(map(leaf_hash, entries))
    size = data.draw(st.integers(0, count))
    root = tree.root(size)
    assert root == _defined_root(entries[:size])
    assert tree.frontier(size).root() == root
    old = data.draw(st.integers(0, size))
    proof = consistency_proof(tree, old, size)
    assert verify_consistency(old, size, tree.root(old), root, proof)
    for wrong in (proof[:-1], [*proof, EMPTY_ROOT], [EMPTY_ROOT, *proof[1:]]):
        assert wrong == proof or not verify_consistency(old, size, tree.root(old), root, wrong)
    if old != size:
        assert not verify_consistency(old, size, hashlib.sha256(b"other").digest(), root, proof)
    if size:
        index = data.draw(st.integers(0, size - 1))
        path = inclusion_proof(tree, index, size)
        leaf = leaf_hash(entries[index])
        assert verify_inclusion(leaf, index, size, path, root)
        assert not verify_inclusion(leaf_hash(b"other"), index, size, path, root)
        assert not verify_inclusion(leaf, index, size, [*path, EMPTY_ROOT], root)
        assert not path or not verify_inclusion(leaf, index, size, path[:-1], root)
        assert size == 1 or not verify_inclusion(leaf, (index + 1) % size, size, path, root)
        assert not verify_inclusion(leaf, size, size, path, root)
    assert tree.root() == _defined_root(entries)


def test_a_frontier_with_other_peaks_than_its_size_has_is_refused() -> None:
    with pytest.raises(ValueError, match="2 peaks for 4 leaves"):
        Frontier(4, [EMPTY_ROOT, EMPTY_ROOT])
