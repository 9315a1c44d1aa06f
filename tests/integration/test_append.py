"""Appending: new pages behind the old ones, nothing old written again, splits that go on as they began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.dataset.about import unpack_sources
from shardkit.errors import CommitConflict, NotFoundError, SampleError, ShardkitError, UsageError
from shardkit.repository.repository import Repository
from shardkit_tools.building import build_run, engines

SETTINGS: dict[str, Any] = {
    "stratify": "kind", "format": "arrow", "shard_size": "4KiB", "block_size": "1KiB",
    "split": {"train": 0.75, "val": 0.25}, "split_by": "user",
}  # fmt: skip
SCHEMA = {"n": "int64", "kind": "str", "user": "str"}


def row(n: int) -> dict[str, Any]:
    """Common strata a and b; rare ones at multiples of 97; c from 600 on."""
    kind = f"rare{n % 5}" if n % 97 == 0 else "c" if n >= 600 and n % 3 == 0 else "ab"[n % 2]
    return {"n": n, "kind": kind, "user": f"u{n % 50}"}


def add(root: Path, numbers: range, *, keys: bool = True, **settings: Any) -> shardkit.Writer:
    with shardkit.create(root, SCHEMA, **{**SETTINGS, **settings}) as writer:
        for n in numbers:
            writer.add(row(n), key=f"k{n}" if keys else None)
    return writer


def numbers_of(root: object) -> list[int]:
    ds = shardkit.open(str(root))
    return [int(sample["n"]) for sample in ds[:]]


@pytest.mark.parametrize("keys", [True, False])
def test_appended_rows_follow_and_old_pages_and_shards_stay(tmp_path: Path, keys: bool) -> None:
    first = add(tmp_path, range(600), keys=keys).manifest
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "objects").rglob("*.*")}
    shards = [path for path in before if path.suffix == ".arrow"]
    old = numbers_of(tmp_path)
    second = add(tmp_path, range(600, 800), keys=keys, append=True).manifest
    assert second.parent == first.id
    assert second.pages[: len(first.pages)] == first.pages
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in before.items()), "nothing is written again"
    assert len(list((tmp_path / "objects").rglob("*.arrow"))) > len(shards)
    now = numbers_of(tmp_path)
    assert now[:600] == old, "old samples keep their numbers"
    assert sorted(now) == list(range(800))
    ds = shardkit.open(tmp_path)
    names = {ds.key(i) for i in range(800)}
    assert names == ({f"k{n}" for n in range(800)} if keys else {f"{n:010d}" for n in range(800)})


def test_strata_keep_their_numbers_and_are_counted(tmp_path: Path) -> None:
    first = add(tmp_path, range(600)).manifest
    second = add(tmp_path, range(600, 800), append=True).manifest
    for old, new in zip(first.strata, second.strata, strict=False):
        assert (old.values, old.pooled, old.in_pool) == (new.values, new.pooled, new.in_pool)
    assert {s.name for s in second.strata} - {s.name for s in first.strata} == {"c"}
    assert sum(stratum.pooled for stratum in second.strata) == 1
    expected: dict[str, int] = {}
    for n in range(800):
        expected[row(n)["kind"]] = expected.get(row(n)["kind"], 0) + 1
    ds = shardkit.open(tmp_path)
    assert ds.strata == expected
    listed = [stratum.name for stratum in second.strata]
    for i in range(len(ds)):
        shard, _, _, inside = ds._locate_one(i)
        own = ds.reader.index(shard).stratum(inside)
        assert own is None or listed[own] == ds[i]["kind"]


def test_splits_go_on(tmp_path: Path) -> None:
    add(tmp_path, range(600))
    before = {name: numbers_of(f"{tmp_path}@{name}") for name in ("train", "val")}
    add(tmp_path, range(600, 800), append=True)
    users = {}
    for name, old in before.items():
        now = numbers_of(f"{tmp_path}@{name}")
        assert now[: len(old)] == old
        users[name] = {n % 50 for n in now}
        ds = shardkit.open(f"{tmp_path}@{name}")
        assert sum(ds.strata.values()) == len(now)
    assert not users["train"] & users["val"]
    everything = numbers_of(f"{tmp_path}@train") + numbers_of(f"{tmp_path}@val")
    assert sorted(everything) == list(range(800))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"format": "tar"}, "format"),
        ({"compression": "zstd"}, "compression"),
        ({"stratify": None}, "stratify"),
        ({"classes": ["x"]}, "classes"),
        ({"split": {"train": 0.5, "val": 0.5}}, "train"),
        ({"split_by": None}, "train"),
        ({"ref": "other"}, "other"),
        ({"ref": "val"}, "val"),
    ],
)
def test_what_is_of_another_kind_is_refused(tmp_path: Path, settings: dict[str, Any], match: str) -> None:
    add(tmp_path, range(200))
    with pytest.raises((UsageError, NotFoundError), match=match):
        add(tmp_path, range(200, 300), append=True, **settings)
    assert len(Repository.open(tmp_path).log()) == 1


def test_another_schema_is_refused_and_an_absent_dataset_too(tmp_path: Path) -> None:
    add(tmp_path / "a", range(20))
    with pytest.raises(UsageError, match="schema"):
        shardkit.create(tmp_path / "a", {"n": "int32"}, append=True)
    with pytest.raises(NotFoundError):
        shardkit.create(tmp_path / "b", {"n": "int32"}, append=True)
    assert not (tmp_path / "b").exists()


def test_a_key_that_is_there_already_is_named(tmp_path: Path) -> None:
    add(tmp_path, range(300))
    with pytest.raises(SampleError, match=r"'k299'.*there already"):
        add(tmp_path, range(299, 310), append=True)
    with pytest.raises(SampleError, match="0000000300"):  # what a row without a key would be called
        with_clash(tmp_path)
    assert len(Repository.open(tmp_path).log()) == 1


def with_clash(root: Path) -> None:
    with shardkit.create(root, SCHEMA, **SETTINGS, append=True) as writer:
        writer.add(row(1))
        writer.add(row(2), key="0000000300")


def test_a_commit_in_between_is_a_conflict(tmp_path: Path) -> None:
    add(tmp_path, range(100))
    late = shardkit.create(tmp_path, SCHEMA, **SETTINGS, append=True)
    late.add(row(500), key="k500")
    add(tmp_path, range(100, 120), append=True)
    with pytest.raises(CommitConflict):
        late.close()
    assert sorted(numbers_of(tmp_path)) == list(range(120))


def lines(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in numbers))
    return str(path)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_build_appends_and_appending_the_same_again_changes_nothing(
    tmp_path: Path, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)
    one, two = lines(tmp_path / "one.jsonl", range(600)), lines(tmp_path / "two.jsonl", range(600, 800))
    root = tmp_path / "root"
    shardkit_tools.build(one, root, **SETTINGS)
    dry = shardkit_tools.build(two, root, **SETTINGS, append=True, dry_run=True)
    wet = shardkit_tools.build(two, root, **SETTINGS, append=True, jobs=jobs)
    assert (dry.rows, dry.shards) == (wet.rows, wet.shards)
    assert wet.manifest is not None
    assert wet.manifest.rows == 800
    assert sorted(numbers_of(root)) == list(range(800))
    assert wet.manifest.sources is not None
    listed = unpack_sources(Repository.open(root).get_object(wet.manifest.sources, "sources"))
    assert [file.name for file in listed.files] == ["one.jsonl", "two.jsonl"]
    again = shardkit_tools.build(two, root, **SETTINGS, append=True, jobs=jobs)
    assert again.commit is None
    assert again.manifest == wet.manifest
    assert len(Repository.open(root).log()) == 2


def test_a_build_that_fails_to_commit_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = lines(tmp_path / "one.jsonl", range(300)), lines(tmp_path / "two.jsonl", range(300, 400))
    for root in ("a", "b"):
        shardkit_tools.build(one, tmp_path / root, **SETTINGS)

    def refused(*_: object, **__: object) -> None:
        raise CommitConflict("another commit came first")

    with monkeypatch.context() as patch:
        patch.setattr(build_run, "commit_version", refused)
        with pytest.raises(ShardkitError):
            shardkit_tools.build(two, tmp_path / "a", **SETTINGS, append=True)
    resumed = shardkit_tools.build(two, tmp_path / "a", **SETTINGS, append=True)
    assert resumed.reused_shards == resumed.shards
    assert resumed.manifest == shardkit_tools.build(two, tmp_path / "b", **SETTINGS, append=True).manifest


APPENDED = [
    ("jsonl", ['{"id": "a", "x": 1}', '{"id": "b"}'], ['{"x": 2, "id": "c"}'], [1, None, 2]),
    ("jsonl", ['{"id": "a", "x": 1}', '{"id": "b"}'], ['{"id": "c", "x": null}'], [1, None, None]),
    ("jsonl", ['{"id": "a", "x": 1}', '{"id": "b"}'], ['{"id": "c"}'], [1, None, None]),
    ("jsonl", ['{"id": "a", "x": 0.5}'], ['{"id": "c", "x": 2}'], [0.5, 2.0]),
    ("csv", ["id,x", "a,01234", "b,"], ["x,id", "10115,c"], ["01234", "", "10115"]),
    ("csv", ["id,x", "a,1.5", "b,"], ["id,x", "c,2"], [1.5, None, 2.0]),
]


@pytest.mark.parametrize(("suffix", "first", "second", "values"), APPENDED)
def test_appended_files_take_the_types_and_the_order_of_the_version(
    tmp_path: Path, suffix: str, first: list[str], second: list[str], values: list[object]
) -> None:
    for number, lines in enumerate((first, second)):
        (tmp_path / f"{number}.{suffix}").write_text("\n".join(lines) + "\n")
        shardkit_tools.build(
            tmp_path / f"{number}.{suffix}", tmp_path / "root", append=number > 0, shuffle=False
        )
    ds = shardkit.open(tmp_path / "root")
    assert (list(ds.schema), [sample["x"] for sample in ds]) == (["id", "x"], values)


def test_appended_values_that_do_not_fit_the_version_are_named(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "1.jsonl").write_text('{"x": 2}\n{"x": 0.5}\n')
    shardkit_tools.build(tmp_path / "0.jsonl", tmp_path / "root")
    with pytest.raises(ShardkitError, match=r"1\.jsonl line 2: field 'x' \(int64\) cannot take float 0\.5"):
        shardkit_tools.build(tmp_path / "1.jsonl", tmp_path / "root", append=True)
