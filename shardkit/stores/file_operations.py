"""Every system call by which shardkit reads or changes a local root, in one place.

One owner makes two proofs possible: the crash-state enumerator (`tests/faults/crash_states.py`) records the
calls of the real code and replays what a power cut could leave of them, and the fault drills make any single
call fail. Both substitute the object that `active` returns; nothing else in shardkit opens, writes, links or
removes a store's files. `Directories` opens folders step by step so that no link is followed, and makes them so that
they last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
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

FOLDER: Final = "tmp"
"""Folder of a local root that holds temporaries; on the same file system as the objects, so that `link` works."""

_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OPEN_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block us
_OPEN_SHARED: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Handle(NamedTuple):
    """An open file or directory, and the path by which messages and records name it."""

    fd: int
    path: str

    def child(self, name: str) -> str:
        return f"{self.path}/{name}"


class FileOperations:
    """The calls themselves, thin over `os`: each raises `OSError` as the kernel reports it.

    Entries are named relative to an open directory (``openat`` and its like) and never through a symbolic link, so that
    a directory which is swapped for a link after it was looked at cannot lead out of the root. The umask decides who
    may use what is made.
    """

    def open_root(self, path: str) -> Handle:
        """Open the root directory; the way to it may go through symbolic links, what is inside it may not."""
        return Handle(os.open(path, _OPEN_DIRECTORY), path)

    def open_directory(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent.fd), parent.child(name))

    def open_file(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_READ, dir_fd=parent.fd), parent.child(name))

    def open_path(self, path: str) -> Handle:
        """Open a file by its path, which must not end in a link."""
        return Handle(os.open(path, _OPEN_READ), path)

    def create_file(self, parent: Handle, name: str) -> Handle:
        return Handle(os.open(name, _OPEN_NEW, 0o666, dir_fd=parent.fd), parent.child(name))

    def open_shared(self, parent: Handle, name: str) -> Handle:
        """Open a file that several processes read, append to and lock; made where it is missing."""
        return Handle(os.open(name, _OPEN_SHARED, 0o666, dir_fd=parent.fd), parent.child(name))

    def make_directory(self, parent: Handle, name: str) -> None:
        os.mkdir(name, dir_fd=parent.fd)

    def make_root(self, path: str) -> None:
        os.mkdir(path)

    def write(self, file: Handle, data: memoryview) -> int:
        """Append; may write less than asked, as a full disk makes it do."""
        return os.write(file.fd, data)

    def write_at(self, file: Handle, data: bytes, offset: int) -> int:
        """Write over what is there; only for a few bytes of a file that no store publishes."""
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
        """Give a file a second name; fails where the name is taken, in one step."""
        os.link(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd, follow_symlinks=False)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        """Move a file over whatever has the new name, in one step."""
        os.rename(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd)

    def unlink(self, directory: Handle, name: str) -> None:
        os.unlink(name, dir_fd=directory.fd)

    def stat(self, directory: Handle, name: str) -> os.stat_result:
        """What a name is, without following it."""
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)

    def stat_open(self, file: Handle) -> os.stat_result:
        return os.fstat(file.fd)

    def names(self, directory: Handle) -> list[tuple[str, bool]]:
        """The entries of a directory, unsorted, each with whether it is a directory."""
        with os.scandir(directory.fd) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]

    def try_lock(self, file: Handle) -> bool:
        """Take the file's advisory lock unless another process holds it; the kernel drops it when we die."""
        return _flocked(file, fcntl.LOCK_EX)

    def try_share(self, file: Handle) -> bool:
        """Take the file's advisory lock together with others, unless a process holds it alone."""
        return _flocked(file, fcntl.LOCK_SH)

    def lock(self, file: Handle) -> None:
        """Wait for the file's advisory lock; for locks that are held for moments."""
        fcntl.flock(file.fd, fcntl.LOCK_EX)

    def truncate(self, file: Handle, size: int) -> None:
        os.ftruncate(file.fd, size)

    def close(self, handle: Handle) -> None:
        os.close(handle.fd)


def _flocked(file: Handle, kind: int) -> bool:
    try:
        fcntl.flock(file.fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _fsync(fd: int) -> None:
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:  # macOS: fsync alone leaves the bytes in the drive's own cache
        fcntl.fcntl(fd, full)


_active: FileOperations = FileOperations()


def active() -> FileOperations:
    """The operations that stores use now: the real ones, unless a test has substituted others."""
    return _active


@contextlib.contextmanager
def substituted(operations: FileOperations) -> Iterator[None]:
    """Let all stores of this process, in every thread, use `operations`: for fault drills and records."""
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
    """`length` bytes, fewer only at the end of the file; the kernel hands out at most 2 GiB at a time."""
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
    """The `StoreError` that says what an `OSError` means."""
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
    """Fill `into` from `offset` of a file, which is open for this read alone: what is read is what lies there now."""
    operations = active()
    try:
        file = operations.open_path(path)
        try:
            stat_result = operations.stat_open(file)
            check_regular(stat_result, path)
            found = stat_result.st_size
            if found != file_size:
                raise IntegrityError(
                    f"{path} holds {found} bytes, the manifest says {file_size}; run: shardkit verify"
                )
            done = 0
            while done < len(into):
                got = operations.read_into(file, into[done:], offset + done)
                if not got:
                    raise IntegrityError(
                        f"{path} ends at byte {offset + done}, {file_size} bytes are expected; it was truncated. "
                        "Run: shardkit verify on its dataset"
                    )
                done += got
        finally:
            operations.close(file)
    except ShardkitError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"{path} is gone; run: shardkit verify on its dataset") from None
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
    """Turn every `OSError` of the block into a `StoreError`; shardkit's own errors pass."""
    try:
        yield
    except ShardkitError:
        raise
    except OSError as error:
        raise store_error(error, doing, writing=writing) from error


class Directories:
    """The directories of one root."""

    def __init__(self, root: str) -> None:
        self._root = root
        # Directories whose own entry is known to be durable, so that each is synced once per process.
        self._durable: set[str] = set()

    @property
    def root(self) -> str:
        return self._root

    @contextlib.contextmanager
    def opened(self, components: Sequence[str]) -> Iterator[Handle]:
        """A folder of the root, open for the time of the block; FileNotFoundError where it does not exist.

        Opened step by step, so that no link inside the root is followed.
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
        """A folder of the root, made where it is missing; its entry is durable."""
        folder = self._make(components)
        try:
            yield folder
        finally:
            active().close(folder)

    def _make(self, components: Sequence[str]) -> Handle:
        """Open a folder, making what is missing; every entry on the way is durable when this returns.

        A directory that another process made a moment ago may not be durable yet, hence the sync of the
        parent of each one that this store has not met before. The temporaries' own folder needs none: losing
        it loses nothing.
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
    """Whether a regular file has this name."""
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
    """Refuse links, directories, devices and pipes where an object should be."""
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise StoreError(f"{path} is {what}: expected a plain file; remove it and run: shardkit repair")


def _make_directory(parent: Handle, name: str) -> bool:
    try:
        active().make_directory(parent, name)
    except FileExistsError:
        return False
    return True


def _make_durable_path(path: str) -> None:
    """Make a directory and those above it, each durable in its parent."""
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
