"""Columns of tables: one schema for several tables, field types, values, and columns in the names of folders.

    bool, integers, floats → the same            utf8 → str           binary → bytes
    list of numbers → ragged                     fixed-size lists of numbers → fixed arrays
    list of fixed-size lists → dtype[*,n]        list of binary, of images → bytes[*]
    `Array2D` to `Array5D` of Hugging Face → dtype[*,n], dtype[m,n]
    struct, map, other lists → json              dictionary → type of its values
    date, time, timestamp, duration → the same   decimal → the same, beyond 18 digits str

Lists of lists are json by default, because their rows may differ in length; ``--schema boxes=float32[*,*]``
and ``tags=str[*]`` make arrays and lists (a note says so).

A text column ``__key__`` holds the samples' keys, as in shards of the arrow format. A struct of bytes and
path, as Hugging Face stores images and audio, becomes its bytes.

``--schema when=str`` stores the complete text of a timestamp, ``when=int64`` the number of units since 1970,
``price=float64`` converts a decimal to a float. Nested columns can be json, or str with the same text: bytes are
base64 there, and maps whose keys are not text are lists of pairs.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.dataset.encoding import RowOrigin
from shardkit.documents import decode_plain
from shardkit.errors import FormatError, SchemaError, SourceError
from shardkit.extras import shell_word
from shardkit.formats import FieldType, Schema
from shardkit.formats.arrow_writing import METADATA_KEY, arrow_schema, table_type
from shardkit.formats.block import payloads_of, stored_columns
from shardkit.formats.foreign_columns import (
    ForeignColumns,
    fixed_shape,
    held_type,
    is_binary,
    is_list,
    is_media,
    is_number,
    is_string,
    media_bytes,
    plain_column,
)
from shardkit.formats.schema import KEY_FIELD
from shardkit.formats.values import Logical
from shardkit_tools.importers.protocol import (
    MIXED,
    DecodedRows,
    DecodedStream,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    array_note,
)
from shardkit_tools.importers.source_files import lacking_columns

_MOST_CLASSES = 2**17  # limit of a manifest
_NUMBER = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")
_HIVE = re.compile(r"(?:^|/)([^/=]+)=[^/]*(?=/)")  # name of a partition column, before its value
_EXTENSION = b"ARROW:extension:"  # of the metadata of a column whose type is registered elsewhere
_UNFIT = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


def table_schema(
    source: Source,
    options: ImportOptions,
    schemas: Sequence[Any],
    null_columns: Callable[[Any, Collection[str]], Collection[str]],
    features: Mapping[str, Any] | None = None,
) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema of tables, and the names of their classes."""
    described = [_described_features(schema) if features is None else features for schema in schemas]
    flat = [flat_schema(schema, options) for schema in schemas]
    whole = _common_schema(source, flat, options)
    kept = pa.schema([column for column in whole if options.keeps(column.name)])
    types = {}
    given = {
        **(described_arrays(features) if features else {}),
        **_exported_types(schemas),
        **options.field_types,
    }
    arrays = described_arrays(described[0])
    for column in kept:
        if column.name != KEY_FIELD:
            types[column.name] = given.get(column.name) or _column_type(
                column, arrays, options, source.files[0].path
            )
    inferred = {name for name, kind in types.items() if name not in given and kind not in ("json", MIXED)}
    missing = inferred.difference(set.intersection(*(set(schema.names) for schema in flat)))
    types |= {name: f"{types[name]}?" for name in missing.union(null_columns(kept, inferred))}
    source.notes.extend(_list_notes(kept, types, given))
    source.notes.extend(_parameter_notes(kept, types, {**arrays, **given}))
    source.notes.extend(_class_notes(source, described, types))
    found = options.schema(types, source.given, names=whole.names)
    return found, _class_names([one.get("label") for one in described], found)


def flat_schema(schema: Any, options: ImportOptions) -> Any:
    """Return a pyarrow schema with the members of structs in their places, if the user wants it."""
    fields = list(schema)
    for place, field in reversed(list(enumerate(fields))):
        if _is_flattened(field, options):
            inner = [
                pa.field(f"{field.name}.{one.name}", one.type, field.nullable or one.nullable)
                for one in field.type
            ]
            fields[place : place + 1] = flat_schema(pa.schema(inner), options)
    return pa.schema(fields)


def flat_batch(batch: Any, options: ImportOptions) -> Any:
    """Return a record batch of `flat_schema`; where a struct is null, its members are null."""
    if not options.flatten:
        return batch
    columns: list[Any] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if _is_flattened(field, options):
            names = [f"{field.name}.{one.name}" for one in field.type]
            columns += flat_batch(pa.RecordBatch.from_arrays(column.flatten(), names), options).columns
        else:
            columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=flat_schema(batch.schema, options))


def _is_flattened(field: Any, options: ImportOptions) -> bool:
    return bool(
        options.flatten
        and pa.types.is_struct(field.type)
        and field.type.num_fields
        and not is_media(field.type)
        and field.name not in options.field_types
    )


def _column_type(column: Any, arrays: Mapping[str, str], options: ImportOptions, where: str) -> str:
    inferred = type_text(column.type) or (MIXED if options.unchecked else None)
    held = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
    if inferred == "json" and is_list(held):
        return arrays.get(column.name, inferred)
    if inferred is None:
        word = shell_word(column.name)
        flat = ", or --flatten for a field for each of its members" * pa.types.is_struct(column.type)
        raise SourceError(
            f"{where}: column {column.name!r} is {column.type}, which no field type holds as it is; say what it "
            f"becomes: --schema {word}=json (bytes in it as base64), or {word}=str for its text{flat}"
        )
    return inferred


def _list_notes(schema: Any, types: Mapping[str, str], given: Collection[str]) -> list[str]:
    """Return notes on how lists of lists of numbers, json by default, can become arrays."""
    notes = []
    for column in schema:
        item, depth = column.type, 0
        while is_list(item):
            item, depth = item.value_type, depth + 1
        if types.get(column.name) == "json" and column.name not in given and is_number(item):
            notes.append(array_note(column.name, _number_name(item), depth))
    return notes


def _parameter_notes(schema: Any, types: Mapping[str, str], known: Collection[str]) -> Iterator[str]:
    """Yield a note for each column whose extension type has parameters that its field does not keep."""
    for column in schema:
        kind, said = column.type, column.metadata or {}
        name, text = said.get(_EXTENSION + b"name", b""), said.get(_EXTENSION + b"metadata", b"")
        if isinstance(kind, pa.ExtensionType):  # registered in this process, such as by pandas
            name, text = kind.extension_name.encode(), kind.__arrow_ext_serialize__()
        if column.name in types and column.name not in known and text.strip(b"{}\0"):
            yield (
                f"{column.name} is {types[column.name]}, the storage of {name.decode(errors='replace')}, whose "
                f"parameters are not kept: {text[:200].decode(errors='backslashreplace')}"
            )


def _exported_types(schemas: Sequence[Any]) -> dict[str, str]:
    """Return field → type text of the columns that `shardkit export` wrote and nobody has changed since."""
    if len({(schema.metadata or {}).get(METADATA_KEY) for schema in schemas}) != 1:
        return {}
    text = (schemas[0].metadata or {}).get(METADATA_KEY, b"")
    with contextlib.suppress(FormatError):
        described = decode_plain(text, max_bytes=len(text))
        written = Schema.from_json(described["fields"] if isinstance(described, dict) else None)
        return {
            name: str(kind)
            for name, kind in written.items()
            if all(name in schema.names and schema.field(name).type == table_type(kind) for schema in schemas)
        }
    return {}


def _described_features(schema: Any) -> Mapping[str, Any]:
    """Return the features that Hugging Face ``datasets`` wrote into a pyarrow schema, or an empty mapping."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def described_arrays(features: Mapping[str, Any]) -> dict[str, str]:
    """Return field → type text of the features `Array2D` to `Array5D`, whose first dimension may be free."""
    types = {}
    for name, feature in features.items():
        if not isinstance(feature, dict) or not re.fullmatch("Array[2-5]D", str(feature.get("_type"))):
            continue
        shape, dtype = feature.get("shape"), str(feature.get("dtype"))
        if not isinstance(shape, list) or not _NUMBER.fullmatch(dtype):
            continue
        if all(size is None or (type(size) is int and size > 0) for size in shape):
            types[name] = f"{dtype}[{','.join(str(size or '*') for size in shape)}]"
    return types


def _class_names(labels: Sequence[object], schema: Mapping[str, FieldType]) -> tuple[str, ...]:
    """Return the class names of the int64 field ``label`` if all files have the same `ClassLabel`."""
    first = labels[0]
    if not isinstance(first, dict) or first.get("_type") != "ClassLabel":
        return ()
    if any(label != first for label in labels) or schema.get("label") != FieldType("scalar", "int64"):
        return ()
    names = first.get("names")
    if not isinstance(names, list) or not 0 < len(names) <= _MOST_CLASSES:
        return ()
    are_names = all(isinstance(name, str) and len(name) <= 1000 and not _UNFIT.search(name) for name in names)
    return tuple(names) if are_names and len(set(names)) == len(names) else ()


def _class_notes(
    source: Source, described: Sequence[Mapping[str, Any]], names: Iterable[str]
) -> Iterator[str]:
    """Yield a note for each column of class numbers whose names differ between files."""
    for name in names:
        labels: dict[str, str] = {}  # names of classes → the first file that has them
        for file, one in zip(source.files, described, strict=False):
            label = one.get(name)
            if isinstance(label, dict) and label.get("_type") == "ClassLabel":
                labels.setdefault(str(label.get("names")), file.name)
        if len(labels) > 1:
            shown = ", ".join(f"{classes[:60]} in {file}" for classes, file in list(labels.items())[:2])
            yield (
                f"the numbers of {name} mean other classes in other files ({shown}); build the files one by one, or "
                "number the classes alike first: align_labels_with_mapping of datasets"
            )


def _common_schema(source: Source, schemas: Sequence[Any], options: ImportOptions) -> Any:
    """Return the columns of all tables, each of a type that holds the values of every table.

    Columns that are left out or have a type from the user keep the type of the first table.
    """
    fields: dict[str, Any] = {}
    first: dict[str, str] = {}  # column → the first file that has it
    widened: dict[str, str] = {}
    for file, schema in zip(source.files, schemas, strict=True):
        if len(set(schema.names)) != len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise SourceError(f"{file.path}: two columns are called {twice!r}; rename one")
        for column in schema:
            name, known = column.name, fields.setdefault(column.name, column)
            first.setdefault(name, file.name)
            if known.type == column.type or name in options.field_types or not options.keeps(name):
                continue
            common = _common_field(known, column)
            if common is None:
                raise SourceError(
                    f"{file.path}: column {name!r} is {column.type}, but {known.type} in {first[name]}, and no type "
                    f"holds both; make the files alike, or say the type: --schema {shell_word(name)}=str"
                )
            if not {type_text(known.type), type_text(column.type)} <= {type_text(common.type), "json"}:
                widened[name] = (
                    f"{name} is {type_text(common.type)}, because it is {known.type} in {first[name]} and "
                    f"{column.type} in {file.name}"
                )
            fields[name] = common
    source.notes.extend(widened.values())
    lacking_columns(source, [schema.names for schema in schemas], options)
    # --flatten makes fields of a struct, which may be null in every row of another file
    owners = {name.rpartition(".")[0] for name in fields} if options.flatten else set()
    return pa.schema(
        [one for one in fields.values() if not (pa.types.is_null(one.type) and one.name in owners)]
    )


def _common_field(known: Any, other: Any) -> Any:
    """Return a field of a type that holds the values of both, or None if there is none."""
    plain = [one.with_type(held_type(one.type)) for one in (known, other)]
    if any(pa.types.is_decimal(one.type) for one in plain) and any(
        pa.types.is_floating(one.type) for one in plain
    ):
        return None  # pyarrow would round decimals
    try:
        schemas = [pa.schema([one]) for one in plain]
        found = pa.unify_schemas(schemas, promote_options="permissive").field(0)
    except pa.ArrowException:
        # bytes, and the structs that Hugging Face stores files as; structs and maps
        return known if type_text(known.type) == type_text(other.type) is not None else None
    if pa.types.is_timestamp(found.type) and found.type.unit == "ns":
        return found.with_type(pa.timestamp("us", found.type.tz))  # nanoseconds end in the year 2262
    return found


# ---- Kinds of columns


def type_text(kind: Any) -> str | None:
    """Return the field type of an Arrow type, or None if the user must say it."""
    kind = held_type(kind)
    if is_number(kind):
        return _number_name(kind)
    if is_string(kind):
        return "str"
    if _says_itself(kind):
        return _logical_text(kind) or "str"
    if is_media(kind) or is_binary(kind):
        return "bytes"
    free = ["*"] if is_list(kind) else []
    shape, item = fixed_shape(kind.value_type if free else kind)
    if is_number(item):
        return f"{_number_name(item)}[{','.join([*free, *map(str, shape)])}]"
    if free and type_text(kind.value_type) == "bytes":
        return "bytes[*]"
    return "json" if _is_json(kind) else None


def _logical_text(kind: Any) -> str | None:
    """Return the field type of dates, times and decimals, or None if no field type fits."""
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_decimal(kind):
        # Writers such as pandas use the precision of the largest value; the next file may need more.
        text = f"decimal[{max(kind.precision, 18)},{kind.scale}]"
    else:
        name = next(
            name for name in ("timestamp", "duration", "time") if getattr(pa.types, f"is_{name}")(kind)
        )
        text = f"{name}[{kind.unit}{f', {kind.tz}' if name == 'timestamp' and kind.tz else ''}]"
    return text if Logical.parse(text) is not None else None


def _says_itself(kind: Any) -> bool:
    """Return True if a value is not a plain number, and its text represents it completely."""
    return bool(pa.types.is_decimal(kind) or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)))


def _is_json(kind: Any) -> bool:
    """Return True if a nested type holds only values that JSON or text can represent."""
    kind = held_type(kind)
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    return is_number(kind) or _says_itself(kind) or is_string(kind) or bool(pa.types.is_null(kind))


def _number_name(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).name)


# ---- Values


def null_columns(batches: Iterable[Any]) -> set[str]:
    """Return the columns of record batches that hold nulls, except inside a value."""
    return {
        name for batch in batches for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if (media_bytes(column) if is_media(column.type) else plain_column(column)).null_count
    }  # fmt: skip


def conform_batch(
    batch: Any, fields: Schema, schema: Schema, file: SourceFile, first_row: int
) -> DecodedStream:
    """Yield a record batch of a source as one of its schema; rows that do not fit are failures.

    `fields` are the fields of the schema under the names of the source.
    """
    columns = _Columns(batch, file.path, first_row)
    arrays = [columns.conform(name, kind) for name, kind in fields.items()]
    keys = columns.keys()
    made = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(schema, keys=False))
    rows = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    origin = RowOrigin([file.name] * batch.num_rows, rows, keys)
    for row in sorted(columns.bad):
        yield SourceFailure(file.name, first_row + row, columns.bad[row])
    if len(columns.bad) < batch.num_rows:
        yield DecodedRows(made, origin).without(columns.bad)


def batch_samples(
    batch: Any, fields: Schema, file: SourceFile, first_row: int, *, unchecked: bool
) -> SampleStream:
    """Yield rows of a record batch as Python values; `unchecked` ones that do not fit stay as in Arrow."""
    columns = _Columns(batch, file.path, first_row)
    values = {name: columns.values(name, kind, unchecked=unchecked) for name, kind in fields.items()}
    keys = columns.keys()
    for row in range(batch.num_rows):
        if row in columns.bad:
            yield SourceFailure(file.name, first_row + row, columns.bad[row])
            continue
        sample = {name: column[row] for name, column in values.items()}
        yield SourceSample(sample, keys[row] if keys else None, file.name, first_row + row)


class _Columns(ForeignColumns):
    """Columns of a record batch that can also be had as Python values."""

    def values(self, name: str, kind: FieldType, *, unchecked: bool) -> Sequence[Any]:
        """Return a column's values, None if missing; `unchecked` ones that do not fit stay as in Arrow."""
        before = dict(self.bad)
        try:
            if unchecked and kind.kind == MIXED:
                raise SchemaError("no type has all values")
            array = self.conform(name, kind)
        except SchemaError:
            if not unchecked:
                raise
            array = None
        if unchecked and (array is None or self.bad != before):
            self.bad = before
            raw: list[Any] = self.column(name).to_pylist()
            return raw
        alone = Schema({"value": kind})
        columns = [
            payloads_of(column)
            for column in stored_columns(alone, pa.RecordBatch.from_arrays([array], ["value"]))
        ]
        return [
            None if row in self.bad else alone.decode(payloads)["value"]
            for row, payloads in enumerate(zip(*columns, strict=True))
        ]


# ---- Hive partitions: values in the names of folders, such as `lang=de/`


def hive_partitions(source: Source, options: ImportOptions) -> dict[str, dict[str, Any]]:
    """Return file → column → value of folders such as ``lang=de/``, as pyarrow reads them.

    Columns whose values are all integers are int64, unless the user gives a type; others are texts.
    """
    names = [file.name for file in source.files]
    columns = dict.fromkeys(name for path in names for name in _HIVE.findall(path))
    if not columns:
        return {}
    import pyarrow.dataset as pads  # imports pandas if it is installed

    layout = pads.HivePartitioning(pa.schema([(name, pa.string()) for name in columns]))
    found = [pads.get_partition_keys(layout.parse(path)) for path in names]
    partitions: dict[str, dict[str, Any]] = {path: {} for path in names}
    for name in columns:
        values = pa.array([one.get(name) for one in found], pa.string())
        if name not in options.field_types:
            with contextlib.suppress(pa.ArrowInvalid):
                values = values.cast(pa.int64())
        for path, one, value in zip(names, found, values, strict=True):
            if one.get(name) is not None:
                partitions[path][name] = value
    return partitions


def with_partitions(
    source: Source, schemas: Sequence[Any], partitions: Mapping[str, Mapping[str, Any]]
) -> list[Any]:
    """Return schemas with the partition columns that the files do not have themselves."""
    return [
        pa.schema(
            [
                *schema,
                *(
                    pa.field(name, value.type)
                    for name, value in partitions.get(file.name, {}).items()
                    if name not in schema.names
                ),
            ],
            schema.metadata,
        )
        for file, schema in zip(source.files, schemas, strict=True)
    ]
