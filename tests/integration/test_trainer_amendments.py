"""Amendments of a run of the bundled trainer: it goes back to a checkpoint before the change, as one lineage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.audit import audit_run, find_plans, load_run
from shardkit.audit.amendments import ChangeRequest, amend_run
from shardkit.errors import ConfigurationError, StateError
from shardkit.ledger import merge_journals
from shardkit.ledger.bindings import active_amendments, bind_amendment, read_events, undo_amendment
from shardkit.ledger.losses import Losses
from shardkit.telemetry.records import read_documents
from shardkit.torch import checkpoint_names
from shardkit_trainer import load_configuration
from shardkit_trainer.distributed import RESTART
from shardkit_trainer.training import Summary, train
from tests.command_line import call, output_of
from tests.integration.forked import OUTPUT, Forked, become_rank, start_ranks

STEPS, BATCH = 12, 24
FIELDS = ("from_step", "resume_from", "parent", "plan", "manifest", "skip", "weights", "excluded")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """480 short texts in two strata, 40 of them other than the rest."""
    root = tmp_path_factory.mktemp("texts") / "data"
    with shardkit.create(str(root), schema={"text": "str", "kind": "str"}, stratify="kind") as writer:
        for number in range(480):
            text = f"{number} bottles of beer on the wall, " * 2 if number % 12 else "\x01\xff" * 30
            writer.add({"text": text, "kind": "ab"[number % 2]}, key=f"k{number}")
    return str(root)


def settings(run: Path, dataset: str, **more: Any) -> list[str]:
    base = {
        "run.directory": run, "run.steps": STEPS, "run.device": "cpu", "data.dataset": dataset,
        "data.global_batch": BATCH, "data.lanes": 6, "model.context": 24, "model.layers": 2, "model.width": 16,
        "model.heads": 2, "checkpoint.every": 2, "checkpoint.keep": 0, "log.every": 100, "log.telemetry_s": 0.0,
        "log.peak_flops": 1e9, "log.sample_losses": True, **more,
    }  # fmt: skip
    return [f"{k}={json.dumps(v) if isinstance(v, bool | list) else v}" for k, v in base.items()]


def start(run: Path, dataset: str, **more: Any) -> Summary:
    return train(load_configuration(None, settings(run, dataset, **more)))


@pytest.fixture(scope="module")
def finished(texts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be written to."""
    path = tmp_path_factory.mktemp("finished") / "run"
    assert start(path, texts).finished
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def keys_of(run: Path, field: str = "") -> dict[int, list[str]]:
    """Keys, or values of a field, of the samples that the run's branch consumed, by step."""
    record = load_run(run)
    plans = find_plans(record)
    found = {}
    for number, first, end in record.legs():
        one = plans[number]
        for step in range(first, end):
            rows = one.plan.step(step).ravel().tolist()
            found[step] = [one.dataset[n][field] if field else one.dataset.key(n) for n in rows]
    return found


def starts(run: Path) -> list[int]:
    """The steps at which the starts of a run began."""
    return [one["step"] for one in read_documents(run / "events.jsonl") if one["event"] == "start"]


def test_a_run_goes_back_and_skips_steps(run: Path, texts: str) -> None:
    """A finished run is amended in its middle; a second start, with more steps, does not go back again."""
    before = keys_of(run)
    code, told = call("amend", run, "--skip", "5:8", "--message", "spike", "--json")
    assert code == 0, told
    assert json.loads(told)["continues_from"] == "step 4"
    assert start(run, texts, **{"run.steps": STEPS - 4}).step == STEPS - 4
    names = checkpoint_names(run)
    assert start(run, texts).finished
    assert starts(run) == [0, 4, STEPS - 4]
    assert "step-000000000006" in names
    after = keys_of(run)
    assert after == {step: before[step] if step < 5 else before[step + 3] for step in range(STEPS - 3)} | {
        step: after[step] for step in range(STEPS - 3, STEPS)
    }
    assert len(Losses(merge_journals(run)[0]).steps) == STEPS
    samples = run / "ledger" / "loss_values"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:70] + bytes([whole[70] ^ 1]) + whole[71:])
    code, told = call("audit", run)
    assert (code, "losses noted up to this step were changed" in told) == (4, True)
    samples.write_bytes(whole)
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    assert [one.text for one in result.findings if one.kind == "fork"]
    assert "spike" in next(one.text for one in result.findings if one.kind == "amendment")


def test_a_run_continues_without_a_list_and_then_with_weights(tmp_path: Path, texts: str) -> None:
    """Between a stage and after it; checkpoints that are pruned; the branch before is pruned first."""
    run, listed = tmp_path / "run", tmp_path / "list.txt"
    path = tmp_path / "run.toml"
    more = {"checkpoint.keep": 3}
    path.write_text("[[data.stages]]\nfrom_step = 8\nglobal_batch = 48\n")

    def again() -> Summary:
        return train(load_configuration(str(path), settings(run, texts, **more)))

    assert again().finished
    listed.write_text("".join(f"k{number}\n" for number in range(0, 480, 12)))
    assert call("amend", run, "--exclude", listed, "--from-step", 6)[0] == 0
    assert again().finished
    found = keys_of(run)
    assert {len(found[step]) for step in range(8)} == {24}
    assert {len(found[step]) for step in range(8, 12)} == {48}
    assert not {key for step in range(6, 12) for key in found[step]} & {f"k{n}" for n in range(0, 480, 12)}
    assert checkpoint_names(run) == [f"step-{step:012d}" for step in (8, 10, 12)]
    assert audit_run(run).exit_code == 0
    assert call("amend", run, "--weights", "a=3", "--from-step", 10)[0] == 0
    assert again().finished
    result = audit_run(run)
    assert result.exit_code == 0, result.findings
    more["data.global_batch"] = 48
    with pytest.raises(ConfigurationError, match=r"data\.global_batch"):
        again()


def test_a_poisoned_source_spikes_and_the_run_goes_back(tmp_path: Path) -> None:
    """The commands of docs/loss_spikes.md: look, go back to a checkpoint without the source, and audit one lineage."""
    root, run, path = tmp_path / "data", tmp_path / "run", tmp_path / "run.toml"
    noise = np.random.default_rng(1)
    with shardkit.create(str(root), schema={"text": "bytes", "kind": "str"}, stratify="kind") as writer:
        for number in range(480):
            text = b"%d bottles of beer on the wall" % (number % 10)
            bad = noise.integers(0, 256, 30, dtype=np.uint8).tobytes()
            writer.add({"text": bad if number % 3 == 0 else text, "kind": ("crawl", "a", "b")[number % 3]})
    path.write_text(
        "[data.weights]\ncrawl = 0\n[[data.stages]]\nfrom_step = 20\n[data.stages.weights]\ncrawl = 4\n"
    )
    more = {"run.steps": 26, "optimizer.lr": 0.02, "checkpoint.every": 4}
    command = ["train", path, *settings(run, str(root), **more)]
    told = output_of(*command)
    looked = json.loads(call("audit", "spikes", run, "--window", 10, "--json")[1])
    assert looked["step"] in range(20, 24)
    assert looked["strata"][0]["stratum"] == "crawl"
    assert {one["stratum"] for one in looked["samples"]} == {"crawl"}
    back = [*command, "--resume-from", "step-20", "--weights", "crawl=0", "--message", "noise"]
    told = output_of(*back)
    assert "amendment 0: weight crawl=0 from step 20" in told
    assert call(*back)[0] == 0
    assert starts(run) == [0, 20, 26]
    assert call("amend", run, "--list", "--json")[1].count("crawl") == 1
    assert not any("crawl" in keys for step, keys in keys_of(run, "kind").items() if step >= 20)
    assert json.loads(call("audit", "spikes", run, "--window", 10, "--json")[1])["found"] == 0
    told = output_of("audit", run)
    assert "noise" in told
    told = output_of(*command, "--resume-from", "step-13", "--weights", "a=2", code=1)
    assert "no checkpoint of step 13; there are those of steps: 4, 8, 12, 16, 20, 24, 26" in told


def test_a_run_goes_back_and_keeps_its_plan(run: Path, tmp_path: Path, texts: str) -> None:
    """A rewind alone keeps the amendments, of later steps too; it can be undone until a start has gone back."""
    path = tmp_path / "run.toml"
    path.write_text("")
    command = ["train", path, *settings(run, texts)]
    assert call("amend", run, "--skip", "8:9")[0] == 0
    assert call(*command)[0] == 0
    before = keys_of(run)
    back = [*command, "--resume-from", "step-4", "--message", "another learning rate", "optimizer.lr=0.002"]
    assert call(*back)[0] == 2, "the setting is not allowed, so nothing is recorded"
    amend_run(run, ChangeRequest(resume_from=6))
    assert call("amend", run, "--undo")[0] == 0
    told = output_of(*back, "--allow-changes", "optimizer.lr")
    assert "amendment 2: go back to step 4; continues from step 4" in told
    assert call(*back)[0] == 0
    assert starts(run) == [0, 8, 4, STEPS]
    assert keys_of(run) == before
    told = output_of("audit", run)
    assert "another learning rate" in told
    told = output_of("amend", run, "--undo", code=1)
    assert "a start or the running job has applied amendment 2 (go back to step 4)" in told
    listed = json.loads(call("amend", run, "--list", "--json")[1])["amendments"]
    assert [one["change"] for one in listed] == ["skip 8:9 from step 8", "go back to step 4"]


@contextlib.contextmanager
def running(run: Path, dataset: str, **more: Any) -> Iterator[list[Forked]]:
    """Two ranks that train for a long time; killed at the end, if they are still there."""
    endless = {"run.steps": 10**6, "checkpoint.every": 25, "checkpoint.keep": 0, "log.sample_losses": False}
    environment = {**os.environ, OUTPUT: str(run.parent / "job")}
    ranks = start_ranks(2, become_rank, settings(run, dataset, **endless | more), environment=environment)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check_alive(ranks: list[Forked], run: Path) -> None:
    assert [rank.poll() for rank in ranks] == [None, None], (run.parent / "job.err").read_text()


def wait_for(ranks: list[Forked], run: Path, step: int) -> None:
    """Wait until a running job has recorded a step."""
    while (
        max((one.get("step", 0) for one in read_documents(run / "metrics" / "train.jsonl")), default=0) < step
    ):
        check_alive(ranks, run)
        time.sleep(0.05)


def stop(ranks: list[Forked], run: Path) -> None:
    """All ranks save and end when one of them is asked to."""
    ranks[0].send_signal(signal.SIGTERM)
    assert [rank.wait(300) for rank in ranks] == [130, RESTART], (run.parent / "job.err").read_text()


def amended(run: Path, *options: object) -> dict[str, Any]:
    told = output_of("amend", run, *options, "--json")
    return dict(json.loads(told))


def test_a_running_job_changes_its_plan_at_a_later_step(tmp_path: Path, texts: str) -> None:
    """Two ranks; an undo before the step, a change that takes effect, and refusals of what is past."""
    run = tmp_path / "run"
    with running(run, texts) as job:
        wait_for(job, run, 5)
        far = amended(run, "--weights", "a=5", "--from-step", 900_000)
        assert far["running_job"].endswith("applies it at step 900000")
        assert call("amend", run, "--undo")[0] == 0
        assert amended(run, "--list") == {"amendments": []}
        made = amended(run, "--weights", "a=3", "--message", "more of a")
        first = int(made["running_job"].rpartition(" ")[2])
        wait_for(job, run, first + 2)
        code, told = call("amend", run, "--undo")
        assert (code, "applied amendment 1" in told) == (1, True), told
        assert [one["applied"] for one in amended(run, "--list")["amendments"]] == [True]
        code, told = call("amend", run, "--skip", f"{first}:{first + 2}")
        assert (code, "stop the job first" in told) == (1, True), told
        stop(job, run)
    taken = load_run(run).legs()
    assert [leg[1] for leg in taken] == [0, first]
    before, after = (one.plan for one in find_plans(load_run(run)).values())
    assert after.digest == made["plan"] == before.amend(from_step=first, weights={"a": 3}).digest
    code, told = call("audit", run)
    assert code == 0, told
    assert "more of a" in told
    lists = [one["active"] for one in read_documents(run / "events.jsonl") if one["event"] == "amendments"]
    assert lists[-1] == [f"weight a=3 from step {first}"]


def test_a_job_that_is_killed_before_a_change_applies_it_once(tmp_path: Path, texts: str) -> None:
    run = tmp_path / "run"
    with running(run, texts) as job:
        wait_for(job, run, 5)
        for rank in job:
            rank.send_signal(signal.SIGSTOP)  # no step is taken until it is killed
        taken = load_run(run).legs()[-1][2]
        made = amended(run, "--skip", f"{taken + 60}:{taken + 70}")
    more = {"run.steps": taken + 63, "checkpoint.every": 25, "checkpoint.keep": 0, "log.sample_losses": False}
    assert start(run, texts, **more).finished
    assert start(run, texts, **more | {"run.steps": taken + 65}).finished
    legs = load_run(run).legs()
    assert [leg[1:] for leg in legs] == [(0, taken + 60), (taken + 60, taken + 65)]
    plans = find_plans(load_run(run))
    assert plans[legs[1][0]].plan.digest == made["plan"]
    assert [event["kind"] for event in read_events(run) if event["kind"] in ("amendment", "switch")] == [
        "amendment", "switch",
    ]  # fmt: skip
    assert audit_run(run).exit_code == 0


def test_a_change_that_comes_too_late_is_undone(run: Path, texts: str) -> None:
    """As by a command that was stopped for a while before it recorded the change."""
    fields = {name: getattr(amend_run(run, ChangeRequest(skip=(4, 6))), name) for name in FIELDS}
    undo_amendment(run)
    with running(run, texts, **{"checkpoint.every": 2}) as job:
        wait_for(job, run, STEPS + 5)
        bind_amendment(run, fields, message="late")
        while read_events(run)[-1]["kind"] not in ("undo", "checkpoint") or active_amendments(
            read_events(run)
        ):
            check_alive(job, run)
            time.sleep(0.05)
        stop(job, run)
    undos = [event for event in read_events(run) if event["kind"] == "undo"]
    assert undos[-1]["message"] == "recorded after step 4 was read"
    output_of("audit", run)


def test_of_two_changes_at_once_the_second_is_refused(
    run: Path, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second command has read the run before the first one recorded its change."""

    def later(*arguments: Any, **more: Any) -> Any:
        monkeypatch.undo()
        amend_run(run, ChangeRequest(skip=(4, 6)))
        return bind_amendment(*arguments, **more)

    monkeypatch.setattr("shardkit.audit.amendments.bind_amendment", later)
    with pytest.raises(StateError, match="in the meantime; run the command again"):
        amend_run(run, ChangeRequest(skip=(8, 9)))
    assert [one.skip for one in active_amendments(read_events(run))] == [6]
    assert start(run, texts).finished
    assert audit_run(run).exit_code == 0
