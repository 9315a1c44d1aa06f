"""Ranks that die or are stopped, and the restart that follows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shardkit.audit import audit_run
from shardkit.telemetry.records import read_documents
from shardkit.torch import checkpoint_names, read_checkpoint_manifest
from tests.drills import drill_cases
from tests.integration.conftest import MODULES, arguments_of, descendants, is_running
from tests.integration.forked import OUTPUT, Forked, become_agent
from tests.integration.histogram_runs import check_histogram, histogram_settings, starts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


ENDLESS = {"run.steps": 1_000_000, "checkpoint.every": 1_000_000}


@pytest.mark.drill
@pytest.mark.parametrize(
    ("nproc", "asked"),
    drill_cases([(1, signal.SIGINT), (2, signal.SIGINT), (2, signal.SIGTERM), (1, signal.SIGHUP)], [2, 3]),
)
def test_the_command_passes_a_signal_on_and_all_ranks_save_and_end(
    tmp_path: Path, numbers: str, nproc: int, asked: signal.Signals
) -> None:
    """All are processes as users start them; under nohup, the end of the terminal changes nothing."""
    run = tmp_path / "run"
    (tmp_path / "run.toml").write_text("")
    command = [str(Path(sys.executable).with_name("shardkit")), "train", str(tmp_path / "run.toml")]
    settings = arguments_of(histogram_settings(run, numbers, **ENDLESS))
    is_ignored = asked == signal.SIGTERM
    process = subprocess.Popen(
        [*(["nohup"] if is_ignored else []), *command, *settings, "--nproc", str(nproc)],
        env={**os.environ, "PYTHONPATH": MODULES},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )  # fmt: skip
    assert process.stdout is not None
    said = ""
    while "step 3/" not in said:
        said += process.stdout.readline()
    if is_ignored:
        process.send_signal(signal.SIGHUP)
        while "step 30/" not in said:
            said += process.stdout.readline()
    process.send_signal(asked)
    said += process.communicate(timeout=300)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    stops = [event for event in read_documents(run / "events.jsonl") if event["event"] in {"stop", "end"}]
    assert [event["event"] for event in stops] == ["stop"]
    assert checkpoint_names(run) == [f"step-{stops[0]['step']:012d}"]
    assert stops[0]["step"] >= 3


def test_one_stopped_rank_ends_the_run_and_all_ranks_save(
    tmp_path: Path, numbers: str, launch_trainer: Any, fork_trainer: Any
) -> None:
    """Although failures would be followed by a restart: torchrun sees two clean ends."""
    run = tmp_path / "run"
    result = launch_trainer(2, histogram_settings(run, numbers), fault="term:1:7", restarts=3)
    assert result.returncode == 130, result.stdout + result.stderr
    assert result.stderr == "", "nothing failed"
    assert starts(run) == [(0, 2)]
    assert checkpoint_names(run) == ["step-000000000008"], "the step that was being taken is finished"
    resumed = fork_trainer(1, histogram_settings(run, numbers))
    assert resumed.returncode == 0, resumed.stderr
    check_histogram(run, numbers)


def test_a_restart_repeats_the_steps_since_the_newest_checkpoint(
    tmp_path: Path, numbers: str, launch_trainer: Any
) -> None:
    """The publisher of checkpoints dies in the eighth save of each attempt: a restart takes seven further steps."""
    run = tmp_path / "run"
    synchronous = {"checkpoint.asynchronous": False, "checkpoint.every": 1}
    result = launch_trainer(
        2, histogram_settings(run, numbers, **synchronous), fault="finish:0:8", restarts=1
    )
    assert result.returncode == 1
    assert "rank 0" in result.stderr
    assert "restarts left: 0" in result.stderr
    assert "Traceback" not in result.stderr
    assert starts(run) == [(0, 2), (7, 2)]
    assert checkpoint_names(run)[-1] == "step-000000000014"
    result = launch_trainer(3, histogram_settings(run, numbers))
    assert result.returncode == 0, result.stderr
    assert starts(run)[2:] == [(14, 3)]
    check_histogram(run, numbers)
    record = audit_run(run, level=None)
    assert record.exit_code == 0, record.findings
    # the step that was lost, and the one that was handed out while it was computed
    assert all(1 <= one["repeats"] <= 2 for one in record.starts[1:]), record.starts


def test_a_frozen_rank_is_named_and_replaced(tmp_path: Path, numbers: str, launch_trainer: Any) -> None:
    run = tmp_path / "run"
    short = {"parallel.timeout_s": 10.0, "parallel.shutdown_s": 2}
    result = launch_trainer(2, histogram_settings(run, numbers, **short), fault="freeze:1:5")
    assert result.returncode == 1, result.stdout
    assert (
        "waited in step 5, stage exchange, for: rank 1 (frozen; last seen at step 5, stage data)"
        in result.stderr
    )
    assert "10000ms" in result.stdout + result.stderr, "parallel.timeout_s, not torch's half hour"
    assert "Traceback" not in result.stderr
    result = launch_trainer(2, histogram_settings(run, numbers))
    assert result.returncode == 0, result.stderr
    check_histogram(run, numbers)


def test_ranks_save_and_end_when_their_command_is_killed(tmp_path: Path, numbers: str) -> None:
    """Nobody could stop them afterwards."""
    run, output = tmp_path / "run", tmp_path / "agent.out"
    settings = arguments_of(histogram_settings(run, numbers, **ENDLESS))
    environment = {**os.environ, OUTPUT: str(output.with_suffix(""))}
    agent = Forked(become_agent, settings, "", {"nproc": 3}, environment=environment)
    while not output.exists() or "step 3/" not in output.read_text():
        assert agent.poll() is None, output.with_suffix(".err").read_text()
        time.sleep(0.05)
    assert agent.pid is not None
    ranks = descendants(agent.pid)
    assert len(ranks) == 3
    agent.kill()
    agent.wait()
    while any(map(is_running, ranks)):
        time.sleep(0.05)
    assert "Traceback" not in output.read_text() + output.with_suffix(".err").read_text()
    assert len(checkpoint_names(run)) == 1


@pytest.mark.drill
@pytest.mark.parametrize("harm", drill_cases(["ref", "manifest", "tensor"], [2]))
def test_a_damaged_checkpoint_is_passed_over_and_the_console_says_why(
    tmp_path: Path, numbers: str, fork_trainer: Any, harm: str
) -> None:
    run = tmp_path / "run"
    few = {**histogram_settings(run, numbers), "checkpoint.keep": 0}
    assert fork_trainer(1, few).returncode == 0
    name = checkpoint_names(run)[-1]
    ref = run / "checkpoints" / f"{name}.json"
    digest = json.loads(ref.read_text())["checkpoint"].removeprefix("sha256:")
    if harm == "tensor":
        digest = read_checkpoint_manifest(run)["tensors"]["model.seen"]["chunks"][0][2][0][0]
    kind = {"tensor": "tensor", "manifest": "checkpoint"}.get(harm)
    torn = run / "objects" / "sha256" / digest[:2] / f"{digest}.{kind}" if kind else ref
    torn.write_bytes(torn.read_bytes()[:40])
    result = fork_trainer(2, few)
    assert result.returncode == 0, result.stderr
    assert f"checkpoint {name} is damaged and passed over" in result.stdout
    assert torn.name in result.stdout, "it is said what is damaged"
    assert "resumed at step 20 of 30 on 2 ranks" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "Error" not in result.stderr
    check_histogram(run, numbers)
