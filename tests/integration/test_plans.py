"""Plans of real datasets: sequences and costs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.audit import audit_run, load_run
from shardkit.dataset.costs import costs_of
from shardkit.errors import PlanError, UsageError
from shardkit.ledger import ledger_head
from shardkit.plan.report import rank_skew
from shardkit.telemetry.diagnosis import cost_skew
from tests.command_line import output_of
from tests.consumed_steps import batches_until
from tests.forged_ledger import forge_events

# ---- `ds.plan(sequence=…)` finds the length of a row in the schema


def _dataset(root: Path, schema: dict[str, str]) -> shardkit.Dataset:
    with shardkit.create(str(root), schema, format="arrow", block_size="1KiB") as writer:
        for number in range(64):
            writer.add({name: np.full(8, number, dtype=np.int32) for name in schema})
    return shardkit.open(str(root))


def test_sequences_join_whole_rows_and_lose_none(tmp_path: Path) -> None:
    ds = _dataset(tmp_path / "data", {"tokens": "int32[8]"})
    plan = ds.plan(global_batch=4, lanes=2, sequence=16, remainder="short")
    assert (
        plan.digest == ds.plan(global_batch=4, lanes=2, sequence=16, row_tokens=8, remainder="short").digest
    )
    steps = plan.steps_per_epoch
    assert steps is not None
    rows = np.concatenate([plan.step(step).ravel() for step in range(steps)])
    assert sorted(rows[rows >= 0].tolist()) == list(range(64))


def test_two_rows_of_numbers_need_to_be_told_apart(tmp_path: Path) -> None:
    ds = _dataset(tmp_path / "data", {"tokens": "int32[8]", "types": "int32[8]"})
    with pytest.raises(PlanError, match="row_tokens"):
        ds.plan(global_batch=4, lanes=2, sequence=16)
    assert ds.plan(global_batch=4, lanes=2, sequence=16, row_tokens=8).lanes == 2


# ---- `ds.plan(cost=…)` from the dataset to the audit of a run


ROWS, BATCH, LANES = 240, 24, 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("costs") / "data"
    schema = {"text": "str", "number": "int64"}
    with shardkit.create(
        str(root), schema=schema, format="tar", shard_size="64KiB", block_size="4KiB"
    ) as writer:
        for number in range(ROWS):
            writer.add({"text": "x" * (1 + number * number % 997), "number": number}, key=f"n{number}")
    return str(root)


def skew(numbers: np.ndarray) -> float:
    """Of (steps, lanes, m) costs: the dearest lane over the mean one."""
    cells = numbers.sum(axis=2)
    return float(cells.max(axis=1).sum() / cells.mean(axis=1).sum())


def test_lanes_cost_nearly_the_same(root: str, caplog: pytest.LogCaptureFixture) -> None:
    ds = shardkit.open(root)
    sizes = np.array([len(ds[sample]["text"]) for sample in range(ROWS)])
    plain, spread = ds.plan(BATCH, lanes=LANES), ds.plan(BATCH, lanes=LANES, cost="bytes(text) ")
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        align = ds.plan(BATCH, lanes=LANES, cost="bytes(text)", balance="align")
    assert "gradients vary more" in caplog.text
    found = [skew(sizes[plan.steps(0, ROWS // BATCH)]) for plan in (plain, spread, align)]
    assert max(found[1:]) < 1 + (found[0] - 1) / 2
    assert spread.digest == ds.plan(BATCH, lanes=LANES, cost="bytes( text)").digest
    assert (
        len(
            {
                plain.digest,
                spread.digest,
                align.digest,
                ds.plan(BATCH, lanes=LANES, cost="bytes(text)**2").digest,
            }
        )
        == 4
    )


def test_costs_are_those_of_the_rows_that_are_selected(root: str) -> None:
    ds = shardkit.open(root)
    odd = ds.select(rows=list(range(1, ROWS, 2)))
    text = "3 * bytes(text) // 2 + 1"
    whole, half = costs_of(ds, text), costs_of(odd, text)
    found = half.codes[np.arange(len(odd))]
    assert np.array_equal(found, whole.codes[np.arange(1, ROWS, 2)])
    assert len(np.unique(found)) > 8


def test_telemetry_tells_the_skew_of_the_steps_that_were_handed_out(root: str) -> None:
    ds = shardkit.open(root)
    plan = ds.plan(BATCH, lanes=LANES, cost="bytes(text)**2")
    records = []
    for rank in range(4):
        with ds.loader(plan, rank=rank, world=4, tensors=False) as loader:
            for _ in zip(range(6), loader, strict=False):
                pass
            records.append(loader.telemetry.read())
    found = cost_skew(records)
    assert found is not None
    assert found["steps"] == 6
    grid = plan.grid
    for name, one in (("plan", plan), ("plain", plan.without_costs())):
        skew = rank_skew(grid.costs.of_cells(one.steps(0, 6)), 4)  # type: ignore[union-attr]
        assert found[name] == pytest.approx(skew.mean())
    with ds.loader(ds.plan(BATCH, lanes=LANES), rank=0, world=4, tensors=False) as loader:
        next(iter(loader))
        assert not loader.telemetry.read().tables.get("step_costs")


def test_the_plan_command_predicts_how_long_ranks_wait(root: str) -> None:
    said = output_of("plan", root, "-b", BATCH, "--lanes", LANES, "--cost", "bytes(text)**2", "--json")
    report = json.loads(said)["cost"]
    assert (report["expression"], report["balance"]) == ("bytes(text)**2", "spread")
    assert [one["ranks"] for one in report["worlds"]] == [2, 4, 8]
    ds = shardkit.open(root)
    sizes = np.array([len(ds[sample]["text"]) for sample in range(ROWS)], dtype=float) ** 2
    plan = ds.plan(BATCH, lanes=LANES, cost="bytes(text)**2")
    for name, one in (("plain", plan.without_costs()), ("plan", plan)):
        cells = sizes[one.steps(0, ROWS // BATCH)].sum(axis=2)
        eight = (cells.max(axis=1) / cells.mean(axis=1)).mean()
        assert report["worlds"][-1][name] == pytest.approx(eight, rel=0.08)  # codes are within an eighth
    said = output_of(
        "plan", root, "-b", BATCH, "--lanes", LANES, "--cost", "bytes(text)", "--balance", "align"
    )
    assert "align, p95" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bytes(txt)", "no field 'txt'; the fields are text, number"),
        ("text", "text is of str, expected one integer"),
        ("len(text)", "len\\(text\\) is of str, expected a row of any length"),
        ("bytes(text) - 1", "is not understood"),
        ("bytes(text)**-1", "is not understood"),
        ("bytes(text)**9", "is not understood"),
        ("bytes(text) // 0", "is not understood"),
        ("bytes(text) // bytes(number)", "is not understood"),
        ("__import__('os')", "is not understood"),
        ("bytes(text)(", "cannot be read"),
        ("7", "names no field"),
        ("", "cannot be read"),
        ("bytes(text)**4", "expected below 2\\*\\*32"),
        ("(bytes(text)**4)**4 // 4000000000", "expected below 2\\*\\*32"),
        ("((((bytes(text)**4)**4)**4)**4)**4", "expected below 2\\*\\*32"),
    ],
)
def test_what_is_no_cost_is_refused_with_the_reason(root: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        shardkit.open(root).plan(BATCH, cost=text)


def test_shards_that_know_no_sizes_are_refused(tmp_path: Path) -> None:
    with shardkit.create(str(tmp_path / "d"), schema={"text": "str"}, format="arrow") as writer:
        for number in range(ROWS):
            writer.add({"text": "x" * number}, key=f"n{number}")
    with pytest.raises(UsageError, match="not in the indexes of these arrow shards"):
        shardkit.open(str(tmp_path / "d")).plan(BATCH, cost="bytes(text)")


# ---- An audit of a run whose plan has costs and weights, end to end


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_with_costs_and_weights_is_audited(tmp_path: Path, jobs: int) -> None:
    root, run = str(tmp_path / "data"), tmp_path / "run"
    with shardkit.create(root, schema={"text": "str", "kind": "str"}, stratify="kind") as writer:
        for n in range(600):
            writer.add({"text": "x" * (1 + n * 7919 % 97), "kind": "abc"[n % 3]})
    ds = shardkit.open(root)
    plan = ds.plan(
        global_batch=16,
        lanes=4,
        weights={"a": 2, "b": 1, "c": 1},
        stages=[(20, {"a": 1, "b": 3})],
        cost="bytes(text)",
    )
    for begin, end, world in ((0, 30, 1), (25, 60, 2)):  # the second start goes back, on two ranks
        for rank in range(world):
            with ds.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
                loader.seek(begin)
                for _ in batches_until(loader, end):
                    pass
    ledger_head(run)
    found = audit_run(run, jobs=jobs)
    assert found.exit_code == 0, found.findings
    recipe = next(event for event in load_run(run).events if event["kind"] == "plan")["history"]
    assert recipe[0]["settings"]["cost"]

    def other_balance(event: dict[str, Any]) -> dict[str, Any]:
        if event["kind"] == "plan":
            event["history"][0]["settings"]["balance"] = "align"
        return event

    forge_events(run, lambda event, _: other_balance(event))
    assert audit_run(run, jobs=jobs).exit_code == 4
