"""`shardkit simulate` and `shardkit tune` as a person runs them; and the simulation beside the real loader."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.dataset.dataset import Dataset
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.repository import Repository
from shardkit.repository.versions import load_manifest
from shardkit.stores.local import LocalStore
from shardkit_tools.simulation.cluster import Cluster, with_changes
from shardkit_tools.simulation.run import prepare, simulate_lanes
from tests.command_line import typed

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
LITTLE = ["--rows", "100000", "--bytes", "10GB", "--strata", "4"]


def run(*arguments: str, code: int = 0) -> str:
    got, out, err = typed(*arguments)
    assert got == code, err
    return out if not code else err


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sizing") / "data"
    with shardkit.create(
        path, {"x": "int32[1024]"}, format="arrow", shard_size="2MiB", block_size="32KiB"
    ) as writer:
        for number in range(2_048):
            writer.add({"x": [number] * 1024})
    return path


def test_simulate_says_what_it_costs_and_what_a_change_would_do() -> None:
    said = run("simulate", str(EXAMPLES / "lab-8.toml"), *LITTLE, "--what-if", "copies=2", "cache=500GB")
    assert "if copies=2 cache=500GB" in said
    for word in (
        "full shuffle + LRU",
        "egress",
        "requests",
        "time to recover",
        "joules per epoch",
        "stall per epoch",
    ):
        assert word in said
    found = json.loads(run("simulate", str(EXAMPLES / "lab-8.toml"), *LITTLE, "--json"))
    ours, usual = (found["scenarios"][0][way]["epochs"] for way in ("lanes", "shuffle"))
    assert ours[0]["egress_bytes"] == pytest.approx(10e9, rel=0.1)
    assert ours[-1]["egress_bytes"] < 0.02 * usual[-1]["egress_bytes"], "what a node holds it needs again"


def test_simulate_sweeps_and_draws(tmp_path: Path, root: Path) -> None:
    picture = tmp_path / "p.png"
    said = run("simulate", str(EXAMPLES / "one-machine.toml"), "--root", str(root), "--sweep", "ranks=1,2,4",
               "--plot", str(picture))  # fmt: skip
    assert picture.stat().st_size > 10_000
    assert said.count("full shuffle + LRU, last epoch") == 1
    assert "2,048" in said


def test_simulate_explains_mistakes() -> None:
    assert "does not exist" in run("simulate", "no-such.toml", code=1)
    assert "did you mean cache" in run(
        "simulate", str(EXAMPLES / "lab-8.toml"), "--what-if", "cachesize=1GB", code=2
    )
    assert "--sweep" in run("simulate", str(EXAMPLES / "lab-8.toml"), "--sweep", "nodes", code=2)
    assert "follow --what-if" in run("simulate", str(EXAMPLES / "lab-8.toml"), "nodes=2", code=2)


def test_tune_proposes_and_applies(tmp_path: Path, root: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text("[data]\ndataset = 'x'  # mine\n")
    found = json.loads(run("tune", str(root), "--disk", str(tmp_path), "--quick", "--no-reduce", "--json",
                           "--apply", str(config)))  # fmt: skip
    assert {"block_size", "shard_size", "window_blocks", "memory"} <= set(found["proposals"])
    assert all(one["why"] for one in found["proposals"].values())
    assert found["ranges"]["is_local"]
    assert "# mine" in config.read_text()
    assert f"window_blocks = {found['proposals']['window_blocks']['value']}" in config.read_text()
    assert "cannot be measured" in run("tune", "--disk", str(tmp_path / "none"), "--no-reduce", code=1)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".shardkit-tune")]


class Remote:
    """A local root that looks as if it were far."""

    def __init__(self, root: Path) -> None:
        self._store = LocalStore(root)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def local_path(self, name: str) -> None:
        return None


@pytest.mark.parametrize("cache", ["0", "2MiB", "100MiB"])
def test_egress_is_what_the_loader_reads(tmp_path: Path, root: Path, cache: str) -> None:
    """Two ranks of a node over two epochs: no clock is involved, bytes agree."""
    limited = {} if cache == "0" else {"cache": tmp_path / "cache", "cache_size": cache}
    read = 0
    with contextlib.ExitStack() as closing:
        loaders, before = [], []
        for rank in range(2):
            far: Any = Remote(root)
            store = LocatedStore([Location(name="root", store=far)], settings=ReadSettings(hedge=False))
            repository = Repository._open_store(store, read_only=True)
            dataset = Dataset(load_manifest(repository, repository.resolve(None)))
            for shard in range(dataset.manifest.shards):
                dataset.reader.index(shard)
            before.append(store.read_events.stats()["bytes_from_root"])
            plan = dataset.plan(32, lanes=8, window_blocks=4)
            loaders.append(dataset.loader(plan, rank=rank, world=2, tensors=False, memory="1MiB", prefetch=0, threads=4,
                                          **limited))  # type: ignore[arg-type]  # fmt: skip
            closing.callback(loaders[-1].close)
        for _ in range(2):
            for _both in zip(*loaders, strict=True):
                pass
        read = sum(int(loader.stats()["bytes_from_root"]) for loader in loaders) - sum(before)
    cluster = with_changes(Cluster(), [f"data.root={root}", "ranks=2", f"cache={cache}", "memory=1MiB",
                                       "global_batch=32", "lanes=8", "window_blocks=4", "model=none",
                                       "threads=4"])  # fmt: skip
    said = sum(one["egress_bytes"] for one in simulate_lanes(cluster, prepare(cluster))["epochs"])
    assert said == pytest.approx(read, rel=0.15)
