"""A disk in memory, with what a power cut may leave of it.

The weakest rules that POSIX allows, as in `tests.faults.crash_states`: bytes written since a file's last fsync
may be lost, and changes of a directory since its last fsync may each be there or not.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import Final

from shardkit.storage.file_operations import FileOperations, Handle
from tests.simulation.buckets import Bucket, Faults, Stored
from tests.simulation.scheduler import Scheduler

__all__ = ["Disk", "DiskOperations"]

_TEMPORARIES: Final = "tmp"


@dataclass
class _File:
    """Bytes on the disk."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    links: int = 1
    changed_at: float = 0.0


@dataclass
class _Folder:
    """Names on the disk."""

    number: int
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[str, _File | _Folder | None]] = field(default_factory=list)
    """Changes since the last fsync: name → what it came to mean."""
    synced: dict[str, _File | _Folder] = field(default_factory=dict)

    def set(self, name: str, node: _File | _Folder | None) -> None:
        """Give a name a meaning, None for none."""
        self.pending.append((name, node))
        _set(self.entries, name, node)


def _set(entries: dict[str, _File | _Folder], name: str, node: _File | _Folder | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class Disk(Bucket):
    """Where a local location lies, at ``/<name>``; seen from above it is a bucket."""

    def __init__(self, name: str) -> None:
        super().__init__(name, keeps_checksums=False)
        self._numbers = 1
        self.root = _Folder(0)

    def new_number(self) -> int:
        """For a file or folder."""
        self._numbers += 1
        return self._numbers

    def load(self, objects: dict[str, Stored]) -> None:
        """Begin with objects, all of them durable."""
        self.objects = dict(objects)
        for name, stored in objects.items():
            *folders, last = name.split("/")
            folder = self.root
            for part in folders:
                below = folder.synced.get(part)
                if not isinstance(below, _Folder):
                    below = _Folder(self.new_number())
                    folder.synced[part] = folder.entries[part] = below
                folder = below
            file = _File(self.new_number(), bytearray(stored.data), stored.data)
            folder.synced[last] = folder.entries[last] = file

    def damage(self, name: str, data: bytes | None) -> None:
        """Bytes rot, or are gone."""
        *folders, last = name.split("/")
        folder = self.root
        for part in folders:
            below = folder.entries[part]
            assert isinstance(below, _Folder)
            folder = below
        if data is None:
            folder.entries.pop(last)
            folder.synced.pop(last, None)
            folder.pending = [change for change in folder.pending if change[0] != last]
        else:
            file = folder.entries[last]
            assert isinstance(file, _File)
            file.data, file.synced = bytearray(data), data
        super().damage(name, data)

    def saw(self, path: str, node: _File | _Folder | None, now: float) -> None:
        """A name in the tree has come to mean something else: told as of a bucket."""
        name = path.removeprefix(f"/{self.name}/")
        if name.startswith(f"{_TEMPORARIES}/") or isinstance(node, _Folder):
            return
        if node is None:
            self.delete(name)
        else:
            self.put(name, bytes(node.data), None, now)

    def cut_power(self, scheduler: Scheduler) -> None:
        """What was not synced may be lost."""

        def survivors(folder: _Folder) -> None:
            entries = dict(folder.synced)
            for name, node in folder.pending:
                if scheduler.random.random() < 0.5:
                    _set(entries, name, node)
            folder.entries, folder.synced, folder.pending = entries, dict(entries), []
            for node in entries.values():
                if isinstance(node, _Folder):
                    survivors(node)
                elif bytes(node.data) != node.synced:
                    kept = scheduler.random.randrange(len(node.synced), len(node.data) + 1)
                    node.synced = bytes(node.data[:kept])
                    node.data = bytearray(node.synced)

        survivors(self.root)
        before, self.objects = self.objects, {}
        self._project(self.root, "", before)

    def _project(self, folder: _Folder, prefix: str, before: dict[str, Stored]) -> None:
        for name, node in folder.entries.items():
            path = prefix + name
            if isinstance(node, _Folder):
                if path != _TEMPORARIES:
                    self._project(node, f"{path}/", before)
            else:
                same = before.get(path)
                data = bytes(node.data)
                self.objects[path] = same if same and same.data == data else Stored(data, "", None, 0.0)


class DiskOperations(FileOperations):
    """The calls of programs to simulated disks."""

    def __init__(self, disks: dict[str, Disk], scheduler: Scheduler, faults: Faults) -> None:
        self._disks, self._scheduler, self._faults = disks, scheduler, faults
        self._open: dict[int, tuple[Disk, _File | _Folder]] = {}
        self._last = 1_000_000

    def forget(self) -> None:
        """All processes are gone, and what they had open with them."""
        self._open.clear()

    # ---- opening

    def open_root(self, path: str) -> Handle:
        disk = self._disk(path)
        self._begin(disk, "open", path)
        return self._handle(disk, disk.root, path)

    def open_directory(self, parent: Handle, name: str) -> Handle:
        disk, node = self._entry(parent, name)
        if not isinstance(node, _Folder):
            raise OSError(errno.ENOTDIR, "not a directory")
        return self._handle(disk, node, parent.child(name))

    def open_file(self, parent: Handle, name: str) -> Handle:
        disk, node = self._entry(parent, name)
        self._begin(disk, "open", parent.child(name))
        return self._handle(disk, node, parent.child(name))

    def create_file(self, parent: Handle, name: str) -> Handle:
        disk, folder = self._folder(parent)
        self._begin(disk, "create", parent.child(name), writing=True)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        file = _File(disk.new_number(), changed_at=self._scheduler.now)
        folder.set(name, file)
        return self._handle(disk, file, parent.child(name))

    def make_directory(self, parent: Handle, name: str) -> None:
        disk, folder = self._folder(parent)
        self._begin(disk, "mkdir", parent.child(name), writing=True)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        folder.set(name, _Folder(disk.new_number()))

    def close(self, handle: Handle) -> None:
        self._open.pop(handle.fd, None)

    # ---- bytes

    def write(self, file: Handle, data: memoryview) -> int:
        disk, node = self._file(file)
        self._begin(disk, "write", file.path, writing=True)
        taken = len(data)
        if taken > 1 and self._scheduler.happens(self._faults.torn_answer):
            taken = self._scheduler.random.randrange(1, taken)  # as the kernel may
        node.data += data[:taken]
        node.changed_at = self._scheduler.now
        return taken

    def read(self, file: Handle, length: int, offset: int) -> bytes:
        disk, node = self._file(file)
        self._begin(disk, "read", file.path)
        return bytes(node.data[offset : offset + length])

    def read_into(self, file: Handle, buffer: memoryview, offset: int) -> int:
        data = self.read(file, len(buffer), offset)
        buffer[: len(data)] = data
        return len(data)

    def fsync(self, file: Handle) -> None:
        disk, node = self._file(file)
        self._begin(disk, "fsync", file.path, writing=True)
        node.synced = bytes(node.data)

    def fsync_directory(self, directory: Handle) -> None:
        disk, folder = self._folder(directory)
        self._begin(disk, "fsync", directory.path, writing=True)
        for name, node in folder.pending:
            _set(folder.synced, name, node)
        folder.pending = []

    # ---- names

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        disk, node = self._entry(source, name)
        _, folder = self._folder(target)
        self._begin(disk, "link", target.child(new_name), writing=True)
        if new_name in folder.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        assert isinstance(node, _File)
        node.links += 1
        folder.set(new_name, node)
        disk.saw(target.child(new_name), node, self._scheduler.now)
        self._end(disk)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        disk, node = self._entry(source, name)
        (_, old), (_, new) = self._folder(source), self._folder(target)
        self._begin(disk, "rename", target.child(new_name), writing=True)
        old.set(name, None)
        new.set(new_name, node)
        disk.saw(target.child(new_name), node, self._scheduler.now)
        self._end(disk)

    def unlink(self, directory: Handle, name: str) -> None:
        disk, node = self._entry(directory, name)
        self._begin(disk, "unlink", directory.child(name), writing=True)
        _, folder = self._folder(directory)
        if isinstance(node, _File):
            node.links -= 1
        folder.set(name, None)
        disk.saw(directory.child(name), None, self._scheduler.now)
        self._end(disk)

    def names(self, directory: Handle) -> list[tuple[str, bool]]:
        disk, folder = self._folder(directory)
        self._begin(disk, "list", directory.path)
        return [(name, isinstance(node, _Folder)) for name, node in folder.entries.items()]

    def stat(self, directory: Handle, name: str) -> os.stat_result:
        return _stat_of(self._entry(directory, name)[1])

    def stat_open(self, file: Handle) -> os.stat_result:
        return _stat_of(self._found(file)[1])

    # ---- locks: every process of the simulation lives until it is killed, and the sweep asks the system for that

    def try_lock(self, file: Handle) -> bool:
        return True

    # ---- calls

    def _disk(self, path: str) -> Disk:
        disk = self._disks.get(path.strip("/"))
        if disk is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return disk

    def _begin(self, disk: Disk, call: str, path: str, *, writing: bool = False) -> None:
        self._scheduler.request(f"{call} {path}")
        if disk.is_down:
            raise OSError(errno.EIO, "the disk does not answer")
        if writing and disk.is_full and call in ("write", "create", "mkdir"):
            raise OSError(errno.ENOSPC, "the disk is full")
        if self._scheduler.happens(self._faults.refused):
            self._scheduler.trace.append("    EIO")
            raise OSError(errno.EIO, "input/output error")

    def _end(self, disk: Disk) -> None:
        self._scheduler.answered()
        if disk.is_down:
            raise OSError(errno.EIO, "the disk does not answer")

    def _handle(self, disk: Disk, node: _File | _Folder, path: str) -> Handle:
        self._last += 1
        self._open[self._last] = (disk, node)
        return Handle(self._last, path)

    def _found(self, handle: Handle) -> tuple[Disk, _File | _Folder]:
        self._scheduler.check_alive()
        found = self._open.get(handle.fd)
        if found is None:
            raise OSError(errno.EBADF, "closed")
        return found

    def _folder(self, handle: Handle) -> tuple[Disk, _Folder]:
        disk, node = self._found(handle)
        assert isinstance(node, _Folder)
        return disk, node

    def _file(self, handle: Handle) -> tuple[Disk, _File]:
        disk, node = self._found(handle)
        assert isinstance(node, _File)
        return disk, node

    def _entry(self, parent: Handle, name: str) -> tuple[Disk, _File | _Folder]:
        disk, folder = self._folder(parent)
        node = folder.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", parent.child(name))
        return disk, node


def _stat_of(node: _File | _Folder) -> os.stat_result:
    is_file = isinstance(node, _File)
    mode = stat.S_IFREG | 0o644 if is_file else stat.S_IFDIR | 0o755
    size, links = (len(node.data), node.links) if isinstance(node, _File) else (0, 2)
    moment = node.changed_at if isinstance(node, _File) else 0.0
    return os.stat_result((mode, node.number, 1, links, 0, 0, size, moment, moment, moment))
