"""Engines run the tasks of a build or an adoption. `LocalEngine` does so in processes on this machine.

Tasks are deterministic and idempotent: a task that runs twice, or in part and then again, has the same
result, and its record in the job directory appears only when it is complete. An engine may therefore lose a
worker at any moment, reassign its task or run it twice.

The local engine does not use `multiprocessing.Pool`, which waits for ever for the result of a killed worker,
or `concurrent.futures`, which cannot stop running work on Ctrl-C through its public interface. It has one
pipe per process, and the parent waits for both pipes and processes. Processes are spawned, because a fork
would copy the locks of threads.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol, Self

from shardkit.errors import ConfigurationError, RunError
from shardkit_tools.building.worker import Report, Worker, run_here, worker_error

ENGINES = ("local", "ray")

SMALL_BYTES = 8 * 2**20
"""Below this size, starting a process costs more than it saves."""

# Threads that copy and hash release the interpreter lock: one process keeps about two processors busy, and
# has processed this many times `SMALL_BYTES` before another process has started.
_LIGHT = 64
_FEW_PROCESSORS = 4


class Engine(Protocol):
    """Runs lists of tasks, one list after another; a context manager.

    Attributes:
        is_remote: True if workers may be on machines without access to folders of this one. They see the
            source and the root under the same names; unless the root is a directory, finished work is
            exchanged through it.
    """

    is_remote: bool

    def __enter__(self) -> Self:
        """Prepare to run."""

    def __exit__(self, *_: object) -> None:
        """Stop running work: finished work is durable, unfinished work is worthless."""

    def run(
        self, make: Callable[[], Worker], items: Iterable[Any], report: Report, *, here: bool = False
    ) -> Iterator[Any]:
        """Run all items and yield their results in any order; with `here`, in this process."""


def open_engine(engine: str | Engine, jobs: int | None, address: str | None = None) -> Engine:
    """Return the engine with this name.

    Raises:
        ConfigurationError: The name, `jobs` or `address` is invalid.
    """
    if jobs is not None and jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}; expected at least 1")
    if address is not None and engine != "ray":
        raise ConfigurationError(f"--address {address}: only --engine ray has one; give both, or none")
    if not isinstance(engine, str):
        return engine
    if engine == "ray":
        from shardkit_tools.building.ray_engine import RayEngine

        return RayEngine(jobs, address)
    if engine != "local":
        raise ConfigurationError(f"engine {engine!r}: expected {' or '.join(ENGINES)}")
    return LocalEngine(jobs or os.cpu_count() or 1)


def is_small(engine: Engine, size: int, *, is_light: bool = False) -> bool:
    """Return True if this many bytes are processed sooner in this process than by starting others."""
    if not is_light or not isinstance(engine, LocalEngine):
        return size < SMALL_BYTES
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return size < SMALL_BYTES * _LIGHT or (SMALL_BYTES > 0 and usable < _FEW_PROCESSORS)


@dataclass(slots=True)
class _Process:
    """A process and its current item."""

    process: SpawnProcess
    connection: Connection
    make: Callable[[], Worker] | None = None
    item: Any = None

    def give(self, make: Callable[[], Worker], item: Any) -> None:
        self.item = item
        try:
            if self.make is not make:
                self.make = make
                self.connection.send(("make", make))
            self.connection.send(("work", item))
        except OSError:
            raise self._death_error() from None

    def take(self, report: Report) -> Iterator[Any]:
        """Receive a message; yield the result if it is one."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            raise self._death_error() from None
        if kind == "report":
            report(*value)
        elif kind == "failed":
            raise value
        else:
            self.item = None
            yield value

    def _death_error(self) -> RunError:
        self.process.join(5)
        code = self.process.exitcode
        is_signal = code is not None and code < 0
        how = f"was killed by signal {-code}" if is_signal else f"ended with exit code {code}"  # type: ignore[operator]  # not None
        return RunError(
            f"a build process {how} while it worked on {self.item}; if memory ran out, use fewer --jobs. Finished "
            "work is kept: run the same command again to go on"
        )


class LocalEngine:
    """Up to ``jobs`` processes, started on demand and kept for the next list.

    Results are durable or worthless, so that leaving kills running processes.
    """

    is_remote = False

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._processes: list[_Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._processes:
            one.process.kill()
        for one in self._processes:
            one.process.join()
            one.connection.close()
        self._processes = []

    def run(
        self, make: Callable[[], Worker], items: Iterable[Any], report: Report, *, here: bool = False
    ) -> Iterator[Any]:
        """See `Engine`; with one job, items run in this process."""
        if here or self._jobs <= 1:
            yield from run_here(make, items, report)
            return
        pending = iter(items)
        drawn = True
        while True:
            while drawn and (
                len(self._processes) < self._jobs or any(one.item is None for one in self._processes)
            ):
                item = next(pending, None)
                drawn = item is not None
                if drawn:
                    self._free().give(make, item)
            busy = {one.connection: one for one in self._processes if one.item is not None}
            if not busy:
                return
            for ready in wait(list(busy)):
                yield from busy[ready].take(report)  # type: ignore[index]  # only connections are waited for

    def _free(self) -> _Process:
        for one in self._processes:
            if one.item is None:
                return one
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs,), name=f"build-{len(self._processes)}", daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append(_Process(process, ours))
        return self._processes[-1]


def _die_with_parent() -> None:
    """Exit when the parent dies, so that a killed parent leaves no writing processes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _serve(connection: Connection) -> None:
    """Serve the parent until it closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    make: Callable[[], Worker] | None = None
    worker: Worker | None = None

    def report(rows: int, size: int) -> None:
        connection.send(("report", (rows, size)))

    try:
        while True:
            kind, value = connection.recv()
            if kind == "make":
                if worker is not None:
                    worker.close()
                make, worker = value, None
                continue
            try:
                if worker is None:
                    assert make is not None, "a worker is made before it works"
                    worker = make()
                answer = ("done", worker.work(value, report))
            except BrokenPipeError:
                raise  # the parent has exited
            except BaseException as error:  # noqa: BLE001 (told to the parent)
                answer = ("failed", worker_error(value, error))
            connection.send(answer)
    except (EOFError, OSError):
        return
    finally:
        if worker is not None:
            worker.close()
