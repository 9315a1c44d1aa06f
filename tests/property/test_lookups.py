"""Look-ups against a search of all samples by hand."""

from __future__ import annotations

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset import lookups
from shardkit.dataset.lookups import Entries, find_samples, hash_values, parse_lookup
from shardkit.dataset.merging import merge_datasets
from shardkit.dataset.selecting import put_selected
from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError
from shardkit.formats import Schema
from shardkit.repository.repository import Repository
from shardkit_tools.building.rebuilding import label_again
from tests.flips import flip

SCHEMA = {"url": "str", "n": "int64", "blob": "bytes", "meta": "json"}


def row(number: int, spread: int) -> dict[str, Any]:
    return {
        "url": f"http://h/{number % spread}",
        "n": number // 2,
        "blob": bytes([number % 7]) * (number % 5),
        "meta": {"b": number % 3, "a": [True, None]},
    }


def make(
    root: Path, numbers: range, spread: int, *, append: bool = False, **settings: Any
) -> shardkit.Dataset:
    with shardkit.create(
        root, SCHEMA, shard_size="8KiB", block_size="1KiB", append=append, **settings
    ) as writer:
        for number in numbers:
            writer.add(row(number, spread), key=f"a/{number}" if number % 3 else f"k{number}")
    return shardkit.open(root)


def found(ds: shardkit.Dataset, asked: str, values: list[str], **how: Any) -> set[tuple[int, int]]:
    field, hashes = hash_values(ds.schema, asked, values)
    matches = find_samples(ds, field, hashes, **how)
    pairs = list(zip(matches.value.tolist(), matches.sample.tolist(), strict=True))
    assert pairs == sorted(set(pairs)), "in order, each once"
    return set(pairs)


def by_hand(ds: shardkit.Dataset, field: str, values: list[Any]) -> set[tuple[int, int]]:
    pairs = set()
    for sample in range(len(ds)):
        have = ds.key(sample) if field == "key" else ds[sample][field]
        pairs |= {(place, sample) for place, value in enumerate(values) if have == value}
    return pairs


def check(ds: shardkit.Dataset, spread: int) -> None:
    urls = [f"http://h/{i}" for i in range(spread + 2)]
    assert found(ds, "url", urls) == by_hand(ds, "url", urls)
    assert found(ds, "n", ["0", "7", "-1", "7"]) == by_hand(ds, "n", [0, 7, -1, 7])
    keys = ["a/1", "k3", "k1", "a/3", "a/40"]
    assert found(ds, "key", keys) == by_hand(ds, "key", keys)
    blobs = [b"", b"\1", b"\2\2", b"\6" * 4, b"none"]
    digests = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    assert found(ds, "blob:sha256", digests) == by_hand(ds, "blob", blobs)
    assert found(ds, "meta", ['{"a": [true, null], "b": 2}']) == by_hand(
        ds, "meta", [{"b": 2, "a": [True, None]}]
    )


@settings(max_examples=7)
@given(
    rows=st.integers(1, 40),
    more=st.integers(0, 20),
    spread=st.integers(1, 40),
    piece=st.sampled_from([1, 10, 2**22]),
    format=st.sampled_from(["tar", "arrow"]),
)
def test_as_a_search_by_hand(rows: int, more: int, spread: int, piece: int, format: str) -> None:
    everything = "key,url,n,blob:sha256,meta"
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "PIECE_ROWS", piece)
        root = Path(folder, "d")
        ds = make(root, range(rows), spread, lookup=everything, format=format)
        if more:
            before = ds.manifest.lookups
            ds = make(root, range(rows, rows + more), spread, append=True, format=format)
            for old, new in zip(before, ds.manifest.lookups, strict=True):
                assert new.pieces[: len(old.pieces)] == old.pieces, "an append writes no old piece again"
        check(ds, spread)
        kept = ds.select(rows=list(range(0, len(ds), 2)))
        check(kept, spread)
        assert found(kept, "url", ["http://h/0"], scan=True) == by_hand(kept, "url", ["http://h/0"])


def test_of_parts_and_of_versions_that_get_them_later(tmp_path: Path) -> None:
    one, two = make(tmp_path / "a", range(40), 9, lookup="url,key"), make(tmp_path / "b", range(30), 4)
    with pytest.raises(NotFoundError, match="--lookup url"):
        found(two, "url", ["http://h/1"])
    assert found(two, "key", ["a/1"]) == by_hand(two, "key", ["a/1"]), "keys need no look-up"
    label_again(tmp_path / "b", lookup="url", message="url")
    two = shardkit.open(tmp_path / "b")
    assert two.manifest.pages == make(tmp_path / "c", range(30), 4).manifest.pages, "no shard is written"
    merge_datasets({"x": tmp_path / "a", "y": tmp_path / "b"}, tmp_path / "m")
    merged = shardkit.open(tmp_path / "m")
    urls = [f"http://h/{i}" for i in range(10)]
    assert found(merged, "url", urls) == by_hand(merged, "url", urls)
    assert len(one) + len(two) == len(merged)


def test_a_selected_version_keeps_the_look_ups_of_its_parent(tmp_path: Path) -> None:
    ds = make(tmp_path, range(50), 5, lookup="url")
    view = ds.select(where="n < 10")
    repository = Repository.open(tmp_path)
    put_selected(repository, view.version)
    repository.commit({"few": view.manifest.id}, message="few")
    few = shardkit.open(f"{tmp_path}@few")
    assert few.manifest.lookups == ds.manifest.lookups
    assert found(few, "url", ["http://h/3"]) == by_hand(few, "url", ["http://h/3"])


@pytest.mark.parametrize("text", ["nothing", "blob", "url:md5", "key:sha256", "url,,n"])
def test_what_cannot_be_looked_up_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_lookup(text, Schema.parse(SCHEMA))


@pytest.mark.parametrize(
    ("asked", "value"),
    [("blob", "x"), ("blob:sha256", "12"), ("n", "x"), ("n", "1.5"), ("meta", "{"), ("no", "1")],
)
def test_values_that_are_none_are_refused(asked: str, value: str) -> None:
    with pytest.raises(UsageError):
        hash_values(Schema.parse(SCHEMA), asked, [value])


def test_a_damaged_or_hostile_look_up_is_refused(tmp_path: Path) -> None:
    ds = make(tmp_path, range(20), 5, lookup="url")
    piece = ds.manifest.lookups[0].pieces[0]
    path = next(tmp_path.rglob(f"{piece.digest.removeprefix('sha256:')}.lookup"))
    flip(path, -1)
    with pytest.raises(IntegrityError):
        found(ds, "url", ["http://h/1"])
    good = Entries.sort(
        np.array([[2, 1], [1, 5]], np.uint64), np.array([0, 1], np.uint32), np.array([3, 0], np.uint32)
    )
    rows = np.array([4, 1])
    Entries.from_bytes(good.to_bytes("url", 2), "url", rows)
    bad = [
        (good.to_bytes("n", 2), rows),
        (good.to_bytes("url", 3), rows),
        (good.to_bytes("url", 2), np.array([3, 1])),
        (good.to_bytes("url", 1), np.array([4])),
        (Entries(good.high[::-1].copy(), good.low, good.shard, good.row).to_bytes("url", 2), rows),
    ]
    for hostile, of in bad:
        with pytest.raises(FormatError):
            Entries.from_bytes(hostile, "url", of)
