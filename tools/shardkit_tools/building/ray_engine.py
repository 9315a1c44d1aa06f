"""Run tasks of a build on a Ray cluster: a local one started for the build, or an existing one.

Ray reruns a task when its worker or node dies; this suffices, because tasks are idempotent (`engines`). Every
worker must see the root and the source under the same names, and have the same versions of the packages that
decide the bytes, which is checked. On an existing cluster, finished work is exchanged through the root,
unless a scratch directory that all nodes mount is given (SPEC.md of shardkit.dataset §6).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

from shardkit.errors import (
    ConfigurationError,
    MissingDependency,
    NotFoundError,
    RunError,
    ShardkitError,
    SourceError,
    StoreError,
)
from shardkit.extras import install_command
from shardkit_tools.building.worker import Report, Worker, run_here, worker_error
from shardkit_tools.installed import installed

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
        self._jobs = jobs
        self._address = address
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
            self._folder = tempfile.mkdtemp(prefix="shardkit-ray-", dir=_short_folder())
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


@dataclass(frozen=True, slots=True)
class _Driver:
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


def _short_folder() -> str:
    """Return a short folder for a local cluster: paths of Ray's sockets may have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes a private one in it


def _import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingDependency(f"--engine ray needs Ray; run: {install_command('ray')}") from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
