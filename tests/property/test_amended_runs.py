"""Runs that are amended and started again at any step, on any world: all other rows come exactly once."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkit
from shardkit.audit import ChangeRequest, amend_run, audit_run
from shardkit.dataset.run_plans import apply_amendments
from tests.consumed_steps import batches_until
from tests.numbered_rows import write_rows

BATCH, LANES, ROWS = 8, 4, 160
STEPS = ROWS // BATCH


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    return write_rows(tmp_path_factory.mktemp("data"), ROWS, sources=3)


def consume(ds: shardkit.Dataset, run: Path, first: int, last: int, world: int) -> dict[int, Counter[int]]:
    """Start the run at a step and stop it at another, with the plan before all amendments."""
    found: dict[int, Counter[int]] = {}
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=4)
    for rank in range(world):
        with ds.loader(plan, rank=rank, world=world, run=run, tensors=False) as loader:
            loader.seek(first)
            for batch in batches_until(loader, last):
                found.setdefault(batch.step, Counter()).update(batch["x"].tolist())
    return found


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_all_other_rows_come_exactly_once(ds: shardkit.Dataset, data: st.DataObject) -> None:
    worlds = st.sampled_from([1, 2, 4])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        at = data.draw(st.integers(1, STEPS // 2), "stop")
        consumed = consume(ds, run, 0, at, data.draw(worlds))
        gone: set[int] = set()
        lists = 0
        skipped: set[int] = set()
        for _ in range(data.draw(st.integers(1, 2), "amendments")):
            known, plan = apply_amendments(ds, ds.plan(global_batch=BATCH, lanes=LANES, seed=4), run)
            end = plan.epoch_bounds(at)[1]
            if data.draw(st.booleans(), "skip") and at + 2 < end:
                first = data.draw(st.integers(at, end - 2))
                last = data.draw(st.integers(first + 1, min(end - 1, first + 4)))
                amend_run(run, ChangeRequest(skip=(first, last)))
                skipped |= {int(known[n]["x"]) for k in range(first, last) for n in plan.step(k).ravel()}
                consumed |= consume(ds, run, at, first, data.draw(worlds)) if first > at else {}
                at = first
            else:
                left = {int(key[1:]) for key in map(known.key, range(len(known)))}
                rows = data.draw(st.sets(st.sampled_from(sorted(left)), min_size=1, max_size=20))
                amend_run(run, ChangeRequest(exclude=[f"k{n:03d}" for n in sorted(rows)], from_step=at))
                gone |= rows
                lists += 1
        dataset, plan = apply_amendments(ds, ds.plan(global_batch=BATCH, lanes=LANES, seed=4), run)
        end = plan.epoch_bounds(at)[1]
        expected = {k: Counter(int(dataset[n]["x"]) for n in plan.step(k).ravel()) for k in range(at, end)}
        while at < end:  # started again at any step
            then = data.draw(st.integers(at + 1, end), "next stop")
            part = consume(ds, run, at, then, data.draw(worlds))
            assert part == {k: expected[k] for k in range(at, then)}
            consumed |= part
            at = then
        seen = sum(consumed.values(), Counter())
        assert set(seen.values()) == {1}
        assert not set(seen) & skipped
        assert not set(sum(expected.values(), Counter())) & gone
        missing = set(range(ROWS)) - gone - skipped - set(seen)
        assert len(missing) < BATCH * max(1, lists), "the remainder of what each list left of the epoch"
        result = audit_run(run, level=None)
        assert result.exit_code == 0, result.findings
