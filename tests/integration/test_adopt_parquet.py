"""Parquet and Arrow files, adopted: equal to pyarrow's reading and to a build, read by column, or refused."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import FormatError, IntegrityError, SourceError, UsageError
from shardkit.formats import ShardIndex
from shardkit.reading.read_path import ReadSettings
from shardkit_tools.adopting import adopt, encoded_blocks
from shardkit_tools.adopting.encoded_blocks import EncodedBlocks
from shardkit_tools.building.build_run import build
from shardkit_tools.importers import ImportOptions

# ---- Parquet files


BUCKETS = ("their-tables",)
SETTINGS = ReadSettings(deadline_s=30, attempt_s=5, cool_down_s=0.2)


def table(first: int, rows: int) -> Any:
    numbers = range(first, first + rows)
    chance = np.random.default_rng(first)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": [f"row {n} ä" * (n % 7) for n in numbers],
            "image": [{"bytes": chance.bytes(n % 400), "path": None} for n in numbers],
            "vector": pa.array(chance.normal(size=(rows, 4)).tolist(), pa.list_(pa.float32(), 4)),
            "tokens": pa.array([list(range(n % 9)) for n in numbers], pa.list_(pa.int32())),
            "score": pa.array([None if n % 3 == 0 else n / 2 for n in numbers], pa.float64()),
            "flag": pa.array([n % 2 == 0 for n in numbers]),
            "turns": [[{"role": "user", "content": str(n)}] for n in numbers],
            "word": pa.array([["x", "yy"][n % 2] for n in numbers]).dictionary_encode(),
            "when": pa.array([n * 1000 for n in numbers], pa.timestamp("us")),
        }
    )


def write_tables(folder: Path) -> tuple[list[Path], list[dict[str, Any]]]:
    """Write two files, one of which has row groups of different sizes; return paths and rows as pyarrow reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "a.parquet", folder / "b.parquet"]
    pq.write_table(table(0, 500), paths[0], row_group_size=64)
    with pq.ParquetWriter(paths[1], table(0, 1).schema, compression="zstd") as writer:
        first = 500
        for rows in (50, 80, 80, 7, 80, 3):
            writer.write_table(table(first, rows))
            first += rows
    return paths, [row for path in paths for row in pq.read_table(path).to_pylist()]


def expected(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "image": row["image"]["bytes"]}


def plain(sample: Any) -> dict[str, Any]:
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in dict(sample).items()
        if name != "__key__"
    }


def samples(root: object) -> list[dict[str, Any]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    return [plain(sample) for sample in ds[:]]


def batches(
    root: object, fields: Sequence[str] | None = None, **settings: Any
) -> list[tuple[list[int], Any]]:
    ds = shardkit.open(str(root), settings=SETTINGS)
    plan = ds.plan(global_batch=24, lanes=4, seed=5, **settings)
    with ds.loader(plan, rank=0, world=1, tensors=False, fields=fields) as loader:
        return [(b.samples.tolist(), {name: _rows(b[name]) for name in fields or ds.schema}) for b in loader]


def _rows(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        values, borders = value
        return [values[a:b].tolist() for a, b in pairwise(borders)]
    return list(value.tolist()) if isinstance(value, np.ndarray) else list(value)


def indexes(root: Path) -> list[ShardIndex]:
    ds = shardkit.open(root)
    return [ds.reader.index(shard) for shard in range(len(ds.table))]


@pytest.mark.parametrize("field", ["id", "image", "tokens", "turns"])
def test_a_flip_in_any_range_is_found_by_the_loader_of_this_field_only(tmp_path: Path, field: str) -> None:
    (path, _), rows = write_tables(tmp_path / "tables")
    adopt([path], tmp_path / "root")
    index, data = indexes(tmp_path / "root")[0], path.read_bytes()
    chance = random.Random(field)
    for block in range(index.blocks):
        found = index.field_range(block, field)
        at = chance.randrange(found.offset, found.offset + found.size)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        assert len(verify(tmp_path / "root").damaged) == 1
        with pytest.raises(IntegrityError, match=rf"block {block} in .*a\.parquet"):
            batches(tmp_path / "root", [field])
        with pytest.raises(IntegrityError, match=rf"block {block} in .*a\.parquet.*; put the file back"):
            batches(tmp_path / "root")
        for numbers, other in batches(tmp_path / "root", ["score", "when"]):
            assert other["when"] == [number * 1000 for number in numbers]
    path.write_bytes(data)
    assert samples(tmp_path / "root") == list(map(expected, rows[:500]))


def test_files_that_differ_are_read_as_in_a_build(tmp_path: Path) -> None:
    source = tmp_path / "tables"
    for name, columns in {
        "lang=de/a": {"n": pa.array([1, 2], pa.int32()), "x": pa.array([1.5, 2.5], pa.float32())},
        "lang=en/b": {"n": pa.array([2**40], pa.int64()), "y": ["only here"]},
    }.items():
        (source / name).parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), source / f"{name}.parquet")
    adopt([source], tmp_path / "adopted")
    build(str(source), tmp_path / "built", shuffle=False)
    found = samples(tmp_path / "adopted")
    assert found == samples(tmp_path / "built")
    assert found[2] == {"n": 2**40, "x": None, "lang": "en", "y": "only here"}
    ds = shardkit.open(tmp_path / "adopted")
    block = ds.reader.read(1, 0, fields=["y", "lang"])
    assert [block.column(name).payload(0) for name in ("y", "lang")] == [b"only here", b"en"]
    assert ds.reader.read(0, 0, fields=["y"]).present("y").tolist() == [False, False]


def test_what_cannot_be_adopted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path, _), _ = write_tables(tmp_path / "tables")
    monkeypatch.setattr(
        encoded_blocks,
        "EncodedBlocks",
        lambda task, schema, values, _: EncodedBlocks(task, schema, values, 10_000),
    )
    with pytest.raises(SourceError, match=r"a\.parquet: row group 0 has \d+ bytes.*shardkit build"):
        adopt([path], tmp_path / "root")
    monkeypatch.undo()
    pq.write_table(table(0, 0), tmp_path / "none.parquet")
    with pytest.raises(SourceError, match="the files have no rows"):
        adopt([tmp_path / "none.parquet"], tmp_path / "root")
    result = adopt([path, tmp_path / "none.parquet"], tmp_path / "root", dry_run=True)
    assert result.notes == ("left out what has no rows (1): none.parquet",)
    with pytest.raises(SourceError, match=r"--schema score=float64\?"):
        adopt([path], tmp_path / "root", options=ImportOptions(field_types={"score": "float64"}))
    path.write_bytes(path.read_bytes()[:-20] + os.urandom(20))
    with pytest.raises(SourceError, match=r"a\.parquet: not a readable Parquet file"):
        adopt([path], tmp_path / "root")
    with pytest.raises(UsageError, match="one stratum"):
        adopt([tmp_path / "tables" / "b.parquet"], tmp_path / "root", stratify="flag")


def damaged_page(path: Path, *, checksums: bool = False) -> None:
    """Write texts, and damage the data page of the second row group of a column."""
    texts = pa.table({"id": range(400), "text": [f"{n} " * 50 for n in range(400)]})
    pq.write_table(texts, path, row_group_size=200, compression="none", use_dictionary=False,
                   write_page_checksum=checksums)  # fmt: skip
    chunk = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[middle : middle + 100] = b"\xff" * 100
    path.write_bytes(data)


@pytest.mark.parametrize("checksums", [False, True])
def test_a_damaged_page_is_refused_by_check_decode_and_reaches_no_batch(
    tmp_path: Path, checksums: bool
) -> None:
    path = tmp_path / "a.parquet"
    damaged_page(path, checksums=checksums)
    with pytest.raises(SourceError, match=r"a\.parquet.*(damaged|cannot be read)"):
        adopt([path], tmp_path / "root", options=ImportOptions(check="decode"))
    adopt([path], tmp_path / "root")
    assert not verify(tmp_path / "root").damaged  # the bytes are those that were adopted
    with pytest.raises(FormatError, match=r"block 1.*cannot be decoded"):
        batches(tmp_path / "root")
    assert sum(len(numbers) for numbers, _ in batches(tmp_path / "root", ["id"])) == 400 // 24 * 24


def test_a_damaged_first_row_group_is_refused_by_default(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [{"bytes": None, "path": f"{n}.jpg"} for n in range(9)]}, schema=pa.schema(
        {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})})), path)  # fmt: skip
    with pytest.raises(SourceError, match="holds no bytes, only a path"):
        adopt([path], tmp_path / "root", options=ImportOptions(field_types={"image": "bytes"}))


@pytest.mark.parametrize("settings", [
    {}, {"use_dictionary": False}, {"compression": "zstd", "data_page_version": "2.0"}, {"data_page_size": 2000},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}, {"dictionary_pagesize_limit": 3000},
    {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
])  # fmt: skip
def test_the_expected_memory_of_a_block_is_about_that_of_its_values(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    chance = random.Random(3)
    words = [chance.randbytes(chance.randrange(5, 400)).hex() for _ in range(50)]
    rows = 3000
    columns = {
        "n": pa.array(range(rows), pa.int32()),
        "word": chance.choices(words, k=rows),
        "text": [chance.choice(words) + str(n) for n in range(rows)],
        "same": ["a prompt that is the same in every row " * 50] * rows,
        "maybe": [None if n % 3 else words[n % 7] for n in range(rows)],
        "tokens": pa.array([list(range(n % 300)) for n in range(rows)], pa.list_(pa.int16())),
        "turns": [[{"role": "user", "content": words[n % 50]}] * (n % 4) for n in range(rows)],
        "blob": pa.array([bytes(16)] * rows, pa.binary(16)),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        own = {key: value for key, value in settings.items() if key != "column_encoding" or name in value}
        pq.write_table(pa.table({name: column}), path, row_group_size=1000, **own)
        for check in ("none", "decode"):
            adopt([path], tmp_path / f"{name} {check}", options=ImportOptions(check=check))
        expected, exact = (indexes(tmp_path / f"{name} {check}")[0] for check in ("none", "decode"))
        ratio = expected.block_raw_size / exact.block_raw_size
        assert ((ratio > 0.9) & (ratio < 1.5)).all(), (name, ratio)
        found = shardkit.open(tmp_path / f"{name} none").reader.read(0, 1)
        assert found.nbytes == int(exact.block_raw_size[1])


def test_a_dictionary_that_could_fill_the_memory_is_decoded(tmp_path: Path) -> None:
    """One long text in a dictionary of short ones: their mean says nothing, so the values are counted."""
    path, rows = tmp_path / "a.parquet", 40_000
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0 if n % 100 == 0 else 1 + n % 7 for n in range(rows)], pa.int32()),
        pa.array(["long" * 60_000, *map(str, range(7))]),
    )
    pq.write_table(pa.table({"text": texts}), path, dictionary_pagesize_limit=1 << 24)
    adopt([path], tmp_path / "root")
    index = indexes(tmp_path / "root")[0]
    assert int(index.block_raw_size[0]) == 400 * 240_000 + (rows - 400) + 16 * rows
    monstrous = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["long" * 60_000]))
    pq.write_table(pa.table({"text": monstrous}), path, dictionary_pagesize_limit=1 << 24)
    with pytest.raises(SourceError, match=r"row group 0 has \d+ bytes, and a read of one of its rows"):
        adopt([path], tmp_path / "other")


# ---- Arrow IPC files, streams and Feather


def write_file(path: Path, rows: Any) -> None:
    with pa.ipc.new_file(path, rows.schema) as writer:
        writer.write_table(rows, 64)


def write_stream(path: Path, rows: Any) -> None:
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows, 64)


def test_what_cannot_be_adopted_of_arrow_files_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    words = pa.array(["x", "y"]).dictionary_encode(), pa.array(["z", "w"]).dictionary_encode()
    schema = pa.schema([("word", words[0].type)])
    with pa.ipc.new_stream(path, schema) as writer:
        for array in words:
            writer.write_batch(pa.RecordBatch.from_arrays([array], schema=schema))
    with pytest.raises(SourceError, match=r"a\.arrow: a dictionary changes.*shardkit build"):
        adopt([path], tmp_path / "root")
    write_stream(path, table(0, 100))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(SourceError, match=r"a\.arrow: record batch 1 cannot be read"):
        adopt([path], tmp_path / "root")
    write_file(path, table(0, 0))
    with pytest.raises(SourceError, match="the files have no rows"):
        adopt([path], tmp_path / "root")
