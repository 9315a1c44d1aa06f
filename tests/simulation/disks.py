"""A disk in memory, with what a power cut may leave of it.

The weakest rules that POSIX allows, as in `tests.faults.crash_states`: bytes written since a file's last fsync
may be lost, and changes of a directory since its last fsync may each be there or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tests.simulation.buckets import Bucket, Stored
from tests.simulation.scheduler import Scheduler

__all__ = ["Disk", "File", "Folder"]

_TEMPORARIES: Final = "tmp"


@dataclass
class File:
    """Bytes on the disk."""

    number: int
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    links: int = 1
    changed_at: float = 0.0


@dataclass
class Folder:
    """Names on the disk."""

    number: int
    entries: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[str, File | Folder | None]] = field(default_factory=list)
    """Changes since the last fsync: name → what it came to mean."""
    synced: dict[str, File | Folder] = field(default_factory=dict)

    def set(self, name: str, node: File | Folder | None) -> None:
        """Give a name a meaning, None for none."""
        self.pending.append((name, node))
        _set(self.entries, name, node)

    def sync(self) -> None:
        """Make the entries durable."""
        for name, node in self.pending:
            _set(self.synced, name, node)
        self.pending = []


def _set(entries: dict[str, File | Folder], name: str, node: File | Folder | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


class Disk(Bucket):
    """Where a local location lies, at ``/simulated/<name>``; seen from above it is a bucket.

    Attributes:
        is_scratch: whether its files are of one process each, so that calls are not interleaved and do not fail.
    """

    def __init__(self, name: str, path: str = "", *, is_scratch: bool = False) -> None:
        super().__init__(name, keeps_checksums=False)
        self.path = path or f"/simulated/{name}"
        self.is_scratch = is_scratch
        self._numbers = 1
        self.root = Folder(0)

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
                if not isinstance(below, Folder):
                    below = Folder(self.new_number())
                    folder.synced[part] = folder.entries[part] = below
                folder = below
            file = File(self.new_number(), bytearray(stored.data), stored.data)
            folder.synced[last] = folder.entries[last] = file

    def damage(self, name: str, data: bytes | None) -> None:
        """Bytes rot, or are gone."""
        *folders, last = name.split("/")
        folder = self.root
        for part in folders:
            below = folder.entries[part]
            assert isinstance(below, Folder)
            folder = below
        if data is None:
            folder.entries.pop(last)
            folder.synced.pop(last, None)
            folder.pending = [change for change in folder.pending if change[0] != last]
        else:
            file = folder.entries[last]
            assert isinstance(file, File)
            file.data, file.synced = bytearray(data), data
        super().damage(name, data)

    def saw(self, path: str, node: File | Folder | None, now: float) -> None:
        """A name in the tree has come to mean something else: told as of a bucket."""
        name = path.removeprefix(f"{self.path}/")
        if name.startswith(f"{_TEMPORARIES}/") or isinstance(node, Folder):
            return
        if node is None:
            self.delete(name)
        else:
            self.put(name, bytes(node.data), None, now)

    def cut_power(self, scheduler: Scheduler) -> None:
        """What was not synced may be lost."""

        def survivors(folder: Folder) -> None:
            entries = dict(folder.synced)
            for name, node in folder.pending:
                if scheduler.random.random() < 0.5:
                    _set(entries, name, node)
            folder.entries, folder.synced, folder.pending = entries, dict(entries), []
            for node in entries.values():
                if isinstance(node, Folder):
                    survivors(node)
                elif bytes(node.data) != node.synced:
                    if len(node.data) >= len(node.synced):
                        kept = scheduler.random.randrange(len(node.synced), len(node.data) + 1)
                        node.synced = bytes(node.data[:kept])
                    elif scheduler.random.random() < 0.5:  # it was cut
                        node.synced = bytes(node.data)
                    node.data = bytearray(node.synced)

        survivors(self.root)
        before, self.objects = self.objects, {}
        self._project(self.root, "", before)

    def _project(self, folder: Folder, prefix: str, before: dict[str, Stored]) -> None:
        for name, node in folder.entries.items():
            path = prefix + name
            if isinstance(node, Folder):
                if path != _TEMPORARIES:
                    self._project(node, f"{path}/", before)
            else:
                same = before.get(path)
                data = bytes(node.data)
                self.objects[path] = same if same and same.data == data else Stored(data, "", None, 0.0)
