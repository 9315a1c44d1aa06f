"""Runs killed by SIGKILL and resumed in another world: the stream of an uninterrupted run, and a clean ledger."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.audit import audit_run
from shardkit.ledger import ledger_head
from tests.drills import drill_count

# ---- Killed by SIGKILL anywhere, resumed in another world: the stream of an uninterrupted run, augmentation too


ROWS, BATCH, LANES, EPOCHS = 1000, 40, 8, 2
Row = tuple[int, int, int, int, int]  # step, place in the grid, sample, what was read, what augmentation drew


@pytest.fixture(scope="module", params=["tar", "arrow"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> shardkit.Dataset:
    root = str(tmp_path_factory.mktemp("data") / request.param)
    schema = {"n": "int64", "payload": "bytes"}
    compression = "zstd" if request.param == "arrow" else "none"
    with shardkit.create(root, schema=schema, format=request.param, compression=compression,
                         block_size="16KiB", shard_size="128KiB") as writer:  # fmt: skip
        for n in range(ROWS):
            writer.add({"n": n, "payload": n.to_bytes(2, "little") * (n % 50)})
    return shardkit.open(root)


def _augment(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": int(rng.integers(1 << 40))}


def _run_rank(
    url: str, rank: int, world: int, state: dict[str, Any] | None, settings: dict[str, Any], out: Connection
) -> None:
    ds = shardkit.open(url)
    plan = ds.plan(global_batch=BATCH, lanes=LANES, seed=5)
    loader = ds.loader(plan, rank=rank, world=world, tensors=False, transform=_augment, **settings)
    if state is not None:
        loader.load_state_dict(state)
    first = loader.state_dict()["step"]
    for _ in range(first // len(loader), EPOCHS):
        for batch in loader:
            rows = zip([batch.step] * len(batch.slots), batch.slots.tolist(), batch.samples.tolist(),
                       batch["n"].tolist(), batch["noise"].tolist(), strict=True)  # fmt: skip
            out.send_bytes(json.dumps([loader.state_dict(after=batch), list(rows)]).encode())
    out.close()


def _world(
    url: str, world: int, state: dict[str, Any] | None, steps: int | None, settings: dict[str, Any]
) -> list[list[Any]]:
    """What each rank sent until it ended, or until all were killed after `steps` steps of the slowest."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=_run_rank, args=(url, rank, world, state, settings, pipes[rank][1]))
        for rank in range(world)
    ]
    for process, (_, theirs) in zip(ranks, pipes, strict=True):
        process.start()
        theirs.close()
    got: list[list[Any]] = [[] for _ in range(world)]
    for rank, (mine, _) in enumerate(pipes):
        while steps is None or len(got[rank]) < steps:
            try:
                got[rank].append(json.loads(mine.recv_bytes()))
            except EOFError:
                break
    for process, (mine, _) in zip(ranks, pipes, strict=True):
        if steps is not None:
            process.kill()
        process.join(60)
        assert steps is not None or process.exitcode == 0
        mine.close()
    return got


def _rows(got: list[list[Any]]) -> list[Row]:
    return sorted(tuple(row) for rank in got for _, rows in rank for row in rows)


@pytest.mark.drill(only=True)
def test_killed_and_resumed_in_another_world(dataset: shardkit.Dataset, tmp_path: Path) -> None:
    url = str(dataset.repository.store.url)
    whole = _rows(_world(url, 1, None, None, {"threads": 1}))
    assert len(whole) == EPOCHS * ROWS
    assert all(sample_read == dataset[sample]["n"] for _, _, sample, sample_read, _ in whole[::97])
    assert len({noise for *_, noise in whole}) == len(whole)
    choices = random.Random(1)
    for _ in range(drill_count(100)):
        rows: list[Row] = []
        state: dict[str, Any] | None = None
        for _ in range(choices.randint(1, 3)):
            world = choices.choice([1, 2, 4, 8])
            settings = {"threads": choices.randint(1, 8), "prefetch": choices.choice([0, 1, 7])}
            got = _world(url, world, state, choices.randint(1, 18), settings)
            done = min(len(rank) for rank in got)  # a checkpoint counts once every rank has reached it
            if done:
                rows += _rows([rank[:done] for rank in got])
                state = got[0][done - 1][0]
        if state is None or state["step"] < EPOCHS * ROWS // BATCH:
            rows += _rows(_world(url, choices.choice([1, 2, 4]), state, None, {}))
        assert sorted(rows) == whole


# ---- A run that is killed again and again and resumed on other ranks consumes the plan, and its ledger says so


SCRIPT = Path(__file__).with_name("audit_ranks.py")
AUDITED_LANES, EVERY = 12, 20


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
    cuts = sorted(draw.sample(range(1, AUDITED_LANES), world - 1))
    order = draw.sample(range(AUDITED_LANES), AUDITED_LANES)
    return [sorted(order[a:b]) for a, b in zip([0, *cuts], [*cuts, AUDITED_LANES], strict=True)]


def newest_checkpoint(run: Path) -> int:
    names = sorted((run / "checkpoints").glob("*.json")) if (run / "checkpoints").exists() else []
    return int(names[-1].stem.removeprefix("step-")) if names else 0


@pytest.mark.drill
def test_a_run_that_is_killed_and_resumed_elsewhere_audits_clean(root: str, tmp_path: Path) -> None:
    steps, kills, draw = drill_count(2000), drill_count(20) + 1, random.Random(8)
    settings = {"global_batch": 24, "lanes": AUDITED_LANES, "seed": 3}
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
            "segments": [[0, steps, [list(range(AUDITED_LANES))]]]})  # fmt: skip

    audit = audit_run(run)
    assert audit.exit_code == 0, audit.findings
    assert (audit.first, audit.steps, audit.checked) == (0, steps, steps)
    assert audit.head["steps"] == audit_run(alone).head["steps"] == ledger_head(alone)["steps"]
    assert audit.event_counts["failover"] == 1
    assert len(audit.starts) > kills
    assert all(fits for _, _, fits in audit.checkpoints)
    assert [one.is_exact for one in audit.coverage] == [True] * len(audit.coverage)
    assert any(finding.kind == "restart" for finding in audit.findings)
