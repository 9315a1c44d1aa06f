"""Finished work of a build, kept where a killed build finds it again (SPEC.md of shardkit.dataset §6).

A record is a small file that appears by rename once the work it tells of is complete, with a checksum in front; so a
SIGKILL at any moment leaves a record whole or not at all. Nothing is synced: after a power cut the page cache is gone,
and what is then found is verified (`Job.may_have_lost_pages`) or refused by its checksums.

The files are in a folder that all workers see, or objects of the root where they have no folder in common. What travels
to workers is the `JobFolder`: a worker asks it for a place to write a part, hands the part over when it is whole, and
leaves the record last.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shardkit.dataset.scratch import scratch_folder
from shardkit.dataset.scratch_reading import ScratchFolder, pack_record, unpack_record
from shardkit.errors import FormatError, IntegrityError, RunError, StoreError
from shardkit.formats import canonical_json
from shardkit.repository.repository import Repository
from shardkit.stores.file_operations import Handle, active, explained
from shardkit.stores.local import LocalStore, private_folder, temporary_name, writer_is_dead
from shardkit.stores.store import Store, root_store

_SCRATCH = "scratch"  # folder of a root for the scratch of builds over several machines
_MAX_RECORD_BYTES = 2**30
_PIECE_BYTES = 8 * 2**20
_OWN_FOLDER = "travelling"
_BEGUN = "begun"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_JOB = re.compile(rf"{_SCRATCH}/build-[0-9a-f]{{32}}/")


class LocalFolder(ScratchFolder):
    """A folder of this machine, or one that all machines mount; "" keeps nothing."""

    def new_part(self, kind: str) -> str:
        """Name of a part that nobody has; "" where nothing is kept."""
        return f"{kind}-{os.getpid()}-{secrets.token_hex(8)}" if self.path else ""

    def keep(self, part: str) -> int:
        """Take over a part that was written whole; its size in bytes."""
        return os.stat(f"{self.path}/{part}").st_size if part else 0

    def size_of(self, name: str) -> int | None:
        """Bytes of a file, None where it is not there."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(f"{self.path}/{name}").st_size
        return None


NO_FOLDER = LocalFolder("")
"""Keeps nothing: for a dry run."""


@dataclass(frozen=True)
class StoreFolder:
    """Objects of the root below a prefix; parts are written on the worker's own disk and put when they are whole."""

    store: Store  # of the root
    prefix: str  # of the build, ending in "/"

    def __reduce__(self) -> tuple[type[StoreFolder], tuple[Store, str]]:
        return StoreFolder, (self.store, self.prefix)  # another machine has another folder

    @cached_property
    def path(self) -> str:
        """A private folder of this machine, made and cleaned of what dead workers left at the first use."""
        path = os.path.join(private_folder(self.store.url), _OWN_FOLDER)
        with explained(f"make {path}", writing=True):
            os.makedirs(path, exist_ok=True)
            _sweep(path)
        return path

    def new_part(self, kind: str) -> str:
        return temporary_name(kind)  # it says whose it is, so that what a killed worker leaves can be told

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
    """Parts in a store, read by range; nothing is held open."""

    store: Store
    names: Sequence[str]

    def read_into(self, number: int, offset: int, buffer: memoryview) -> None:
        """See `Parts`."""
        if len(buffer):
            buffer[:] = self.store.get_range(self.names[number], offset, len(buffer))

    def close(self) -> None:
        """Nothing is open."""


JobFolder = LocalFolder | StoreFolder
"""Where the files of a build are; picklable."""


class Job:
    """The work of one recipe; held by one build at a time.

    A folder of this machine holds the lock. The files are in it, or objects of the root where workers have no folder in
    common: then the lock keeps a second build of this machine away.

    Args:
        repository: that is built into.
        scratch: folder that the user named; all workers see it then.
        digest: of the recipe and the source, hex: the same work is found again, other work never.
        is_remote: whether workers may be on other machines.

    Raises:
        RunError: another process works on the same build.
        StoreError: the folder cannot be made, or the root cannot be written.
        UsageError: ``scratch`` does not exist.
    """

    def __init__(
        self, repository: Repository, scratch: str | os.PathLike[str] | None, digest: str, *, is_remote: bool
    ) -> None:
        name, store = f"build-{digest[:32]}", root_store(repository.store)
        self.path = f"{scratch_folder(repository, scratch)}/{name}"
        self.is_local = not is_remote or scratch is not None or isinstance(store, LocalStore)
        remote = StoreFolder(store, f"{_SCRATCH}/{name}/")
        self.folder: JobFolder = LocalFolder(self.path) if self.is_local else remote
        self.may_have_lost_pages = False  # an object is durable once it is put
        with explained(f"make the scratch directory {self.path}", writing=True):
            os.makedirs(self.path, exist_ok=True)
            self._lock = self._take_lock()
        try:
            if self.is_local:  # a boot record that is torn is of a machine that went down, too
                self.may_have_lost_pages = self.folder.read("boot") != _boot_id()
            else:
                begun = {"begun": dt.datetime.now(dt.UTC).isoformat(timespec="seconds")}
                store.replace(remote.prefix + _BEGUN, canonical_json.dumps(begun))
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
        """What is in the folder now is of this boot, or was verified in it."""
        if self.is_local:
            self.folder.put_record("boot", _boot_id())
            self.may_have_lost_pages = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For the time of one build: finished work outlives whatever interrupts it, and goes once it is committed."""
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
            else:  # leave nothing behind
                self.discard()
            raise
        self.discard()

    def discard(self) -> None:
        """Remove everything: the build is committed, or its work is worthless."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(self.folder, StoreFolder):
            with contextlib.suppress(StoreError):  # without the right to delete `gc` is left to do it
                remove_job(self.folder.store, self.folder.prefix)

    def _has_work(self) -> bool:
        try:
            return any(name.endswith((".rows", ".done")) for name in self.folder.names())
        except FileNotFoundError:
            return False
        except StoreError:
            return True  # the root does not answer: what is there is kept

    def release(self) -> None:
        """Let another process go on with this build."""
        if self._lock.fd >= 0:
            active().close(self._lock)
            self._lock = Handle(-1, self._lock.path)


def abandoned_jobs(store: Store, older_than_s: float) -> list[str]:
    """Prefixes of builds in a root that were begun so long ago that nobody will go on with them."""
    prefixes = {match.group() for name in store.list_after(f"{_SCRATCH}/") if (match := _JOB.match(name))}
    now = dt.datetime.now(dt.UTC)
    return [
        prefix
        for prefix in sorted(prefixes)
        if (begun := _begun(store, prefix)) is None or (now - begun).total_seconds() > older_than_s
    ]


def remove_job(store: Store, prefix: str) -> None:
    """Delete all objects of a build; what says when it was begun goes last, so that a kill on the way is told of."""
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
    """Remove what workers that died on the way were writing into the root; opening it would do so as well."""
    if isinstance(repository.store, LocalStore):
        repository.store.sweep()


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
