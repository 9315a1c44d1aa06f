"""The format of a build follows its rows unless it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit_tools import build
from shardkit_tools.importers import ImportOptions
from tests.command_line import output_of
from tests.pictures import PNG


def _parquet(path: Path, size: int) -> Path:
    pq.write_table(pa.table({"n": [1, 2], "clip": [b"x" * size, b"y" * (size + 2)]}), path)
    return path


def _lines(path: Path, count: int = 50) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": f"row {n}"}) + "\n" for n in range(count)))
    return path


def _pictures(folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.png").write_bytes(PNG + name.encode())
    return folder


@pytest.mark.parametrize(
    ("source", "stored"),
    [
        ("lines", ("arrow", "zstd:3")),
        ("pictures", ("tar", "none")),  # files of any size
        ("small values", ("arrow", "zstd:3")),
        ("large values", ("tar", "none")),
    ],
)
def test_the_format_follows_the_rows(tmp_path: Path, source: str, stored: tuple[str, str]) -> None:
    path = {
        "lines": lambda: _lines(tmp_path / "a.jsonl"),
        "pictures": lambda: _pictures(tmp_path / "photos"),
        "small values": lambda: _parquet(tmp_path / "a.parquet", 4094),  # 4,095 bytes on average
        "large values": lambda: _parquet(tmp_path / "a.parquet", 4096),
    }[source]()
    result = build(path, tmp_path / "data")
    assert (result.format, result.compression) == stored
    manifest = shardkit.open(tmp_path / "data").manifest
    assert (manifest.format, manifest.compression) == stored


def test_what_is_given_decides_and_the_report_says_it(tmp_path: Path) -> None:
    source = _lines(tmp_path / "a.jsonl", 5_000)
    said = output_of("build", source, tmp_path / "tar", "--format", "tar")
    assert "smaller for rows like these: --format arrow" in said
    said = output_of("build", source, tmp_path / "arrow")
    assert "arrow, zstd:3; for numbers, text and small values" in said
    assert build(source, tmp_path / "plain", format="arrow").compression == "none"
    assert build(source, tmp_path / "zstd", compression="zstd:9").format == "arrow"


def test_a_pack_is_of_numbers(tmp_path: Path) -> None:
    table = pa.table({"tokens": [[1, 2, 3], [4]], "page": [b"x" * 9000, b"y" * 9000]})
    pq.write_table(table, tmp_path / "a.parquet")
    packed = build(
        tmp_path / "a.parquet",
        tmp_path / "data",
        pack={"tokens": 4},
        options=ImportOptions(field_types={"tokens": "int32[*]"}),
    )
    assert packed.format == "arrow"


def test_appended_samples_take_the_format_of_the_version(tmp_path: Path) -> None:
    source, root = _lines(tmp_path / "a.jsonl"), tmp_path / "data"
    build(source, root, format="tar")
    build(_lines(tmp_path / "b.jsonl", 7), root, append=True)
    assert shardkit.open(root).manifest.format == "tar"
    build(source, tmp_path / "arrow")
    with shardkit.create(tmp_path / "arrow", {"id": "int64", "text": "str"}, append=True) as writer:
        writer.add({"id": 1, "text": "more"}, key="more")
    assert shardkit.open(tmp_path / "arrow").manifest.format == "arrow"
