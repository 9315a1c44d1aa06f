"""Pages: the shard table in content-addressed pieces of at most 4,096 shards; an append adds new ones."""

from __future__ import annotations

from typing import Final

import numpy as np

from shardkit.errors import FormatError, UsageError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.columns import pack_columns, unpack_columns
from shardkit.formats.digest import sha256_digest
from shardkit.manifest.manifest import MAX_SEGMENTS_PER_PAGE, SHARDS_PER_PAGE, PageRef
from shardkit.manifest.shard_table import SEGMENT_COLUMNS, SHARD_COLUMNS, ShardTable

__all__ = ["pack_page", "paginate", "unpack_page"]

_KIND: Final = "page"
# segment_shard is not stored: the number of segments of each shard says the same, is shorter, and cannot be
# out of order.
_STORED: Final = {
    **SHARD_COLUMNS,
    "segments": np.uint32,
    **{k: v for k, v in SEGMENT_COLUMNS.items() if k != "segment_shard"},
}
_SHARD_BYTES: Final = 3 * 32 + 7 * 8 + 4
_SEGMENT_BYTES: Final = 4 + 8 + 8


def pack_page(table: ShardTable) -> bytes:
    """The bytes of one page: the same for the same shards.

    Raises:
        UsageError: Too many shards or segments for one page.
    """
    segments = np.diff(table.segment_starts)
    if not 1 <= len(table) <= SHARDS_PER_PAGE or int(segments.sum()) > MAX_SEGMENTS_PER_PAGE:
        raise UsageError(
            f"page of {len(table)} shards and {int(segments.sum())} segments: expected 1 to "
            f"{SHARDS_PER_PAGE} shards "
            f"and at most {MAX_SEGMENTS_PER_PAGE} segments; order rows by stratum inside a shard"
        )
    columns = {name: segments if name == "segments" else getattr(table, name) for name in _STORED}
    meta = {"shards": len(table), "segments": int(segments.sum())}
    return pack_columns(
        _KIND, meta, {name: np.asarray(columns[name], dtype=_STORED[name]) for name in _STORED}
    )


def unpack_page(data: bytes, ref: PageRef | None = None, *, strata: int | None = None) -> ShardTable:
    """Read a page whose digest has been checked.

    Args:
        data: The page.
        ref: What the root says of it, compared where given.
        strata: How many strata the root has; no segment may name another, where given.

    Raises:
        FormatError: Not what `pack_page` writes, or not what the root says.
    """
    where = f"page {sha256_digest(data)}"
    try:
        columns = unpack_columns(data, _KIND, max_raw_bytes=_raw_limit(ref))
        arrays = dict(columns.arrays)
        shards = len(arrays.get("segments", ()))
        for name, dtype in _STORED.items():
            if name not in arrays or arrays[name].dtype != dtype:
                raise FormatError(f"column {name} is missing or not {np.dtype(dtype)}")
        counts = arrays.pop("segments")
        if len(arrays) != len(_STORED) - 1 or counts.ndim != 1:
            raise FormatError(f"unexpected columns: {sorted(arrays.keys() - _STORED.keys())[:5]}")
        segments = int(counts.sum(dtype=np.int64))
        if dumps(columns.meta) != dumps({"shards": shards, "segments": segments}) or segments != len(
            arrays["segment_rows"]
        ):
            raise FormatError(
                f"{shards} shards and {segments} segments, the header and the columns say otherwise"
            )
        shard = np.repeat(np.arange(shards, dtype=np.int32), counts)
        table = ShardTable(**arrays, segment_shard=shard)
        if ref is not None and (len(table) != ref.shards or int(table.rows.sum()) != ref.rows):
            raise FormatError(
                f"{len(table)} shards and {int(table.rows.sum())} rows, the root says {ref.shards} and "
                f"{ref.rows}"
            )
        highest = int(table.segment_stratum.max(initial=0))
        if strata is not None and highest >= strata:
            raise FormatError(f"a segment belongs to stratum {highest}, the root has {strata}")
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error
    return table


def paginate(table: ShardTable) -> list[tuple[PageRef, bytes]]:
    """Cut a table into pages, in order.

    Args:
        table: All shards, or those that an append adds.

    Returns:
        Each page with its reference for the root.
    """
    pages = []
    for start in range(0, len(table), SHARDS_PER_PAGE):
        piece = table.slice(start, min(start + SHARDS_PER_PAGE, len(table)))
        data = pack_page(piece)
        pages.append((PageRef(sha256_digest(data), len(data), len(piece), int(piece.rows.sum())), data))
    return pages


def _raw_limit(ref: PageRef | None) -> int:
    shards = SHARDS_PER_PAGE if ref is None else ref.shards
    return shards * _SHARD_BYTES + MAX_SEGMENTS_PER_PAGE * _SEGMENT_BYTES
