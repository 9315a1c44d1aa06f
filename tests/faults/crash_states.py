"""What a power cut may leave of a sequence of file operations: recorded from the real code, then enumerated.

After Pillai et al., "All file systems are not created equal" (OSDI 2014, ALICE), under the weakest rules that POSIX
allows: bytes written since a file's last fsync may be absent, partly there or all there; changes to a directory since
its last fsync may each be there or not, in any combination; an fsync of a file says nothing of its name.

`RecordingOperations` stands in for `shardkit.stores.file_operations` and notes what the code did; a test notes
with `acknowledge` what the caller was promised. `crash_states` then gives every distinct state that a power cut at any
moment can leave, each with the promises made until then. A test writes each state to disk, opens it with the real code
and checks the promises. A recorder that skips one fsync must make that test fail: so it is known to bite.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.stores.file_operations import FileOperations, Handle

__all__ = ["CrashState", "Operation", "RecordingOperations", "crash_states", "write_state"]


@dataclass(frozen=True, slots=True)
class Operation:
    """One change, fsync or promise, in the order in which they happened."""

    kind: str  # mkdir, create, link, rename, unlink, write, fsync, fsync_directory, acknowledge
    path: str = ""  # relative to the root; "" is the root itself
    target: str = ""  # second path of link and rename
    file: int = 0  # number of the file that create, write, fsync, link and rename concern
    data: bytes = b""
    promise: object = None


class RecordingOperations(FileOperations):
    """The real operations, noted.

    Args:
        root: The root of the store; what happens outside is not noted.
        skip_fsync: Leave out the fsync of this number (of files and directories, counted from 0): a mutation that a
            crash test must notice.
        fail_at_fsync: Raise `OSError` instead of doing the fsync of this number: a process that dies there.
    """

    def __init__(
        self, root: str | Path, *, skip_fsync: int | None = None, fail_at_fsync: int | None = None
    ) -> None:
        self.operations: list[Operation] = []
        self.num_fsyncs = 0
        self._root = os.path.abspath(root)
        self._files: dict[int, int] = {}  # inode → our number: the file system uses inodes again
        self._skip_fsync = skip_fsync
        self.fail_at_fsync = fail_at_fsync

    def acknowledge(self, promise: object) -> None:
        """Note that the caller was told so."""
        self.operations.append(Operation("acknowledge", promise=promise))

    def create_file(self, parent: Handle, name: str) -> Handle:
        file = super().create_file(parent, name)
        self._files[os.fstat(file.fd).st_ino] = len(self.operations)
        self._note("create", parent.child(name), file=self._number(os.fstat(file.fd)))
        return file

    def make_directory(self, parent: Handle, name: str) -> None:
        super().make_directory(parent, name)
        self._note("mkdir", parent.child(name))

    def write(self, file: Handle, data: memoryview) -> int:
        written = super().write(file, data)
        self._note("write", file.path, file=self._number(os.fstat(file.fd)), data=bytes(data[:written]))
        return written

    def fsync(self, file: Handle) -> None:
        if self._counts_fsync():
            self._note("fsync", file.path, file=self._number(os.fstat(file.fd)))

    def fsync_directory(self, directory: Handle) -> None:
        if self._counts_fsync():
            self._note("fsync_directory", directory.path)

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        number = self._number(os.stat(name, dir_fd=source.fd))
        super().link(source, name, target, new_name)
        self._note("link", source.child(name), target=target.child(new_name), file=number)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        number = self._number(os.stat(name, dir_fd=source.fd))
        super().rename(source, name, target, new_name)
        self._note("rename", source.child(name), target=target.child(new_name), file=number)

    def unlink(self, directory: Handle, name: str) -> None:
        super().unlink(directory, name)
        self._note("unlink", directory.child(name))

    def _number(self, found: os.stat_result) -> int:
        return self._files[found.st_ino]

    def _counts_fsync(self) -> bool:
        number = self.num_fsyncs
        self.num_fsyncs += 1
        if number == self.fail_at_fsync:
            raise OSError("the process dies here")
        return number != self._skip_fsync

    def _note(self, kind: str, path: str, *, target: str = "", file: int = 0, data: bytes = b"") -> None:
        self.operations.append(Operation(kind, self._inside(path), self._inside(target), file, data))

    def _inside(self, path: str) -> str:
        relative = os.path.relpath(path, self._root) if path else ""
        return "" if relative == "." else relative


@dataclass(frozen=True)
class CrashState:
    """One thing that may be found after the power is back."""

    moment: int
    """How many operations had happened."""
    directories: frozenset[str]
    files: tuple[tuple[str, bytes], ...]
    promises: tuple[object, ...] = field(compare=False)
    """What had been acknowledged by then."""


@dataclass
class _Change:
    """A change of directory entries: what one name, or the two of a rename, come to mean."""

    directories: tuple[str, ...]  # parents that must be synced for it to last
    entries: tuple[tuple[str, int | None], ...]  # path → file, None: gone; -1: a directory


_DIRECTORY = -1


def crash_states(operations: list[Operation], *, ignored: str = "tmp") -> Iterator[CrashState]:
    """Every distinct state that a power cut at any moment of `operations` may leave.

    Args:
        operations: As recorded.
        ignored: Entries of this folder are left out of the states: nobody reads temporaries, whatever is left of them.
            (With them the number of states doubles with each temporary and the states say nothing more.)
    """
    seen: set[object] = set()
    for moment in range(len(operations) + 1):
        promises = tuple(o.promise for o in operations[:moment] if o.kind == "acknowledge")
        for entries, contents in _states_at(operations[:moment], ignored):
            directories, files = _reachable(entries, contents)
            key = (directories, files, len(promises))
            if key not in seen:
                seen.add(key)
                yield CrashState(moment, directories, files, promises)


def write_state(state: CrashState, root: Path) -> None:
    """Make a state real below `root`, which must not exist."""
    root.mkdir(parents=True)
    for directory in sorted(state.directories):
        (root / directory).mkdir()
    for path, data in state.files:
        (root / path).write_bytes(data)


def _states_at(
    operations: list[Operation], ignored: str
) -> Iterator[tuple[dict[str, int], dict[int, bytes]]]:
    durable, pending, synced, written = _replay(operations, ignored)
    for chosen in itertools.product((False, True), repeat=len(pending)):
        entries = dict(durable)
        for change, there in zip(pending, chosen, strict=True):
            if there:
                _apply(entries, change)
        files = sorted({file for file in entries.values() if file != _DIRECTORY})
        choices = [_possible_contents(synced[file], written[file]) for file in files]
        for contents in itertools.product(*choices):
            yield entries, dict(zip(files, contents, strict=True))


def _replay(
    operations: list[Operation], ignored: str
) -> tuple[dict[str, int], list[_Change], dict[int, bytes], dict[int, bytes]]:
    """What is certainly on disk, the changes that may be, and each file's synced and written bytes."""
    durable: dict[str, int] = {}
    pending: list[_Change] = []
    synced: dict[int, bytes] = {}
    written: dict[int, bytes] = {}
    for operation in operations:
        match operation.kind:
            case "write":
                written[operation.file] += operation.data
            case "fsync":
                synced[operation.file] = written[operation.file]
            case "fsync_directory":
                # What was done in this directory lasts now; a rename lasts when its target's directory does.
                for lasting in [change for change in pending if operation.path in change.directories]:
                    _apply(durable, lasting)
                    pending.remove(lasting)
            case "create":
                synced[operation.file], written[operation.file] = b"", b""
        change = _change_of(operation, ignored)
        if change is not None:
            pending.append(change)
    return durable, pending, synced, written


def _change_of(operation: Operation, ignored: str) -> _Change | None:
    path, target = operation.path, operation.target
    match operation.kind:
        case "mkdir":
            return _Change((_parent(path),), ((path, _DIRECTORY),))
        case "link":
            return _Change((_parent(target),), ((target, operation.file),))
        case "rename" if _parent(path) == ignored:
            return _Change((_parent(target),), ((target, operation.file),))
        case "rename":
            return _Change((_parent(target),), ((target, operation.file), (path, None)))
        case "create" if _parent(path) != ignored:
            return _Change((_parent(path),), ((path, operation.file),))
        case "unlink" if _parent(path) != ignored:
            return _Change((_parent(path),), ((path, None),))
    return None


def _apply(entries: dict[str, int], change: _Change) -> None:
    for path, file in change.entries:
        if file is None:
            entries.pop(path, None)
        else:
            entries[path] = file


def _possible_contents(synced: bytes, written: bytes) -> tuple[bytes, ...]:
    """Of the bytes since the last fsync: none, a part, a part with a hole of zeros before it, all."""
    if synced == written:
        return (written,)
    half = len(synced) + (len(written) - len(synced)) // 2
    holed = synced + bytes(half - len(synced)) + written[half:]
    return tuple(dict.fromkeys((synced, written[:half], holed, written)))


def _reachable(
    entries: dict[str, int], contents: dict[int, bytes]
) -> tuple[frozenset[str], tuple[tuple[str, bytes], ...]]:
    """What can be found from the root: an entry whose directory was lost is lost too."""
    directories: set[str] = set()
    files: list[tuple[str, bytes]] = []
    for path in sorted(entries):
        parent = _parent(path)
        if parent and parent not in directories:
            continue
        if entries[path] == _DIRECTORY:
            directories.add(path)
        else:
            files.append((path, contents[entries[path]]))
    return frozenset(directories), tuple(files)


def _parent(path: str) -> str:
    return os.path.dirname(path)
