"""What a build asks of whoever works off its tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, Self

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""


class Worker(Protocol):
    """What the processes do; made once in each of them."""

    def work(self, item: Any, report: Report) -> Any:
        """Do one item; items, results and errors cross process borders by pickling."""

    def close(self) -> None:
        """Let go of files."""


class Engine(Protocol):
    """Works off lists of tasks, one list after another; a context manager.

    Attributes:
        is_remote: whether workers may be on machines that see no folder of this one. They see the source and the root
            by the same names; what they finish then travels through the root, where it is no folder either.
    """

    is_remote: bool

    def __enter__(self) -> Self:
        """Ready to run."""

    def __exit__(self, *_: object) -> None:
        """Stop whatever is still at work: finished work is durable, unfinished work is worthless."""

    def run(
        self, make: Callable[[], Worker], items: Iterable[Any], report: Report, *, here: bool = False
    ) -> Iterator[Any]:
        """Work off all items and yield the results as they come, in no particular order.

        Args:
            make: makes the worker, once per process; picklable (a class, or a `functools.partial` of one).
            items: picklable, drawn only when somebody is free; ``str(item)`` names one in messages.
            report: takes what workers report.
            here: the work is too small to be handed out: do it in this process.

        Raises:
            ShardkitError: of the first item that failed.
            RunError: a process died, or failed with an error that is not shardkit's own.
        """


def run_here(make: Callable[[], Worker], items: Iterable[Any], report: Report) -> Iterator[Any]:
    """Work off all items in this process; see `Engine.run`."""
    worker = make()
    try:
        for item in items:
            yield worker.work(item, report)
    finally:
        worker.close()
