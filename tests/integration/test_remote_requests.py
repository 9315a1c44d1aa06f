"""How many requests and bytes small blocks cost."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.copies.place import PlacementChange, place
from shardkit.copies.verify import verify
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from tests.servers.google import GoogleServer, google_environment, google_server

BUCKET = "shards"
ROWS = 6_000
SETTINGS = ReadSettings(deadline_s=60, attempt_s=20, hedge=False)  # a hedge would be one more request


@pytest.fixture(scope="module")
def served() -> Iterator[GoogleServer]:
    with google_server(BUCKET) as served, pytest.MonkeyPatch.context() as patch:
        for name, value in google_environment(served.endpoint).items():
            patch.setenv(name, value)
        yield served
        assert served.refused == []


def make(root: str) -> None:
    with shardkit.create(
        root, {"x": "int64[128]", "kind": "int64"}, stratify="kind", shard_size="512KiB", block_size="8KiB"
    ) as writer:
        for number in range(ROWS):
            writer.add({"x": [number] * 128, "kind": number % 3})


@pytest.fixture(scope="module")
def root(served: GoogleServer) -> str:
    url = f"gs://{BUCKET}/{uuid.uuid4().hex}"
    make(url)
    return url


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The first epoch as it is read from a disk."""
    root = str(tmp_path_factory.mktemp("local") / "root")
    make(root)
    return epoch(open_loader(root, cache=None, memory="64MiB"))


def open_loader(root: str, *, cache: Path | None, memory: str, **settings: Any) -> Any:
    dataset = shardkit.open(root, settings=SETTINGS)
    plan = dataset.plan(global_batch=16, seed=1, lanes=4)
    return dataset.loader(
        plan, rank=0, world=1, tensors=False, memory=memory, prefetch=0, cache=cache, **settings
    )


def epoch(loader: Any) -> list[Any]:
    with contextlib.closing(loader):
        return [(batch["samples"].tolist(), batch["x"][:, 0].tobytes()) for batch in loader]


def measured(served: GoogleServer, loader: Any, root: str) -> tuple[list[Any], float, float]:
    """An epoch, its range requests per block, and its bytes over those of the shards."""
    manifest = shardkit.open(root).manifest
    requests, num_bytes = served.counts["GET", 206], served.body_bytes
    blocks = int(loader._setup.sources.rows.shard_first_block[-1])
    found = epoch(loader)
    return (
        found,
        (served.counts["GET", 206] - requests) / blocks,
        (served.body_bytes - num_bytes) / manifest.stored_bytes,
    )


def test_a_cache_with_room_holds_each_block_after_one_request(
    served: GoogleServer, root: str, truth: list[Any], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"cache": tmp_path / "cache", "memory": "4MiB", "cache_size": "1GiB"}
    found, requests, egress = measured(served, open_loader(root, **settings), root)
    assert found == truth
    assert requests < 1.5
    assert egress < 1.5
    again, requests, _ = measured(served, open_loader(root, **settings), root)
    assert again == truth
    assert requests < 0.1, "the cache has them"


def test_streamed_with_little_room(served: GoogleServer, root: str, truth: list[Any]) -> None:
    """Blocks are fetched again where neither memory nor a cache holds them, and few of them."""
    found, _, egress = measured(served, open_loader(root, cache=None, memory="2MiB"), root)
    assert found == truth
    assert egress < 1.6


def test_verify_does_not_fetch_what_has_no_stored_checksum(served: GoogleServer, root: str) -> None:
    """Google keeps no SHA-256: level stored leaves it open, and says how to know."""
    before = served.body_bytes
    found = verify(root, level="stored")
    assert found.exit_code == 3
    assert not found.damaged
    assert {(one.got, one.action) for one in found.unknown} == {
        (f"{root} keeps no checksums of its objects", "check with --level read")
    }
    assert found.stored_bytes == 0
    manifest = shardkit.open(root).manifest
    assert served.body_bytes - before < manifest.stored_bytes / 10
    assert verify(root, level="read").exit_code == 0


def test_a_local_root_with_a_copy_is_not_read_ahead(tmp_path: Path) -> None:
    """Its blocks are files: nothing walks through the plan for them beside the loader."""
    root = str(tmp_path / "root")
    make(root)
    record = LocationRecord.parse(f"copy={tmp_path / 'copy'}")
    place(
        Repository.open(root), PlacementChange(locations=(record,), policy=lambda old: old.changed(copies=2))
    )
    with contextlib.closing(open_loader(root, cache=None, memory="64MiB")) as loader:
        next(iter(loader))
        deadline = time.monotonic() + 60
        while any(one.name == "shardkit-ahead" for one in threading.enumerate()):
            assert time.monotonic() < deadline, "it has nothing to do, and goes on"
            time.sleep(0.01)
