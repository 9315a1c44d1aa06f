"""Sources with dirt in them, built and adopted: equal samples, and what is left out is reported."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit_tools.adopting import adopt
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions

Rows = list[dict[str, Any]]
Way = Callable[..., tuple[Rows, str]]


def built(source: Path, root: Path, *, skip: bool = False, **options: Any) -> tuple[Rows, str]:
    """Return the samples of a build without shuffling, and what it says."""
    given = ImportOptions(skip_bad_rows=skip, **options)
    result = build(source, root, options=given, shuffle=False, jobs=1, on_error="skip" if skip else "raise")
    said = [*result.notes, *(one.message for one in result.skipped)]
    return [dict(sample) for sample in shardkit.open(root)], "\n".join(said)


def adopted(source: Path, root: Path, *, skip: bool = False, **options: Any) -> tuple[Rows, str]:
    """Return the samples of an adoption, and what it says."""
    result = adopt(source, root, options=ImportOptions(skip_bad_rows=skip, **options))
    return [dict(sample) for sample in shardkit.open(root)], "\n".join([*result.notes, *result.skipped])


WAYS = pytest.mark.parametrize("way", [built, adopted])


def tar_of(members: Sequence[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def members_of(rows: Sequence[int]) -> list[tuple[str, bytes]]:
    return [
        one for row in rows for one in ((f"{row}.bin", bytes([row]) * 700), (f"{row}.txt", str(row).encode()))
    ]


# ---- Tars


@WAYS
def test_a_tar_cut_anywhere_gives_the_samples_before_the_cut(way: Way, tmp_path: Path) -> None:
    whole = tar_of(members_of(range(4)))
    size = 512 + 1024 + 512 + 512  # of a sample: headers and padded data
    for cut in range(2 * size, 4 * size + 1024, 256):
        source = tmp_path / f"{cut}"
        source.mkdir()
        (source / "a.tar").write_bytes(whole[:cut])
        with pytest.raises(ShardkitError, match=r"a\.tar"):
            way(source, tmp_path / f"{cut}-strict")
        rows, said = way(source, tmp_path / f"{cut}-root", skip=True)
        assert [row["text"] for row in rows] == [str(n) for n in range(min(4, cut // size))]
        assert all(row["blob"] == bytes([int(row["text"])]) * 700 for row in rows)
        assert "a.tar" in said


@WAYS
@pytest.mark.parametrize(
    "dirt",
    [
        [("README", b"x")],
        [("0.bin", b"again"), ("0.txt", b"again")],
        [("y.txt", b"no blob")],
        [("y.bin", b"y"), ("y.txt", b"\xff\xfe")],
        [("y.pkl", b"y"), ("y.bin", b"y"), ("y.txt", b"y")],
        [("y.bin", b"y"), ("y.txt", b"y"), ("y.TXT", b"y")],
    ],
    ids=["no-extension", "key-twice", "no-field", "not-utf8", "pickle", "field-twice"],
)
def test_a_bad_sample_of_a_tar_is_lost_alone(way: Way, dirt: list[tuple[str, bytes]], tmp_path: Path) -> None:
    source = tmp_path / "tars"
    source.mkdir()
    (source / "a.tar").write_bytes(tar_of([*members_of(range(3)), *dirt, *members_of(range(3, 200))]))
    types = {"blob": "bytes", "text": "str"}
    with pytest.raises(ShardkitError, match=r"a\.tar"):
        way(source, tmp_path / "strict", field_types=types)
    rows, said = way(source, tmp_path / "root", skip=True, field_types=types)
    assert [row["text"] for row in rows] == [str(n) for n in range(200)]
    assert said.count("a.tar") == 1
