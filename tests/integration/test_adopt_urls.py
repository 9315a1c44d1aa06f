"""Tars in a bucket, or behind any URL, adopted where they lie: journaled, read in ranges, changes noticed and named."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import IntegrityError, NotFoundError, SourceError
from shardkit.reading.read_path import ReadSettings
from shardkit.stores.file_operations import substituted
from shardkit.stores.local import open_store
from shardkit_tools.adopting import adopt
from shardkit_tools.adopting import adoption as adoption_module
from shardkit_tools.main import run
from tests.faults.killed_operations import KilledOperations, run_in_child
from tests.servers.fault_proxy import Fault, FaultProxy, Request
from tests.servers.object_stores import (
    ACCESS_KEY,
    SECRET_KEY,
    localstack,
    s3_client,
    s3_environment,
)

BUCKET = "their-tars"
BUCKETS = (BUCKET,)
# On a busy machine, a hedge or a second attempt would fetch some bytes twice.
SETTINGS = ReadSettings(deadline_s=120, attempt_s=60, cool_down_s=0.2, hedge=False)
WRITE = """
import sys, webdataset
for tar in range(int(sys.argv[2])):
    with webdataset.TarWriter(f"{sys.argv[1]}/{tar:03d}.tar") as writer:
        for row in range(120):
            writer.write({"__key__": f"s{tar}_{row:04d}", "txt": f"sample {tar} {row}", "cls": row // 40,
                          "bin": bytes([row]) * (500 + row)})
"""


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Three tars of 120 samples; a process of its own, since webdataset leaves files to the collector."""
    folder = tmp_path_factory.mktemp("tars")
    subprocess.run([sys.executable, "-c", WRITE, str(folder), "3"], check=True)
    return [path.read_bytes() for path in sorted(folder.glob("*.tar"))]


def put(endpoint: str, url: str, data: bytes, **more: Any) -> None:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    with s3_client(endpoint) as s3:
        s3.put_object(Bucket=bucket, Key=key, Body=data, **more)


@pytest.fixture
def folder(server: str, tars: list[bytes]) -> str:
    """The tars in a bucket, under names that a store of ours would not take."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}/Their Tars=1"
    for number, data in enumerate(tars):
        put(server, f"{url}/Train-{number:03d} (a+b).tar", data)
    return url


def texts(root: object) -> list[str]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    return [str(sample["text"]) for sample in ds[:]]


ALL = [f"sample {tar} {row}" for tar in range(3) for row in range(120)]


def epoch(root: object, cache: Path | None = None) -> tuple[list[str], dict[str, float]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    plan = ds.plan(global_batch=12, lanes=4, seed=1)
    found: list[str] = []
    with contextlib.closing(ds.loader(plan, rank=0, world=1, tensors=False, cache=cache)) as loader:
        for batch in loader:
            found += [str(one) for one in batch["text"]]
        return found, loader.stats()


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_tars_in_a_bucket_are_read_where_they_lie(
    proxy: FaultProxy, folder: str, tars: list[bytes], tmp_path: Path, where: str
) -> None:
    root = str(tmp_path / "root") if where == "disk" else f"s3://{BUCKET}/{uuid.uuid4().hex}"
    result = adopt([folder], root, block_size="8KiB")
    assert result.manifest is not None
    local = tmp_path / "tars"
    local.mkdir()
    for number, data in enumerate(tars):
        (local / f"{number}.tar").write_bytes(data)
    assert adopt([local], tmp_path / "local", block_size="8KiB").manifest == result.manifest, (
        "the bytes alone count"
    )
    store = open_store(root)
    assert not [name for name in store.list_after("objects/") if name.endswith(".tar")], "nothing was copied"
    assert not result.manifest.to_bytes().count(BUCKET.encode()), "manifests hold no place"
    for name in store.list_after(""):
        data = store.get(name, max_bytes=10**7)
        assert SECRET_KEY.encode() not in data
        assert ACCESS_KEY.encode() not in data
    assert texts(root) == ALL
    found, stats = epoch(root)
    assert sorted(found) == sorted(ALL)
    assert stats["remote_mismatches"] == stats["remote_failovers"] == 0
    before = proxy.body_bytes
    assert epoch(root, tmp_path / "cache")[0] == found
    assert proxy.body_bytes - before < 1.5 * sum(map(len, tars))
    before = proxy.body_bytes
    again, stats = epoch(root, tmp_path / "cache")
    assert again == found
    assert proxy.body_bytes - before < 0.2 * sum(map(len, tars)), (
        "the cache has the blocks of adopted files as well"
    )
    assert not verify(root, level="decode").exit_code
    assert adopt([folder], root, block_size="8KiB").commit is None


def test_a_bad_network_does_not_show(proxy: FaultProxy, folder: str, tmp_path: Path) -> None:
    def ill(request: Request) -> Fault | None:
        kinds: list[Any] = ["flip", "truncate", "reset", "status"]
        return Fault(kinds[request.number // 5 % 4]) if request.number % 5 == 4 else None

    adopt([folder], tmp_path / "root", block_size="8KiB")
    truth, _ = epoch(tmp_path / "root")
    proxy.faults = ill
    found, stats = epoch(tmp_path / "root")
    assert found == truth
    assert stats["remote_mismatches"] > 0


def test_a_bit_that_flips_on_the_way_does_not_become_the_truth(
    proxy: FaultProxy, server: str, folder: str, tars: list[bytes], tmp_path: Path
) -> None:
    """Where a store keeps the SHA-256 of an object, what came is compared with it."""
    url = f"{folder}/Train-001 (a+b).tar"
    put(server, url, tars[1], ChecksumAlgorithm="SHA256")
    reads: list[Request] = []

    def flip(request: Request) -> Fault | None:
        if request.method == "GET" and "Train-001" in request.path and "range" in request.headers:
            reads.append(request)
        return Fault("flip") if len(reads) == 2 and reads[-1] is request else None

    proxy.faults = flip
    with pytest.raises(SourceError, match=r"Train-001"):
        adopt([folder], tmp_path / "root", block_size="8KiB")
    assert proxy.counts["flip"] == 1
    adopt([folder], tmp_path / "root", block_size="8KiB")
    assert texts(tmp_path / "root") == ALL


@pytest.mark.parametrize("how", ["flip", "truncate", "grow", "replace", "remove"])
def test_a_changed_tar_is_noticed_and_named(
    proxy: FaultProxy, server: str, folder: str, tars: list[bytes], tmp_path: Path, how: str
) -> None:
    root = str(tmp_path / "root")
    adopt([folder], root, block_size="8KiB")
    url, data = f"{folder}/Train-001 (a+b).tar", tars[1]
    index = shardkit.open(root).reader.index(1)
    row = int(index.block_start[3])
    at = int(index.block_offset[3]) + 600
    changed = {
        "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "truncate": data[: int(index.block_offset[3]) + 100],
        "grow": data + bytes(512),
        "replace": tars[0],
        "remove": b"",
    }[how]
    bucket, _, key = url.removeprefix("s3://").partition("/")
    if how == "remove":
        with s3_client(server) as s3:
            s3.delete_object(Bucket=bucket, Key=key)
    else:
        put(server, url, changed)
    ds = shardkit.open(root, settings=SETTINGS)
    assert ds[row]["text"] == f"sample 0 {row}", "the other tar is as it was"
    if how != "grow":
        expected: Any = NotFoundError if how == "remove" else IntegrityError
        with pytest.raises(expected, match=r"Train-001 \(a\+b\)\.tar"):
            ds[120 + row]
    before = proxy.body_bytes
    for level in ("list", "stored"):
        found = verify(root, level=level)
        assert proxy.body_bytes - before < 100_000, "by what the store says, without reading the tar"
        if level == "stored" or how not in ("flip", "replace"):
            assert found.exit_code, level
            named = [one.name for one in (*found.damaged, *found.unknown) if "://" in one.name]
            assert named == [url]
    found = verify(root, level="read")
    assert found.exit_code == 4
    (damage,) = found.damaged
    assert damage.name == url
    assert "shardkit adopt" in damage.action


def test_a_tar_that_was_put_again_as_it_was_is_good(
    proxy: FaultProxy, server: str, folder: str, tars: list[bytes], tmp_path: Path
) -> None:
    """Its ETag is another where it was put in parts; then its bytes have the last word."""
    adopt([folder], tmp_path / "root", block_size="8KiB")
    bucket, _, key = f"{folder}/Train-001 (a+b).tar".removeprefix("s3://").partition("/")
    with s3_client(server) as s3:
        upload = s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        tag = s3.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=tars[1])["ETag"]
        parts = {"Parts": [{"ETag": tag, "PartNumber": 1}]}
        s3.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload=parts)
    root = str(tmp_path / "root")
    found = verify(root, level="stored")
    assert found.exit_code == 3
    (told,) = found.unknown  # the indexes are files, and were read
    assert told.name.startswith("s3://")
    assert "when the file was adopted" in told.got
    assert not verify(root, level="read").exit_code


def test_a_tar_that_changed_meanwhile_is_read_again(
    proxy: FaultProxy,
    server: str,
    folder: str,
    tars: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(adoption_module, "put_manifest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            adopt([folder], tmp_path / "root")
    put(server, f"{folder}/Train-001 (a+b).tar", tars[1].replace(b"sample 1 7", b"sample 1 9"))
    result = adopt([folder], tmp_path / "root")
    assert result.reused == 2, "an ETag tells, though the size is the same"
    assert "sample 1 9" in texts(tmp_path / "root")


def test_one_that_is_written_to_during_the_pass_is_refused(
    proxy: FaultProxy, server: str, folder: str, tars: list[bytes], tmp_path: Path
) -> None:
    url = f"{folder}/Train-002 (a+b).tar"
    written: list[Request] = []

    def interfere(request: Request) -> Fault | None:
        if request.method == "GET" and "Train-002" in request.path and "range" in request.headers:
            written.append(request)
            if len(written) == 2:  # after the read for the schema
                put(server, url, tars[2].replace(b"sample 2 7", b"sample 2 9"))
        return None

    proxy.faults = interfere
    with pytest.raises(SourceError, match=r"Train-002.*changed"):
        adopt([folder], tmp_path / "root")


def test_copies_and_parity_stand_in_for_a_tar_that_changed(
    proxy: FaultProxy,
    server: str,
    folder: str,
    tars: list[bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "root"
    for arguments in (
        ["adopt", folder, str(root), "--block-size", "8KiB"],
        ["place", str(root), "--location", f"disk={tmp_path / 'disk'}", "--copies", "2"],
    ):
        run_command(arguments)
    assert "Train-000" not in capsys.readouterr().err
    held = list((tmp_path / "disk").rglob("*.tar"))
    assert sorted(path.read_bytes() for path in held) == sorted(tars), (
        "the policy copies what is adopted, too"
    )
    put(server, f"{folder}/Train-001 (a+b).tar", tars[1].replace(b"sample", b"SAMPLE"))
    assert texts(root) == ALL
    found, stats = epoch(root)
    assert sorted(found) == sorted(ALL)
    assert stats["remote_failovers"] > 0
    told = run_json(capsys, ["repair", str(root), "--json"])
    assert told is not None
    assert len(list((root / "objects").rglob("*.tar"))) == 1, (
        "the good copy lies in the root now, and is found first"
    )
    assert not verify(str(root), level="read").exit_code
    # and without a copy, from parity
    for path in [*held, *(root / "objects").rglob("*.tar")]:
        path.unlink()
    put(server, f"{folder}/Train-001 (a+b).tar", tars[1])
    run_command(["place", str(root), "--forget", "disk", "--copies", "1", "--parity", "2+2"])
    put(server, f"{folder}/Train-001 (a+b).tar", tars[1].replace(b"sample", b"SAMPLE"))
    assert texts(root) == ALL


def run_command(arguments: list[str], code: int = 0) -> None:
    found = 0
    try:
        run(arguments)
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == code, arguments


def run_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> Any:
    capsys.readouterr()
    with contextlib.suppress(SystemExit):
        run(arguments)
    return json.loads(capsys.readouterr().out)


def test_scrub_audits_tars_in_a_bucket_without_reading_them(
    proxy: FaultProxy,
    server: str,
    folder: str,
    tars: list[bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = str(tmp_path / "root")
    adopt([folder], root, block_size="8KiB")
    before = proxy.body_bytes
    run_command(["scrub", root, "--level", "stored"])
    assert proxy.body_bytes - before < 20_000
    put(server, f"{folder}/Train-001 (a+b).tar", tars[1].replace(b"sample", b"SAMPLE"))
    capsys.readouterr()
    run_command(["scrub", root, "--level", "stored"], code=4)


@pytest.mark.drill(only=True)
def test_killed_adoptions_from_s3_into_s3_go_on(
    tars: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at changes of scratch, then to the end: one id. LocalStack's checksums are audited."""
    place = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with localstack(tmp_path / "localstack", BUCKET) as endpoint:
        for name, value in s3_environment(endpoint).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(adoption_module, "_GROUP_FILES", 1)  # so that work is done before a kill
        theirs = f"{place}/theirs"
        for number in range(12):
            put(endpoint, f"{theirs}/{number:02d}.tar", tars[number % 3] + bytes(512 * number))
        _kill_and_go_on(place, theirs, tmp_path)


def _kill_and_go_on(place: str, theirs: str, tmp_path: Path) -> None:
    counting, moments, killed, reused = KilledOperations(0), random.Random(5), 0, 0

    def run(root: str, operations: KilledOperations) -> Any:
        (tmp_path / root).mkdir(exist_ok=True)
        with substituted(operations):  # of scratch, which is on the disk
            return adopt([theirs], f"{place}/{root}", block_size="8KiB", jobs=1, scratch=tmp_path / root)

    whole = run("whole", counting).manifest
    assert whole is not None
    for turn in map(str, range(20)):
        for _ in range(3):
            at = moments.randrange(counting.count // 4, counting.count)
            code = run_in_child(functools.partial(run, turn, KilledOperations(at)))
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
        result = run(turn, KilledOperations(0))
        assert result.manifest == whole
        reused += result.reused
        root = f"{place}/{turn}"
        assert verify(root, level="stored").exit_code == 0, "by checksums and ETags alone"
        assert verify(root, level="read").exit_code == 0
    assert killed
    assert reused, "work of killed runs is used"


def test_any_url_that_fsspec_knows(tmp_path: Path, tars: list[bytes]) -> None:
    place = f"/{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    for number, data in enumerate(tars):
        system.pipe_file(f"{place}/{number}.tar", data)
    adopt([f"memory:/{place}/*.tar"], tmp_path / "root", block_size="8KiB")
    assert texts(tmp_path / "root") == ALL
    assert not verify(str(tmp_path / "root"), level="decode").exit_code
    system.pipe_file(f"{place}/1.tar", tars[1].replace(b"sample 1 77", b"sample 1 99"))
    with pytest.raises(IntegrityError, match=r"memory:/.*1\.tar.*; put the file back .* or adopt it"):
        texts(tmp_path / "root")
