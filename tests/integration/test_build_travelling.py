"""Builds whose workers have no folder in common: scratch and journal travel through the root, a bucket.

Machines are processes here, each with a temporary directory of its own; a worker that looked for a file of another
one would not find it.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import io
import json
import os
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardkit
import shardkit_tools
from shardkit.copies.collecting import objects_of_builds
from shardkit.documents import encode
from shardkit.errors import RunError, ShardkitError, StoreError
from shardkit.repository.repository import Repository
from shardkit.stores.local import open_store
from shardkit_tools.adopting import adopt, adoption
from shardkit_tools.building.engines import LocalEngine
from shardkit_tools.building.job import abandoned_jobs
from shardkit_tools.importers import ImportOptions, line_ranges, open_source
from tests.command_line import output_of
from tests.servers.object_stores import moto, s3_environment

HAS_RAY = importlib.util.find_spec("ray") is not None
TASK_BYTES = 2**18
PROGRAM = f"""
from shardkit_tools.building import engines
from shardkit_tools.importers import line_ranges
from shardkit_tools.main import run
engines.SMALL_BYTES = 0  # small sources are not given to workers
line_ranges._RANGE_BYTES = line_ranges.READ_BYTES = {TASK_BYTES}
run()
"""
BUCKET = "builds"
FUNCTIONS = """
import os, pathlib, signal, tempfile

def doubled(sample):
    folder = pathlib.Path(os.environ["NOTES"])
    (folder / tempfile.gettempdir().replace("/", "_")).touch()
    flag = folder / "kill"
    if sample["x"] == 3_300 and flag.exists():
        flag.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return {**sample, "x": 2 * sample["x"]}
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto(BUCKET) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same source, built into a folder without workers; not to be written to."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES", str(folder))
        make_place(folder, patch)
        build(folder, folder / "root")
    return folder / "root"


@pytest.fixture
def place(tmp_path: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment for workers; a folder with source/, notes/ and the applied function."""
    for name, value in s3_environment(endpoint).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "notes").mkdir()
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    make_place(tmp_path, monkeypatch)
    return tmp_path


def make_place(folder: Path, patch: pytest.MonkeyPatch) -> None:
    (folder / "functions_that_travel.py").write_text(FUNCTIONS)
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))
    patch.syspath_prepend(str(folder))
    for name in ("_RANGE_BYTES", "READ_BYTES"):
        patch.setattr(line_ranges, name, TASK_BYTES)  # some ten tasks
    (folder / "source").mkdir()
    for number in range(4):
        rows = range(number * 1_000, (number + 1) * 1_000)
        lines = [json.dumps({"x": x, "label": x % 3, "text": f"row {x} " * 75}) + "\n" for x in rows]
        (folder / "source" / f"{number}.jsonl").write_text("".join(lines))


def new_root() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


class Machines(LocalEngine):
    """Two processes as two machines: each has a temporary directory of its own, and neither sees the driver's."""

    is_remote = True

    def __init__(self, folder: Path, *, stops_after: int | None = None) -> None:
        super().__init__(2)
        self._folder = folder
        self._stops_after = stops_after
        self.temporary: list[Path] = []

    def _free(self) -> Any:
        own = self._folder / f"machine-{len(self._processes)}"  # if another process is started now
        own.mkdir(exist_ok=True)
        before, known = os.environ.get("TMPDIR"), len(self._processes)
        os.environ["TMPDIR"] = str(own)
        try:
            return super()._free()
        finally:
            if len(self._processes) > known:
                self.temporary.append(own)
            os.environ.pop("TMPDIR")
            if before is not None:
                os.environ["TMPDIR"] = before

    def run(self, make: Any, items: Any, report: Any, *, here: bool = False) -> Iterator[Any]:
        del here
        for result in super().run(make, items, report):
            if self._stops_after == 0:
                raise RunError("the driver goes down here")
            if self._stops_after is not None:
                self._stops_after -= 1
            yield result


def build(place: Path, root: str | Path, engine: Any = "local") -> Any:
    return shardkit_tools.build(
        place / "source",
        root,
        apply="functions_that_travel:doubled",
        stratify="label",
        shard_size="512KiB",
        engine=engine,
    )


def names(root: str, prefix: str) -> set[str]:
    return set(open_store(root, read_only=True).list_after(prefix))


def local_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_machines_without_a_common_folder_build_the_same(place: Path, plain: Path) -> None:
    root = new_root()
    engine = Machines(place)
    done = build(place, root, engine)
    assert done.manifest.id == shardkit.open(plain).manifest.id
    assert len(engine.temporary) == 2
    assert {p.name for p in (place / "notes").iterdir()} >= {
        str(own).replace("/", "_") for own in engine.temporary
    }
    assert names(root, "scratch/") == set()
    assert names(root, "objects/") == {
        f"objects/{path.relative_to(plain / 'objects')}" for path in (plain / "objects").rglob("*.*")
    }
    assert [path for own in engine.temporary for path in local_files(own)] == []
    assert len(shardkit.open(root)) == 4_000


@pytest.mark.parametrize("is_written", [False, True], ids=["reading", "writing"])
def test_another_machine_goes_on_with_a_build_that_was_killed(
    place: Path, plain: Path, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = new_root()
    tasks = len(open_source(str(place / "source")).tasks())
    assert tasks > 6
    with pytest.raises(RunError, match="goes down"):
        build(place, root, Machines(place, stops_after=tasks + 1 if is_written else 3))
    left = names(root, "scratch/")
    assert any(name.endswith("/begun") for name in left)
    assert any(name.endswith(".rows") for name in left)
    written = {name for name in names(root, "objects/") if name.endswith(".arrow")}
    kept = objects_of_builds(Repository.open(root))
    assert bool(written & kept) is is_written  # a shard without a record is written again
    assert abandoned_jobs(open_store(root), 3_600.0) == []
    elsewhere = place / "another-driver"
    elsewhere.mkdir()
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    done = build(place, root, Machines(place))
    assert done.manifest.id == shardkit.open(plain).manifest.id
    assert 3 <= done.reused_tasks <= tasks
    if is_written:
        assert done.reused_tasks == tasks
        assert done.reused_shards >= 1
    assert names(root, "scratch/") == set()


def test_a_build_that_nobody_goes_on_with_is_collected(place: Path) -> None:
    root = new_root()
    build(place, root)
    with pytest.raises(RunError):
        shardkit_tools.build(
            place / "source", root, engine=Machines(place, stops_after=2), shard_size="256KiB"
        )
    store = open_store(root)
    (begun,) = (name for name in names(root, "scratch/") if name.endswith("/begun"))
    for arguments in ([], ["--delete"]):  # young: not even with --delete
        output_of("gc", root, *arguments)
        assert names(root, "scratch/")
    old = dt.datetime.now(dt.UTC) - dt.timedelta(days=60)
    store.replace(begun, encode({"begun": old.isoformat(timespec="seconds")}))
    for arguments, left in (([], True), (["--delete"], False)):
        assert "1 build that nobody went on with" in output_of("gc", root, *arguments)
        assert bool(names(root, "scratch/")) is left
    assert len(shardkit.open(root)) == 4_000


def test_damaged_and_foreign_records_are_no_finished_work(place: Path, plain: Path) -> None:
    root = new_root()
    with pytest.raises(RunError, match="goes down"):
        build(place, root, Machines(place, stops_after=3))
    store = open_store(root)
    records = sorted(name for name in names(root, "scratch/") if name.endswith(".rows"))
    data = bytearray(store.get(records[0], max_bytes=2**30))
    data[len(data) // 2] ^= 1
    store.replace(records[0], bytes(data))
    part = max(name for name in names(root, "scratch/") if name.endswith(".part"))
    store.replace(part, store.get(part, max_bytes=2**30)[:-1])
    done = build(place, root, Machines(place))
    assert done.manifest.id == shardkit.open(plain).manifest.id
    assert len(records) - done.reused_tasks in (1, 2)  # the part may be one whose record was never put
    assert names(root, "scratch/") == set()


def test_a_builder_that_may_not_delete_is_done_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardkit.stores.remote.object_store import ObjectStore

    def refused(self: ObjectStore, name: str) -> None:
        raise StoreError(f"{name}: access denied")

    root = new_root()
    monkeypatch.setattr(ObjectStore, "delete", refused)
    Repository.create(root, single_writer=True)
    done = build(place, root, Machines(place))
    assert done.manifest is not None
    assert len(shardkit.open(root)) == 4_000
    assert any(name.endswith("/begun") for name in names(root, "scratch/"))


def test_documents_that_are_packed_travel_too(place: Path) -> None:
    for number, path in enumerate(sorted((place / "source").iterdir())):
        lines = [json.dumps({"tokens": list(range(x % 50))}) + "\n" for x in range(number, 2_000 + number)]
        path.write_text("".join(lines))
    made: dict[str, Any] = {}
    for root, engine in ((str(place / "plain"), "local"), (new_root(), Machines(place))):
        made[root] = shardkit_tools.build(
            place / "source",
            root,
            options=ImportOptions(field_types={"tokens": "int32[*]"}),
            pack={"tokens": 64},
            engine=engine,
        )
    plain, remote = made
    assert made[plain].manifest.id == made[remote].manifest.id
    assert made[remote].packed.documents == 8_000
    assert names(remote, "scratch/") == set()


def test_adopting_goes_on_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "_GROUP_FILES", 1)  # each file is a task
    tars = place / "tars"
    tars.mkdir()
    for number in range(6):
        with tarfile.open(tars / f"{number}.tar", "w") as tar:
            for sample in range(20):
                member = tarfile.TarInfo(f"{number}-{sample:04d}.bin")
                member.size = 100_000
                tar.addfile(member, io.BytesIO(bytes([number]) * 100_000))
    root = new_root()
    expected = adopt([tars], place / "plain").manifest
    with pytest.raises(RunError, match="goes down"):
        adopt([tars], root, engine=Machines(place, stops_after=3))
    assert any(name.endswith(".done") for name in names(root, "scratch/"))
    (place / "another-driver").mkdir()
    monkeypatch.setenv("TMPDIR", str(place / "another-driver"))
    done = adopt([tars], root, engine=Machines(place))
    assert expected is not None
    assert done.manifest is not None
    assert done.manifest.id == expected.id
    assert 3 <= done.reused < 6
    assert names(root, "scratch/") == set()


def test_an_error_without_finished_work_leaves_nothing(place: Path) -> None:
    root = new_root()
    for path in (place / "source").iterdir():
        path.write_text('{"x": 1}\nno json\n')
    with pytest.raises(ShardkitError):
        shardkit_tools.build(place / "source", root, engine=Machines(place))
    assert names(root, "scratch/") == set()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed: pip install ray")
def test_two_ray_nodes_build_into_a_bucket_and_a_worker_is_killed(place: Path, plain: Path) -> None:
    """Two nodes of a real cluster, one worker each, and a driver: three temporary directories."""
    from ray.cluster_utils import Cluster

    root = new_root()
    (place / "notes" / "kill").touch()
    machines = [place / f"node-{number}" for number in range(2)]
    cluster = Cluster(shutdown_at_exit=True)
    try:
        for machine in machines:
            machine.mkdir()
            cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(machine)}, include_dashboard=False)
        cluster.wait_for_nodes(60)
        (place / "driver").mkdir()
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "build", str(place / "source"), root, "--engine", "ray",
             "--address", cluster.address, "--stratify", "label", "--shard-size", "512KiB", "--json",
             "--apply", "functions_that_travel:doubled"],
            env={**os.environ, "TMPDIR": str(place / "driver")},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["id"] == shardkit.open(plain).manifest.id
    notes = {path.name for path in (place / "notes").iterdir()}
    assert "kill" not in notes, "nobody was killed"
    assert {str(machine).replace("/", "_") for machine in machines} <= notes, "one node did everything"
    assert names(root, "scratch/") == set()
    assert {name for name in names(root, "objects/") if name.endswith(".arrow")} == {
        f"objects/{path.relative_to(plain / 'objects')}" for path in (plain / "objects").rglob("*.arrow")
    }
