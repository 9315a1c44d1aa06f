"""Merged datasets: the samples of the parts in order, not a byte copied, found again where they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.dataset.committing import NOT_MOVED
from shardkit.dataset.merging import merge_datasets
from shardkit.errors import NotFoundError, SchemaError, UsageError
from shardkit.repository.repository import Repository


def make(root: Path, count: int, *, kind: str = "tar", axis: str | None = "lang") -> shardkit.Dataset:
    with shardkit.create(
        root, {"n": "int64", "lang": "str"}, stratify=axis, format=kind, shard_size="8KiB", block_size="1KiB"
    ) as writer:
        for n in range(count):
            writer.add({"n": n, "lang": "de" if n % 3 else "fr"}, key=f"{root.name}-{n}")
    return shardkit.open(root)


def contents(ds: shardkit.Dataset) -> list[tuple[str, dict[str, object]]]:
    return [(ds.key(sample), ds[sample]) for sample in range(len(ds))]


def test_samples_of_the_parts_in_order_and_nothing_copied(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one", 40), make(tmp_path / "two", 25, kind="arrow", axis=None)
    manifest, moved = merge_datasets({"b": tmp_path / "one", "a": tmp_path / "two"}, tmp_path / "m")
    assert moved.entry is not None
    assert moved.refs == {"main": (None, manifest.id)}
    merged = shardkit.open(tmp_path / "m")
    assert contents(merged) == contents(one) + contents(two)
    assert merged.manifest == manifest
    assert merged.strata == {"b/de": 26, "b/fr": 14, "a": 25}
    assert sorted(path.suffix for path in (tmp_path / "m/objects").rglob("*.*")) == [".manifest"]
    assert merged.manifest.id == shardkit.open({"b": tmp_path / "one", "a": tmp_path / "two"}).manifest.id
    assert merge_datasets({"b": tmp_path / "one", "a": tmp_path / "two"}, tmp_path / "m") == (
        manifest,
        NOT_MOVED,
    )
    plan = merged.plan(global_batch=8, weights={"a": 1, "b/*": 1})
    assert plan.population.identity == manifest.id
    assert verify(tmp_path / "m").exit_code == 0


@pytest.mark.parametrize("axis", ["lang", None])
def test_a_view_of_merged_versions_keeps_their_strata(axis: str | None, tmp_path: Path) -> None:
    make(tmp_path / "one", 40)
    make(tmp_path / "two", 25, axis=axis)
    merge_datasets({"one": tmp_path / "one", "two": tmp_path / "two"}, tmp_path / "m")
    view = shardkit.open(tmp_path / "m").select(where="n < 9")
    others = {"two": 9} if axis is None else {"two/de": 6, "two/fr": 3}
    assert view.strata == {"one/de": 6, "one/fr": 3, **others}
    few = view.select(where="n < 3")
    assert sorted(int(sample["n"]) for sample in few) == [0, 0, 1, 1, 2, 2]
    plan = few.plan(global_batch=2, weights={"one/*": 1, "two*": 1}, epoch_steps=20)
    with few.loader(plan, rank=0, world=1, tensors=False) as loader:
        assert {int(n) for batch in loader for n in batch["n"]} == {0, 1, 2}


def test_versions_of_one_root_merge_in_it(tmp_path: Path) -> None:
    make(tmp_path, 20)
    repository = Repository.open(tmp_path)
    repository.commit({"old": repository.refs["main"]}, message="old")
    with shardkit.create(tmp_path, {"n": "int64", "lang": "str"}, ref="new") as writer:
        writer.add({"n": 99, "lang": "it"})
    merge_datasets({"old": f"{tmp_path}@old", "new": f"{tmp_path}@new"}, tmp_path, ref="both")
    assert len(shardkit.open(f"{tmp_path}@both")) == 21
    assert not (tmp_path / "locations").exists()
    assert verify(tmp_path).exit_code == 0


def test_both_may_move_together_and_one_may_be_told_anew(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    expected = contents(make(here / "part", 10))
    merge_datasets({"part": here / "part"}, here / "merged/m")
    shutil.move(here, there)
    assert contents(shardkit.open(there / "merged/m")) == expected
    shutil.move(there / "part", tmp_path / "elsewhere")
    with pytest.raises(NotFoundError) as caught:
        shardkit.open(there / "merged/m")
    assert str(there / "part") in str(caught.value)
    assert "merge" in str(caught.value)
    assert verify(there / "merged/m").exit_code == 3, "nothing is known to be damaged"
    merge_datasets({"part": tmp_path / "elsewhere"}, there / "merged/m")
    assert contents(shardkit.open(there / "merged/m")) == expected


def test_a_part_that_was_replaced_by_another_is_not_taken_for_it(tmp_path: Path) -> None:
    make(tmp_path / "part", 10)
    merge_datasets({"part": tmp_path / "part"}, tmp_path / "m")
    shutil.rmtree(tmp_path / "part")
    make(tmp_path / "part", 11)
    with pytest.raises(NotFoundError, match="gone"):
        shardkit.open(tmp_path / "m")


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "one", 5)
    with shardkit.create(tmp_path / "two", {"n": "int32"}) as writer:
        writer.add({"n": 1})
    with pytest.raises(SchemaError, match="two"):
        merge_datasets({"one": tmp_path / "one", "two": tmp_path / "two"}, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    merge_datasets({"one": tmp_path / "one"}, tmp_path / "m")
    with pytest.raises(UsageError, match="merged itself"):
        merge_datasets({"again": tmp_path / "m"}, tmp_path / "n")
    with pytest.raises(UsageError):
        merge_datasets({}, tmp_path / "n")
    with pytest.raises(NotFoundError):
        merge_datasets({"none": tmp_path / "none"}, tmp_path / "n")
