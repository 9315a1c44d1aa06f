"""File operations of which chosen calls fail, as a disk that is full, failing, or mounted read-only makes them fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final, TypeVar

from shardkit.stores.file_operations import FileOperations, Handle

__all__ = ["CHANGES", "READS", "FaultyOperations"]

CHANGES: Final = (
    "create_file",
    "make_directory",
    "make_root",
    "write",
    "fsync",
    "fsync_directory",
    "link",
    "rename",
    "unlink",
)
"""Calls that change a root."""
READS: Final = ("open_root", "open_directory", "open_file", "read", "stat", "stat_open", "names")
"""Calls that only look."""

_Result = TypeVar("_Result")


class FaultyOperations(FileOperations):
    """The real operations, some of which fail.

    An fsync that does not fail does nothing: what survives a power cut is the business of `crash_states`, and drills
    that sync thousands of times would test the disk's retry.

    Args:
        error: The `errno` that a failing call reports.
        at: Which of the counted calls fails, from 0; None for none.
        forever: All counted calls from `at` on fail, as on a disk that stays full.
        calls: Names of the calls that are counted; the others always work.
        torn: A failing write writes half of its bytes first, and a failing fsync or link has done its work: the error
            arrives late, or the answer was lost.
        short: Every write takes at most this many bytes, as the kernel may.
    """

    def __init__(
        self,
        error: int,
        at: int | None = None,
        *,
        forever: bool = False,
        calls: Collection[str] = CHANGES,
        torn: bool = False,
        short: int | None = None,
    ) -> None:
        self.num_calls = 0
        self.failed: list[str] = []
        self._error = error
        self._at = at
        self._forever = forever
        self._calls = frozenset(calls)
        self._torn = torn
        self._short = short

    def open_root(self, path: str) -> Handle:
        return self._try("open_root", lambda: super(FaultyOperations, self).open_root(path))

    def open_directory(self, parent: Handle, name: str) -> Handle:
        return self._try("open_directory", lambda: super(FaultyOperations, self).open_directory(parent, name))

    def open_file(self, parent: Handle, name: str) -> Handle:
        return self._try("open_file", lambda: super(FaultyOperations, self).open_file(parent, name))

    def create_file(self, parent: Handle, name: str) -> Handle:
        return self._try("create_file", lambda: super(FaultyOperations, self).create_file(parent, name))

    def make_directory(self, parent: Handle, name: str) -> None:
        self._try("make_directory", lambda: super(FaultyOperations, self).make_directory(parent, name))

    def make_root(self, path: str) -> None:
        self._try("make_root", lambda: super(FaultyOperations, self).make_root(path))

    def write(self, file: Handle, data: memoryview) -> int:
        def put(part: memoryview) -> int:
            return super(FaultyOperations, self).write(file, part)

        half = data[: len(data) // 2]
        whole = data if self._short is None else data[: self._short]
        return self._try("write", lambda: put(whole), torn=lambda: put(half))

    def read(self, file: Handle, length: int, offset: int) -> bytes:
        return self._try("read", lambda: super(FaultyOperations, self).read(file, length, offset))

    def read_into(self, file: Handle, buffer: memoryview, offset: int) -> int:
        return self._try("read", lambda: super(FaultyOperations, self).read_into(file, buffer, offset))

    def fsync(self, file: Handle) -> None:
        self._try("fsync", lambda: None)

    def fsync_directory(self, directory: Handle) -> None:
        self._try("fsync_directory", lambda: None)

    def link(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        def make() -> None:
            super(FaultyOperations, self).link(source, name, target, new_name)

        self._try("link", make, torn=make)

    def rename(self, source: Handle, name: str, target: Handle, new_name: str) -> None:
        def move() -> None:
            super(FaultyOperations, self).rename(source, name, target, new_name)

        self._try("rename", move, torn=move)

    def unlink(self, directory: Handle, name: str) -> None:
        self._try("unlink", lambda: super(FaultyOperations, self).unlink(directory, name))

    def stat(self, directory: Handle, name: str) -> os.stat_result:
        return self._try("stat", lambda: super(FaultyOperations, self).stat(directory, name))

    def stat_open(self, file: Handle) -> os.stat_result:
        return self._try("stat_open", lambda: super(FaultyOperations, self).stat_open(file))

    def names(self, directory: Handle) -> list[tuple[str, bool]]:
        return self._try("names", lambda: super(FaultyOperations, self).names(directory))

    def _try(
        self, call: str, do: Callable[[], _Result], *, torn: Callable[[], object] | None = None
    ) -> _Result:
        if call not in self._calls:
            return do()
        number = self.num_calls
        self.num_calls += 1
        if self._at is None or number < self._at or (number > self._at and not self._forever):
            return do()
        if self._torn and torn is not None:
            torn()
        self.failed.append(call)
        raise OSError(self._error, os.strerror(self._error))
