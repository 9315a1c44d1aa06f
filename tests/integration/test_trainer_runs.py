"""Whole runs with real processes: killed, stopped, resumed on other world sizes; what was consumed; what is kept."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.audit import audit_run
from shardkit.errors import RunError, StateError
from shardkit.telemetry.records import append_document, read_documents
from shardkit.torch import checkpoint_names
from shardkit_trainer import load_configuration
from shardkit_trainer.run_directory import RunDirectory
from shardkit_trainer.training import train
from tests.drills import drill_cases
from tests.integration.forked import OUTPUT, Forked, become_command
from tests.integration.histogram_runs import BATCH, STEPS, check_histogram, histogram_settings, starts

SETTINGS = {
    "checkpoint.every": 5, "checkpoint.keep": 2, "checkpoint.asynchronous": False, "parallel.exact": "off",
}  # fmt: skip


def ending(run: Path) -> dict[str, Any]:
    """How a run ended: of the readers' threads one may still have something to tell after it."""
    return [event for event in read_documents(run / "events.jsonl") if event["event"] in ("end", "stop")][-1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_killed_and_resumed_on_other_worlds_consumes_exactly_the_plan(
    tmp_path: Path, numbers: str, launch_trainer: Any, fork_trainer: Any
) -> None:
    run = tmp_path / "run"
    settings = histogram_settings(run, numbers, **SETTINGS)
    first = launch_trainer(2, settings, fault="kill:1:7")
    assert first.returncode == 1
    assert "rank 1" in first.stderr
    second = launch_trainer(3, settings, fault="kill:0:13")
    assert second.returncode == 1
    assert "resumed at step 5 of 30 on 3 ranks (was 2)" in second.stdout
    third = fork_trainer(1, settings)
    assert third.returncode == 0, third.stderr
    assert "resumed at step 10 of 30 on 1 ranks (was 3)" in third.stdout
    check_histogram(run, numbers)

    assert checkpoint_names(run) == ["step-000000000025", "step-000000000030"]
    record = json.loads((run / "run.json").read_text())
    opened = shardkit.open(numbers)
    assert record["manifest"] == opened.manifest.id
    assert record["plan"] == opened.plan(global_batch=BATCH, lanes=6, seed=0).digest
    assert record["configuration"]["optimizer"]["name"] == "sgd"
    assert record["software"]["torch"] == torch.__version__
    events = [event["event"] for event in read_documents(run / "events.jsonl")]
    assert events.count("start") == 3
    assert ending(run)["event"] == "end"
    steps = [line["step"] for line in read_documents(run / "metrics" / "train.jsonl")]
    assert sorted(set(steps)) == list(range(STEPS))
    audit = audit_run(run)
    assert audit.exit_code == 0, audit.findings
    assert (audit.steps, [start["ranks"] for start in audit.starts]) == (STEPS, [2, 3, 1])
    assert [(step, fits) for _, step, fits in audit.checkpoints] == [(25, True), (30, True)]

    # nothing is left to do: a further start takes no step and changes nothing
    again = fork_trainer(1, settings)
    assert again.returncode == 0, again.stderr
    assert "resumed at step 30" in again.stdout
    assert checkpoint_names(run)[-1] == "step-000000000030"

    shutil.rmtree(run / "checkpoints")
    anew = fork_trainer(1, settings)
    assert anew.returncode == 0, anew.stderr
    assert "begins again at step 0: no checkpoint is left, and the run had taken step 29" in anew.stdout


def test_nonfinite_gradients_end_the_run_or_are_skipped(
    tmp_path: Path, numbers: str, fork_trainer: Any
) -> None:
    settings = histogram_settings(tmp_path / "run", numbers, **SETTINGS)
    result = fork_trainer(1, settings, fault="nan:0:6")
    assert result.returncode == 1
    assert "step 6: the gradient is not finite" in result.stderr
    more = {**SETTINGS, "optimizer.skip_nonfinite": 2}
    skipping = histogram_settings(tmp_path / "other", numbers, **more)
    result = fork_trainer(2, skipping, fault="nan:1:6")
    assert result.returncode == 0, result.stderr
    events = [e for e in read_documents(tmp_path / "other" / "events.jsonl") if e["event"] == "nonfinite"]
    assert [e["step"] for e in events] == [6]


def alone(settings: dict[str, Any]) -> str:
    """The hash of an exact run in this process."""
    values = {k: str(v).lower() if isinstance(v, bool) else v for k, v in settings.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        return train(load_configuration(None, [f"{k}={v}" for k, v in values.items()])).parameters_sha256


def test_exact_mode_is_bit_equal_while_ranks_and_strategies_change(
    tmp_path: Path, digits: dict[str, str], fork_trainer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """2, 3, 4 ranks and one again, each going on where the ones before have ended; and one rank throughout."""
    base: dict[str, Any] = {
        "data.dataset": digits["train"], "data.global_batch": 24, "data.lanes": 6, "model.kind": "classifier",
        "model.width": 8, "model.stages": 2, "optimizer.lr": 0.01, "schedule.kind": "constant",
        "schedule.warmup": 5, "parallel.exact": "int64", "evaluation.dataset": digits["val"],
    }  # fmt: skip
    whole = {**base, "run.steps": 12, "run.directory": tmp_path / "whole"}
    expected = alone(whole)
    evaluated = evaluation_line(capfd.readouterr().out)
    assert "over 360 samples" in evaluated
    seen = []
    for steps, ranks, strategy in ((3, 2, "zero1"), (6, 3, "zero2"), (9, 4, "ddp"), (12, 1, "zero1")):
        more = {"run.steps": steps, "run.directory": tmp_path / "changing", "parallel.strategy": strategy}
        result = fork_trainer(ranks, {**base, **more})
        assert result.returncode == 0, result.stderr
        seen.append(ending(tmp_path / "changing")["parameters_sha256"])
    assert len(set(seen)) == 4, "every three steps change the parameters"
    assert seen[-1] == expected
    assert ending(tmp_path / "changing")["loss"] == ending(tmp_path / "whole")["loss"]
    assert evaluation_line(result.stdout) == evaluated
    assert starts(tmp_path / "changing") == [(0, 2), (3, 3), (6, 4), (9, 1)]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("strategy", "exact"),
    drill_cases([("ddp", "int64"), ("zero2", "int64"), ("zero2", "off"), ("zero3", "off")], [1]),
)
def test_a_stragglers_lanes_move_and_the_result_stays(
    tmp_path: Path, digits: dict[str, str], fork_trainer: Any, strategy: str, exact: str
) -> None:
    """One of four ranks at half speed gives lanes away; the result is that of one process, bit by bit if exact."""
    base = {
        "run.steps": 32, "data.dataset": digits["train"], "data.global_batch": 24, "data.lanes": 12,
        "model.kind": "trainer_histogram:straggler", "model.width": 8, "model.stages": 1, "parallel.exact": exact,
        "checkpoint.every": 100, "parallel.rebalance": True, "parallel.rebalance_every": 4,
        "parallel.strategy": strategy, "parallel.pass_samples": 4,
    }  # fmt: skip
    whole = alone({**base, "run.directory": tmp_path / "alone"})
    result = fork_trainer(4, {**base, "run.directory": tmp_path / "moved"}, fault="slow:3:12")
    assert result.returncode == 0, result.stderr
    assert ending(tmp_path / "moved")["parameters_sha256"] == whole
    assert ending(tmp_path / "moved")["loss"] == pytest.approx(ending(tmp_path / "alone")["loss"], rel=1e-3)
    moves = [e for e in read_documents(tmp_path / "moved" / "events.jsonl") if e["event"] == "rebalance"]
    assert moves
    assert moves[0]["owner"].count(3) < 3
    assert moves[0]["expected_us"] < 0.9 * moves[0]["before_us"]
    audit = audit_run(tmp_path / "moved")
    assert audit.exit_code == 0, audit.findings


def evaluation_line(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("evaluation"))


def test_a_run_directory_has_one_trainer_and_one_plan(tmp_path: Path) -> None:
    one = RunDirectory(str(tmp_path / "run"), lead=True)
    one.begin({"run": {"seed": 1}}, "sha256:a", "p", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardkit_trainer.run_directory.time.sleep", lambda _: None)
        with pytest.raises(RunError, match=r"process \d+ is training in it"):
            RunDirectory(str(tmp_path / "run"), lead=True)
    with pytest.raises(StateError, match="belongs to manifest sha256:a, plan p"):
        one.begin({"run": {"seed": 1}}, "sha256:b", "p", {})
    one.close()


def test_torn_lines_are_closed_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a":1}\n{"a":2')
    append_document(path, {"a": 3})
    assert read_documents(path) == [{"a": 1}, {"a": 3}]


EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(folder: Path, name: str, *settings: str) -> str:
    """The output of ``shardkit train`` on an example."""
    environment = {**os.environ, OUTPUT: str(folder / "said")}
    command = ["train", str(EXAMPLES / name), f"run.directory={folder / 'run'}", *settings]
    code = Forked(become_command, command, environment=environment).wait(900)
    out, err = ((folder / f"said.{kind}").read_text() for kind in ("out", "err"))
    assert code == 0, out + err
    return out


def test_the_digits_example_learns(tmp_path: Path, digits: dict[str, str]) -> None:
    settings = (f"data.dataset={digits['train']}", f"evaluation.dataset={digits['val']}", "run.epochs=6")
    output = run_example(tmp_path, "digits.toml", *settings)
    assert "over 360 samples" in output
    accuracy = float(evaluation_line(output).partition("accuracy ")[2].split()[0])
    assert accuracy > 95.0


def test_the_language_example_learns(tmp_path: Path) -> None:
    root = tmp_path / "stdlib"
    schema = {"text": "str", "package": "str"}
    with shardkit.create(
        str(root), schema=schema, stratify="package", shard_size="256KiB", block_size="16KiB"
    ) as writer:
        for package in ("json", "email", "asyncio"):
            for source in sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py")):
                text = source.read_text(encoding="utf-8")
                for at in range(0, len(text), 1000):
                    writer.add({"text": text[at : at + 1000], "package": package})
    smaller = ["model.width=64", "model.layers=2", "model.context=64", "data.global_batch=16"]
    quick = [*smaller, "run.steps=60", "log.every=10"]
    output = run_example(tmp_path, "stdlib_gpt.toml", f"data.dataset={root}", *quick)
    losses = [line["loss"] for line in read_documents(tmp_path / "run" / "metrics" / "train.jsonl")]
    assert len(losses) == 60
    assert losses[0] > 5.0
    assert sum(losses[-5:]) / 5 < 3.3, output
