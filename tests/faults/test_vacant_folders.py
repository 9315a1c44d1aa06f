"""Folders that hold somebody's files, or are in a dataset, do not become datasets, copies, caches or runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import UsageError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.stores.local import Kind, check_vacant
from tests.command_line import call, output_of

KINDS: tuple[Kind, ...] = ("dataset", "copy", "cache", "run")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with shardkit.create(tmp_path / "root", {"x": "int64"}) as writer:
        for number in range(10):
            writer.add({"x": number})
    return tmp_path / "root"


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_vacant_folder_is_accepted(tmp_path: Path, root: Path, kind: Kind) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.tex").write_text("…")
    for bad in (tmp_path / "theirs", root / "inside", root / "objects" / "inside"):
        with pytest.raises(UsageError, match="choose an empty folder"):
            check_vacant(bad, kind)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "lost+found").mkdir()
    for good in (tmp_path / "empty", tmp_path / "missing" / "folder"):
        check_vacant(good, kind)


@pytest.mark.parametrize(
    "url", ["s3://u:hunter2@bucket/a", Path("s3://bucket/a"), "file:///tmp/a", "hf://datasets/a/b"]
)
def test_a_url_is_neither_a_cache_nor_a_run(
    root: Path, url: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder called ``s3:`` would be made in the working directory."""
    monkeypatch.chdir(root.parent)
    ds = shardkit.open(str(root))
    plan = ds.plan(global_batch=5)
    for name in ("run", "cache"):
        setting: dict[str, Any] = {name: url}
        with pytest.raises(UsageError, match="is a folder of this machine; give a") as caught:
            next(iter(ds.loader(plan, **setting)))
        assert "hunter2" not in str(caught.value)
    check_vacant("s3://bucket/prefix", "dataset")
    check_vacant("s3://bucket/prefix", "copy")
    assert [one.name for one in root.parent.iterdir()] == ["root"]


@pytest.mark.parametrize("kind", ["cache", "run"])
def test_a_dataset_is_neither_a_cache_nor_a_run(root: Path, kind: Kind) -> None:
    with pytest.raises(UsageError, match="is a dataset"):
        check_vacant(root, kind)
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=2, lanes=2)
    run, cache = (root, None) if kind == "run" else (None, root)
    with pytest.raises(UsageError, match="is a dataset"):
        dataset.loader(plan, tensors=False, run=run, cache=cache)


def test_an_export_is_not_put_into_a_dataset(tmp_path: Path, root: Path) -> None:
    for kind in ("jsonl", "sha256sums"):
        for place in (root / "new", root / "objects" / "new"):
            told = output_of("export", root, "--as", kind, "--out", place, code=2)
            assert f"is inside the dataset {root}" in told
            assert not place.exists()
    assert call("export", root, "--as", "jsonl", "--out", tmp_path / "outside.jsonl")[0] == 0


def test_a_cache_and_a_run_are_not_inside_each_other(tmp_path: Path, root: Path) -> None:
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=2, lanes=2)
    run, cache = tmp_path / "run", tmp_path / "cache"
    with dataset.loader(plan, tensors=False, run=run) as loader:
        next(iter(loader))
    BlockCache(cache, limit=64 << 20).close()
    with pytest.raises(UsageError, match=f"is inside the run {run} and cannot be a cache"):
        dataset.loader(plan, tensors=False, cache=run / "cache")
    with pytest.raises(UsageError, match=f"is inside the cache {cache} and cannot be a run"):
        dataset.loader(plan, tensors=False, run=cache / "runs" / "a")
    assert not (run / "cache").exists()
    assert not (cache / "runs").exists()


def test_a_run_is_not_its_own_cache(tmp_path: Path, root: Path) -> None:
    dataset = shardkit.open(root)
    plan = dataset.plan(global_batch=2, lanes=2)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with pytest.raises(UsageError, match="run= and cache= are both"):
        dataset.loader(plan, tensors=False, run=tmp_path / "run", cache=tmp_path / "link")


def test_commands_refuse_somebody_elses_folder(tmp_path: Path, root: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("…")
    source = tmp_path / "source.jsonl"
    source.write_text('{"x": 1}\n')
    for words in (["build", source, theirs], ["place", root, "--location", f"m={theirs}", "--copies", 2]):
        told = output_of(*words, code=2)
        assert "thesis.tex" in told
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("place", ["objects", "tmp/copy", "..", ".", "other/inside"])
def test_a_location_is_neither_inside_nor_above_another(tmp_path: Path, root: Path, place: str) -> None:
    other = tmp_path / "other"
    code, told = call("place", root, "--location", f"other={other}", "--copies", 2)
    assert code == 0, told
    url = root / place if place != "other/inside" else other / "inside"
    (tmp_path / "link").symlink_to(url)
    for spelling in (url, f"file://{url}", tmp_path / "link"):
        code, told = call("place", root, "--location", f"m={spelling},domain=m", "--copies", 3)
        assert code in (1, 2), told
        assert "fail together" in told or "named twice" in told
