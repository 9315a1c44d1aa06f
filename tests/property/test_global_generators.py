# ruff: noqa: NPY002  these tests are about the generators of others
"""Transforms that draw from process-wide generators give the same rows whoever works them, or are refused."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import shardkit
import shardkit.torch
from shardkit.errors import ConfigurationError
from shardkit.loader.global_generators import GeneratorWatch, TrainerWaits

ROWS, BATCH, LANES = 96, 16, 4


def seed_all(of_python: int, of_numpy: int, of_torch: int) -> None:
    random.seed(of_python)
    np.random.seed(of_numpy)
    torch.manual_seed(of_torch)


def draw_once() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def draw(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Draw as libraries of augmentations do."""
    flip = random.random() < 0.5
    noise = np.random.normal(size=3) + random.gauss(0, 1)
    crop = torch.randint(0, 9, (2,)).numpy() + int(torch.rand(1).item() * 100)
    return {"n": sample["n"], "drawn": np.concatenate([[float(flip)], noise, crop])}


def decode_noisily(payload: bytes) -> np.ndarray[Any, Any]:
    return np.random.rand(2)


def draw_for_batch(fields: dict[str, Any], rngs: Any) -> dict[str, Any]:
    return {**fields, "noise": np.random.rand(len(fields["n"]))}


def identity(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return sample


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("rows") / "data"
    with shardkit.create(str(root), schema={"n": "int64", "payload": "bytes"}) as writer:
        for number in range(ROWS):
            writer.add({"n": number, "payload": b"x"})
    return shardkit.open(str(root))


@pytest.fixture(scope="module")
def plan(dataset: shardkit.Dataset) -> Any:
    return dataset.plan(global_batch=BATCH, lanes=LANES)


def rows_of(batches: Any) -> dict[int, tuple[float, ...]]:
    """Sample → what was drawn for it."""
    found: dict[int, tuple[float, ...]] = {}
    for batch in batches:
        for number, drawn in zip(np.asarray(batch["n"]).tolist(), np.asarray(batch["drawn"]), strict=True):
            assert number not in found
            found[number] = tuple(drawn.tolist())
    return found


@pytest.fixture(scope="module")
def expected(dataset: shardkit.Dataset, plan: Any) -> dict[int, tuple[float, ...]]:
    with dataset.loader(plan, transform=draw, threads=1, tensors=False) as loader:
        found = rows_of(loader)
    assert len(found) == ROWS
    assert len(set(found.values())) == ROWS, "each sample has a seed of its own"
    return found


THREAD: dict[str, Any] = {"threads": 1}
PROCESSES: dict[str, Any] = {"threads": 2, "workers": "processes"}


@pytest.mark.slow
@pytest.mark.parametrize(("world", "settings"), [(1, THREAD), (2, THREAD), (4, THREAD), (1, PROCESSES)])
def test_rows_are_equal_on_any_number_of_ranks_and_after_resuming(
    dataset: shardkit.Dataset,
    plan: Any,
    expected: dict[int, tuple[float, ...]],
    world: int,
    settings: dict[str, Any],
) -> None:
    found: dict[int, tuple[float, ...]] = {}
    for rank in range(world):
        states: list[dict[str, Any]] = []
        for begin in (0, 3):  # resumed by a new loader after three steps
            random.seed(rank), np.random.seed(begin), torch.manual_seed(7)
            with dataset.loader(
                plan, rank=rank, world=world, transform=draw, tensors=False, **settings
            ) as loader:
                if begin:
                    loader.load_state_dict(states[0])
                batches = []
                for batch in loader:
                    batches.append(batch)
                    if not begin and len(batches) == 3:
                        states.append(loader.state_dict(after=batch))
                        break
                found |= rows_of(batches)
    assert found == expected


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors
@pytest.mark.parametrize("num_workers", [0, 2, 5])
def test_rows_are_equal_for_any_number_of_dataloader_workers(
    dataset: shardkit.Dataset, plan: Any, expected: dict[int, tuple[float, ...]], num_workers: int
) -> None:
    data = shardkit.torch.dataset(dataset, plan, transform=draw)
    context = "fork" if num_workers else None  # a spawned worker imports torch first
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=num_workers, multiprocessing_context=context
    )
    assert rows_of(loader) == expected


@pytest.mark.parametrize(
    "settings", [{"threads": 4}, {"threads": 2, "prefetch": 1}, {"threads": 1, "prefetch": 2}]
)
@pytest.mark.parametrize(
    ("functions", "named"),
    [({"transform": draw}, "numpy.random"), ({"decode": {"payload": decode_noisily}}, "numpy.random")],
)
def test_threads_that_share_the_generators_refuse(
    dataset: shardkit.Dataset, plan: Any, settings: dict[str, Any], functions: dict[str, Any], named: str
) -> None:
    with (
        dataset.loader(plan, tensors=False, **functions, **settings) as loader,
        pytest.raises(ConfigurationError, match=rf'draws from .*{named}.* pass workers="processes"'),
    ):
        _loop_on(loader)


@pytest.mark.parametrize("settings", [{}, {"threads": 1}, {"threads": 1, "workers": "processes"}])
def test_a_batch_transform_has_no_seed_and_is_refused(
    dataset: shardkit.Dataset, plan: Any, settings: dict[str, Any]
) -> None:
    with (
        dataset.loader(plan, tensors=False, batch_transform=draw_for_batch, **settings) as loader,
        pytest.raises(ConfigurationError, match=r"batch_transform= draws from numpy\.random"),
    ):
        _loop_on(loader)


def _loop_on(loader: Any) -> None:
    """Epoch after epoch: a busy machine may make the batches of one while the trainer does not wait, unobserved."""
    for _ in range(200):
        list(loader)


def test_the_trainers_own_draws_continue_undisturbed(dataset: shardkit.Dataset, plan: Any) -> None:
    def trained(**settings: Any) -> list[float]:
        random.seed(1), np.random.seed(2), torch.manual_seed(3)
        drawn = []
        with dataset.loader(plan, tensors=False, **settings) as loader:
            for _ in loader:
                drawn += draw_once()
        return drawn

    assert trained(transform=draw, threads=1) == trained()


def test_a_trainer_that_draws_is_not_taken_for_the_transform(dataset: shardkit.Dataset, plan: Any) -> None:
    with dataset.loader(plan, tensors=False, transform=identity, threads=3) as loader:
        for _ in loader:
            for _ in range(200):
                random.random(), np.random.rand(), torch.rand(1)


def test_a_generator_that_is_first_used_late_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """After the calls that refuse; a warning, because another thread of the program may draw at the same time."""
    waits, calls = TrainerWaits(), itertools.count()
    watch = GeneratorWatch(waits, "the transform draws from {}")

    def work() -> float:
        return random.random() if next(calls) >= 100 else 0.0

    with waits:
        for _ in range(1000):
            watch.observe(work)
    assert caplog.messages == ["the transform draws from Python's random"]


# Each collection in the first thread ends a cycle whose finalizer lets the other threads run, as the start of a thread
# does.
COLLECT_AND_READ = """
import gc, threading, weakref
import torch
from shardkit.loader.global_generators import _torch_state

class Ring:
    def __init__(self):
        self.own = self

def read(collects):
    for _ in range(200):
        if collects:
            gc.disable()
            weakref.finalize(Ring(), lambda: threading.Thread(target=int).start())
            gc.enable()
        _torch_state(torch.default_generator)

gc.set_threshold(1)
threads = [threading.Thread(target=read, args=(number == 0,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
print("read")
"""


def test_a_collection_while_torchs_state_is_read_stops_no_thread() -> None:
    """torch keeps a lock meanwhile; threads that wait for it let no other run."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT_AND_READ], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr
