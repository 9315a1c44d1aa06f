"""Splits: fair, stable, and never through the middle of a group (dataset/SPEC.md §4)."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.dataset.encoding import key_identity
from shardkit.dataset.layout import parse_split, split_of, split_value
from shardkit.errors import ConfigurationError


def identities(keys: list[str]) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    return np.array([key_identity(key) for key in keys], dtype=np.uint64).reshape(-1, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.booleans())
def test_shares_are_met(parts: list[int], whole: bool) -> None:
    total = sum(parts) if whole else sum(parts) + 10
    split = parse_split({f"s{n}": Fraction(part, total) for n, part in enumerate(parts)})
    n = 20_000
    index = split_of(split, identities([f"k{i}" for i in range(n)]), None)
    for number, part in enumerate(parts):
        share = part / total
        # six standard deviations of a binomial count
        assert abs((index == number).sum() - n * share) <= 6 * (n * share * (1 - share)) ** 0.5 + 1
    assert ((index == -1).sum() == 0) == whole or not whole


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_more_rows_move_none(n: int, more: int) -> None:
    split = parse_split({"train": 0.8, "val": 0.1, "test": 0.1})
    keys = [f"row/{i}" for i in range(n + more)]
    before = split_of(split, identities(keys[:n]), None)
    after = split_of(split, identities(keys), None)
    assert before.tolist() == after[:n].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 99))
def test_growing_the_first_share_takes_rows_from_the_others_only(percent: int) -> None:
    ids = identities([f"k{i}" for i in range(2_000)])
    small = split_of(parse_split({"a": Fraction(percent, 101), "b": Fraction(1, 101)}), ids, None)
    large = split_of(parse_split({"a": Fraction(percent + 1, 101)}), ids, None)
    assert set(np.flatnonzero(small == 0)) <= set(np.flatnonzero(large == 0))


def test_golden_split() -> None:
    """These rows stay where they are for ever: a release that moved them would leak val into train."""
    split = parse_split({"train": 0.5, "val": 0.5})
    index = split_of(split, identities(["a", "b", "c", "d", "e", "f", "g", "h"]), None)
    assert "".join("tv"[i] for i in index) == "tttvtvvv"
    groups = np.array([split_value(text) for text in ("x", "y", "z", "käse", "7", "true")], dtype=np.uint64)
    assert "".join("tv"[i] for i in split_of(split, np.zeros((6, 2), np.uint64), groups)) == "tvttvv"


@pytest.mark.parametrize(
    ("shares", "match"),
    [({}, "empty"), ({"a/b": 0.5}, "a/b"), ({"a": "much"}, "much"),
     ({"a": 0}, "a"), ({"a": -1}, "-1"),
     ({"a": 1.5}, "1.5"),
     ({"a": 0.7, "b": 0.4}, "1.1"), ({"main": 1}, "main")],
)  # fmt: skip
def test_shares_that_make_no_sense(shares: dict[str, float | str], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        parse_split(shares)


def test_decimal_shares_are_exact() -> None:
    split = parse_split({"a": 0.1, "b": 0.2, "c": "0.7"})
    assert sum(split.shares) == 1


def test_splits_are_versions_over_the_same_shards(tmp_path: Path) -> None:
    schema = {"n": "int64", "patient": "str", "kind": "str"}
    with shardkit.create(
        tmp_path, schema, stratify="kind", format="arrow", shard_size="8KiB", block_size="1KiB",
        split={"train": 0.8, "val": 0.2}, split_by="patient",
    ) as writer:  # fmt: skip
        for n in range(900):
            kind = "rare" if n in (17, 500, 501) else f"k{n % 3}"
            writer.add({"n": n, "patient": f"p{n % 60}", "kind": kind}, key=f"k{n}")
    everything, train, val = (shardkit.open(f"{tmp_path}@{ref}") for ref in ("main", "train", "val"))
    assert everything.manifest.shards > 2
    assert train.table.digest.tolist() == everything.table.digest.tolist()
    assert train.manifest.parent == val.manifest.parent == everything.manifest.id
    where: dict[str, set[str]] = defaultdict(set)
    numbers: list[int] = []
    for name, ds in (("train", train), ("val", val)):
        counts: dict[str, int] = defaultdict(int)
        for i in range(len(ds)):
            row = ds[i]
            where[row["patient"]].add(name)
            counts[row["kind"]] += 1
            numbers.append(row["n"])
        assert {k: v for k, v in ds.strata.items() if v} == dict(counts)
    assert sorted(numbers) == list(range(900))
    assert all(len(names) == 1 for names in where.values()), "a patient is in one split only"
    assert {name for names in where.values() for name in names} == {"train", "val"}


def test_the_whole_does_not_depend_on_the_split_nor_the_split_on_the_seed(tmp_path: Path) -> None:
    def made(root: str, **settings: object) -> shardkit.Writer:
        with shardkit.create(tmp_path / root, {"n": "int64"}, format="arrow", **settings) as writer:  # type: ignore[arg-type]
            for n in range(200):
                writer.add({"n": n}, key=f"k{n}")
        return writer

    assert made("a", split={"train": 0.5}).manifest.id == made("b").manifest.id
    made("c", split={"train": 0.5}, seed=9)
    one, two = (shardkit.open(f"{tmp_path / root}@train") for root in ("a", "c"))
    assert {one.key(i) for i in range(len(one))} == {two.key(i) for i in range(len(two))}
    assert [one.key(i) for i in range(len(one))] != [two.key(i) for i in range(len(two))]


def test_a_split_without_rows_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    writer = shardkit.create(tmp_path, {"n": "int64"}, split={"train": 0.999, "val": 0.001})
    writer.add({"n": 1}, key="only")
    with pytest.raises(ConfigurationError, match=r"'val'.*1 rows"):
        writer.close()
    assert not (tmp_path / "objects").exists()
