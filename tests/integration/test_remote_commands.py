"""The command line on roots in a bucket: build, look, verify, export; and a served cache."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

import shardkit
from shardkit_tools.main import run
from tests.servers.object_stores import SECRET_KEY, s3_environment

BUCKET = "shards"
BUCKETS = (BUCKET,)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = 0
    try:
        run(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    output = capsys.readouterr()
    assert SECRET_KEY not in output.out + output.err
    return code, output.out + output.err


def test_a_root_in_a_bucket(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in s3_environment(server).items():
        monkeypatch.setenv(name, value)
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": f"row {n}", "label": n % 2}) + "\n" for n in range(50)))
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}/cats"
    code, told = call(capsys, "build", str(source), root, "--stratify", "label")
    assert code == 0, told
    code, _ = call(capsys, "build", str(source), str(tmp_path / "local"), "--stratify", "label")
    assert code == 0
    assert shardkit.open(root).manifest.id == shardkit.open(tmp_path / "local").manifest.id
    for arguments in (["ls", root], ["show", root], ["log", root], ["cat", root, "3"], ["tag", root, "v1"],
                      ["show", f"{root}@v1"], ["verify", root]):  # fmt: skip
        code, told = call(capsys, *arguments)
        assert code == 0, (arguments, told)
    code, told = call(capsys, "show", f"s3://{BUCKET}/nothing/here")
    assert code == 1
    assert "no dataset at s3://shards/nothing/here" in told


def test_single_writer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a"}\n')
    root = f"memory://{uuid.uuid4().hex}"
    code, told = call(capsys, "build", str(source), root)
    assert code == 1
    assert "put-if-absent does not hold" in told
    code, told = call(capsys, "build", str(source), root, "--single-writer")
    assert code == 0, told
    assert shardkit.open(root)[0] == {"text": "a"}
