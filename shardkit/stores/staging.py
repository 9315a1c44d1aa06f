"""Files that are still being written: how one gets its name, and the sweep of those whose writer is dead.

A temporary is named ``<boot>-<pid namespace>-<pid>-<start>-<random>[.suffix]``, and its writer holds an
advisory lock on it. Sweeping too much costs the writer a clean error and nothing else (publishing links the
temporary by name), but it would be rude; sweeping too little costs space.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from shardkit.errors import StoreError
from shardkit.stores.file_operations import Directories, FileOperations, Handle, active, explained
from shardkit.stores.store import check_name

_FOREIGN_GRACE_S: Final = 24 * 3600
_NAME: Final = re.compile(r"([0-9a-z]+)-([0-9a-z]+)-([0-9]+)-([0-9]+)-[0-9a-f]{16}(?:\.[a-z0-9.]+)?")


def temporary_name(suffix: str = "") -> str:
    """A new name that says which process of which boot writes it."""
    pid = os.getpid()
    tail = f".{suffix}" if suffix else ""
    return f"{_boot()}-{_pid_namespace()}-{pid}-{_start_time(pid) or 0}-{secrets.token_hex(8)}{tail}"


def private_folder(url: str) -> str:
    """A local folder for scratch files of work on a remote root: the same one each time, nobody else's.

    Raises:
        StoreError: Its place is taken by something that another user could write to.
    """
    parent = os.path.join(tempfile.gettempdir(), f"shardkit-{os.getuid()}")
    with explained(f"make {parent}", writing=True):
        with contextlib.suppress(FileExistsError):
            os.mkdir(parent, 0o700)
        found = os.lstat(parent)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StoreError(
            f"{parent} is not a private directory of this user; remove it, or name a scratch directory"
        )
    return os.path.join(parent, hashlib.sha256(url.encode()).hexdigest()[:16])


def writer_is_dead(operations: FileOperations, folder: Handle, name: str) -> bool:
    """Whether the process that wrote this temporary certainly is gone.

    A writer of this boot and this process namespace is looked up. Any other may be one of an earlier boot or
    one on another machine or in another container: it counts as dead only when nobody holds the file's lock
    and the file has not been written to for a day.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False  # not ours: leave it alone
    boot, namespace, pid, start = match.group(1), match.group(2), int(match.group(3)), int(match.group(4))
    if (boot, namespace) == (_boot(), _pid_namespace()):
        return not _is_alive(pid, start)
    file = operations.open_file(folder, name)
    try:
        idle_s = time.time() - operations.stat_open(file).st_mtime
        return idle_s > _FOREIGN_GRACE_S and operations.try_lock(file)
    finally:
        operations.close(file)


def _is_alive(pid: int, start: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # alive, and somebody else's
    now = _start_time(pid)
    # A start time tells the writer from a later process that was given its number.
    return now is None or start in (0, now)


@functools.cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip().replace("-", "")
    with contextlib.suppress(OSError, ValueError, ArithmeticError):
        return f"up{int(time.time() - time.monotonic()) // 60}"  # no /proc (macOS): the minute of the boot
    return "unknown"


@functools.cache
def _pid_namespace() -> str:
    try:
        return "".join(character for character in os.readlink("/proc/self/ns/pid") if character.isdigit())
    except OSError:
        return "0"


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which a process started, None where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # Field 22 of proc_pid_stat(5); the second field is the command in brackets and may hold anything.
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


class StagedFile(abc.ABC):
    """An object on its way into a store, in a local file: counted and hashed, refused once a write has failed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._size = 0
        self._hash = hashlib.sha256()
        self._broken = False

    @property
    def size(self) -> int:
        return self._size

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        rest = memoryview(data).cast("B")
        length = len(rest)
        with explained(f"write {self._path}", writing=True):
            self._check_whole()
            self._broken = True
            while len(rest):  # a full disk takes a part and reports no error: only the next call does
                written = self._append(rest)
                self._hash.update(rest[:written])
                rest = rest[written:]
            self._broken = False
        self._size += length
        return length

    @abc.abstractmethod
    def _append(self, data: memoryview) -> int:
        """Write at least a part of `data`; how much."""

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError(f"{self._path}: an earlier write failed, the file is incomplete; start it again")


class LocalStage(StagedFile):
    """A file beside the objects of a local root, published by its name; implements `shardkit.stores.store.Stage`."""

    def __init__(self, directories: Directories, folder: Handle, suffix: str) -> None:
        self._directories = directories
        self._folder = folder
        self._name = temporary_name(suffix)
        self._file = active().create_file(folder, self._name)
        super().__init__(self._file.path)
        # a file system without locks: the sweep then goes by process alone
        with contextlib.suppress(OSError):
            active().try_lock(self._file)

    def _append(self, data: memoryview) -> int:
        return active().write(self._file, data)

    def sync(self) -> None:
        """Make durable what was written so far; another thread may write meanwhile.

        Raises:
            StoreError: the disk does not take it. An error is reported once only, so that it must not be passed over:
                a later sync might find nothing left to complain about.
        """
        with explained(f"write {self._file.path}", writing=True):
            active().fsync(self._file)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Make the bytes durable, then give them their name; see `Stage.publish`."""
        components = check_name(name)
        directories = self._directories
        with (
            explained(f"write {name} in {directories.root}", writing=True),
            directories.made(components[:-1]) as folder,
        ):
            return self.publish_into(folder, components[-1], replace=replace)

    def publish_into(self, folder: Handle, name: str, *, replace: bool) -> bool:
        """`publish` into a folder that is open and durable already."""
        operations = active()
        self._check_whole()
        operations.fsync(self._file)
        if replace:
            operations.rename(self._folder, self._name, folder, name)
            created = True
        else:
            created = self._link(folder, name)
        operations.fsync_directory(folder)
        return created

    def drop(self) -> None:
        """Close and remove the temporary; a published name stays. What cannot be removed is swept later."""
        with contextlib.suppress(OSError):
            active().unlink(self._folder, self._name)
        with contextlib.suppress(OSError):
            active().close(self._file)

    def _link(self, folder: Handle, name: str) -> bool:
        try:
            active().link(self._folder, self._name, folder, name)
        except OSError as error:
            # A network file system may repeat a request whose answer was lost and then report that the name
            # exists: the link count tells whether the name is ours.
            if active().stat_open(self._file).st_nlink == 2:
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True
