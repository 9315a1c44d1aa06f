"""create(): what is added is what is read, named by the samples and settings alone; errors name sample and field."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
import shardkit_tools
from shardkit.dataset.version_plan import VersionSettings
from shardkit.errors import ConfigurationError, NotFoundError, SampleError, UsageError
from shardkit.repository.repository import Repository

SCHEMA = {"image": "bytes", "label": "int64", "text": "str", "vector": "float32[3]", "tokens": "int32[*]"}


def sample(i: int) -> dict[str, Any]:
    return {
        "image": b"\x89" * (i % 90 + 1),
        "label": i % 5,
        "text": f"größe {i}",
        "vector": np.full(3, i, np.float32),
        "tokens": list(range(i % 7)),
    }


def write(root: Path, order: Any = range(120), **settings: Any) -> shardkit.Writer:
    with shardkit.create(
        root, SCHEMA, stratify="label", shard_size="128KiB", block_size="8KiB", **settings
    ) as writer:
        for i in order:
            writer.add(sample(i), key=f"photo/{i}")
    return writer


def samples_of(ds: shardkit.Dataset) -> Iterator[tuple[str, dict[str, Any]]]:
    for number in range(len(ds)):
        yield ds.key(number), ds[number]


def test_the_id_depends_on_samples_and_settings_only(tmp_path: Path) -> None:
    one = write(tmp_path / "a").manifest.id
    assert write(tmp_path / "b", order=reversed(range(120))).manifest.id == one
    assert write(tmp_path / "c", ref="other", message="why", scratch=tmp_path).manifest.id == one
    others: tuple[dict[str, Any], ...] = (
        {"seed": 1},
        {"shuffle": False},
        {"format": "arrow"},
        {"format": "arrow", "compression": "zstd"},
    )
    for n, settings in enumerate(others):
        assert write(tmp_path / str(n), **settings).manifest.id != one
    assert write(tmp_path / "d", order=range(119)).manifest.id != one


def test_threads_add_in_any_order(tmp_path: Path) -> None:
    expected = write(tmp_path / "a").manifest.id
    with shardkit.create(
        tmp_path / "b", SCHEMA, stratify="label", shard_size="128KiB", block_size="8KiB"
    ) as writer:

        def add(part: int) -> None:
            for i in range(part, 120, 4):
                writer.add(sample(i), key=f"photo/{i}")

        threads = [threading.Thread(target=add, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert writer.manifest.id == expected


def test_keys_are_generated_from_the_order_of_adding(tmp_path: Path) -> None:
    with shardkit.create(tmp_path, {"n": "int64"}, format="arrow") as writer:
        for i in range(30):
            writer.add({"n": i})
    ds = shardkit.open(tmp_path)
    assert {key: s["n"] for key, s in samples_of(ds)} == {f"{i:010d}": i for i in range(30)}


def test_an_exception_publishes_nothing(tmp_path: Path) -> None:
    writer = shardkit.create(tmp_path, SCHEMA)

    def stopped_midway() -> None:
        with writer:
            writer.add(sample(1))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped_midway()
    assert Repository.open(tmp_path).head().n == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "shardkit.json"]
    with pytest.raises(NotFoundError):
        shardkit.open(tmp_path)
    with pytest.raises(UsageError, match="not committed"):
        _ = writer.manifest
    with pytest.raises(UsageError, match="closed"):
        writer.add(sample(2))


def test_closing_twice_commits_once(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.close()
    assert len(Repository.open(tmp_path).log()) == 1


@pytest.mark.parametrize("keys", [["a", "b", "a"], ["a", None, "0000000001"], ["x" * 200, "b", "x" * 200]])
def test_a_key_given_twice_is_named(tmp_path: Path, keys: list[str | None]) -> None:
    writer = shardkit.create(tmp_path, {"n": "int64"})
    for n, key in enumerate(keys):
        writer.add({"n": n}, key=key, source=("list.txt", n))
    twice = (keys[2] or "")[:40]
    with pytest.raises(SampleError, match=f"{twice}.*list.txt row 2.*list.txt row"):
        writer.close()
    assert Repository.open(tmp_path).head().n == 0


def test_keys_that_differ_stay_different(tmp_path: Path) -> None:
    keys = ["a/b", "a_b", "a b", "ä", "ö", "a" * 81, "a" * 82, "0", "00"]
    with shardkit.create(tmp_path, {"n": "int64"}) as writer:
        for n, key in enumerate(keys):
            writer.add({"n": n}, key=key)
    assert {key: s["n"] for key, s in samples_of(shardkit.open(tmp_path))} == dict(
        zip(keys, range(9), strict=True)
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"label": 2**63}, r"photo/7.*label"),
        ({"label": "seven"}, r"photo/7.*label"),
        ({"vector": [1.0, 2.0]}, r"photo/7.*vector"),
        ({"text": b"bytes"}, r"photo/7.*text"),
        ({"extra": 1}, r"photo/7.*extra"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    writer = shardkit.create(tmp_path, SCHEMA)
    with pytest.raises(SampleError, match=match):
        writer.add({**sample(7), **change}, key="photo/7")
    writer.add(sample(7), key="photo/7")  # a refused sample leaves no trace
    writer.close()
    assert writer.manifest.rows == 1


def test_a_missing_field_and_a_wrong_key_are_named(tmp_path: Path) -> None:
    writer = shardkit.create(tmp_path, SCHEMA)
    with pytest.raises(SampleError, match=r"sample 0.*image"):
        writer.add({key: value for key, value in sample(0).items() if key != "image"})
    with pytest.raises(SampleError, match="17"):
        writer.add(sample(0), key=17)  # type: ignore[arg-type]
    with pytest.raises(SampleError, match="source"):
        writer.add(sample(0), source=("list.txt", -1))
    with pytest.raises(SampleError, match="''"):
        writer.add(sample(0), key="")
    with pytest.raises(UsageError, match="no sample"):
        writer.close()


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"stratify": "nothing"}, ConfigurationError, "nothing.*image"),
        ({"stratify": "vector"}, ConfigurationError, r"vector.*float32\[3\]"),
        ({"stratify": ["label", "label"]}, ConfigurationError, "label"),
        ({"stratify": "__class__"}, ConfigurationError, "class names"),
        ({"format": "zip"}, ConfigurationError, "zip"),
        ({"format": "tar", "compression": "zstd"}, ConfigurationError, "tar shards are not compressed"),
        ({"shard_size": "a lot"}, ConfigurationError, "a lot"),
        ({"shard_size": "6GiB"}, ConfigurationError, "shard_size"),
        ({"split": {"train": 0.9, "val": 0.2}}, ConfigurationError, "1.1"),
        ({"split": {"main": 0.9}}, ConfigurationError, "main"),
        ({"split_by": "label"}, UsageError, "split_by"),
        ({"scratch": "/nowhere/at/all"}, UsageError, "/nowhere/at/all"),
    ],
)
def test_settings_that_cannot_be_carried_out(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        shardkit.create(tmp_path, SCHEMA, **settings)


def test_strata_by_several_fields_and_by_class_names(tmp_path: Path) -> None:
    schema = {"lang": "str", "clean": "bool", "label": "int64"}
    rows = [{"lang": lang, "clean": clean, "label": 1} for lang in ("en/gb", "de") for clean in (True, False)]
    with shardkit.create(tmp_path / "a", schema, stratify=["lang", "clean"], format="arrow") as writer:
        for _ in range(3):
            for row in rows:
                writer.add(row)
    assert shardkit.open(tmp_path / "a").strata == {
        "de/false": 3, "de/true": 3, "en%2Fgb/false": 3, "en%2Fgb/true": 3,
    }  # fmt: skip
    with shardkit.create(tmp_path / "b", schema, stratify="__class__", classes=["cat", "dog"]) as writer:
        writer.add(rows[0])
        with pytest.raises(SampleError, match="label 2"):
            writer.add({**rows[0], "label": 2})
    ds = shardkit.open(tmp_path / "b")
    assert ds.strata == {"dog": 1}
    assert ds.classes == ("cat", "dog")


def test_rare_strata_are_pooled_and_the_manifest_says_so(tmp_path: Path) -> None:
    with shardkit.create(
        tmp_path,
        {"n": "int64", "kind": "str"},
        stratify="kind",
        shard_size=2048,
        block_size=512,
        format="arrow",
    ) as writer:
        for n in range(400):
            writer.add({"n": n, "kind": f"rare{n}" if n % 40 == 0 else "common"}, key=f"k{n}")
    manifest = writer.manifest
    assert manifest.shards > 1
    (pool,) = [stratum for stratum in manifest.strata if stratum.pooled]
    inside = [stratum for stratum in manifest.strata if stratum.in_pool]
    assert pool.rows == 10
    assert sorted(stratum.name for stratum in inside) == sorted(f"rare{n}" for n in range(0, 400, 40))
    ds = shardkit.open(tmp_path)
    assert ds.strata == {"common": 390, **{f"rare{n}": 1 for n in range(0, 400, 40)}}
    names = [stratum.name for stratum in manifest.strata]
    rare = 0
    for number in range(len(ds)):
        shard, _, _, row = ds._locate_one(number)
        own = ds.reader.index(shard).stratum(row)
        if own is not None:
            assert names[own] == ds[number]["kind"]
            rare += ds[number]["kind"] != "common"
    assert rare == 10


def test_a_row_larger_than_a_shard_has_a_shard_of_its_own(tmp_path: Path) -> None:
    with shardkit.create(tmp_path, {"blob": "bytes"}, shard_size="8KiB", format="arrow") as writer:
        for n in range(60):
            writer.add({"blob": bytes([n]) * (20_000 if n == 5 else 1000)}, key=f"k{n}")
    ds = shardkit.open(tmp_path)
    rows = ds.table.rows.tolist()
    assert rows[-1] == 1
    assert min(rows[:-1]) >= 1
    assert ds.key(59) == "k5"
    assert ds[59]["blob"] == bytes([5]) * 20_000


def test_a_second_version_moves_the_ref_and_keeps_the_first(tmp_path: Path) -> None:
    first = write(tmp_path).manifest.id
    second = write(tmp_path, order=range(60)).manifest.id
    assert len(shardkit.open(tmp_path)) == 60
    assert len(shardkit.open(f"{tmp_path}@{first}")) == 120
    assert [entry.refs["main"] for entry in Repository.open(tmp_path).log()] == [second, first]


@pytest.mark.parametrize("make", [shardkit.create, shardkit_tools.build])
def test_settings_of_a_version_have_one_home(make: Any) -> None:
    """What the ways to make one spell out is what `VersionSettings` has, with the same defaults."""
    spelled = inspect.signature(make).parameters
    for one in dataclasses.fields(VersionSettings):
        assert spelled[one.name].default == one.default, one.name
