"""Checks and copies of single objects, as tasks that threads of this process or an engine run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

from shardkit.errors import StoreError
from shardkit.reading.objects import CheckResult, CopyResult, Depth, Location, check_object, copy_object
from shardkit.stores.store import Store
from shardkit.stores.waiting import RateLimiter

Pace = Callable[[int], None]
"""Called with the bytes of each piece before it is read; may sleep."""


class CopyCheck(NamedTuple):
    """A check to make; see `check_object`."""

    store: Store
    name: str
    size: int | None
    depth: Depth

    @property
    def stores(self) -> list[Store]:
        return [self.store]

    def run(self, pace: Pace) -> CheckResult:
        return check_object(self.store, self.name, self.size, self.depth, pace)

    def failed(self, problem: str) -> CheckResult:
        """Return the result if a store cannot be accessed."""
        return CheckResult("unreadable", "list", got=problem)


class CopyTask(NamedTuple):
    """A copy to make; see `copy_object`."""

    name: str
    sources: tuple[Location, ...]
    target: Location
    size: int | None
    replace: bool = False

    @property
    def stores(self) -> list[Store]:
        return [self.target.store, *(one.store for one in self.sources)]

    def run(self, pace: Pace) -> CopyResult:
        return copy_object(self.name, self.sources, self.target, replace=self.replace, pace=pace)

    def failed(self, problem: str) -> CopyResult:
        """Return the result if a store cannot be accessed."""
        return CopyResult(problem=StoreError(problem))


RunAll = Callable[[Iterable[tuple[int, CopyCheck | CopyTask]]], Iterator[tuple[int, Any]]]
"""Runs numbered tasks, taken one by one, and yields (number, result) as each is finished."""


def run_in_threads(
    tasks: Iterable[tuple[int, CopyCheck | CopyTask]], jobs: int, pace: RateLimiter
) -> Iterator[tuple[int, Any]]:
    """Run tasks in `jobs` threads; see `RunAll`. A task is taken only when another one is finished."""
    waiting = iter(tasks)
    running: dict[Future[Any], int] = {}
    finished: SimpleQueue[Future[Any]] = SimpleQueue()
    with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-copies") as pool:

        def start(count: int) -> None:
            for number, task in itertools.islice(waiting, count):
                future: Future[Any] = pool.submit(task.run, pace.take)
                running[future] = number
                future.add_done_callback(finished.put)

        try:
            start(2 * jobs)
            while running:
                future = finished.get()
                yield running.pop(future), future.result()
                start(1)
        except BaseException:
            pace.stop()  # so that the other threads end soon
            pool.shutdown(cancel_futures=True)
            raise
