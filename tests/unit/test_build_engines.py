"""Processes of a build: every result arrives, a dead one is named, errors keep their kind, the parent sleeps."""

from __future__ import annotations

import functools
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from shardkit.errors import RunError, SourceError
from shardkit_tools.building import engines
from shardkit_tools.building.engines import LocalEngine

MODULE = """
import os, signal, time
from shardkit.errors import SourceError

class Doubler:
    def __init__(self, factor, reports=1):
        self.factor, self.reports = factor, reports
    def work(self, item, report):
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "bug":
            raise ZeroDivisionError("a bug")
        if item == "source":
            raise SourceError("rows.jsonl row 17: broken")
        if item == "slow":
            time.sleep(0.5)
            return os.getpid()
        for _ in range(self.reports):
            report(1, item)
        return item * self.factor, os.getpid()
    def close(self):
        pass
"""


@pytest.fixture
def doubler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker class that spawned processes can import."""
    name = "worker_for_" + tmp_path.name.replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(name)
    yield sys.modules[name].Doubler
    del sys.modules[name]


def nothing(_rows: int, _size: int) -> None:
    pass


def test_all_results_arrive_and_processes_are_kept(doubler: Any) -> None:
    seen: list[tuple[int, int]] = []
    with LocalEngine(2) as processes:
        first = list(
            processes.run(
                functools.partial(doubler, 2), range(30), lambda rows, size: seen.append((rows, size))
            )
        )
        second = list(processes.run(functools.partial(doubler, 3), range(30), nothing))
    assert sorted(result for result, _ in first) == [2 * n for n in range(30)]
    assert sorted(result for result, _ in second) == [3 * n for n in range(30)]
    assert sorted(seen) == [(1, n) for n in range(30)]
    assert {pid for _, pid in second} <= {pid for _, pid in first}


def test_reports_of_a_process_are_added_up(doubler: Any) -> None:
    """Each report is a message to another process, and a tar has thousands of small members."""
    seen: list[tuple[int, int]] = []
    with LocalEngine(2) as processes:
        make = functools.partial(doubler, 2, reports=5_000)
        list(processes.run(make, [3], lambda rows, size: seen.append((rows, size))))
    assert (sum(rows for rows, _ in seen), sum(size for _, size in seen)) == (5_000, 15_000)
    assert len(seen) < 50


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_to_do(doubler: Any, jobs: int) -> None:
    with LocalEngine(jobs) as processes:
        assert list(processes.run(functools.partial(doubler, 2), [], nothing)) == []


def test_a_dead_process_is_named_with_its_item(doubler: Any) -> None:
    with LocalEngine(2) as processes, pytest.raises(RunError, match=r"signal 9.*die.*--jobs"):
        list(processes.run(functools.partial(doubler, 2), [1, 2, "die", 3], nothing))


@pytest.mark.parametrize("jobs", [1, 2])
def test_errors_of_shardkit_keep_their_kind(doubler: Any, jobs: int) -> None:
    with LocalEngine(jobs) as processes, pytest.raises(SourceError, match="row 17"):
        list(processes.run(functools.partial(doubler, 2), [1, "source", 2], nothing))


def test_a_bug_arrives_with_its_traceback(doubler: Any) -> None:
    with LocalEngine(2) as processes, pytest.raises(RunError, match=r"(?s)bug.*ZeroDivisionError.*line"):
        list(processes.run(functools.partial(doubler, 2), [1, "bug"], nothing))


def test_the_parent_sleeps_while_one_process_works_and_the_other_has_nothing_to_do(
    doubler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def counted(*arguments: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        return wait(*arguments, **settings)

    with LocalEngine(2) as processes:
        list(processes.run(functools.partial(doubler, 2), [1, 2], nothing))
        monkeypatch.setattr(engines, "wait", counted)
        list(processes.run(functools.partial(doubler, 2), ["slow", 1], nothing))
    assert calls <= 4, "one per message: two results and a report"
