"""The loader delivers the plan: equal cells for every rank count, exact resume, every sample once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.errors import (
    ConfigurationError,
    StateError,
    UsageError,
)
from shardkit.loader import Batch

ROWS = 1003
SCHEMA = {"image": "uint8[4,4]", "label": "int64", "text": "str", "blob": "bytes"}


def _sample(number: int) -> dict[str, Any]:
    image = np.full((4, 4), number % 251, dtype=np.uint8)
    return {
        "image": image,
        "label": number % 7,
        "text": f"text {number}",
        "blob": number.to_bytes(4, "little"),
    }


@pytest.fixture(scope="module", params=["tar", "arrow"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("data") / request.param
    with shardkit.create(
        str(root),
        schema=SCHEMA,
        stratify="label",
        format=request.param,
        shard_size="256KiB",
        block_size="32KiB",
    ) as writer:
        for number in range(ROWS):
            writer.add(_sample(number), key=f"n{number}")
    return shardkit.open(str(root))


def _stream(loader: Any) -> Iterator[tuple[int, int, bytes]]:
    for batch in loader:
        for sample, blob in zip(batch.samples.tolist(), batch["blob"], strict=True):
            yield batch.step, sample, blob


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_resume_goes_on_exactly_where_it_stopped(dataset: shardkit.Dataset, data: st.DataObject) -> None:
    plan = dataset.plan(global_batch=30, lanes=6, remainder="short")
    loader = dataset.loader(plan, tensors=False)
    whole = list(_stream(loader)) + list(_stream(loader))
    stop = data.draw(st.integers(0, 2 * len(loader) - 1))
    first = dataset.loader(plan, tensors=False)
    got: list[tuple[int, int, bytes]] = []
    state = first.state_dict()
    while state["step"] < stop:
        for batch in first:
            got += [(batch.step, s, b) for s, b in zip(batch.samples.tolist(), batch["blob"], strict=True)]
            state = first.state_dict(after=batch)
            if state["step"] == stop:
                break
    second = dataset.loader(plan, tensors=False)
    second.load_state_dict(state)
    while len(got) < len(whole):
        got += list(_stream(second))
    assert got == whole


def test_by_cell_gives_the_cells_of_the_plan(dataset: shardkit.Dataset) -> None:
    plan = dataset.plan(global_batch=20, lanes=5)
    loader = dataset.loader(plan, rank=1, world=2, uneven=True, by_cell=True, tensors=False)
    for handed in loader:
        cells: list[Batch] = handed  # type: ignore[assignment]
        assert [c.lane for c in cells] == loader.lanes
        for cell in cells:
            np.testing.assert_array_equal(cell.samples, plan.cell(cell.step, cell.lane))


def test_weights_make_the_mean_over_ranks_the_mean_over_the_batch(dataset: shardkit.Dataset) -> None:
    plan = dataset.plan(global_batch=30, lanes=6, remainder="short")
    ranks = [list(dataset.loader(plan, rank=r, world=4, uneven=True, tensors=False)) for r in range(4)]
    for batches in zip(*ranks, strict=True):
        everyone = np.concatenate([b["label"] for b in batches]).mean()
        weighted = sum(b.weight * b["label"].mean() for b in batches if len(b.samples)) / 4
        np.testing.assert_allclose(weighted, everyone)


def test_unequal_ranks_are_refused_unless_asked_for(dataset: shardkit.Dataset) -> None:
    plan = dataset.plan(global_batch=20, lanes=5)
    with pytest.raises(ConfigurationError, match=r"World sizes that fit: 1, 5"):
        dataset.loader(plan, rank=0, world=2)
    short = dataset.plan(global_batch=20, lanes=4, remainder="short")
    with pytest.raises(ConfigurationError, match="last step"):
        dataset.loader(short, rank=0, world=2)
    with pytest.raises(ConfigurationError, match="cannot share"):
        dataset.loader(plan, rank=0, world=6)


def test_state_of_another_plan_or_dataset_is_refused(dataset: shardkit.Dataset) -> None:
    loader = dataset.loader(dataset.plan(global_batch=20, lanes=5))
    other = dataset.loader(dataset.plan(global_batch=20, lanes=5, seed=1))
    with pytest.raises(StateError, match="plan is"):
        loader.load_state_dict(other.state_dict())
    with pytest.raises(StateError, match="manifest is"):
        loader.load_state_dict({**loader.state_dict(), "manifest": "sha256:" + "0" * 64})
    for broken in ({"version": 2}, {**loader.state_dict(), "step": -1}, {**loader.state_dict(), "step": "3"}):
        with pytest.raises(StateError):
            loader.load_state_dict(broken)


def test_a_plan_of_another_dataset_is_refused(dataset: shardkit.Dataset) -> None:
    other = dataset.select(where="label < 3")
    with pytest.raises(UsageError, match="this plan was made for"):
        dataset.loader(other.plan(global_batch=20, lanes=5))


def test_batch_transform_sees_the_same_generators(dataset: shardkit.Dataset) -> None:
    plan = dataset.plan(global_batch=20, lanes=5)

    def per_sample(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {"noise": rng.random()}

    def per_batch(fields: dict[str, Any], rngs: Any) -> dict[str, Any]:
        return {"noise": np.array([rng.random() for rng in rngs])}

    one = next(iter(dataset.loader(plan, transform=per_sample, tensors=False)))
    other = next(iter(dataset.loader(plan, batch_transform=per_batch, tensors=False)))
    np.testing.assert_array_equal(one["noise"], other["noise"])


def test_a_step_that_needs_more_than_the_memory_bound_is_said_and_loaded(tmp_path: Path) -> None:
    with shardkit.create(
        str(tmp_path / "data"), {"x": "bytes"}, block_size="32KiB", shard_size="64KiB"
    ) as writer:
        for number in range(256):
            writer.add({"x": number.to_bytes(2, "little") * (1_000_000 if number == 77 else 8000)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=4, lanes=4, window_blocks=1)
    with (
        dataset.loader(plan, rank=0, world=1, tensors=False, run=tmp_path / "run", memory="1MiB") as loader,
        pytest.warns(RuntimeWarning, match=r"blocks of step [0-9]+ take [0-9.]+ MiB, memory=1.0 MiB"),
    ):
        seen = [int.from_bytes(x[:2], "little") for batch in loader for x in batch["x"]]
    assert sorted(seen) == list(range(256))
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("over_memory") == 1


@pytest.mark.parametrize("format", ["arrow", "tar"])
def test_memory_is_what_the_windows_need_and_less_is_refused(tmp_path: Path, format: str) -> None:
    with shardkit.create(
        str(tmp_path / "data"), {"x": "int64[128]"}, format=format, shard_size="1MiB", block_size="32KiB"
    ) as writer:
        for number in range(12800):
            writer.add({"x": np.full(128, number)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=16, lanes=8)
    with dataset.loader(plan, tensors=False) as loader:
        for _ in range(2):
            assert sorted(int(x) for batch in loader for x in batch["x"][:, 0]) == list(range(12800))
        stats, needed = loader.stats(), loader.memory_needed
    assert stats["evictions"] > 0
    assert stats["peak_bytes"] <= needed < dataset.manifest.raw_bytes / 2
    assert stats["block_reloads"] < stats["block_loads"] / 8
    with pytest.raises(ConfigurationError, match="8 lanes mix rows of 16 blocks") as told:
        dataset.loader(plan, tensors=False, memory="1MiB")
    advice = re.search(r"pass at least (\d+)", str(told.value))
    assert advice is not None
    assert int(advice[1]) == needed
    dataset.loader(plan, tensors=False, memory=needed).close()
    with pytest.raises(ConfigurationError, match=f"for each of 2 workers.*pass at least {2 * needed}"):
        dataset.loader(plan, tensors=False, memory=needed, stride=2)
    with dataset.loader(plan, rank=0, world=2, tensors=False) as half:
        assert half.memory_needed == pytest.approx(needed / 2, rel=0.01)


def test_a_full_shuffle_that_does_not_fit_is_said_without_windows(tmp_path: Path) -> None:
    with shardkit.create(str(tmp_path / "data"), {"x": "int64[1024]"}, block_size="32KiB") as writer:
        for number in range(1200):
            writer.add({"x": np.full(1024, number)})
    dataset = shardkit.open(tmp_path / "data")
    plan = dataset.plan(global_batch=16, lanes=1, shuffle="full")
    with (
        dataset.loader(plan, tensors=False, memory="2MiB") as loader,
        pytest.warns(RuntimeWarning, match=r'memory=.2MiB. is too little: .*shuffle="full"'),
    ):
        assert sorted(int(x) for batch in loader for x in batch["x"][:, 0]) == list(range(1200))


def test_the_state_of_a_parent_fits_its_amendment_up_to_where_they_part(dataset: shardkit.Dataset) -> None:
    parent = dataset.plan(global_batch=20, lanes=5)
    plan = parent.amend(from_step=30, skip=(30, 33))
    first = dataset.loader(parent, tensors=False, fields=["label"])
    taken = {}
    for batch in first:
        taken[batch.step + 1] = first.state_dict(after=batch)
    loader = dataset.loader(plan, tensors=False, fields=["label"])
    loader.load_state_dict(taken[28])
    got = [batch.samples.tolist() for batch in loader]
    assert got[:2] == [parent.step(s).ravel().tolist() for s in (28, 29)]
    assert got[2] == parent.step(33).ravel().tolist()
    loader.load_state_dict(taken[30])
    assert next(iter(loader)).samples.tolist() == got[2]
    with pytest.raises(StateError, match="differs from step 30 on"):
        loader.load_state_dict(taken[31])
    grandchild = dataset.loader(plan.amend(from_step=35, skip=(35, 36)), tensors=False, fields=["label"])
    grandchild.load_state_dict(taken[30])
    with pytest.raises(StateError, match="differs from step 30 on; load a state of step 30 or earlier"):
        grandchild.load_state_dict(taken[33])
    with pytest.raises(StateError, match="plan is"):
        first.load_state_dict(loader.state_dict())
    narrow = dataset.loader(parent.amend(from_step=40, lanes=4), tensors=False)
    narrow.load_state_dict(taken[30])
    with pytest.raises(StateError, match="step 30: up to step 40 this plan is its parent's, with 5 lanes"):
        iter(narrow)
