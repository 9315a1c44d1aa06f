"""Finished work of a build, kept where a killed build finds it again.

A record is a small file that appears by rename once the work it tells of is complete, with a checksum in
front; so a SIGKILL at any moment leaves a record whole or not at all. Nothing is synced: after a power cut
the page cache is gone, and what is then found is verified (`JobDirectory.may_have_lost_pages`) or refused by its
checksums.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from shardkit.errors import RunError
from shardkit.storage import LocalStore, Repository
from shardkit.storage.file_operations import Handle, active
from shardkit.storage.os_errors import explained

__all__ = ["JobDirectory", "clear_temporaries"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CHECK_BYTES = 8


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
        with explained(f"make the scratch directory {self.path}", writing=True):
            os.makedirs(self.path, exist_ok=True)
            self._lock = self._take_lock()
        try:
            # A boot record that is torn is of a machine that went down, too.
            self.may_have_lost_pages = self.read("boot") != _boot_id()
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

    def read(self, name: str) -> bytes | None:
        """A record, or None where there is none or it is damaged."""
        with explained(f"read {self.path}/{name}"):
            try:
                data = Path(self.path, name).read_bytes()
            except FileNotFoundError:
                return None
        body = data[_CHECK_BYTES:]
        whole = data[:_CHECK_BYTES] == xxhash.xxh3_64_digest(body)
        return body if whole else None

    def write(self, name: str, data: bytes) -> None:
        """Make a record appear, whole.

        Raises:
            StoreFullError, StoreError: the scratch disk does not take it.
        """
        write_record(self.path, name, data)

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
                f"interrupted; finished work is kept in {self.path}: run the same command again to go on"
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


def write_record(folder: str, name: str, data: bytes) -> None:
    """Make a record appear in a job directory, whole or not at all; any process of the build may."""
    temporary = f"{name}.{os.getpid()}-{secrets.token_hex(4)}.new"
    with explained(f"write {folder}/{name}", writing=True):
        root = active().open_root(folder)
        try:
            file = active().create_file(root, temporary)
            try:
                rest = memoryview(xxhash.xxh3_64_digest(data) + data)
                while rest:
                    rest = rest[active().write(file, rest) :]
            finally:
                active().close(file)
            active().rename(root, temporary, root, name)
        except OSError:
            with contextlib.suppress(OSError):
                active().unlink(root, temporary)
            raise
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
