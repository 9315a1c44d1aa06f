"""Training from a bucket through the cache: the same batches, few bytes over the network, no credential anywhere."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import pickle
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import ShardkitError, StoreError
from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.local import open_store
from shardkit.stores.remote.object_store import ObjectStore
from shardkit.stores.waiting import RetryPolicy
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import ACCESS_KEY, SECRET_KEY, s3_environment
from tests.servers.serving import Requests, serving

BUCKET = "shards"
BUCKETS = (BUCKET,)
ROWS = 1_200
# A hedge would fetch some bytes twice, when the machine is busy.
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2, hedge=False)


def _write(rows: int, items: int, block_size: str) -> str:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with shardkit.create(url, {"x": f"int64[{items}]"}, shard_size="1MiB", block_size=block_size) as writer:
        for number in range(rows):
            writer.add({"x": [number] * items})
    return url


@pytest.fixture(scope="module")
def root(server: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment(server).items():
            patch.setenv(name, value)
        yield _write(ROWS, 1024, "64KiB")


def epoch(loader: Any) -> list[tuple[list[int], bytes]]:
    return [(batch["samples"].tolist(), batch["x"][:, 0].tobytes()) for batch in loader]


def open_loader(root: str, cache: Path | None, *, rank: int = 0, world: int = 1, **settings: Any) -> Any:
    dataset = shardkit.open(root, settings=SETTINGS)
    plan = dataset.plan(global_batch=16, seed=1, lanes=4, window_blocks=4)
    # So little memory that nothing stays in it from one epoch to the next.
    return dataset.loader(
        plan, rank=rank, world=world, tensors=False, memory="2MiB", prefetch=0, cache=cache, **settings
    )


# the memory is too little on purpose: what a loop needs again comes from the cache, or over the network
pytestmark = [pytest.mark.filterwarnings("ignore:shardkit. memory=.* is too little:RuntimeWarning")]


def test_streamed_and_cached_give_the_same_batches(proxy: FaultProxy, root: str, tmp_path: Path) -> None:
    with contextlib.closing(open_loader(root, None)) as loader:
        streamed = [epoch(loader), epoch(loader)]
    stored = shardkit.open(root).manifest.stored_bytes
    before = proxy.body_bytes
    with contextlib.closing(open_loader(root, tmp_path / "cache", cache_size="1GiB")) as loader:
        cached = [epoch(loader) for _ in range(3)]
        stats = loader.stats()
    assert cached[:2] == streamed
    assert stats["cache_failed"] == stats["remote_mismatches"] == 0
    egress = proxy.body_bytes - before
    assert egress <= 1.05 * stored, "what fits in the cache is fetched once, over three epochs"
    with contextlib.closing(open_loader(root, tmp_path / "cache", cache_size="1GiB")) as loader:
        before = proxy.body_bytes
        assert epoch(loader) == streamed[0]
        assert loader.stats()["bytes_from_root"] < 0.05 * stored, "and a new run finds it there"


def test_ranks_share_one_cache(proxy: FaultProxy, tmp_path: Path) -> None:
    """The cluster's egress over the size of the dataset, when a node's share fits.

    Rows of 32 KiB: of small ones the indexes, which every rank reads, are several hundredths of a small dataset. One
    rank after the other: two that need a block in the same moment may both fetch it. The last one reads what both read.
    """
    root = _write(600, 4096, "128KiB")
    before = proxy.body_bytes
    for rank, world in ((0, 2), (1, 2), (0, 1)):
        loader = open_loader(root, tmp_path / "cache", rank=rank, world=world, cache_size="1GiB")
        with contextlib.closing(loader):
            assert len(epoch(loader)) == len(epoch(loader)) == len(loader)
    stored = shardkit.open(root).manifest.stored_bytes
    assert (proxy.body_bytes - before) / stored <= 1.05


def best_possible(trace: list[int], capacity: int) -> int:
    """Hits of the optimal policy with bypass (Belady): equal sizes, the whole future known."""
    upcoming: dict[int, list[int]] = {}
    for i in reversed(range(len(trace))):
        upcoming.setdefault(trace[i], []).append(i)
    held: set[int] = set()
    hits = 0
    for block in trace:
        upcoming[block].pop()
        hits += block in held
        held.add(block)
        if len(held) > capacity:
            held.remove(max(held, key=lambda one: upcoming[one][-1] if upcoming[one] else len(trace)))
    return hits


def least_recent(trace: list[int], capacity: int) -> int:
    """Hits of an LRU cache."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for block in trace:
        hits += block in held
        held[block] = None
        held.move_to_end(block)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def test_a_small_cache_keeps_what_is_needed_next(
    proxy: FaultProxy,
    root: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """30 % of the epoch's bytes, three epochs, two ranks: Belady beside LRU and the optimum."""
    asked: list[int] = []
    fetch = BlockCache.fetch

    def noted(self: BlockCache, request: Any, get: Any) -> Any:
        asked.append(request.place)
        return fetch(self, request, get)

    monkeypatch.setattr(BlockCache, "fetch", noted)
    total = shardkit.open(root).manifest.stored_bytes
    size = int(0.3 * total)
    loaders = [
        open_loader(root, tmp_path / "cache", rank=rank, world=2, cache_size=size) for rank in range(2)
    ]
    with contextlib.ExitStack() as closing:
        for loader in loaders:
            closing.callback(loader.close)
        for _ in range(3):
            for batches in zip(*loaders, strict=True):
                assert len(batches) == 2
            time.sleep(0.3)  # what was read ahead lands before the next epoch begins
        hits = int(sum(loader.stats()["cache_hits"] for loader in loaders))
    blocks = len(set(asked))
    capacity = int(size / (total / blocks))
    lru, best = least_recent(asked, capacity), best_possible(asked, capacity)
    reads = len(asked)
    with capsys.disabled():
        print(json.dumps({"reads": reads, "blocks": blocks, "belady": round(hits / reads, 3),
                          "lru": round(lru / reads, 3), "optimum": round(best / reads, 3)}))  # fmt: skip
    used = sum(file.stat().st_size for file in (tmp_path / "cache" / "blocks").rglob("*") if file.is_file())
    assert used <= size
    assert hits > 1.5 * lru
    assert hits >= 0.6 * best


class Issuer:
    """Hands out credentials that expire at once, as a container's metadata endpoint does; only the last ones work."""

    url = ""

    def __init__(self) -> None:
        self.issued = 0

    def credentials(self) -> bytes:
        self.issued += 1
        expires = dt.datetime.now(dt.UTC) + dt.timedelta(minutes=20)
        return json.dumps({
            "AccessKeyId": f"{ACCESS_KEY}{self.issued}", "SecretAccessKey": SECRET_KEY,
            "Token": f"canarytoken{self.issued}", "Expiration": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }).encode()  # fmt: skip


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    made = Issuer()

    class Handler(Requests):
        def respond(self) -> None:
            body = made.credentials()
            self.reply(200, {"Content-Length": str(len(body))}, body)

    with serving(Handler) as made.url:
        yield made


def test_a_client_that_repeats_nothing_asks_again_with_a_new_token(
    proxy: FaultProxy, root: str, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/credentials")
    opened = open_store(root)
    assert isinstance(opened, ObjectStore)
    store = opened.with_retry(RetryPolicy(deadline_s=0))
    whole = store.get("shardkit.json", max_bytes=1 << 20)
    good_from = [issuer.issued + 1]

    def only_newer(request: Request) -> Fault | None:
        key = request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        is_old = int(key.removeprefix(ACCESS_KEY) or 0) < good_from[0]
        return Fault("status", status=400, code="ExpiredToken") if is_old else None

    proxy.faults = only_newer
    assert store.get("shardkit.json", max_bytes=1 << 20) == whole
    good_from[0] = 1 << 30  # none is ever good again: it ends, and says so
    with pytest.raises(StoreError, match="could not be renewed"):
        store.get("shardkit.json", max_bytes=1 << 20)


@pytest.mark.parametrize("checksums", [False, True], ids=["obstore", "boto3"])
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "http://127.0.0.1:9/credentials",
            "issues credentials gave none",
        ),
        ("AWS_PROFILE", "nobody", "no such AWS profile"),
        ("AWS_CONFIG_FILE", __file__, "configuration file is unusable"),
    ],
)
def test_credentials_that_cannot_be_found_are_told(
    root: str, monkeypatch: pytest.MonkeyPatch, checksums: bool, variable: str, value: str, told: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    opened = open_store(root)
    assert isinstance(opened, ObjectStore)
    store = opened.with_retry(RetryPolicy(deadline_s=0))
    with pytest.raises(StoreError, match=told):
        store.head("shardkit.json") if checksums else store.get("shardkit.json", max_bytes=1 << 20)


def test_a_token_that_expires_in_mid_epoch(
    proxy: FaultProxy, root: str, tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The epoch completes, and the canary is in no log, error, attestation, event or pickle."""
    with contextlib.closing(open_loader(root, None)) as loader:
        truth = epoch(loader)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{issuer.url}/credentials")
    good_from = [1]

    def only_the_newest(request: Request) -> Fault | None:
        key = request.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        number = int(key.removeprefix(ACCESS_KEY) or 0)
        if number < good_from[0]:
            return Fault("status", status=400, code="ExpiredToken")
        return Fault("reset") if request.number % 17 == 4 else None

    proxy.faults = only_the_newest
    loader = open_loader(root, tmp_path / "cache", cache_size="1GiB", run=tmp_path / "run")
    seen = []
    with contextlib.closing(loader):
        for batch in loader:
            seen.append((batch["samples"].tolist(), batch["x"][:, 0].tobytes()))
            if batch.step == len(truth) // 3:
                good_from[0] = issuer.issued + 1
        told = [repr(loader.stats())]
        told.append(repr(pickle.dumps(loader._setup.sources.reader)))
    assert seen == truth
    assert proxy.counts["status"] > 0, "some requests were refused for their token"
    proxy.faults = lambda _request: Fault("status", status=403, code="SignatureDoesNotMatch")
    with pytest.raises(ShardkitError) as caught:
        shardkit.open(root, settings=ReadSettings(deadline_s=0.5, attempt_s=0.2))
    told += [repr(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    told += [file.read_bytes().decode("latin-1") for file in tmp_path.rglob("*") if file.is_file()]
    told += list(capsys.readouterr())
    for canary in (SECRET_KEY, ACCESS_KEY, "canarytoken"):
        assert not any(canary in text for text in told)
