"""Steps come in order and whole, whoever gathers them, and nobody gathers once the iteration has ended."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardkit.loader.step_gather import GatherThreads, StepGather


@pytest.fixture(scope="module", params=[0, 1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[GatherThreads]:
    if request.param == 0:
        yield GatherThreads(None, 0)
        return
    with ThreadPoolExecutor(request.param) as pool:
        yield GatherThreads(pool, request.param)


class Table:
    """Rows that are their own number; counts how often each was taken, and by how many threads at this moment."""

    def __init__(self, rows: int, refuse: int | None = None) -> None:
        self.values = np.arange(rows, dtype=np.int64)
        self.taken: Counter[int] = Counter()
        self.active = 0
        self._refuse, self._lock = refuse, threading.Lock()

    def take(self, first: int, last: int) -> dict[str, Any]:
        with self._lock:
            self.active += 1
            self.taken.update(range(first, last))
        try:
            if self._refuse is not None and first <= self._refuse < last:
                raise ValueError(f"row {self._refuse}")
            ends = np.arange(last - first + 1)
            return {
                "array": self.values[first:last].copy(),
                "list": [str(row) for row in range(first, last)],
                "ragged": (np.repeat(self.values[first:last], 1), ends),
            }
        finally:
            with self._lock:
                self.active -= 1


sizes_of_steps = st.lists(st.integers(0, 40), min_size=1, max_size=60)
bytes_of_steps = st.sampled_from([0, 100, 70_000, 600_000, 3 << 20, 64 << 20])


@settings(max_examples=60)
@given(sizes=sizes_of_steps, step_bytes=bytes_of_steps)
def test_every_step_is_what_one_take_would_give(
    threads: GatherThreads, sizes: list[int], step_bytes: int
) -> None:
    borders = [0, *itertools.accumulate(sizes)]
    table = Table(borders[-1])
    steps = list(StepGather(table.take, borders, threads=threads, step_bytes=step_bytes))
    assert len(steps) == len(sizes)
    for (first, last), columns in zip(itertools.pairwise(borders), steps, strict=True):
        assert columns["array"].tolist() == list(range(first, last))
        assert columns["list"] == [str(row) for row in range(first, last)]
        values, ends = columns["ragged"]
        assert values.tolist() == list(range(first, last))
        assert ends.tolist() == list(range(last - first + 1))
    assert set(table.taken.values()) <= {1}
    assert len(table.taken) == borders[-1]


@settings(max_examples=40)
@given(sizes=sizes_of_steps, data=st.data(), step_bytes=bytes_of_steps)
def test_nobody_takes_rows_after_the_iteration_was_left(
    threads: GatherThreads, sizes: list[int], data: st.DataObject, step_bytes: int
) -> None:
    borders = [0, *itertools.accumulate(sizes)]
    table = Table(borders[-1])
    gather = StepGather(table.take, borders, threads=threads, step_bytes=step_bytes)
    gathered = iter(gather)
    for _ in range(data.draw(st.integers(0, len(sizes)))):
        next(gathered)
    gather.close()
    assert table.active == 0
    before = table.taken.total()
    if threads.pool is not None:
        threads.pool.submit(int).result()  # whatever was handed to the threads before this has run
    assert table.taken.total() == before


def test_a_row_that_cannot_be_taken_is_raised_after_the_steps_before_it(threads: GatherThreads) -> None:
    table = Table(4000, refuse=3210)
    borders = list(range(0, 4001, 10))
    gather = StepGather(table.take, borders, threads=threads, step_bytes=700_000)
    seen: list[int] = []
    with pytest.raises(ValueError, match="row 3210"), contextlib.closing(gather):
        seen.extend(columns["array"][0] for columns in gather)
    assert seen == list(range(0, 10 * len(seen), 10))
    assert len(seen) > 310  # what is gathered together is lost together: at most a few steps


def test_a_thread_that_is_late_holds_nobody_up() -> None:
    late, table, mine = threading.Event(), Table(4000), []
    caller = threading.get_ident()

    def take(first: int, last: int) -> dict[str, Any]:
        if threading.get_ident() != caller:
            assert late.wait(60)  # until the caller has done everything else
        else:
            mine.append(first)
            if len(mine) == 3:
                late.set()
        return table.take(first, last)

    with ThreadPoolExecutor(1) as pool:
        borders = list(range(0, 4001, 1000))
        gather = StepGather(take, borders, threads=GatherThreads(pool, 1), step_bytes=2 << 20)
        assert [columns["array"][0] for columns in gather] == [0, 1000, 2000, 3000]
    assert len(mine) >= 3


def test_what_is_done_beside_waits_for_half_of_the_steps_and_leaves_them_to_others() -> None:
    table, caller = Table(4000), threading.get_ident()
    begun_when_asked: list[int] = []

    def beside() -> None:
        assert threading.get_ident() != caller
        begun_when_asked.append(table.taken.total())

    def take(first: int, last: int) -> dict[str, Any]:
        if threading.get_ident() == caller:
            helped.wait(60)  # so that there is something to help with
        found = table.take(first, last)
        helped.set()
        return found

    with ThreadPoolExecutor(1) as pool:
        helped = threading.Event()
        borders = list(range(0, 4001, 1000))
        gather = StepGather(take, borders, threads=GatherThreads(pool, 1), step_bytes=2 << 20, beside=beside)
        with contextlib.closing(gather):
            assert [columns["array"][0] for columns in gather] == [0, 1000, 2000, 3000]
    assert begun_when_asked
    assert min(begun_when_asked) >= 1000
