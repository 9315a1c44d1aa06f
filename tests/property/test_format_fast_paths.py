"""Short cuts of the formats: decimals parsed together, text checked in one pass, columns decoded when asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardkit.errors import FormatError, UsageError
from shardkit.formats import (
    FieldType,
    FixedColumn,
    Schema,
    VariableColumn,
    arrow_message,
    read_block,
)
from shardkit.formats.arrow_message import BatchHeader, NumberPlaces
from shardkit.formats.arrow_reading import BatchReader, _decompress
from shardkit.formats.block import check_text
from shardkit.formats.compression import compress_frame
from shardkit.formats.reading import tar_column
from shardkit.formats.schema import DTYPES
from tests.format_conformance import stored_block, write_shard

INTEGERS = [name for name in DTYPES if not name.startswith("float")]
HOSTILE = [
    *(
        b"",
        b"-",
        b"--1",
        b"-0",
        b"00",
        b"01",
        b"-01",
        b"+1",
        b" 1",
        b"1 ",
        b"1\n",
        b"1.0",
        b"1e3",
        b"0x1",
        b"\xb2",
    ),
    *("٣".encode(), b"18446744073709551615", b"18446744073709551616", b"99999999999999999999"),
    *(b"-9223372036854775808", b"-9223372036854775809", b"9" * 21, b"-" * 20, b"1" + b"0" * 20),
]
MEMBERS = (
    st.integers(-(2**65), 2**65).map(lambda n: b"%d" % n)
    | st.integers(-300, 300).map(lambda n: b"%d" % n)
    | st.sampled_from(HOSTILE)
    | st.binary(max_size=22)
)


def _is_canonical(text: bytes, dtype: str) -> bool:
    low, high = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    try:
        value = int(text.decode("ascii"))
    except ValueError:
        return False
    return text == str(value).encode() and low <= value <= high


def _parse(members: list[bytes], dtype: str) -> Any:
    """The values, or the message of the refusal."""
    gap = b"\0\0"
    data = np.frombuffer(gap + gap.join(members) + gap, np.uint8)
    sizes = np.array([len(member) for member in members], np.int64)
    starts = 2 + np.concatenate([[0], np.cumsum(sizes + 2)[:-1]]).astype(np.int64)
    try:
        column = tar_column(data, starts, sizes, FieldType("scalar", dtype), "n")
    except FormatError as error:
        return str(error)
    assert isinstance(column, FixedColumn)
    assert column.values.dtype == np.dtype(dtype)
    assert not column.values.flags.writeable
    return column.values.tolist()


@settings(max_examples=150, deadline=None)
@given(members=st.lists(MEMBERS, min_size=1, max_size=8), dtype=st.sampled_from(INTEGERS))
def test_canonical_decimals_are_read_and_others_refused(members: list[bytes], dtype: str) -> None:
    found = _parse(members, dtype)
    bad = [row for row, member in enumerate(members) if not _is_canonical(member, dtype)]
    if bad:
        assert int(str(found).split("row ")[1].split()[0]) in bad
    else:
        assert found == [int(member) for member in members]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_hostile_decimal_is_refused(dtype: str) -> None:
    for member in HOSTILE:
        found = _parse([b"1", member], dtype)
        assert isinstance(found, list) == _is_canonical(member, dtype), member


# ---- text


PIECES = st.sampled_from(
    [b"", b"a", "é".encode(), "€".encode(), "🙂".encode(), b"\x80", b"\xbf", b"\xc3", b"\xe2\x82", b"\xf0\x9f",
     b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\0" * 3]
)  # fmt: skip


def _decodes(part: bytes) -> bool:
    try:
        part.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(PIECES, max_size=10), data=st.data())
@example(pieces=["é".encode()], data=None)
def test_text_is_refused_exactly_where_a_row_of_it_does_not_decode(pieces: list[bytes], data: Any) -> None:
    """Rows anywhere: they may overlap, be empty, begin inside a character, leave gaps that are not text."""
    text = b"".join(pieces)
    place = st.integers(0, len(text))
    spans = (
        [(0, 1), (1, 2)]
        if data is None
        else data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=6))
    )
    starts = np.array([start for start, _ in spans], np.int64)
    ends = np.array([end for _, end in spans], np.int64)
    bad = [row for row, (start, end) in enumerate(spans) if not _decodes(text[start:end])]
    array = np.frombuffer(text, np.uint8)
    if bad:
        with pytest.raises(FormatError, match=rf"'t', row {bad[0]} of the block: not UTF-8"):
            check_text(array, starts, ends, "t")
    else:
        check_text(array, starts, ends, "t")


# ---- columns one by one


SCHEMA = Schema.parse(
    {
        "a": "int32",
        "text": "str",
        "grid": "uint8[2,3]",
        "blob": "bytes",
        "flags": "bool[9]",
        "tail": "float32[*]",
    }
)


def _samples(rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(rows)
    return [
        {
            "a": n - 3,
            "text": "é" * (n % 3),
            "grid": rng.integers(0, 256, (2, 3), dtype=np.uint8),
            "blob": rng.bytes(n + 2),
            "flags": rng.integers(0, 2, 9).astype(bool),
            "tail": rng.normal(size=n % 4).astype(np.float32),
        }
        for n in range(rows)
    ]


def _payloads(reader: Any, name: str, rows: int) -> list[bytes]:
    column = reader.column(name)
    return [column.payload(row) for row in range(rows)]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), order=st.lists(st.sampled_from(list(SCHEMA)), max_size=8))
def test_columns_are_the_same_in_whatever_order_they_are_asked_for(
    compression: str, rows: int, order: list[str]
) -> None:
    samples = _samples(rows)
    data, index = write_shard(samples, SCHEMA, format="arrow", compression=compression, block_rows=rows)
    stored = stored_block(data, index, 0)
    reader = BatchReader(memoryview(stored), SCHEMA, compression, rows, int(index.block_raw_size[0]))
    encoded = [SCHEMA.encode(sample, where="here") for sample in samples]
    for name in order:
        position = SCHEMA.position(name)
        assert _payloads(reader, name, rows) == [bytes(row[position]) for row in encoded]


def test_a_damaged_column_is_refused_when_it_is_asked_for_and_no_other() -> None:
    """Offsets that fall: only the bytes of their own column can say so."""
    samples = _samples(4)
    data, index = write_shard(samples, SCHEMA, format="arrow", compression="none", block_rows=4)
    stored = bytes(stored_block(data, index, 0))
    block = read_block(stored, index, 0)
    blob = block.column("blob")
    assert isinstance(blob, VariableColumn)
    offsets = np.append(blob.starts, blob.ends[-1]).astype("<i8").tobytes()
    assert stored.count(offsets) == 1
    hostile = stored.replace(offsets, np.array([0, 9, 2, 5, 14], "<i8").tobytes())
    reader = BatchReader(memoryview(hostile), SCHEMA, "none", 4, int(index.block_raw_size[0]))
    for name in SCHEMA:
        if name == "blob":
            with pytest.raises(FormatError, match="blob"):
                reader.column(name)
        else:
            position = SCHEMA.position(name)
            expected = [bytes(SCHEMA.encode(sample, where="here")[position]) for sample in samples]
            assert _payloads(reader, name, 4) == expected
    with pytest.raises(FormatError, match="blob"):
        reader.column("blob")  # a refusal is not remembered as an answer


@pytest.mark.parametrize("compression", ["none", "zstd"])
@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9), fields=st.lists(st.sampled_from(list(SCHEMA)), unique=True), keys=st.booleans()
)
def test_fields_that_are_read_alone_are_those_of_the_whole_block(
    compression: str, rows: int, fields: list[str], keys: bool
) -> None:
    data, index = write_shard(
        _samples(rows), SCHEMA, format="arrow", compression=compression, block_rows=rows
    )
    stored = stored_block(data, index, 0)
    whole, some = read_block(stored, index, 0), read_block(stored, index, 0, keys=keys, fields=fields)
    for name in SCHEMA:
        if name in fields or compression != "zstd":
            assert _payloads(some, name, rows) == _payloads(whole, name, rows)
        else:
            with pytest.raises(UsageError, match="was not to be read"):
                some.column(name)


def test_a_buffer_that_was_stored_as_it_is_is_found_behind_its_prefix() -> None:
    data, raw = bytes(range(100)), (-1).to_bytes(8, "little", signed=True)
    framed = compress_frame(data, 3)
    body = raw + data + bytes(4) + len(data).to_bytes(8, "little") + framed
    buffers = ((0, 108), (112, 8 + len(framed)), (112, 0))
    places = NumberPlaces(None, None, slice(0), slice(0))
    header = BatchHeader(1, (1,), 0, buffers, "zstd", 16, 16 + len(body), places)
    message = memoryview(bytes(16) + body)
    assert _decompress(message, header, 0).tobytes() == _decompress(message, header, 1).tobytes() == data
    assert not len(_decompress(message, header, 2))
    with pytest.raises(FormatError, match="buffer 1: zstd frame declares 100 bytes, expected 101"):
        _decompress(memoryview(bytes(message).replace(b"\x64" + bytes(7), b"\x65" + bytes(7))), header, 1)


def _metadata(rows: int, compression: str) -> bytes:
    data, index = write_shard(
        _samples(rows), SCHEMA, format="arrow", compression=compression, block_rows=rows
    )
    stored = bytes(stored_block(data, index, 0))
    return stored[8 : 8 + int.from_bytes(stored[4:8], "little")]


METADATA = [_metadata(rows, compression) for rows in (1, 4, 7) for compression in ("none", "zstd")]


@settings(max_examples=400, deadline=None)
@given(
    data=st.sampled_from(METADATA),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=3),
)
def test_metadata_say_buffers_inside_of_the_body_or_are_refused(
    data: bytes, changes: list[tuple[int, int]]
) -> None:
    mutant = bytearray(data)
    for place, value in changes:
        mutant[place % len(mutant)] = value
    try:
        header = arrow_message._read_metadata(bytes(mutant))
    except FormatError:
        return
    body = header.message_bytes - header.body_offset
    ends = [0, *(offset + length for offset, length in header.buffers)]
    assert all(end <= offset for end, (offset, _) in zip(ends, header.buffers, strict=False))
    assert ends[-1] <= body
