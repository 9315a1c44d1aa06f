"""Figures of loaders and audits in Weights & Biases, MLflow and OpenTelemetry, without a network."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.audit import audit_run
from shardkit.errors import MissingDependency, UsageError
from shardkit.extras import install_command
from shardkit.integrations.opentelemetry import observe
from shardkit.integrations.trackers import Figures, mlflow_figures, wandb_figures
from tests.flips import flip

STEPS, BATCH = 10, 8


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[shardkit.Loader]:
    root = str(tmp_path / "data")
    with shardkit.create(root, schema={"x": "float32[4]"}) as writer:
        for number in range(STEPS * BATCH):
            writer.add({"x": [number] * 4})
    ds = shardkit.open(root)
    with ds.loader(ds.plan(global_batch=BATCH, seed=0), run=tmp_path / "run", tensors=False) as made:
        yield made


def _train(loader: shardkit.Loader, figures: Any) -> None:
    for _ in loader:
        figures()


def _records(path: Path) -> Iterator[bytes]:
    """The messages of an offline run: records of LevelDB's log format in blocks of 32 KiB, after seven bytes."""
    content, place, message = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:  # too little is left of this block for another header
            place += -place % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        message += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def _rows(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the summary in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    def named(items: Any) -> dict[str, Any]:
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    for message in _records(path):
        record = Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            rows.append(named(record.history.item))
        summary |= named(record.summary.update)
    return rows, summary


def test_weights_and_biases(loader: shardkit.Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(UsageError, match=r"call wandb.init\(\) first"):
        wandb_figures(loader)
    with wandb.init(dir=str(tmp_path), project="test") as run:
        figures = wandb_figures(loader, every=5)
        for batch in loader:
            figures()
            run.log({"loss": 1.0}, step=batch.step)
        loader.close()
        figures.audit(audit_run(tmp_path / "run"))
    wandb.teardown()  # its service has written the file then
    rows, summary = _rows(tmp_path)
    assert [row["_step"] for row in rows] == list(range(STEPS)), "the steps of the loop's own rows"
    rows = [row for row in rows if "shardkit/step" in row]
    assert [(row["shardkit/step"], row["shardkit/loader_samples"]) for row in rows] == [(5, 40), (10, 80)]
    assert 0 < rows[-1]["shardkit/wait_share"] < 1 < rows[-1]["shardkit/samples_per_second"]
    assert summary["shardkit/audit/exit_code"] == 0
    assert summary["shardkit/audit/samples"] == STEPS * BATCH
    assert summary["shardkit/audit/verdict"].startswith("clean")


def test_mlflow(loader: shardkit.Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more packages
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with mlflow.start_run() as run:
        figures = mlflow_figures(loader, every=5)
        _train(loader, figures)
        loader.close()
        figures.audit(audit_run(tmp_path / "run"))
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "shardkit/loader_samples")
    assert [(point.step, point.value) for point in history] == [(5, 40), (10, 80)]
    saved = client.get_run(run.info.run_id).data
    assert saved.metrics["shardkit/audit/violated"] == 0
    assert saved.tags["shardkit/audit/manifest"].startswith("sha256:")


def test_an_audit_that_found_something(loader: shardkit.Loader, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    figures = Figures(loader, 1, found.append, lambda numbers, texts: found.append({**numbers, **texts}))
    _train(loader, figures)
    assert len(found) == STEPS
    loader.close()
    (journal,) = (tmp_path / "run" / "journal").glob("*")
    flip(journal)
    figures.audit(audit_run(tmp_path / "run"))
    assert found[-1]["shardkit/audit/exit_code"] == 4
    assert found[-1]["shardkit/audit/violated"] >= 1


def test_opentelemetry(loader: shardkit.Loader, tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    live, files = export.InMemoryMetricReader(), export.InMemoryMetricReader()
    observe(loader, provider=sdk.MeterProvider([live]))
    for step, _ in enumerate(loader, 1):
        if step in (3, 7):
            found = _points(live)
            assert found["shardkit_step", ""] == step
            assert found["shardkit_loader_samples", ""] == step * BATCH
    loader.close()
    observe(tmp_path / "run", provider=sdk.MeterProvider([files]))
    found = _points(files)
    assert found["shardkit_loader_steps", ""] == STEPS
    assert ("shardkit_loader_stage_seconds", "gather") in found


def _points(reader: Any) -> dict[tuple[str, str], float]:
    """Newest values by the name and the label of a metric; all are of rank 0."""
    found = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            attributes = dict(point.attributes)
            assert (attributes.pop("rank"), attributes.pop("worker")) == (0, 0)
            found[metric.name, next(iter(attributes.values()), "")] = point.value
    return found


@pytest.mark.parametrize(
    ("package", "function", "extra"),
    [("wandb", wandb_figures, "wandb"), ("mlflow", mlflow_figures, "mlflow"),
     ("opentelemetry", observe, "opentelemetry")],
)  # fmt: skip
def test_what_to_install(
    package: str, function: Any, extra: str, loader: shardkit.Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=f"run: {re.escape(install_command(extra))}"):
        function(loader)
