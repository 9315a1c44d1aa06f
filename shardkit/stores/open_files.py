"""Local files that are read block by block: a stated number is open at a time, however many there are."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final

from shardkit.errors import IntegrityError, NotFoundError, StoreError

MOST_OPEN_FILES: Final = 64
"""Files of this process that stay open for the next read, half of them here and half in a loader (block_rows.c); each
reading thread may hold one more."""


class _File:
    """An open file, how many threads read it, and whether it is closed after the last of them."""

    __slots__ = ("descriptor", "forgotten", "users")

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.users, self.forgotten = descriptor, 0, False


class OpenFiles:
    """Descriptors by path, least recently used ones closed first. Safe to call from many threads.

    A descriptor may outlive its name: whoever finds wrong bytes calls `forget`, and reads what is there by then.
    """

    def __init__(self, most: int = MOST_OPEN_FILES // 2) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._left: deque[str] = deque()  # paths whose readers are gone

    def __len__(self) -> int:
        return len(self._files)

    def read(self, path: str, file_size: int, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset` of a file.

        Raises:
            NotFoundError: the file is gone.
            IntegrityError: it has another size, or ends before.
            StoreError: it cannot be opened or read.
        """
        file = self._take(path, file_size)
        try:
            done = 0
            while done < len(into):
                try:
                    got = os.preadv(file.descriptor, [into[done:]], offset + done)
                except OSError as error:
                    raise StoreError(f"{path} cannot be read: {error.strerror}; look at its disk") from error
                if not got:
                    raise IntegrityError(
                        f"{path} ends at byte {offset + done}, {file_size} bytes are expected; it was truncated. "
                        "Run: shardkit verify on its dataset"
                    )
                done += got
        finally:
            with self._lock:
                file.users -= 1
                if file.forgotten and not file.users:
                    os.close(file.descriptor)
                self._close_some()
            self.leave(())

    def forget(self, path: str) -> None:
        """The next read opens the file again: it may be healed, and is another one then."""
        with self._lock:
            self._forget(path)

    def leave(self, paths: Iterable[str]) -> None:
        """Close files that nobody reads any more; may be called by the garbage collector, at any moment."""
        self._left.extend(paths)
        # whoever holds the lock, this very thread perhaps, does it once it has done
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._forget(self._left.popleft())
            finally:
                self._lock.release()

    def _forget(self, path: str) -> None:
        found = self._files.pop(path, None)
        if found is not None:
            found.forgotten = True
            if not found.users:
                os.close(found.descriptor)

    def renew_lock(self) -> None:
        """In a forked child: threads of the parent, which may hold the lock and files, do not exist here."""
        self._lock = threading.Lock()
        for one in self._files.values():
            one.users = 0

    def _take(self, path: str, size: int) -> _File:
        with self._lock:
            found = self._files.get(path)
            if found is not None:
                self._files.move_to_end(path)
                found.users += 1
                return found
        opened = _File(_opened(path, size))
        with self._lock:
            found = self._files.setdefault(path, opened)
            found.users += 1
            if found is not opened:
                os.close(opened.descriptor)
            self._files.move_to_end(path)
            self._close_some()
            return found

    def _close_some(self) -> None:
        over = len(self._files) - self._most
        if over <= 0:
            return
        for path in [path for path, one in self._files.items() if not one.users][:over]:
            os.close(self._files.pop(path).descriptor)


def _opened(path: str, size: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        raise NotFoundError(f"{path} is gone; run: shardkit verify on its dataset") from None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be opened: {error.strerror}; run: shardkit verify on its dataset"
        ) from error
    actual = os.fstat(descriptor).st_size
    if actual != size:
        os.close(descriptor)
        raise IntegrityError(f"{path} holds {actual} bytes, the manifest says {size}; run: shardkit verify")
    return descriptor


open_files = OpenFiles()
"""Those of this process, of all datasets."""

os.register_at_fork(after_in_child=open_files.renew_lock)
