"""Versions of a dataset: an immutable root, pages of the shard table, and selections of rows.

This package does no I/O: it converts bytes to columns and back. SPEC.md defines the bytes and gives the reasons.
"""

from shardkit.manifest.composition import compose, extend, merge
from shardkit.manifest.manifest import (
    MAX_MANIFEST_BYTES,
    MIXED,
    POOL,
    SHARDS_PER_PAGE,
    CostPiece,
    Lookup,
    LookupPiece,
    Manifest,
    PageRef,
    RowCosts,
    Stratum,
)
from shardkit.manifest.selection import Selection, max_selection_bytes
from shardkit.manifest.shard_table import (
    ShardRecord,
    ShardTable,
    check_against,
    check_alignment,
    pack_page,
    paginate,
    stratum_counts,
    unpack_page,
)

__all__ = [
    "MAX_MANIFEST_BYTES",
    "MIXED",
    "POOL",
    "SHARDS_PER_PAGE",
    "CostPiece",
    "Lookup",
    "LookupPiece",
    "Manifest",
    "PageRef",
    "RowCosts",
    "Selection",
    "ShardRecord",
    "ShardTable",
    "Stratum",
    "check_against",
    "check_alignment",
    "compose",
    "extend",
    "max_selection_bytes",
    "merge",
    "pack_page",
    "paginate",
    "stratum_counts",
    "unpack_page",
]
