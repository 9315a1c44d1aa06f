"""The lag that a run shows is what its dataset's copies are below the policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import shardkit
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.replicate import ReplicationLag
from shardkit.repository.locations import LocationRecord
from shardkit.repository.repository import Repository
from shardkit.telemetry import Record, RunTelemetry, summarise
from tests.unit.telemetry_series import made_series


def test_the_lag_is_what_copies_lack(tmp_path: Path) -> None:
    root = str(tmp_path / "data")
    with shardkit.create(
        root, {"x": "int64[64]"}, format="tar", shard_size="64KiB", block_size="8KiB"
    ) as writer:
        for number in range(400):
            writer.add({"x": [number] * 64})
    dataset = shardkit.open(root)
    lag = ReplicationLag(dataset.reader.urls, [dataset.manifest.id])
    lag.look()
    assert lag.numbers() == {}, "there is no policy"
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    copies = LocationRecord.parse(f"mirror={mirror},domain=rack-2")
    place(
        Repository.open(root),
        PlacementChange(locations=(copies,), policy=lambda policy: dataclasses.replace(policy, copies=2)),
    )
    lag.look()
    assert lag.numbers() == {"policies": 1.0, "lag_bytes": 0.0}
    shards = sorted(mirror.rglob("*.tar"))
    lost = shards[0].stat().st_size + shards[1].stat().st_size
    for path in shards[:2]:
        path.unlink()
    lag.look()
    assert lag.numbers() == {"policies": 1.0, "lag_bytes": float(lost)}
    values = {f"replication.{name}": value for name, value in lag.numbers().items()}
    series = [*made_series(per_interval={"loader.steps": 1}), Record(time=2_000.0, rank=0, values=values)]
    view = summarise(RunTelemetry({(0, 0): series}), [], 2_000.0)
    assert view["replication_lag_bytes"] == lost
