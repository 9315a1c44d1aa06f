"""A shard as a whole: digests of every byte, and what tarfile and pyarrow read from it, against its index."""

from __future__ import annotations

import hashlib
import io
import tarfile
from itertools import pairwise
from typing import NamedTuple

import pyarrow as pa

from shardkit.formats.arrow_writing import arrow_schema
from shardkit.formats.block import Row, RowBlock, payloads_of
from shardkit.formats.index import ShardIndex
from shardkit.formats.tar_members import TRAILER, member_names


class Damage(NamedTuple):
    """A part of a shard that differs from its index: ``head``, ``block N``, ``tail`` or ``size``."""

    part: str
    offset: int
    size: int


def tail_offset(index: ShardIndex) -> int:
    """Where the bytes after the last block begin."""
    return int(index.block_offset[-1] + index.block_size[-1]) if index.blocks else index.head_size


def find_damage(data: bytes | bytearray, index: ShardIndex) -> list[Damage]:
    """Which parts of a shard differ from its index, by SHA-256; together the parts are every byte."""
    tail = tail_offset(index)
    digests = [digest.tobytes().hex() for digest in index.block_sha256]
    blocks = zip(index.block_offset.tolist(), index.block_size.tolist(), digests, strict=True)
    parts = [
        ("head", 0, index.head_size, index.head_sha256),
        *((f"block {block}", *part) for block, part in enumerate(blocks)),
        ("tail", tail, index.shard_size - tail, index.tail_sha256),
    ]
    damage = [
        Damage(part, offset, size)
        for part, offset, size, digest in parts
        if hashlib.sha256(data[offset : offset + size]).hexdigest() != digest
    ]
    if len(data) != index.shard_size:
        damage.append(Damage("size", len(data), index.shard_size - len(data)))
    return damage


def check_whole_shard(data: bytes, index: ShardIndex) -> None:
    """Check that other programs find the rows where the index has them."""
    assert find_damage(data, index) == []
    (_check_tar if index.format == "tar" else _check_arrow)(data, index)


def _check_tar(data: bytes, index: ShardIndex) -> None:
    assert not index.head_size
    assert data[tail_offset(index) :] == TRAILER
    assert index.field_offset is not None
    assert index.field_size is not None
    expected = []
    for row, key in enumerate(index.keys()):
        begin = int(index.block_offset[index.block_of(row)[0]])
        sizes = zip(index.field_offset[row].tolist(), index.field_size[row].tolist(), strict=True)
        for name, (offset, size) in zip(member_names(index.schema), sizes, strict=True):
            if offset:  # a value that is absent has no member
                expected.append((f"{key}.{name}", begin + offset, size))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = [(one.name.rpartition(".")[0], one.offset_data, one.size) for one in archive.getmembers()]
    assert found == expected


def _check_arrow(data: bytes, index: ShardIndex) -> None:
    schema, keys, offsets = arrow_schema(index.schema), index.keys(), index.block_offset.tolist()
    with pa.ipc.open_file(data) as reader:
        assert reader.schema.equals(schema, check_metadata=True)
        assert reader.num_record_batches == index.blocks
        for block, (start, end) in enumerate(pairwise(index.block_start.tolist())):
            alone = data[offsets[block] : offsets[block] + int(index.block_size[block])]
            for batch in (reader.get_batch(block), pa.ipc.read_record_batch(alone, schema)):
                batch.validate(full=True)
                assert batch.column("__key__").to_pylist() == keys[start:end]


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
