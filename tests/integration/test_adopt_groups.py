"""A process adopts several files at a time: what is known about them is written together, and records come last."""

from __future__ import annotations

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
from shardkit_tools.adopting import adopt
from shardkit_tools.importers import ImportOptions


def write_tables(folder: Path, files: int, rows: int = 2) -> Path:
    folder.mkdir()
    for file in range(files):
        pq.write_table(
            pa.table({"n": range(file * rows, file * rows + rows)}), folder / f"{file:03d}.parquet"
        )
    return folder


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
