"""What a run can be told, in one process: precision, recomputation, stages, versions, replicas, cost, what is shown."""

from __future__ import annotations

import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

import shardkit
from shardkit.audit import audit_run
from shardkit.errors import ConfigurationError, NotFoundError
from shardkit.ledger import merge_journals
from shardkit.ledger.losses import Losses
from shardkit.loader.device import DeviceFeed
from shardkit.telemetry.records import read_documents
from shardkit.torch import checkpoint_names
from shardkit_trainer import load_configuration
from shardkit_trainer.training import Summary, train
from tests.unit.test_device_feed import Stream


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """480 short texts in two strata."""
    root = tmp_path_factory.mktemp("texts") / "data"
    with shardkit.create(
        str(root),
        schema={"text": "str", "kind": "str"},
        stratify="kind",
        shard_size="16KiB",
        block_size="1KiB",
    ) as writer:
        for number in range(480):
            writer.add({"text": f"{number} bottles of beer on the wall, " * 2, "kind": "ab"[number % 2]})
    return str(root)


def settings(directory: Path, dataset: str, **more: Any) -> list[str]:
    base = {
        "run.directory": directory, "run.steps": 6, "run.device": "cpu", "data.dataset": dataset,
        "data.global_batch": 24, "data.lanes": 6, "model.context": 24, "model.layers": 2, "model.width": 16,
        "model.heads": 2, "optimizer.lr": 0.01, "checkpoint.every": 100, "log.every": 100, "log.telemetry_s": 0.0,
        "log.peak_flops": 1e9, **more,
    }  # fmt: skip
    return [f"{k}={json.dumps(v) if isinstance(v, bool | list) else v}" for k, v in base.items()]


def run(directory: Path, dataset: str, **more: Any) -> Summary:
    return train(load_configuration(None, settings(directory, dataset, **more)))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_half_precision_computes_and_reduces_in_single(tmp_path: Path, texts: str, strategy: str) -> None:
    losses = {}
    for precision in ("fp32", "bf16", "fp16"):
        more = {"parallel.precision": precision, "parallel.strategy": strategy}
        losses[precision] = run(tmp_path / precision, texts, **more).loss
        ends = [e for e in read_documents(tmp_path / precision / "events.jsonl") if e["event"] == "end"]
        held = ends[-1]["bytes_held"]
        assert held["gradients"] == held["parameters"], "gradients are float32"
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.02)
    assert losses["fp16"] == pytest.approx(losses["fp32"], abs=0.005)
    assert len(set(losses.values())) == 3, "the computation was not in another precision"


class Feed(DeviceFeed):
    """One that believes in its device: with a stream, which waits for what it hands out."""

    log: ClassVar[list[str]] = []

    def __init__(self, steps: Any, ready: Any, device: Any, ahead: int, finish: Any, _stream: Any) -> None:
        class Waiting(Stream):
            def receive(self, event: int, tensors: list[Any]) -> None:
                Feed.log.append(f"received {event} of {self.sends}")
                assert all(torch.is_tensor(tensor) for tensor in tensors)

        super().__init__(steps, ready, device, ahead, finish, cast(Any, Waiting()))


def test_cells_are_on_the_device_ahead_and_prepared_there(
    tmp_path: Path, texts: str, digits: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = {"model.kind": "classifier", "model.width": 8, "model.stages": 1}
    for name, dataset, more in (("gpt", texts, {}), ("classifier", digits["train"], classifier)):
        exact = {**more, "parallel.exact": "int64"}
        plain = run(tmp_path / f"{name}-plain", dataset, **exact)
        with monkeypatch.context() as patched:
            patched.setattr("shardkit.loader.device.DeviceFeed", Feed)
            ahead = run(tmp_path / f"{name}-ahead", dataset, **exact, **{"data.device_prefetch": 3})
        assert plain.parameters_sha256 == ahead.parameters_sha256
        events = [int(line.split()[1]) for line in Feed.log]
        assert events == sorted({*events}), "each was waited for once, in order"
        assert len(events) == 6
        Feed.log.clear()


def test_activations_are_computed_again_with_the_same_dropout(tmp_path: Path, texts: str) -> None:
    more = {"model.dropout": 0.2, "parallel.exact": "int64"}
    kept = run(tmp_path / "kept", texts, **more)
    again = run(tmp_path / "again", texts, **more, **{"parallel.activation_checkpointing": True})
    assert kept.parameters_sha256 == again.parameters_sha256


HEADERS = Path(sysconfig.get_path("include"), "Python.h")


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler"
)
@pytest.mark.skipif(not HEADERS.exists(), reason="torch.compile builds an extension and needs Python.h")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns as it works, and hides that by other means
def test_compiled_blocks_train_alike(tmp_path: Path, texts: str) -> None:
    from torch._dynamo.utils import counters

    plain = run(tmp_path / "plain", texts)
    counters.clear()
    compiled = run(tmp_path / "compiled", texts, **{"parallel.compile": True})
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    assert compiled.loss == pytest.approx(plain.loss, abs=1e-4)


def test_the_classifier_trains_under_ddp_without_a_warning(tmp_path: Path, digits: dict[str, str]) -> None:
    """Warnings are errors here; torch warns where a gradient has to be copied into its bucket."""
    more = {"model.kind": "classifier", "model.width": 8, "model.stages": 2}
    for strategy in ("ddp", "zero1"):
        assert run(tmp_path / strategy, digits["train"], **more, **{"parallel.strategy": strategy}).finished


def test_batch_norm_is_had_or_refused(tmp_path: Path, digits: dict[str, str]) -> None:
    more = {"model.kind": "classifier", "model.width": 8, "model.stages": 1, "model.norm": "batch"}
    assert run(tmp_path / "alone", digits["train"], **more).finished
    with pytest.raises(ConfigurationError, match=r"the model has BatchNorm: exact mode.*use GroupNorm"):
        run(tmp_path / "exact", digits["train"], **more, **{"parallel.exact": "int64"})


def test_the_batch_grows_by_stages_and_a_resume_goes_on(tmp_path: Path, texts: str) -> None:
    stages = '[{from_step = 3, global_batch = 48}, {from_step = 11, weights = {"a" = 3, "b" = 1}}]'
    more = {
        "data.stages": stages,
        "checkpoint.every": 2,
        "parallel.exact": "int64",
        "checkpoint.keep": 0,
        "run.steps": 14,
    }
    whole = run(tmp_path / "whole", texts, **more)
    lines = read_documents(tmp_path / "whole" / "metrics" / "train.jsonl")
    assert [line["samples"] for line in lines] == [24] * 3 + [48] * 11
    audit = audit_run(tmp_path / "whole")
    assert audit.exit_code == 0, audit.findings

    for kept in (2, 6, 12):  # one checkpoint in each stage
        part = tmp_path / f"part{kept}"
        shutil.copytree(tmp_path / "whole", part)
        for name in checkpoint_names(part):
            if name != f"step-{kept:012d}":
                (part / "checkpoints" / f"{name}.json").unlink()
        shutil.rmtree(part / "ledger", ignore_errors=True)
        again = run(part, texts, **more)
        assert again.step == 14
        assert again.parameters_sha256 == whole.parameters_sha256
    with pytest.raises(ConfigurationError, match=r"from_step is \[5, 3\]"):
        run(
            tmp_path / "x",
            texts,
            **{"data.stages": "[{from_step=5, global_batch=8}, {from_step=3, global_batch=8}]"},
        )


def test_a_run_of_several_datasets_resumes_at_their_versions(tmp_path: Path) -> None:
    def write(root: Path, first: int, append: bool) -> None:
        with shardkit.create(
            str(root), schema={"text": "str"}, shard_size="16KiB", block_size="1KiB", append=append
        ) as writer:
            for number in range(first, first + 240):
                writer.add({"text": f"{number} green bottles hanging on the wall"})

    for name in ("one", "two"):
        write(tmp_path / name, 0, append=False)
    parts = f"{{one = '{tmp_path / 'one'}', two = '{tmp_path / 'two'}'}}"
    more = {"data.parts": parts, "checkpoint.every": 2, "schedule.kind": "constant"}
    arguments = [one for one in settings(tmp_path / "run", "", **more) if not one.startswith("data.dataset")]
    first = train(load_configuration(None, [*arguments, "run.steps=2"]))
    assert first.step == 2
    write(tmp_path / "one", 240, append=True)
    again = train(load_configuration(None, [*arguments, "run.steps=4"]))
    assert again.step == 4
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["manifest"] != shardkit.open({n: str(tmp_path / n) for n in ("one", "two")}).manifest.id
    assert set(record["parts"]) == {"one", "two"}
    assert "@sha256:" in record["parts"]["one"]
    assert audit_run(tmp_path / "run").exit_code == 0


def test_checkpoints_are_copied_and_read_from_a_replica(tmp_path: Path, texts: str) -> None:
    replica = tmp_path / "replica"
    more: dict[str, Any] = {
        "checkpoint.replicas": [str(replica)],
        "checkpoint.every": 2,
        "checkpoint.keep": 2,
    }
    more["schedule.kind"] = "constant"  # more steps later would change the others' rates
    run(tmp_path / "run", texts, **more, **{"run.steps": 6})
    assert (
        checkpoint_names(replica)
        == checkpoint_names(tmp_path / "run")
        == ["step-000000000004", "step-000000000006"]
    )
    stored = {p.name for p in (replica / "objects").rglob("*") if p.is_file()}
    assert stored == {p.name for p in (tmp_path / "run" / "objects").rglob("*") if p.is_file()}
    for damaged in (tmp_path / "run" / "objects").rglob("*.tensor"):
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    again = run(tmp_path / "run", texts, **more, **{"run.steps": 8})
    assert again.step == 8
    events = [
        e for e in read_documents(tmp_path / "run" / "events.jsonl") if e["event"].startswith("checkpoint-")
    ]
    assert [(e["event"], e["name"]) for e in events] == [
        ("checkpoint-damaged", "step-000000000006"), ("checkpoint-replica", "step-000000000006"),
    ]  # fmt: skip
    # what is damaged is not copied, and a replica that cannot be written does not end the run
    (tmp_path / "file").write_text("no folder")
    more["checkpoint.replicas"] = [str(tmp_path / "file")]
    assert run(tmp_path / "run2", texts, **more, **{"run.steps": 2}).finished
    assert "replica-failed" in {e["event"] for e in read_documents(tmp_path / "run2" / "events.jsonl")}


def test_cost_adds_up_over_restarts(tmp_path: Path, texts: str) -> None:
    more = {
        "log.price_per_hour": 36.0,
        "log.watts": 250.0,
        "checkpoint.every": 2,
        "schedule.kind": "constant",
    }
    for steps in (4, 6):
        run(tmp_path / "run", texts, **more, **{"run.steps": steps})
    lines = read_documents(tmp_path / "run" / "metrics" / "train.jsonl")
    cost = [e for e in read_documents(tmp_path / "run" / "events.jsonl") if e["event"] == "end"][-1]["cost"]
    assert cost["samples"] == 6 * 24
    assert cost["rank_seconds"] >= sum(line["step_s"] for line in lines)
    assert cost["dollars"] == pytest.approx(0.01 * cost["rank_seconds"], rel=1e-5)
    assert cost["joules"] == pytest.approx(250.0 * cost["rank_seconds"], rel=1e-5)
    assert sum(line["joules"] for line in lines) == pytest.approx(cost["joules"], rel=1e-4)
    assert cost["bytes_moved"] == lines[-1]["total"]["bytes_moved"] > 0
    assert lines[-1]["total"]["rank_seconds"] > lines[3]["total"]["rank_seconds"]


def test_the_loss_of_every_sample_is_kept(tmp_path: Path, texts: str) -> None:
    """With them the run is the same, and their mean is the loss of the step; a source is looked at by its samples."""
    exact = {"parallel.exact": "int64"}
    plain = run(tmp_path / "plain", texts, **exact)
    kept = run(tmp_path / "kept", texts, **exact, **{"log.sample_losses": True})
    assert kept.parameters_sha256 == plain.parameters_sha256
    metrics = read_documents(tmp_path / "kept" / "metrics" / "train.jsonl")
    losses = Losses(merge_journals(tmp_path / "kept")[0])
    assert losses.steps.tolist() == list(range(6))
    assert losses.means.tolist() == pytest.approx([one["loss"] for one in metrics], rel=1e-4)
    places, values = losses.of_step(4)
    assert places.tolist() == list(range(24))
    assert len(set(values.tolist())) > 12
    assert audit_run(tmp_path / "kept").exit_code == 0
    with pytest.raises(NotFoundError, match="has no losses"):
        Losses(merge_journals(tmp_path / "plain")[0])


def test_profile_and_share_of_the_peak(tmp_path: Path, texts: str) -> None:
    run(tmp_path / "run", texts, **{"log.profile_steps": 2, "log.profile_from": 1, "log.peak_flops": 0.0})
    trace = json.loads((tmp_path / "run" / "metrics" / "trace.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in trace["traceEvents"])
    lines = read_documents(tmp_path / "run" / "metrics" / "train.jsonl")
    assert all(0 < line["flops_share"] < 1 for line in lines)
    assert np.isfinite(lines[-1]["flops_per_s"])


def test_tensorboard_has_the_scalars(tmp_path: Path, texts: str) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run(tmp_path / "run", texts, **{"log.tensorboard": True})
    found = accumulator.EventAccumulator(str(tmp_path / "run" / "metrics" / "tensorboard"))
    found.Reload()
    assert {"loss", "gradient_norm", "learning_rate", "step_s", "data_s", "flops_share"} <= set(
        found.Tags()["scalars"]
    )
    assert [event.step for event in found.Scalars("loss")] == list(range(6))
