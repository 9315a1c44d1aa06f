"""build, replicate, place, gc and remove --erase with copies on a disk and in a bucket, from the command line."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

import pytest

import shardkit
from shardkit.reading.attestations import read_attestations
from shardkit.stores.local import open_store
from shardkit.stores.store import object_name
from tests.command_line import document_of, output_of
from tests.flips import flip
from tests.servers.object_stores import s3_client, s3_environment

BUCKET = "copies"
BUCKETS = (BUCKET,)


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n:04d}", "label": n % 2}) + "\n" for n in range(300)))
    return path


def _texts(url: str) -> list[str]:
    return sorted(str(sample["text"]) for sample in shardkit.open(url))


ALL = [f"row {n:04d}" for n in range(300)]


def test_from_build_to_erasure_over_a_disk_and_a_bucket(tmp_path: Path, source: Path, bucket: str) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    built = document_of(
        "build", source, root, "--stratify", "label", "--shard-size", "4KiB", "--block-size", "1KiB",
        "--location", f"disk={disk},domain=rack", "--location", f"cloud={bucket},domain=aws",
        "--copies", "3", "--mode", "sync",
    )  # fmt: skip
    assert built["lag_bytes"] == 0
    cloud = open_store(bucket)
    objects = set(open_store(root).list_after("objects/"))
    assert set(cloud.list_after("objects/")) == set(open_store(disk).list_after("objects/")) == objects
    for name in objects:  # the store's own checksum is what the name says
        stat = cloud.head(name)
        assert stat is not None
        assert stat.sha256 in (None, name.rpartition("/")[2].partition(".")[0])

    # Either copy alone is the dataset; the root without shards reads from them by itself.
    for name in ("away", "objects"):
        target = root if name == "away" else root / name
        target.rename(tmp_path / "hidden")
        if name == "away":
            assert _texts(bucket) == _texts(str(disk)) == ALL
        else:
            assert _texts(str(root)) == ALL
        (tmp_path / "hidden").rename(target)
    assert "is the copy 'cloud'" in output_of("tag", bucket, "v1", code=1)

    # A version that is not copied yet, then is; then nobody names it any more.
    output_of("place", root, "--mode", "async")
    output_of("build", source, root, "--shard-size", "8KiB", "--ref", "other", "--seed", "3")
    told = document_of("replicate", root, "--dry-run", code=5)
    assert told["lag_before"] > 0
    assert document_of("replicate", root, "--bandwidth", "1GB/s")["lag_after"] == 0
    assert len(set(cloud.list_after("objects/"))) > len(objects)

    from shardkit.repository.repository import Repository

    Repository.open(root).commit({"other": None}, message="drop")
    assert document_of("gc", root, "--history", "0s")["garbage"] > 0
    output_of("gc", root, "--delete", "--history", "0s", "--grace", "0s")
    done = document_of("gc", root, "--delete", "--history", "0s", "--grace", "0s")
    deleted = done["deleted"]
    assert 0 < done["due_bytes"] <= done["garbage_bytes"]
    assert deleted.keys() == {"root", "disk", "cloud"}
    for store in (open_store(root), open_store(disk), cloud):
        assert set(store.list_after("objects/")) == objects

    # Erased rows are nowhere.
    report = document_of("remove", root, "--rows", "7,8", "--reason", "asked", "--erase")
    gone = set(report["objects"])
    assert gone
    for store in (open_store(root), open_store(disk), cloud):
        assert not gone & set(store.list_after("objects/"))
    assert len(_texts(str(root))) == 298
    output_of("replicate", root)
    assert _texts(bucket) == _texts(str(root))
    assert "clean" in output_of("verify", root)


def test_a_root_in_a_bucket_with_a_copy_on_a_disk(tmp_path: Path, source: Path, bucket: str) -> None:
    output_of("build", source, bucket, "--stratify", "label", "--shard-size", "16KiB")
    placed = document_of(
        "place", bucket, "--location", f"disk={tmp_path / 'disk'}", "--copies", "2", "--parity", "4+2"
    )
    assert placed["copies"]["lag_after"] == 0
    assert placed["committed"]
    assert _texts(str(tmp_path / "disk")) == ALL
    assert document_of("place", bucket)["table"] == 2
    output_of("gc", bucket, "--delete", "--grace", "0s")
    assert document_of("gc", bucket)["garbage"] == 0
    assert document_of("replicate", bucket)["lag_before"] == 0
    undone = document_of("place", bucket, "--parity", "none")
    assert undone["policy"]["parity"] == "none"


@pytest.mark.parametrize("lost", ["log", "newest entry", "root"])
def test_what_a_bucket_lost_is_restored_from_a_copy(
    bucket: str, tmp_path: Path, source: Path, server: str, lost: str
) -> None:
    """The message says what to do, doing it works, and nothing is built or deleted before."""
    root, copy = f"{bucket}/data", str(tmp_path / "mirror")
    output_of("build", source, root)
    output_of("place", root, "--location", f"mirror={copy},domain=disk", "--copies", 2)
    output_of("tag", root, "v1")
    output_of("replicate", root)
    prefix = root.removeprefix(f"s3://{BUCKET}/")
    with s3_client(server) as client:
        keys = sorted(one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"])
        log = [key for key in keys if "/log/" in key]
        for key in {"log": log, "newest entry": log[-1:], "root": keys}[lost]:
            client.delete_object(Bucket=BUCKET, Key=key)
    if lost == "root":
        told = output_of("show", root, code=1)
        assert f"shardkit repair {root} --location NAME=COPY" in told
        output_of("repair", root, "--location", f"mirror={copy}")
    else:
        for command in (["verify", root], ["gc", root, "--delete", "--grace", "0s"]):
            assert f"shardkit repair {root}" in output_of(*command, code=4)
        assert len(sorted((tmp_path / "mirror" / "log").iterdir())) == len(log)
        output_of("repair", root)
    output_of("verify", root)
    assert [shardkit.open(f"{root}@v1")[i] for i in range(3)] == [shardkit.open(copy)[i] for i in range(3)]


def test_an_erasure_waits_for_a_location_that_is_away(tmp_path: Path, source: Path) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    output_of(
        "build",
        source,
        root,
        "--shard-size",
        "4KiB",
        "--location",
        f"disk={disk}",
        "--copies",
        "2",
        "--mode",
        "sync",
    )
    output_of("place", root, "--mode", "async")
    disk.rename(tmp_path / "away")
    told = output_of("remove", root, "--rows", "7", "--reason", "asked", "--erase", code=1)
    assert "but for 1 locations (disk:" in told
    assert "--resume" in told
    assert "an erasure was begun" in output_of("gc", root, code=2)
    (tmp_path / "away").rename(disk)
    (report,) = document_of("remove", root, "--resume")
    assert not set(report["objects"]) & set(open_store(disk).list_after("objects/"))
    assert "row 0007" not in _texts(str(root)) or len(_texts(str(root))) == 299


def test_readers_need_no_right_to_write(tmp_path: Path, source: Path) -> None:
    root, disk, runs = tmp_path / "root", tmp_path / "disk", tmp_path / "run"
    output_of(
        "build",
        source,
        root,
        "--shard-size",
        "4KiB",
        "--location",
        f"disk={disk}",
        "--copies",
        "2",
        "--mode",
        "sync",
    )
    for victim in root.glob(
        "objects/**/*.arrow"
    ):  # all: which of two places is asked first depends on how fast they are
        victim.chmod(0o644)
        victim.write_bytes(bytes(victim.stat().st_size))
    folders = [root, disk, *root.rglob("*"), *disk.rglob("*")]
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folders}
    for path in folders:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        ds = shardkit.open(str(root))
        loader = ds.loader(ds.plan(global_batch=10), run=str(runs), rank=0, world=1)
        seen = [int(number) for batch in loader for number in batch.samples]
        loader.close()
        assert sorted(seen) == list(range(300))
        for command in ("ls", "show", "log"):
            output_of(command, root)
        output_of("plan", root, "--global-batch", "10")
    finally:
        for path in folders:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folders} == before
    assert set(folders) == {root, disk, *root.rglob("*"), *disk.rglob("*")}  # nothing was made either
    attested = read_attestations([open_store(runs)])  # for repair --from-run
    assert attested.keys() == {"root"}
    assert {one.result for one in attested["root"].values()} == {"wrong"}


def test_verify_looks_at_the_root_and_not_at_its_copies(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "root"
    output_of("build", source, root, "--location", f"a={tmp_path / 'a'}", "--copies", "2", "--mode", "sync")
    victims = [next(root.glob("objects/**/*.arrow")), next(root.glob("objects/**/*.page"))]
    for victim in victims:
        victim.chmod(0o644)
        victim.write_bytes(bytes(victim.stat().st_size))
        told = output_of("verify", root, code=4)
        assert victim.name in told
    assert _texts(str(root)) == ALL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["replicate"], "has no locations beside itself"),
        (["place", "--copies", "2"], "2 copies need as many failure domains"),
        (["place", "--location", "A=/x"], "location name 'A'"),
        (["place", "--location", "a=s3://k:CANARY@bucket/x"], "password"),
        (["place", "--empty", "a"], "no location 'a'"),
        (["place", "--undo"], "no earlier placement"),
        (["place", "--undo", "--copies", "2"], "takes no other change"),
        (["place", "--parity", "8+1"], "such as 8+2"),
        (["gc", "--grace", "soon"], "such as 30d"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path: Path, source: Path, arguments: list[str], says: str) -> None:
    root = tmp_path / "root"
    output_of("build", source, root)
    code = 1 if arguments == ["replicate"] else 2
    told = output_of(arguments[0], root, *arguments[1:], code=code)
    assert says in told
    assert "CANARY" not in told
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) == 1


@pytest.mark.usefixtures("ordinary_rights")
def test_a_full_location_is_told_and_the_others_are_filled(tmp_path: Path, source: Path) -> None:
    root = tmp_path / "root"
    output_of("build", source, root, "--location", f"a={tmp_path / 'a'}", "--location", f"b={tmp_path / 'b'}")
    output_of("place", root, "--copies", "3", "--mode", "async")
    shutil.rmtree(tmp_path / "a" / "objects")
    (tmp_path / "a").chmod(0o555)
    told = document_of("replicate", root, code=3)
    (tmp_path / "a").chmod(0o755)
    assert {one["name"]: one["state"] for one in told["locations"]}["b"] == "ok"


def test_sets_that_are_left_without_parity_are_told(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with shardkit.create(
        root, {"x": "int64[512]"}, format="arrow", shard_size="64KiB", block_size="16KiB"
    ) as w:
        for number in range(96):
            w.add({"x": [number] * 512})
    next((root / "objects").rglob("*.arrow")).unlink()
    told = output_of("place", root, "--parity", "4+2", code=1)
    assert "parity set" in told
    assert "shardkit repair" in told


def test_a_critical_stratum_that_there_is_not_is_named_with_those_that_there_are(
    tmp_path: Path, source: Path
) -> None:
    root = tmp_path / "root"
    copies = ["--location", f"a={tmp_path / 'a'}", "--location", f"b={tmp_path / 'b'}", "--copies", "2"]
    told = output_of(
        "build", source, root, "--stratify", "label", *copies, "--critical", "gold=3", "--mode", "sync"
    )
    assert "critical stratum 'gold' is in no version; there are '0', '1'" in " ".join(told.split())
    told = output_of("place", root, "--critical", "gold=2", "--critical", "2=3", code=2)
    assert "critical stratum '2': no version of" in told
    assert "there are '0', '1'" in told
    output_of("place", root, "--critical", "1=3")
    told = output_of("build", source, root, "--stratify", "label", "--ref", "again")
    assert "is in no version" not in told
    output_of("place", root, "--undo")


@pytest.mark.parametrize("kind", ["manifest", "page"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_an_old_version_that_is_lost_does_not_stop_gc(kind: str, is_missing: bool, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for number in range(2):
        with shardkit.create(root, {"n": "int64"}, replace=True) as writer:
            writer.add({"n": number})
        (tmp_path / f"{number}").write_text(shardkit.open(root).manifest.id)
    versions = [(tmp_path / f"{number}").read_text() for number in range(2)]
    pages = [shardkit.open(f"{root}@{one}").manifest.pages[0].digest for one in versions]
    digests = versions if kind == "manifest" else pages
    places = [root / object_name(digest, kind) for digest in digests]
    good = [place.read_bytes() for place in places]

    def damage(number: int) -> None:
        if is_missing:
            places[number].unlink()
        else:
            flip(places[number])

    damage(1)
    output_of("gc", root, "--delete", "--grace", "0s", code=1 if is_missing else 4)  # main needs it
    places[1].write_bytes(good[1])
    damage(0)
    for _ in range(2):
        found = document_of("gc", root, "--delete", "--grace", "0s")
        assert list(found["lost_versions"]) == [versions[0]]
    assert found["deleted"]
    output_of("verify", root)
    assert [sample["n"] for sample in shardkit.open(root)] == [1]
