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
from shardkit_tools.main import run
from tests.faults.faulty_operations import FaultyOperations

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels"


def command(*arguments: object) -> int:
    try:
        run([str(argument) for argument in arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


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
    assert command("build", tmp_path / "first.jsonl", tmp_path / "root") == 0
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
def test_a_bad_source(
    tmp_path: Path, root: Path, make: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    before = state(root)
    capsys.readouterr()
    assert command("build", tmp_path / "source", root, "--ref", "other") == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert state(root) == before


@pytest.mark.parametrize(("make", "message"), SOURCES[:4], ids=[make.__name__ for make, _ in SOURCES[:4]])
def test_a_bad_source_makes_no_new_root_look_built(
    tmp_path: Path, make: Callable[[Path], None], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    assert command("build", tmp_path / "source", tmp_path / "new") == 1
    assert not list(tmp_path.glob("new/log/*"))
    assert not list(tmp_path.glob("new/objects/sha256/*/*"))


@pytest.mark.parametrize(
    ("error", "word"),
    [(errno.ENOSPC, "no room is left"), (errno.EROFS, "read-only"), (errno.EACCES, "permi"), (errno.EIO, "")],
)
def test_a_disk_that_fails_at_any_moment(
    tmp_path: Path, root: Path, error: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "second.jsonl").write_text('{"a": 3}\n' * 50)
    before = state(root)
    calls = FaultyOperations(error)
    with substituted(calls):
        assert command("build", tmp_path / "second.jsonl", root, "--dry-run") == 0
    counted = FaultyOperations(error)
    scratch = tmp_path / "counting"
    with substituted(counted):
        assert command("build", tmp_path / "second.jsonl", scratch) == 0
    steps = range(0, counted.num_calls, max(1, counted.num_calls // 12))
    for at in steps:
        capsys.readouterr()
        with substituted(FaultyOperations(error, at, forever=True)):
            code = command("build", tmp_path / "second.jsonl", root)
        err = capsys.readouterr().err
        refs, commits = state(root)
        if code == 0:  # what failed was housekeeping after the commit
            assert commits == before[1] + 1
            break
        assert code == 1, err
        assert word in err.lower(), err
        assert "Traceback" not in err
        assert (refs, commits) == before
    assert command("build", tmp_path / "second.jsonl", root) == 0
    assert state(root)[1] == before[1] + 1


@pytest.mark.parametrize("place", ["file/root", "file"])
def test_a_target_that_cannot_be_a_root(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "file").write_text("here")
    assert command("build", tmp_path / "a.jsonl", tmp_path / place) == 1
    err = capsys.readouterr().err
    assert str(tmp_path / "file") in err
    assert "Traceback" not in err


def test_skipping_builds_the_rest(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": "x"}\n{"a": 1}\nnot json\n{"a": "y"}\n{"b": 1}\n')
    assert command("build", path, root, "--on-error", "skip", "--ref", "some") == 0
    out = capsys.readouterr().out
    assert "Skipped 2 rows" in out
    for line in (2, 3):
        assert f"rows.jsonl line {line}" in out
    assert "line 5" not in out  # a row without a value of a field is one
    assert verify(f"{root}@some", level="decode").exit_code == 0
