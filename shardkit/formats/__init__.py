"""Formats: how samples become bytes of shards and back (SPEC.md).

schema         field types and schemas
encoding       values to canonical payloads and back
keys           names of samples inside a shard
digest         SHA-256 and XXH3
span_digests   SHA-256 of several buffers at once; compiled, optional
canonical_json one text for one value
compression    settings, checked zstd frames
columns        the container of index sidecars, manifest pages and selections
rows           one row on its way into a shard
row_block      the rows of a block, field by field
media          extensions of tar members by magic bytes
ustar          strict tar headers
npy            npy headers: ours written and compared; those of others parsed once, when they are adopted
tar_blocks     blocks of the tar format
arrow_message  bounds-checked reader of Arrow metadata
arrow_schema   the Arrow schema of a shard
arrow_writing  blocks of the arrow format, written
arrow_reading  blocks of the arrow format, read
arrow_batches  rows of blocks of either format as Arrow record batches
block          a verified block: columns and samples
texts          many short texts in one buffer
index          the sidecar of a shard
index_checks   what must hold in an index
writing        the writer of both formats
reading        verify and decode a block
whole_shard    find damage in a shard, check what lies around its blocks
rebuilding     a shard's index from its bytes
"""

from .arrow_batches import record_batch
from .arrow_reading import FixedPlace, fixed_places
from .arrow_schema import arrow_schema
from .block import Block, Column, FixedColumn, VariableColumn
from .columns import Columns, pack_columns, unpack_columns
from .compression import extension, normalise_compression
from .digest import format_digest, parse_digest, sha256_digest, sha256_each, xxh3
from .index import BlockSpan, ShardIndex, block_starts
from .keys import fit_key, is_key, max_key_bytes
from .npy import npy_payload_offset
from .reading import Verify, read_block, verify_block
from .rebuilding import build_index
from .row_block import JoinedPayloads, RowBlock
from .rows import Row
from .schema import RESERVED_NAMES, FieldType, Schema
from .tar_blocks import parse_decimals
from .texts import Texts
from .whole_shard import Damage, check_whole_shard, find_damage
from .writing import MAX_SAMPLE_BYTES, ShardWriter, Sink, open_writer, raw_row_bytes

__all__ = [
    "MAX_SAMPLE_BYTES",
    "RESERVED_NAMES",
    "Block",
    "BlockSpan",
    "Column",
    "Columns",
    "Damage",
    "FieldType",
    "FixedColumn",
    "FixedPlace",
    "JoinedPayloads",
    "Row",
    "RowBlock",
    "Schema",
    "ShardIndex",
    "ShardWriter",
    "Sink",
    "Texts",
    "VariableColumn",
    "Verify",
    "arrow_schema",
    "block_starts",
    "build_index",
    "check_whole_shard",
    "extension",
    "find_damage",
    "fit_key",
    "fixed_places",
    "format_digest",
    "is_key",
    "max_key_bytes",
    "normalise_compression",
    "npy_payload_offset",
    "open_writer",
    "pack_columns",
    "parse_decimals",
    "parse_digest",
    "raw_row_bytes",
    "read_block",
    "record_batch",
    "sha256_digest",
    "sha256_each",
    "unpack_columns",
    "verify_block",
    "xxh3",
]
