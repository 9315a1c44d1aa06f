"""A shard as a whole: where it is damaged, what lies around its blocks, and its index made again from its bytes."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from shardkit.documents import xxh3
from shardkit.errors import FormatError, IntegrityError
from shardkit.formats.arrow_message import (
    END_OF_STREAM,
    FILE_MAGIC,
    MetadataTable,
    file_head_size,
    raw_message_bytes,
    read_batch_header,
)
from shardkit.formats.arrow_reading import BatchReader
from shardkit.formats.arrow_writing import arrow_schema
from shardkit.formats.block import Row, RowBlock, payloads_of
from shardkit.formats.columns import Texts
from shardkit.formats.compression import MAX_RATIO, normalise_compression
from shardkit.formats.index import MAX_BLOCK_BYTES, ShardIndex, block_starts
from shardkit.formats.schema import Schema
from shardkit.formats.tar_members import BLOCK, TRAILER, member_extension, member_header, member_names, padded

Buffer = bytes | bytearray | memoryview


class Damage(NamedTuple):
    """A part of a shard that differs from its index: ``head``, ``block N``, ``tail`` or ``size``."""

    part: str
    offset: int
    size: int


def tail_offset(index: ShardIndex) -> int:
    """Where the bytes after the last block begin."""
    return int(index.block_offset[-1] + index.block_size[-1]) if index.blocks else index.head_size


def find_damage(data: Buffer, index: ShardIndex) -> list[Damage]:
    """Which parts of a shard differ from its index, by SHA-256; together the parts are every byte.

    Args:
        data: The whole shard, or what is left of it; a memory map will do.
        index: Its index, its own digest checked.
    """
    view = memoryview(data).cast("B")
    tail = tail_offset(index)
    parts = [("head", 0, index.head_size, index.head_sha256)]
    parts += [
        (f"block {block}", int(offset), int(size), digest.tobytes().hex())
        for block, (offset, size, digest) in enumerate(
            zip(index.block_offset, index.block_size, index.block_sha256, strict=True)
        )
    ]
    parts.append(("tail", tail, index.shard_size - tail, index.tail_sha256))
    damage = [
        Damage(part, offset, size)
        for part, offset, size, digest in parts
        if hashlib.sha256(view[offset : offset + size]).hexdigest() != digest
    ]
    if len(view) != index.shard_size:
        damage.append(Damage("size", len(view), index.shard_size - len(view)))
    return damage


def check_whole_shard(data: Buffer, index: ShardIndex) -> None:
    """Check every byte of a shard, and that what lies around its blocks is what foreign readers need.

    Blocks are compared, not decoded: that is `read_block`.

    Raises:
        IntegrityError: bytes differ from what was written (names the parts).
        FormatError: they do not, but the end of the tar archive, the Arrow schema or the footer is wrong.
    """
    damage = find_damage(data, index)
    if damage:
        parts = ", ".join(f"{part} at {offset}" for part, offset, _ in damage[:8])
        raise IntegrityError(
            f"shard of {index.shard_size} bytes: {len(damage)} damaged parts: {parts}; repair it"
        )
    view = memoryview(data).cast("B")
    if index.format == "tar":
        _check_trailer(view[tail_offset(index) :], index)
    else:
        _check_arrow_frame(view, index)


def _check_trailer(tail: memoryview, index: ShardIndex) -> None:
    if index.is_adopted:  # what lies around its samples is whoever wrote it's; it has been read strictly once
        return
    if index.head_size or tail != TRAILER:
        raise FormatError(
            "tar shard: expected two zero blocks of 512 bytes at its end, and nothing before its blocks"
        )


def _check_arrow_frame(view: memoryview, index: ShardIndex) -> None:
    if file_head_size(view) != index.head_size or view[tail_offset(index) :][:8] != END_OF_STREAM:
        raise FormatError("arrow shard: blocks do not begin behind the schema or end before the footer")
    blocks = list(zip(index.block_offset.tolist(), index.block_size.tolist(), strict=True))
    if read_footer_blocks(view, tail_offset(index)) != blocks:
        raise FormatError("arrow shard: the footer lists other record batches than the index")
    expected = arrow_schema(index.schema)
    try:
        schemas = [pa.ipc.read_schema(pa.py_buffer(view[8:])), pa.ipc.open_file(pa.py_buffer(view)).schema]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"arrow shard: pyarrow refuses its schema: {str(error)[:200]}") from None
    if not all(schema.equals(expected, check_metadata=True) for schema in schemas):
        raise FormatError(f"arrow shard: its schema is not that of the index ({index.schema})")


@dataclass(slots=True)
class _Found:
    """Rows and blocks met while walking through a shard."""

    keys: list[str]
    fields: list[list[tuple[int, int]]]  # per row: (offset in the raw block, size) of each field
    spans: list[tuple[int, int, int]]  # per block: offset, stored bytes, raw bytes
    starts: list[int]
    tail: int


def build_index(
    data: Buffer,
    *,
    format: str,
    compression: str,
    schema: Schema,
    block_rows: int,
    segment_rows: Sequence[int] | None = None,
) -> ShardIndex:
    """Make the index of a shard from its bytes: the writer's, but for lineage, which the shard does not hold.

    Args:
        data: The whole shard, its SHA-256 checked; a memory map will do.
        format: ``tar`` or ``arrow``.
        compression: As it was written; the manifest says it.
        schema: Fields of every row.
        block_rows: Rows of a full block.
        segment_rows: Rows of each segment (default: one segment); needed for a plain tar, which does not show
            where its blocks end.

    Raises:
        FormatError: the shard is not what shardkit writes.
    """
    compression = normalise_compression(format, compression)
    view = memoryview(data).cast("B")
    if format == "arrow":
        found = _walk_arrow(view, schema, compression)
    else:
        found = _walk_tar(view, schema, block_rows, segment_rows)
    return _index_of(
        view, found, format=format, compression=compression, schema=schema, block_rows=block_rows
    )


def _index_of(view: memoryview, found: _Found, **settings: Any) -> ShardIndex:
    spans = np.array(found.spans, np.uint64).reshape(-1, 3)
    stored = [view[offset : offset + size] for offset, size, _ in found.spans]
    head = found.spans[0][0] if found.spans else found.tail
    fields: dict[str, Any] = {}
    if settings["format"] == "tar":
        table = np.array(found.fields, np.uint64).reshape(len(found.keys), len(settings["schema"]), 2)
        fields = {"field_offset": table[:, :, 0].copy(), "field_size": table[:, :, 1].copy()}
    return ShardIndex(
        rows=len(found.keys),
        shard_size=len(view),
        head_size=head,
        head_sha256=hashlib.sha256(view[:head]).hexdigest(),
        tail_sha256=hashlib.sha256(view[found.tail :]).hexdigest(),
        block_offset=spans[:, 0].copy(),
        block_size=spans[:, 1].copy(),
        block_raw_size=spans[:, 2].copy(),
        block_start=np.array(found.starts, np.int64),
        block_xxh3=np.array([xxh3(block) for block in stored], np.uint64),
        block_sha256=np.frombuffer(
            b"".join(hashlib.sha256(block).digest() for block in stored), np.uint8
        ).reshape(-1, 32),
        key_texts=Texts.pack(found.keys),
        **settings,
        **fields,
    )


def _rows_of(
    raw: memoryview, start: int, end: int, schema: Schema
) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Rows of a run of tar members: (key, [(offset, size) of each field])."""
    names, kinds = member_names(schema), list(schema.values())
    key, fields = "", list[tuple[int, int]]()
    for name, offset, size in iter_members(raw, start, end):
        member_key, _, rest = name.partition(".")
        if fields and member_key != key and all(kind.optional for kind in kinds[len(fields) :]):
            yield key, _with_absent(fields, len(names))
            key, fields = "", []
        while kinds[len(fields)].optional and rest.partition(".")[0] in names[len(fields) + 1 :]:
            fields.append(_ABSENT)
        place = len(fields)
        wanted = f"{names[place]}.{member_extension(kinds[place], raw[offset : offset + size])}"
        if rest != wanted or (key and member_key != key):
            raise FormatError(f"tar member {name} at {offset}: expected {key or 'KEY'}.{wanted}")
        key = member_key
        fields.append((offset, size))
        if len(fields) == len(names):
            yield key, fields
            key, fields = "", []
    if fields and all(kind.optional for kind in kinds[len(fields) :]):
        yield key, _with_absent(fields, len(names))
    elif fields:
        raise FormatError(f"tar: sample {key} ends after {len(fields)} of {len(names)} fields")


_ABSENT = (0, 0)
"""Stands for the member of an optional field without a value."""


def _with_absent(fields: list[tuple[int, int]], number: int) -> list[tuple[int, int]]:
    return fields + [_ABSENT] * (number - len(fields))


def _walk_tar(
    view: memoryview, schema: Schema, block_rows: int, segment_rows: Sequence[int] | None
) -> _Found:
    tail = len(view) - len(TRAILER)
    if tail < 0 or view[tail:] != TRAILER:
        raise FormatError("tar shard: expected two zero blocks of 512 bytes at its end")
    rows = list(_rows_of(view, 0, tail, schema))
    segments = [len(rows)] if segment_rows is None else segment_rows
    if sum(segments) != len(rows):
        raise FormatError(f"tar shard: {len(rows)} rows, the segments have {sum(segments)}")
    starts = block_starts(segments, block_rows).tolist()
    # A row begins at the header of its first member.
    borders = [_first_member(rows[start][1]) - BLOCK for start in starts[:-1]] + [tail]
    found = _Found([key for key, _ in rows], [], [], starts, tail)
    for block, begin in enumerate(borders[:-1]):
        size = borders[block + 1] - begin
        found.spans.append((begin, size, size))
        for _, fields in rows[starts[block] : starts[block + 1]]:
            found.fields.append([(offset and offset - begin, length) for offset, length in fields])
    return found


def _first_member(fields: list[tuple[int, int]]) -> int:
    return next(offset for offset, _ in fields if offset)


def _walk_arrow(view: memoryview, schema: Schema, compression: str) -> _Found:
    position = file_head_size(view)
    found = _Found([], [], [], [0], 0)
    while view[position : position + 8] != END_OF_STREAM:
        header = read_batch_header(view[position:])
        stored = view[position : position + header.message_bytes]
        raw_size = raw_message_bytes(header, stored)
        if raw_size > min(MAX_BLOCK_BYTES, MAX_RATIO * len(stored)) or not 0 < header.rows < 2**31:
            raise FormatError(f"arrow message at {position}: declares {header.rows} rows, {raw_size} bytes")
        batch = BatchReader(stored, schema, compression.partition(":")[0], header.rows, raw_size)
        keys = batch.keys()
        for name in schema:
            batch.column(name)  # a rebuilt index must not name rows that do not decode
        found.keys += [keys.payload(row).decode() for row in range(header.rows)]
        found.spans.append((position, header.message_bytes, raw_size))
        found.starts.append(len(found.keys))
        position += header.message_bytes
    found.tail = position
    return found


def read_footer_blocks(data: memoryview, tail_start: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the record batches that the footer of an Arrow file lists.

    Args:
        data: The whole file.
        tail_start: Where the bytes after the last batch begin; the footer lies behind it.

    Raises:
        FormatError: no footer, or one with dictionaries or lengths that make no sense.
    """
    end = len(data) - len(FILE_MAGIC) - 4
    length = int.from_bytes(data[end : end + 4], "little") if end >= tail_start else -1
    if length < 8 or data[end + 4 :] != FILE_MAGIC or end - length < tail_start:
        raise FormatError("arrow file: no footer before the closing magic")
    footer = data[end - length : end]
    root = MetadataTable(footer, int.from_bytes(footer[:4], "little"))
    if root.number(0, struct.Struct("<h")) != 4 or footer[root.structs(2, 24)]:
        raise FormatError("arrow file: footer of another version, or with dictionaries")
    # struct Block { offset: long; metaDataLength: int; padding; bodyLength: long }
    raw = footer[root.structs(3, 24)]
    records = [struct.unpack_from("<qi4xq", raw, position) for position in range(0, len(raw), 24)]
    return [(offset, metadata + body) for offset, metadata, body in records]


def iter_members(data: memoryview, start: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Members in ``data[start:end]``, which holds whole members and nothing else.

    Reads headers and padding only, so a sparse file of any size costs nothing.

    Yields:
        (name, offset of the content in `data`, size).

    Raises:
        FormatError: a byte differs from what `member_header` writes, padding is not zero, or a member is cut
        short.
    """
    position = start
    while position < end:
        header = bytes(data[position : position + BLOCK])
        name = header[:100].rstrip(b"\x00")
        digits = header[124:136]
        if position + BLOCK > end or not _NAME.match(name) or not _SIZE.match(digits):
            raise FormatError(f"tar header at {position}: no plain file with a name that shardkit writes")
        size = int(digits[:11], 8)
        if header != member_header(name, size):
            raise FormatError(
                f"tar header at {position} ({name.decode()}): not the ustar header that shardkit writes"
            )
        content = position + BLOCK
        position = content + padded(size)
        if position > end or any(data[content + size : position]):
            raise FormatError(f"tar member {name.decode()} at {content}: cut short, or padding is not zero")
        yield name.decode(), content, size


_NAME = re.compile(rb"[A-Za-z0-9_-]{1,80}(?:\.[A-Za-z0-9_%-]+)+\Z")
_SIZE = re.compile(rb"[0-7]{11}\x00\Z")


def rows_of(block: RowBlock) -> list[Row]:
    """The rows of a block one by one, as the caller may keep them."""
    originals = dict(block.originals)
    assert block.source_id is not None
    assert block.source_row is not None
    columns = [payloads_of(column) for column in block.columns]
    return [
        Row(
            key,
            tuple(bytes(column[place]) for column in columns),
            originals.get(place),
            (block.source_names[source], int(block.source_row[place])) if source >= 0 else None,
            None if block.stratum is None else int(block.stratum[place]),
        )
        for place, (key, source) in enumerate(zip(block.keys, block.source_id.tolist(), strict=True))
    ]
