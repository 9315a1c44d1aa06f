"""Ranks join and leave a job that trains: lanes are dealt again, nothing is lost, repeated or computed otherwise."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardkit.audit import audit_run
from shardkit.errors import ConfigurationError, NotFoundError, RunError
from shardkit.telemetry.records import read_documents
from shardkit_trainer import join, launch, leave, supervisor
from shardkit_trainer.launch import rank_environment
from tests.drills import drill_cases
from tests.integration.conftest import arguments_of
from tests.integration.test_trainer_regroups import BATCH, KINDS, LANES, STEPS, check, groups, saved

HERE = Path(__file__).parent
PATIENCE_S = 300.0
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


class Job:
    """A job in the background, of ranks that are forked and follow a script (trainer_regroups)."""

    def __init__(self, run: Path, dataset: str, kind: str, **more: Any):
        self.run, self.codes = run, list[int]()
        self.settings = arguments_of({
            "run.directory": run, "run.steps": STEPS, "data.dataset": dataset, "data.global_batch": BATCH,
            "data.lanes": LANES, "model.kind": "trainer_regroups:make", "model.width": 7, "model.heads": 7,
            "optimizer.lr": 0.02, "optimizer.epsilon": 0.01, "optimizer.clip": 3.0, "checkpoint.every": 5,
            "log.telemetry_s": 0.0, "parallel.pass_samples": 6, "parallel.recovery": "in-process",
            "parallel.timeout_s": 60.0, "log.peak_flops": 1.0,
            **{f"parallel.{name}": value for name, value in KINDS[kind].items()}, **more,
        })  # fmt: skip
        self._threads: list[threading.Thread] = []

    def start(self, ranks: int) -> None:
        self.beside(launch, None, self.settings, nproc=ranks)

    def beside(self, command: Callable[..., int], *arguments: Any, **named: Any) -> None:
        """A command that takes as long as its ranks."""

        def work() -> None:
            self.codes.append(command(*arguments, **named))

        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline
            assert any(thread.is_alive() for thread in self._threads), "the job has ended"
            time.sleep(0.01)

    def until_groups(self, *ranks: int) -> None:
        self.until(lambda: (self.run / "job.json").exists() and groups(self.run) == [*ranks])

    def end(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What the ranks of the next jobs do, and that they are forked."""
    monkeypatch.syspath_prepend(str(HERE))
    trainer_regroups = import_module("trainer_regroups")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    forked = patch.object(supervisor, "subprocess", SimpleNamespace(Popen=trainer_regroups.Scripted))
    with forked, patch.dict(os.environ, {**rank_environment(), "PYTHONPATH": path}):
        yield lambda script: monkeypatch.setenv(trainer_regroups.SCRIPT, json.dumps(script))


@pytest.mark.drill
@pytest.mark.parametrize("kind", drill_cases(list(KINDS), [5, 3, 7]))
def test_a_job_grows_shrinks_and_grows_while_a_rank_dies(
    tmp_path: Path, numbers: str, script: Any, kind: str
) -> None:
    """Two ranks, three, two without the first of all, one, four of which one dies in its first step, three."""
    plain = Job(tmp_path / "plain", numbers, "exact ddp" if kind.startswith("exact") else "ddp")
    script({})
    plain.start(1)
    plain.end()
    job = Job(
        tmp_path / "run", numbers, kind, **{"parallel.shard_ranks": 0, "checkpoint.asynchronous": False}
    )
    script({"wait": [[2, 1], [5, 2], [8, 3], [11, 4]], "die": [[5, "compute", 12]]})
    job.start(2)
    job.until_groups(2)
    job.beside(join, None, str(job.run), [], nproc=1)
    job.until_groups(2, 3)
    assert "2 go on" in leave(str(job.run), 0)
    job.until_groups(2, 3, 2)
    leave(str(job.run), 1)
    job.until_groups(2, 3, 2, 1)
    job.beside(join, None, str(job.run), [], nproc=3)
    job.end()
    assert job.codes == [0, 0, 0]
    assert not (job.run / "job.json").exists()
    assert groups(job.run) == [2, 3, 2, 1, 4, 3]
    check(job.run, kind, saved(job.run), saved(plain.run))
    events = read_documents(job.run / "events.jsonl")
    # a part of the state that was on the killed rank alone is taken from a checkpoint; with ddp nothing is repeated
    retaken = [step for e in events if e["event"] == "rewind" for step in range(e["step"], e["reached"])]
    assert len(retaken) <= (0 if kind.endswith("ddp") else 5), "more than since the newest checkpoint"
    lines = [one["step"] for one in read_documents(job.run / "metrics" / "train.jsonl")]
    assert sorted(lines) == sorted([*range(STEPS), *retaken]), (
        "steps that nothing has happened to were taken twice"
    )
    restarts = audit_run(job.run, level=None).starts[1:]
    starts = [e["step"] for e in events if e["event"] == "start"]
    assert [one["step"] for one in restarts] == starts[1:]
    assert [one["ranks"] for one in restarts] == [3, 2, 1, 4, 3]
    assert [one["repeats"] for one in restarts[:4]] == [0, 0, 0, 0]
    assert restarts[4]["repeats"] <= len(retaken) + 2, (
        "its unfinished step, and the cells that were gathered beside it"
    )


def test_what_cannot_join_or_leave_is_told_why(
    tmp_path: Path, numbers: str, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, run = Job(tmp_path / "run", numbers, "exact ddp"), str(tmp_path / "run")
    with pytest.raises(NotFoundError, match="no run directory here"):
        join(None, run, [], nproc=1)
    script({"wait": [[3, 1], [6, 2]]})
    job.start(2)
    job.until_groups(2)
    with pytest.raises(RunError, match=r"the plan has 8 lanes.*at most --nproc 6"):
        join(None, run, [], nproc=7)
    with pytest.raises(ConfigurationError, match=r"optimizer.lr 0.02 → 0.5; leave out the file"):
        join(None, run, ["optimizer.lr=0.5"], nproc=1)
    with monkeypatch.context() as patched:
        launched = import_module("shardkit_trainer.launch")
        patched.setattr(
            launched, "software", lambda: {"shardkit": "0.0", "torch": torch.__version__, "cpu": "x"}
        )
        with pytest.raises(RunError, match=r"other software: shardkit .* there, 0.0 here; cpu"):
            join(None, run, [], nproc=1)
    for rank in (2, -1):
        with pytest.raises(RunError, match=f"rank {rank} is not there: expected 0 … 1"):
            leave(run, rank)
    leave(run, 1)
    job.until_groups(2, 1)
    with pytest.raises(RunError, match="rank 0 is the only one"):
        leave(run, 0)
    job.beside(join, None, run, ["log.listen=127.0.0.1:0"], nproc=1)
    job.end()
    assert (job.codes, groups(job.run)) == ([0, 0], [2, 1, 2])
    for command in (lambda: join(None, run, [], nproc=1), lambda: leave(run, 0)):
        with pytest.raises(RunError, match="the run is finished"):
            command()
    # killed with its first supervisor, a job leaves its file behind
    (tmp_path / "run" / "job.json").write_text(
        json.dumps({"address": "127.0.0.1:9", "configuration": {}, "software": {}})
    )
    with pytest.raises((RunError, ConfigurationError)):
        leave(run, 0)


def test_ranks_of_torchrun_cannot_be_joined(tmp_path: Path, numbers: str, fork_trainer: Any) -> None:
    job = Job(tmp_path / "run", numbers, "ddp", **{"parallel.recovery": "restart"})
    settings = dict(one.split("=", 1) for one in job.settings)
    assert fork_trainer(2, {**settings, "model.kind": "trainer_regroups:make"}).returncode == 0
    events = job.run / "events.jsonl"
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:1]))
    assert groups(job.run) == [2]
    with pytest.raises(RunError, match=r"parallel.recovery = 'restart'.*recovery=in-process"):
        join(None, str(job.run), [], nproc=1)
