"""Workers, which every engine runs in this process or another one, and their reports."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from shardkit.errors import RunError, ShardkitError

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""

_REPORT_INTERVAL_S = 0.2


class PacedReport:
    """Reports rows and bytes a few times a second, because each report is a message to another process.

    Args:
        report: called with the sums.
        limit: bytes of the work, if they are known: `finish` reports all of them, and no call reports more.
    """

    def __init__(self, report: Report, limit: int | None = None) -> None:
        self._report = report
        self._left = limit
        self._rows = self._bytes = 0
        self._last = time.monotonic()

    def __call__(self, rows: int, size: int) -> None:
        self._rows += rows
        self._bytes += size
        if time.monotonic() - self._last > _REPORT_INTERVAL_S:
            self._send(self._bytes if self._left is None else min(self._bytes, self._left))

    def finish(self) -> None:
        """Report the rest."""
        self._send(self._bytes if self._left is None else self._left)

    def _send(self, size: int) -> None:
        self._report(self._rows, size)
        if self._left is not None:
            self._left -= size
        self._rows = self._bytes = 0
        self._last = time.monotonic()


class Worker(Protocol):
    """Work of a process; made once in each."""

    def work(self, item: Any, report: Report) -> Any:
        """Do one item; items, results and errors must be picklable."""

    def close(self) -> None:
        """Close open files."""


def run_here(make: Callable[[], Worker], items: Iterable[Any], report: Report) -> Iterator[Any]:
    """Run all items in this process; see `Engine.run`."""
    worker = make()
    try:
        for item in items:
            yield worker.work(item, report)
    finally:
        worker.close()


def worker_error(item: Any, error: BaseException) -> ShardkitError:
    """Return a worker's error: an error of shardkit unchanged, any other with its traceback."""
    if isinstance(error, ShardkitError):
        return error
    return RunError(f"{item}: {error!r}\n{traceback.format_exc()}")
