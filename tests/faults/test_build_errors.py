"""Sources and disks that fail a build: a clear error that names them, and nothing half-published."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardkit.copies.verify import verify
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from tests.command_line import output_of, typed
from tests.faults.faulty_operations import FaultyOperations
from tests.pictures import PNG


def state(root: Path) -> tuple[dict[str, str], int]:
    """Refs and commits; fails where something lies under a final name that is not what the name promises."""
    for path in root.glob("objects/sha256/*/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name.partition(".")[0], f"{path} is torn"
    assert verify(root, level="decode", jobs=1).exit_code == 0
    repository = Repository.open(root)
    return repository.refs, len(repository.log())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dataset that holds a version already."""
    (tmp_path / "first.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    output_of("build", tmp_path / "first.jsonl", tmp_path / "root")
    return tmp_path / "root"


def broken_file(folder: Path) -> None:
    (folder / "good.png").write_bytes(PNG)
    (folder / "broken.png").write_bytes(b"")


def broken_array(folder: Path) -> None:
    np.save(folder / "broken.npy", np.arange(1000))
    os.truncate(folder / "broken.npy", 700)


def broken_tar(folder: Path) -> None:
    with tarfile.open(folder / "broken.tar", "w") as tar:
        info = tarfile.TarInfo("1.txt")
        info.size = 5000
        tar.addfile(info, io.BytesIO(bytes(5000)))
    os.truncate(folder / "broken.tar", 3000)


def mixed_types(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')


def mixed_kinds(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    (folder / "b.wav").write_bytes(b"RIFF")


def empty_folder(folder: Path) -> None:
    (folder / "cats").mkdir()


def climbing_name(folder: Path) -> None:
    with tarfile.open(folder / "climbs.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../../etc/1.txt"))


def climbing_link(folder: Path) -> None:
    (folder / "a.png").write_bytes(PNG)
    os.symlink("../root/shardkit.json", folder / "b.png")


def not_text(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"\xff\xfe")


SOURCES: list[tuple[Callable[[Path], None], str]] = [
    (broken_file, "broken.png: an empty file"),
    (broken_array, "broken.npy: 700 bytes, but its header"),
    (broken_tar, "broken.tar: the tar ends inside member '1.txt'"),
    (mixed_types, "rows.jsonl line 2: field 'a' is a string"),
    (mixed_kinds, "kinds of files are mixed: audio (b.wav), image (a.png)"),
    (empty_folder, "cats: an empty folder"),
    (climbing_name, "climbs.tar: member '../../etc/1.txt' has a name that leads out of its folder"),
    (climbing_link, "b.png: a symbolic link out of the source"),
    (not_text, "a.txt: not UTF-8"),
]


@pytest.mark.parametrize(("make", "message"), SOURCES, ids=[make.__name__ for make, _ in SOURCES])
def test_a_bad_source(tmp_path: Path, root: Path, make: Callable[[Path], None], message: str) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    before = state(root)
    code, out, err = typed("build", tmp_path / "source", root, "--ref", "other")
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert state(root) == before


@pytest.mark.parametrize("make", [make for make, _ in SOURCES[:4]])
def test_a_bad_source_makes_no_new_root_look_built(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    output_of("build", tmp_path / "source", tmp_path / "new", code=1)
    assert not list(tmp_path.glob("new/log/*"))
    assert not list(tmp_path.glob("new/objects/sha256/*/*"))


@pytest.mark.parametrize(
    ("error", "word"),
    [(errno.ENOSPC, "no room is left"), (errno.EROFS, "read-only"), (errno.EACCES, "permi"), (errno.EIO, "")],
)
def test_a_disk_that_fails_at_any_moment(tmp_path: Path, root: Path, error: int, word: str) -> None:
    (tmp_path / "second.jsonl").write_text('{"a": 3}\n' * 50)
    before = state(root)
    calls = FaultyOperations(error)
    with substituted(calls):
        output_of("build", tmp_path / "second.jsonl", root, "--dry-run")
    counted = FaultyOperations(error)
    scratch = tmp_path / "counting"
    with substituted(counted):
        output_of("build", tmp_path / "second.jsonl", scratch)
    steps = range(0, counted.num_calls, max(1, counted.num_calls // 12))
    for at in steps:
        with substituted(FaultyOperations(error, at, forever=True)):
            code, _, err = typed("build", tmp_path / "second.jsonl", root)
        refs, commits = state(root)
        if code == 0:  # what failed was housekeeping after the commit
            assert commits == before[1] + 1
            break
        assert code == 1, err
        assert word in err.lower(), err
        assert (refs, commits) == before
    output_of("build", tmp_path / "second.jsonl", root)
    assert state(root)[1] == before[1] + 1


@pytest.mark.parametrize("place", ["file/root", "file"])
def test_a_target_that_cannot_be_a_root(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "file").write_text("here")
    code, _, err = typed("build", tmp_path / "a.jsonl", tmp_path / place)
    assert code == 1
    assert str(tmp_path / "file") in err


def test_skipping_builds_the_rest(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x"}\n{"a": 1}\nnot json\n{"a": "y"}\n{"b": 1}\n')
    out = output_of("build", path, root, "--on-error", "skip", "--ref", "some")
    assert "Skipped 2 rows" in out
    for line in (2, 3):
        assert f"rows.jsonl line {line}" in out
    assert "line 5" not in out  # a row without a value of a field is one
    assert verify(f"{root}@some", level="decode").exit_code == 0
