"""Store finished work of a build, for the next run after a kill (SPEC.md of shardkit.dataset §6).

A record is a small file with a checksum in front. It appears by rename once its work is complete, so after a
SIGKILL a record is complete or absent. Nothing is synced: after a power failure, files are verified
(`Job.may_have_lost_pages`) or refused by their checksums.

The files are in a folder that all workers see, or objects of the root if workers share no folder. Workers get
the `JobFolder`: they ask it for a new part, hand the part over when it is complete, and write the record
last.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shardkit.dataset.scratch import ScratchFolder, pack_record, scratch_folder, unpack_record
from shardkit.documents import decode_plain, encode
from shardkit.errors import FormatError, IntegrityError, RunError, StoreError
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import Handle, active, explained
from shardkit.stores.local import LocalStore, private_folder, temporary_name, writer_is_dead
from shardkit.stores.store import Store, root_store

_SCRATCH = "scratch"  # folder of a root for the scratch of builds on several machines
_MAX_RECORD_BYTES = 2**30
_PIECE_BYTES = 8 * 2**20
_OWN_FOLDER = "travelling"
_BEGUN = "begun"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_JOB = re.compile(rf"{_SCRATCH}/build-[0-9a-f]{{32}}/")


NO_FOLDER = ScratchFolder("")
"""Stores nothing; for dry runs."""


@dataclass(frozen=True)
class StoreFolder:
    """Objects of the root below a prefix; parts are written to local disk and uploaded when complete."""

    store: Store  # store of the root
    prefix: str  # prefix of the build, ending in "/"

    def __reduce__(self) -> tuple[type[StoreFolder], tuple[Store, str]]:
        return StoreFolder, (self.store, self.prefix)  # the cached `path` is valid on this machine only

    @cached_property
    def path(self) -> str:
        """Private folder of this machine; the first use creates it and removes files of dead workers."""
        path = os.path.join(private_folder(self.store.url), _OWN_FOLDER)
        with explained(f"make {path}", writing=True):
            os.makedirs(path, exist_ok=True)
            _sweep(path)
        return path

    def new_part(self, kind: str) -> str:
        return temporary_name(kind)  # names the writer, so that files of killed workers are recognised

    def keep(self, part: str) -> int:
        path = f"{self.path}/{part}"
        try:
            with (
                explained(f"read {path}"),
                open(path, "rb") as file,
                self.store.stage("part") as stage,
            ):
                while piece := file.read(_PIECE_BYTES):
                    stage.write(piece)
                stage.publish(self.prefix + part)
                return stage.size
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def parts(self, names: Sequence[str]) -> _StoreParts:
        return _StoreParts(self.store, [self.prefix + name for name in names])

    def put_record(self, name: str, data: bytes) -> None:
        self.store.replace(self.prefix + name, pack_record(data))

    def read(self, name: str) -> bytes | None:
        if self.store.head(self.prefix + name) is None:
            return None
        return unpack_record(self.store.get(self.prefix + name, max_bytes=_MAX_RECORD_BYTES))

    def names(self) -> list[str]:
        listed = (name.removeprefix(self.prefix) for name in self.store.list_after(self.prefix))
        return [name for name in listed if name != _BEGUN]

    def size_of(self, name: str) -> int | None:
        found = self.store.head(self.prefix + name)
        return None if found is None else found.size

    def remove(self, name: str) -> None:
        self.store.delete(self.prefix + name)


class _StoreParts(NamedTuple):
    """Parts in a store, read by range."""

    store: Store
    names: Sequence[str]

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        """See `Parts`."""
        if len(buffer):
            buffer[:] = self.store.get_range(self.names[number], offset, len(buffer))

    def close(self) -> None:
        """Do nothing."""


JobFolder = ScratchFolder | StoreFolder
"""Location of a build's files; picklable."""


class Job:
    """The finished work of one recipe; held by one build at a time.

    A folder of this machine holds the lock. The files are in that folder, or objects of the root if workers
    share no folder; the lock then excludes only other builds on this machine.

    Args:
        repository: destination of the build.
        scratch: folder given by the user; all workers see it.
        digest: hex digest of recipe and source, which identifies the work.
        is_remote: whether workers may be on other machines.

    Raises:
        RunError: Another process works on the same build.
        StoreError: The folder cannot be created, or the root cannot be written.
        UsageError: ``scratch`` does not exist.
    """

    def __init__(
        self, repository: Repository, scratch: str | os.PathLike[str] | None, digest: str, *, is_remote: bool
    ) -> None:
        name, store = f"build-{digest[:32]}", root_store(repository.store)
        self.path = f"{scratch_folder(repository, scratch)}/{name}"
        self.is_local = not is_remote or scratch is not None or isinstance(store, LocalStore)
        remote = StoreFolder(store, f"{_SCRATCH}/{name}/")
        self.folder: JobFolder = ScratchFolder(self.path) if self.is_local else remote
        self.may_have_lost_pages = False  # objects are durable once they are put
        with explained(f"make the scratch directory {self.path}", writing=True):
            os.makedirs(self.path, exist_ok=True)
            self._lock = self._take_lock()
        try:
            if self.is_local:  # a damaged boot record also means that the machine went down
                self.may_have_lost_pages = self.folder.read("boot") != _boot_id()
            else:
                begun = {"begun": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
                store.replace(remote.prefix + _BEGUN, encode(begun))
        except BaseException:
            self.release()
            raise

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

    def note_verified(self) -> None:
        """Record that all files in the folder are from this boot, or were verified during it."""
        if self.is_local:
            self.folder.put_record("boot", _boot_id())
            self.may_have_lost_pages = False

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Hold the work during one build: it is kept after an interruption and removed after the commit."""
        try:
            yield
        except KeyboardInterrupt:
            self.release()
            folder = self.folder
            place = (
                f"{folder.store.url}/{folder.prefix[:-1]}" if isinstance(folder, StoreFolder) else self.path
            )
            raise KeyboardInterrupt(
                f"interrupted; finished work is kept in {place}: run the same command again to go on"
            ) from None
        except BaseException:
            if self._has_work():
                self.release()
            else:  # nothing worth keeping
                self.discard()
            raise
        self.discard()

    def discard(self) -> None:
        """Remove all files: the build is committed, or its work is worthless."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(self.folder, StoreFolder):
            with contextlib.suppress(StoreError):  # without permission to delete, it is left to `gc`
                remove_job(self.folder.store, self.folder.prefix)

    def _has_work(self) -> bool:
        try:
            return any(name.endswith((".rows", ".done")) for name in self.folder.names())
        except FileNotFoundError:
            return False
        except StoreError:
            return True  # the root does not answer: keep the work

    def release(self) -> None:
        """Release the lock, so that another process can continue this build."""
        if self._lock.fd >= 0:
            active().close(self._lock)
            self._lock = Handle(-1, self._lock.path)


def abandoned_jobs(store: Store, older_than_s: float) -> list[str]:
    """Return prefixes of builds in a root that were begun more than ``older_than_s`` ago, or have no start."""
    prefixes = {match.group() for name in store.list_after(f"{_SCRATCH}/") if (match := _JOB.match(name))}
    now = dt.datetime.now(dt.UTC)
    return [
        prefix
        for prefix in sorted(prefixes)
        if (begun := _start_time(store, prefix)) is None or (now - begun).total_seconds() > older_than_s
    ]


def remove_job(store: Store, prefix: str) -> None:
    """Delete all objects of a build; the record of its start last, so that a killed deletion is noticed."""
    names = list(store.list_after(prefix))
    for name in sorted(names, key=lambda name: name == prefix + _BEGUN):
        store.delete(name)


def _start_time(store: Store, prefix: str) -> dt.datetime | None:
    """Return when a build was last started, or None if the record is missing or damaged."""
    if store.head(prefix + _BEGUN) is None:
        return None
    try:
        record = decode_plain(store.get(prefix + _BEGUN, max_bytes=1_000), max_bytes=1_000)
        return dt.datetime.fromisoformat(str(record["begun"]))
    except (FormatError, IntegrityError, KeyError, TypeError, ValueError):
        return None


def _sweep(path: str) -> None:
    root = active().open_root(path)
    try:
        for name in os.listdir(path):
            with contextlib.suppress(OSError):
                if writer_is_dead(active(), root, name):
                    active().unlink(root, name)
    finally:
        active().close(root)


def clear_temporaries(repository: Repository) -> None:
    """Remove temporary files of dead workers from the root, as opening it would."""
    if isinstance(repository.store, LocalStore):
        repository.store.sweep()


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
