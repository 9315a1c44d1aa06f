"""A store in a local directory, or on a mounted network file system (SPEC.md §3 says what is assumed of it).

Publishing: ``O_EXCL`` temporary in ``ROOT/tmp`` → write loop → fsync → link to the final name → fsync of the directory →
unlink of the temporary. A name therefore appears in one step with all its bytes durable, and never changes hands.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from shardkit.errors import IntegrityError, NotFoundError, StoreError, StoreReadOnlyError, UsageError
from shardkit.storage import temporaries
from shardkit.storage.file_operations import FileOperations, Handle, active
from shardkit.storage.os_errors import explained
from shardkit.storage.store import ObjectStat, check_name, check_prefix

__all__ = ["LocalStage", "LocalStore"]


class LocalStore:
    """Objects as files below one directory; implements `shardkit.storage.store.Store`.

    Keeps no descriptor open between calls: it may be used from any thread, after a fork, and pickled.

    Args:
        root: The directory; made when the first object is put.
        read_only: Refuse every change, and do not sweep.
    """

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._read_only = read_only
        # Directories whose own entry is known to be durable, so that each is synced once per process.
        self._durable: set[str] = set()
        if not read_only:
            self.sweep()

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r}, read_only={self._read_only})"

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._root, self._read_only)

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return self._root

    @property
    def read_only(self) -> bool:
        """Whether changes are refused."""
        return self._read_only

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object; see `Store.get`."""
        with self._reading(name) as file:
            size = active().stat_open(file).st_size
            if size > max_bytes:
                raise IntegrityError(
                    f"{name} in {self._root}: {size} bytes, expected at most {max_bytes}; run: shardkit verify {self._root}"
                )
            data = _read_exactly(file, 0, size)
        return self._whole(name, data, size)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Part of an object; see `Store.get_range`."""
        return self.get_ranges(name, [(offset, length)])[0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Parts of an object, opened once; see `Store.get_ranges`."""
        with self._reading(name) as file:
            size = active().stat_open(file).st_size
            for offset, length in ranges:
                _check_range(name, self._root, size, offset, length)
            parts = [_read_exactly(file, offset, length) for offset, length in ranges]
        for part, (_, length) in zip(parts, ranges, strict=True):
            self._whole(name, part, length)
        return parts

    def head(self, name: str) -> ObjectStat | None:
        """Size of an object; see `Store.head`."""
        try:
            with self._reading(name) as file:
                return ObjectStat(active().stat_open(file).st_size, None)
        except NotFoundError:
            return None

    def local_path(self, name: str) -> Path | None:
        """The object's file; see `Store.local_path`."""
        return None if self.head(name) is None else Path(self._root, name)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Names in byte order; see `Store.list_after`."""
        components = check_prefix(prefix)
        with explained(f"list {prefix or 'objects'} in {self._root}"):
            try:
                folder = self._open_folder(components)
            except FileNotFoundError:
                return
            try:
                names = active().names(folder)
            finally:
                active().close(folder)
        # A folder sorts with its slash: "a-b" comes before "a/x", as in an object store.
        for name in sorted(f"{prefix}{name}/" if is_folder else prefix + name for name, is_folder in names):
            if not _is_listed(name):
                continue
            if name.endswith("/"):
                if name > after or after.startswith(name):
                    yield from self.list_after(name, after)
            elif name > after:
                yield name

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        """Create, durably and never over another; see `Store.put_new`."""
        components = check_name(name)
        self._check_writable(name)
        with explained(f"write {name} in {self._root}", writing=True):
            folder = self._make_folder(components[:-1])
            try:
                if self._exists(folder, components[-1]):
                    active().fsync_directory(folder)  # whoever linked it may not have come that far yet
                    return False
                with self.stage() as stage:
                    stage.write(data)
                    return stage.publish_into(folder, components[-1], replace=False)
            finally:
                active().close(folder)

    def replace(self, name: str, data: bytes) -> None:
        """Put good bytes over bad ones, in one step; see `Store.replace`."""
        with self.stage() as stage:
            stage.write(data)
            stage.publish(name, replace=True)

    def delete(self, name: str) -> None:
        """Remove, durably; see `Store.delete`."""
        components = check_name(name)
        self._check_writable(name)
        with explained(f"delete {name} in {self._root}", writing=True):
            try:
                folder = self._open_folder(components[:-1])
            except FileNotFoundError:
                return
            try:
                with contextlib.suppress(FileNotFoundError):
                    active().unlink(folder, components[-1])
                active().fsync_directory(folder)
            finally:
                active().close(folder)

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[LocalStage]:
        """A large object, written piece by piece; see `Store.stage`."""
        self._check_writable(suffix or "an object")
        with explained(f"make a temporary file in {self._root}/{temporaries.FOLDER}", writing=True):
            folder = self._make_folder((temporaries.FOLDER,))
            try:
                stage = LocalStage(self, folder, suffix)
            except BaseException:
                active().close(folder)
                raise
        try:
            yield stage
        finally:
            stage.drop()
            active().close(folder)

    def sweep(self) -> int:
        """Remove temporaries of dead processes; the number removed. What cannot be swept now is left for later."""
        swept = 0
        try:
            folder = self._open_folder((temporaries.FOLDER,))
        except OSError:
            return 0
        try:
            for name, _ in active().names(folder):
                with contextlib.suppress(OSError):
                    if temporaries.writer_is_dead(active(), folder, name):
                        active().unlink(folder, name)
                        swept += 1
        except OSError:
            return swept  # housekeeping: a disk that fails will say so when something is written
        finally:
            active().close(folder)
        return swept

    # Directories

    def _open_folder(self, components: Sequence[str]) -> Handle:
        """Open a folder step by step, so that no link inside the root is followed."""
        folder = active().open_root(self._root)
        for component in components:
            folder = _step(folder, component)
        return folder

    def _make_folder(self, components: Sequence[str]) -> Handle:
        """Open a folder, making what is missing; every entry on the way is durable when this returns.

        A directory that another process made a moment ago may not be durable yet, hence the sync of the parent of each
        one that this store has not met before. The temporaries' own folder needs none: losing it loses nothing.
        """
        operations = active()
        folder = self._make_root()
        path = ""
        for component in components:
            path = f"{path}/{component}"
            try:
                made = _make_directory(folder, component)
                if path != f"/{temporaries.FOLDER}" and (made or path not in self._durable):
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

    def _exists(self, folder: Handle, name: str) -> bool:
        try:
            found = active().stat(folder, name)
        except FileNotFoundError:
            return False
        _check_regular(found, folder.child(name))
        return True

    # Files

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Handle]:
        components = check_name(name)
        with explained(f"read {name} in {self._root}"):
            try:
                folder = self._open_folder(components[:-1])
                try:
                    file = active().open_file(folder, components[-1])
                finally:
                    active().close(folder)
            except FileNotFoundError:
                self._not_found(name)
            try:
                _check_regular(active().stat_open(file), file.path)
                yield file
            finally:
                active().close(file)

    def _not_found(self, name: str) -> NoReturn:
        raise NotFoundError(
            f"{name} is not in {self._root}; check the path, or run: shardkit verify {self._root}"
        ) from None

    def _whole(self, name: str, data: bytes, expected: int) -> bytes:
        if len(data) != expected:
            raise IntegrityError(
                f"{name} in {self._root}: {len(data)} bytes where {expected} were expected, it shrank while it was read; "
                f"run: shardkit verify {self._root}"
            )
        return data

    def _check_writable(self, name: str) -> None:
        if self._read_only:
            raise StoreReadOnlyError(
                f"cannot write {name}: {self._root} was opened for reading only; open it for writing"
            )


class LocalStage:
    """One temporary file on its way to a name; implements `shardkit.storage.store.Stage`."""

    def __init__(self, store: LocalStore, folder: Handle, suffix: str) -> None:
        self._store = store
        self._folder = folder
        self._name = temporaries.temporary_name(suffix)
        self._size = 0
        self._hash = hashlib.sha256()
        self._broken = False
        self._file = active().create_file(folder, self._name)
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the sweep then goes by process alone
            active().try_lock(self._file)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._size

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, as hex."""
        return self._hash.hexdigest()

    def write(self, data: bytes | bytearray | memoryview, /) -> int:
        """Append all of `data`; see `Stage.write`."""
        view = memoryview(data).cast("B")
        with explained(f"write {self._file.path}", writing=True):
            self._check_whole()
            self._broken = True
            rest = view
            while len(rest):  # a full disk takes a part and reports no error: only the next call does
                written = active().write(self._file, rest)
                self._hash.update(rest[:written])
                rest = rest[written:]
            self._broken = False
        self._size += len(view)
        return len(view)

    def publish(self, name: str, *, replace: bool = False) -> bool:
        """Make the bytes durable, then give them their name; see `Stage.publish`."""
        components = check_name(name)
        store = self._store
        with explained(f"write {name} in {store.url}", writing=True):
            folder = store._make_folder(components[:-1])  # noqa: SLF001 (one unit, split for reading)
            try:
                return self.publish_into(folder, components[-1], replace=replace)
            finally:
                active().close(folder)

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
            # A network file system may repeat a request whose answer was lost and then report that the name exists: the
            # link count tells whether the name is ours.
            if active().stat_open(self._file).st_nlink == 2:
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    def _check_whole(self) -> None:
        if self._broken:
            raise StoreError(
                f"{self._file.path}: an earlier write failed, the file is incomplete; start it again"
            )


def _reopen(root: str, read_only: bool) -> LocalStore:
    store = LocalStore(root, read_only=True)  # unpickling never sweeps: only opening does
    store._read_only = read_only  # noqa: SLF001
    return store


def _is_listed(name: str) -> bool:
    """Whether a directory entry is an object's name: foreign files and temporaries are not ours to show."""
    try:
        check_name(name.removesuffix("/"))
    except UsageError:
        return False
    return True


def _step(folder: Handle, component: str) -> Handle:
    """Open a directory inside `folder` and close `folder`."""
    try:
        return active().open_directory(folder, component)
    except NotADirectoryError:
        _refuse_entry(folder, component)
    finally:
        active().close(folder)


def _refuse_entry(folder: Handle, component: str) -> NoReturn:
    path = folder.child(component)
    found = active().stat(folder, component)
    what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
    raise StoreError(
        f"{path} is {what}: links inside a store are not followed; put the directory itself there"
    )


def _check_regular(found: os.stat_result, path: str) -> None:
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


def _check_range(name: str, root: str, size: int, offset: int, length: int) -> None:
    if offset < 0 or length < 0:
        raise UsageError(f"{name}: range ({offset}, {length}): expected an offset and a length of 0 or more")
    if offset + length > size:
        raise IntegrityError(
            f"{name} in {root}: {size} bytes, expected at least {offset + length}; run: shardkit repair {root}"
        )


def _read_exactly(file: Handle, offset: int, length: int) -> bytes:
    """`length` bytes, fewer only at the end of the file; the kernel hands out at most 2 GiB at a time."""
    operations: FileOperations = active()
    data = operations.read(file, length, offset)
    if len(data) == length:
        return data
    parts = [data]
    done = len(data)
    while data and done < length:
        data = operations.read(file, length - done, offset + done)
        parts.append(data)
        done += len(data)
    return b"".join(parts)
