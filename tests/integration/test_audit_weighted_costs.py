"""An audit of a run whose plan has costs and weights, end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit import audit_run, load_run
from shardkit.ledger import ledger_head
from tests.integration.test_mixers import batches, forge


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
                for _ in batches(loader, end):
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

    forge(run, other_balance)
    assert audit_run(run, jobs=jobs).exit_code == 4
