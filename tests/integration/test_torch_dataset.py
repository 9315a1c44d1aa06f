"""`shardkit.torch.dataset`: the order of `ds.loader` under DataLoader and StatefulDataLoader, for any workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from shardkit.errors import StateError, UsageError  # noqa: E402

# more workers than processors, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS, BATCH = 230, 20  # 11 steps: no multiple of any number of workers


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "numbers")
    with shardkit.create(
        root, schema={"x": "int64[8]", "n": "int64"}, format="arrow", block_size="1KiB"
    ) as writer:
        for n in range(ROWS):
            writer.add({"x": list(range(n, n + 8)), "n": n})
    return shardkit.open(root)


def _tuple(batch: Any) -> tuple[int, tuple[int, ...], int]:
    return batch.step, tuple(batch.samples.tolist()), int(batch["x"].sum())


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=BATCH, lanes=4)


def _reference(ds: shardkit.Dataset, epochs: int) -> list[Any]:
    loader = ds.loader(_plan(ds), tensors=True)
    return [_tuple(batch) for _ in range(epochs) for batch in loader]


def _as_is(batch: Any) -> Any:
    return batch


@pytest.mark.parametrize(
    ("workers", "context", "persistent"),
    [(0, None, False), (1, "fork", False), (2, "fork", True), (3, "fork", False), (1, "spawn", True),
     (2, "forkserver", True)],
)  # fmt: skip
def test_two_epochs_are_those_of_the_loader(
    ds: shardkit.Dataset, workers: int, context: str | None, persistent: bool
) -> None:
    data = shardkit.torch.dataset(ds, _plan(ds))
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        persistent_workers=persistent,
    )
    got = [_tuple(batch) for _ in range(2) for batch in loader]
    assert got == _reference(ds, 2)


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 2), (2, 0)])
def test_state_after_a_batch_fits_any_number_of_workers(
    ds: shardkit.Dataset, before: int, after: int
) -> None:
    whole = _reference(ds, 2)
    first = shardkit.torch.dataset(ds, _plan(ds))
    got, state = [], {}
    for batch in DataLoader(first, batch_size=None, num_workers=before):
        got.append(_tuple(batch))
        state = first.state_dict(after=batch)
        if len(got) == 4:
            break
    second = shardkit.torch.dataset(ds, _plan(ds))
    second.load_state_dict(state)
    loader = DataLoader(second, batch_size=None, num_workers=after)
    while len(got) < len(whole):
        got += [_tuple(batch) for batch in loader]
    assert got == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata 0.11 under torch 2.13
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 5, 10, 11])
def test_stateful_data_loader_resumes(ds: shardkit.Dataset, workers: int, stop: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new() -> Any:
        return stateful(shardkit.torch.dataset(ds, _plan(ds)), batch_size=None, num_workers=workers)

    whole = _reference(ds, 2)
    first, got = new(), []
    state: Any = None
    for batch in first:
        got.append(_tuple(batch))
        if len(got) == stop:
            state = first.state_dict()
            break
    second = new()
    second.load_state_dict(state)
    for _ in range(3):
        if len(got) < len(whole):
            got += [_tuple(batch) for batch in second]
    assert got == whole


def test_the_state_of_a_loop_without_workers_fits_any_number_of_workers(ds: shardkit.Dataset) -> None:
    expected = _reference(ds, 1)
    first = shardkit.torch.dataset(ds, _plan(ds))
    batches = iter(DataLoader(first, batch_size=None))
    seen = [_tuple(next(batches)) for _ in range(4)]
    for workers in (0, 1, 3):
        second = shardkit.torch.dataset(ds, _plan(ds))
        second.load_state_dict(first.state_dict())
        rest = [_tuple(batch) for batch in DataLoader(second, batch_size=None, num_workers=workers)]
        assert seen + rest == expected


def test_every_rank_of_workers_reads_its_own_lanes(ds: shardkit.Dataset) -> None:
    plan = _plan(ds)
    ranks = [
        [
            b.samples.tolist()
            for b in DataLoader(
                shardkit.torch.dataset(ds, plan, rank=r, world=2), batch_size=None, num_workers=2
            )
        ]
        for r in range(2)
    ]
    assert [a + b for a, b in zip(*ranks, strict=True)] == [
        plan.step(s).ravel().tolist() for s in range(len(ranks[0]))
    ]


def test_states_that_cannot_be_resumed_are_refused(ds: shardkit.Dataset) -> None:
    data = shardkit.torch.dataset(ds, _plan(ds))
    state = data.state_dict()
    with pytest.raises(StateError, match="plan is"):
        data.load_state_dict({**state, "plan": "0" * 64})
    with pytest.raises(StateError, match="one of 3 workers"):
        data.load_state_dict({**state, "worker": 1, "workers": 3, "until": 11})
    with pytest.raises(UsageError, match="run= is not for"):
        shardkit.torch.dataset(ds, _plan(ds), run="somewhere")


def test_set_epoch_moves_only_to_another_epoch(ds: shardkit.Dataset, tmp_path: Path) -> None:
    data = shardkit.torch.dataset(ds, _plan(ds))
    data.set_epoch(1)
    assert next(iter(data)).step == len(data)
    data.load_state_dict({**data.state_dict(after=next(iter(data))), "step": len(data) + 3})
    data.set_epoch(1)
    assert next(iter(data)).step == len(data) + 3


def test_a_batch_moved_to_a_device_keeps_what_it_is(ds: shardkit.Dataset) -> None:
    batch = next(iter(ds.loader(_plan(ds), rank=1, world=2, tensors=True)))
    moved = batch.to("cpu", non_blocking=True)
    assert (moved.step, moved.lane, moved.weight) == (batch.step, batch.lane, batch.weight)
    assert torch.equal(moved["x"], batch["x"])
    bare = type(batch)(dict(batch))  # what frameworks make that know dicts only
    assert bare.step == batch.step
    with pytest.raises(AttributeError, match="this copy of a batch has no weight"):
        _ = bare.weight
