"""Copies in commands: the policy, the state of locations, and work on copies by local threads or an engine.

On a cluster, one task holds many small objects, so that the overhead of a task is small. A location that a machine
cannot access, such as a directory that is not mounted, is reported as unreadable and never as missing copies.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardkit.copies.place import PlacementChange, place
from shardkit.copies.placement import unknown_strata
from shardkit.copies.repair import encode_parity
from shardkit.copies.replicate import find_lag
from shardkit.copies.walk import CheckSettings, CopyCheck, CopyTask
from shardkit.errors import ConfigurationError, ShardkitError, UsageError
from shardkit.extras import shell_word
from shardkit.reading.objects import CheckResult, CopyResult
from shardkit.repository.locations import read_table
from shardkit.repository.log import IDENTITY_NAME
from shardkit.repository.policy import LocationRecord, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.store import Store, root_store
from shardkit.stores.waiting import Hours, RateLimiter, parse_bandwidth
from shardkit_tools import console
from shardkit_tools.building.engines import Engine, Report, open_engine
from shardkit_tools.console import bytes_text, count_text, duration_text
from shardkit_tools.options import EngineName


def begin_copies(
    root: str,
    location: Sequence[str] | None,
    wanted: Mapping[str, Any],
    *,
    single_writer: bool = False,
    dry_run: bool = False,
) -> None:
    """Record the locations and policy of a command line before a build, if any are given."""
    if location is None and all(one is None for one in wanted.values()):
        return
    locations = tuple(LocationRecord.parse(text) for text in location or ())
    if dry_run:
        Policy().changed(**wanted)
        return
    if any(one.name == "root" for one in locations):
        raise UsageError("--location root=…: the root is where ROOT is; give the others other names")
    repository = Repository.create(root, single_writer=single_writer)
    place(
        repository,
        PlacementChange(locations=locations, policy=lambda before: before.changed(**wanted)),
        message="told by a build",
    )


def finish_copies(root: str) -> int | None:
    """Encode parity after a commit, unless the mode is async.

    Returns:
        Number of bytes below policy; None if the dataset has no locations.
    """
    repository = Repository.open(root)
    table = read_table(repository.store, repository.id)
    if table is None:
        return None
    if table.policy.mode != "async":
        encode_parity(repository, table.policy.parity, repository.versions).check()
    return find_lag(repository).lag_before


def print_copies(root: str, lag: int | None) -> None:
    """Print the bytes left to copy, and critical strata that no version contains (they protect nothing)."""
    if lag is None:
        return
    if lag:
        console.print_line(
            f"copies: {bytes_text(lag)} below policy; run: shardkit replicate {shell_word(root)}"
        )
    else:
        console.print_line("copies: the policy is met")
    repository = Repository.open(root, read_only=True)
    table = read_table(root_store(repository.store), repository.id)
    critical = [one.stratum for one in table.policy.critical] if table else []
    for name, hint in (unknown_strata(repository, critical)).items():
        console.print_line(
            f"critical stratum {name!r} is in no version; {hint}; to name another: shardkit place {shell_word(root)} "
            "--critical NAME=N",
            "yellow",
        )


class Work:
    """Rate limit, engine and progress output of a command; created by `running`."""

    def __init__(self, bandwidth: str | None, between: str | None) -> None:
        self._status = console.StatusLine()
        self.engine: Engine | None = None  # None: threads of this process do the work
        self._began = time.monotonic()
        self.pace = RateLimiter(
            None if bandwidth is None else parse_bandwidth(bandwidth),
            None if between is None else Hours.parse(between),
            waiting=self._waiting,
        )

    def report(self, objects: int, all_objects: int, done_bytes: int, all_bytes: int) -> None:
        """Show progress of copying."""
        passed = time.monotonic() - self._began
        rate = f", {bytes_text(int(done_bytes / passed))}/s" if passed > 1 else ""
        self._status.show(
            f"copied {objects:,} of {count_text(all_objects, 'object')}, {bytes_text(done_bytes)} of "
            f"{bytes_text(all_bytes)}{rate}"
        )

    def tell(self, what: str, done: int, total: int) -> None:
        """Show progress of checking copies."""
        self._status.show(f"{what} {done:,} of {count_text(total, 'copy', 'copies')}")

    def checks(self, jobs: int, location: Sequence[str] | None = None) -> CheckSettings:
        """Return settings for checking and making copies, including those in further locations."""
        more = tuple(map(LocationRecord.parse, location or ()))
        engine = None if self.engine is None else functools.partial(spread, self.engine)
        return CheckSettings(locations=more, pace=self.pace, jobs=jobs, engine=engine, report=self.tell)

    def clear(self) -> None:
        self._status.clear()

    def _waiting(self, seconds: int) -> None:
        self._status.show(f"waiting {duration_text(seconds)} for the hours of --between; Ctrl-C ends")


@contextlib.contextmanager
def running(bandwidth: str | None = None, between: str | None = None) -> Iterator[Work]:
    """Yield a `Work` that shows progress and stops on an interrupt."""
    work = Work(bandwidth, between)
    try:
        yield work
    except KeyboardInterrupt:
        work.pace.stop()
        work.clear()
        raise KeyboardInterrupt("interrupted; the same command goes on where it stood") from None
    finally:
        work.clear()


_TASK_BYTES = 64 * 2**20
_TASK_OBJECTS = 64
_UNKNOWN_BYTES = 2**20


class _Tasks(NamedTuple):
    """Numbered checks or copies of one engine task."""

    tasks: tuple[tuple[int, CopyCheck | CopyTask], ...]

    def __str__(self) -> str:
        return f"copies of {self.tasks[0][1].name} and {len(self.tasks) - 1} more"


def _group(tasks: Iterable[tuple[int, CopyCheck | CopyTask]]) -> Iterator[_Tasks]:
    group: list[tuple[int, CopyCheck | CopyTask]] = []
    size = 0
    for task in tasks:
        group.append(task)
        size += _UNKNOWN_BYTES if task[1].size is None else task[1].size
        if size >= _TASK_BYTES or len(group) == _TASK_OBJECTS:
            yield _Tasks(tuple(group))
            group, size = [], 0
    if group:
        yield _Tasks(tuple(group))


class CopyWorker:
    """Worker of an engine that checks and copies objects; see `building.engines.Worker`."""

    def __init__(self) -> None:
        self._seen: dict[str, str] = {}

    def close(self) -> None:
        """Nothing is kept open."""

    def work(self, item: _Tasks, report: Report) -> list[tuple[int, CheckResult | CopyResult]]:
        """Return (number, result) of each task."""
        done: list[tuple[int, CheckResult | CopyResult]] = []
        for number, task in item.tasks:
            problem = next(filter(None, map(self._problem, task.stores)), "")
            result = task.failed(problem) if problem else task.run(RateLimiter().take)
            report(1, result.num_bytes)
            done.append((number, result))
        return done

    def _problem(self, store: Store) -> str:
        """Return why this machine cannot access a location, or an empty string if it can."""
        if store.url not in self._seen:
            try:
                found = store.head(IDENTITY_NAME)
                self._seen[store.url] = "" if found is not None else "there is no repository"
            except ShardkitError as error:
                self._seen[store.url] = str(error)
        why = self._seen[store.url]
        return why and f"{store.url} is not seen from node {platform.node()}: {why}; mount it there"


def spread(
    engine: Engine, tasks: Iterable[tuple[int, CopyCheck | CopyTask]]
) -> Iterator[tuple[int, CheckResult | CopyResult]]:
    """Run checks or copies on a started engine, and yield (number, result) of each in order of completion."""
    for outcomes in engine.run(CopyWorker, _group(tasks), lambda _rows, _size: None):
        yield from outcomes


@contextlib.contextmanager
def copying(
    engine: EngineName, address: str | None, jobs: int | None, bandwidth: str | None, between: str | None
) -> Iterator[Work]:
    """Yield a `Work` for copies, done by an engine or by threads of this process.

    Raises:
        ConfigurationError: the options do not fit the engine.
    """
    with running(bandwidth, between) as work, contextlib.ExitStack() as stack:
        if engine == "local":
            if address is not None:
                open_engine("local", None, address)  # raises: a local engine has no address
        elif bandwidth is not None or between is not None:
            raise ConfigurationError(
                "--bandwidth and --between hold for the threads of one machine; leave them out with --engine ray, or "
                "use --engine local"
            )
        else:
            work.engine = stack.enter_context(open_engine(engine, jobs, address))
        yield work
