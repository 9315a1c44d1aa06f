"""A build that cannot fit on its disks does not begin; a dry run says what will be needed and what is free."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import shardkit_tools
from shardkit.errors import StoreFullError
from shardkit_tools.main import make_app

Usage = namedtuple("Usage", "total used free")
ROW = 4000


def source(tmp_path: Path, rows: int = 1000) -> str:
    np.save(tmp_path / "a.npy", np.ones((rows, ROW // 4), np.int32))
    return str(tmp_path / "a.npy")


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 0, size))


@pytest.mark.parametrize(("compression", "share"), [("none", 2), ("zstd", 1)])
def test_scratch_and_shards_on_one_disk_share_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, share: int
) -> None:
    given = source(tmp_path)
    named: dict[str, Any] = {"compression": compression, "format": "arrow"}
    free(monkeypatch, int(share * 0.85 * 1000 * ROW))
    with pytest.raises(
        StoreFullError, match=r"tmp: .* MiB free, but .* needs at least .* MiB there .*--scratch"
    ):
        shardkit_tools.build(given, tmp_path / "root", **named)
    assert [path.name for path in (tmp_path / "root" / "tmp").iterdir()] == []
    free(monkeypatch, int(share * 1000 * ROW))
    assert shardkit_tools.build(given, tmp_path / "root", **named).rows == 1000


def test_text_may_become_a_fraction_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("n\n" + "".join(f"{n:020d}.0\n" for n in range(1000)))
    free(monkeypatch, 13_000)
    assert shardkit_tools.build(tmp_path / "a.csv", tmp_path / "root").rows == 1000
    free(monkeypatch, 1_000)
    with pytest.raises(StoreFullError):
        shardkit_tools.build(tmp_path / "a.csv", tmp_path / "other")


def test_a_dry_run_tells_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = source(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    room = shutil.disk_usage(tmp_path).free
    result = shardkit_tools.build(
        given, tmp_path / "new" / "root", format="tar", dry_run=True, scratch=scratch
    )
    assert [(need.what, need.folder) for need in result.space] == [
        ("scratch", str(scratch)),
        ("shards", str(tmp_path / "new" / "root")),
    ]
    for need in result.space:
        assert need.need_bytes == result.raw_bytes > 1000 * ROW
        assert abs(need.free_bytes - room) < 0.5 * room
    assert not (tmp_path / "new").exists()
    free(monkeypatch, 3 * 2**30)
    told = CliRunner().invoke(
        make_app("build"), ["build", given, str(tmp_path / "new"), "--format", "tar", "--dry-run"]
    )
    assert told.exit_code == 0, told.output
    assert f"about 4.88 MiB in {tmp_path / 'new'}, 3 GiB free" in told.output
