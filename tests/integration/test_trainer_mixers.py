"""The bundled trainer with a mixer: settings, ranks, a kill, a rewind and an audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit import audit_run, load_run
from shardkit.errors import ConfigurationError
from shardkit.ledger.decisions import recorded_decisions
from shardkit_trainer import load_configuration
from shardkit_trainer.training import Summary, train
from tests.command_line import call, output_of

STEPS = 40
MIXED = """
[data]
mixer = "ado"
mixer_every = 4
[data.mixer_arguments]
warmup = 0
pace = 0.5
[log]
sample_losses = true
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Texts of two strata: one repeats, one is longer and varied."""
    root = tmp_path_factory.mktemp("texts") / "data"
    with shardkit.create(str(root), schema={"text": "str", "kind": "str"}, stratify="kind") as writer:
        for number in range(480):
            text = "ab" * 12 if number % 2 else f"{number * 7919 % 1000} bottles of beer {number}"
            writer.add({"text": text, "kind": "ab"[number % 2]})
    return str(root)


def start(folder: Path, dataset: str, text: str = MIXED, **more: Any) -> Summary:
    path = folder / "run.toml"
    path.write_text(text)
    base = {
        "run.directory": folder / "run", "run.steps": STEPS, "run.device": "cpu", "data.dataset": dataset,
        "data.global_batch": 16, "data.lanes": 4, "model.context": 24, "model.layers": 1, "model.width": 16,
        "model.heads": 2, "checkpoint.every": 5, "checkpoint.keep": 0, "log.every": 100, "log.telemetry_s": 0.0,
        "optimizer.lr": 0.02, "schedule.kind": "constant", "parallel.threads": 1, **more,
    }  # fmt: skip
    return train(load_configuration(str(path), [f"{key}={value}" for key, value in base.items()]))


def test_a_run_with_a_mixer_resumes_goes_back_and_is_audited(tmp_path: Path, texts: str) -> None:
    exact: dict[str, Any] = {"parallel.exact": "fp64"}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    assert start(tmp_path / "whole", texts, **exact).finished
    start(tmp_path / "parts", texts, **(exact | {"run.steps": 22}))
    run = tmp_path / "parts" / "run"
    assert call("amend", run, "--weights", "a=2", "--from-step", 22)[0] == 1
    start(tmp_path / "parts", texts, **exact)
    whole, parts = (load_run(tmp_path / name / "run") for name in ("whole", "parts"))
    assert whole.branch["digest"].tobytes() == parts.branch["digest"].tobytes()
    decisions = recorded_decisions(whole.events, whole.plans[0]["plan"])
    assert len(decisions) == 9
    assert len({one.weights for one in decisions}) > 2
    told = output_of("audit", run, "--json")
    assert "9 decisions, each computed again" in told


def test_a_run_with_a_mixer_goes_back_to_a_checkpoint(tmp_path: Path, texts: str) -> None:
    assert start(tmp_path, texts).finished
    run = tmp_path / "run"
    output_of("train", tmp_path / "run.toml", *_overrides(tmp_path, texts), "--resume-from", "step-20")
    result = audit_run(run)
    assert result.exit_code == 0, result.findings


def _overrides(folder: Path, dataset: str) -> list[str]:
    record = json.loads((folder / "run" / "run.json").read_text())["configuration"]
    keys = (
        "run.directory run.steps run.device data.dataset data.global_batch data.lanes model.context model.layers "
        "model.width model.heads checkpoint.every checkpoint.keep log.telemetry_s optimizer.lr schedule.kind "
        "parallel.threads"
    )
    return [f"{key}={record[key.split('.')[0]][key.split('.')[1]]}" for key in keys.split()]


def halve(losses: Any, weights: Any, step: int) -> list[float]:
    return [1.0, 2.0 + step]


def test_a_function_of_the_user_decides(tmp_path: Path, texts: str) -> None:
    name = f"{__name__}:halve"
    text = f'[data]\nmixer = "{name}"\nmixer_every = 4\n[log]\nsample_losses = true\n'
    assert start(tmp_path, texts, text).finished
    assert call("audit", tmp_path / "run")[0] == 3
    assert call("audit", tmp_path / "run", "--mixer", name)[0] == 0
    assert call("audit", tmp_path / "run", "--mixer", "no.such:function")[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[data]\nmixer = "ado"\n', "expected both or neither"),
        ('[data]\nmixer = "ado"\nmixer_every = 4\n', "expected log.sample_losses = true"),
        ('[data]\nmixer = "aod"\nmixer_every = 4\n', "expected ado, temperature, or package.module:function"),
        (
            '[data]\nmixer = "ado"\nmixer_every = 4\n[data.mixer_arguments]\nlest = 1\n',
            "expected arguments of ado",
        ),
        (
            '[data]\nmixer = "ado"\nmixer_every = 4\ncost = "len(text)"\n',
            "expected no data.cost or data.stages",
        ),
        ('[data]\nmixer = "temperature"\nmixer_every = 6\n', "a multiple of the 4 lanes, such as 4 or 8"),
        (
            '[data]\nmixer = "no.such:function"\nmixer_every = 4\n[log]\nsample_losses = true\n',
            "data.mixer =",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, texts: str, text: str, message: str) -> None:
    with pytest.raises((ConfigurationError, shardkit.errors.PlanError), match=message):
        start(tmp_path, texts, text)
