"""An append holds what one build of both would hold, row for row; the old samples stay where they were."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit

SCHEMA = {"n": "int64", "kind": "str"}


def write(root: Path, numbers: list[int], kinds: list[str], *, append: bool = False) -> shardkit.Dataset:
    how: dict[str, Any] = {"stratify": "kind", "format": "arrow", "shard_size": "1KiB", "block_size": "256"}
    with shardkit.create(root, SCHEMA, append=append, **how) as writer:
        for number in numbers:
            writer.add({"n": number, "kind": kinds[number % len(kinds)]}, key=f"k{number}")
    return shardkit.open(root)


def rows(ds: shardkit.Dataset) -> list[tuple[str, dict[str, Any]]]:
    return [(ds.key(sample), ds[sample]) for sample in range(len(ds))]


@settings(max_examples=6)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=3),
    kinds=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9),
)
def test_as_one_build_of_both(sizes: list[int], kinds: list[str]) -> None:
    with TemporaryDirectory() as folder:
        grown, whole = Path(folder, "grown"), Path(folder, "whole")
        start = 0
        before: list[tuple[str, dict[str, Any]]] = []
        for turn, size in enumerate(sizes):
            ds = write(grown, list(range(start, start + size)), kinds, append=turn > 0)
            now = rows(ds)
            assert now[: len(before)] == before
            before, start = now, start + size
        once = write(whole, list(range(start)), kinds)
        assert sorted(rows(once), key=str) == sorted(before, key=str)
        assert once.strata == ds.strata
