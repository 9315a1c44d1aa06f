"""The parts of tools/bench/read.py whose figures are of no worth if they are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from bench.reading.figures import shares
from bench.reading.goals import Goal, goals
from bench.reading.processes import Job, Reader
from bench.reading.readers import limit, memmap, private_blocks
from bench.reading.report import report
from bench.reading.slow_bucket import slow_bucket
from bench.reading.workloads import WORKLOADS
from tests.servers.object_stores import s3_environment

ROOT = Path(__file__).parents[2]
SCALE = 0.0  # the fewest rows that there are


def epoch(rate: float, **more: float) -> dict[str, Any]:
    known = {
        "samples": 1000,
        "cpu_s": 0.001,
        "whole": True,
        "start_s": 0.1,
        "longest_s": 0.01,
        "p999_s": 0.001,
    }
    return {**known, "seconds": 1000 / rate, "peak": 300 << 20, **more}


def reader(*repeats: list[float], mode: str = "touched", **more: float) -> dict[str, Any]:
    return {
        "label": "x",
        "first": [0.2],
        "epochs": {mode: [[epoch(rate, **more) for rate in r] for r in repeats]},
    }


def judged(results: dict[str, Any], start: str) -> Goal:
    return next(goal for goal in goals(results) if goal.text.startswith(start))


def test_a_share_is_of_the_steady_limit_of_the_same_repeat() -> None:
    """A limit whose first epoch is slow, and a machine that is three times slower in the second repeat."""
    yardstick = reader([10.0, 100.0, 120.0], [3.0, 30.0, 40.0])
    own = reader([55.0, 88.0, 99.0], [17.5, 28.0, 28.0])
    assert shares(own, yardstick, "touched", 0) == pytest.approx([0.5, 0.5])
    assert shares(own, yardstick, "touched", 1) == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize(
    ("beyond", "private", "met"),
    [(75.0, 90.0, True), (60.0, 90.0, False), (60.0, 62.0, True), (60.0, 65.0, False), (70.0, None, True)],
)
def test_the_worst_later_epoch_decides_unless_private_blocks_miss_the_goal_too(
    beyond: float, private: float | None, met: bool
) -> None:
    tokens = {"limit": reader([100.0] * 3), "shardkit": reader([56.0, 99.0, 98.0]), "within": reader([1.0, 80.0, 80.0]),
              "beyond": reader([1.0, 90.0, beyond])}  # fmt: skip
    if private is not None:
        tokens["private_blocks"] = reader([private] * 3)
    results = {"tokens": {"readers": tokens}}
    goal = judged(results, "tokens, every later epoch")
    assert goal.met is met
    assert "beyond, epoch 3" in goal.found
    assert judged(results, "tokens, first epoch").met is True
    assert judged(results, "tokens, worst ÷ best").met is True
    assert judged(results, "tokens, the same, read once").met is None


def test_costs_waits_and_what_was_not_measured() -> None:
    dear = {"shardkit": reader([50.0, 60.0], cpu_s=0.004, longest_s=0.03, peak=500 << 20)}
    results: dict[str, Any] = {
        "tokens": {"readers": dear},
        "s3": {"readers": {"shardkit": {"error": "no server"}}},
    }
    for start in ("CPU per tokens row", "resident at most", "tokens, longest wait"):
        assert judged(results, start).met is False
    assert judged(results, "first batch").met is True
    assert judged(results, "S3").met is None
    assert "no server" in judged(results, "S3").found


def test_two_workers_are_compared_repeat_by_repeat() -> None:
    pair = {"shardkit": reader([1.0, 90.0], [1.0, 33.0]), "memmap": reader([1.0, 100.0], [1.0, 30.0])}
    goal = judged({"workers": {"readers": pair}}, "tokens, two DataLoader workers")
    assert goal.found == "1.00 (0.90–1.10)"


def test_the_page_names_what_failed_and_what_is_not_installed() -> None:
    facts = {"date": "2026-01-01", "cpus": 2, "processor": "p", "machine": "m", "load_before": 0.0, "load_after": 0.0,
             "python": "3", "scale": 0.5, "epochs": 2, "repeats": 1, "seconds": 5.0, "took_s": 60, "versions": {},
             "peer_versions": {}}  # fmt: skip
    readers = {
        "limit": reader([100.0, 100.0]),
        "shardkit": reader([50.0, 80.0]),
        "ffcv_reader": {"label": "FFCV", "epochs": {}, "first": [], "error": "ModuleNotFoundError: ffcv"},
        "energon": {"label": "Energon", "epochs": {}, "first": [], "error": "ValueError: out of paper"},
    }
    page = report(facts, {"tokens": {"rows": 1000, "batch": 64, "stayed": 0.3, "readers": readers}})
    assert "Not installed: FFCV." in page
    assert "| Energon | failed: ValueError: out of paper |" in page
    assert "Cold is not cold: 30%" in page
    assert "say nothing about them" in page
    assert "0.50, 0.80" in page


@pytest.mark.parametrize("name", ["tokens", "small"])
def test_private_blocks_and_the_limit_deliver_every_row_once(name: str, tmp_path: Path) -> None:
    workload = WORKLOADS[name]
    limit.build(workload, SCALE, str(tmp_path / "rows"))
    table = memmap.Rows(workload, str(tmp_path / "rows")).table
    rows = workload.rows(SCALE)
    for module in (private_blocks, limit):
        opened: Any = module.open_reader(workload, SCALE, str(tmp_path / "rows"), 0)
        for _ in range(2):
            found = np.concatenate(list(opened.epoch()))
            whole = rows if module is limit else rows // opened.block_rows * opened.block_rows
            assert len(found) == whole
            assert sorted(map(bytes, found)) == sorted(map(bytes, table[:whole]))
            assert not np.array_equal(found, table[:whole]), "not shuffled"


def test_what_fails_in_a_process_is_told(tmp_path: Path) -> None:
    with Reader(
        Job(reader="private_blocks", workload="text", scale=SCALE, directory=str(tmp_path))
    ) as process:
        assert process.ask("prepare")["error"] == "NotImplementedError: rows of one size only"
    with Reader(Job(reader="none", workload="text", scale=SCALE, directory=str(tmp_path))) as process:
        assert "error" in process.ask("prepare")


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that is served as the bucket "bench", and the endpoint."""
    folder = tmp_path / "bench"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "digits").write_bytes(b"0123456789")
    with slow_bucket(folder, 0.01) as endpoint:
        yield folder, endpoint


def test_shardkit_reads_a_dataset_from_the_slow_bucket(
    bucket: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, endpoint = bucket
    with shardkit.create(folder / "numbers", {"number": "int64"}) as writer:
        for number in range(100):
            writer.add({"number": number})
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    ds = shardkit.open("s3://bench/numbers")
    with ds.loader(ds.plan(global_batch=10)) as loader:
        assert sorted(int(number) for batch in loader for number in batch["number"]) == [*range(100)]
