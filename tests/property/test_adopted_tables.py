"""Adopted Parquet and Arrow files of any schema have the values that pyarrow reads, whole and by field."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkit
from shardkit_tools.adopting import adopt

VALUES: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "float64": (pa.float64(), st.floats(allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=20)),
    "large_text": (pa.large_string(), st.text(max_size=3)),
    "bytes": (pa.binary(), st.binary(max_size=20)),
    "word": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "bc", ""])),
    "list": (pa.list_(pa.int32()), st.lists(st.integers(-5, 5), max_size=4)),
    "fixed": (pa.list_(pa.int16(), 3), st.lists(st.integers(-5, 5), min_size=3, max_size=3)),
    "struct": (pa.struct([("a", pa.int64()), ("b", pa.string())]),
               st.fixed_dictionaries({"a": st.integers(-9, 9), "b": st.text(max_size=3)})),
    "texts": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
}  # fmt: skip
SCALARS = ("int8", "uint64", "float64", "bool", "text", "bytes", "word")


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """A table of any columns, some of them with nulls."""
    rows = draw(st.integers(1, 40))
    columns = {}
    for number, name in enumerate(draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5))):
        kind, values = VALUES[name]
        if name in SCALARS and draw(st.booleans()):
            values = st.none() | values
        columns[f"{name}.{number}"] = pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind)
    return pa.table(columns)


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@settings(max_examples=25)
@given(
    table=tables(),
    parquet=st.booleans(),
    group=st.integers(1, 20),
    codec=st.sampled_from(["none", "zstd", "lz4"]),
)
def test_adopted_values_are_those_of_pyarrow(table: Any, parquet: bool, group: int, codec: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("a.parquet" if parquet else "a.arrow")
        if parquet:
            pq.write_table(table, path, row_group_size=group, compression=codec)
        else:
            options = pa.ipc.IpcWriteOptions(compression=None if codec == "none" else codec)
            with pa.ipc.new_file(path, table.schema, options=options) as writer:
                writer.write_table(table, group)
        adopt([path], Path(folder) / "root")
        ds = shardkit.open(Path(folder) / "root")
        expected = table.to_pylist()
        found = [{name: plain(value) for name, value in sample.items()} for sample in ds[:]]
        assert [{name: row[name] for name in table.column_names} for row in found] == expected
        first = table.column_names[0]
        stored = list(ds.schema.stored)
        for block in range(ds.reader.index(0).blocks):
            alone, whole = (ds.reader.read(0, block, fields=fields) for fields in ([first], None))
            rows = range(whole.rows)
            assert ds.reader.read(0, block, fields=[]).rows == whole.rows
            last = ds.reader.read(0, block, fields=stored[-1:]).column(stored[-1])
            assert [last.payload(row) for row in rows] == [
                whole.column(stored[-1]).payload(row) for row in rows
            ]
            assert [alone.column(first).payload(row) for row in rows] == [
                whole.column(first).payload(row) for row in rows
            ]
