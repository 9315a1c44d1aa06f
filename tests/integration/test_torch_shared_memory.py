"""Batches of DataLoader workers travel in shared memory, belong to whoever holds them, and leave nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="nameless memory is Linux's"),
]

BATCH, STEPS, WIDTH = 8, 60, 1024
BATCH_BYTES = BATCH * WIDTH * 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("data") / "rows")
    schema = {"wide": f"int64[{WIDTH}]", "many": "int32[*]", "n": "int64", "name": "str"}
    with shardkit.create(root, schema=schema, format="arrow") as writer:
        for n in range(STEPS * BATCH):
            many = np.full(900 + n % 200, n, np.int32)
            writer.add({"wide": np.full(WIDTH, n), "many": many, "n": n, "name": str(n)})
    return root


def _open(root: str, **settings: Any) -> Any:
    ds = shardkit.open(root)
    return shardkit.torch.dataset(ds, ds.plan(global_batch=BATCH, lanes=2, window_blocks=4), **settings)


def _values(batch: Any) -> list[Any]:
    many = tuple(np.asarray(part).tolist() for part in batch["many"])
    return [np.asarray(batch["wide"])[:, ::7].tolist(), *many, np.asarray(batch["n"]).tolist(), batch["name"]]


def _slots() -> int:
    """How much of the workers' memory this process maps."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if "memfd:shardkit-batch" in line]
    return sum(int(end, 16) - int(first, 16) for first, end in spans)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_batches_of_workers_are_those_of_one_process_and_stay_so(root: str, method: str) -> None:
    alone = [_values(batch) for batch in DataLoader(_open(root), batch_size=None)]
    loader = DataLoader(_open(root), batch_size=None, num_workers=2, multiprocessing_context=method)
    held = []
    for batch in loader:
        assert isinstance(batch["wide"], torch.Tensor)
        held.append(batch)
    assert _slots() >= STEPS * BATCH_BYTES  # they came that way, and each is its own
    assert [_values(batch) for batch in held] == alone
    kept = held[7]
    del held, batch
    assert _slots() < 3 * BATCH_BYTES  # what is kept pins itself alone
    assert _values(kept) == alone[7]


def test_memory_is_used_again_once_a_batch_is_dropped(root: str) -> None:
    most = 0
    for batch in DataLoader(_open(root, tensors=False), batch_size=None, num_workers=2, collate_fn=_same):
        assert type(batch["wide"]) is np.ndarray
        most = max(most, _slots())
    assert (
        most <= 22 * 2 * BATCH_BYTES
    )  # not 60: of each worker what is under way, eight that it gathers among it


def _same(batch: Any) -> Any:
    return batch


def test_a_batch_that_another_process_has_too_stays_as_it_is(root: str) -> None:
    """A child that was forked while a batch was held looks at the same memory."""
    context = multiprocessing.get_context("fork")
    told, asked = context.Pipe()
    batches = iter(DataLoader(_open(root), batch_size=None, num_workers=1))
    held = [next(batches)]
    first = _values(held[0])

    def look() -> None:
        told.recv()
        told.send(_values(held[0]))

    child = context.Process(target=look)
    child.start()
    held.clear()
    for _ in batches:
        pass
    asked.send("now")
    found = asked.recv()
    child.join(20)
    assert found == first


class Keeps:
    """Compares what it was given in earlier steps, and keeps, with what it was then."""

    def __init__(self) -> None:
        self.kept: list[tuple[Any, Any]] = []

    def __call__(self, fields: dict[str, Any], rngs: Any) -> dict[str, Any]:
        self.kept.append((fields["wide"], fields["wide"].copy()))
        same = all(np.array_equal(one, then) for one, then in self.kept)
        return {**fields, "same": np.full(len(fields["n"]), same)}


def test_what_a_transform_keeps_in_its_worker_stays_as_it_is(root: str) -> None:
    data = _open(root, batch_transform=Keeps())
    assert all(bool(batch["same"].all()) for batch in DataLoader(data, batch_size=None, num_workers=1))


class Twice(IterableDataset[Any]):
    """Hands out each batch two times, as programs do that repeat samples."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        for batch in self.data:
            yield batch
            yield batch


def test_a_batch_that_is_sent_twice_arrives_as_two(root: str) -> None:
    batches = list(DataLoader(Twice(_open(root)), batch_size=None, num_workers=1, collate_fn=_same))
    alone = [_values(batch) for batch in DataLoader(_open(root), batch_size=None)]
    for number, batch in enumerate(batches):
        assert _values(batch) == alone[number // 2]
        batch["wide"].zero_()  # and nobody else's


_PROGRAM = """
import os, signal, sys
import shardkit, shardkit.torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    ds = shardkit.open(sys.argv[1])
    data = shardkit.torch.dataset(ds, ds.plan(global_batch=8, lanes=2, window_blocks=4))
    loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[2])
    batches = iter(loader)
    held = [next(batches) for _ in range(5)]
    assert "memfd:shardkit-batch" in open("/proc/self/maps").read()
    print(*[one.pid for one in batches._workers], flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("victim", "method"), [("trainer", "fork"), ("all", "spawn")])
def test_killed_processes_leave_no_memory(root: str, tmp_path: Path, victim: str, method: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen(
        [sys.executable, str(program), root, method], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        workers = [int(one) for one in trainer.stdout.readline().split()]
        assert len(workers) == 2
        trainer.kill()
    if victim == "all":
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
    deadline = time.monotonic() + 60  # workers look for their parent every five seconds
    while any(map(_is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_alive, workers))
    assert not [
        name for name in set(os.listdir("/dev/shm")) - before if "torch" in name or "shardkit" in name
    ]


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
