from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import shardkit
from shardkit.errors import NotFoundError, ShardkitError, SourceError, UsageError
from shardkit_tools.adopting import adopt
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import open_source, remote_files
from tests.importer_conformance import check_importer, read_all
from tests.pictures import PNG


@pytest.fixture
def bucket() -> Iterator[str]:
    system = fsspec.filesystem("memory")
    yield "memory://bucket"
    system.rm("/bucket", recursive=True)


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as stream:
        stream.write(data)


def test_folders_files_and_globs_behind_a_url(bucket: str, tmp_path: Path) -> None:
    put(f"{bucket}/photos/cat/1.png", PNG + b"1")
    put(f"{bucket}/photos/dog/2.png", PNG + b"2")
    put(f"{bucket}/photos/.hidden/3.png", b"")
    importer = open_source(f"{bucket}/photos")
    assert importer.classes == ("cat", "dog")
    assert [row.source_name for row in check_importer(importer)] == ["cat/1.png", "dog/2.png"]
    assert len(read_all(open_source(f"{bucket}/photos/*/1.png"))) == 1
    put(f"{bucket}/rows.jsonl", b'{"a": 1}\n{"a": 2}\n')
    assert [row.sample["a"] for row in check_importer(open_source(f"{bucket}/rows.jsonl"))] == [1, 2]
    result = build(f"{bucket}/rows.jsonl", tmp_path / "root")
    assert result.rows == 2
    assert shardkit.open(tmp_path / "root").source(0) is not None
    for path in (tmp_path / "root").rglob("*"):
        assert not path.is_file() or b"memory:" not in path.read_bytes(), f"{path} holds the URL"


def test_errors_behind_a_url(bucket: str) -> None:
    with pytest.raises((NotFoundError, SourceError), match=r"memory://bucket/nothing"):
        open_source(f"{bucket}/nothing")
    put(f"{bucket}/a.jsonl", b'{"a": 1}\n')
    importer = open_source(f"{bucket}/a.jsonl")
    put(f"{bucket}/a.jsonl", b'{"a": 1}\n{"a": 2}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl: changed since it was listed"):
        read_all(importer)
    fsspec.filesystem("memory").rm("/bucket/a.jsonl")
    put(f"{bucket}/b", b"")
    with pytest.raises(SourceError, match=r"a\.jsonl: cannot be read \(FileNotFoundError"):
        read_all(importer)


@pytest.mark.parametrize("url", ["ftp://me:secret@host/x.csv", "https://host/x.csv?X-Amz-Signature=secret"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as error:
        open_source(url)
    assert "secret" not in str(error.value)


def test_unknown_protocols() -> None:
    with pytest.raises(ShardkitError, match="gopher"):
        open_source("gopher://host/x.csv")


@pytest.mark.parametrize("key", ["a//b", "/a", "a/../b", "./a", "a\n"])
def test_keys_that_no_client_reads_are_named_or_left_out(key: str) -> None:
    left_out: dict[str, str] = {}
    assert [remote_files._is_readable("s3://b", one, left_out) for one in (key, "a/b", "ü ?#%/c")] == [
        False,
        True,
        True,
    ]
    assert list(left_out) == [key]
    with pytest.raises(SourceError, match=r"s3://b: key .*--on-error skip"):
        remote_files._is_readable("s3://b", key, None)


def test_plain_http_servers_are_read_but_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"x": 1}\n')
    (folder / "large.jsonl").write_text('{"x": 1}\n' * 600_000)  # read in several pieces
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # it ignores Range
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert [row.sample for row in read_all(open_source(f"{url}/a.jsonl"))] == [{"x": 1}]
        with pytest.raises(SourceError, match="whole files where a range is asked for"):
            adopt(f"{url}/a.jsonl", tmp_path / "root")
        with pytest.raises(SourceError, match="whole files where a range is asked for"):
            open_source(f"{url}/large.jsonl")
        with pytest.raises(SourceError, match="404"):
            open_source(f"{url}/b.jsonl")
        server.shutdown()
    with pytest.raises(SourceError, match="Cannot connect"):
        open_source(f"{url}/a.jsonl")
