"""Batches that workers send in shared memory equal the loader's, and are not written to while they are referenced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from shardkit.torch.batch_memory import BatchMemory  # noqa: E402

# more workers than processors, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS, BATCH, WIDTH = 320, 16, 1024  # a field of a batch takes 64 KiB: it is sent in a slot


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("data") / "rows"
    schema = {"x": f"int32[{WIDTH}]", "few": "int64", "some": "int32[*]", "text": "str", "blob": "bytes"}
    with shardkit.create(str(root), schema=schema, format="arrow", block_size="64KiB") as writer:
        for n in range(ROWS):
            x = np.arange(n, n + WIDTH, dtype=np.int32)
            writer.add({"x": x, "few": n, "some": x[: 400 + n], "text": str(n), "blob": bytes([n % 256]) * n})
    return shardkit.open(str(root))


def copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return (
        value.clone()
        if isinstance(value, torch.Tensor)
        else value.copy()
        if isinstance(value, np.ndarray)
        else value
    )


def is_equal(one: Any, other: Any) -> bool:
    """DataLoader turns arrays into tensors and tuples into lists."""
    if isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(other, torch.Tensor | np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def aliases(batch: dict[str, Any], rngs: Any) -> dict[str, Any]:
    """Fields over the memory of others: the whole of it, a part from its start, and a part of its middle."""
    batch["same"] = batch["x"]
    batch["start"] = batch["x"][:8]
    batch["middle"] = batch["x"][4:12]
    batch["columns"] = batch["x"][:, ::2]
    return batch


@pytest.mark.parametrize(
    ("method", "tensors", "change"),
    [("fork", True, None), ("fork", False, None), ("fork", True, aliases), ("fork", False, aliases),
     pytest.param("spawn", True, aliases, marks=pytest.mark.slow)],
)  # fmt: skip
def test_batches_that_are_kept_stay_as_they_were(
    ds: shardkit.Dataset, method: str, tensors: bool, change: Any
) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=4, seed=3)
    settings: dict[str, Any] = {"tensors": tensors} | ({} if change is None else {"batch_transform": change})
    with ds.loader(plan, **settings) as loader:
        expected = [[{k: copied(v) for k, v in batch.items()} for batch in loader] for _ in range(6)]
    workers = shardkit.torch.DataLoader(
        shardkit.torch.dataset(ds, plan, **settings),
        num_workers=3, persistent_workers=True, multiprocessing_context=method,
    )  # fmt: skip
    held = [list(workers) for _ in range(6)]  # more arrays than there are slots
    held = [epoch[number % 2 :: 2] for number, epoch in enumerate(held)]
    more = [list(workers) for _ in range(2)]  # reuses what was freed
    for epoch, (batches, wanted) in enumerate(zip(held, expected, strict=True)):
        for batch, one in zip(batches, wanted[epoch % 2 :: 2], strict=True):
            assert batch.keys() == one.keys()
            assert [name for name, value in one.items() if not is_equal(batch[name], value)] == []
    assert sum(map(len, more)) == 2 * (ROWS // BATCH)


def test_slots_are_used_again(ds: shardkit.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BatchMemory] = []
    begin = BatchMemory.__init__

    def noted(self: BatchMemory, workers: int) -> None:
        begin(self, workers)
        made.append(self)

    monkeypatch.setattr(BatchMemory, "__init__", noted)
    plan = ds.plan(global_batch=BATCH, lanes=4, seed=3)
    workers = shardkit.torch.DataLoader(
        shardkit.torch.dataset(ds, plan), num_workers=2, persistent_workers=True
    )
    addresses = set()
    for _ in range(8):
        for batch in workers:
            addresses.add(batch["x"].data_ptr())
            del batch
    (memory,) = made
    used = {
        (address - memory.slots.__array_interface__["data"][0]) // memory.slots.shape[1]
        for address in addresses
    }
    assert used < set(range(len(memory.slots)))
    assert len(used) <= 2 * 2 * 8, "for 320 arrays"


def test_a_batch_can_be_sent_on(ds: shardkit.Dataset, tmp_path: Path) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=4)
    batch = next(iter(shardkit.torch.DataLoader(shardkit.torch.dataset(ds, plan), num_workers=1)))
    context = torch.multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_sum, args=(batch, results))
    child.start()
    assert results.get(timeout=120) == int(batch["x"].sum())
    child.join()


def _sum(batch: Any, results: Any) -> None:
    results.put(int(batch["x"].sum()))


@pytest.mark.parametrize("before", [False, True])
def test_one_forked_worker_uses_slots_of_its_own(ds: shardkit.Dataset, before: bool) -> None:
    """Also after a loop without workers, whose loader the worker inherits."""
    data = shardkit.torch.dataset(ds, ds.plan(global_batch=BATCH, lanes=4, seed=3))
    if before:
        list(data)
    workers = shardkit.torch.DataLoader(
        data, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    addresses = {batch["x"].data_ptr() for batch in workers}
    memory = data._batch_memory
    assert memory is not None
    first = memory.slots.__array_interface__["data"][0]
    assert all(first <= address < first + memory.slots.size for address in addresses)


def test_without_room_for_slots_batches_come_as_torch_sends_them(
    ds: shardkit.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a limit on the size of files (``ulimit -f``) or of addresses (``ulimit -v``)."""

    def refused(self: BatchMemory, workers: int) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(BatchMemory, "__init__", refused)
    plan = ds.plan(global_batch=BATCH, lanes=4, seed=3)
    batches = list(shardkit.torch.DataLoader(shardkit.torch.dataset(ds, plan), num_workers=1))
    assert [batch.step for batch in batches] == list(range(ROWS // BATCH))
    assert all(
        batch["x"][:, 0].tolist() == [int(ds[n]["x"][0]) for n in batch.samples] for batch in batches[:2]
    )
