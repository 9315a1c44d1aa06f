"""Workers have the rows of the steps after the one that is put together: in order, and nothing is left."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.errors import RunError
from shardkit.loader.row_work import RowWork

BATCH, LAST, LONG_S = 30, 15, 60.0


def _loader(root: Path, *, batch: int = BATCH, lanes: int = 3, **settings: Any) -> Any:
    ds = shardkit.open(str(root))
    return ds.loader(ds.plan(global_batch=batch, lanes=lanes, seed=5), tensors=False, **settings)


def _number(sample: Mapping[str, Any]) -> int:
    return int(sample["x"][0])


def _steps_of_rows(root: Path, **plan: Any) -> dict[int, int]:
    """Row number → the step that it is of."""
    with _loader(root, **plan) as loader:
        return {row: batch.step for batch in loader for row in batch["x"][:, 0].tolist()}


def test_workers_have_the_next_step_while_one_is_put_together(root: Path) -> None:
    steps, begun = _steps_of_rows(root), threading.Event()
    waited: list[bool] = []

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        if steps[_number(sample)] == 1:
            begun.set()
        return sample

    def put_together(fields: dict[str, Any], rngs: Any) -> dict[str, Any]:
        if not waited:
            waited.append(begun.wait(LONG_S))
        return fields

    with _loader(root, transform=transform, batch_transform=put_together, threads=2) as loader:
        assert next(iter(loader)).step == 0
    assert waited == [True]


def test_with_no_prefetch_nothing_is_begun_before_it_is_asked_for(root: Path) -> None:
    steps, seen = _steps_of_rows(root), set[int]()

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        seen.add(steps[_number(sample)])
        return sample

    with _loader(root, transform=transform, prefetch=0) as loader:
        for expected, _ in zip(range(4), loader, strict=False):
            assert seen == set(range(expected + 1))


@pytest.mark.parametrize(("batch", "lanes", "by_cell"), [(1, 1, False), (2, 2, True)])
def test_steps_of_few_rows_keep_all_threads_busy(root: Path, batch: int, lanes: int, by_cell: bool) -> None:
    threads, lock, calls = 4, threading.Lock(), [0]
    together = threading.Barrier(threads)

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        with lock:
            calls[0] += 1
            early = calls[0] <= threads
        if early:
            together.wait(LONG_S)  # which breaks, and fails, unless all threads come
        return sample

    with _loader(
        root, batch=batch, lanes=lanes, by_cell=by_cell, transform=transform, threads=threads
    ) as loader:
        assert next(iter(loader)) is not None
    assert not together.broken


@pytest.mark.parametrize("where", ["begin", "transform"])
def test_what_fails_is_raised_after_the_steps_before_it(
    root: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _steps_of_rows(root)
    begin = RowWork.begin

    def fail(self: RowWork, rows: Any, step: int, *rest: Any) -> Any:
        if where == "begin" and step == 5:
            raise RunError("no workers for step 5")
        return begin(self, rows, step, *rest)

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        if where == "transform" and steps[_number(sample)] == 5:
            raise ValueError("of step 5")
        return sample

    monkeypatch.setattr(RowWork, "begin", fail)
    with _loader(root, transform=transform) as loader:
        loop = iter(loader)
        assert [next(loop).step for _ in range(5)] == [0, 1, 2, 3, 4]
        with pytest.raises(RunError, match="step 5"):
            next(loop)


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_works_on_once_a_loop_is_left(root: Path, fails: bool) -> None:
    steps, working, lock = _steps_of_rows(root), [0], threading.Lock()
    held, release = threading.Event(), threading.Event()
    last = [row for row, step in steps.items() if step == 1][
        -1
    ]  # of step 1, whose failure finds others at work

    def transform(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
        row = _number(sample)
        if fails and row == last:
            held.wait(LONG_S)
            raise ValueError("no such thing")
        with lock:
            working[0] += 1
        if steps[row] > 1:
            held.set()
            release.wait(LONG_S)
        with lock:
            working[0] -= 1
        return sample

    with _loader(root, transform=transform, threads=2) as loader:
        loop = iter(loader)
        assert next(loop).step == 0
        assert held.wait(LONG_S)
        assert working[0]
        letting_go = threading.Timer(0.2, release.set)
        letting_go.start()
        if fails:
            with pytest.raises(RunError, match="no such thing"):
                next(loop)
        else:
            loop.close()
        assert working[0] == 0
        letting_go.join()


def _noisy(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"row": _number(sample), "noise": int(rng.integers(1 << 40)), "blob": sample["blob"]}


def test_a_rank_without_rows_of_a_short_step_goes_on(root: Path) -> None:
    ds, world = shardkit.open(str(root)), 11
    plan = ds.plan(global_batch=world, lanes=world, remainder="short")  # of 1,200 rows one is left
    rows, without = [], 0
    for rank in range(world):
        with ds.loader(
            plan, rank=rank, world=world, uneven=True, tensors=False, transform=_noisy, threads=2
        ) as loader:
            loader.seek(plan.loop_steps - 3)
            batches = list(loader)
        assert len(batches) == 3
        without += not len(batches[-1].samples)
        rows += [row for batch in batches if len(batch.samples) for row in batch["row"].tolist()]
    assert without == world - 1
    assert len(rows) == len(set(rows)) == 2 * world + 1
