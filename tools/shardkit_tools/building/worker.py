"""Workers, which every engine runs in this process or another one, and their reports."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from shardkit.errors import RunError, ShardkitError

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""


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
    """Return a worker's error: shardkit's own as they are, any other with its traceback."""
    if isinstance(error, ShardkitError):
        return error
    return RunError(f"{item}: {error!r}\n{traceback.format_exc()}")
