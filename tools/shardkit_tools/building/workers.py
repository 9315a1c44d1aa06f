"""Processes that work off a list of items; killing any of them at any moment does no harm.

Not `multiprocessing.Pool` (which waits for ever for the result of a killed worker) and not
`concurrent.futures` (which cannot stop running work on Ctrl-C without touching its private parts): one pipe
per process, and the parent waits for pipes and processes alike. Processes are spawned, for a fork would copy
the locks of threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from shardkit.errors import RunError, ShardkitError

__all__ = ["Report", "Worker", "run_all"]

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""


class Worker(Protocol):
    """What the processes do; made once in each of them."""

    def work(self, item: Any, report: Report) -> Any:
        """Do one item; items, results and errors cross process borders by pickling."""

    def close(self) -> None:
        """Let go of files."""


@dataclass(slots=True)
class _Running:
    process: SpawnProcess
    connection: Connection
    item: Any = None


def run_all(make: Callable[[], Worker], items: Iterable[Any], jobs: int, report: Report) -> Iterator[Any]:
    """Work off all items and yield the results as they come, in no particular order.

    Args:
        make: makes the worker; picklable (a class, or a `functools.partial` of one).
        items: picklable, drawn only when a process is free.
        jobs: number of processes; 1 works here, without a process.
        report: takes what workers report.

    Raises:
        RunError: a process died, or failed with an error that is not shardkit's own.
    """
    if jobs <= 1:
        worker = make()
        try:
            for item in items:
                yield worker.work(item, report)
        finally:
            worker.close()
        return
    yield from _in_processes(make, iter(items), jobs, report)


def _in_processes(
    make: Callable[[], Worker], items: Iterator[Any], jobs: int, report: Report
) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    running: list[_Running] = []
    try:
        for item in items:
            if len(running) < jobs:
                running.append(_start(context, make, len(running)))
                _give(running[-1], item)
                continue
            yield from _until_free(running, report)
            free = next(one for one in running if one.item is None)
            _give(free, item)
        while any(one.item is not None for one in running):
            yield from _until_free(running, report)
    finally:
        # Results are durable or worthless: nothing is lost with a process.
        for one in running:
            one.process.kill()
        for one in running:
            one.process.join()
            one.connection.close()


def _start(context: Any, make: Callable[[], Worker], number: int) -> _Running:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make), name=f"build-{number}", daemon=True)
    process.start()
    theirs.close()
    return _Running(process, ours)


def _give(one: _Running, item: Any) -> None:
    one.item = item
    try:
        one.connection.send(("work", item))
    except OSError:
        raise _died(one) from None


def _until_free(running: list[_Running], report: Report) -> Iterator[Any]:
    """Results until a process is free; at least one process is at work."""
    while all(one.item is not None for one in running) or _any_ready(running):
        busy = {one.connection: one for one in running if one.item is not None}
        for ready in wait(list(busy)):
            one = busy[ready]  # type: ignore[index]
            try:
                kind, value = one.connection.recv()
            except (EOFError, OSError):
                raise _died(one) from None
            if kind == "report":
                report(*value)
            elif kind == "failed":
                raise value
            else:
                one.item = None
                yield value
    if all(one.item is None for one in running):
        return


def _any_ready(running: list[_Running]) -> bool:
    return bool(wait([one.connection for one in running if one.item is not None], timeout=0))


def _died(one: _Running) -> RunError:
    one.process.join(5)
    code = one.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    return RunError(
        f"a build process {how} while it worked on {one.item}; if memory ran out, use fewer --jobs. Finished "
        "work is kept: run the same command again to go on"
    )


def _die_with_parent() -> None:
    """A killed parent must not leave processes behind that go on writing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve(connection: Connection, make: Callable[[], Worker]) -> None:
    """The life of a process: until the parent closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    worker: Worker | None = None

    def report(rows: int, size: int) -> None:
        connection.send(("report", (rows, size)))

    try:
        while True:
            _, item = connection.recv()
            try:
                if worker is None:
                    worker = make()
                answer = ("done", worker.work(item, report))
            except ShardkitError as error:
                answer = ("failed", error)
            except OSError:
                raise  # the parent is gone: nobody is left to tell
            except BaseException as error:  # noqa: BLE001 (told to the parent)
                answer = ("failed", RunError(f"{item}: {error!r}\n{traceback.format_exc()}"))
            connection.send(answer)
    except (EOFError, OSError):
        return
    finally:
        if worker is not None:
            worker.close()
