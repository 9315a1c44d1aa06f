"""A shard as a whole: where it is damaged, and whether what lies around its blocks is right."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import pyarrow as pa

from shardkit.errors import FormatError, IntegrityError

from .arrow_message import END_OF_STREAM, file_head_size, read_footer_blocks
from .arrow_schema import arrow_schema
from .compression import decompress_frame
from .index import ShardIndex
from .ustar import TRAILER

__all__ = ["Damage", "check_whole_shard", "find_damage"]

Buffer = bytes | bytearray | memoryview


class Damage(NamedTuple):
    """A part of a shard that differs from its index: ``head``, ``block N``, ``tail`` or ``size``."""

    part: str
    offset: int
    size: int


def find_damage(data: Buffer, index: ShardIndex) -> list[Damage]:
    """Which parts of a shard differ from its index, by SHA-256; together the parts are every byte.

    Args:
        data: The whole shard, or what is left of it; a memory map will do.
        index: Its index, its own digest checked.
    """
    view = memoryview(data).cast("B")
    tail = index.tail_offset
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
        _check_trailer(view[index.tail_offset :], index)
    else:
        _check_arrow_frame(view, index)


def _check_trailer(tail: memoryview, index: ShardIndex) -> None:
    if index.is_adopted:  # what lies around its samples is whoever wrote it's; it has been read strictly once
        return
    raw = tail if index.compression == "none" else decompress_frame(tail, len(TRAILER), "end of archive")
    if index.head_size or raw != TRAILER:
        raise FormatError(
            "tar shard: expected two zero blocks of 512 bytes at its end, and nothing before its blocks"
        )


def _check_arrow_frame(view: memoryview, index: ShardIndex) -> None:
    if file_head_size(view) != index.head_size or view[index.tail_offset :][:8] != END_OF_STREAM:
        raise FormatError("arrow shard: blocks do not begin behind the schema or end before the footer")
    blocks = list(zip(index.block_offset.tolist(), index.block_size.tolist(), strict=True))
    if read_footer_blocks(view, index.tail_offset) != blocks:
        raise FormatError("arrow shard: the footer lists other record batches than the index")
    expected = arrow_schema(index.schema)
    try:
        schemas = [pa.ipc.read_schema(pa.py_buffer(view[8:])), pa.ipc.open_file(pa.py_buffer(view)).schema]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"arrow shard: pyarrow refuses its schema: {str(error)[:200]}") from None
    if not all(schema.equals(expected, check_metadata=True) for schema in schemas):
        raise FormatError(f"arrow shard: its schema is not that of the index ({index.schema})")
