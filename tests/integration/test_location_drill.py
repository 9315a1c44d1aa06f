"""Training from two S3 locations of which the nearer one rots and dies: the same batches, and the dataset heals."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardkit
from shardkit.reading.attestations import read_attestations
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.local import open_store
from tests.command_line import document_of, output_of
from tests.drills import DRILLS
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import ACCESS_KEY, SECRET_KEY, localstack, s3_client

NEAR, FAR = "near", "far"
ROWS = 9_600 if DRILLS else 1_800
# an attempt that is long for a healthy server on a busy machine, and short for one that stalls
SETTINGS = ReadSettings(deadline_s=60, attempt_s=4.0, cool_down_s=0.01)
STALL_S = 20.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with localstack(tmp_path_factory.mktemp("localstack"), NEAR, FAR) as endpoint:
        yield endpoint


def make(prefix: str, rows: int, *policy: str) -> str:
    root = f"s3://{NEAR}/{prefix}"
    with shardkit.create(
        root, {"x": "float32[128]", "y": "float32"}, shard_size=64_000, block_size=8_192
    ) as writer:
        rng = np.random.default_rng(1)
        for _ in range(rows):
            x = rng.normal(size=128).astype(np.float32)
            writer.add({"x": x, "y": float(x[:5].sum())})
    if policy:
        output_of("place", root, *policy)
    return root


class Training:
    """A linear model by plain gradient descent: its weights depend on every batch and on their order."""

    def __init__(self, root: str, run_folder: Path | None) -> None:
        self.weights = np.zeros(128)
        self.batches: list[tuple[list[int], bytes]] = []
        self.waits_s: list[float] = []
        self.stats: dict[str, float] = {}
        dataset = shardkit.open(root, settings=SETTINGS)
        plan = dataset.plan(global_batch=16, seed=1, lanes=4, window_blocks=2)
        self.loader: Any = dataset.loader(
            plan, rank=0, world=1, tensors=False, memory="1MiB", prefetch=0, run=run_folder
        )

    def run(self, pace: Callable[[], None] = lambda: None) -> None:
        """To the end; ``pace`` is called after each step."""
        with contextlib.closing(self.loader):
            began = time.monotonic()
            for batch in self.loader:
                self.waits_s.append(time.monotonic() - began)
                x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
                self.weights -= 0.01 * x.T @ (x @ self.weights - y) / len(y)
                self.batches.append((batch["samples"].tolist(), batch["x"].tobytes()))
                pace()
                began = time.monotonic()
            self.stats = self.loader.stats()


def rot(root: str, endpoint: str, count: int) -> tuple[set[str], str]:
    """Flip a bit in some shards at rest and remove one: names of the flipped, and of the removed."""
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    store = open_store(root)
    shards = [name for name in store.list_after("objects/") if name.endswith(".tar")]
    flipped = set(shards[1 :: max(1, len(shards) // count)][:count])
    with s3_client(endpoint) as client:
        for name in flipped:
            data = bytearray(store.get(name, max_bytes=10**7))
            data[len(data) // 2] ^= 1
            client.put_object(
                Bucket=bucket, Key=f"{prefix}/{name}", Body=bytes(data), ChecksumAlgorithm="SHA256"
            )
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{shards[0]}")
    return flipped, shards[0]


@pytest.mark.drill(only=True)
def test_the_nearer_location_rots_stalls_refuses_and_vanishes(
    server: str, proxy: FaultProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = uuid.uuid4().hex
    root = make(prefix, ROWS, "--location", f"mirror=s3://{FAR}/{prefix},domain=far", "--copies", "2")
    truth = Training(root, None)
    truth.run()
    flipped, removed = rot(root, server, 24)  # how many are read before it vanishes depends on how fast it is
    training = Training(root, tmp_path / "run")
    asked: Counter[str] = Counter()
    healthy = int(0.3 * truth.stats["remote_requests"])
    phases = [(healthy, None), (healthy + 8, "flip"), (healthy + 11, "stall"), (healthy + 14, "status")]

    def ill(request: Request) -> Fault | None:
        if not request.path.startswith(f"/{NEAR}/"):
            return None
        asked["near"] += 1
        kind: Any = next((kind for until, kind in phases if asked["near"] <= until), "reset")
        asked[str(kind)] += 1
        return None if kind is None else Fault(kind, seconds=STALL_S)

    def wait_for_trials() -> None:
        """A location that failed is asked again after a rest: the run goes on until it has failed in each way."""
        if asked["near"] > healthy and not asked["reset"]:
            time.sleep(0.1)

    proxy.faults = ill
    training.run(wait_for_trials)
    proxy.faults = lambda _request: None
    assert training.batches == truth.batches, "every batch, byte by byte"
    assert training.weights.tobytes() == truth.weights.tobytes()
    assert {"flip", "stall", "status", "reset"} <= asked.keys(), asked
    assert max(training.waits_s) < SETTINGS.deadline_s / 2, "stalls are bounded"
    assert training.stats["remote_mismatches"] > 0
    assert training.stats["bytes_from_mirror"] > 0

    looks = read_attestations([open_store(str(tmp_path / "run"))])["root"]
    attested = {name for name, look in looks.items() if look.is_bad}
    met = attested & {*flipped, removed}
    assert met, "some of what is bad at rest was read before the location vanished"
    done = document_of("repair", root, "--from-run", tmp_path / "run")
    assert {one["name"] for one in done["healed"]} == met, (
        "what is bad at rest is healed, what only came badly is left"
    )
    assert {one["source"] for one in done["healed"]} == {"mirror"}
    scrubbed = document_of("scrub", root, "--repair")
    assert scrubbed["locations"]["root"]["read_bytes"] == 0, "S3 is audited by its own checksums"
    assert set(scrubbed["locations"]["root"]["bad"]) == {*flipped, removed} - met
    output_of("verify", root, "--level", "read")
    output_of("repair", root)
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            text = file.read_bytes()
            assert SECRET_KEY.encode() not in text
            assert ACCESS_KEY.encode() not in text
    for location in (root, f"s3://{FAR}/{prefix}"):
        store = open_store(location)
        for name in store.list_after("attest/"):
            data = store.get(name, max_bytes=2**20)
            assert SECRET_KEY.encode() not in data
            assert ACCESS_KEY.encode() not in data
    waits = sorted(training.waits_s)
    with capsys.disabled():
        print(json.dumps({
            "steps": len(waits), "wait_median_ms": round(1e3 * waits[len(waits) // 2]),
            "wait_worst_ms": round(1e3 * waits[-1]), "near": dict(asked), "healed_from_run": len(met),
            "bad_at_rest": len(flipped) + 1, "attested": len(attested),
            **{name: int(training.stats[f"remote_{name}"]) for name in
               ("mismatches", "refetches", "failovers", "timeouts", "throttled", "missing", "hedges",
                "circuit_opened")},
        }))  # fmt: skip
