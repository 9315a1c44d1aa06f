"""Reading a block: size, checksum, decompression, decoding, in that order and no other."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError

from .arrow_reading import BatchReader
from .block import Block, Column, FixedColumn, VariableColumn
from .compression import decompress_frame
from .digest import xxh3
from .index import BlockSpan, ShardIndex
from .schema import KEY_FIELD, presence_of
from .tar_blocks import optional_column, tar_column

Verify = Literal["fast", "strong"]
"""By which checksum of the index blocks are verified: XXH3 ("fast") or SHA-256 ("strong")."""


def verify_block(
    stored: bytes | memoryview, index: ShardIndex, block: int, *, verify: Verify = "fast"
) -> None:
    """Check that `stored` is the block that was written.

    Args:
        stored: The block's bytes in the shard.
        index: The shard's index, its own digest checked.
        block: Number of the block.
        verify: ``fast`` compares XXH3-64, ``strong`` SHA-256.

    Raises:
        IntegrityError: size or checksum differ.
        NotFoundError: the shard has no such block.
    """
    if not 0 <= block < index.blocks:
        raise NotFoundError(f"block {block}: the shard has blocks 0 to {index.blocks - 1}")
    span = index.spans[block]
    if len(stored) != span.size:
        raise IntegrityError(
            f"block {block}: {len(stored)} bytes, expected {span.size}; read another copy or repair the shard"
        )
    if verify == "fast":
        if (found := xxh3(stored)) == span.xxh3:
            return
        name, got, expected = "XXH3", f"{found:016x}", f"{span.xxh3:016x}"
    elif verify == "strong":
        got, expected = hashlib.sha256(stored).hexdigest(), index.block_sha256[block].tobytes().hex()
        if got == expected:
            return
        name = "SHA-256"
    else:
        raise UsageError(f"verify={verify!r}: expected 'fast' or 'strong'; there is no 'off'")
    raise IntegrityError(
        f"block {block}: {name} mismatch (expected {expected}, got {got}); "
        "read another copy or repair the shard"
    )


def read_block(
    stored: bytes | bytearray | memoryview,
    index: ShardIndex,
    block: int,
    *,
    verify: Verify = "fast",
    keys: bool = True,
    fields: Iterable[str] | None = None,
) -> Block:
    """Verify and decode one block.

    Columns of uncompressed blocks are views of `stored`, which must stay unchanged while they are used.

    Args:
        stored: The block's bytes in the shard: ``block_size[block]`` bytes from ``block_offset[block]``.
        index: The shard's index, its own digest checked.
        block: Number of the block.
        verify: ``fast`` (XXH3-64) or ``strong`` (SHA-256, for what came over a network).
        keys: Compare the keys that an Arrow block holds with those of the index. Both are what their digests say
            either way; who never looks at a key need not know that their writer made them equal.
        fields: Those that the block will be asked for, and no others: what else it holds need not be decompressed. All
            where None.

    Raises:
        IntegrityError: `stored` is not what was written; nothing of it has been parsed.
        FormatError: it is, but whoever wrote it did not write shardkit's format.
        NotFoundError: the shard has no such block.
    """
    view = memoryview(stored).cast("B")
    verify_block(view, index, block, verify=verify)
    span = index.spans[block]
    rows = span.end_row - span.first_row
    if index.format == "tar":
        return _tar_block(view, index, block, span)
    columns = None if fields is None else [*fields, *([KEY_FIELD] if keys else [])]
    batch = BatchReader(view, index.schema, index.compression.partition(":")[0], rows, span.raw_size, columns)
    if keys:
        _compare_keys(batch.keys(checked_later=True), index, block)
    return Block(index.schema, rows, span.raw_size, batch.column)


def _compare_keys(keys: VariableColumn, index: ShardIndex, block: int) -> None:
    span = index.spans[block]
    offsets = index.key_texts.offsets[span.first_row : span.end_row + 1]
    start, end = int(offsets[0]), int(offsets[-1])
    # as bytes: several times faster than comparing arrays of a hundred items
    if (keys.ends + start).tobytes() != offsets[1:].tobytes() or (
        keys.data.tobytes() != index.key_texts.data[start:end].tobytes()
    ):
        raise FormatError(f"block {block}: its keys are not those of the index")


def _tar_block(view: memoryview, index: ShardIndex, block: int, span: BlockSpan) -> Block:
    if index.compression == "none":
        if len(view) != span.raw_size:
            raise FormatError(
                f"block {block}: {len(view)} stored bytes and {span.raw_size} raw ones without compression"
            )
        data = np.frombuffer(view, np.uint8)
    else:
        data = np.frombuffer(decompress_frame(view, span.raw_size, f"block {block}"), np.uint8)
    data = data.view()
    data.flags.writeable = False

    presences = {presence_of(name): name for name, kind in index.schema.items() if kind.optional}

    def load(name: str) -> Column:
        field = presences.get(name, name)
        kind, place = index.schema[field], index.schema.position(field)
        starts, sizes = (column[span.first_row : span.end_row] for column in index.member_places(place))
        present = starts != 0  # a header stands before every member
        if field != name:
            return FixedColumn(present)
        bare = index.field_is_payload is not None and bool(index.field_is_payload[place])

        def column(rows: NDArray[np.bool_] | slice) -> Column:
            return tar_column(data, starts[rows], sizes[rows], kind, name, is_payload=bare)

        return optional_column(present, kind, column) if kind.optional else column(slice(None))

    return Block(index.schema, span.end_row - span.first_row, span.raw_size, load)
