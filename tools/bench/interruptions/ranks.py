"""One segment of a run: a process for each rank, all killed with SIGKILL when the segment is over.

A rank that is done waits for the kill, so that its workers and threads are killed at work.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, SpawnContext
from pathlib import Path

from bench.interruptions.counting import Steps
from bench.interruptions.samples import Adapter, Job
from bench.interruptions.scenarios import EPOCHS, Segment

VALIDATE_EVERY = 3
_EMPTY_EPOCHS = 4  # in a row, of a loader that gives nothing any more
_GRACE_S = 5.0  # for the other ranks to report, after one has raised


@dataclass(frozen=True)
class Order:
    """The task of a rank in a segment."""

    segment: Segment
    states: list[bytes] | None  # of the ranks of the segment before
    validation: bool
    total: int | None  # steps after which the last segment ends, instead of at the end of the last epoch


@dataclass
class Report:
    """The result of a rank in a segment."""

    epochs: dict[int, Steps] = field(default_factory=dict)  # by number of the epoch
    passes: list[Steps] = field(default_factory=list)  # of validation, complete ones only
    state: bytes | None = None
    phase: str = "open"
    error: str = ""
    modules: list[str] = field(default_factory=list)  # imported after the process had started


def load(name: str) -> type[Adapter]:
    """Import the adapter of a loader."""
    found: type[Adapter] = importlib.import_module(f"bench.interruptions.adapters.{name}").Loader
    return found


def start_method(name: str) -> ForkContext | SpawnContext:
    """Return the way to start processes of a loader."""
    return multiprocessing.get_context("fork") if load(name).forks else multiprocessing.get_context("spawn")


def import_ahead(name: str, reports: list[Report]) -> None:
    """Import the modules that ranks have imported, so that later ranks are forked with them."""
    adapter = load(name)
    for module in dict.fromkeys(module for report in reports for module in report.modules):
        if adapter.forks and module.partition(".")[0] not in adapter.imported_by_ranks:
            with contextlib.suppress(Exception):  # names that cannot be imported: each rank makes them itself
                importlib.import_module(module)


def run_segment(
    name: str, jobs: list[Job], order: Order, *, timeout: float, log: Path
) -> tuple[list[Report], str]:
    """Run all ranks of a segment.

    Returns:
        their reports, and a sentence if a rank died or none of them came to an end.
    """
    context = start_method(name)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    pipes, processes = [], []
    for job in jobs:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(name, job, order, there, environment, log))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        return _reports(pipes, timeout)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()  # also one that has not made its group yet
            process.join()
            process.close()


def _reports(pipes: list[Connection], timeout: float) -> tuple[list[Report], str]:
    deadline = time.monotonic() + timeout
    reports: dict[int, Report] = {}
    died = ""
    while len(reports) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in reports]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for number in [number for number, pipe in enumerate(pipes) if pipe in ready]:
            try:
                reports[number] = pickle.loads(pipes[number].recv_bytes())
            except EOFError:
                died = "the process of a rank died"
                reports[number] = Report(phase="died", error=died)
            if reports[number].error:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    found = [reports[number] for number in sorted(reports)]
    if len(reports) < len(pipes) and not any(report.error for report in found):
        return found, f"no answer of {len(pipes) - len(reports)} ranks in {timeout:.0f} s"
    return found, died


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- in the process of a rank


def _rank(
    name: str, job: Job, order: Order, pipe: Connection, environment: dict[str, str], log: Path
) -> None:
    parent = os.getppid()
    os.setsid()  # one group with its workers
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    ranks = {"RANK": job.rank, "LOCAL_RANK": job.rank, "GLOBAL_RANK": job.rank, "NODE_RANK": 0}
    worlds = {"WORLD_SIZE": job.world, "LOCAL_WORLD_SIZE": job.world}
    os.environ.update(environment | {key: str(value) for key, value in (ranks | worlds).items()})
    report, before = Report(), {*sys.modules}
    try:
        _work(name, job, order, report)
    except BaseException as error:  # noqa: BLE001  the error of a loader is a result
        traceback.print_exc()
        report.error = _words(error)
    report.modules = [module for module in sys.modules if module not in before]
    pipe.send_bytes(pickle.dumps(report))
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = (lines[-1] if "Traceback" in str(error) else lines[0]) if lines else ""
    if not line:  # an assertion without a message
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {line}"[:240]


def _work(name: str, job: Job, order: Order, report: Report) -> None:
    adapter = load(name)
    loader = adapter(job)
    if order.states is not None:
        report.phase = "restore"
        loader.restore([pickle.loads(state) for state in order.states])
    validation = (
        _Validation(adapter(replace(job, collection="validation", epoch=0, step=0)), report)
        if order.validation
        else None
    )
    report.phase = "first batch"
    taken, empty = 0, 0
    number, done = job.epoch, job.step
    end = order.segment.steps
    while end is not None or order.total is not None or number < EPOCHS:
        before = taken
        report.epochs.setdefault(number, [])
        for numbers in loader.epoch(number, done):
            report.phase = "later batch"
            taken += 1
            if end is None or taken <= end:
                report.epochs[number].append(numbers)
            if validation is not None and taken % VALIDATE_EVERY == 0:
                validation.step()
            if taken == end:
                report.phase = "save"
                report.state = pickle.dumps(loader.state())
                report.phase = "later batch"
            if taken == (order.total if end is None else end + order.segment.lost_steps):
                return
        empty = 0 if taken > before else empty + 1
        if empty == _EMPTY_EPOCHS:
            raise RuntimeError(f"{empty} epochs without a batch")
        number, done = number + 1, 0


class _Validation:
    """The validation loader of a rank: passes follow each other; an incomplete last pass is not reported."""

    def __init__(self, loader: Adapter, report: Report) -> None:
        self._loader, self._report = loader, report
        self._number = 0
        self._steps: Steps = []
        self._batches = loader.epoch(0, 0)

    def step(self) -> None:
        """Take one batch, of the next pass if this one is complete."""
        for _ in range(2):
            numbers = next(self._batches, None)
            if numbers is not None:
                self._steps.append(numbers)
                return
            self._report.passes.append(self._steps)
            self._steps = []
            self._number += 1
            self._batches = self._loader.epoch(self._number, 0)
        raise RuntimeError("the validation loader gives nothing")
