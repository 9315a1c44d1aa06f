"""Losses noted by ranks, and the samples of steps whose loss is abnormal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.audit import find_plans, find_spikes, load_run, losses_of_step
from shardkit.errors import FormatError, NotFoundError, PlanError, UsageError
from shardkit.ledger.losses import LossWriter, read_losses
from tests.command_line import call

BATCH, LANES, ROWS = 16, 4, 400


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = tmp_path_factory.mktemp("data") / "rows"
    with shardkit.create(str(root), schema={"x": "float32[4]", "source": "str"}, stratify="source") as writer:
        for n in range(ROWS):
            writer.add({"x": np.full(4, n, np.float32), "source": f"s{n % 4}"}, key=f"k{n:03d}")
    return shardkit.open(str(root))


def loss_of(samples: Any, step: int) -> Any:
    return (np.asarray(samples) % 97 / 97 + step / 1000).astype(np.float32)


def train(ds: shardkit.Dataset, run: Path, world: int, first: int, last: int, *, poison: int = -1) -> None:
    """Consume steps [first, last) on `world` ranks, one after the other, and note a loss per sample."""
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    for rank in range(world):
        with ds.loader(plan, rank=rank, world=world, run=run, uneven=True) as loader:
            loader.seek(first)
            while loader.handed_out < last:
                for batch in loader:
                    losses = loss_of(batch.samples, batch.step)
                    losses[batch.samples == poison] = 500.0
                    loader.note(batch, losses)
                    if batch.step == last - 1:
                        break


def test_losses_are_found_by_step_and_sample(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Two ranks, then three from an earlier step on, as after a kill: the newest losses count."""
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    poisoned = int(plan.step(33)[2, 1])
    train(ds, tmp_path / "run", 2, 0, 30)
    train(ds, tmp_path / "run", 3, 20, 45, poison=poisoned)
    losses = read_losses(tmp_path / "run")
    assert losses.steps.tolist() == list(range(45))
    for step in (0, 19, 20, 29, 30, 44):
        places, values, is_by_cell = losses.of_step(step)
        assert not is_by_cell
        assert places.tolist() == list(range(BATCH))
        assert np.array_equal(values, loss_of(plan.step(step).ravel(), step))
        assert losses.means[step] == pytest.approx(float(values.mean()), rel=1e-5)
    (spike,) = find_spikes(losses, window=20)
    assert (spike.step, round(spike.loss)) == (33, round((500 + 15 * 0.5) / 16))
    record = load_run(tmp_path / "run")
    samples, shares = losses_of_step(record, find_plans(record), losses, 33)
    assert (samples[0].sample, samples[0].loss, samples[0].lane, samples[0].slot) == (poisoned, 500.0, 2, 1)
    assert samples[0].key == ds.key(poisoned)
    assert samples[0].stratum == shares[0].stratum == ds[poisoned]["source"]
    assert sorted(one.sample for one in samples) == sorted(plan.step(33).ravel().tolist())
    assert sum(one.samples for one in shares) == BATCH
    assert all(one.expected == 0.25 for one in shares)
    code, told = call("audit", "spikes", tmp_path / "run", "--window", 20, "--json")
    answer = json.loads(told)
    assert (code, answer["found"], answer["step"]) == (0, 1, 33)
    assert answer["samples"][0]["sample"] == poisoned
    assert call("audit", tmp_path / "run")[0] == 0


def test_one_loss_per_cell(ds: shardkit.Dataset, tmp_path: Path) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    with ds.loader(plan, run=tmp_path / "run") as loader:
        for batch in loader:
            loader.note(batch, np.arange(LANES) + batch.step)
    losses = read_losses(tmp_path / "run")
    places, values, is_by_cell = losses.of_step(7)
    assert (places.tolist(), values.tolist(), is_by_cell) == ([0, 1, 2, 3], [7, 8, 9, 10], True)
    assert losses.means.tolist() == [step + 1.5 for step in range(ROWS // BATCH)]
    record = load_run(tmp_path / "run")
    samples, _ = losses_of_step(record, find_plans(record), losses, 7)
    assert [(one.lane, one.loss) for one in samples] == [
        (lane, lane + 7) for lane in (3, 2, 1, 0) for _ in range(4)
    ]


def test_tensors_and_mistakes(ds: shardkit.Dataset, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    plan = ds.plan(global_batch=BATCH, lanes=LANES)
    with ds.loader(plan) as loader, pytest.raises(UsageError, match="run="):
        loader.note(next(iter(loader)), np.zeros(BATCH))
    with ds.loader(plan, run=tmp_path / "run") as loader:
        batch = next(iter(loader))
        with pytest.raises(UsageError, match=r"losses of shape \(5,\), expected \(16,\).*\(4,\)"):
            loader.note(batch, np.zeros(5))
        loader.note(batch, torch.ones(BATCH, dtype=torch.bfloat16, requires_grad=True))
    losses = read_losses(tmp_path / "run")
    assert losses.of_step(0)[1].tolist() == [1.0] * BATCH
    with pytest.raises(NotFoundError, match="no losses of step 1"):
        losses.of_step(1)
    code, told = call("audit", "spikes", tmp_path / "nothing")
    assert code == 3
    assert "loader.note" in told


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), st.integers(1, 5), st.data())
def test_any_part_of_a_step_is_read_as_it_was_written(
    lanes: list[int], cell: int, data: st.DataObject
) -> None:
    """Whole cells and cells with gaps, which masked rows leave."""
    import tempfile

    slots = np.array([lane * cell + slot for lane in sorted(lanes) for slot in range(cell)], dtype=np.int64)
    kept = data.draw(st.sets(st.sampled_from(range(len(slots))), min_size=1))
    slots = slots[sorted(kept)]
    values = np.array(
        data.draw(st.lists(st.floats(-9, 9, width=32), min_size=len(slots), max_size=len(slots))), np.float32
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = LossWriter(Path(folder), rank=0, plan="ab" * 32, batch=4 * cell, lanes=4, cell_size=cell)
        writer.write(5, slots, values)
        writer.close()
        places, found, is_by_cell = read_losses(Path(folder)).of_step(5)
    if is_by_cell:  # one row in each cell: both readings are the same
        assert len(slots) == len(np.unique(slots // cell))
        places = slots
    assert places.tolist() == slots.tolist()
    assert found.tolist() == values.tolist()


def test_changed_files_are_named(ds: shardkit.Dataset, tmp_path: Path) -> None:
    train(ds, tmp_path / "run", 1, 0, 8)
    steps = tmp_path / "run" / "losses" / "00000-00000.steps"
    samples = steps.with_suffix(".samples")
    whole, values = steps.read_bytes(), samples.read_bytes()
    steps.write_bytes(whole[:-7])  # the end of a killed writer
    assert read_losses(tmp_path / "run").steps.tolist() == list(range(7))
    steps.write_bytes(whole)
    for changed in (values[:100], bytes([values[70] ^ 1]).join([values[:70], values[71:]])):
        samples.write_bytes(changed)
        losses = read_losses(tmp_path / "run")
        with pytest.raises(FormatError, match=r"the losses of step \d were changed or cut"):
            [losses.of_step(step) for step in range(8)]
    samples.unlink()
    os.mkfifo(samples)
    with pytest.raises(FormatError, match="were changed or cut"):
        read_losses(tmp_path / "run").of_step(0)
    steps.write_bytes(b"x" * 200)
    with pytest.raises(FormatError, match="no file of losses"):
        read_losses(tmp_path / "run")
    code, told = call("audit", "spikes", tmp_path / "run")
    assert code == 4
    assert "Traceback" not in told


def test_spikes_among_a_million_steps(tmp_path: Path) -> None:
    """A falling loss with noise, 50 spikes, a drop and a NaN: the spikes and the NaN are found, and nothing else."""
    from shardkit.ledger.losses import HEADER, MAGIC, RECORD

    count = 1_000_000
    draw = np.random.default_rng(3)
    means = 2 + 8 / (1 + np.arange(count) / 5000) + draw.normal(0, 0.05, count)
    spikes = np.sort(draw.choice(np.arange(1000, count), 50, replace=False))
    means[spikes] += 2
    means[500] = 0.1
    means[777_777] = np.nan
    records = np.zeros(count, RECORD)
    records["step"], records["total"], records["count"], records["cells"] = np.arange(count), 4 * means, 4, 4
    folder = tmp_path / "losses"
    folder.mkdir()
    header = np.array([(MAGIC, b"ab" * 32, 1, 16, 4)], HEADER)
    (folder / "00000-00000.steps").write_bytes(header.tobytes() + records.tobytes())
    found = {one.step for one in find_spikes(read_losses(tmp_path), threshold=12)}
    assert found == {*spikes.tolist(), 777_777}


def test_a_run_continues_without_the_steps_of_a_spike(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """As docs/loss_spikes.md says: back to a state before them, a plan that skips them, and an audit that says so."""
    plan, run = ds.plan(global_batch=BATCH, lanes=LANES, seed=2), tmp_path / "run"
    with ds.loader(plan, run=run) as loader:
        for batch in loader:
            if batch.step == 5:
                state = loader.state_dict(after=batch)
            loader.note(batch, loss_of(batch.samples, batch.step) + 100 * (batch.step in (8, 9)))
            if batch.step == 9:
                break
    spiked = [one.step for one in find_spikes(read_losses(run), threshold=50)]
    assert sorted(spiked) == [8, 9]
    amended = plan.amend(skip=(8, 10))
    with ds.loader(amended, run=run) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            loader.note(batch, loss_of(batch.samples, batch.step))
        assert loader.handed_out == ROWS // BATCH - 2
    assert find_spikes(read_losses(run), threshold=50) == []
    code, told = call("audit", run)
    assert code == 0, told
    record = load_run(run)
    samples, _ = losses_of_step(record, find_plans(record), read_losses(run), 8)
    assert sorted(one.sample for one in samples) == sorted(plan.step(10).ravel().tolist())


@pytest.mark.parametrize("weights", [None, {"s0": 3}])
def test_a_run_continues_without_the_samples_of_a_list(
    ds: shardkit.Dataset, tmp_path: Path, weights: dict[str, int] | None
) -> None:
    """A version without them, a plan that continues with it in mid-epoch, and an audit of both parts."""
    run, listed = tmp_path / "run", tmp_path / "list.txt"
    bad = [f"k{n:03d}" for n in range(0, ROWS, 7)]
    numbers = [n for n in range(ROWS) if ds.key(n) in bad]
    listed.write_text("".join(f"{n}\n" for n in numbers))
    root, ref = ds.repository.url, f"clean-{tmp_path.name[-1]}"
    code, told = call("select", root, "--exclude", listed, "--ref", ref)
    assert code == 0, told
    clean = shardkit.open(f"{root}@{ref}")
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2, weights=weights)
    amended = ds.amend(plan, to=clean, from_step=9)
    before, after = [], []
    with ds.loader(plan, run=run) as loader:
        for batch in loader:
            before += [ds.key(n) for n in batch.samples.tolist()]
            if batch.step == 8:
                state = loader.state_dict(after=batch)
                break
    with clean.loader(amended, run=run) as loader:
        loader.load_state_dict(state)
        for batch in loader:
            after += [clean.key(n) for n in batch.samples.tolist()]
    assert not set(after) & set(bad)
    if weights is None:
        assert len(set(before + after)) == len(before + after)
        kept = ROWS - len(bad) - len(set(before) - set(bad))
        assert len(after) == kept - kept % BATCH
    code, told = call("audit", run)
    assert code == 0, told
    assert call("audit", "trace", run, "--exclude", listed)[0] == 5, "steps before used some"


def test_only_fewer_samples_of_the_same_shards_continue_a_plan(ds: shardkit.Dataset, tmp_path: Path) -> None:
    plan = ds.plan(global_batch=BATCH, lanes=LANES)
    view = ds.select(rows=np.arange(300))
    assert ds.amend(plan, to=view, from_step=3).population.rows == 300
    with pytest.raises(PlanError, match="call amend of the plan's dataset"):
        view.amend(plan, to=view, from_step=3)
    with shardkit.create(str(tmp_path / "other"), schema={"x": "float32[4]"}) as writer:
        for n in range(50):
            writer.add({"x": np.full(4, n, np.float32)})
    with pytest.raises(PlanError, match="has 50 samples that"):
        ds.amend(plan, to=shardkit.open(str(tmp_path / "other")), from_step=3)
