"""What a version of a dataset is: an immutable root, its pages, and selections of rows.

Pure: bytes in, columns out.

::

    manifest.py      the root: schema, strata, totals, references to pages; canonical JSON, named by its
    SHA-256 root_checks.py   whether a root agrees with itself shard_table.py   columns over all shards and
    segments table_checks.py  whether those columns agree with each other pages.py         the table in
    content-addressed pieces of at most 4,096 shards selection.py     which rows of a shard a version holds:
    bitmap, rank, select composing.py     manifests from written shards, and from other manifests
    json_fields.py   strict reading of the JSON objects that shardkit writes

SPEC.md says the bytes and why.
"""

from shardkit.manifest.composing import check_against, compose, merge, stratum_counts
from shardkit.manifest.manifest import (
    ADOPTED,
    MAX_MANIFEST_BYTES,
    MIXED,
    POOL,
    SHARDS_PER_PAGE,
    Lookup,
    LookupPiece,
    Manifest,
    PageRef,
    Stratum,
)
from shardkit.manifest.pages import pack_page, paginate, unpack_page
from shardkit.manifest.selection import Selection, max_selection_bytes
from shardkit.manifest.shard_table import ShardRecord, ShardTable

__all__ = [
    "ADOPTED",
    "MAX_MANIFEST_BYTES",
    "MIXED",
    "POOL",
    "SHARDS_PER_PAGE",
    "Lookup",
    "LookupPiece",
    "Manifest",
    "PageRef",
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
