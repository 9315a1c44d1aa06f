"""Engines run the tasks of a build or an adoption: in this process if they are small, in others, or on a Ray cluster.

Tasks are deterministic and idempotent: a task that runs twice, or in part and then again, has the same
result, and its record in the job directory appears only when it is complete. An engine may therefore lose a
worker at any moment, reassign its task or run it twice.

The local engine does not use `multiprocessing.Pool`, which waits for ever for the result of a killed worker,
or `concurrent.futures`, which cannot stop running work on Ctrl-C through its public interface. It has one
pipe per process, and the parent waits for both pipes and processes. Processes are spawned, because a fork
would copy the locks of threads.

Ray itself reruns a task when its worker or node dies. Every worker must see the root and the source under the same
names, and have the same versions of the packages that decide the bytes, which is checked. On an existing cluster,
finished work is exchanged through the root, or a given folder that all nodes mount (SPEC.md of shardkit.dataset §6).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import logging
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Protocol, Self

from shardkit.errors import (
    ConfigurationError,
    MissingDependency,
    NotFoundError,
    RunError,
    ShardkitError,
    SourceError,
    StoreError,
)
from shardkit.extras import install_command, installed

Report = Callable[[int, int], None]
"""Called by work with (rows, bytes) done since the last call."""

_REPORT_INTERVAL_S = 0.2
"""Seconds between two reports of a process: each is a message to the parent."""


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
        return RayEngine(jobs, address)
    if engine != "local":
        raise ConfigurationError(f"engine {engine!r}: expected local or ray")
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
            self.connection.send((None if self.make is make else make, item))
            self.make = make
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
    worker: Worker | None = None
    rows = size = 0
    told = time.monotonic()

    def report(new_rows: int, new_size: int) -> None:
        nonlocal rows, size
        rows, size = rows + new_rows, size + new_size
        if time.monotonic() - told > _REPORT_INTERVAL_S:
            send_report()

    def send_report() -> None:
        nonlocal rows, size, told
        if rows or size:
            connection.send(("report", (rows, size)))
        rows, size, told = 0, 0, time.monotonic()

    try:
        while True:
            make, item = connection.recv()
            try:
                if worker is None or make is not None:
                    if worker is not None:
                        worker.close()
                    worker = make()
                answer = ("done", worker.work(item, report))
            except BrokenPipeError:
                raise  # the parent has exited
            except BaseException as error:  # noqa: BLE001 (told to the parent)
                answer = ("failed", worker_error(item, error))
            send_report()
            connection.send(answer)
    except (EOFError, OSError):
        return
    finally:
        if worker is not None:
            worker.close()


# ---- Ray

RETRIES = 5
_POLL_S = 0.5
_LONGEST_FOLDER = 20
_SAME_VERSIONS = ("shardkit", "numpy", "pyarrow", "zstandard", "xxhash")


class RayEngine:
    """An `Engine` that runs tasks as Ray tasks.

    Args:
        jobs: most tasks at a time; None: the number of processors of the cluster. A local cluster gets this
            many processors.
        address: address of a running cluster ("auto", "10.0.0.5:6379", "ray://…"); None uses the cluster that
            this process has joined, or starts one on this machine for the duration of the build.

    Raises:
        MissingDependency: ray is not installed.
    """

    def __init__(self, jobs: int | None = None, address: str | None = None) -> None:
        self._ray = _import_ray()
        self.is_remote = address is not None or self._ray.is_initialized()
        self._jobs, self._address = jobs, address
        self._folder: str | None = None
        self._is_ours = False
        self._running: dict[Any, Any] = {}
        self._output = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Join the cluster, or start one."""
        if not self._ray.is_initialized():
            self._start()
        return self

    def _slots(self) -> int:
        """Return the most tasks at a time; nodes may join and leave during a build."""
        processors = int(self._ray.cluster_resources().get("CPU", 1))
        return max(1, min(processors, self._jobs or processors))

    def __exit__(self, *_: object) -> None:
        self._cancel()
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False
        self._output.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        # Usage statistics of a private cluster are not sent unless the user enables them.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        settings: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "namespace": "shardkit",
        }
        if self._address is not None:
            settings["address"] = self._address
        else:
            # Paths of Ray's sockets may have at most 107 bytes.
            usual = tempfile.gettempdir()
            short = usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes a private one
            self._folder = tempfile.mkdtemp(prefix="shardkit-ray-", dir=short)
            settings |= {"address": "local", "num_cpus": self._jobs, "include_dashboard": False,
                         "_temp_dir": self._folder}  # fmt: skip
        # Ray reports lost workers on standard output, which belongs to the results of a command.
        self._output.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            self._ray.init(**settings)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            self.__exit__()
            where = f"at {self._address!r}" if self._address else "on this machine"
            raise ConfigurationError(
                f"--engine ray: no cluster {where} ({_first_line(error)}); check with: ray status"
            ) from None
        self._is_ours = True

    def run(
        self, make: Callable[[], Worker], items: Iterable[Any], report: Report, *, here: bool = False
    ) -> Iterator[Any]:
        """See `Engine`; a task's progress is reported when it is done, so that a rerun counts once."""
        if here:
            yield from run_here(make, items, report)
            return
        task = self._ray.remote(num_cpus=1, max_retries=RETRIES)(_work)
        # A reference inside a list is fetched once per worker, not with every task.
        made = [self._ray.put(make)]
        key = os.urandom(8).hex()
        given = _Driver(platform.node(), _own_versions())
        waiting = iter(items)
        asked, slots = time.monotonic(), self._slots()
        try:
            while True:
                for item in itertools.islice(waiting, max(0, slots - len(self._running))):
                    named = task.options(name=f"shardkit {type(item).__name__}")
                    self._running[named.remote(key, made, item, given)] = item
                if not self._running:
                    return
                ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_S)
                if time.monotonic() - asked > _POLL_S:
                    asked, slots = time.monotonic(), self._slots()
                for reference in ready:
                    result, rows, size = self._result(reference, self._running.pop(reference))
                    report(rows, size)
                    yield result
        finally:
            self._cancel()

    def _result(self, reference: Any, item: Any) -> tuple[Any, int, int]:
        try:
            kind, value, rows, size = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise RunError(
                f"{item}: its Ray worker was lost {RETRIES + 1} times ({_first_line(error)}); if memory ran out, use "
                "fewer --jobs or nodes with more. Finished work is kept: run the same command again to go on"
            ) from None
        if kind == "failed":
            raise value
        # Arrays from Ray are views of memory that ends with the cluster.
        return copy.deepcopy(value), rows, size

    def _cancel(self) -> None:
        for reference in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(reference, force=True)
        self._running = {}


class _Driver(NamedTuple):
    """The driver's node, and its versions of packages on which the bytes depend; workers compare them."""

    node: str
    versions: dict[str, str]


_held: tuple[str, Worker] | None = None
"""In a worker process: key of the current list of items, and its worker."""


def _work(key: str, made: list[Any], item: Any, given: _Driver) -> Any:
    """Run one item in a worker: ("done", result, rows, bytes) or ("failed", error, rows, bytes)."""
    rows = size = 0

    def report(new_rows: int, new_size: int) -> None:
        nonlocal rows, size
        rows, size = rows + new_rows, size + new_size

    try:
        result = _worker(key, made, given).work(item, report)
        return "done", result, rows, size
    except Exception as error:  # noqa: BLE001 - told to the one who asked
        return "failed", _with_reason(worker_error(item, error), given.node), rows, size


def _with_reason(error: ShardkitError, node: str) -> ShardkitError:
    """Return the error; on another node, add the probable reason to errors about files."""
    if platform.node() == node or not isinstance(error, (SourceError, StoreError, NotFoundError)):
        return error
    return type(error)(
        f"{error} (on node {platform.node()}; every node of the cluster must see the source, the root and, if one is "
        "named, the --scratch directory under the same names: mount them there, or use URLs)"
    )


def _worker(key: str, made: list[Any], given: _Driver) -> Worker:
    global _held
    if _held is not None and _held[0] == key:
        return _held[1]
    found = _own_versions()
    if found != given.versions:
        differ = [
            f"{name} {found[name]}, not {theirs}"
            for name, theirs in given.versions.items()
            if found[name] != theirs
        ]
        raise RunError(
            f"node {platform.node()} of the cluster has {', '.join(differ)}: it would write other bytes; install the "
            "same versions on every node"
        )
    if _held is not None:
        _held[1].close()
        _held = None
    make = _import_ray().get(made[0])
    _held = (key, make())
    return _held[1]


def _own_versions() -> dict[str, str]:
    here = f"none (Python {platform.python_version()})"
    return dict.fromkeys(_SAME_VERSIONS, here) | installed(_SAME_VERSIONS)


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingDependency(f"--engine ray needs Ray; run: {install_command('ray')}") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
