"""A store in a local directory, or on a mounted network file system (SPEC.md §3 says what is assumed of it).

Publishing: ``O_EXCL`` temporary in ``ROOT/tmp`` → write loop → fsync → link to the final name → fsync of the
directory → unlink of the temporary. A name therefore appears in one step, all its bytes durable, and never
changes hands.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardkit.errors import NotFoundError
from shardkit.stores.file_operations import (
    FOLDER,
    Directories,
    Handle,
    active,
    check_regular,
    exists,
    explained,
)
from shardkit.stores.staging import LocalStage, writer_is_dead
from shardkit.stores.store import DirectStore, ObjectStat, check_name, check_prefix, is_name


class LocalStore(DirectStore):
    """Objects as files below one directory; implements `shardkit.stores.store.Store`.

    Keeps no descriptor open between calls: it may be used from any thread, after a fork, and pickled.

    Args:
        root: The directory; made when the first object is put.
        read_only: Refuse every change, and do not sweep.
    """

    def __init__(self, root: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self._root = os.path.abspath(os.fspath(root))
        self._read_only = read_only
        self._directories = Directories(self._root)
        if not read_only:
            self.sweep()

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._root, self._read_only)

    @property
    def url(self) -> str:
        return self._root

    # Reading

    def get(self, name: str, *, max_bytes: int) -> bytes:
        with self._reading(name) as file:
            size = active().stat_open(file).st_size
            self._check_size(name, size, max_bytes)
            data = _read_exactly(file, 0, size)
        self._check_length(name, len(data), size)  # it may shrink while it is read
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._reading(name) as file:
            self._check_ranges(name, ranges, active().stat_open(file).st_size)
            parts = [_read_exactly(file, offset, length) for offset, length in ranges]
        for part, (_, length) in zip(parts, ranges, strict=True):
            self._check_length(name, len(part), length)
        return parts

    def head(self, name: str) -> ObjectStat | None:
        try:
            with self._reading(name) as file:
                return ObjectStat(active().stat_open(file).st_size, None)
        except NotFoundError:
            return None

    def local_path(self, name: str) -> Path | None:
        return None if self.head(name) is None else Path(self._root, name)

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        components = check_prefix(prefix)
        with explained(f"list {prefix or 'objects'} in {self._root}"):
            try:
                with self._directories.opened(components) as folder:
                    names = active().names(folder)
            except FileNotFoundError:
                return
        # A folder sorts with its slash: "a-b" comes before "a/x", as in an object store.
        for name in sorted(f"{prefix}{name}/" if is_folder else prefix + name for name, is_folder in names):
            if not is_name(name.removesuffix("/")):
                continue
            if name.endswith("/"):
                if name > after or after.startswith(name):
                    yield from self.list_after(name, after)
            elif name > after:
                yield name

    # Writing

    def put_new(self, name: str, data: bytes) -> bool:
        components = check_name(name)
        self._check_writable(name)
        with (
            explained(f"write {name} in {self._root}", writing=True),
            self._directories.made(components[:-1]) as folder,
        ):
            if exists(folder, components[-1]):
                active().fsync_directory(folder)  # whoever linked it may not have come that far yet
                return False
            with self.stage() as stage:
                stage.write(data)
                return stage.publish_into(folder, components[-1], replace=False)

    def replace(self, name: str, data: bytes) -> None:
        with self.stage() as stage:
            stage.write(data)
            stage.publish(name, replace=True)

    def delete(self, name: str) -> None:
        components = check_name(name)
        self._check_writable(name)
        with explained(f"delete {name} in {self._root}", writing=True):
            try:
                with self._directories.opened(components[:-1]) as folder:
                    with contextlib.suppress(FileNotFoundError):
                        active().unlink(folder, components[-1])
                    active().fsync_directory(folder)
            except FileNotFoundError:
                return

    @contextlib.contextmanager
    def stage(self, suffix: str = "") -> Iterator[LocalStage]:
        self._check_writable(suffix or "an object")
        with contextlib.ExitStack() as cleanup:
            with explained(f"make a temporary file in {self._root}/{FOLDER}", writing=True):
                folder = cleanup.enter_context(self._directories.made((FOLDER,)))
                stage = LocalStage(self._directories, folder, suffix)
            cleanup.callback(stage.drop)
            yield stage

    def sweep(self) -> int:
        """Remove temporaries of dead processes; the number removed.

        Housekeeping: what cannot be swept now is left for later, and a failing disk will say so on the next
        write.
        """
        swept = 0
        with contextlib.suppress(OSError), self._directories.opened((FOLDER,)) as folder:
            for name, _ in active().names(folder):
                with contextlib.suppress(OSError):
                    if writer_is_dead(active(), folder, name):
                        active().unlink(folder, name)
                        swept += 1
        return swept

    # Files

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[Handle]:
        components = check_name(name)
        with explained(f"read {name} in {self._root}"):
            try:
                with self._directories.opened(components[:-1]) as folder:
                    file = active().open_file(folder, components[-1])
            except FileNotFoundError:
                raise NotFoundError(
                    f"{name} is not in {self._root}; check the path, or run: shardkit verify {self._root}"
                ) from None
            try:
                check_regular(active().stat_open(file), file.path)
                yield file
            finally:
                active().close(file)


def _reopen(root: str, read_only: bool) -> LocalStore:
    store = LocalStore(root, read_only=True)  # unpickling never sweeps: only opening does
    store._read_only = read_only  # noqa: SLF001
    return store


def _read_exactly(file: Handle, offset: int, length: int) -> bytes:
    """`length` bytes, fewer only at the end of the file; the kernel hands out at most 2 GiB at a time."""
    data = active().read(file, length, offset)
    while data and len(data) < length:
        more = active().read(file, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
