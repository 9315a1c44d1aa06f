"""A run that is killed again and again and resumed on other ranks consumes the plan, and its ledger says so."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit import audit_run
from shardkit.ledger import ledger_head
from tests.drills import drill_count

SCRIPT = Path(__file__).with_name("audit_ranks.py")
LANES, EVERY = 12, 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("data") / "numbers")
    schema = {"value": "int64", "label": "int64"}
    with shardkit.create(
        folder, schema=schema, stratify="label", shard_size="64KiB", block_size="2KiB"
    ) as writer:
        for number in range(2003):
            writer.add({"value": number, "label": number % 3})
    return folder


def launch(told: dict[str, Any]) -> int:
    process = subprocess.run(
        [sys.executable, str(SCRIPT), json.dumps(told)], capture_output=True, text=True, timeout=300
    )
    assert process.returncode in (0, -signal.SIGKILL), process.stderr
    return process.returncode


def shares(draw: random.Random, world: int) -> list[list[int]]:
    """Lanes dealt to ranks unevenly, at least one each: what a rebalancing decision does."""
    cuts = sorted(draw.sample(range(1, LANES), world - 1))
    order = draw.sample(range(LANES), LANES)
    return [sorted(order[a:b]) for a, b in zip([0, *cuts], [*cuts, LANES], strict=True)]


def newest_checkpoint(run: Path) -> int:
    names = sorted((run / "checkpoints").glob("*.json")) if (run / "checkpoints").exists() else []
    return int(names[-1].stem.removeprefix("step-")) if names else 0


@pytest.mark.drill
def test_a_run_that_is_killed_and_resumed_elsewhere_audits_clean(root: str, tmp_path: Path) -> None:
    steps, kills, draw = drill_count(2000), drill_count(20) + 1, random.Random(8)
    settings = {"global_batch": 24, "lanes": LANES, "seed": 3}
    run, world = tmp_path / "run", 2
    told: dict[str, Any] = {"root": root, "plan": settings, "run": str(run), "every": EVERY}
    marks = sorted(draw.sample(range(1, steps - 1), kills))
    for number, mark in enumerate([*marks, None]):
        first = newest_checkpoint(run)
        last = steps if mark is None else min(steps, mark + 5)
        middle = draw.randrange(first, last) if last > first else first
        segments = [[a, b, shares(draw, world)] for a, b in ((first, middle), (middle, last)) if b > a]
        kill = None if mark is None else [draw.randrange(world), max(first, mark)]
        failover = [0, first] if number == 1 else None
        code = launch({**told, "world": world, "segments": segments, "kill": kill, "failover": failover})
        assert code == (0 if mark is None else -signal.SIGKILL)
        if mark is not None and number % 2:  # the kill came in the middle of a write
            newest = max((run / "journal").iterdir(), key=lambda path: path.stat().st_mtime_ns)
            os.truncate(newest, newest.stat().st_size - 3)
        world = draw.randint(1, 4)
    alone = tmp_path / "alone"
    launch({**told, "run": str(alone), "world": 1, "every": steps, "kill": None,
            "segments": [[0, steps, [list(range(LANES))]]]})  # fmt: skip

    audit = audit_run(run)
    assert audit.exit_code == 0, audit.findings
    assert (audit.first, audit.steps, audit.checked) == (0, steps, steps)
    assert audit.head["steps"] == audit_run(alone).head["steps"] == ledger_head(alone)["steps"]
    assert audit.event_counts["failover"] == 1
    assert len(audit.starts) > kills
    assert all(fits for _, _, fits in audit.checkpoints)
    assert [one.is_exact for one in audit.coverage] == [True] * len(audit.coverage)
    assert any(finding.kind == "restart" for finding in audit.findings)
