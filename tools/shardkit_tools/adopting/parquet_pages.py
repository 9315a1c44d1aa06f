"""Memory of decoded Parquet columns, from the footer and the headers of pages; no value is decoded (SPEC.md §5)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from shardkit.formats import FieldType
from shardkit.formats.index import MAX_BLOCK_BYTES

_OFFSET_BYTES = 16  # per value of a field of variable size
_JSON_BYTES = 12  # quotes, separators and digits of a member of a JSON object
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3  # types of pages
_DICTIONARY_ENCODINGS = (2, 8)
_WHOLE_ENCODINGS = (0, 6)  # PLAIN, DELTA_LENGTH_BYTE_ARRAY: a page contains its values byte for byte
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4_RAW": "lz4_raw"}
_MAX_DICTIONARY_BYTES = 64 << 20
_MAX_DEPTH = 8


class Chunk(NamedTuple):
    """A column chunk."""

    facts: Any  # from the footer
    leaf: Any  # its column in the schema of the file
    data: memoryview


class ColumnMemory(NamedTuple):
    """Memory of decoded values."""

    num_bytes: int | None  # about how many bytes they have; None: they must be decoded
    longest: int = 0  # size of the longest entry of a dictionary that may make them too large


def field_memory(kind: FieldType, rows: int, chunks: Iterable[Chunk]) -> ColumnMemory:
    """Return the memory of a field of a row group as `memory_of` counts it, given the column chunks that store it."""
    total = rows if kind.optional else 0
    if kind.item_bytes is not None:
        return ColumnMemory(total + rows * kind.item_bytes)
    total += _OFFSET_BYTES * rows
    items = kind.items or kind
    for chunk in chunks:
        found = _chunk_memory(*chunk, items.numpy_dtype.itemsize if items.dtype else 0)
        if found.num_bytes is None:
            return found
        total += found.num_bytes
        if kind.kind == "json":
            total += chunk.facts.num_values * (len(chunk.leaf.name) + _JSON_BYTES)
    return ColumnMemory(total)


def _chunk_memory(chunk: Any, leaf: Any, data: memoryview, item_bytes: int) -> ColumnMemory:
    """Return the memory of the values of a column chunk.

    A value of a dictionary counts with the mean size of the entries. A block could become as large as all values
    times the longest entry, which has at most the size of the dictionary. Only if that is more than a block may have
    is the dictionary decompressed.
    """
    kind = chunk.physical_type
    if kind != "BYTE_ARRAY":
        return ColumnMemory(int(chunk.num_values) * (item_bytes or _WIDTHS.get(kind, leaf.length)))
    whole = coded = 0  # bytes, values
    dictionary = _Page(_DICTIONARY, 0, data[:0], 0, 0)
    try:
        for page in _pages(data, chunk.num_values):
            if page.kind == _DICTIONARY:
                dictionary = page
            elif page.encoding in _DICTIONARY_ENCODINGS:
                coded += page.values
            elif page.encoding in _WHOLE_ENCODINGS:
                whole += page.size
            else:
                return ColumnMemory(None)
    except (IndexError, ValueError):
        return ColumnMemory(None)
    if coded * dictionary.size > MAX_BLOCK_BYTES:
        longest = _longest(dictionary, chunk.compression)
        if longest is None or coded * longest > MAX_BLOCK_BYTES:
            return ColumnMemory(None, longest or dictionary.size)
    mean = max(0, dictionary.size - 4 * dictionary.values) / max(1, dictionary.values)
    nulls = chunk.statistics.null_count if chunk.is_stats_set and chunk.statistics.has_null_count else 0
    return ColumnMemory(whole + int(coded * mean * (1 - nulls / chunk.num_values)))


class _Page(NamedTuple):
    kind: int
    size: int  # bytes, decompressed
    stored: memoryview
    values: int
    encoding: int


def _pages(data: memoryview, values: int) -> Iterator[_Page]:
    """Yield the pages of a column chunk.

    Raises:
        IndexError, ValueError: A header is damaged.
    """
    at = 0
    while values > 0:
        found, at = _read_struct(data, at)
        kind, size, stored = (found.get(field, -1) for field in (1, 2, 3))
        own = found.get({_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}.get(kind, 0), {})
        count, encoding = own.get(1, 0), own.get(4 if kind == _DATA_2 else 2, 0)
        if min(kind, size, stored, count) < 0 or at + stored > len(data):
            raise ValueError("page header")
        yield _Page(kind, size, data[at : at + stored], count, encoding)
        at += stored
        values -= 0 if kind == _DICTIONARY else count


def _longest(dictionary: _Page, codec: str) -> int | None:
    """Return the size of the longest entry of a dictionary; None if it cannot be read, or is too large."""
    if dictionary.size > _MAX_DICTIONARY_BYTES:
        return None
    data: Any = dictionary.stored
    try:
        if codec != "UNCOMPRESSED":
            data = pa.Codec(_CODECS[codec]).decompress(data, dictionary.size)
    except (KeyError, OSError, pa.ArrowException):
        return None
    view, at, longest = memoryview(data), 0, 0
    while at < len(view):
        length = int.from_bytes(view[at : at + 4], "little")
        longest, at = max(longest, length), at + 4 + length
    return longest


# ---- Thrift's compact protocol


def _read_struct(data: memoryview, at: int, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Return the integers and structs of a struct by field, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("nesting")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            field += head >> 4
        else:
            field, at = _read_integer(data, at)
        found[field], at = _read_value(data, at, head & 15, depth)
    return found, at + 1


def _read_value(data: memoryview, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (1, 2):  # true, false
        return None, at
    if kind == 3:
        return None, at + 1
    if kind in (4, 5, 6):
        return _read_integer(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _read_varint(data, at)
        return None, at + size
    if kind == 12:
        return _read_struct(data, at, depth + 1)
    raise ValueError(f"type {kind}")


def _read_integer(data: memoryview, at: int) -> tuple[int, int]:
    value, at = _read_varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("integer")
