"""The Arrow schema of a shard: key column, then the fields, nothing nullable."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from . import canonical_json
from .schema import FieldType, Schema

__all__ = ["KEY_FIELD", "arrow_item_type", "arrow_schema", "arrow_type"]

KEY_FIELD = "__key__"
"""Name of the column of keys."""

METADATA_KEY = b"shardkit"


def arrow_item_type(kind: FieldType) -> Any:
    """The Arrow type of one number of a field."""
    return pa.bool_() if kind.dtype == "bool" else pa.from_numpy_dtype(kind.numpy_dtype)


def arrow_type(kind: FieldType) -> Any:
    """The Arrow type of a field; no level of it is nullable."""
    if kind.kind == "bytes":
        return pa.large_binary()
    if kind.kind in ("str", "json"):
        return pa.large_string()
    item = arrow_item_type(kind)
    if kind.kind == "ragged":
        return pa.large_list(pa.field("item", item, nullable=False))
    for size in reversed(kind.shape):
        item = pa.list_(pa.field("item", item, nullable=False), size)
    return item


def arrow_schema(schema: Schema, *, keys: bool = True) -> Any:
    """Key column, where wanted, then the fields; the shardkit schema and format version are in its metadata."""
    fields = [pa.field(KEY_FIELD, pa.large_string(), nullable=False)] if keys else []
    for name, kind in schema.items():
        metadata = {METADATA_KEY: b"json"} if kind.kind == "json" else None
        fields.append(pa.field(name, arrow_type(kind), nullable=False, metadata=metadata))
    text = canonical_json.dumps({"fields": schema.to_json(), "version": 1})
    return pa.schema(fields, metadata={METADATA_KEY: text})
