"""System calls that read or change a local root, in one place.

This makes two kinds of test possible. The crash-state enumerator (`tests/faults/crash_states.py`) records the calls of
the real code and replays the states that a power cut could leave. The fault drills make any single call fail. Both
substitute the object that `active` returns, so no other code in shardkit opens, writes, links or removes the files of a
store. `Directories` opens folders one component at a time, so that no link is followed, and creates them durably.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from shardkit.errors import (
    IntegrityError,
    NotFoundError,
    ShardkitError,
    SourceError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)

_LOCK_WAIT_S: Final = 10.0

FOLDER: Final = "tmp"
"""Folder of a local root that holds temporaries; on the same file system as the objects, so that `link` works."""

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block us
_OPEN_SHARED: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Handle(NamedTuple):
    """Open file or directory, and its path for messages and test records."""

    fd: int
    path: str

    def child(self, name: str) -> str:
        return f"{self.path}/{name}"


class FileOperations:
    """Thin wrappers of `os` functions; they raise `OSError` as the kernel reports it.

    Entries are named relative to an open directory (``openat`` and similar) and symbolic links are not followed, so a
    directory that is swapped for a link after a check cannot lead out of the root. The umask sets the access rights of
    new entries.
    """

    def open_root(self, path: str) -> Handle:
        """Open the root directory; its path may contain symbolic links, paths inside it may not."""
        return Handle(os.open(path, _OPEN_DIRECTORY), path)

    def open_directory(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent.fd), parent.child(name))

    def open_file(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_READ, dir_fd=parent.fd), parent.child(name))

    def open_path(self, path: str) -> Handle:
        """Open a file by its path, whose last component must not be a link."""
        return Handle(os.open(path, _OPEN_READ), path)

    def create_file(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_NEW, 0o666, dir_fd=parent.fd), parent.child(name))

    def open_shared(self, parent: Handle, name: str) -> Handle:
        """Open a file that several processes read, append to and lock; create it if missing."""
        return Handle(os.open(name, _OPEN_SHARED, 0o666, dir_fd=parent.fd), parent.child(name))

    def make_directory(self, parent: Handle, name: str) -> None:
        os.mkdir(name, dir_fd=parent.fd)

    def make_root(self, path: str) -> None:
        os.mkdir(path)

    def write(self, file: Handle, data: memoryview) -> int:
        """Append and return the number of bytes written, which is less than asked on a full disk."""
        return os.write(file.fd, data)

    def write_at(self, file: Handle, data: bytes, offset: int) -> int:
        """Overwrite bytes at `offset`; only for short writes to files that no store publishes."""
        return os.pwrite(file.fd, data, offset)

    def read(self, file: Handle, length: int, offset: int) -> bytes:
        """Read at most `length` bytes from `offset`; fewer at the end of the file."""
        return os.pread(file.fd, length, offset)

    def read_into(self, file: Handle, buffer: memoryview, offset: int) -> int:
        """Read at most ``len(buffer)`` bytes from `offset` into `buffer`; 0 at the end of the file."""
        return os.preadv(file.fd, [buffer], offset)

    def fsync(self, file: Handle) -> None:
        _fsync(file.fd)

    def fsync_directory(self, directory: Handle) -> None:
        _fsync(directory.fd)

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        """Give a file a second name atomically; raise FileExistsError if the name exists."""
        os.link(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd, follow_symlinks=False)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        """Move a file atomically, replacing any file of the new name."""
        os.rename(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd)

    def unlink(self, directory: Handle, name: str) -> None:
        os.unlink(name, dir_fd=directory.fd)

    def stat(self, directory: Handle, name: str) -> os.stat_result:
        """Return the status of a name, without following links."""
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)

    def stat_open(self, file: Handle) -> os.stat_result:
        return os.fstat(file.fd)

    def names(self, directory: Handle) -> list[tuple[str, bool]]:
        """Return (name, whether it is a directory) of each entry, unsorted."""
        with os.scandir(directory.fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def try_lock(self, file: Handle) -> bool:
        """Take the file's exclusive lock unless another holds it; the kernel releases it when the process dies."""
        return _try_flock(file, fcntl.LOCK_EX)

    def try_share(self, file: Handle) -> bool:
        """Take the file's shared lock, unless another process holds the exclusive one."""
        return _try_flock(file, fcntl.LOCK_SH)

    def truncate(self, file: Handle, size: int) -> None:
        os.ftruncate(file.fd, size)

    def close(self, handle: Handle) -> None:
        os.close(handle.fd)


def wait_for_lock(take: Callable[[Handle], bool], file: Handle) -> None:
    """Wait until `take` has the lock of a file that other processes hold briefly.

    Raises:
        StoreError: another process has held it for 10 s; a stopped process must not stop all others.
    """
    deadline, pause = time.monotonic() + _LOCK_WAIT_S, 0.0002
    while not take(file):
        if time.monotonic() > deadline:
            raise StoreError(
                f"another process has held the lock of {file.path} for {_LOCK_WAIT_S:.0f} s: it may be stopped; "
                f"continue or end it (fuser {file.path} names it), or choose another directory"
            )
        time.sleep(pause)
        pause = min(0.01, pause * 2)


def _try_flock(file: Handle, kind: int) -> bool:
    try:
        fcntl.flock(file.fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync(fd: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:  # macOS: fsync alone leaves the bytes in the drive's cache
        fcntl.fcntl(fd, full)


_active: FileOperations = FileOperations()


def active() -> FileOperations:
    """Return the operations that stores use: the real ones, unless a test has substituted them."""
    return _active


@contextlib.contextmanager
def substituted(operations: FileOperations) -> Iterator[None]:
    """Make all stores of this process, in every thread, use `operations`; for tests."""
    global _active
    before, _active = _active, operations
    try:
        yield
    finally:
        _active = before


def write_all(file: Handle, data: bytes | memoryview) -> None:
    """Append all of `data`."""
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[active().write(file, rest) :]


def read_exactly(file: Handle, offset: int, length: int) -> bytes:
    """Read `length` bytes, fewer only at the end of the file; one system call returns at most 2 GiB."""
    data = active().read(file, length, offset)
    while data and len(data) < length:
        more = active().read(file, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


_FULL: Final = {
    errno.ENOSPC: "no room is left; make room, then run it again: what was published is kept",
    errno.EDQUOT: "the quota is used up; make room or raise it, then run it again: what was published is kept",
    errno.EFBIG: "the file would be larger than the limit of this process or file system; raise the limit "
    "(ulimit -f)",
}
_READ_ONLY: Final = {
    errno.EROFS: "the file system is mounted read-only; mount it for writing or choose another root",
    errno.EACCES: "permission denied; get the right to write there or choose another root",
    errno.EPERM: "not permitted; get the right to write there or choose another root",
}
_OTHER: Final = {
    errno.EIO: "the disk reports an input/output error; look at the system log, then run it again",
    errno.ELOOP: "it is a symbolic link, and links inside a store are not followed; put the file itself "
    "there",
    errno.EMFILE: "too many files are open in this process; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; close some",
    errno.ESTALE: "the network file system lost the file; mount it again, then run it again",
    errno.EACCES: "permission denied; get the right to read it",
    errno.ENAMETOOLONG: "the path is too long; use a root with a shorter path",
    errno.ENOTDIR: "a part of the path is not a directory; choose another root",
    errno.EMLINK: "the file system refuses a second name for a file; use a root on one that has hard links",
}
_NO_LINKS: Final = (
    "the file system has no hard links, which publishing needs; use a root on another file system"
)


def store_error(error: OSError, doing: str, *, writing: bool) -> StoreError:
    """Return the `StoreError` that explains an `OSError`.

    Args:
        error: the system's error.
        doing: the failed action, such as "write NAME".
        writing: whether the action writes; EACCES and EPERM then mean a read-only store.
    """
    number = error.errno or 0
    if number in _FULL:
        return StoreFullError(f"cannot {doing}: {_FULL[number]}")
    if writing and error.filename2 is not None and number in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        return StoreError(f"cannot {doing}: {_NO_LINKS}")
    if writing and number in _READ_ONLY:
        return StoreReadOnlyError(f"cannot {doing}: {_READ_ONLY[number]}")
    meaning = (
        _OTHER.get(number)
        or f"{os.strerror(number) if number else error}; look at the disk, then run it again"
    )
    return StoreError(f"cannot {doing}: {meaning}")


def read_file(path: str, file_size: int, offset: int, into: memoryview) -> None:
    """Fill `into` with bytes from `offset` of a file, which is opened for each read so that replaced files are seen.

    Args:
        path: path of the file.
        file_size: expected size of the file.
        offset: position of the first byte.
        into: buffer to fill.

    Raises:
        IntegrityError: the file has another size.
        NotFoundError: there is no such file.
        StoreError: the file cannot be read.
    """
    operations = active()
    try:
        file = operations.open_path(path)
        try:
            stat_result = operations.stat_open(file)
            check_regular(stat_result, path)
            found = stat_result.st_size
            if found != file_size:
                raise IntegrityError(
                    f"{path} holds {found} bytes, the manifest says {file_size}; verify its dataset"
                )
            done = 0
            while done < len(into):
                got = operations.read_into(file, into[done:], offset + done)
                if not got:
                    raise IntegrityError(
                        f"{path} ends at byte {offset + done}, {file_size} bytes are expected; it was truncated. "
                        "Verify its dataset"
                    )
                done += got
        finally:
            operations.close(file)
    except ShardkitError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"{path} is gone; verify its dataset") from None
    except OSError as error:
        raise store_error(error, f"read {path}", writing=False) from error


def read_small_file(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the bytes of a file that a user names, such as a list or a configuration.

    Raises:
        NotFoundError: there is no such file.
        SourceError: it is not a regular file, is larger than `max_bytes`, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise SourceError(f"{path} is not a regular file; give a file")
            data = file.read(max_bytes + 1) if found.st_size <= max_bytes else b""
            if max(found.st_size, len(data)) > max_bytes:
                size = max(found.st_size, len(data))
                raise SourceError(f"{path}: {size} bytes, expected at most {max_bytes}")
            return data
    except FileNotFoundError:
        raise NotFoundError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}); check it and its rights") from None


@contextlib.contextmanager
def explained(doing: str, *, writing: bool = False) -> Iterator[None]:
    """Turn `OSError` in the block into `StoreError`; shardkit's own errors pass unchanged."""
    try:
        yield
    except ShardkitError:
        raise
    except OSError as error:
        raise store_error(error, doing, writing=writing) from error


class Directories:
    """Directories of one local root, opened without following links and created durably."""

    def __init__(self, root: str) -> None:
        self._root = root
        # Directories whose entries are known to be durable, so that each is synced once per process.
        self._durable: set[str] = set()

    @property
    def root(self) -> str:
        return self._root

    @contextlib.contextmanager
    def opened(self, components: Sequence[str]) -> Iterator[Handle]:
        """Open a folder of the root for the duration of the block; raise FileNotFoundError if it does not exist.

        Each component is opened in turn, so that no link inside the root is followed.
        """
        folder = active().open_root(self._root)
        for component in components:
            folder = _step(folder, component)
        try:
            yield folder
        finally:
            active().close(folder)

    @contextlib.contextmanager
    def made(self, components: Sequence[str]) -> Iterator[Handle]:
        """Open a folder of the root, creating it durably if missing."""
        folder = self._make(components)
        try:
            yield folder
        finally:
            active().close(folder)

    def _make(self, components: Sequence[str]) -> Handle:
        """Open a folder, creating missing components; all entries on the path are durable when this returns.

        A directory that another process has just created may not be durable yet, so the parent of each directory that
        is new to this store is synced. The folder of temporaries need not be durable.
        """
        operations = active()
        folder = self._make_root()
        path = ""
        for component in components:
            path = f"{path}/{component}"
            try:
                made = _make_directory(folder, component)
                if path != f"/{FOLDER}" and (made or path not in self._durable):
                    operations.fsync_directory(folder)
                    self._durable.add(path)
            except BaseException:
                operations.close(folder)
                raise
            folder = _step(folder, component)
        return folder

    def _make_root(self) -> Handle:
        try:
            return active().open_root(self._root)
        except FileNotFoundError:
            _make_durable_path(self._root)
            return active().open_root(self._root)


def exists(folder: Handle, name: str) -> bool:
    """Return True if a regular file has this name."""
    try:
        found = active().stat(folder, name)
    except FileNotFoundError:
        return False
    check_regular(found, folder.child(name))
    return True


def _step(folder: Handle, component: str) -> Handle:
    """Open a directory inside `folder` and close `folder`."""
    try:
        return active().open_directory(folder, component)
    except NotADirectoryError:
        is_link = stat.S_ISLNK(active().stat(folder, component).st_mode)
        raise StoreError(
            f"{folder.child(component)} is {'a symbolic link' if is_link else 'not a directory'}: links inside a store "
            "are not followed; put the directory itself there"
        ) from None
    finally:
        active().close(folder)


def check_regular(found: os.stat_result, path: str) -> None:
    """Raise StoreError for a link, directory, device or pipe in place of an object."""
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise StoreError(f"{path} is {what}: expected a plain file; remove it and repair its dataset")


def _make_directory(parent: Handle, name: str) -> bool:
    try:
        active().make_directory(parent, name)
    except FileExistsError:
        return False
    return True


def _make_durable_path(path: str) -> None:
    """Create a directory and its missing parents durably."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        _make_durable_path(parent)
    with contextlib.suppress(FileExistsError):
        active().make_root(path)
    folder = active().open_root(parent)
    try:
        active().fsync_directory(folder)
    finally:
        active().close(folder)
