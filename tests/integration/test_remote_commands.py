"""The command line on roots in a bucket: build, look, verify, export; and at wrong endpoints."""

from __future__ import annotations

import json
import math
import socket
import time
import uuid
from pathlib import Path

import pytest

import shardkit
from shardkit.stores.waiting import FIRST_CONTACT
from tests.command_line import call, output_of
from tests.servers.object_stores import s3_environment
from tests.servers.serving import Requests, serving

BUCKET = "shards"
BUCKETS = (BUCKET,)


def test_a_root_in_a_bucket(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {n}", "label": n % 2}) + "\n" for n in range(50)))
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}/cats"
    output_of("build", source, root, "--stratify", "label")
    output_of("build", source, tmp_path / "local", "--stratify", "label")
    assert shardkit.open(root).manifest.id == shardkit.open(tmp_path / "local").manifest.id
    for arguments in (["ls", root], ["show", root], ["log", root], ["cat", root, "3"], ["tag", root, "v1"],
                      ["show", f"{root}@v1"], ["verify", root]):  # fmt: skip
        output_of(*arguments)
    told = output_of("show", f"s3://{BUCKET}/nothing/here", code=1)
    assert "no dataset at s3://shards/nothing/here" in told


def test_single_writer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a"}\n')
    root = f"memory://{uuid.uuid4().hex}"
    assert "put-if-absent does not hold" in output_of("build", source, root, code=1)
    output_of("build", source, root, "--single-writer")
    assert shardkit.open(root)[0] == {"text": "a"}


@pytest.mark.parametrize(
    ("endpoint", "command"),
    [
        ("refused", "show"),
        ("silent", "show"),
        ("unknown", "show"),
        ("refused", "verify"),
        ("silent", "build"),
    ],
)
def test_a_wrong_endpoint_is_named_soon(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    endpoint: str,
    command: str,
) -> None:
    """Far from the two minutes for which a store that has answered before is asked again."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "x-1",
    }.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    source = [str(tmp_path / "rows.jsonl")] if command == "build" else []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if endpoint == "refused":
            silent.close()
        url = "http://endpoint.invalid" if endpoint == "unknown" else f"http://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        started = time.monotonic()
        code, told = call(command, *source, f"s3://{uuid.uuid4().hex}/d", "--timeout", "1")
    assert time.monotonic() - started < 60
    assert code == (3 if command == "verify" else 1)
    assert f"{url} (AWS_ENDPOINT_URL)" in told
    assert math.isinf(FIRST_CONTACT.limit_s), "programs wait as long as for any other answer"


class NothingThere(Requests):
    """Answers as a web server that is no object store."""

    def respond(self) -> None:
        self.reply(404, {"Content-Length": "0"})


def test_an_endpoint_without_anything_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "a-1")
    with serving(NothingThere) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        code, told = call("show", f"s3://{uuid.uuid4().hex}/d")
    assert code == 1
    assert "no dataset at s3://" in told
    assert f"{url} (AWS_ENDPOINT_URL)" in told


@pytest.mark.parametrize(
    ("status", "error", "command", "code", "advice"),
    [
        (301, "PermanentRedirect", "verify", 3, "check bucket, endpoint, region"),
        (403, "RequestTimeTooSkewed", "verify", 3, "this machine's clock is wrong"),
        (403, "InvalidObjectState", "verify", 3, "the object is archived; restore it"),
        (501, "NotImplemented", "build", 1, "--single-writer"),
        (507, "XMinioStorageFull", "build", 1, "no room is left"),
    ],
)
def test_an_answer_that_would_not_change_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    status: int,
    error: str,
    command: str,
    code: int,
    advice: str,
) -> None:
    class Answers(Requests):
        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if command == "build" and self.command != "PUT":  # a new root
                self.reply(404, {"Content-Length": "0"})
                return
            told = f"<Error><Code>{error}</Code></Error>".encode()
            self.reply(status, {"Content-Length": str(len(told))}, told)

    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    source = [str(tmp_path / "rows.jsonl")] if command == "build" else []
    with serving(Answers) as url:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)
        started = time.monotonic()
        told = output_of("--timeout", "50", command, *source, f"s3://{uuid.uuid4().hex}/d", code=code)
    assert time.monotonic() - started < 45, "it is not asked again"
    assert f"HTTP {status}" in told
    assert advice in told


def test_the_timeout_is_a_number_of_seconds() -> None:
    for text in ("soon", "-1", "0", "nan", "inf", ""):
        assert "--timeout" in output_of("ls", "data", "--timeout", text, code=2)
