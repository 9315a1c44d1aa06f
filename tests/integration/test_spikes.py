"""Losses noted by ranks, and the samples of steps whose loss is abnormal."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.audit import audit_run, find_plans, find_spikes, load_run, losses_of_step, rank_samples
from shardkit.errors import FormatError, NotFoundError, PlanError, ShardkitError, UsageError
from shardkit.ledger import Journal, Ledger, ledger_head, merge_journals
from shardkit.ledger.ledger import loss_check
from shardkit.ledger.losses import Losses
from tests.command_line import call, output_of
from tests.consumed_steps import batches_until
from tests.numbered_rows import write_rows

BATCH, LANES, ROWS = 16, 4, 400


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    return write_rows(tmp_path_factory.mktemp("data"), ROWS)


def loss_of(samples: Any, step: int) -> Any:
    return (np.asarray(samples) % 97 / 97 + step / 1000).astype(np.float32)


def train(ds: shardkit.Dataset, run: Path, world: int, first: int, last: int, *, poison: int = -1) -> None:
    """Consume steps [first, last) on `world` ranks, one after the other, and note a loss per sample."""
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    for rank in range(world):
        with ds.loader(plan, rank=rank, world=world, run=run, uneven=True) as loader:
            loader.seek(first)
            for batch in batches_until(loader, last):
                losses = loss_of(batch.samples, batch.step)
                losses[batch.samples == poison] = 500.0
                loader.note(batch, losses)


def read(run: Path) -> Losses:
    return Losses(merge_journals(run)[0])


def journal_of(run: Path, rank: int, world: int) -> Journal:
    return Journal(
        run / "journal", manifest=f"sha256:{'ab' * 32}", plan="cd" * 32, rank=rank, world=world, lanes=LANES,
        meta={"dataset": ["data"]},
    )  # fmt: skip


def note_step(journal: Journal, step: int, lanes: Sequence[int], places: Any, losses: Any) -> None:
    """Record a step of lanes, and losses of some places."""
    journal.record_step(step, lanes, [1] * len(lanes), np.arange(len(lanes)) + 100 * step)
    journal.record_losses(step, np.asarray(places), np.asarray(losses, np.float32))


def test_losses_are_found_by_step_and_sample(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Two ranks, then three from an earlier step on, as after a kill: the newest losses count."""
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=2)
    poisoned = int(plan.step(33)[2, 1])
    train(ds, tmp_path / "run", 2, 0, 30)
    train(ds, tmp_path / "run", 3, 20, 45, poison=poisoned)
    losses = read(tmp_path / "run")
    assert losses.steps.tolist() == list(range(45))
    for step in (0, 19, 20, 29, 30, 44):
        places, values = losses.of_step(step)
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
    losses = read(tmp_path / "run")
    places, values = losses.of_step(7)
    assert places.tolist() == list(range(BATCH))
    assert values.tolist() == np.repeat([7, 8, 9, 10], BATCH // LANES).tolist()
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
    losses = read(tmp_path / "run")
    assert losses.of_step(0)[1].tolist() == [1.0] * BATCH
    with pytest.raises(NotFoundError, match="no losses of step 1"):
        losses.of_step(1)
    code, told = call("audit", "spikes", tmp_path / "nothing")
    assert (code, "is no run directory" in told) == (3, True)
    with ds.loader(plan, run=tmp_path / "quiet") as loader:
        next(iter(loader))
    code, told = call("audit", "spikes", tmp_path / "quiet")
    assert (code, "loader.note" in told, "log.sample_losses" in told) == (3, True, True)
    with pytest.raises(NotFoundError, match="has no losses"):
        ds.losses(tmp_path / "quiet")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_part_of_a_step_is_read_as_it_was_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs of places with gaps, which masked rows and lanes of other ranks leave; the newest loss of a place counts."""
    run, expected = tmp_path_factory.mktemp("run"), dict[int, float]()
    with closing(journal_of(run, 0, 1)) as journal:
        for _ in range(data.draw(st.integers(1, 3), "times")):
            places = sorted(data.draw(st.sets(st.integers(0, 20), min_size=1)))
            values = data.draw(
                st.lists(st.floats(-9, 9, width=32), min_size=len(places), max_size=len(places))
            )
            note_step(journal, 5, range(LANES), places, values)
            expected |= zip(places, values, strict=True)
    losses = read(run)
    found, noted = losses.of_step(5)
    assert (found.tolist(), noted.tolist()) == (
        sorted(expected),
        [expected[one] for one in sorted(expected)],
    )
    assert losses.means == pytest.approx([np.mean(noted, dtype=np.float64)], rel=1e-5, abs=1e-5)


def test_changed_files_are_named(ds: shardkit.Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(ds, run, 1, 0, 8)
    (journal,) = (run / "journal").iterdir()
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-7])  # the end of a killed writer
    assert read(run).steps.tolist() == list(range(7))
    journal.write_bytes(whole)
    ledger_head(run)
    values, records = run / "ledger" / "loss_values", run / "ledger" / "losses"
    noted = values.read_bytes()
    values.write_bytes(bytes([noted[70] ^ 1]).join([noted[:70], noted[71:]]))
    with pytest.raises(FormatError, match="the losses of step 1 were changed or cut"):
        [read(run).of_step(step) for step in range(8)]
    with pytest.raises(FormatError, match="the losses of step 1 were changed or cut"):
        rank_samples(read(run), top=3)
    values.write_bytes(noted)
    for path in (values, records):
        for replace in (os.mkfifo, os.mkdir, lambda _: None):
            path.rename(tmp_path / "away")
            replace(path)
            with pytest.raises(ShardkitError, match=r"was cut|is not a regular file"):
                [read(run).of_step(step) for step in range(8)]
            output = output_of("audit", run, code=4) + output_of("audit", "spikes", run, code=4)
            assert "Traceback" not in output
            if path.exists():
                path.rmdir() if path.is_dir() else path.unlink()
            (tmp_path / "away").rename(path)
    output_of("audit", run)


def test_spikes_among_a_million_steps() -> None:
    """A falling loss with noise, 50 spikes, a drop and a NaN: the spikes and the NaN are found, and nothing else."""
    count = 1_000_000
    draw = np.random.default_rng(3)
    means = 2 + 8 / (1 + np.arange(count) / 5000) + draw.normal(0, 0.05, count)
    spikes = np.sort(draw.choice(np.arange(1000, count), 50, replace=False))
    means[spikes] += 2
    means[500] = 0.1
    means[777_777] = np.nan
    losses: Any = SimpleNamespace(steps=np.arange(count), means=means)
    found = {one.step for one in find_spikes(losses, threshold=12)}
    assert found == {*spikes.tolist(), 777_777}


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


@pytest.mark.parametrize("by_cell", [False, True])
def test_losses_as_a_table(ds: shardkit.Dataset, tmp_path: Path, by_cell: bool) -> None:
    """Steps that a start repeats, a fork, and a version without some samples; numbers are those of the open one."""
    run, listed, plan = (
        tmp_path / "run",
        tmp_path / "list.txt",
        ds.plan(global_batch=BATCH, lanes=LANES, seed=2),
    )
    expected: dict[int, dict[int, float]] = {}

    def note(first: int, last: int, world: int, more: float) -> None:
        for rank in range(world):
            with ds.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
                loader.seek(first)
                for batch in batches_until(loader, last):
                    samples = batch["x"]
                    shown = [int(ds.key(n)[1:]) for n in range(ROWS)]
                    numbers = [shown.index(n) for n in samples.tolist()]
                    losses = loss_of(samples, batch.step) + more
                    if by_cell:
                        losses = np.repeat(losses.reshape(LANES // world, -1).mean(1), BATCH // LANES)
                    kept = expected.setdefault(batch.step, {}) if rank else {}
                    expected[batch.step] = kept | dict(
                        zip(numbers, losses.astype(np.float32).tolist(), strict=True)
                    )
                    loader.note(batch, losses[:: BATCH // LANES] if by_cell else losses)

    note(0, 12, 2, 0.0)
    note(6, 9, 1, 1.0)
    listed.write_text("".join(f"k{n:03d}\n" for n in range(0, ROWS, 5)))
    output_of("amend", run, "--exclude", listed, "--from-step", 9)
    note(9, 11, 2, 2.0)
    table = ds.losses(run)
    steps, samples, losses = (table[name].to_pylist() for name in ("step", "sample", "loss"))
    assert steps == sorted(steps)
    found: dict[int, dict[int, float]] = {}
    for step, sample, loss in zip(steps, samples, losses, strict=True):
        found.setdefault(step, {})[sample] = loss
    assert found == {step: pytest.approx(expected[step]) for step in range(11)}
    strata = table["stratum"].to_pylist()
    assert strata == [ds[n]["source"] for n in samples]
    clean = ds.at(load_run(run).plans[-1]["manifest"])
    numbers = clean.losses(run)["sample"].to_pylist()
    assert [None if n is None else clean.key(n) for n in numbers] == [
        ds.key(n) if int(ds.key(n)[1:]) % 5 else None for n in samples
    ]


def test_a_page_shows_the_samples(tmp_path: Path) -> None:
    """Texts are escaped, pictures are shown, other bytes are described; nothing on the page can run."""
    pillow = pytest.importorskip("PIL.Image")
    picture = io.BytesIO()
    pillow.new("RGB", (8, 8), (255, 0, 0)).save(picture, "PNG")
    root, run = tmp_path / "data", tmp_path / "run"
    schema = {"text": "str", "image": "bytes", "raw": "bytes"}
    with shardkit.create(str(root), schema=schema) as writer:
        for n in range(8):
            text = f"<script>alert({n})</script>" + "word " * 2000
            writer.add({"text": text, "image": picture.getvalue(), "raw": b"\xff\x00"}, key=f"k{n}")
    dataset = shardkit.open(str(root))
    with dataset.loader(dataset.plan(global_batch=4), run=run) as loader:
        for batch in loader:
            loader.note(batch, np.arange(4.0))
    code, told = call("audit", "spikes", run, "--step", 1, "--top", 2, "--open", "--json")
    answer = json.loads(told)
    assert code == 0
    page = Path(answer["page"]).read_text()
    shown = [one["key"] for one in answer["samples"]]
    assert page.index(f"key {shown[0]}") < page.index(f"key {shown[1]}")
    assert (page.count("<h3>"), page.count("data:image/png;base64,"), page.count("<script")) == (2, 2, 0)
    assert page.count("&lt;script&gt;alert(") == 2
    assert len(page) < 20_000
    assert "bytes, 2 bytes" in page


def test_the_ledger_covers_losses(ds: shardkit.Dataset, tmp_path: Path) -> None:
    """Up to a checkpoint. A change with all checksums in order is a violation."""
    run = tmp_path / "run"
    train(ds, run, 2, 0, 4)
    assert ledger_head(run, 4)["steps"]["size"] == 4
    train(ds, run, 2, 4, 9)
    before = ledger_head(run, 8)
    assert ledger_head(run, 8) == before, "nothing is new"
    train(ds, run, 1, 9, 11)
    result = audit_run(run)
    assert (result.exit_code, len(result.losses)) == (0, 64)
    covered = [(one["first"], one["end"]) for one in load_run(run).events if one["kind"] == "losses"]
    assert covered == [(0, 8), (8, 18)]
    with Ledger(run) as ledger:
        records, values = (
            ledger.loss_records().copy(),
            np.frombuffer(ledger.loss_values(0, 1 << 20), "<f4").copy(),
        )
        values[2] = 0.5
        check = at = 0
        for one in records:
            body, end = one.tobytes()[:-8], at + int(one["count"])
            check = one["check"] = loss_check(body, values[at:end].tobytes(), int(check))
            at = end
        (run / "ledger" / "losses").write_bytes(records.tobytes())
        (run / "ledger" / "loss_values").write_bytes(values.tobytes())
    assert read(run).of_step(0)[1][2] == 0.5
    result = audit_run(run)
    assert result.exit_code == 4
    wrong = [(one.kind, one.text) for one in result.findings if one.severity == "violated"]
    told = "losses noted up to this step were changed: their digest is not the recorded one"
    assert wrong == [("losses", told)] * 2, "the checksums of later records continue from the changed one"


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_ranks_of_samples_do_not_depend_on_how_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Records that follow each other are read at once, of several ranks and starts; repeated steps count once."""
    run, draw = tmp_path_factory.mktemp("run"), np.random.default_rng(data.draw(st.integers(0, 2**32)))
    first = 0
    for world in data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3), "starts"):
        end = first + data.draw(st.integers(1, 40), "steps")
        with ExitStack() as stack:
            journals = [stack.enter_context(closing(journal_of(run, rank, world))) for rank in range(world)]
            for rank, journal in enumerate(journals):
                lanes = np.arange(rank * LANES // world, (rank + 1) * LANES // world)
                places = (lanes[:, None] * (BATCH // LANES) + np.arange(BATCH // LANES)).ravel()
                for step in range(first, end):
                    losses = draw.normal(size=len(places)).astype(np.float32)
                    losses[draw.random(len(losses)) < 0.02] = draw.choice([np.nan, np.inf, 50.0])
                    note_step(journal, step, lanes.tolist(), places, losses.round(1))
        first = data.draw(st.integers(max(0, end - 5), end), "continues at")
        if data.draw(st.booleans(), "a checkpoint"):
            ledger_head(run, first)
    window, top = data.draw(st.integers(1, 12), "window"), data.draw(st.integers(1, 30), "top")
    ranked = rank_samples(read(run), top=top, window=window)
    assert repr([tuple(one) for one in ranked]) == repr(ranked_one_by_one(read(run), top, window))


def ranked_one_by_one(losses: Losses, top: int, window: int) -> list[tuple[int, int, float, float]]:
    """Return (step, place, loss, score) of the most abnormal losses; each step is read by itself."""
    found = []
    for at in range(0, len(losses.steps), window):
        group = []
        for step in losses.steps[at : at + window].tolist():
            places, values = losses.of_step(step)
            group += [(step, *pair) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        finite = np.array([loss for *_, loss in group if np.isfinite(loss)])
        expected = float(np.median(finite)) if len(finite) else 0.0
        spread = float(1.4826 * np.median(np.abs(finite - expected))) if len(finite) else 0.0
        spread = max(spread, 1e-6 * abs(expected), np.finfo(np.float64).tiny)
        found += [(*one, (one[2] - expected) / spread if np.isfinite(one[2]) else np.inf) for one in group]
    return sorted(found, key=lambda one: (-one[3], one[0], one[1]))[:top]
