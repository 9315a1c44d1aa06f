"""Tar details: names, extensions, headers, sizes beyond 4 GiB, strict parsing, hostile members with valid digests."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkit.errors import ConfigurationError, FormatError, IntegrityError, SampleError
from shardkit.formats import (
    FixedColumn,
    Row,
    Schema,
    ShardIndex,
    ShardWriter,
    block_starts,
    fit_key,
    max_key_bytes,
    raw_row_bytes,
    read_block,
    xxh3,
)
from shardkit.formats.reading import tar_column
from shardkit.formats.schema import DTYPES
from shardkit.formats.tar_members import member_header, npy_header, sniff_extension
from shardkit.formats.writing import MAX_SAMPLE_BYTES, check_keys
from tests.format_conformance import EXAMPLE_SCHEMA, example_samples, stored_block, write_shard
from tests.whole_shard import tail_offset


def tar_shard(
    schema: dict[str, str], samples: list[dict[str, Any]], rows: int = 8
) -> tuple[bytes, ShardIndex]:
    return write_shard(samples, Schema.parse(schema), format="tar", compression="none", block_rows=rows)


@pytest.mark.parametrize(
    ("payload", "extension"),
    [
        (b"\xff\xd8\xff\xe0", "jpg"),
        (b"\x89PNG\r\n\x1a\n", "png"),
        (b"GIF89a", "gif"),
        (b"RIFF\0\0\0\0WEBPVP8", "webp"),
        (b"BM\x0a\x00\x00\x00\0\0\0\0", "bmp"),
        (b"BMW is a car", "bin"),
        (b"II*\x00", "tiff"),
        (b"MM\x00*", "tiff"),
        (b"RIFF\0\0\0\0WAVE", "wav"),
        (b"ID3\x04", "mp3"),
        (b"\xff\xfb\x90\x00", "mp3"),
        (b"\xff\xff\xff\xff", "bin"),
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"\0\0\0\x18ftypmp42", "mp4"),
        (b"%PDF-1.7", "pdf"),
        (b"", "bin"),
        (b"\xff", "bin"),
        (b"RIFF", "bin"),
    ],
)
def test_extensions_are_sniffed(payload: bytes, extension: str) -> None:
    assert sniff_extension(payload) == extension


@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_headers_are_those_of_numpy(dtype: str) -> None:
    for text, shape in (
        (dtype, ()),
        (f"{dtype}[3]", (3,)),
        (f"{dtype}[2,5,7]", (2, 5, 7)),
        (f"{dtype}[*]", (11,)),
    ):
        kind = Schema.parse({"x": text})["x"]
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.zeros(shape, np.dtype(dtype).newbyteorder("<")), version=(1, 0))
        header = npy_header(kind, 11)
        assert buffer.getvalue()[: len(header)] == header


@pytest.mark.parametrize("size", [0, 1, 511, 2**32 - 1, 2**32, 5 * 2**30, 2**33 - 1])
def test_headers_of_any_size_are_read_by_tarfile(size: int) -> None:
    info = tarfile.TarInfo.frombuf(member_header(b"key.image.jpg", size), "ascii", "strict")
    assert (info.name, info.size, info.type, info.mode) == ("key.image.jpg", size, b"0", 0o644)


def test_headers_beyond_ustar_are_refused() -> None:
    with pytest.raises(SampleError):
        member_header(b"key.image.jpg", 2**33)
    with pytest.raises(SampleError):
        member_header(b"k" * 101, 1)


def test_columns_beyond_4_gib_are_gathered_by_64_bit_offsets(tmp_path: Path) -> None:
    schema = Schema.parse({"grid": "int32[2]", "n": "int64", "text": "str"})
    rows = [np.array([1, 2], "<i4"), np.array([-3, 4], "<i4"), np.array([5, 6], "<i4")]
    places = [0, 2**32 + 512, 2**32 + 2048]  # no constant pitch
    path = tmp_path / "sparse"
    header = npy_header(schema["grid"])
    with path.open("wb") as file:
        for place, row in zip(places, rows, strict=True):
            file.seek(place)
            file.write(header + row.tobytes() + b"-42" + b"\xc3\xa4")
    data = np.memmap(path, np.uint8, "r")
    view = np.asarray(data)
    starts = np.array(places, np.int64)
    grid = tar_column(view, starts, np.full(3, len(header) + 8), schema["grid"], "grid")
    numbers = tar_column(view, starts + len(header) + 8, np.full(3, 3), schema["n"], "n")
    # not the first row's: that text is text is checked in one pass over the range of the rows, here of 4 GiB of zeros
    text = tar_column(view, starts[1:] + len(header) + 11, np.full(2, 2), schema["text"], "text")
    assert isinstance(grid, FixedColumn)
    assert isinstance(numbers, FixedColumn)
    assert grid.values.tolist() == [[1, 2], [-3, 4], [5, 6]]
    assert numbers.values.tolist() == [-42] * 3
    assert [text.payload(row) for row in range(2)] == ["ä".encode()] * 2


def test_an_index_whose_blocks_begin_past_4_gib_survives() -> None:
    _, index = tar_shard({"x": "bytes"}, [{"x": b"abc"}, {"x": b"de"}, {"x": b""}], rows=1)
    sizes = np.array([5 * 2**30, 1024, 6 * 2**30], np.uint64)
    assert index.field_size is not None
    big = dataclasses.replace(
        index,
        block_size=sizes,
        block_raw_size=sizes,
        block_offset=np.cumsum(sizes, dtype=np.uint64) - sizes,
        shard_size=int(sizes.sum()) + 1024,
        field_size=np.array([[5 * 2**30 - 1024], [2], [6 * 2**30 - 512]], np.uint64),
    )
    again = ShardIndex.from_bytes(big.to_bytes())
    assert again.block_offset.tolist() == [0, 5 * 2**30, 5 * 2**30 + 1024]
    assert tail_offset(again) == 11 * 2**30 + 1024
    assert again.field_size is not None
    assert int(again.field_size[2, 0]) == 6 * 2**30 - 512


def test_a_sample_above_5_gib_is_refused_by_name() -> None:
    class Huge(bytes):
        """Says that it is big without being it."""

        def __len__(self) -> int:
            return MAX_SAMPLE_BYTES - 5

    for format in ("tar", "arrow"):
        writer = ShardWriter(
            io.BytesIO(), format=format, schema=Schema.parse({"x": "bytes", "y": "bytes"}), block_rows=1
        )
        with pytest.raises(SampleError, match=r"'big'.*5 GiB"):
            writer.write_block([Row("big", (Huge(), b"123456"))])


def test_unknown_settings_are_refused() -> None:
    schema = Schema.parse({"x": "bytes"})
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "arrow", "compression": "lz4"}, "lz4"),
        ({"compression": "zstd"}, "tar shards are not compressed"),
        ({"compression": "gzip"}, "gzip"),
        ({"format": "arrow", "compression": "zstd:20"}, "zstd:19"),
        ({"format": "arrow", "compression": "zstd:03"}, "zstd:03"),
        ({"format": "zip"}, "zip"),
    )
    for settings, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            ShardWriter(io.BytesIO(), schema=schema, block_rows=1, **settings)


def test_key_rules() -> None:
    long_schema = Schema.parse({"f" * 40: "bytes"})
    assert max_key_bytes(long_schema, "tar") == 54
    assert max_key_bytes(long_schema, "arrow") == max_key_bytes(Schema.parse({"x": "bytes"}), "tar") == 80
    tar_bytes, _ = write_shard(
        [{"f" * 40: b"II*\x00"}], long_schema, format="tar", compression="none", block_rows=1, keys=["k" * 54]
    )
    with tarfile.open(fileobj=io.BytesIO(tar_bytes)) as archive:
        assert archive.getnames() == ["k" * 54 + "." + "f" * 40 + ".tiff"]
    assert fit_key("cat-17") == "cat-17"
    odd = ["../../etc/passwd", "a b", "", "k" * 81, "größe.jpg", "a\x00", "\udcff", "a_b", "a.b", "a/b"]
    fitted = [fit_key(name) for name in odd]
    assert len(set(fitted)) == len(odd)
    check_keys(fitted, 80)
    assert fit_key("a.b") == "a_b-2e7ca3e6f0cdc0aa"[:4] + fit_key("a.b")[4:]
    assert [fit_key(name, 20) for name in odd] == [fit_key(name, 20) for name in odd]
    assert max(len(fit_key(name, 20)) for name in odd) <= 20


def test_raw_row_bytes_is_exact_for_tar() -> None:
    samples = example_samples(9)
    for sample in samples:
        data, index = write_shard([sample], EXAMPLE_SCHEMA, format="tar", compression="none", block_rows=1)
        sizes = [len(payload) for payload in EXAMPLE_SCHEMA.encode(sample, where="x")]
        assert raw_row_bytes("tar", EXAMPLE_SCHEMA, sizes) == int(index.block_raw_size[0]) == len(data) - 1024
        assert raw_row_bytes("arrow", EXAMPLE_SCHEMA, sizes) > sum(sizes)


def rehashed(index: ShardIndex, stored: bytes) -> ShardIndex:
    """The index that a hostile author would publish with other bytes of the same length."""
    return dataclasses.replace(index, block_xxh3=np.array([xxh3(stored)], np.uint64))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int32[2]", [1, 2]), ("int32[*]", [1, 2]), ("float32", 0.5), ("bool[2]", [0, 1]), ("bool[*]", [0, 1])],
)
def test_npy_members_other_than_ours_are_refused(kind: str, value: object) -> None:
    data, index = tar_shard({"x": kind}, [{"x": value}])
    stored = bytes(stored_block(data, index, 0))
    assert read_block(stored, rehashed(index, stored), 0).sample(0)
    for old, new in (
        (b"descr", b"descs"),
        (b"False", b"True "),
        (b"NUMPY\x01", b"NUMPY\x02"),
        (b"'<", b"'>"),
        (b"|b1", b"|O1"),
    ):
        if old in stored:
            other = stored.replace(old, new)
            with pytest.raises(IntegrityError):
                read_block(other, index, 0)
            with pytest.raises(FormatError, match="'x', row 0"):
                read_block(other, rehashed(index, other), 0).column("x")
    if kind.startswith("bool"):
        other = stored[: 512 + 128] + b"\x02" + stored[512 + 129 :]
        with pytest.raises(FormatError, match="neither 0 nor 1"):
            read_block(other, rehashed(index, other), 0).column("x")


def test_hostile_index_offsets_are_refused() -> None:
    _, index = tar_shard({"x": "bytes", "n": "int32[2]"}, [{"x": b"abc", "n": [1, 2]}] * 2)
    assert index.field_offset is not None
    assert index.field_size is not None
    for name, value in (
        ("field_offset", 2**64 - 4),
        ("field_size", 2**64 - 4),
        ("field_offset", 2**40),
        ("field_size", 10**6),
    ):
        hostile = getattr(index, name).copy()
        hostile[1, 1] = value
        with pytest.raises(FormatError, match="outside its block"):
            dataclasses.replace(index, **{name: hostile})
    shrunk = index.field_size.copy()
    shrunk[0, 1] = 40
    data, _ = tar_shard({"x": "bytes", "n": "int32[2]"}, [{"x": b"abc", "n": [1, 2]}] * 2)
    with pytest.raises(FormatError, match="'n', row 0"):
        read_block(data[:-1024], dataclasses.replace(index, field_size=shrunk), 0).column("n")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 3},
        {"rows": -1},
        {"block_rows": 0},
        {"block_rows": 1},
        {"compression": "zstd"},
        {"compression": "gzip"},
        {"format": "zip"},
        {"head_size": 5},
        {"head_sha256": "x"},
        {"shard_size": 10},
        {"field_size": None},
        {"source_names": ("a",)},
        {"row_stratum": np.zeros(1, np.int32)},
        {"original_rows": np.zeros(1, np.int64)},
        {"block_start": np.array([0, 0, 2])},
        {"block_raw_size": np.array([2**40], np.uint64)},
        {"block_offset": np.array([512], np.uint64)},
        {"block_size": np.array([0], np.uint64)},
        {"block_xxh3": np.array([0], np.int64)},
    ],
    ids=str,
)
def test_contradictory_indexes_are_refused(change: dict[str, Any]) -> None:
    _, index = tar_shard({"x": "bytes"}, [{"x": b"abc"}] * 2)
    with pytest.raises(FormatError, match="index"):
        dataclasses.replace(index, **change)


def test_lineage_survives() -> None:
    schema = Schema.parse({"n": "int8"})
    writer = ShardWriter(io.BytesIO(), schema=schema, block_rows=2)
    payload = schema.encode({"n": 1}, where="x")
    writer.write_block([Row("a", payload, "a/ä.jpg", ("web.tar", 7), 3), Row("b", payload)])
    writer.write_block([Row("c", payload, "c", ("code.tar", 2**40), 0), Row("d", payload, "\udcff")])
    index = ShardIndex.from_bytes(writer.finish().to_bytes())
    assert [index.source(row) for row in range(4)] == [("web.tar", 7), None, ("code.tar", 2**40), None]
    assert [index.original_key(row) for row in range(4)] == ["a/ä.jpg", "b", "c", "\udcff"]
    assert [index.stratum(row) for row in range(4)] == [3, None, 0, None]
    assert [index.key(row) for row in range(4)] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("segments", "rows", "starts"),
    [
        ([], 4, [0]),
        ([5], 2, [0, 2, 4, 5]),
        ([4, 4], 4, [0, 4, 8]),
        ([1, 0, 3], 2, [0, 1, 3, 4]),
        ([2], 100, [0, 2]),
    ],
)
def test_blocks_restart_at_segment_borders(segments: list[int], rows: int, starts: list[int]) -> None:
    assert block_starts(segments, rows).tolist() == starts
