"""DataLoader workers that are late, slow, killed, few or many: every loop is the epoch that it was begun for."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from shardkit.errors import UsageError  # noqa: E402
from tests.drills import drill_cases, drill_count  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create:UserWarning"
    ),  # more workers than processors
    pytest.mark.filterwarnings(
        "ignore:'set_vital' is deprecated:UserWarning"
    ),  # torchdata 0.11 under torch 2.13
]

BATCH = 10


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "numbers")
    with shardkit.create(root, schema={"n": "int64"}, format="arrow", block_size="1KiB") as writer:
        for n in range(100 * BATCH):
            writer.add({"n": n})
    return shardkit.open(root)


def _data(ds: shardkit.Dataset, steps: int, **settings: Any) -> Any:
    rows = ds.select(rows=np.arange(steps * BATCH))
    return shardkit.torch.dataset(rows, rows.plan(global_batch=BATCH, lanes=2), **settings)


def _steps(batches: Any, most: int = 10**6) -> list[int]:
    seen = []
    for batch in batches:
        seen.append(batch.step)
        if len(seen) == most:
            break
    return seen


class Late:
    """Some workers begin late."""

    def __init__(self, *workers: int, seconds: float = 0.5) -> None:
        self.workers, self.seconds = workers, seconds

    def __call__(self, worker: int) -> None:
        if worker in self.workers:
            time.sleep(self.seconds)


class Slow:
    """Some workers take long for a step, in every loop."""

    def __init__(self, *workers: int, seconds: float = 0.2) -> None:
        self.workers, self.seconds = workers, seconds

    def __call__(self, fields: dict[str, Any], rngs: Any) -> dict[str, Any]:
        info = get_worker_info()
        if info is not None and info.id in self.workers:
            time.sleep(self.seconds)
        return fields


def _as_tuple(batch: Any) -> tuple[int, Any]:
    return int(batch["step"]), batch["n"]


@pytest.mark.parametrize("steps", [7, 3, 1])
@pytest.mark.parametrize("late", [(1, 2, 3), (0,), (3,)])
@pytest.mark.parametrize("persistent", [False, True])
def test_forked_workers_that_are_late_or_slow_change_nothing(
    ds: shardkit.Dataset, steps: int, late: tuple[int, ...], persistent: bool
) -> None:
    data = _data(ds, steps, batch_transform=Slow(*late))
    loader = DataLoader(
        data, batch_size=None, num_workers=4, worker_init_fn=Late(*late), persistent_workers=persistent
    )
    assert [_steps(loader) for _ in range(3)] == [list(range(e * steps, (e + 1) * steps)) for e in range(3)]
    assert data.state_dict()["step"] == 3 * steps


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.parametrize(
    ("context", "persistent"),
    drill_cases([("spawn", False), ("spawn", True), ("forkserver", False)], [1, 2]),
)
def test_workers_that_are_started_otherwise_change_nothing(
    ds: shardkit.Dataset, context: str, persistent: bool
) -> None:
    data = _data(ds, 3, batch_transform=Slow(0))
    loader = DataLoader(data, batch_size=None, num_workers=2, worker_init_fn=Late(1, seconds=1.0),
                        persistent_workers=persistent, multiprocessing_context=context)  # fmt: skip
    assert [_steps(loader) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert data.state_dict()["step"] == 6


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("late", [(), (0, 1, 2), (2, 3)])
def test_resuming_near_the_end_of_an_epoch_loses_nothing(
    ds: shardkit.Dataset, late: tuple[int, ...], persistent: bool
) -> None:
    data = _data(ds, 100)
    data.load_state_dict(data.state_dict() | {"step": 98})
    loader = DataLoader(
        data, batch_size=None, num_workers=4, worker_init_fn=Late(*late), persistent_workers=persistent
    )
    assert _steps(loader) == [98, 99]
    assert _steps(loader) == list(range(100, 200))


@pytest.mark.parametrize(("steps", "most"), [(7, 1), (12, 3), (100, 1), (100, 80)])
def test_a_loop_that_is_left_early_begins_its_epoch_again(
    ds: shardkit.Dataset, steps: int, most: int
) -> None:
    data = _data(ds, steps)
    loader = DataLoader(data, batch_size=None, num_workers=4, worker_init_fn=Late(2, 3, seconds=0.1))
    for _ in range(3):
        assert _steps(loader, most) == list(range(most))
    assert _steps(loader) == list(range(steps))
    assert _steps(loader) == list(range(steps, 2 * steps))


def test_persistent_workers_that_are_left_early_begin_again(ds: shardkit.Dataset) -> None:
    loader = DataLoader(
        _data(ds, 50), batch_size=None, num_workers=3, worker_init_fn=Late(2), persistent_workers=True
    )
    for most in (5, 1, 30):
        assert _steps(loader, most) == list(range(most))
    assert _steps(loader) == list(range(50))
    assert _steps(loader, 7) == list(range(50, 57))
    assert _steps(loader) == list(range(50, 100))


@pytest.mark.parametrize(("workers", "steps"), [(0, 7), (4, 7), (4, 3)])
def test_a_loop_that_is_left_at_its_last_step_is_finished(
    ds: shardkit.Dataset, workers: int, steps: int
) -> None:
    late = Late(3, seconds=0.3) if workers else None  # with 3 steps, one that has nothing to do
    loader = DataLoader(_data(ds, steps), batch_size=None, num_workers=workers, worker_init_fn=late)
    assert [_steps(loader, steps) for _ in range(3)] == [
        list(range(e * steps, (e + 1) * steps)) for e in range(3)
    ]


def test_looking_with_a_second_loop_changes_nothing_in_the_first(ds: shardkit.Dataset) -> None:
    loader = DataLoader(_data(ds, 9), batch_size=None, num_workers=2)
    for epoch in range(3):
        seen = []
        for batch in loader:
            seen.append(batch.step)
            if len(seen) in (1, 3):
                assert _steps(loader, 1) == [9 * epoch]
        assert seen == list(range(9 * epoch, 9 * epoch + 9))


def test_two_data_loaders_over_one_dataset_begin_alike(ds: shardkit.Dataset) -> None:
    data = _data(ds, 7)
    first, second = (DataLoader(data, batch_size=None, num_workers=n, worker_init_fn=Late(1)) for n in (2, 3))
    for epoch in range(3):
        pairs = [(a.step, b.step) for a, b in zip(first, second, strict=True)]
        assert pairs == [(step, step) for step in range(7 * epoch, 7 * epoch + 7)]
    assert _steps(first) == list(range(21, 28))  # in turns they go on from each other
    assert _steps(second) == list(range(28, 35))


def test_a_killed_worker_ends_the_loop_and_the_epoch_begins_again(ds: shardkit.Dataset) -> None:
    data = _data(ds, 7)
    loader = DataLoader(data, batch_size=None, num_workers=3, worker_init_fn=Late(2, seconds=0.3))
    assert _steps(loader) == list(range(7))
    batches: Any = iter(loader)
    os.kill(batches._workers[2].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
        list(batches)
    del batches
    assert _steps(loader) == list(range(7, 14))


def test_what_is_said_during_a_loop_holds_for_the_next(ds: shardkit.Dataset) -> None:
    data = _data(ds, 7)
    loader = DataLoader(data, batch_size=None, num_workers=3, worker_init_fn=Late(1, 2))
    batches: Any = iter(loader)
    data.set_epoch(5)  # no worker has begun
    assert _steps(batches) == list(range(7))
    assert data.state_dict()["step"] == 35
    assert _steps(loader) == list(range(35, 42))
    data.load_state_dict(data.state_dict() | {"step": 3})
    assert _steps(loader) == [3, 4, 5, 6]


def test_an_equal_seed_in_every_loop_makes_them_no_less_different(ds: shardkit.Dataset) -> None:
    loader = DataLoader(_data(ds, 7), batch_size=None, num_workers=3, worker_init_fn=Late(0))
    for most, first in ((3, 0), (7, 0), (7, 7), (7, 14)):
        torch.manual_seed(0)
        assert _steps(loader, most) == list(range(first, first + most))


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_a_collate_function_takes_apart_count_too(
    ds: shardkit.Dataset, persistent: bool
) -> None:
    loader = DataLoader(_data(ds, 5), batch_size=None, num_workers=3, worker_init_fn=Late(1, 2), collate_fn=_as_tuple,
                        persistent_workers=persistent)  # fmt: skip
    assert [[step for step, _ in loader] for _ in range(3)] == [
        list(range(5 * e, 5 * e + 5)) for e in range(3)
    ]


def test_cells_are_batches_too(ds: shardkit.Dataset) -> None:
    loader = DataLoader(_data(ds, 5, by_cell=True), batch_size=None, num_workers=3, worker_init_fn=Late(0))
    assert [cells[0].step for cells, _ in zip(loader, range(2), strict=False)] == [0, 1]
    assert [[cell.step for cell in cells] for cells in loader] == [[step] * 2 for step in range(5)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 6, 7])
def test_stateful_data_loader_resumes_with_late_workers(
    ds: shardkit.Dataset, workers: int, stop: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new(persistent: bool = False) -> Any:
        return stateful(_data(ds, 7), batch_size=None, num_workers=workers, worker_init_fn=Late(0, seconds=0.3),
                        persistent_workers=persistent and workers > 0)  # fmt: skip

    first = new()
    state: Any = None
    for number, _ in enumerate(first, 1):
        if number == stop:
            state = first.state_dict()
            break
    for persistent in (False, True):
        second = new(persistent)
        second.load_state_dict(state)
        assert _steps(second) == list(range(stop, 7))
        assert [_steps(second) for _ in range(2)] == [list(range(7, 14)), list(range(14, 21))]


def test_without_workers_a_second_loop_ends_the_first(ds: shardkit.Dataset) -> None:
    loader = DataLoader(_data(ds, 7), batch_size=None)
    outer = iter(loader)
    assert [next(outer).step for _ in range(3)] == [0, 1, 2]
    assert _steps(loader, 1) == [0]
    for _ in range(2):
        with pytest.raises(UsageError, match="before step 3: another loop over this dataset"):
            next(outer)
    assert _steps(loader) == list(range(7))
    assert _steps(loader) == list(range(7, 14))


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"]
)
def test_a_copy_has_loops_of_its_own(ds: shardkit.Dataset, make: Any) -> None:
    data = _data(ds, 7)
    assert _steps(DataLoader(data, batch_size=None, num_workers=2)) == list(range(7))
    other = make(data)
    assert _steps(DataLoader(other, batch_size=None, num_workers=2)) == list(range(7, 14))
    assert _steps(DataLoader(data, batch_size=None, num_workers=2)) == list(range(7, 14))


def _two_epochs(data: Any, number: int, queue: Any) -> None:
    if number:
        data.set_epoch(10 * number)
    context = "fork" if number else None  # None: the way in which this process was started
    loader = DataLoader(data, batch_size=None, num_workers=1 + number, worker_init_fn=Late(1, seconds=0.2),
                        multiprocessing_context=context)  # fmt: skip
    queue.put((number, [_steps(loader) for _ in range(2)]))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_processes_that_are_no_workers_go_their_own_ways(ds: shardkit.Dataset, method: str) -> None:
    """Ranks that a launcher starts with one dataset in hand."""
    data = _data(ds, 7)
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    ranks = [context.Process(target=_two_epochs, args=(data, number, queue)) for number in range(2)]
    for rank in ranks:
        rank.start()
    got = dict(queue.get(timeout=290) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    assert got == {0: [list(range(7)), list(range(7, 14))], 1: [list(range(70, 77)), list(range(77, 84))]}
    assert _steps(DataLoader(data, batch_size=None, num_workers=2)) == list(range(7))


def test_threads_that_start_workers_at_once_do_not_meet(ds: shardkit.Dataset) -> None:
    data = _data(ds, 7)
    got: dict[int, list[list[int]]] = {}

    def read(number: int) -> None:
        own = data if number < 2 else _data(ds, 7)
        loader = DataLoader(own, batch_size=None, num_workers=3, worker_init_fn=Late(number, seconds=0.3))
        got[number] = [_steps(loader) for _ in range(2)]

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert got[2] == [list(range(7)), list(range(7, 14))]
    for number in (0, 1):  # over one dataset: whole epochs, whichever
        for epoch in got[number]:
            assert epoch == list(range(epoch[0], epoch[0] + 7))
            assert epoch[0] % 7 == 0


# under load


@pytest.fixture
def busy() -> Iterator[None]:
    """Four processes that compute beside the test."""
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_compute, args=(os.getpid(),), daemon=True) for _ in range(4)]
    for one in others:
        one.start()
    yield
    for one in others:
        one.kill()
        one.join()


def _compute(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(100_000))


@pytest.mark.drill
@pytest.mark.parametrize("turn", range(drill_count(20)))
def test_under_load_no_epoch_is_wrong(ds: shardkit.Dataset, busy: None, turn: int) -> None:
    """20 whole epochs a turn, some left early before, workers late at random."""
    seed = f"{os.environ.get('SHARDKIT_SEED', '17')}-{turn}"
    chance, epochs = random.Random(seed), 0
    wrong: list[Any] = []
    while epochs < 20:
        steps, workers = chance.choice([1, 3, 7, 12]), chance.choice([1, 2, 4, 5])
        late = Late(
            *chance.sample(range(workers), chance.randrange(workers + 1)), seconds=chance.random() / 10
        )
        persistent, data = chance.random() < 0.5, _data(ds, steps)
        loader = DataLoader(data, batch_size=None, num_workers=workers, worker_init_fn=late,
                            persistent_workers=persistent)  # fmt: skip
        for epoch in range(5):
            if not persistent and chance.random() < 0.3:
                most = chance.randrange(1, steps + 1)
                got = _steps(loader, most)
                if got != list(range(epoch * steps, epoch * steps + most)):
                    wrong.append((steps, workers, late.workers, persistent, epoch, most, got))
                data.set_epoch(epoch)
            got = _steps(loader)
            epochs += 1
            if got != list(range(epoch * steps, (epoch + 1) * steps)):
                wrong.append((steps, workers, late.workers, persistent, epoch, steps, got))
                break
    print(f"seed {seed}: {len(wrong)} wrong epochs of {epochs}")
    assert not wrong
