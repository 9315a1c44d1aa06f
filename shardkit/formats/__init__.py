"""Formats: conversion of samples to the bytes of shards and back (SPEC.md).

This package does no I/O. Digests are checked before parsing, and declared sizes before memory is allocated. Programs
that read tar or Arrow can read the shards.
"""

from shardkit.documents import format_digest, parse_digest, sha256_digest, xxh3

from .arrow_reading import message_layout
from .block import Block, Column, FixedColumn, JoinedPayloads, Row, RowBlock, VariableColumn
from .columns import Columns, Texts, pack_columns, unpack_columns
from .compression import normalise_compression
from .index import BlockSpan, NumberedKeys, ShardIndex, block_starts, generated_key, generated_keys
from .reading import Verify, parse_decimals, read_block, read_fields, separate_fields, verify_block
from .schema import RESERVED_NAMES, FieldType, Schema, presence_of
from .tar_members import member_names
from .writing import MAX_SAMPLE_BYTES, ShardWriter, Sink, fit_key, max_key_bytes, raw_row_bytes

__all__ = [
    "MAX_SAMPLE_BYTES",
    "RESERVED_NAMES",
    "Block",
    "BlockSpan",
    "Column",
    "Columns",
    "FieldType",
    "FixedColumn",
    "JoinedPayloads",
    "NumberedKeys",
    "Row",
    "RowBlock",
    "Schema",
    "ShardIndex",
    "ShardWriter",
    "Sink",
    "Texts",
    "VariableColumn",
    "Verify",
    "block_starts",
    "fit_key",
    "format_digest",
    "generated_key",
    "generated_keys",
    "max_key_bytes",
    "member_names",
    "message_layout",
    "normalise_compression",
    "pack_columns",
    "parse_decimals",
    "parse_digest",
    "presence_of",
    "raw_row_bytes",
    "read_block",
    "read_fields",
    "separate_fields",
    "sha256_digest",
    "unpack_columns",
    "verify_block",
    "xxh3",
]
