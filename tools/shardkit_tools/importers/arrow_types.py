"""Map Arrow columns to field types.

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
``price=float64`` a number to compute with. Nested columns can be json, or str with the same text: bytes are
base64 there, and maps whose keys are not text are lists of pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardkit.errors import SourceError
from shardkit.formats import FieldType, Schema
from shardkit.formats.values import Logical
from shardkit_tools.importers.protocol import MIXED, ImportOptions, Source, array_note, shell_word

KEY = "__key__"
_MOST_CLASSES = 2**17  # limit of a manifest
_NUMBER = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")
_UNFIT = re.compile("[\0-\x1f\x7f\ud800-\udfff]")


def table_schema(
    source: Source,
    options: ImportOptions,
    schemas: Sequence[Any],
    null_columns: Callable[[Any, Collection[str]], Collection[str]],
    features: Mapping[str, Any] | None = None,
) -> tuple[Schema, tuple[str, ...]]:
    """Return the schema of tables, and the names of their classes.

    Raises:
        SourceError: The tables differ, two columns have the same name, or a column needs a type from the
            user.
    """
    for file, schema in zip(source.files, schemas, strict=True):
        _check_same_fields(schemas[0], schema, source.files[0].name, file.path)
    described = [_described_features(schema) if features is None else features for schema in schemas]
    flat = flat_schema(schemas[0], options)
    kept = pa.schema([column for column in flat if options.keeps(column.name)])
    if len(set(kept.names)) != len(kept.names):
        twice = next(name for name in kept.names if kept.names.count(name) > 1)
        raise SourceError(f"{source.files[0].path}: two columns are called {twice!r}; rename one")
    types, given = {}, {**(described_arrays(features) if features else {}), **options.field_types}
    arrays = described_arrays(described[0])
    for column in kept:
        if column.name != KEY:
            types[column.name] = given.get(column.name) or _column_type(
                column, arrays, options, source.files[0].path
            )
    inferred = {name for name, kind in types.items() if name not in given and kind not in ("json", MIXED)}
    types |= {name: f"{types[name]}?" for name in null_columns(kept, inferred)}
    source.notes.extend(_list_notes(kept, types, given))
    found = options.schema(types, source.given, names=flat.names)
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
    inferred = _type_text(column.type) or (MIXED if options.unchecked else None)
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


def _check_same_fields(first: Any, other: Any, first_name: str, where: str) -> None:
    expected, found = ({column.name: column.type for column in one} for one in (first, other))
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise SourceError(
                f"{where}: column {name!r} is {found.get(name, 'missing')}, but "
                f"{expected.get(name, 'missing')} in {first_name}; make the files alike"
            )


# ---- Kinds of columns


def is_media(kind: Any) -> bool:
    """Return True if a column stores files as Hugging Face does: their bytes and original paths."""
    if not pa.types.is_struct(kind):
        return False
    found = {field.name: field.type for field in kind}
    return (
        found.keys() == {"bytes", "path"}
        and (
            pa.types.is_null(found["path"]) or _type_text(found["path"]) == "str"
        )  # pandas: null if all are None
        and _type_text(found["bytes"]) == "bytes"
    )


def is_list(kind: Any) -> bool:
    """Return True if rows are lists of any length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_number(kind: Any) -> bool:
    """Return True if values are numbers or booleans."""
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def fixed_shape(kind: Any) -> tuple[tuple[int, ...], Any]:
    """Return the sizes of nested fixed-size lists, and the type of their items."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return tuple(shape), kind


def _type_text(kind: Any) -> str | None:
    kind = _held(kind)
    if is_number(kind):
        return _number_name(kind)
    if _is_string(kind):
        return "str"
    if _says_itself(kind):
        return _logical_text(kind) or "str"
    if is_media(kind) or _is_binary(kind):
        return "bytes"
    free = ["*"] if is_list(kind) else []
    shape, item = fixed_shape(kind.value_type if free else kind)
    if is_number(item):
        return f"{_number_name(item)}[{','.join([*free, *map(str, shape)])}]"
    if free and _type_text(kind.value_type) == "bytes":
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


def _held(kind: Any) -> Any:
    """Return the storage type of an extension, or the value type of a dictionary."""
    if isinstance(kind, pa.BaseExtensionType):
        return _held(kind.storage_type)
    return _held(kind.value_type) if pa.types.is_dictionary(kind) else kind


def _is_string(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
                or types.is_binary_view(kind))  # fmt: skip


def _says_itself(kind: Any) -> bool:
    """Return True if a value is not a plain number, and its text represents it completely."""
    return bool(pa.types.is_decimal(kind) or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)))


def _is_json(kind: Any) -> bool:
    """Return True if a nested type holds only values that JSON or text can represent."""
    kind = _held(kind)
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    return is_number(kind) or _says_itself(kind) or _is_string(kind) or bool(pa.types.is_null(kind))


def _number_name(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).name)
