"""Every call of the local store may fail: the error is clean, nothing half-done shows, and trying again works."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.errors import (
    CommitUnknown,
    IntegrityError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import substituted
from shardkit.stores.local import LocalStore
from shardkit.stores.store import parse_object_name
from tests.faults.faulty_operations import CHANGES, READS, FaultyOperations

SHARD = bytes(range(256)) * 40
MANIFEST = b"a manifest"


def build(root: Path) -> Repository:
    """What a build does to a store, in small."""
    repository = Repository.create(root)
    with repository.stage_object("tar") as stage:
        stage.write(SHARD[:5_000])
        stage.write(SHARD[5_000:])
        repository.publish(stage, "tar")
    manifest = repository.put_object(MANIFEST, "manifest")
    repository.commit({"main": manifest.digest}, message="built", expected={"main": None})
    return repository


def check_nothing_torn(root: Path) -> None:
    """Whatever has a final name is complete; the log can be read."""
    store = LocalStore(root, read_only=True)
    for name in store.list_after(""):
        if name.startswith("objects/"):
            digest, _ = parse_object_name(name)
            assert f"sha256:{hashlib.sha256((root / name).read_bytes()).hexdigest()}" == digest
    if store.head("shardkit.json"):
        Repository.open(root, read_only=True).log()


def check_whole(root: Path) -> None:
    repository = Repository.open(root)
    assert repository.get_object(repository.resolve("main"), "manifest") == MANIFEST
    assert repository.get_object(f"sha256:{hashlib.sha256(SHARD).hexdigest()}", "tar", len(SHARD)) == SHARD
    assert len(repository.log()) == 1
    assert list((root / "tmp").iterdir()) == [], "no temporaries left"


def every_call(
    tmp_path: Path,
    make: Callable[[int | None], FaultyOperations],
    check: Callable[[Path, ShardkitError | None], None],
) -> int:
    """Run the build with its first, second, … call failing, until there is none left to fail."""
    number = 0
    while True:
        root = tmp_path / str(number)
        operations = make(number)
        error: ShardkitError | None = None
        with substituted(operations):
            try:
                build(root)
            except ShardkitError as caught:
                error = caught
        if not operations.failed:
            assert error is None
            return number
        check(root, error)
        number += 1


def finish(root: Path) -> None:
    """Try again on a disk that works now; the commit may have landed the first time."""
    with contextlib.suppress(ShardkitError):
        if Repository.open(root, read_only=True).head().n > 0:
            return
    build(root)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, StoreError),
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EROFS, StoreReadOnlyError),
        (errno.EACCES, StoreReadOnlyError),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) else "",
)
@pytest.mark.parametrize("torn", [False, True], ids=["clean", "torn"])
def test_any_change_may_fail(tmp_path: Path, number: int, kind: type[StoreError], torn: bool) -> None:
    def check(root: Path, error: ShardkitError | None) -> None:
        # A failing unlink of a temporary is nobody's business, and a commit that landed is known to have landed.
        if error is not None:
            assert type(error) is kind
            assert str(root) in str(error)
            assert ";" in str(error), "says what to do next"
        check_nothing_torn(root)
        finish(root)
        for leftover in (
            root / "tmp"
        ).iterdir():  # an unlink failed; this process is alive, so no sweep took it
            leftover.unlink()
        check_whole(root)

    calls = every_call(tmp_path, lambda at: FaultyOperations(number, at, torn=torn), check)
    assert calls > 25


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_the_disk_stays_bad(tmp_path: Path, number: int) -> None:
    def check(root: Path, error: ShardkitError | None) -> None:
        # Once the entry has its name and cannot be made durable, nobody can say whether it will survive.
        assert isinstance(error, (StoreError, CommitUnknown)) or error is None
        if isinstance(error, CommitUnknown):
            assert "find_commit" in str(error)
        check_nothing_torn(root)
        finish(root)
        for leftover in (root / "tmp").iterdir():
            leftover.unlink()
        check_whole(root)

    every_call(tmp_path, lambda at: FaultyOperations(number, at, forever=True, torn=True), check)


def test_any_read_may_fail(tmp_path: Path) -> None:
    def check(root: Path, error: ShardkitError | None) -> None:
        # Some reads decide nothing: the sweep, and the look at bytes that are replaced when they cannot be read.
        if error is not None:
            assert type(error) in (StoreError, CommitUnknown)
        check_nothing_torn(root)
        finish(root)
        check_whole(root)

    assert every_call(tmp_path, lambda at: FaultyOperations(errno.EIO, at, calls=READS), check) > 25


def test_short_writes_are_no_errors(tmp_path: Path) -> None:
    operations = FaultyOperations(errno.EIO, None, short=7)
    with substituted(operations):
        build(tmp_path / "root")
    assert operations.num_calls > len(SHARD) // 7
    check_whole(tmp_path / "root")


def test_a_stage_is_unusable_after_a_failed_write(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    with store.stage() as stage:
        stage.write(b"good")
        with (
            substituted(FaultyOperations(errno.ENOSPC, 0, calls=["write"], torn=True)),
            pytest.raises(StoreFullError),
        ):
            stage.write(b"lost half")
        with pytest.raises(StoreError, match="incomplete"):
            stage.write(b"more")
        with pytest.raises(StoreError, match="incomplete"):
            stage.publish("objects/x")
    assert list(store.list_after("")) == []


def test_a_lost_answer_to_link_is_recognised(tmp_path: Path) -> None:
    """NFS may have made the link and lost the answer; repeated, the link is then said to exist."""
    for number in (errno.EEXIST, errno.EIO):
        store = LocalStore(tmp_path / str(number))
        with substituted(FaultyOperations(number, 0, calls=["link"], torn=True)):
            assert store.put_new("log/1", b"mine") is True
        assert store.get("log/1", max_bytes=4) == b"mine"


def test_a_commit_whose_answer_was_lost_is_found_to_have_landed(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "root")
    manifest = repository.put_object(MANIFEST, "manifest")
    with substituted(FaultyOperations(errno.EIO, 1, calls=["fsync_directory"])):  # 0: the new folder log/
        entry = repository.commit({"main": manifest.digest}, message="landed, then an error")
    assert [found.txn for found in repository.log()] == [entry.txn]


def test_a_commit_that_cannot_be_made_durable_is_unknown(tmp_path: Path) -> None:
    """Its entry can be read, from memory; whether the disk will have it after a power cut, nobody knows."""
    repository = Repository.create(tmp_path / "root")
    manifest = repository.put_object(MANIFEST, "manifest")
    operations = FaultyOperations(errno.EIO, 1, calls=["fsync_directory"], forever=True)
    with substituted(operations), pytest.raises(CommitUnknown, match="power cut"):
        repository.commit({"main": manifest.digest}, message="in memory only")
    assert repository.refs == {"main": manifest.digest}
    assert operations.failed == ["fsync_directory"] * 3


class Unreadable(FaultyOperations):
    """The entry gets its name, then the disk fails for good: neither its durability nor its bytes can be had."""

    def open_file(self, parent, name):  # type: ignore[no-untyped-def]
        if self.failed:
            raise OSError(errno.EIO, "unreadable too")
        return super().open_file(parent, name)


def test_an_unreadable_answer_is_unknown_and_can_be_asked_for_later(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "root")
    manifest = repository.put_object(MANIFEST, "manifest")
    with (
        substituted(Unreadable(errno.EIO, 1, calls=["fsync_directory"])),
        pytest.raises(CommitUnknown) as caught,
    ):
        repository.commit({"main": manifest.digest}, message="who knows")
    txn = str(caught.value).partition("commit ")[2].split()[0]
    found = repository.find_commit(txn)
    assert found is not None
    assert found.message == "who knows"
    assert repository.find_commit("0" * 32) is None


def test_healing_what_cannot_be_read(tmp_path: Path) -> None:
    repository = Repository.create(tmp_path / "root")
    shard = repository.put_object(SHARD, "tar")
    with substituted(FaultyOperations(errno.EIO, 0, calls=["read"])):
        repository.put_object(SHARD, "tar")
    for damage in (b"", SHARD[:-1], SHARD + b"x", bytes([SHARD[0] ^ 1]) + SHARD[1:]):
        (tmp_path / "root" / shard.name).write_bytes(damage)
        with pytest.raises(IntegrityError, match=r"repair|verify"):
            repository.get_object(shard.digest, "tar", shard.size)
        repository.put_object(SHARD, "tar")
        assert repository.get_object(shard.digest, "tar", shard.size) == SHARD
        (tmp_path / "root" / shard.name).write_bytes(damage)
        with repository.stage_object("tar") as stage:
            stage.write(SHARD)
            repository.publish(stage, "tar")
        assert repository.get_object(shard.digest, "tar", shard.size) == SHARD


CHILD = """
import resource, signal, sys
from shardkit.errors import StoreFullError
from shardkit.repository.repository import Repository
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
repository = Repository.create(sys.argv[1])
try:
    with repository.stage_object("tar") as stage:
        stage.write(bytes(1 << 20))
        repository.publish(stage, "tar")
except StoreFullError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no limit on file sizes")
def test_a_file_that_really_cannot_grow(tmp_path: Path) -> None:
    """No injection: the kernel itself cuts the write short, then refuses."""
    root = tmp_path / "root"
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)], capture_output=True, text=True, check=False
    )
    assert (child.returncode, child.stderr) == (3, "")
    assert "ulimit" in child.stdout
    assert list(LocalStore(root).list_after("")) == ["shardkit.json"]
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.usefixtures("ordinary_rights")
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreReadOnlyError, match="permission"):
            Repository.create(tmp_path / "root")
    finally:
        tmp_path.chmod(0o700)


def test_read_only_never_writes(tmp_path: Path) -> None:
    build(tmp_path / "root")
    orphan = tmp_path / "root" / "tmp" / "0-0-1-1-0123456789abcdef.tar"
    orphan.write_bytes(b"left over")
    before = sorted((str(path), path.stat().st_mtime_ns) for path in (tmp_path / "root").rglob("*"))
    with substituted(FaultyOperations(errno.EROFS, 0, forever=True, calls=CHANGES)):
        repository = Repository.open(tmp_path / "root", read_only=True)
        repository.log()
        repository.get_object(repository.resolve(), "manifest")
        actions: list[Callable[[], object]] = [
            lambda: repository.put_object(b"x", "tar"),
            lambda: repository.stage_object("tar").__enter__(),
            lambda: repository.commit({"main": None}, message=""),
            lambda: repository.store.put_new("x", b""),
            lambda: repository.store.replace("x", b""),
            lambda: repository.store.delete("x"),
        ]
        for action in actions:
            with pytest.raises(StoreReadOnlyError, match="for reading only"):
                action()
    assert before == sorted((str(path), path.stat().st_mtime_ns) for path in (tmp_path / "root").rglob("*"))
