"""Finished work of a build, kept where a killed build finds it again.

A record is a small file that appears by rename once the work it tells of is complete, with a checksum in
front; so a SIGKILL at any moment leaves a record whole or not at all. Nothing is synced: after a power cut
the page cache is gone, and what is then found is verified (`JobDirectory.may_have_lost_pages`) or refused by its
checksums.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shardkit.copies.policy.opening import root_store
from shardkit.dataset.creating import scratch_folder
from shardkit.errors import FormatError, IntegrityError, RunError, StoreError
from shardkit.formats import canonical_json
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import Handle, active
from shardkit.stores.local import LocalStore
from shardkit.stores.os_errors import explained
from shardkit.stores.store import Store
from shardkit_tools.building.job_folder import (
    CHECK_BYTES,
    SCRATCH,
    JobFolder,
    LocalFolder,
    StoreFolder,
)

__all__ = ["JobDirectory", "StoreJob", "abandoned_jobs", "clear_temporaries", "open_job", "remove_job"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BEGUN = "begun"
_MAX_RECORD_BYTES = 2**30
_JOB = re.compile(rf"{SCRATCH}/build-[0-9a-f]{{32}}/")


class JobDirectory:
    """The directory of one recipe; held by one build at a time.

    Args:
        parent: where job directories are.
        digest: of the recipe and the source, hex: the same work is found again, other work never.

    Raises:
        RunError: another process works on the same build.
        StoreError: the directory cannot be made.
    """

    def __init__(self, parent: str, digest: str) -> None:
        self.path = f"{parent}/build-{digest[:32]}"
        self.place = self.path
        with explained(f"make the scratch directory {self.path}", writing=True):
            os.makedirs(self.path, exist_ok=True)
            self._lock = self._take_lock()
        try:
            self.may_have_lost_pages = self._look()
        except BaseException:
            self.release()
            raise

    @property
    def folder(self) -> JobFolder:
        """What workers are given."""
        return LocalFolder(self.path)

    def _look(self) -> bool:
        """Whether what is there may lack pages that were never synced."""
        # A boot record that is torn is of a machine that went down, too.
        return self.read("boot") != _boot_id()

    def _take_lock(self) -> Handle:
        root = active().open_root(self.path)
        try:
            with contextlib.suppress(FileExistsError):
                active().close(active().create_file(root, "lock"))
            lock = active().open_file(root, "lock")
        finally:
            active().close(root)
        if not active().try_lock(lock):
            active().close(lock)
            raise RunError(
                f"another process is at work on this very build (it holds {self.path}/lock); wait for it, or "
                "end it"
            )
        return lock

    def read(self, name: str) -> bytes | None:
        """A record, or None where there is none or it is damaged."""
        with explained(f"read {self.path}/{name}"):
            try:
                data = Path(self.path, name).read_bytes()
            except FileNotFoundError:
                return None
        return _body(data)

    def write(self, name: str, data: bytes) -> None:
        """Make a record appear, whole.

        Raises:
            StoreFullError, StoreError: the scratch disk does not take it.
        """
        self.folder.put_record(name, data)

    def note_verified(self) -> None:
        """What is in the directory now is of this boot, or was verified in it."""
        self.write("boot", _boot_id())
        self.may_have_lost_pages = False

    def names(self) -> list[str]:
        """Everything in the directory, sorted."""
        return sorted(os.listdir(self.path))

    def size_of(self, name: str) -> int | None:
        """Bytes of a file, None where it is not there."""
        try:
            return os.stat(f"{self.path}/{name}").st_size
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For the time of one build: finished work outlives whatever interrupts it, and goes once it is committed.

        Raises:
            KeyboardInterrupt: as it came, with a text that says how to go on.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.release()
            raise KeyboardInterrupt(
                f"interrupted; finished work is kept in {self.place}: run the same command again to go on"
            ) from None
        except BaseException:
            self.release_or_discard()
            raise
        self.discard()

    def discard(self) -> None:
        """Remove the directory: the build is committed, or its work is worthless."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def release_or_discard(self) -> None:
        """After an error: keep finished work, but leave nothing behind where there is none."""
        if os.path.isdir(self.path) and self._has_work():
            self.release()
        else:
            self.discard()

    def _has_work(self) -> bool:
        return any(name.endswith((".rows", ".done")) for name in self.names())

    def release(self) -> None:
        """Let another process go on with this build."""
        if self._lock.fd >= 0:
            active().close(self._lock)
            self._lock = Handle(-1, self._lock.path)


class StoreJob(JobDirectory):
    """A job directory whose files are objects of the root, for workers that see no folder of this machine.

    The directory on this machine holds the lock alone: it keeps a second build of this machine away.

    Args:
        parent: see `JobDirectory`.
        digest: see `JobDirectory`.
        store: of the root.

    Raises:
        RunError: another process of this machine works on the same build.
        StoreError: the root cannot be written.
    """

    def __init__(self, parent: str, digest: str, store: Store) -> None:
        self._store = store
        self._prefix = f"{SCRATCH}/build-{digest[:32]}/"
        super().__init__(parent, digest)
        self.place = f"{store.url}/{self._prefix[:-1]}"

    @property
    def folder(self) -> JobFolder:
        """What workers are given."""
        return StoreFolder(self._store, self._prefix)

    def _look(self) -> bool:
        begun = {"begun": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
        self._store.replace(self._prefix + _BEGUN, canonical_json.dumps(begun))
        return False  # an object is durable once it is put

    def read(self, name: str) -> bytes | None:
        """See `JobDirectory`."""
        if self._store.head(self._prefix + name) is None:
            return None
        return _body(self._store.get(self._prefix + name, max_bytes=_MAX_RECORD_BYTES))

    def note_verified(self) -> None:
        """See `JobDirectory`: nothing has to be."""

    def names(self) -> list[str]:
        """See `JobDirectory`."""
        listed = (name.removeprefix(self._prefix) for name in self._store.list_after(self._prefix))
        return sorted(name for name in listed if name != _BEGUN)

    def size_of(self, name: str) -> int | None:
        """See `JobDirectory`."""
        found = self._store.head(self._prefix + name)
        return None if found is None else found.size

    def remove(self, name: str) -> None:
        """See `JobDirectory`."""
        self._store.delete(self._prefix + name)

    def discard(self) -> None:
        """See `JobDirectory`; without the right to delete `gc` is left to do it."""
        super().discard()
        with contextlib.suppress(StoreError):
            remove_job(self._store, self._prefix)

    def release_or_discard(self) -> None:
        """See `JobDirectory`; where the root does not answer, what is there is kept."""
        try:
            has_work = self._has_work()
        except StoreError:
            has_work = True
        if has_work:
            self.release()
        else:
            self.discard()


def open_job(
    repository: Repository, scratch: str | os.PathLike[str] | None, digest: str, *, is_remote: bool
) -> JobDirectory:
    """The job directory of a build: a folder, or objects of the root where workers have no folder in common.

    Args:
        repository: that is built into.
        scratch: folder that the user named; all workers see it then.
        digest: of the recipe and the source.
        is_remote: whether workers may be on other machines.

    Raises:
        RunError: another process works on the same build.
        StoreError: the directory cannot be made.
        UsageError: ``scratch`` does not exist.
    """
    parent = scratch_folder(repository, scratch)
    store = root_store(repository.store)
    if is_remote and scratch is None and not isinstance(store, LocalStore):
        return StoreJob(parent, digest, store)
    return JobDirectory(parent, digest)


def abandoned_jobs(store: Store, older_than_s: float) -> list[str]:
    """Prefixes of builds in a root that were begun so long ago that nobody will go on with them."""
    prefixes = {match.group() for name in store.list_after(f"{SCRATCH}/") if (match := _JOB.match(name))}
    now = dt.datetime.now(dt.UTC)
    return [
        prefix
        for prefix in sorted(prefixes)
        if (begun := _begun(store, prefix)) is None or (now - begun).total_seconds() > older_than_s
    ]


def remove_job(store: Store, prefix: str) -> None:
    """Delete all objects of a build; what says when it was begun goes last, so that a kill on the way is told of.

    Raises:
        StoreError: the store fails, or there is no right to delete.
    """
    names = list(store.list_after(prefix))
    for name in sorted(names, key=lambda name: name == prefix + _BEGUN):
        store.delete(name)


def _begun(store: Store, prefix: str) -> dt.datetime | None:
    """When a build was last started; None where that cannot be read: it is damaged, and nothing can go on."""
    if store.head(prefix + _BEGUN) is None:
        return None
    try:
        record = canonical_json.loads(store.get(prefix + _BEGUN, max_bytes=1_000), 1_000)
        return dt.datetime.fromisoformat(str(record["begun"]))
    except (FormatError, IntegrityError, KeyError, TypeError, ValueError):
        return None


def _body(data: bytes) -> bytes | None:
    """What a record holds, None where it is damaged."""
    body = data[CHECK_BYTES:]
    return body if data[:CHECK_BYTES] == xxhash.xxh3_64_digest(body) else None


def clear_temporaries(repository: Repository) -> None:
    """Remove what workers that died on the way were writing into the root; opening it would do so as well."""
    if isinstance(repository.store, LocalStore):
        repository.store.sweep()


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
