"""A process adopts several files at a time: what is known about them is written together, and records come last."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.dataset.scratch import unpack_record
from shardkit.documents import decode_plain
from shardkit.errors import SourceError
from shardkit.reading.adopted_places import location_name
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import FileOperations, Handle, substituted
from shardkit.stores.store import object_name
from shardkit_tools.adopting import adopt, adoption
from shardkit_tools.adopting.adoption import grouped
from shardkit_tools.adopting.formats import find_files, open_files
from shardkit_tools.importers import ImportOptions


def write_tables(folder: Path, files: int, rows: int = 2) -> Path:
    folder.mkdir()
    for file in range(files):
        pq.write_table(
            pa.table({"n": range(file * rows, file * rows + rows)}), folder / f"{file:03d}.parquet"
        )
    return folder


class Meeting(FileOperations):
    """The first two files that threads sync wait for each other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._waiting = iter(range(2))
        self._adopting = threading.current_thread()
        self.met = 0

    def fsync(self, file: Handle) -> None:
        if threading.current_thread() is not self._adopting and next(self._waiting, None) is not None:
            self._barrier.wait(timeout=60)
            self.met += 1
        super().fsync(file)


def test_files_of_a_group_become_durable_together(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", 5)
    meeting = Meeting()
    with substituted(meeting):
        result = adopt([folder], tmp_path / "root")
    assert meeting.met == 2
    assert result.rows == 10
    assert [row["n"] for row in shardkit.open(tmp_path / "root")] == list(range(10))


class Durable(FileOperations):
    """Notes which names are durable when a record appears."""

    def __init__(self) -> None:
        self._synced: set[str] = set()  # paths of files
        self._linked: dict[str, set[str]] = {}  # folder → paths of its new names
        self._durable: set[str] = set()
        self.records: list[tuple[dict[str, Any], set[str]]] = []

    def fsync(self, file: Handle) -> None:
        super().fsync(file)
        self._synced.add(file.path)

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        super().link(source, name, target, new_name)
        if source.child(name) in self._synced:
            self._linked.setdefault(target.path, set()).add(f"{target.path}/{new_name}")

    def fsync_directory(self, directory: Handle) -> None:
        names = set(self._linked.get(directory.path, ()))
        super().fsync_directory(directory)
        self._durable |= names

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        if new_name.endswith(".done"):
            content = unpack_record(Path(source.path, name).read_bytes())
            assert content is not None
            self.records.append((decode_plain(content, max_bytes=1 << 20), set(self._durable)))
        super().rename(source, name, target, new_name)


def test_a_record_appears_after_all_that_it_names_is_durable(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", 70)  # several groups
    durable = Durable()
    with substituted(durable):
        adopt([folder], tmp_path / "root")
    assert {record["number"] for record, _ in durable.records} == set(range(70))
    for record, names in durable.records:
        for name in (object_name(record["index_digest"], "index"), location_name(record["digest"])):
            assert f"{tmp_path / 'root'}/{name}" in names, name


def test_files_before_a_bad_one_of_their_group_are_not_read_again(tmp_path: Path) -> None:
    folder = write_tables(tmp_path / "tables", 6)
    bad = folder / "004.parquet"
    good, options = bad.read_bytes(), ImportOptions(check="decode")
    page = good.index(b"PAR1") + 4
    bad.write_bytes(good[:page] + b"\xff" * 8 + good[page + 8 :])
    with pytest.raises(SourceError, match=r"004\.parquet"):
        adopt([folder], tmp_path / "root", options=options)
    assert not Repository.open(tmp_path / "root").refs
    bad.write_bytes(good)
    assert adopt([folder], tmp_path / "root", options=options).reused == 4
    assert [row["n"] for row in shardkit.open(tmp_path / "root")] == list(range(12))


def test_groups_have_limits_and_keep_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "_GROUP_FILES", 3)
    folder = write_tables(tmp_path / "tables", 8)
    tasks = open_files(find_files([folder], ImportOptions()), None, ImportOptions()).tasks()
    groups = [group.tasks for group in grouped(tasks)]
    assert [len(group) for group in groups] == [3, 3, 2]
    assert [task for group in groups for task in group] == tasks
    monkeypatch.setattr(adoption, "_GROUP_BYTES", 2 * tasks[0].size)
    assert [len(group.tasks) for group in grouped(tasks)] == [2] * 4
    monkeypatch.setattr(adoption, "_GROUP_BYTES", 1)
    assert [len(group.tasks) for group in grouped(tasks)] == [1] * 8
