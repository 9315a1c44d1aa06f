"""Reading a block: size, checksum, decompression, decoding, in that order and no other."""

from __future__ import annotations

import hashlib
from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, IntegrityError, NotFoundError, UsageError

from .arrow_reading import decode_batch
from .block import Block, Column
from .compression import decompress_frame
from .digest import xxh3
from .index import ShardIndex
from .tar_blocks import tar_column

__all__ = ["Verify", "read_block", "verify_block"]

Verify = Literal["fast", "strong"]


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
    size = int(index.block_size[block])
    if len(stored) != size:
        raise IntegrityError(
            f"block {block}: {len(stored)} bytes, expected {size}; read another copy or repair the shard"
        )
    if verify == "fast":
        got, expected = f"{xxh3(stored):016x}", f"{int(index.block_xxh3[block]):016x}"
    elif verify == "strong":
        got, expected = hashlib.sha256(stored).hexdigest(), index.block_sha256[block].tobytes().hex()
    else:
        raise UsageError(f"verify={verify!r}: expected 'fast' or 'strong'; there is no 'off'")
    if got != expected:
        name = "XXH3" if verify == "fast" else "SHA-256"
        raise IntegrityError(
            f"block {block}: {name} mismatch (expected {expected}, got {got}); "
            "read another copy or repair the shard"
        )


def read_block(
    stored: bytes | bytearray | memoryview, index: ShardIndex, block: int, *, verify: Verify = "fast"
) -> Block:
    """Verify and decode one block.

    Columns of uncompressed blocks are views of `stored`, which must stay unchanged while they are used.

    Args:
        stored: The block's bytes in the shard: ``block_size[block]`` bytes from ``block_offset[block]``.
        index: The shard's index, its own digest checked.
        block: Number of the block.
        verify: ``fast`` (XXH3-64) or ``strong`` (SHA-256, for what came over a network).

    Raises:
        IntegrityError: `stored` is not what was written; nothing of it has been parsed.
        FormatError: it is, but whoever wrote it did not write shardkit's format.
        NotFoundError: the shard has no such block.
    """
    view = memoryview(stored).cast("B")
    verify_block(view, index, block, verify=verify)
    rows = int(index.block_start[block + 1] - index.block_start[block])
    raw_size = int(index.block_raw_size[block])
    if index.format == "tar":
        return _tar_block(view, index, block, rows, raw_size)
    codec = index.compression.partition(":")[0]
    columns, keys = decode_batch(view, index.schema, codec, rows, raw_size, keys_checked_later=True)
    first = int(index.block_start[block])
    offsets = index.key_texts.offsets[first : first + rows + 1]
    key_data = index.key_texts.data[offsets[0] : offsets[-1]]
    if not (np.array_equal(keys.ends, offsets[1:] - offsets[0]) and np.array_equal(keys.data, key_data)):
        raise FormatError(f"block {block}: its keys are not those of the index")
    return Block(index.schema, rows, raw_size, columns.__getitem__)


def _tar_block(view: memoryview, index: ShardIndex, block: int, rows: int, raw_size: int) -> Block:
    if index.compression == "none":
        if len(view) != raw_size:
            raise FormatError(
                f"block {block}: {len(view)} stored bytes and {raw_size} raw ones without compression"
            )
        data = np.frombuffer(view, np.uint8)
    else:
        data = np.frombuffer(decompress_frame(view, raw_size, f"block {block}"), np.uint8)
    data = data.view()
    data.flags.writeable = False
    first = int(index.block_start[block])
    # The index has checked that every field lies inside its block, so int64 holds them.
    offsets = cast("NDArray[np.uint64]", index.field_offset)[first : first + rows].astype(np.int64)
    sizes = cast("NDArray[np.uint64]", index.field_size)[first : first + rows].astype(np.int64)

    bare = index.field_is_payload

    def load(name: str) -> Column:
        place = index.schema.position(name)
        is_payload = bare is not None and bool(bare[place])
        return tar_column(
            data, offsets[:, place], sizes[:, place], index.schema[name], name, is_payload=is_payload
        )

    return Block(index.schema, rows, raw_size, load)
