"""A run that goes on with other settings says so, refuses what changes data or model, and records what was allowed."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardkit
from shardkit.audit import audit_run
from shardkit.errors import ConfigurationError, IntegrityError, StoreReadOnlyError
from shardkit.ledger import bind_checkpoint, recorded_plan
from shardkit.plan import making as plans
from shardkit.torch import CheckpointWriter
from shardkit_trainer import load_configuration
from shardkit_trainer.__main__ import main as rank_main
from shardkit_trainer.run_directory import RunDirectory, check_changes
from shardkit_trainer.training import train
from tests.command_line import output_of

FREE = {
    "run.directory",
    "run.device",
    "data.dataset",
    "data.parts",
    "data.locations",
    "data.cache",
    "data.cache_size",
    "data.share",
    "data.device_prefetch",
}
GUARDED_SECTIONS = ("data", "model", "optimizer", "schedule")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("texts") / "data"
    with shardkit.create(str(root), schema={"text": "str", "kind": "str"}, block_size="1KiB") as writer:
        for number in range(200):
            writer.add({"text": f"{number} bottles of beer on the wall", "kind": "x"})
    return str(root)


def settings(directory: Path, dataset: str, **more: Any) -> list[str]:
    base = {
        "run.directory": directory, "run.steps": 4, "run.device": "cpu", "data.dataset": dataset,
        "data.global_batch": 8, "data.lanes": 4, "model.field": "text", "model.context": 16, "model.layers": 1,
        "model.width": 16, "model.heads": 2, "optimizer.lr": 0.01, "checkpoint.every": 2, "log.every": 2,
        "log.telemetry_s": 0.0, "log.peak_flops": 1e9, **{key.replace("__", "."): value for key, value in more.items()},
    }  # fmt: skip
    return [f"{key}={value}" for key, value in base.items()]


@pytest.fixture(scope="module")
def finished(texts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps; not to be written to."""
    path = tmp_path_factory.mktemp("finished") / "run"
    train(load_configuration(None, settings(path, texts)))
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


CHANGES = [
    ("optimizer__lr", 0.5, "0.01 → 0.5"), ("run__seed", 9, "0 → 9"), ("parallel__precision", "bf16", "fp32 → bf16"),
    ("model__dropout", 0.25, "0.0 → 0.25"), ("optimizer__clip", 0.0, "1.0 → 0.0"),
    ("data__stages", "[{from_step = 3, global_batch = 4}]", "[] → [{"), ("data__seed", 4, "0 → 4"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "words"), CHANGES, ids=[key for key, _, _ in CHANGES])
def test_what_changes_data_or_model_is_refused(
    run: Path, texts: str, key: str, value: Any, words: str
) -> None:
    before = sorted(path.name for path in run.rglob("*"))
    name = key.replace("__", ".")
    with pytest.raises(ConfigurationError) as caught:
        train(load_configuration(None, settings(run, texts, **{key: value})))
    assert f"{name} {words}" in str(caught.value)
    assert f"--allow-changes {name}" in str(caught.value)
    assert sorted(path.name for path in run.rglob("*")) == before
    assert [event.get("event") for event in log(run)].count("start") == 1


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_what_was_allowed_is_printed_recorded_and_explained(
    run: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"optimizer__lr": 0.5, "run__steps": 6, "log__every": 1}
    config = load_configuration(None, settings(run, texts, **other))
    assert train(config, allow_changes=["optimizer.lr"]).step == 6
    told = capsys.readouterr().out
    for words in ("optimizer.lr 0.01 → 0.5", "run.steps 4 → 6", "log.every 2 → 1", "step 5/6", "step 6/6"):
        assert words in told
    audit = audit_run(run)
    assert (audit.exit_code, audit.verdict[:9]) == (0, "explained")
    explained = {one.subject: one.text for one in audit.findings if one.severity == "explained"}
    texts_found = [one.text for one in audit.findings if one.severity == "explained"]
    assert list(explained) == ["step 4"]
    assert any("optimizer.lr 0.01 → 0.5, allowed" in text for text in texts_found)
    assert not any("run.steps 4 → 6, allowed" in text for text in texts_found)
    # the next start is compared with this one, not with the first
    assert train(config).step == 6
    assert "settings differ" not in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"optimizer\.lr 0\.5 → 0\.01"):
        train(load_configuration(None, settings(run, texts, run__steps=6)))


def test_what_changes_neither_is_printed_and_goes_on(
    run: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"checkpoint__keep": 7, "parallel__strategy": "zero1", "parallel__pass_samples": 4}
    train(load_configuration(None, settings(run, texts, **other)))
    told = capsys.readouterr().out
    for words in ("checkpoint.keep 3 → 7", "parallel.strategy ddp → zero1", "parallel.pass_samples 32 → 4"):
        assert words in told
    assert audit_run(run).verdict.startswith("clean")


@pytest.mark.parametrize("kind", ["constant", "cosine"])
def test_more_steps_are_no_other_data(
    tmp_path: Path, texts: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (2, 4):
        more = {"schedule__kind": kind, "run__steps": steps}
        assert train(load_configuration(None, settings(tmp_path / "run", texts, **more))).step == steps
    assert "run.steps 2 → 4" in capsys.readouterr().out
    assert audit_run(tmp_path / "run").verdict.startswith("clean")


def test_a_start_that_failed_before_its_first_step_binds_nothing(tmp_path: Path, texts: str) -> None:
    """Neither its settings nor its data: the next start has another model and another batch."""
    run = tmp_path / "run"
    with pytest.raises(ConfigurationError, match=r"model\.vocabulary"):
        train(load_configuration(None, settings(run, texts, model__vocabulary=50)))
    other = {"model__width": 32, "data__global_batch": 16, "data__seed": 5}
    assert train(load_configuration(None, settings(run, texts, **other))).step == 4
    assert audit_run(run).verdict.startswith("clean")
    assert len(list((run / "failed-starts").glob("*/run.json"))) == 1
    with pytest.raises(ConfigurationError, match=r"model\.width 32 → 16"):
        train(load_configuration(None, settings(run, texts)))


def test_a_run_directory_that_cannot_be_written_is_named(
    tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("os.open", "pathlib.Path.mkdir"):
        with monkeypatch.context() as patched:
            patched.setattr(name, refuse)
            with pytest.raises(StoreReadOnlyError, match=re.escape(f"run directory {tmp_path / 'run'}")):
                RunDirectory(str(tmp_path / "run"), lead=True)


def test_a_run_with_nothing_left_to_do_says_so(
    run: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_configuration(None, settings(run, texts)))
    told = capsys.readouterr().out
    assert "nothing is left to do: the run has 4 steps, all of them taken" in told
    assert "loss" not in told


def test_steps_without_a_valid_target_say_so(
    tmp_path: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(load_configuration(None, settings(tmp_path / "run", texts, model__field="kind")))
    told = capsys.readouterr().out
    assert "no valid token: nothing was learned" in told
    assert "loss 0.0000" not in told


def differing(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return "x" if isinstance(value, str) else [1] if isinstance(value, list) else {"x": 1}


def test_every_key_of_data_and_model_is_guarded(tmp_path: Path, texts: str) -> None:
    config = load_configuration(None, settings(tmp_path, texts))
    stored = json.loads(json.dumps(dataclasses.asdict(config)))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-000000000001.json").write_text("{}")  # a start that took a step
    seen = 0
    for section, values in stored.items():
        for key, value in values.items():
            known = {**stored, section: {**values, key: differing(value)}}
            (tmp_path / "run.json").write_text(json.dumps({"configuration": known}))
            name = f"{section}.{key}"
            guarded = section in GUARDED_SECTIONS and name not in FREE
            if guarded:
                with pytest.raises(ConfigurationError, match=name):
                    check_changes(config)
                assert [one.guarded for one in check_changes(config, [name])] == [True]
                seen += 1
            elif section in ("checkpoint", "evaluation", "log") or name in FREE:
                assert [(one.key, one.guarded) for one in check_changes(config)] == [(name, False)]
    assert seen > 30


def test_keys_that_may_not_be_allowed(run: Path, texts: str) -> None:
    config = load_configuration(None, settings(run, texts))
    for key in ("optimizer.rate", "log.every", "lr"):
        with pytest.raises(ConfigurationError, match=f"--allow-changes {key}"):
            train(config, allow_changes=[key])


def test_run_json_is_not_changed_on_the_way(run: Path, texts: str) -> None:
    config = load_configuration(None, settings(run, texts))
    path = run / "run.json"
    clean = path.read_text()
    path.write_text(clean.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(IntegrityError, match=r"run\.json was changed"):
        train(config)
    path.unlink()
    with pytest.raises(IntegrityError, match=r"run\.json is gone"):
        train(config)
    path.write_text(clean)
    assert train(config).finished


def test_the_commands_take_the_keys(run: Path, texts: str) -> None:
    path = run.parent / "run.toml"
    path.write_text("")
    overrides = settings(run, texts, optimizer__lr=0.5)
    assert "optimizer.lr 0.01 → 0.5" in output_of("train", path, *overrides, code=2)
    assert rank_main([str(path), *overrides]) == 2
    assert rank_main([str(path), *overrides, "--allow-changes=optimizer.lr"]) == 0
    overrides = settings(run, texts, optimizer__lr=0.25)
    said = output_of("train", path, *overrides, "--allow-changes", "optimizer.lr")
    assert "optimizer.lr 0.5 → 0.25" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, texts: str) -> None:
    with pytest.raises(ConfigurationError, match=r"run\.device = 'cuda'"):
        train(load_configuration(None, settings(tmp_path / "run", texts, run__device="cuda")))


# ---- checkpoints of a loop of one's own


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoints_of_a_loop_of_ones_own_are_bound(tmp_path: Path, texts: str) -> None:
    """Also where it was killed after a checkpoint was recorded and before it was published."""
    from torch.distributed.checkpoint.state_dict_saver import save as save_state

    from shardkit.ledger import ledger_head

    dataset, run = shardkit.open(texts), tmp_path / "run"
    plan = dataset.plan(global_batch=8, lanes=4)

    def save_plainly(name: str) -> None:
        save_state({"weights": torch.arange(5.0)}, storage_writer=CheckpointWriter(run, name))

    def save(step: int) -> None:
        meta = {"step": step, "loader": loader.state_dict(), "ledger": ledger_head(run, step),
                "manifest": dataset.manifest.id, "plan": plan.digest}  # fmt: skip
        writer = CheckpointWriter(run, f"step-{step:012d}", meta)
        save_state({"weights": torch.arange(9.0) * step}, storage_writer=writer)

    with dataset.loader(plan, rank=0, world=1, run=run, tensors=False) as loader:
        for batch in loader:
            if batch.step == 1:  # before the ledger has a step, and without a word about the run
                save_plainly("step-000000000002")
                save_plainly("best")
            if batch.step == 3:
                save(4)
            if batch.step == 6:
                ledger_head(run, 7)
                bind_checkpoint(run, name="step-000000000007", checkpoint="sha256:" + "00" * 32, step=7)
                assert audit_run(run).verdict.startswith("clean")
                save(7)
                break
    audit = audit_run(run)
    assert (audit.verdict[:5], audit.bound_checkpoints) == ("clean", 4)
    ref = run / "checkpoints" / "step-000000000004.json"
    for path in run.rglob("*.tensor"):
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert audit_run(run).verdict == "violated"
    ref.rename(ref.with_name("step-000000000009.json"))
    named = [
        one
        for one in audit_run(run).findings
        if one.severity == "violated" and "does not record it" in one.text
    ]
    assert [one.subject for one in named] == ["step-000000000009"]


def test_a_run_keeps_the_lanes_that_it_began_with(
    tmp_path: Path, texts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(steps: int) -> Any:
        chosen = settings(tmp_path / "run", texts, data__lanes=0, data__global_batch=16, run__steps=steps)
        return train(load_configuration(None, chosen))

    began = shardkit.open(texts).plan(global_batch=16)
    assert start(4).step == 4
    for name, other in (("default_lanes", 4), ("default_window_blocks", 7)):  # as a later version may choose
        monkeypatch.setattr(plans, name, lambda *_arguments, other=other, **_settings: other)
    assert shardkit.open(texts).plan(global_batch=16).lanes == 4 != began.lanes
    assert start(6).step == 6
    audit = audit_run(tmp_path / "run")
    assert (audit.exit_code, audit.verdict[:5]) == (0, "clean"), audit.findings
    recorded = recorded_plan(tmp_path / "run", began.digest)
    assert recorded is not None
    assert (recorded["lanes"], recorded["window_blocks"]) == (began.lanes, began.settings.window_blocks)


def test_what_a_killed_start_journaled_says_its_lanes(tmp_path: Path, texts: str) -> None:
    ds = shardkit.open(texts)
    plan = ds.plan(global_batch=16)
    with ds.loader(plan, run=tmp_path / "run", telemetry=None) as loader:
        next(iter(loader))
    assert not (tmp_path / "run" / "ledger").exists()
    assert recorded_plan(tmp_path / "run", plan.digest) == plan.history()[0]["settings"]
    assert recorded_plan(tmp_path / "run", "0" * 64) is None
    assert recorded_plan(tmp_path / "other", plan.digest) is None
