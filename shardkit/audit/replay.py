"""Recompute the step digests of a plan.

A replay takes about 100 ns per sample and core. With `jobs` above 1, the steps are distributed over processes.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.audit.result import Coverage
from shardkit.errors import RunError
from shardkit.ledger import step_digests
from shardkit.plan import Plan

_CHUNK = 1 << 20  # samples replayed at once by each process
MAX_COVERAGE_ROWS = 1 << 31
"""Largest number of rows for which coverage is counted. Counting takes one byte per row."""

_sha256 = hashlib.sha256


class ReplayedSteps(NamedTuple):
    """Digests and numbers of rows of consecutive planned steps."""

    first: int
    digests: NDArray[np.uint8]  # (steps, 32)
    rows: NDArray[np.int64]  # (steps,)


def cell_digests(cells: NDArray[np.int64]) -> tuple[bytes, NDArray[np.int64]]:
    """Return the digests (16 bytes each, concatenated) and numbers of samples of cells.

    Args:
        cells: (n, m) int64. Empty slots hold -1 and come last.
    """
    size, step = cells.shape[1], 8 * cells.shape[1]
    data = np.ascontiguousarray(cells, dtype="<i8").data.cast("B")
    rows = np.full(len(cells), size, dtype=np.int64)
    short = np.flatnonzero(cells[:, -1] < 0)
    rows[short] = (cells[short] >= 0).sum(axis=1)
    ends = (np.arange(len(cells)) * step + 8 * rows).tolist()
    digests = [
        _sha256(data[at:end]).digest()[:16] for at, end in zip(range(0, len(data), step), ends, strict=True)
    ]
    return b"".join(digests), rows


def replay(
    plan: Plan, first: int, last: int, *, jobs: int = 1, coverage: list[Coverage] | None = None
) -> Iterator[ReplayedSteps]:
    """Yield the steps [first, last) of the plan in order, several at a time.

    `coverage` receives the coverage of each epoch, if the plan has epochs and at most `MAX_COVERAGE_ROWS` rows.
    """
    counted = coverage is not None and _has_epochs(plan) and plan.population.rows <= MAX_COVERAGE_ROWS
    with ExitStack() as stack:
        if counted:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardkit-audit-")))
        pool = _start_processes(plan, jobs, stack) if jobs > 1 else None
        for begin, end in stretches(plan, first, last):
            seen = None
            if counted:
                seen = folder / f"epoch-{begin}"
                with seen.open("wb") as file:
                    file.truncate(max(1, plan.population.rows))
            drawn = 0
            # even an epoch of few samples is divided between all processes
            size = max(1, min(_CHUNK // plan.global_batch, -(-(end - begin) // jobs)))
            spans = [(at, min(end, at + size), seen) for at in range(begin, end, size)]
            for steps in _replay_spans(plan, spans) if pool is None else _shared_out(pool, spans):
                drawn += int(steps.rows.sum())
                yield steps
            if coverage is not None and seen is not None:
                coverage.append(_count(plan, begin, end, drawn, seen))
                seen.unlink()


def _count(plan: Plan, first: int, last: int, drawn: int, seen: Path) -> Coverage:
    begin, end = plan.bounds(first, passes=True)
    distinct = int(np.count_nonzero(np.memmap(seen, dtype=np.bool_, mode="r")))
    epoch = begin // (plan.steps_per_pass or 1)
    rows = plan.population.rows
    remainder = rows % plan.global_batch if plan.settings.remainder == "drop" else 0
    if any(plan.settings.canonical().get(name) for name in ("buckets", "join")):
        remainder = -1  # depends on more than the number of rows
    return Coverage(epoch, first, last, begin, end, drawn, distinct, rows, remainder)


def _has_epochs(plan: Plan) -> bool:
    return plan.steps_per_pass is not None


def stretches(plan: Plan, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the steps [first, last) in ranges with one epoch and one cell size each."""
    while first < last:
        end = min(last, plan.bounds(first, passes=True)[1]) if _has_epochs(plan) else last
        if first < plan.from_step:
            end = min(end, plan.from_step)  # an amendment may change the size of cells
        yield first, end
        first = end


Span = tuple[int, int, Path | None]
"""(first step, end, file in which the samples are marked or None)."""


def _replay_spans(plan: Plan, spans: Iterable[Span]) -> Iterator[ReplayedSteps]:
    for first, last, seen in spans:
        marks = None if seen is None else np.memmap(seen, dtype=np.bool_, mode="r+")
        digests = np.empty((last - first, plan.lanes, 16), dtype=np.uint8)
        rows = np.zeros(last - first, dtype=np.int64)
        for lane in range(plan.lanes):
            cells = plan.cells(first, last, lane)
            packed, counts = cell_digests(cells)
            digests[:, lane] = np.frombuffer(packed, dtype=np.uint8).reshape(-1, 16)
            rows += counts
            if marks is not None:
                marks[cells[cells >= 0] if int(cells.min()) < 0 else cells.ravel()] = True
        yield ReplayedSteps(first, step_digests(plan.population.identity, plan.digest, first, digests), rows)


_plan: Plan
"""Plan of a worker process."""


def _begin(plan: Plan) -> None:
    global _plan
    _plan = plan


def _work(span: Span) -> ReplayedSteps:
    return next(_replay_spans(_plan, [span]))


def _start_processes(plan: Plan, jobs: int, stack: ExitStack) -> ProcessPoolExecutor:
    """Start processes that hold the plan. They are shut down when `stack` closes."""
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of other threads
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(plan,))
    stack.callback(pool.shutdown, cancel_futures=True)
    return pool


def _shared_out(pool: ProcessPoolExecutor, spans: Iterable[Span]) -> Iterator[ReplayedSteps]:
    try:
        yield from pool.map(_work, spans)
    except BrokenProcessPool as error:
        raise RunError("a replay process died: killed, or out of memory; try again with --jobs 1") from error
