"""Threads that work ahead: an iterator of one producer and one consumer, in order, and the priority of threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

__all__ = ["Background", "give_way"]

_NICER: Final = 3  # niceness: a loading thread gets half as much of a contested processor as another thread

T = TypeVar("T")


class Background(Generic[T]):
    """Iterator over items that a daemon thread produces ahead.

    An error of the iterator is raised by `__next__` after the items before it.

    Args:
        items: the iterator; only the thread uses it from now on.
        depth: maximum number of finished items that wait.
        name: name of the thread.
        waited: called with "blocked" and the seconds that the thread waited for room, or "starved" and the seconds that
            the consumer waited for an item.
        on_stall: called by the waiting consumer after every `stall_s` seconds without an item.
        stop: called by `close` before it joins the thread, to wake a producer that waits for something else.
    """

    def __init__(
        self,
        items: Iterator[T],
        depth: int,
        *,
        name: str,
        waited: Callable[[str, float], None],
        on_stall: Callable[[float], None],
        stall_s: float,
        stop: Callable[[], None],
    ) -> None:
        self._items, self._depth, self._waited = items, depth, waited
        self._on_stall, self._stall_s, self._stop = on_stall, stall_s, stop
        self._ready: deque[T] = deque()
        self._changed = threading.Condition()
        self._finished = self._closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of finished items that wait."""
        return len(self._ready)

    @property
    def depth(self) -> int:
        """Maximum number of finished items that wait."""
        return self._depth

    @depth.setter
    def depth(self, value: int) -> None:
        with self._changed:
            self._depth = value
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            if not self._ready and not self._finished:
                self._wait_for_item()
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify()
                return item
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopIteration

    def _wait_for_item(self) -> None:
        started = time.perf_counter()
        limit = self._stall_s
        while not self._ready and not self._finished and not self._closed:
            if not self._changed.wait(self._stall_s):
                waited = time.perf_counter() - started
                if waited >= limit:
                    limit += self._stall_s
                    self._on_stall(waited)
        self._waited("starved", time.perf_counter() - started)

    def close(self) -> None:
        """Stop the thread, drop finished items and join; may be called twice and from any thread."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001  every failure must reach the caller's thread
            self._error = error
        finally:
            closing = getattr(self._items, "close", None)
            if closing is not None:
                closing()
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            if len(self._ready) >= self._depth and not self._closed:
                started = time.perf_counter()
                while len(self._ready) >= self._depth and not self._closed:
                    self._changed.wait()
                self._waited("blocked", time.perf_counter() - started)
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify()
        return True


def give_way() -> None:
    """Lower the priority of this thread below the program's other threads.

    Blocks are loaded ahead, while the work of other threads is needed now. A trainer that waits for a block does not
    compete.
    """
    if sys.platform == "linux":  # other systems have no priority per thread
        own = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + _NICER)
