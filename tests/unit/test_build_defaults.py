"""What a build decides by itself: format, block size and engine."""

from __future__ import annotations

import functools
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import RunError, SampleError, SourceError, StoreError
from shardkit.ranges import parse_size
from shardkit_tools.building import engines
from shardkit_tools.building.build_run import build
from shardkit_tools.building.engines import LocalEngine
from shardkit_tools.building.rebuilding import rebuild
from shardkit_tools.importers import ImportOptions
from tests.command_line import output_of
from tests.pictures import PNG

# ---- The format of a build follows its rows unless it is given


def _parquet(path: Path, size: int) -> Path:
    pq.write_table(pa.table({"n": [1, 2], "clip": [b"x" * size, b"y" * (size + 2)]}), path)
    return path


def _lines(path: Path, count: int = 50) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": f"row {n}"}) + "\n" for n in range(count)))
    return path


def _pictures(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(PNG + name.encode())
    return folder


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        ("lines", ("arrow", "zstd:3")),
        ("pictures", ("tar", "none")),  # files of any size
        ("small values", ("arrow", "zstd:3")),
        ("large values", ("tar", "none")),
    ],
)
def test_the_format_follows_the_rows(tmp_path: Path, source: str, stored: tuple[str, str]) -> None:
    path = {
        "lines": lambda: _lines(tmp_path / "a.jsonl"),
        "pictures": lambda: _pictures(tmp_path / "photos"),
        "small values": lambda: _parquet(tmp_path / "a.parquet", 4094),  # 4,095 bytes on average
        "large values": lambda: _parquet(tmp_path / "a.parquet", 4096),
    }[source]()
    result = build(path, tmp_path / "data")
    assert (result.format, result.compression) == stored
    manifest = shardkit.open(tmp_path / "data").manifest
    assert (manifest.format, manifest.compression) == stored


def test_what_is_given_decides_and_the_report_says_it(tmp_path: Path) -> None:
    source = _lines(tmp_path / "a.jsonl", 5_000)
    said = output_of("build", source, tmp_path / "tar", "--format", "tar")
    assert "smaller for rows like these: --format arrow" in said
    said = output_of("build", source, tmp_path / "arrow")
    assert "arrow, zstd:3; for numbers, text and small values" in said
    assert build(source, tmp_path / "plain", format="arrow").compression == "none"
    assert build(source, tmp_path / "zstd", compression="zstd:9").format == "arrow"


def test_a_pack_is_of_numbers(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[1, 2, 3], [4]], "page": [b"x" * 9000, b"y" * 9000]})
    pq.write_table(table, tmp_path / "a.parquet")
    packed = build(
        tmp_path / "a.parquet",
        tmp_path / "data",
        pack={"tokens": 4},
        options=ImportOptions(field_types={"tokens": "int32[*]"}),
    )
    assert packed.format == "arrow"


def test_appended_samples_take_the_format_of_the_version(tmp_path: Path) -> None:
    source, root = _lines(tmp_path / "a.jsonl"), tmp_path / "data"
    build(source, root, format="tar")
    build(_lines(tmp_path / "b.jsonl", 7), root, append=True)
    assert shardkit.open(root).manifest.format == "tar"
    build(source, tmp_path / "arrow")
    with shardkit.create(tmp_path / "arrow", {"id": "int64", "text": "str"}, append=True) as writer:
        writer.add({"id": 1, "text": "more"}, key="more")
    assert shardkit.open(tmp_path / "arrow").manifest.format == "arrow"


# ---- Blocks of new datasets are small; a ref keeps the size that its version was built with, whoever builds onto it


def _held(root: Path, ref: str = "main") -> int:
    return int(shardkit.open(f"{root}@{ref}").manifest.build["block_size"])


def _source(folder: Path) -> str:
    folder.mkdir()
    np.save(folder / "x.npy", np.arange(4096, dtype=np.int64).reshape(-1, 8))
    return str(folder / "x.npy")


def _create(root: Path, *, append: bool = False, **settings: object) -> str:
    with shardkit.create(root, {"x": "int64"}, append=append, **settings) as writer:  # type: ignore[arg-type]
        for number in range(100):
            writer.add({"x": number}, key=f"{append}{number}")
    return writer.manifest.id


def test_a_new_dataset_has_small_blocks(tmp_path: Path) -> None:
    _create(tmp_path / "a")
    build(_source(tmp_path / "source"), tmp_path / "b")
    assert _held(tmp_path / "a") == _held(tmp_path / "b") == 256 << 10


@pytest.mark.parametrize("size", ["1MiB", "4KiB"])
def test_a_ref_keeps_its_size(tmp_path: Path, size: str) -> None:
    root, source = tmp_path / "a", _source(tmp_path / "source")
    first = build(source, root, block_size=size)
    assert build(source, root).manifest == first.manifest
    assert rebuild(root, seed=7).manifest != first.manifest
    assert _held(root) == parse_size(size)
    build(source, root, ref="other")
    assert _held(root, "other") == 256 << 10
    build(source, root, block_size="64KiB")
    assert _held(root) == 64 << 10


def test_what_is_created_again_or_appended_keeps_it_too(tmp_path: Path) -> None:
    first = _create(tmp_path / "a", block_size="1MiB")
    assert _create(tmp_path / "a") == first
    _create(tmp_path / "a", append=True)
    assert _held(tmp_path / "a") == 1 << 20


# ---- Processes of a build: every result arrives, a dead one is named, errors keep their kind, the parent sleeps


MODULE = """
import os, signal, time
from shardkit.errors import SourceError

class Doubler:
    def __init__(self, factor, reports=1):
        self.factor, self.reports = factor, reports
    def work(self, item, report):
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "bug":
            raise ZeroDivisionError("a bug")
        if item == "source":
            raise SourceError("rows.jsonl row 17: broken")
        if item == "slow":
            time.sleep(0.5)
            return os.getpid()
        for _ in range(self.reports):
            report(1, item)
        return item * self.factor, os.getpid()
    def close(self):
        pass
"""


@pytest.fixture
def doubler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker class that spawned processes can import."""
    name = "worker_for_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(name)
    yield sys.modules[name].Doubler
    del sys.modules[name]


def nothing(_rows: int, _size: int) -> None:
    pass


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_to_do(doubler: Any, jobs: int) -> None:
    with LocalEngine(jobs) as processes:
        assert list(processes.run(functools.partial(doubler, 2), [], nothing)) == []


def test_a_dead_process_is_named_with_its_item(doubler: Any) -> None:
    with LocalEngine(2) as processes, pytest.raises(RunError, match=r"signal 9.*die.*--jobs"):
        list(processes.run(functools.partial(doubler, 2), [1, 2, "die", 3], nothing))


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_of_shardkit_keep_their_kind(doubler: Any, jobs: int) -> None:
    with LocalEngine(jobs) as processes, pytest.raises(SourceError, match="row 17"):
        list(processes.run(functools.partial(doubler, 2), [1, "source", 2], nothing))


def test_a_bug_arrives_with_its_traceback(doubler: Any) -> None:
    with LocalEngine(2) as processes, pytest.raises(RunError, match=r"(?s)bug.*ZeroDivisionError.*line"):
        list(processes.run(functools.partial(doubler, 2), [1, "bug"], nothing))


# ---- What of the Ray engine can be shown without Ray: versions that differ, errors


@pytest.mark.parametrize(
    ("address", "joined", "is_remote"),
    [(None, False, False), (None, True, True), ("auto", False, True), ("10.0.0.5:6379", True, True)],
)
def test_workers_of_a_cluster_that_was_there_may_be_anywhere(
    address: str | None, joined: bool, is_remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_import_ray", lambda: SimpleNamespace(is_initialized=lambda: joined))
    assert engines.RayEngine(2, address).is_remote is is_remote


def test_tasks_are_as_many_as_the_cluster_has_processors_now(monkeypatch: pytest.MonkeyPatch) -> None:
    resources = {"CPU": 1.0}
    fake = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: resources)
    monkeypatch.setattr(engines, "_import_ray", lambda: fake)
    free, bounded = engines.RayEngine(), engines.RayEngine(2)
    assert (free._slots(), bounded._slots()) == (1, 1)
    resources["CPU"] = 8.0  # nodes have joined
    assert (free._slots(), bounded._slots()) == (8, 2)
    resources.clear()  # all are gone: one task waits for a node
    assert (free._slots(), bounded._slots()) == (1, 1)


def test_a_node_with_other_versions_is_refused() -> None:
    found = engines._own_versions()
    assert {"shardkit", "zstandard", "pyarrow"} <= set(found)
    given = engines._Driver("driver", {**found, "zstandard": "0.1"})
    with pytest.raises(RunError, match=rf"zstandard {found['zstandard']}, not 0\.1.*same versions"):
        engines._worker("a list of tasks", [], given)


def test_errors_of_files_say_what_every_node_must_see() -> None:
    error = StoreError("read /data/x: No such file or directory")
    assert engines._with_reason(error, platform.node()) is error
    elsewhere = engines._with_reason(error, "another node")
    assert isinstance(elsewhere, StoreError)
    assert "every node of the cluster must see" in str(elsewhere)
    sample = SampleError("row 3: no number")
    assert engines._with_reason(sample, "another node") is sample


def test_reports_of_a_process_are_added_up(doubler: Any) -> None:
    """Each report is a message to another process, and a tar has thousands of small members."""
    seen: list[tuple[int, int]] = []
    with LocalEngine(2) as processes:
        make = functools.partial(doubler, 2, reports=5_000)
        list(processes.run(make, [3], lambda rows, size: seen.append((rows, size))))
    assert (sum(rows for rows, _ in seen), sum(size for _, size in seen)) == (5_000, 15_000)
    assert len(seen) < 50
