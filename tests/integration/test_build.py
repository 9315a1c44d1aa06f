"""The build engine: one manifest id for one source and settings, however it is built; errors that name the place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkit
import shardkit_tools
from shardkit.dataset.about import unpack_sources
from shardkit.errors import (
    ConfigurationError,
    NotFoundError,
    RunError,
    SampleError,
    SourceError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.repository.repository import Repository
from shardkit_tools.building import build_run, engines
from shardkit_tools.building.outcome import Progress
from shardkit_tools.importers import ImportOptions, source_files
from shardkit_tools.main import make_app
from tests.command_line import output_of

# ---- The build engine: one manifest id for one source and settings, however it is built; errors name their rows


SETTINGS: dict[str, Any] = {"stratify": "label", "shard_size": "64KiB", "block_size": "8KiB"}


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sources are cut into many tasks, and worth many processes."""
    monkeypatch.setattr(source_files, "_TASK_BYTES", 15_000)
    monkeypatch.setattr(engines, "SMALL_BYTES", 0)


def folder(root: Path, files: int = 90) -> str:
    """A folder of blobs in three classes of unequal size."""
    for n in range(files):
        kind = "abc"[0 if n % 7 else 1 + n % 2]
        path = root / kind / f"{n:03d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(hashlib.sha256(str(n).encode()).digest() * (10 + n % 50))
    return str(root)


def lines(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def all_samples(root: object) -> Iterator[tuple[str, tuple[str, int] | None, dict[str, Any]]]:
    ds = shardkit.open(str(root))
    for number in range(len(ds)):
        yield ds.key(number), ds.source(number), ds[number]


@pytest.mark.usefixtures("many_tasks")
def test_jobs_and_scratch_do_not_change_the_id(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    (tmp_path / "scratch").mkdir()
    one = shardkit_tools.build(source, tmp_path / "one", **SETTINGS)
    two = shardkit_tools.build(
        source, tmp_path / "two", **SETTINGS, jobs=2, scratch=tmp_path / "scratch", ref="x", message="m"
    )
    assert one.manifest is not None
    assert two.manifest is not None
    assert one.manifest.id == two.manifest.id
    assert one.shards > 3
    assert one.strata == {"0": 77, "1": 7, "2": 6}
    for root in ("one", "two"):
        assert list((tmp_path / root / "tmp").iterdir()) == [], "scratch is gone after the commit"
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.usefixtures("many_tasks")
def test_where_the_source_lies_does_not_change_the_id(tmp_path: Path) -> None:
    ids = set()
    for place in ("here", "there/and/back"):
        result = shardkit_tools.build(folder(tmp_path / place), tmp_path / "root" / place, **SETTINGS)
        assert result.manifest is not None
        ids.add(result.manifest.id)
        stored = b"".join(p.read_bytes() for p in (tmp_path / "root" / place).rglob("*.manifest"))
        assert str(tmp_path).encode() not in stored
    assert len(ids) == 1


def test_the_sources_object_lists_every_file_as_sha256sum_does(tmp_path: Path) -> None:
    source = folder(tmp_path / "source", 12)
    result = shardkit_tools.build(source, tmp_path / "root")
    assert result.manifest is not None
    assert result.manifest.sources is not None
    listed = unpack_sources(Repository.open(tmp_path / "root").get_object(result.manifest.sources, "sources"))
    names = sorted(str(p.relative_to(source)) for p in Path(source).rglob("*.bin"))
    assert [file.name for file in listed.files] == names
    for file in listed.files:
        data = Path(source, file.name).read_bytes()
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_class_axis_names_strata_by_folder(tmp_path: Path) -> None:
    result = shardkit_tools.build(folder(tmp_path / "source"), tmp_path / "root", stratify="__class__")
    assert dict(result.strata) == {"a": 77, "b": 7, "c": 6}


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    dry = shardkit_tools.build(source, tmp_path / "root", **SETTINGS, split={"val": 0.5}, dry_run=True)
    assert not (tmp_path / "root").exists()
    wet = shardkit_tools.build(source, tmp_path / "root", **SETTINGS, split={"val": 0.5})
    assert dry.manifest is None
    assert (dry.rows, dry.raw_bytes, dry.shards, dict(dry.strata), dry.pooled, dict(dry.split_rows)) == (
        wet.rows, wet.raw_bytes, wet.shards, dict(wet.strata), wet.pooled, dict(wet.split_rows),
    )  # fmt: skip


@pytest.mark.usefixtures("many_tasks")
@pytest.mark.parametrize("jobs", [1, 2])
def test_skipped_rows_are_listed_in_the_result_a_file_and_the_sources(tmp_path: Path, jobs: int) -> None:
    rows: list[Any] = [{"n": n, "s": "x"} for n in range(300)]
    rows[17] = "{broken"
    rows[200] = {"n": 2**70, "s": "x"}
    source = lines(tmp_path / "source" / "rows.jsonl", rows)
    with pytest.raises((SourceError, SampleError), match=r"rows\.jsonl"):
        shardkit_tools.build(source, tmp_path / "root", options=_typed(n="int64"), format="arrow", jobs=jobs)
    assert Repository.open(tmp_path / "root").head().n == 0
    result = shardkit_tools.build(
        source, tmp_path / "root", options=_typed(n="int64"), format="arrow", jobs=jobs, on_error="skip",
        skipped_file=tmp_path / "skipped.jsonl",
    )  # fmt: skip
    assert result.rows == 298
    assert [(row.source_name, row.source_row) for row in result.skipped] == [
        ("rows.jsonl", 17),
        ("rows.jsonl", 200),
    ]
    listed = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [entry["source_row"] for entry in listed] == [17, 200]
    assert result.manifest is not None
    assert result.manifest.sources is not None
    sources = unpack_sources(
        Repository.open(tmp_path / "root").get_object(result.manifest.sources, "sources")
    )
    assert [row[:2] for row in sources.skipped] == [("rows.jsonl", 17), ("rows.jsonl", 200)]
    # keys count the rows that are there
    assert sorted(key for key, _, _ in all_samples(tmp_path / "root")) == [f"{n:010d}" for n in range(298)]


def _typed(**types: str) -> Any:
    return ImportOptions(field_types=types, skip_bad_rows=True)


@pytest.mark.usefixtures("many_tasks")
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_error_in_a_worker_names_the_file(tmp_path: Path, jobs: int) -> None:
    source = folder(tmp_path / "source")
    (tmp_path / "source" / "a" / "050.bin").write_bytes(b"")
    with pytest.raises(SourceError, match=r"a/050\.bin"):
        shardkit_tools.build(source, tmp_path / "root", **SETTINGS, jobs=jobs)
    assert Repository.open(tmp_path / "root").head().n == 0


@pytest.mark.usefixtures("many_tasks")
def test_after_an_error_finished_tasks_are_used_and_changed_files_are_read_again(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    bad = tmp_path / "source" / "c" / "077.bin"
    good = bad.read_bytes()
    bad.write_bytes(b"")
    with pytest.raises(SourceError, match="077"):
        shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    bad.write_bytes(good)
    result = shardkit_tools.build(source, tmp_path / "root", **SETTINGS)
    assert result.reused_tasks > 0
    clean = shardkit_tools.build(source, tmp_path / "clean", **SETTINGS)
    assert result.manifest == clean.manifest
    found = {origin[0]: s["blob"] for _, origin, s in all_samples(tmp_path / "root") if origin}
    assert found["c/077.bin"] == good


def test_duplicate_keys_name_both_rows(tmp_path: Path) -> None:
    """The same member names in two tars."""
    import io
    import tarfile

    for name in ("one.tar", "two.tar"):
        (tmp_path / "source").mkdir(exist_ok=True)
        with tarfile.open(tmp_path / "source" / name, "w", format=tarfile.USTAR_FORMAT) as tar:
            info = tarfile.TarInfo("cat17.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    with pytest.raises(SampleError, match=r"cat17.*two\.tar row 0.*cat17.*one\.tar row 0"):
        shardkit_tools.build(
            str(tmp_path / "source"), tmp_path / "root", options=ImportOptions(keys="source")
        )


def test_a_file_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder(tmp_path / "source", 6)
    from shardkit_tools.importers.folder import FolderImporter

    decode = FolderImporter.decode

    def meddling(self: FolderImporter, task: Any, seen: Any) -> Any:
        yield from decode(self, task, seen)
        os.utime(task.files[2].path, ns=(1, 1))

    monkeypatch.setattr(FolderImporter, "decode", meddling)
    with pytest.raises(SourceError, match="changed while it was read"):
        shardkit_tools.build(source, tmp_path / "root")


def test_progress_tells_every_phase_and_ends_complete(tmp_path: Path) -> None:
    source = folder(tmp_path / "source")
    seen: list[Progress] = []
    result = shardkit_tools.build(source, tmp_path / "root", **SETTINGS, progress=seen.append)
    assert list(dict.fromkeys(p.phase for p in seen)) == ["read", "write", "commit"]
    last = {p.phase: p for p in seen}
    assert last["read"].rows == last["write"].rows == 90
    assert last["read"].done_bytes == last["read"].total_bytes == result.source_bytes
    assert last["write"].done_bytes == last["write"].total_bytes
    for p in seen:
        assert 0 <= p.done_bytes <= max(p.total_bytes, p.done_bytes)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"jobs": 0}, ConfigurationError, "jobs"),
        ({"on_error": "ignore"}, ConfigurationError, "ignore"),
        ({"stratify": "colour"}, ConfigurationError, "colour"),
        ({"split": {"a": 2}}, ConfigurationError, "a"),
    ],
)
def test_settings_that_cannot_be_carried_out_make_no_root(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    source = folder(tmp_path / "source", 3)
    with pytest.raises(error, match=match):
        shardkit_tools.build(source, tmp_path / "root", **settings)
    assert not (tmp_path / "root").exists()


def test_no_source_makes_no_root(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        shardkit_tools.build(str(tmp_path / "nowhere"), tmp_path / "root")
    assert not (tmp_path / "root").exists()


@pytest.mark.usefixtures("ordinary_rights")
def test_a_root_that_may_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o500)
    with pytest.raises(StoreReadOnlyError, match="root"):
        shardkit_tools.build(folder(tmp_path / "source", 3), tmp_path / "root")


# ---- Commands on versions in which some rows lack values, as somebody types them


ROWS: list[dict[str, Any]] = [
    {"id": number}
    | ({"age": number % 7} if number % 3 else {})
    | ({"note": f"n{number}"} if number % 4 else {})
    for number in range(50)
]


def table(root: str) -> list[dict[str, Any]]:
    found = sorted(shardkit.open(root), key=lambda sample: int(sample["id"]))
    return [{name: value for name, value in sample.items() if value is not None} for sample in found]


@pytest.mark.parametrize("format", ["tar", "arrow"])
def test_versions_with_missing_values(tmp_path: Path, format: str) -> None:
    lines, root = tmp_path / "a.jsonl", str(tmp_path / "root")
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    output_of("build", lines, root, "--format", format, "--lookup", "age")
    assert "age" in output_of("show", root)
    assert "int64?" in output_of("show", root)
    assert table(root) == ROWS
    output_of("verify", root)
    recipe = shardkit.open(root).manifest.build
    assert recipe["source"]["importer"] == "jsonl"
    output_of("rebuild", root, "--ref", "other", "--format", "arrow" if format == "tar" else "tar")
    output_of("verify", f"{root}@other")
    assert table(f"{root}@other") == ROWS
    output_of("build", lines, str(tmp_path / "two"), "--format", format)
    output_of("merge", f"a={root}", f"b={tmp_path / 'two'}", str(tmp_path / "both"))
    assert table(str(tmp_path / "both")) == sorted(ROWS * 2, key=lambda row: int(row["id"]))
    output_of("select", root, "--where", "age > 3", "--ref", "old")
    assert table(f"{root}@old") == [row for row in ROWS if row.get("age", 0) > 3]
    assert output_of("find", root, "--field", "age=0").count("sample") >= 1
    said = output_of("build", lines, str(tmp_path / "three"), "--schema", "age=int64", code=1)
    assert "--schema age=int64?" in said


# ---- A build that cannot fit on its disks does not begin; a dry run says what will be needed and what is free


Usage = namedtuple("Usage", "total used free")
ROW = 4000


def source(tmp_path: Path, rows: int = 1000) -> str:
    np.save(tmp_path / "a.npy", np.ones((rows, ROW // 4), np.int32))
    return str(tmp_path / "a.npy")


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, size))


@pytest.mark.parametrize(("compression", "share"), [("none", 2), ("zstd", 1)])
def test_scratch_and_shards_on_one_disk_share_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, share: int
) -> None:
    given = source(tmp_path)
    named: dict[str, Any] = {"compression": compression, "format": "arrow"}
    free(monkeypatch, int(share * 0.85 * 1000 * ROW))
    with pytest.raises(
        StoreFullError, match=r"tmp: .* MiB free, but .* needs at least .* MiB there .*--scratch"
    ):
        shardkit_tools.build(given, tmp_path / "root", **named)
    assert [path.name for path in (tmp_path / "root" / "tmp").iterdir()] == []
    free(monkeypatch, int(share * 1000 * ROW))
    assert shardkit_tools.build(given, tmp_path / "root", **named).rows == 1000


def test_text_may_become_a_fraction_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("n\n" + "".join(f"{n:020d}.0\n" for n in range(1000)))
    free(monkeypatch, 13_000)
    assert shardkit_tools.build(tmp_path / "a.csv", tmp_path / "root").rows == 1000
    free(monkeypatch, 1_000)
    with pytest.raises(StoreFullError):
        shardkit_tools.build(tmp_path / "a.csv", tmp_path / "other")


def test_a_dry_run_tells_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = source(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    room = shutil.disk_usage(tmp_path).free
    result = shardkit_tools.build(
        given, tmp_path / "new" / "root", format="tar", dry_run=True, scratch=scratch
    )
    assert [(need.what, need.folder) for need in result.space] == [
        ("scratch", str(scratch)),
        ("shards", str(tmp_path / "new" / "root")),
    ]
    for need in result.space:
        assert need.need_bytes == result.raw_bytes > 1000 * ROW
        assert abs(need.free_bytes - room) < 0.5 * room
    assert not (tmp_path / "new").exists()
    free(monkeypatch, 3 * 2**30)
    told = CliRunner().invoke(
        make_app("build"), ["build", given, str(tmp_path / "new"), "--format", "tar", "--dry-run"]
    )
    assert told.exit_code == 0, told.output
    assert f"about 4.88 MiB in {tmp_path / 'new'}, 3 GiB free" in told.output


def test_two_builds_of_the_same_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path / "source", 6)
    monkeypatch.setattr(
        build_run.BuildRun, "_build", lambda *_: shardkit_tools.build(source, tmp_path / "root")
    )
    with pytest.raises(RunError, match="another process"):
        shardkit_tools.build(source, tmp_path / "root")
