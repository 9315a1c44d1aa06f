"""Arrow IPC files, streams, Feather and saved datasets, adopted: equal to their libraries' reading and to a build."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pytest

import shardkit
from shardkit.copies.verify import verify
from shardkit.errors import IntegrityError, SourceError
from shardkit_tools.adopting import adopt
from shardkit_tools.building.build_run import build
from tests.integration.test_adopt_parquet import batches, expected, indexes, samples, table

Write = Callable[[Path, Any], None]


def write_file(path: Path, rows: Any) -> None:
    with pa.ipc.new_file(path, rows.schema) as writer:
        writer.write_table(rows, 64)


def write_stream(path: Path, rows: Any) -> None:
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows, 64)


def write_zstd(path: Path, rows: Any) -> None:
    with pa.ipc.new_file(path, rows.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(rows.slice(0, 30), 64)
        writer.write_table(rows.slice(30), 64)


def write_feather(path: Path, rows: Any) -> None:
    pa.feather.write_feather(rows, path, chunksize=64)  # lz4


@pytest.mark.parametrize("write", [write_file, write_stream, write_zstd, write_feather])
def test_rows_are_what_pyarrow_reads(tmp_path: Path, write: Write) -> None:
    (tmp_path / "tables").mkdir()
    for number in range(2):
        write(tmp_path / "tables" / f"{number}.arrow", table(300 * number, 300))
    result = adopt([tmp_path / "tables"], tmp_path / "adopted")
    assert result.rows == 600
    rows = pa.concat_tables([table(0, 300), table(300, 300)]).to_pylist()
    assert samples(tmp_path / "adopted") == list(map(expected, rows))
    build(str(tmp_path / "tables"), tmp_path / "built", shuffle=False)
    assert shardkit.open(tmp_path / "built").schema == shardkit.open(tmp_path / "adopted").schema
    assert samples(tmp_path / "built") == samples(tmp_path / "adopted")
    for numbers, found in batches(tmp_path / "adopted", ["id", "text"]):
        assert found["id"] == numbers
        assert found["text"] == [rows[number]["text"] for number in numbers]
    assert not verify(tmp_path / "adopted").damaged


def test_a_saved_dataset_is_what_datasets_reads(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    numbers = range(2500)
    rows = {
        "n": list(numbers),
        "text": [f"text {n}" for n in numbers],
        "tags": [["a", "b"][: n % 3] for n in numbers],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved", num_shards=2)
    adopt([tmp_path / "saved"], tmp_path / "adopted")
    ds = shardkit.open(tmp_path / "adopted")
    theirs = datasets.load_from_disk(tmp_path / "saved")
    assert ds[:] == list(theirs)
    datasets.Dataset.from_dict({"n": [1]}).save_to_disk(tmp_path / "other")
    with pytest.raises(SourceError, match=r"one folder at a time.*shardkit merge"):
        adopt([tmp_path / "saved", tmp_path / "other"], tmp_path / "root")


@pytest.mark.parametrize("write", [write_stream, write_zstd])
def test_a_flip_in_any_block_is_found_and_named(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "a.arrow"
    write(path, table(0, 300))
    adopt([path], tmp_path / "root")
    index, data, chance = indexes(tmp_path / "root")[0], path.read_bytes(), random.Random(3)
    for block, span in enumerate(index.spans):
        at = chance.randrange(span.offset, span.offset + span.size)
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :])
        assert len(verify(tmp_path / "root").damaged) == 1
        with pytest.raises(IntegrityError, match=rf"block {block} in .*a\.arrow"):
            batches(tmp_path / "root", ["id"])
    for at in (0, index.head_size - 1, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert len(verify(tmp_path / "root").damaged) == 1, at


def test_what_cannot_be_adopted_is_named(tmp_path: Path) -> None:
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
