"""MDS folders, adopted: shards that are damaged, or cannot be read where they lie, are named."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zstandard

import shardkit
from shardkit.errors import ShardkitError, SourceError, UsageError
from shardkit.reading.read_path import ReadSettings
from shardkit_tools.adopting import adopt, located_rows
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions, mds
from tests.mds_shards import write_shards

ZSTD = zstandard.ZstdCompressor()
UNSIZED = zstandard.ZstdCompressor(write_content_size=False)
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2)
GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "mds"
AS_STORED = {"raw": "bytes", "ratio": "str"}  # a PIL picture and a decimal fraction
COLUMNS = {"image": ("bytes", None), "label": ("int", 8), "score": ("float32", 4), "text": ("str", None)}
COLUMNS |= {"ids": ("ndarray:uint16", None), "box": ("ndarray:int32:2,2", 16)}
VALUES = [
    {
        "image": image,
        "label": row - 9,
        "score": np.float32(row / 7),
        "text": "é" * (row % 6),
        "ids": np.arange(row % 9 + 1, dtype=np.uint16) * row,
        "box": np.arange(4, dtype=np.int32).reshape(2, 2) - row,
    }
    for row, image in enumerate(random.Random(3).randbytes(20 * (row % 50)) for row in range(500))
]


def encoded(row: dict[str, Any]) -> bytes:
    text, ids = row["text"].encode(), row["ids"]
    sized = struct.pack("<BB", 1 << 2, len(ids)) + ids.tobytes()  # one axis, of one byte
    sizes = struct.pack("<3I", len(row["image"]), len(text), len(sized))
    fixed = struct.pack("<q", row["label"]) + row["score"].tobytes()
    return bytes(sizes + row["image"] + fixed + text + sized + row["box"].tobytes())


def write_mds(folder: Path, borders: tuple[int, ...] = (0, 320, 500), compressor: Any = None) -> list[Path]:
    shards = [[encoded(row) for row in VALUES[first:last]] for first, last in itertools.pairwise(borders)]
    return write_shards(folder, COLUMNS, shards, compressor)


def batches(root: object) -> list[dict[str, Any]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    plan = ds.plan(global_batch=24, lanes=4, seed=5)
    with ds.loader(plan, rank=0, world=1, tensors=False) as loader:
        return [dict(batch) | {"samples": batch.samples.tolist()} for batch in loader]


@pytest.mark.parametrize("make", [build, adopt])
@pytest.mark.parametrize("column", ["label", "score", "ids", "box"])
def test_binary_columns_are_not_read_as_text(
    tmp_path: Path, column: str, make: Callable[..., object]
) -> None:
    write_mds(tmp_path / "mds")
    options = ImportOptions(field_types={column: "str"})
    with pytest.raises(UsageError, match=f"--schema {column}=str: the column is written as .*not text"):
        make(tmp_path / "mds", tmp_path / "root", options=options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda body: ZSTD.compress(body[:-1]), r"declares \d+ bytes, expected \d+; .*shardkit build"),
        (lambda body: b"".join(map(ZSTD.compress, (body[:99], body[99:]))), "declares 99 bytes"),
        (lambda body: UNSIZED.compress(body), "declares None bytes"),
        (lambda body: ZSTD.compress(body)[:-9], "broken zstd frame"),
        (lambda body: body, "broken zstd frame"),
    ],
    ids=["shorter", "two frames", "no size", "cut", "not compressed"],
)
def test_frames_of_another_size_are_refused(
    tmp_path: Path, make: Callable[[bytes], bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds, "_SCAN_ROWS", 1)
    both = iter([ZSTD.compress, make])  # the first shard is decompressed for its types
    write_mds(tmp_path / "mds", compressor=SimpleNamespace(compress=lambda body: next(both)(body)))
    with pytest.raises(SourceError, match=rf"shard\.00001\.mds\.zstd: .*{message}"):
        adopt(tmp_path / "mds", tmp_path / "root")


def test_large_compressed_shards_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "mds", compressor=ZSTD)
    monkeypatch.setattr(located_rows, "MAX_WHOLE_BYTES", 100_000)
    with pytest.raises(
        SourceError, match=r"shard\.00000\.mds\.zstd: the compressed shard has .*shardkit build"
    ):
        adopt(tmp_path / "mds", tmp_path / "root")


def cut(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes()[:-1])


def hashed(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][1]["raw_data"]["hashes"] = {"xxh64": "0" * 16}
    (folder / "index.json").write_text(json.dumps(index))


def text(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    path.write_bytes(path.read_bytes().replace("éé".encode(), b"\xff\xff\xff\xff"))


def offsets(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 2**31)
    path.write_bytes(data)


def sizes(folder: Path) -> None:
    path = folder / "shard.00001.mds"
    data = bytearray(path.read_bytes())
    (first,) = struct.unpack("<I", data[4:8])
    data[first : first + 4] = struct.pack("<I", 2**31)
    path.write_bytes(data)


def twice(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"].append(index["shards"][0])
    (folder / "index.json").write_text(json.dumps(index))


def one_name(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    for entry in index["shards"]:
        entry["column_names"][1] = entry["column_names"][0]
    (folder / "index.json").write_text(json.dumps(index))


DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, r"shard\.00001\.mds: .* the index says"),
    "hash": (hashed, r"shard\.00001\.mds: xxh64 is .*, the index says 0000"),
    "text": (text, r"shard\.00001\.mds row 0: field 'text'"),
    "offsets": (offsets, r"shard\.00001\.mds: its row offsets do not follow"),
    "twice": (twice, r"the index lists the shard 'shard\.00000\.mds' twice"),
    "one name": (one_name, r"index\.json: two columns are called"),
    "sizes": (sizes, r"shard\.00001\.mds row 0: .* its fields ask for"),
}


@pytest.mark.parametrize("case", sorted(DAMAGED))
def test_damaged_shards_are_named(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    write_mds(tmp_path / "mds")
    damage(tmp_path / "mds")
    with pytest.raises(SourceError, match=message):
        adopt([tmp_path / "mds"], tmp_path / "root", block_size="8KiB")


@pytest.mark.parametrize("make", [build, adopt])
def test_shards_that_are_not_listed_or_have_no_rows_are_reported(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    """Streaming writes a shard without rows before a row that is larger than its limit."""
    write_mds(tmp_path / "mds", (0, 0, 320, 320, 500))
    shutil.copy(tmp_path / "mds/shard.00001.mds", tmp_path / "mds/other.mds")
    result = make(tmp_path / "mds", tmp_path / "root")
    assert result.rows == 500
    assert "left out what the index does not list (1): other.mds" in result.notes
    assert "left out shards without rows (2): shard.00000.mds, shard.00002.mds" in result.notes


REFUSED: dict[str, tuple[list[str], dict[str, Any], type[ShardkitError], str]] = {
    "compressed": (["gz"], {}, SourceError, r"compressed with gz.*, and only zstd.*shardkit build"),
    "two folders": (["plain", "shapes"], {}, SourceError, "one folder at a time.*shardkit merge"),
    "free shapes": (["shapes"], {}, SourceError, r"cannot be read where it is; .*shardkit build"),
    "pictures": (
        ["plain"],
        {"options": ImportOptions(field_types={"ratio": "str"})},
        SourceError,
        "pil cannot be read as uint8",
    ),
    "stratify": (
        ["plain"],
        {"options": ImportOptions(field_types=AS_STORED), "stratify": "small"},
        UsageError,
        "are one stratum",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_what_cannot_be_adopted_is_named_with_the_way_on(tmp_path: Path, case: str) -> None:
    folders, settings, error, message = REFUSED[case]
    given = [shutil.copytree(GOLDEN / folder, tmp_path / folder) for folder in folders]
    with pytest.raises(error, match=message):
        adopt(given, tmp_path / "root", **settings)
