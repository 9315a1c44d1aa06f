"""DataLoader workers that are late, slow, killed, few or many: every loop delivers the steps from its position on."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader as TorchDataLoader  # noqa: E402
from torch.utils.data import get_worker_info, random_split  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from shardkit.errors import UsageError  # noqa: E402
from tests.integration.conftest import is_running  # noqa: E402

# more workers than processors, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

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


def _loader(ds: shardkit.Dataset, steps: int, workers: int, **settings: Any) -> Any:
    return shardkit.torch.DataLoader(_data(ds, steps), num_workers=workers, **settings)


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


@pytest.mark.parametrize(
    ("steps", "late", "persistent"),
    [(7, (1, 2, 3), False), (3, (3,), True), (3, (0,), False), (1, (0, 1), True)],
)
def test_workers_that_are_late_or_slow_change_nothing(
    ds: shardkit.Dataset, steps: int, late: tuple[int, ...], persistent: bool
) -> None:
    data = _data(ds, steps, batch_transform=Slow(*late))
    settings: Any = {"num_workers": 4, "worker_init_fn": Late(*late), "persistent_workers": persistent}
    loader = shardkit.torch.DataLoader(data, **settings)
    assert [_steps(loader) for _ in range(3)] == [list(range(e * steps, (e + 1) * steps)) for e in range(3)]
    plain = TorchDataLoader(data, batch_size=None, **settings)
    for epoch in (4, 2):
        data.set_epoch(epoch)
        assert _steps(plain) == list(range(epoch * steps, (epoch + 1) * steps))


@pytest.mark.drill(only=True)
@pytest.mark.parametrize(
    ("context", "persistent"), [("spawn", False), ("spawn", True), ("forkserver", False)]
)
def test_workers_that_are_started_otherwise_change_nothing(
    ds: shardkit.Dataset, context: str, persistent: bool
) -> None:
    data = _data(ds, 5, batch_transform=Slow(0))
    loader = shardkit.torch.DataLoader(
        data, num_workers=2, worker_init_fn=Late(1, seconds=1.0), persistent_workers=persistent,
        multiprocessing_context=context,
    )  # fmt: skip
    assert [_steps(loader, 3), _steps(loader), _steps(loader)] == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]]
    assert loader.state_dict()["step"] == 10


def test_ranks_that_leave_a_loop_near_its_end_continue_at_the_same_step(ds: shardkit.Dataset) -> None:
    """Ranks with other numbers of workers and other delays have all received 99 of 100 batches."""
    plan = ds.plan(global_batch=BATCH, lanes=2)
    found = []
    for rank, (workers, late) in enumerate([(2, ()), (3, (0, 2))]):
        data = shardkit.torch.dataset(ds, plan, rank=rank, world=2)
        loader = shardkit.torch.DataLoader(data, num_workers=workers, worker_init_fn=Late(*late))
        found.append((len(_steps(loader, 99)), loader.state_dict()["step"], _steps(loader)))
    assert found == [(99, 99, [99])] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_ends_the_loop_and_the_next_one_continues(
    ds: shardkit.Dataset, persistent: bool
) -> None:
    loader = _loader(ds, 50, 3, persistent_workers=persistent)
    batches: Any = iter(loader)
    seen = [next(batches).step for _ in range(4)]
    victim = batches._batches._workers[0].pid
    with pytest.raises(RuntimeError, match="killed by signal"):
        _kill(victim)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        seen.extend(batch.step for batch in batches)
    del batches
    assert seen + _steps(loader) == list(range(50))


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    time.sleep(60)  # torch raises in the middle of it


def test_samples_by_number_are_refused_with_the_way_on(ds: shardkit.Dataset) -> None:
    part = random_split(_data(ds, 5), [2, 3])[0]
    with pytest.raises(UsageError, match="has steps, not samples by number: give Subset, random_split"):
        part[0]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_a_collate_function_takes_apart_count_too(
    ds: shardkit.Dataset, persistent: bool
) -> None:
    loader = _loader(ds, 5, 3, worker_init_fn=Late(1, 2), collate_fn=lambda batch: (batch.step, batch["n"]),
                     persistent_workers=persistent)  # fmt: skip
    assert [step for step, _ in zip((step for step, _ in loader), range(3), strict=False)] == [0, 1, 2]
    assert [[step for step, _ in loader] for _ in range(2)] == [[4], [5, 6, 7, 8, 9]]


def test_cells_are_batches_too(ds: shardkit.Dataset) -> None:
    loader = shardkit.torch.DataLoader(_data(ds, 5, by_cell=True), num_workers=3)
    assert [[cell.step for cell in cells] for cells in loader] == [[step] * 2 for step in range(5)]


def test_processes_that_are_no_workers_have_loops_of_their_own(ds: shardkit.Dataset) -> None:
    """Ranks that a launcher starts with one dataset in hand."""
    data = _data(ds, 7)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_two_epochs, args=(data, number, queue)) for number in range(3)]
    for rank in ranks:
        rank.start()
    got = dict(queue.get(timeout=290) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    assert got == {
        0: [list(range(7)), list(range(7, 14))],
        1: [list(range(70, 77)), list(range(77, 84))],
        2: "this dataset was made in another process",
    }
    assert _steps(shardkit.torch.DataLoader(data, num_workers=2)) == list(range(7))


def _two_epochs(data: Any, number: int, queue: Any) -> None:
    if number == 2:
        try:
            next(iter(TorchDataLoader(data, batch_size=None, num_workers=1)))
        except UsageError as error:
            queue.put((number, str(error).rpartition("UsageError: ")[2].partition(",")[0]))
        return
    if number:
        data.set_epoch(10 * number)
    loader = shardkit.torch.DataLoader(
        data, num_workers=1 + number, worker_init_fn=Late(1, seconds=0.2), persistent_workers=True,
        multiprocessing_context="fork" if number else None,
    )  # fmt: skip
    queue.put((number, [_steps(loader) for _ in range(2)]))


_PROGRAM = """
import multiprocessing, sys
import shardkit, shardkit.torch
if __name__ == "__main__":
    ds = shardkit.open(sys.argv[1])
    data = shardkit.torch.dataset(ds, ds.plan(global_batch=8, lanes=2))
    batches = iter(shardkit.torch.DataLoader(data, num_workers=2, multiprocessing_context="fork"))
    held = [next(batches) for _ in range(5)]
    print(*[one.pid for one in multiprocessing.active_children()], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("victim", ["trainer", "all"])
def test_killed_processes_leave_no_memory(ds: shardkit.Dataset, tmp_path: Path, victim: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(program), ds.reader.urls[0]],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None
        workers = [int(one) for one in trainer.stdout.readline().split()]
        assert len(workers) == 2
        trainer.kill()
    if victim == "all":
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 60  # workers look for their parent every five seconds
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    assert not [
        name
        for name in set(os.listdir("/dev/shm")) - before
        if f"_{trainer.pid}_" in name or "shardkit" in name
    ]


# under load


@pytest.fixture
def busy() -> Iterator[None]:
    """Processes that compute next to the test; the rest of the suite is load as well."""
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


@pytest.mark.drill(only=True)
@pytest.mark.parametrize("turn", range(20))
def test_under_load_no_loop_is_wrong(ds: shardkit.Dataset, busy: None, turn: int) -> None:
    """25 loops a turn, some left early, workers late at random."""
    seed = f"{os.environ.get('SHARDKIT_SEED', '17')}-{turn}"
    chance = random.Random(seed)
    wrong: list[Any] = []
    for _ in range(5):
        steps, workers = chance.choice([1, 3, 7, 12]), chance.choice([1, 2, 4, 5])
        late = Late(
            *chance.sample(range(workers), chance.randrange(workers + 1)), seconds=chance.random() / 10
        )
        loader = _loader(ds, steps, workers, worker_init_fn=late, persistent_workers=chance.random() < 0.5)
        position = 0
        for _ in range(5):
            most = chance.choice([1000, chance.randrange(1, steps + 1)])
            stop = min(position + most, (position // steps + 1) * steps)
            got = _steps(loader, most)
            if got != list(range(position, stop)):
                wrong.append((steps, workers, late.workers, position, most, got))
            position = stop
    print(f"seed {seed}: {len(wrong)} wrong loops of 25")
    assert not wrong
