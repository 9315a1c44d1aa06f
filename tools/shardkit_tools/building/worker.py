"""What every engine runs: workers, in this process or in another one, and what they report."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from shardkit.errors import RunError, ShardkitError

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""


class Worker(Protocol):
    """What the processes do; made once in each of them."""

    def work(self, item: Any, report: Report) -> Any:
        """Do one item; items, results and errors cross process borders by pickling."""

    def close(self) -> None:
        """Let go of files."""


def run_here(make: Callable[[], Worker], items: Iterable[Any], report: Report) -> Iterator[Any]:
    """Work off all items in this process; see `Engine.run`."""
    worker = make()
    try:
        for item in items:
            yield worker.work(item, report)
    finally:
        worker.close()


def worker_error(item: Any, error: BaseException) -> ShardkitError:
    """Return the error as a worker reports it: one of shardkit as it is, any other with its traceback."""
    if isinstance(error, ShardkitError):
        return error
    return RunError(f"{item}: {error!r}\n{traceback.format_exc()}")
