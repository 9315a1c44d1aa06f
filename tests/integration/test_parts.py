"""Many writers, one commit: the version is that of the rows, whoever wrote them and however often."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.dataset import commit_parts, list_parts
from shardkit.dataset.parts import PartFolder
from shardkit.errors import IntegrityError, NotFoundError, SampleError, UsageError
from shardkit.repository.repository import Repository
from tests.flips import flip

SCHEMA = {"text": "str", "label": "int64"}
SETTINGS: dict[str, Any] = {"stratify": "label", "shard_size": "4KiB", "block_size": "1KiB"}


def write(root: Path, part: str | None, rows: range, *, keys: bool = True, **named: Any) -> shardkit.Writer:
    with shardkit.create(root, SCHEMA, part=part, **SETTINGS, **named) as writer:
        for n in rows:
            writer.add({"text": f"text {n}" * (n % 9), "label": n % 3}, key=f"k{n}" if keys else None)
    return writer


def texts(root: Path) -> list[str]:
    ds = shardkit.open(str(root))
    return sorted(ds[n]["text"] for n in range(len(ds)))


def test_parts_make_the_version_of_one_writer(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", None, range(100), split={"train": 0.8, "val": 0.2}).manifest
    root = tmp_path / "root"
    for part, rows in (("b", range(40, 100)), ("c", range(0)), ("a", range(40))):
        writer = write(root, part, rows, split={"train": 0.8, "val": 0.2})
        with pytest.raises(UsageError, match="commit_parts"):
            _ = writer.manifest
    assert Repository.open(root).head().n == 0
    assert list_parts(root) == ["a", "b", "c"]
    made = commit_parts(root, ["a", "b", "c"])
    assert made.id == whole.id
    assert sorted(Repository.open(root).refs) == ["main", "train", "val"]
    assert list_parts(root) == []


def test_a_part_can_be_written_again_until_it_is_committed(tmp_path: Path) -> None:
    write(tmp_path, "a", range(30))
    write(tmp_path, "b", range(30, 40))
    write(tmp_path, "a", range(20))
    writer = shardkit.create(tmp_path, SCHEMA, part="a", **SETTINGS)
    writer.add({"text": "", "label": 1})
    writer.abort()
    assert commit_parts(tmp_path).rows == 30
    left = [name for name in os.listdir(tmp_path / "tmp" / "parts") if not name.startswith("committed-")]
    assert left == []


@pytest.mark.parametrize("append", [False, True])
def test_committing_again_changes_nothing(tmp_path: Path, append: bool) -> None:
    if append:
        write(tmp_path, None, range(100, 150))
    write(tmp_path, "a", range(30))
    write(tmp_path, "b", range(30, 60))
    made = commit_parts(tmp_path, ["b", "a"], append=append)
    assert made.rows == (110 if append else 60)
    before = Repository.open(tmp_path).head()
    assert commit_parts(tmp_path, ["a", "b"], append=append).id == made.id
    # A killed call leaves parts that are committed already; they are not committed twice either.
    write(tmp_path, "a", range(30))
    write(tmp_path, "b", range(30, 60))
    assert commit_parts(tmp_path, ["a", "b"], append=append).id == made.id
    assert Repository.open(tmp_path).head() == before


def test_rows_without_keys_do_not_depend_on_who_was_first(tmp_path: Path) -> None:
    ids = set()
    for order in (["a", "b"], ["b", "a"]):
        root = tmp_path / order[0]
        for part in order:
            write(root, part, range(20) if part == "a" else range(20, 50), keys=False)
        ids.add(commit_parts(root).id)
    assert len(ids) == 1
    assert texts(root) == sorted(f"text {n}" * (n % 9) for n in range(50))


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a", range(30))
    write(tmp_path, "b", range(30, 60), seed=7)
    with pytest.raises(UsageError, match=r"'a' and 'b'.*seed is 0 and 7"):
        commit_parts(tmp_path)
    with pytest.raises(NotFoundError, match="no part 'x'; those there are a, b"):
        commit_parts(tmp_path, ["a", "x"])
    write(tmp_path, "b", range(29, 60))
    with pytest.raises(SampleError, match="k29"):
        commit_parts(tmp_path)
    assert list_parts(tmp_path) == ["a", "b"]
    assert Repository.open(tmp_path).head().n == 0
    for bad in ("", "a/b", "../a", "a.part", "-"):
        with pytest.raises(UsageError, match="part"):
            shardkit.create(tmp_path, SCHEMA, part=bad)
    with pytest.raises(UsageError, match="commit_parts"):
        shardkit.create(tmp_path, SCHEMA, part="c", lookup="text")
    shardkit.create(tmp_path.with_name("new"), SCHEMA, part="c").abort()
    with pytest.raises(NotFoundError, match="no parts"):
        commit_parts(tmp_path.with_name("new"))


def test_damage_is_found(tmp_path: Path) -> None:
    write(tmp_path, "a", range(30))
    folder = tmp_path / "tmp" / "parts"
    (rows,) = folder.glob("a.*.rows")
    flip(rows)
    with pytest.raises(IntegrityError):
        commit_parts(tmp_path)
    record = folder / "a.part"
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match="part 'a'"):
        commit_parts(tmp_path)
    assert Repository.open(tmp_path).head().n == 0


WRITER = """
import os, signal, sys
import shardkit
from shardkit.stores import file_operations
root, part, first, last, kill = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if kill:
    real = file_operations.FileOperations.rename
    def rename(*arguments):
        if arguments[-1].endswith(kill):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    file_operations.FileOperations.rename = rename
with shardkit.create(root, {"text": "str"}, part=part, format="arrow") as writer:
    for n in range(first, last):
        writer.add({"text": f"text {n}"}, key=str(n))
"""


def test_processes_write_at_the_same_time_and_a_killed_one_is_done_again(tmp_path: Path) -> None:
    def start(part: str, first: int, last: int, kill: str = "") -> subprocess.Popen[bytes]:
        numbers = [str(first), str(last), kill]
        return subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), part, *numbers])

    started = [start("a", 0, 50), start("b", 50, 120, ".part"), start("b", 50, 120, ".rows")]
    assert [one.wait() for one in started] == [0, -9, -9]
    with pytest.raises(NotFoundError, match="no part 'b'"):
        commit_parts(tmp_path, ["a", "b"])
    assert start("b", 50, 120).wait() == 0
    commit_parts(tmp_path, ["a", "b"])
    assert texts(tmp_path) == sorted(f"text {n}" for n in range(120))
    assert not list((tmp_path / "tmp" / "parts").glob("*.spool"))


def test_rows_that_no_record_names_go_after_a_day(tmp_path: Path) -> None:
    """A writer was killed between giving its rows a name and naming them."""
    write(tmp_path, "a", range(30))
    folder = tmp_path / "tmp" / "parts"
    (rows,) = folder.glob("a.*.rows")
    orphans = [folder / f"{name}.{'0' * 16}.rows{end}" for name in ("a", "b-1") for end in ("", ".new")]
    others = [folder / "b.rows", folder / f"b.{'0' * 15}.rows"]
    young = folder / f"c.{'1' * 16}.rows"
    for path in (*orphans, *others, young):
        path.write_bytes(b"rows")
    yesterday = time.time() - 25 * 3600
    for path in (*orphans, *others, rows):
        os.utime(path, (yesterday, yesterday))
    PartFolder(str(folder)).sweep()
    left = {path.name for path in folder.iterdir()}
    assert left == {rows.name, "a.part", young.name, *(path.name for path in others)}
    commit_parts(tmp_path)
