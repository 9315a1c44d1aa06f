"""The calls of programs to simulated disks, in place of those of the operating system."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable

from shardkit.stores.file_operations import FileOperations, Handle
from tests.simulation.buckets import Faults
from tests.simulation.disks import Disk, File, Folder
from tests.simulation.scheduler import Scheduler

__all__ = ["DiskOperations"]


class DiskOperations(FileOperations):
    """The calls of programs to simulated disks."""

    def __init__(self, disks: Iterable[Disk], scheduler: Scheduler, faults: Faults) -> None:
        self._disks = {disk.path: disk for disk in disks}
        self._scheduler, self._faults = scheduler, faults
        self._open: dict[int, tuple[Disk, File | Folder]] = {}
        self._locks: dict[int, dict[int, tuple[int, bool]]] = {}
        """Number of a file → descriptor → (process, whether it holds the lock alone)."""
        self._last = 1_000_000

    def forget(self) -> None:
        """All processes are gone, and what they had open with them."""
        self._open.clear()
        self._locks.clear()

    # ---- opening

    def open_root(self, path: str) -> Handle:
        disk = self._disk(path)
        self._begin(disk, "open", path)
        return self._handle(disk, disk.root, path)

    def open_directory(self, parent: Handle, name: str) -> Handle:
        disk, node = self._entry(parent, name)
        if not isinstance(node, Folder):
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
        file = File(disk.new_number(), changed_at=self._scheduler.now)
        folder.set(name, file)
        return self._handle(disk, file, parent.child(name))

    def open_shared(self, parent: Handle, name: str) -> Handle:
        if name not in self._folder(parent)[1].entries:
            with contextlib.suppress(FileExistsError):
                return self.create_file(parent, name)
        return self.open_file(parent, name)

    def open_path(self, path: str) -> Handle:
        """Open a file below a root."""
        disk = next(disk for disk in self._disks.values() if path.startswith(f"{disk.path}/"))
        self._begin(disk, "open", path)
        node: File | Folder | None = disk.root
        for part in path.removeprefix(f"{disk.path}/").split("/"):
            node = node.entries.get(part) if isinstance(node, Folder) else None
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", path)
        return self._handle(disk, node, path)

    def make_directory(self, parent: Handle, name: str) -> None:
        disk, folder = self._folder(parent)
        self._begin(disk, "mkdir", parent.child(name), writing=True)
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        folder.set(name, Folder(disk.new_number()))

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

    def write_at(self, file: Handle, data: bytes, offset: int) -> int:
        disk, node = self._file(file)
        self._begin(disk, "write", file.path, writing=True)
        node.data[offset : offset + len(data)] = data
        return len(data)

    def truncate(self, file: Handle, size: int) -> None:
        disk, node = self._file(file)
        self._begin(disk, "truncate", file.path, writing=True)
        del node.data[size:]

    def fsync(self, file: Handle) -> None:
        disk, node = self._file(file)
        self._begin(disk, "fsync", file.path, writing=True)
        node.synced = bytes(node.data)

    def fsync_directory(self, directory: Handle) -> None:
        disk, folder = self._folder(directory)
        self._begin(disk, "fsync", directory.path, writing=True)
        folder.sync()

    # ---- names

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        disk, node = self._entry(source, name)
        _, folder = self._folder(target)
        self._begin(disk, "link", target.child(new_name), writing=True)
        if new_name in folder.entries:
            raise FileExistsError(errno.EEXIST, "exists")
        assert isinstance(node, File)
        node.links += 1
        folder.set(new_name, node)
        disk.saw(target.child(new_name), node, self._scheduler.now)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        disk, node = self._entry(source, name)
        (_, old), (_, new) = self._folder(source), self._folder(target)
        self._begin(disk, "rename", target.child(new_name), writing=True)
        old.set(name, None)
        new.set(new_name, node)
        disk.saw(target.child(new_name), node, self._scheduler.now)

    def unlink(self, directory: Handle, name: str) -> None:
        disk, node = self._entry(directory, name)
        self._begin(disk, "unlink", directory.child(name), writing=True)
        _, folder = self._folder(directory)
        if isinstance(node, File):
            node.links -= 1
        folder.set(name, None)
        disk.saw(directory.child(name), None, self._scheduler.now)

    def names(self, directory: Handle) -> list[tuple[str, bool]]:
        disk, folder = self._folder(directory)
        self._begin(disk, "list", directory.path)
        return [(name, isinstance(node, Folder)) for name, node in folder.entries.items()]

    def stat(self, directory: Handle, name: str) -> os.stat_result:
        return _stat_of(self._entry(directory, name)[1])

    def stat_open(self, file: Handle) -> os.stat_result:
        return _stat_of(self._found(file)[1])

    # ---- locks: of a descriptor, gone with it or with its process

    def try_lock(self, file: Handle) -> bool:
        return self._try(file, alone=True)

    def try_share(self, file: Handle) -> bool:
        return self._try(file, alone=False)

    def _try(self, file: Handle, *, alone: bool) -> bool:
        _, node = self._file(file)
        holders = {
            fd: holder
            for fd, holder in self._locks.get(node.number, {}).items()
            if fd in self._open and self._scheduler.is_alive(holder[0])
        }
        if any(alone or held_alone for fd, (_, held_alone) in holders.items() if fd != file.fd):
            return False
        self._locks[node.number] = {**holders, file.fd: (self._scheduler.process, alone)}
        return True

    # ---- calls

    def _disk(self, path: str) -> Disk:
        disk = self._disks.get(path)
        if disk is None:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)
        return disk

    def _begin(self, disk: Disk, call: str, path: str, *, writing: bool = False) -> None:
        if disk.is_scratch:
            return
        self._scheduler.request(f"{call} {path}")
        if disk.is_down:
            raise OSError(errno.EIO, "the disk does not answer")
        if writing and disk.is_full and call in ("write", "create", "mkdir"):
            raise OSError(errno.ENOSPC, "the disk is full")
        if self._scheduler.happens(self._faults.refused):
            self._scheduler.trace.append("    EIO")
            raise OSError(errno.EIO, "input/output error")

    def _handle(self, disk: Disk, node: File | Folder, path: str) -> Handle:
        self._last += 1
        self._open[self._last] = (disk, node)
        return Handle(self._last, path)

    def _found(self, handle: Handle) -> tuple[Disk, File | Folder]:
        self._scheduler.check_alive()
        found = self._open.get(handle.fd)
        if found is None:
            raise OSError(errno.EBADF, "closed")
        return found

    def _folder(self, handle: Handle) -> tuple[Disk, Folder]:
        disk, node = self._found(handle)
        assert isinstance(node, Folder)
        return disk, node

    def _file(self, handle: Handle) -> tuple[Disk, File]:
        disk, node = self._found(handle)
        assert isinstance(node, File)
        return disk, node

    def _entry(self, parent: Handle, name: str) -> tuple[Disk, File | Folder]:
        disk, folder = self._folder(parent)
        node = folder.entries.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file or directory", parent.child(name))
        return disk, node


def _stat_of(node: File | Folder) -> os.stat_result:
    is_file = isinstance(node, File)
    mode = stat.S_IFREG | 0o644 if is_file else stat.S_IFDIR | 0o755
    size, links = (len(node.data), node.links) if isinstance(node, File) else (0, 2)
    moment = node.changed_at if isinstance(node, File) else 0.0
    return os.stat_result((mode, node.number, 1, links, 0, 0, size, moment, moment, moment))
