"""Payloads with valid digests, made on purpose: refused or read right, in bounded memory, never a crash."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from shardkit.errors import FormatError
from shardkit.formats import Row, Schema, ShardIndex, ShardWriter, read_block
from shardkit.formats.arrow_message import read_batch_header
from shardkit.formats.compression import compress_frame, decompress_frame
from tests.drills import drill_count
from tests.faults.format_hostile import SCHEMA, rehashed
from tests.format_conformance import example_samples, stored_block, write_shard
from tests.whole_shard import tail_offset

# ---- Payloads with valid digests, made on purpose: refused or read right, in bounded memory, never a crash


PAIRS = ["arrow:none", "arrow:zstd", "tar:none"]


@pytest.mark.drill
@pytest.mark.parametrize("pair", PAIRS)
def test_mutants_are_refused_or_read_as_others_read_them(pair: str) -> None:
    """In a process of its own, under a limit on its address space: a crash or a big allocation is its death."""
    count = drill_count(20_000)
    command = [
        sys.executable,
        "-m",
        "tests.faults.format_hostile",
        "--pair",
        pair,
        "--seed",
        "11",
        "--count",
        str(count),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    outcomes = report["outcomes"]
    assert set(outcomes) <= {"refused", "read"}, outcomes
    assert outcomes["refused"] > count // 3
    assert outcomes.get("read", 0) + outcomes["refused"] >= count


def one_block(format: str, compression: str) -> tuple[bytes, ShardIndex]:
    samples = [{name: sample[name] for name in SCHEMA} for sample in example_samples(12)]
    data, index = write_shard(samples, SCHEMA, format=format, compression=compression, block_rows=12)
    return bytes(stored_block(data, index, 0)), index


def read_whole_block(stored: bytes, index: ShardIndex) -> None:
    """Block 0 with all its columns: they are decoded when they are asked for."""
    block = read_block(stored, index, 0)
    for name in index.schema:
        block.column(name)


def refused_in_bounds(
    stored: bytes, index: ShardIndex, match: str | None = None, mebibytes: int = 64
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FormatError, match=match):
        read_whole_block(stored, index)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mebibytes << 10


@pytest.mark.parametrize("length", [2**40, 2**63 - 1, -2, 0, 5, 2**32])
def test_made_up_uncompressed_lengths(length: int) -> None:
    stored, index = one_block("arrow", "zstd")
    header = read_batch_header(memoryview(stored))
    for offset, size in header.buffers:
        if size:
            place = header.body_offset + offset
            hostile = stored[:place] + struct.pack("<q", length) + stored[place + 8 :]
            # 5 bytes take the room that 2 take: only the frame contradicts them.
            match = "raw bytes|declares" if length != 5 else None
            refused_in_bounds(hostile, rehashed(index, hostile), match)
            if 0 < length < 2**34:
                refused_in_bounds(hostile, rehashed(index, hostile, int(index.block_raw_size[0]) + length))


def test_patched_buffer_tables_are_refused() -> None:
    """Buffers that overlap, run long or lie unaligned, in metadata that is well-formed otherwise."""
    stored, index = one_block("arrow", "none")
    header = read_batch_header(memoryview(stored))
    table = np.array(header.buffers, "<i8").tobytes()
    place = stored.index(table)
    rows = header.buffers
    labels = next(i for i, (_, length) in enumerate(rows) if length == 8 * 12)
    for patch in (
        (rows[labels][0] - 8, rows[labels][1]),
        (rows[labels][0] + 4, rows[labels][1]),
        (rows[labels][0], rows[labels][1] + 64),
        (rows[labels][0], rows[labels][1] - 8),
        (rows[labels][0] - 96, rows[labels][1]),
    ):
        patched = np.array(header.buffers)
        patched[labels] = patch
        hostile = stored[:place] + patched.astype("<i8").tobytes() + stored[place + len(table) :]
        refused_in_bounds(hostile, rehashed(index, hostile), "buffer of")


def test_a_buffer_longer_than_its_type_calls_for_is_refused() -> None:
    """64 bytes more behind the last buffer, and every length in the metadata says so."""
    stored, index = one_block("arrow", "none")
    header = read_batch_header(memoryview(stored))
    body = struct.pack("<q", len(stored) - header.body_offset)
    last = struct.pack("<2q", *header.buffers[-1])
    assert stored.count(body) == stored.count(last) == 1
    longer = stored.replace(body, struct.pack("<q", len(stored) - header.body_offset + 64))
    longer = longer.replace(
        last, struct.pack("<2q", header.buffers[-1][0], header.buffers[-1][1] + 64)
    ) + bytes(64)
    refused_in_bounds(longer, rehashed(index, longer), "'marks': buffer of")


def test_frames_that_lie_about_their_size() -> None:
    size = 3000
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))
    huge = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(2**21)))
    size_field = huge.index(struct.pack("<I", 2**21))
    huge[size_field : size_field + 4] = struct.pack("<I", 2**32 - 1)
    bomb = compress_frame(bytes(256 << 20), 1)
    two = compress_frame(bytes(size // 2), 3) * 2
    skippable = compress_frame(bytes(size), 3) + b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    trailing = compress_frame(bytes(size), 3) + b"x"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for frame in (
        unsized,
        bytes(huge),
        bomb,
        two,
        skippable,
        trailing,
        trailing[:-3],
        b"",
        b"\x28\xb5\x2f\xfd",
    ):
        for declared in (size, 2**32 - 1):
            with pytest.raises(FormatError):
                decompress_frame(frame, declared, "frame")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_frame_with_a_window_of_gigabytes_is_refused() -> None:
    """Frame header by RFC 8878: no single segment, window descriptor of 2 GiB, content size 4 bytes, one raw block."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0b10_0_0_0_0_00, 21 << 3]) + struct.pack("<I", 5)
    frame = header + (5 << 3 | 1).to_bytes(3, "little") + b"hello"
    small = b"\x28\xb5\x2f\xfd" + bytes([0b10_0_0_0_0_00, 0]) + header[6:] + frame[10:]
    assert decompress_frame(small, 5, "frame") == b"hello"
    with pytest.raises(FormatError, match="window"):
        decompress_frame(frame, 5, "frame")


@pytest.mark.parametrize("format", ["tar", "arrow"])
@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, "[" * 150_000 + "]" * 150_000, "1" * 100_000, "NaN", ""]
)
def test_json_that_breaks_parsers(format: str, text: str) -> None:
    """Payload rows are written past `Schema.encode`, as a hostile author would."""
    sink = io.BytesIO()
    schema = Schema.parse({"meta": "json"})
    writer = ShardWriter(sink, format=format, schema=schema, block_rows=1)
    writer.write_block([Row("a", (text.encode(),))])
    index = writer.finish()
    block = read_block(stored_block(sink.getvalue(), index, 0), index, 0)
    assert block.payloads(0) == (text.encode(),)
    with pytest.raises(FormatError, match="meta"):
        block.sample(0)


def test_text_that_is_not_utf8_is_refused_in_both_formats() -> None:
    schema = Schema.parse({"text": "str", "n": "int8"})
    samples = [{"text": "äöü", "n": 1}, {"text": "xyz", "n": 2}]
    for format in ("tar", "arrow"):
        data, index = write_shard(samples, schema, format=format, compression="none", block_rows=2)
        stored = bytes(stored_block(data, index, 0))
        hostile = stored.replace("äöü".encode(), b"\xc3\xa4\xc3\xb6\xc3\xff")
        with pytest.raises(FormatError, match="UTF-8"):
            read_block(hostile, rehashed(index, hostile), 0).column("text")
    # Valid as a whole, broken between rows: the border cuts a letter in two.
    data, index = write_shard(samples, schema, format="arrow", compression="none", block_rows=2)
    stored = bytes(stored_block(data, index, 0))
    offsets = struct.pack("<3q", 0, 6, 9)
    assert stored.count(offsets) == 1
    hostile = stored.replace(offsets, struct.pack("<3q", 0, 5, 9))
    with pytest.raises(FormatError, match="UTF-8"):
        read_whole_block(hostile, rehashed(index, hostile))


def test_batches_of_other_types_are_refused() -> None:
    """Well-formed Arrow of another schema: the index's schema decides, and says no."""
    schema = Schema.parse({"n": "int64", "t": "str"})
    _, index = write_shard([{"n": 1, "t": "a"}], schema, format="arrow", compression="none", block_rows=1)
    key = pa.array(["key-0"], pa.large_string())
    text = pa.array(["a"], pa.large_string())
    good = (
        pa.record_batch({"__key__": key, "n": pa.array([1], pa.int64()), "t": text}).serialize().to_pybytes()
    )
    assert read_block(good, rehashed(index, good), 0).sample(0) == {"n": 1, "t": "a"}
    others = [
        {"__key__": key, "n": pa.array([None], pa.int64()), "t": text},
        {"__key__": key, "n": pa.array([1], pa.int8()), "t": text},
        {"__key__": key, "n": pa.array([[1]], pa.list_(pa.int64())), "t": text},
        {"__key__": key, "n": pa.array([1], pa.int64()), "t": pa.array(["a"], pa.string())},
        {"__key__": key, "n": pa.array([1], pa.int64()), "t": text.dictionary_encode()},
        {"__key__": key, "n": pa.array([1], pa.int64())},
        {"__key__": key, "n": pa.array([1], pa.int64()), "t": text, "x": text},
        {"__key__": pa.array(["key-1"], pa.large_string()), "n": pa.array([1], pa.int64()), "t": text},
        {"__key__": key, "n": pa.array([1], pa.int64()), "t": pa.array(["a"], pa.string_view())},
    ]
    for arrays in others:
        stored = pa.record_batch(arrays).serialize().to_pybytes()
        with pytest.raises(FormatError):
            read_whole_block(stored, rehashed(index, stored))
    schema_message = pa.schema([("a", pa.int8())]).serialize().to_pybytes()
    with pytest.raises(FormatError, match="record batch"):
        read_block(schema_message, rehashed(index, schema_message), 0)


def test_hostile_indexes_stay_in_bounds() -> None:
    """The index's own bytes, mutated: a FormatError or an index that is consistent with itself."""
    rng = np.random.default_rng(5)
    _, index = one_block("tar", "none")
    packed = index.to_bytes()
    refused = 0
    for _ in range(400):
        mutant = bytearray(packed)
        for _ in range(int(rng.integers(1, 4))):
            mutant[int(rng.integers(0, len(mutant)))] ^= 1 << int(rng.integers(0, 8))
        try:
            found = ShardIndex.from_bytes(bytes(mutant))
        except FormatError:
            refused += 1
            continue
        assert found.rows == len(found.keys())
        assert tail_offset(found) <= found.shard_size
    assert refused > 200


# ---- Mutated pictures: each a picture or a FormatError, no crash, no more memory than the pixel limit's


MAX_PIXELS = 1_000_000


@pytest.mark.drill
@pytest.mark.timeout(0)
def test_ten_thousand_mutated_files_are_pictures_or_typed_errors() -> None:
    count = drill_count(10_000)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("picture_hostile.py")), str(count), str(MAX_PIXELS)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["picture"] + found["error"] == count
    assert min(found["picture"], found["error"]) > count // 10
    # decoding a picture of the limit came first: what is beyond its memory is a picture beyond the limit
    assert found["grown_bytes"] < 16 * MAX_PIXELS
