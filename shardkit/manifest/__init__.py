"""What a version of a dataset is: an immutable root, its pages, and selections of rows.

Pure: bytes in, columns out; nothing here opens a store. SPEC.md says the bytes and why.
"""

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
    compose,
    merge,
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
    "compose",
    "max_selection_bytes",
    "merge",
    "pack_page",
    "paginate",
    "stratum_counts",
    "unpack_page",
]
