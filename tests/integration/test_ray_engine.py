"""A build on Ray: a worker is killed in the middle, and the version is the same as without Ray."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import secrets
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.errors import ConfigurationError, MissingDependency
from shardkit_tools.building.engines import LocalEngine, open_engine
from tests.flips import flip
from tests.servers.serving import free_port

HAS_RAY = importlib.util.find_spec("ray") is not None
PROGRAM = [sys.executable, "-c", "from shardkit_tools.main import run; run()"]
FUNCTIONS = """
import os, signal

def doubled(sample):
    flag = os.environ["KILL_ONCE"]
    if sample["x"] == 3_300 and os.path.exists(flag):
        os.unlink(flag)
        os.kill(os.getpid(), signal.SIGKILL)
    return {**sample, "x": 2 * sample["x"]}
"""


def _source(folder: Path, length: int) -> Path:
    """4,000 rows in four files; with 300 texts a row more than what is worth no second process."""
    folder.mkdir()
    for number in range(4):
        rows = range(number * 1_000, (number + 1) * 1_000)
        lines = [json.dumps({"x": x, "label": x % 3, "text": f"row {x} " * length}) + "\n" for x in rows]
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return folder


@pytest.mark.drill(only=True)
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install ray")
def test_a_worker_of_two_is_killed_in_the_middle(tmp_path: Path) -> None:
    source, flag = _source(tmp_path / "source", 300), tmp_path / "kill"
    (tmp_path / "functions_for_ray.py").write_text(FUNCTIONS)
    environment = {
        **os.environ,
        "KILL_ONCE": str(flag),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    documents = {}
    for engine in ("ray", "local"):
        if engine == "ray":
            flag.touch()
        done = subprocess.run(
            [*PROGRAM, "build", str(source), str(tmp_path / engine), "--engine", engine, "--jobs", "2", "--json",
             "--stratify", "label", "--shard-size", "2MiB", "--apply", "functions_for_ray:doubled"],
            env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        documents[engine] = json.loads(done.stdout)
        assert not flag.exists(), "nobody was killed"
    assert documents["ray"]["id"] == documents["local"]["id"]
    assert documents["ray"]["samples"] == 4_000
    assert len(shardkit.open(tmp_path / "ray")) == 4_000
    files = {
        e: {p.relative_to(tmp_path / e) for p in (tmp_path / e).rglob("objects/**/*")} for e in documents
    }
    assert files["ray"] == files["local"]
    assert list((tmp_path / "ray" / "tmp").iterdir()) == []


def test_without_ray_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it was not installed
    with pytest.raises(MissingDependency, match="--engine ray needs Ray; run: pip install 'ray>="):
        shardkit_tools.build(tmp_path, tmp_path / "root", engine="ray")


def test_an_engine_of_ones_own_takes_the_tasks(tmp_path: Path) -> None:
    """The seam: what Dask or Spark would implement. This one does every task twice, and in the other order."""

    class Twice(LocalEngine):
        def run(self, make, items, report, *, here=False):  # type: ignore[no-untyped-def]
            del here
            worker = make()
            for item in reversed(list(items)):
                worker.work(item, report)
                yield worker.work(item, report)
            worker.close()

    source = _source(tmp_path / "source", 20)
    plain = shardkit_tools.build(source, tmp_path / "plain", shard_size="256KiB")
    own = shardkit_tools.build(source, tmp_path / "own", shard_size="256KiB", engine=Twice(1))
    assert plain.manifest is not None
    assert own.manifest is not None
    assert own.manifest.id == plain.manifest.id
    assert list((tmp_path / "own" / "tmp").iterdir()) == []


def test_an_address_is_for_ray_alone() -> None:
    with pytest.raises(ConfigurationError, match="only --engine ray"):
        open_engine("local", 1, "10.0.0.5:6379")
    with pytest.raises(ConfigurationError, match="expected local or ray"):
        open_engine("dask", 1)


def _tars(folder: Path) -> Path:
    """Three WebDataset tars, together more than what is worth no second process."""
    folder.mkdir()
    for number in range(3):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for sample in range(40):
                for suffix, data in (("cls", b"7"), ("bin", bytes([sample]) * 100_000)):
                    member = tarfile.TarInfo(f"{number}-{sample:04d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


def _call(*arguments: object, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install ray")
def test_adopt_replicate_scrub_and_repair_on_ray_do_what_they_do_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster with a token."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    address = f"127.0.0.1:{free_port()}"
    start = [
        "start",
        "--head",
        f"--port={address.rpartition(':')[2]}",
        "--num-cpus=2",
        "--include-dashboard=false",
    ]
    cluster = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), *start, "--block"], stdout=subprocess.PIPE, text=True
    )
    tars, root, copy = _tars(tmp_path / "tars"), tmp_path / "cats", tmp_path / "rack" / "cats"
    copy.parent.mkdir()
    try:
        assert cluster.stdout is not None
        assert any("Ray runtime started" in line for line in cluster.stdout)
        ray = ["--engine", "ray", "--address", address]
        adopted = _call("adopt", tars, root, *ray)
        assert adopted["id"] == _call("adopt", tars, tmp_path / "plain")["id"]
        assert list((root / "tmp").iterdir()) == []
        _call("place", root, "--location", f"rack={copy},domain=rack", "--copies", 2)
        for path in sorted((copy / "objects").rglob("*.*")):
            path.unlink()
        done = _call("replicate", root, *ray)
        assert done["lag_after"] == 0 < done["lag_before"]
        held = sorted((copy / "objects").rglob("*.*"))
        shard = max(held, key=lambda path: path.stat().st_size)
        flip(shard)
        held[0].unlink()
        _call("scrub", root, "--level", "read", *ray, code=4)  # bad copies are left
        _call("repair", root, *ray)  # repaired
        _call("scrub", root, "--level", "read", *ray)
    finally:
        cluster.terminate()
        cluster.communicate()
    assert sorted((copy / "objects").rglob("*.*")) == held
