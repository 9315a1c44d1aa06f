"""`shardkit.torch.dataset` and `DataLoader`: the order of `ds.loader`, and a state that is exact, for any workers."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader as TorchDataLoader  # noqa: E402

import shardkit  # noqa: E402
import shardkit.torch  # noqa: E402
from shardkit.errors import StateError, UsageError  # noqa: E402

# more workers than processors, on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    # torchdata 0.11 under torch 2.13
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

ROWS, BATCH, STEPS, WIDTH = 230, 20, 11, 4096  # 11 steps: no multiple of any number of workers


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / "numbers")
    schema = {"x": f"int64[{WIDTH}]", "many": "int32[*]", "n": "int64", "name": "str"}
    with shardkit.create(root, schema=schema, format="arrow", block_size="64KiB") as writer:
        for n in range(ROWS):
            writer.add({"x": np.arange(n, n + WIDTH), "many": [n] * (n % 5), "n": n, "name": str(n)})
    return shardkit.open(root)


def _values(batch: Any) -> tuple[Any, ...]:
    many = tuple(np.asarray(part).tolist() for part in batch["many"])
    return batch.step, batch.samples.tolist(), batch["x"].sum(1).tolist(), many, list(batch["name"])


def _plan(ds: shardkit.Dataset) -> Any:
    return ds.plan(global_batch=BATCH, lanes=4)


def _data(ds: shardkit.Dataset, **settings: Any) -> shardkit.torch.PlanDataset:
    return shardkit.torch.dataset(ds, _plan(ds), **settings)


@pytest.fixture(scope="module")
def reference(ds: shardkit.Dataset) -> list[Any]:
    """Values of the steps of four epochs."""
    with ds.loader(_plan(ds), tensors=True) as loader:
        return [_values(batch) for _ in range(4) for batch in loader]


def _take(loader: Any, most: int = 10**6) -> list[Any]:
    seen = []
    for batch in loader:
        seen.append(_values(batch))
        if len(seen) == most:
            break
    return seen


@pytest.mark.parametrize(
    ("workers", "context", "persistent"),
    [(0, None, False), (1, "fork", False), (2, "fork", True), (3, "fork", False), (1, "spawn", True)],
)
def test_epochs_are_those_of_the_loader(
    ds: shardkit.Dataset, reference: list[Any], workers: int, context: str | None, persistent: bool
) -> None:
    settings: Any = {
        "num_workers": workers, "multiprocessing_context": context, "persistent_workers": persistent
    }  # fmt: skip
    counting = shardkit.torch.DataLoader(_data(ds), **settings)
    assert _take(counting) + _take(counting, 4) + _take(counting) == reference[: 2 * STEPS]
    data = _data(ds)
    plain, seen = TorchDataLoader(data, batch_size=None, **settings), []
    for epoch in (2, 0, 1):
        data.set_epoch(epoch)
        seen += _take(plain)
    assert seen == reference[2 * STEPS : 3 * STEPS] + reference[: 2 * STEPS]


_moves = st.one_of(
    st.tuples(st.just("take"), st.integers(1, STEPS + 3)),
    st.tuples(st.just("epoch"), st.integers(0, 2)),
    st.tuples(st.just("seek"), st.integers(0, 3 * STEPS - 1)),
    st.tuples(st.just("resume"), st.integers(0, 3)),
)


@settings(max_examples=12, deadline=None)
@given(moves=st.lists(_moves, min_size=2, max_size=6), workers=st.integers(0, 3), persistent=st.booleans())
def test_any_sequence_of_loops_moves_and_resumes_follows_the_position(
    ds: shardkit.Dataset, reference: list[Any], moves: list[Any], workers: int, persistent: bool
) -> None:
    def new(workers: int) -> shardkit.torch.DataLoader:
        return shardkit.torch.DataLoader(
            _data(ds), num_workers=workers, persistent_workers=persistent and workers > 0
        )

    loader, position = new(workers), 0
    for what, number in [*moves, ("take", 10**6)]:
        if what == "take" and position < 3 * STEPS:
            stop = min(position + number, (position // STEPS + 1) * STEPS)
            assert _take(loader, number) == reference[position:stop]
            position = stop
        elif what == "epoch":
            loader.set_epoch(number)
            position = position if position // STEPS == number else number * STEPS
        elif what == "seek":
            loader.seek(number)
            position = number
        elif what == "resume":
            state = loader.state_dict()
            loader = new(number)
            loader.load_state_dict(state)
        assert loader.state_dict()["step"] == position
        assert loader.epoch == position // STEPS


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 2), (2, 0)])
def test_the_state_after_a_batch_fits_any_number_of_workers(
    ds: shardkit.Dataset, reference: list[Any], before: int, after: int
) -> None:
    first, seen, state = _data(ds), [], {}
    for batch in TorchDataLoader(first, batch_size=None, num_workers=before):
        seen.append(_values(batch))
        state = first.state_dict(after=batch)
        if len(seen) == 4:
            break
    second = _data(ds)
    second.load_state_dict(state)
    seen += _take(TorchDataLoader(second, batch_size=None, num_workers=after))
    assert seen == reference[:STEPS]


def _show_warnings(_worker: int) -> None:
    """Write warnings of a worker to its stderr, as outside of pytest."""
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: os.write(2, f"{message}\n".encode())  # type: ignore[assignment]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("collate", [None, lambda batch: (batch.step, batch["n"])])
def test_a_plain_data_loader_with_workers_never_repeats_without_a_word(
    ds: shardkit.Dataset, persistent: bool, collate: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    data = _data(ds)
    loader = TorchDataLoader(
        data,
        batch_size=None,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=persistent,
        worker_init_fn=_show_warnings,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loader))
        assert not caught
        next(iter(loader))
    if collate is None:
        assert ["repeats" in str(one.message) for one in caught] == [True]
    assert "this loop repeats the batches" in capfd.readouterr().err  # said by the worker
    with pytest.warns(RuntimeWarning, match="state_dict\\(after=batch\\)"):
        state = data.state_dict()
    with pytest.raises(StateError, match="does not know its step"):
        _data(ds).load_state_dict(state)
    data.set_epoch(1)
    assert data.state_dict()["step"] == STEPS
    batch = next(iter(loader))
    assert (batch.step if collate is None else batch[0]) == STEPS


def test_a_validation_loop_begins_its_epoch_again(ds: shardkit.Dataset, reference: list[Any]) -> None:
    for workers in (0, 2):
        for kind in (shardkit.torch.DataLoader, lambda data, **more: TorchDataLoader(data, None, **more)):
            data = _data(ds, restart=True)
            loader = kind(data, num_workers=workers)
            assert [_take(loader, most) for most in (3, 1, 2)] == [
                reference[:3],
                reference[:1],
                reference[:2],
            ]
            data.set_epoch(1)
            assert _take(loader, 2) == reference[STEPS : STEPS + 2]


@pytest.mark.parametrize("from_step", [STEPS // 2, STEPS, 2 * STEPS + 1])
def test_far_epochs_of_amended_plans_are_found_at_once(ds: shardkit.Dataset, from_step: int) -> None:
    plan = _plan(ds).amend(skip=(from_step, from_step + 1), from_step=from_step)
    data, step = shardkit.torch.dataset(ds, plan), 0
    for epoch in range(8):
        data.seek(10**6)
        data.set_epoch(epoch)
        assert (data.state_dict()["step"], data.epoch) == (step, epoch)
        step = plan.epoch_bounds(step)[1]
    data.set_epoch(10**12)
    assert data.epoch == 10**12
    for wrong in (_data(ds), data):
        with pytest.raises(StateError, match="steps count from 0"):
            wrong.set_epoch(2**62 - 1)


@pytest.mark.parametrize(("workers", "stop"), [(0, 5), (0, 11), (2, 1), (2, 10)])
def test_stateful_data_loader_resumes(
    ds: shardkit.Dataset, reference: list[Any], workers: int, stop: int
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def new(data: Any) -> Any:
        return stateful(data, batch_size=None, num_workers=workers)

    first, seen = new(_data(ds)), []
    state: Any = None
    for batch in first:
        seen.append(_values(batch))
        if len(seen) == stop:
            state = first.state_dict()
            break
    data = _data(ds)
    second = new(data)
    second.load_state_dict(state)
    seen += _take(second) if stop < STEPS or workers else []
    if workers:  # the position has not moved
        with pytest.warns(RuntimeWarning, match="repeats the batches of an earlier loop"):
            next(iter(second))
        with pytest.warns(RuntimeWarning, match="state_dict\\(after=batch\\)"):
            data.state_dict()
    data.set_epoch(1)
    seen += _take(second)
    assert seen == reference[: 2 * STEPS]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_whose_collation_fails_is_delivered_again(ds: shardkit.Dataset, workers: int) -> None:
    broken = torch.ones(1).share_memory_()

    def collate(batch: Any) -> int:
        if batch.step == 1 and broken:
            raise ArithmeticError("not yet")
        return int(batch.step)

    loader = shardkit.torch.DataLoader(_data(ds), num_workers=workers, collate_fn=collate)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ArithmeticError, match="not yet"):
        next(batches)
    assert loader.state_dict()["step"] == 1
    broken[0] = 0
    assert list(loader) == list(range(1, STEPS))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [TorchDataLoader, "torchdata"])
def test_a_batch_size_is_refused(ds: shardkit.Dataset, workers: int, kind: Any) -> None:
    if kind == "torchdata":
        kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    for more in ({}, {"batch_size": 4}, {"batch_size": 2, "collate_fn": list})[: 1 if workers else 3]:
        # torch waits five seconds for each worker that refused
        with pytest.raises(UsageError, match="batches of batches"):
            next(iter(kind(_data(ds), num_workers=workers, **more)))
    with pytest.raises(UsageError, match="batch_size= is decided by the plan"):
        shardkit.torch.DataLoader(_data(ds), batch_size=4)
    with pytest.raises(UsageError, match="in_order=False is not for a plan"):
        shardkit.torch.DataLoader(_data(ds), num_workers=workers, in_order=False)
    with pytest.raises(UsageError, match=r"takes the result of shardkit\.torch\.dataset"):
        shardkit.torch.DataLoader(ds)  # type: ignore[arg-type]


def test_a_loader_in_a_data_loader_is_refused(ds: shardkit.Dataset) -> None:
    with ds.loader(_plan(ds)) as loader, pytest.raises(UsageError, match=r"without torch's DataLoader"):
        next(iter(TorchDataLoader(loader, batch_size=None)))  # type: ignore[arg-type]


# a refusal while workers are started leaves torch's own cleaning up with a worker that ended
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("workers", "method"), [(0, None), (1, "fork")])
def test_accelerate_does_not_distribute_twice(ds: shardkit.Dataset, workers: int, method: str | None) -> None:
    parts = pytest.importorskip("accelerate.data_loader")
    pytest.importorskip("accelerate.state").PartialState(cpu=True)
    more: Any = {"num_workers": workers, "multiprocessing_context": method}
    data = shardkit.torch.dataset(ds, _plan(ds), rank=0, world=2)
    shard = parts.IterableDatasetShard(data, batch_size=1, num_processes=2, process_index=0)
    for loader in (
        TorchDataLoader(shard, batch_size=None, **more),
        parts.DataLoaderDispatcher(data, batch_size=None, **more),
    ):
        with pytest.raises(UsageError, match=r"accelerator\.prepare\(shardkit\.torch\.DataLoader"):
            next(iter(loader))
    del loader
    gc.collect()  # what torch says of the worker belongs to this test


def test_states_and_settings_that_do_not_fit_are_refused(ds: shardkit.Dataset) -> None:
    data = _data(ds)
    state = data.state_dict()
    with pytest.raises(StateError, match="plan is"):
        data.load_state_dict({**state, "plan": "0" * 64})
    with pytest.raises(StateError, match="state of 3 DataLoader workers, and none"):
        data.load_state_dict({**state, "worker": 1, "workers": 3, "until": 11})
    with pytest.raises(StateError, match="steps count from 0"):
        data.seek(-1)
    with pytest.raises(UsageError, match="run= is not for"):
        shardkit.torch.dataset(ds, _plan(ds), run="somewhere")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_loop_ends_the_first(ds: shardkit.Dataset, reference: list[Any], workers: int) -> None:
    loader = shardkit.torch.DataLoader(_data(ds), num_workers=workers)
    outer = iter(loader)
    assert [_values(next(outer)) for _ in range(3)] == reference[:3]
    assert _take(loader, 1) == reference[3:4]
    for _ in range(2):
        with pytest.raises(UsageError, match="ended before step 3: another loop over this dataset"):
            next(outer)
    batches = iter(loader)
    next(batches)
    loader.set_epoch(2)
    with pytest.raises(UsageError, match="its position was set"):
        next(batches)
    assert _take(loader) == reference[2 * STEPS : 3 * STEPS]


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))], ids=["copy", "pickle"]
)
def test_a_copy_has_loops_of_its_own(ds: shardkit.Dataset, make: Any) -> None:
    def steps(data: Any) -> list[int]:
        return [
            batch.step for batch in shardkit.torch.DataLoader(data, num_workers=2, persistent_workers=True)
        ]

    data = _data(ds)
    assert steps(data) == list(range(STEPS))
    other = make(data)
    assert steps(other) == list(range(STEPS, 2 * STEPS))
    assert steps(data) == list(range(STEPS, 2 * STEPS))


def test_a_batch_moved_to_a_device_keeps_what_it_is(ds: shardkit.Dataset) -> None:
    batch = next(iter(ds.loader(_plan(ds), rank=1, world=2, tensors=True)))
    moved = batch.to("cpu", non_blocking=True)
    assert torch.equal(moved["x"], batch["x"])
    for sent in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), moved):
        assert {name: type(value) for name, value in sent.items()} == {
            name: type(value) for name, value in batch.items()
        }
        assert sent["samples"].tolist() == sent.samples.tolist() == batch.samples.tolist()
        assert (sent.step, sent.lane, sent.weight) == (batch.step, batch.lane, batch.weight)
    bare = type(batch)(dict(batch))  # what frameworks make that know dicts only
    assert bare.step == batch.step
    with pytest.raises(AttributeError, match="this copy of a batch has no weight"):
        _ = bare.weight
