"""Sources and disks that fail a build: a clear error that names them, and nothing half-published."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.copies.verify import verify
from shardkit.repository.repository import Repository
from tests.command_line import output_of, typed
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


def broken_tar(folder: Path) -> None:
    with tarfile.open(folder / "broken.tar", "w") as tar:
        info = tarfile.TarInfo("1.txt")
        info.size = 5000
        tar.addfile(info, io.BytesIO(bytes(5000)))
    os.truncate(folder / "broken.tar", 3000)


def mixed_types(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"a": 1}\n{"a": "x"}\n')


SOURCES: list[tuple[Callable[[Path], None], str]] = [
    (broken_file, "broken.png: an empty file"),
    (broken_tar, "broken.tar: the tar ends inside member '1.txt'"),
    (mixed_types, "rows.jsonl line 2: field 'a' is a string"),
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
