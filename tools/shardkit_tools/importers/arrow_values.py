"""Arrow columns → fields: which type a column has in shardkit, and its values row by row.

    bool, integers, floats → the same            utf8 → str           binary → bytes
    list of numbers → ragged                     fixed-size lists of numbers → fixed arrays
    list of those → dtype[*,n]                   list of binary, of pictures → bytes[*]
    `Array2D` and its like, as Hugging Face describes them → dtype[*,n], dtype[m,n]
    struct, map, list of anything else → json    dictionary → what it encodes
    date, time, timestamp, duration → the same   decimal → the same, beyond 18 digits str

Lists of lists are json where nobody says more, for rows of several lengths can be in them; ``--schema
boxes=float32[*,*]`` and ``tags=str[*]`` make arrays and lists (`list_notes` tells it).

A text column ``__key__`` holds the samples' keys, as it does in shards of the arrow format.

A struct of bytes and path, as Hugging Face keeps pictures and sounds, is its bytes.

``--schema when=str`` has all of a timestamp as text, ``when=int64`` is the number of units since 1970,
``price=float64`` a number to compute with. What is nested can be json, and str with the same text: bytes
are base64 there, and maps whose keys are no text are lists of pairs.

A column that holds nulls is optional (`null_columns`), and json holds them as they are; others are errors that name the
row.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shardkit.errors import SchemaError, SourceError
from shardkit.formats import FieldType, presence_of
from shardkit.formats.logical import Logical
from shardkit_tools.importers.protocol import (
    MIXED,
    ImportOptions,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    array_note,
    shell_word,
)

__all__ = [
    "KEY",
    "SCAN_ROWS",
    "RowOrError",
    "as_sample",
    "batch_columns",
    "batch_rows",
    "batch_samples",
    "check_same_fields",
    "class_names",
    "column_types",
    "described_arrays",
    "described_features",
    "flat_batch",
    "flat_schema",
    "is_media",
    "kept_columns",
    "list_notes",
    "null_columns",
]

KEY = "__key__"

SCAN_ROWS = 100_000
"""Rows of a source whose nulls tell which fields are optional, where only reading them shows it."""

_MOST_CLASSES = 2**17  # a manifest has no more
_NUMBER = re.compile("bool|u?int(8|16|32|64)|float(16|32|64)")
_UNFIT = re.compile("[\0-\x1f\x7f\ud800-\udfff]")

RowOrError = dict[str, object] | SourceError
"""A row, or why there is none."""


def flat_schema(schema: Any, options: ImportOptions) -> Any:
    """A pyarrow schema with the members of structs in their places, where the user wants it."""
    if not options.flatten:
        return schema
    fields = list(schema)
    for place, field in reversed(list(enumerate(fields))):
        if _is_flattened(field, options):
            inner = [
                pa.field(f"{field.name}.{one.name}", one.type, field.nullable or one.nullable)
                for one in field.type
            ]
            fields[place : place + 1] = flat_schema(pa.schema(inner), options)
    return pa.schema(fields, metadata=schema.metadata)


def flat_batch(batch: Any, options: ImportOptions) -> Any:
    """A record batch of `flat_schema`; where a struct is null, its members are."""
    if not options.flatten:
        return batch
    columns: list[tuple[Any, Any]] = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        inner = [(field, column)]
        if _is_flattened(field, options):
            alone = pa.schema([field])
            members = pa.RecordBatch.from_arrays(
                column.flatten(), [f"{field.name}.{one.name}" for one in field.type]
            )
            members = flat_batch(members, options)
            inner = list(zip(flat_schema(alone, options), members.columns, strict=True))
        columns += inner
    return pa.RecordBatch.from_arrays(
        [column for _, column in columns], schema=pa.schema([f for f, _ in columns])
    )


def _is_flattened(field: Any, options: ImportOptions) -> bool:
    return bool(
        pa.types.is_struct(field.type)
        and field.type.num_fields
        and not is_media(field.type)
        and field.name not in options.field_types
    )


def kept_columns(schema: Any, options: ImportOptions) -> Any:
    """A pyarrow schema without the columns that are left out."""
    return pa.schema([column for column in schema if options.keeps(column.name)], metadata=schema.metadata)


def column_types(
    schema: Any, options: ImportOptions, where: str, nulls: Collection[str] = ()
) -> dict[str, str]:
    """Field → type text of a pyarrow schema.

    Args:
        schema: of the file.
        options: of the user, whose types replace the inferred ones.
        where: the file, for messages.
        nulls: columns of which some rows have no value.

    Raises:
        SourceError: a column has a type that no field has, and the user gave none; or two columns share a
        name.
    """
    if len(set(schema.names)) != len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise SourceError(f"{where}: two columns are called {twice!r}; rename one")
    types, given = {}, options.field_types
    described = described_arrays(described_features(schema))
    for column in schema:
        if column.name == KEY:
            continue
        inferred = given.get(column.name) or _type_text(column.type) or (MIXED if options.unchecked else None)
        held = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
        if inferred == "json" and column.name not in given and _is_list(held):
            inferred = described.get(column.name, inferred)
        if inferred is None:
            word = shell_word(column.name)
            flat = ", or --flatten for a field for each of its members" * pa.types.is_struct(column.type)
            raise SourceError(
                f"{where}: column {column.name!r} is {column.type}, which no field type holds as it is; say what it "
                f"becomes: --schema {word}=json (bytes in it as base64), or {word}=str for its text{flat}"
            )
        is_optional = column.name in nulls and column.name not in given and inferred not in ("json", MIXED)
        types[column.name] = f"{inferred}?" if is_optional else inferred
    return types


def list_notes(schema: Any, types: Mapping[str, str], options: ImportOptions) -> list[str]:
    """How lists of lists of numbers, which are json where nobody says more, become arrays."""
    notes = []
    for column in schema:
        item, depth = column.type, 0
        while _is_list(item):
            item, depth = item.value_type, depth + 1
        if types.get(column.name) == "json" and column.name not in options.field_types and _is_number(item):
            notes.append(array_note(column.name, _number_name(item), depth))
    return notes


def null_columns(batches: Iterable[Any]) -> set[str]:
    """Columns of record batches that hold a null, other than inside of a value."""
    return {
        name for batch in batches for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if (_media_bytes(column) if is_media(column.type) else _plain(column)).null_count
    }  # fmt: skip


def described_features(schema: Any) -> Mapping[str, Any]:
    """What Hugging Face ``datasets`` wrote of the columns into a pyarrow schema; empty where it did not."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def described_arrays(features: Mapping[str, Any]) -> dict[str, str]:
    """Field → type text of the features `Array2D` to `Array5D`, whose first dimension may be free."""
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


def class_names(labels: Sequence[object], schema: Mapping[str, FieldType]) -> tuple[str, ...]:
    """Names of the values of the int64 field ``label`` where all files describe it as the same `ClassLabel`."""
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


def check_same_fields(first: Any, other: Any, first_name: str, where: str) -> None:
    """Refuse a file whose columns are not those of the first.

    Raises:
        SourceError: names the column.
    """
    expected = {column.name: column.type for column in first}
    found = {column.name: column.type for column in other}
    for name in [*expected, *found]:
        if expected.get(name) != found.get(name):
            raise SourceError(
                f"{where}: column {name!r} is {found.get(name, 'missing')}, but "
                f"{expected.get(name, 'missing')} in {first_name}; make the files alike"
            )


def as_sample(found: RowOrError, file: SourceFile, row: int) -> SourceSample | SourceFailure:
    """A row of `batch_rows` as an importer yields it."""
    if isinstance(found, SourceError):
        return SourceFailure(file.name, row, found)
    key = found.pop(KEY, None)
    return SourceSample(found, None if key is None else str(key), file.name, row)


def batch_samples(
    batch: Any, types: Mapping[str, FieldType], file: SourceFile, first_row: int, *, unchecked: bool
) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
    """The rows of a record batch: all at once where that can be, else one by one."""
    columns = batch_columns(batch, types, file.path, first_row) if batch.num_rows else None
    if columns is not None:
        yield SampleColumns(columns, file.name, first_row)
        return
    rows = batch_rows(batch, types, file.path, first_row, unchecked=unchecked)
    for row, found in enumerate(rows, first_row):
        yield as_sample(found, file, row)


def batch_rows(
    batch: Any, types: Mapping[str, FieldType], where: str, first_row: int, *, unchecked: bool
) -> Iterator[RowOrError]:
    """The rows of a record batch, in order; a row that cannot be read is an error in its place.

    Args:
        batch: whose columns are those of `types`, in any order.
        types: of the fields.
        where: the file, for messages.
        first_row: number of the batch's first row in the file.
        unchecked: see `ImportOptions`.

    Raises:
        SourceError: the batch is damaged, or a column cannot be cast to its type at all.
    """
    _check_batch(batch, where, first_row)
    try:
        columns, bad = (
            (_columns_as_they_are(batch, types), dict[int, SourceError]())
            if unchecked
            else _columns(batch, types, where, first_row)
        )
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise SourceError(
            f"{where} from row {first_row} on: damaged ({error}); fetch or write it again"
        ) from error
    for row in range(batch.num_rows):
        yield bad[row] if row in bad else {name: values[row] for name, values in columns.items()}


def batch_columns(
    batch: Any, types: Mapping[str, FieldType], where: str, first_row: int
) -> dict[str, NDArray[Any]] | None:
    """A record batch field by field, where every field is of a fixed size and nothing has to be looked at by row.

    Args:
        batch: see `batch_rows`.
        types: see `batch_rows`.
        where: see `batch_rows`.
        first_row: see `batch_rows`.

    Returns:
        field → array (rows, …), or None: `batch_rows` then.

    Raises:
        SourceError: the batch is damaged.
    """
    if KEY in batch.schema.names or any(kind.item_bytes is None for kind in types.values()):
        return None
    _check_batch(batch, where, first_row)
    columns: dict[str, NDArray[Any]] = {}
    for name, kind in types.items():
        column = _plain(batch.column(batch.schema.get_field_index(name)))
        if kind.optional:
            columns[presence_of(name)] = column.is_valid().to_numpy(zero_copy_only=False)
            if column.null_count and kind.kind == "scalar" and _is_number(column.type):
                column = pc.fill_null(column, pa.scalar(0).cast(column.type))
        found: NDArray[Any] | None = None
        if kind.logical is not None and pa.types.is_temporal(column.type):
            found = np.asarray(_values(column, kind, f"{where} from row {first_row} on, column {name!r}"))
        elif _is_fixed(column.type):
            found = _fixed_array(column, kind)
        if found is None:
            return None
        columns[name] = found
    return columns


def _is_fixed(kind: Any) -> bool:
    return _is_number(kind) or bool(pa.types.is_fixed_size_list(kind) and _is_number(_fixed_shape(kind)[1]))


def _check_batch(batch: Any, where: str, first_row: int) -> None:
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SourceError(
            f"{where} from row {first_row} on: damaged ({error}); fetch or write it again"
        ) from error


def _columns(
    batch: Any, types: Mapping[str, FieldType], where: str, first_row: int
) -> tuple[dict[str, Sequence[Any]], dict[int, SourceError]]:
    """Values of every column, and the rows that hold a null where none can be stored."""
    bad: dict[int, SourceError] = {}
    columns = {}
    for name, kind in _with_key(batch, types):
        column = _plain(batch.column(batch.schema.get_field_index(name)))
        if kind.kind == "bytes" and is_media(column.type):
            for row in _paths_alone(column):
                bad.setdefault(row, _path_error(where, first_row + row, name))
            column = _media_bytes(column)
        if kind.kind == "list" and _is_list(column.type) and is_media(column.type.value_type):
            column = _media_lists(column)
        absent = set(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist())
        if kind.kind != "json":
            is_nested = kind.is_packed or kind.kind in ("array", "ragged")
            for row in _null_rows(column) if is_nested else sorted(absent):
                if row not in absent or not kind.optional:
                    bad.setdefault(row, _null_error(where, first_row + row, name, kind))
        values = _values(column, kind, f"{where} from row {first_row} on, column {name!r}")
        if absent and kind.optional:
            values = [None if row in absent else value for row, value in enumerate(values)]
        columns[name] = values
    return columns, bad


def _columns_as_they_are(batch: Any, types: Mapping[str, FieldType]) -> dict[str, Sequence[Any]]:
    """Values of every column; what Arrow has where there is none, or it does not fit the type."""
    columns: dict[str, Sequence[Any]] = {}
    for name, kind in _with_key(batch, types):
        column = _plain(batch.column(batch.schema.get_field_index(name)))
        held = _media_bytes(column) if kind.kind == "bytes" and is_media(column.type) else column
        absent = held.is_null().to_pylist()
        try:
            values = column.to_pylist() if kind.kind == MIXED else _values(held, kind, "")
        except SchemaError:
            values = column.to_pylist()
        if any(absent):
            own = column.to_pylist()
            values = [own[row] if absent[row] else value for row, value in enumerate(values)]
        columns[name] = values
    return columns


def _with_key(batch: Any, types: Mapping[str, FieldType]) -> list[tuple[str, FieldType]]:
    return [*types.items(), *([(KEY, FieldType("str"))] if KEY in batch.schema.names else [])]


def is_media(kind: Any) -> bool:
    """Whether a column keeps files as Hugging Face does: their bytes, and the paths that they had."""
    if not pa.types.is_struct(kind):
        return False
    found = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    if found.keys() != {"bytes", "path"}:
        return False
    has_paths = (
        pa.types.is_null(found["path"]) or _type_text(found["path"]) == "str"
    )  # pandas: null where all are None
    return has_paths and _type_text(found["bytes"]) == "bytes"


def _media_bytes(column: Any) -> Any:
    return pc.struct_field(column, "bytes")


def _media_lists(column: Any) -> Any:
    """Lists of files as lists of their bytes."""
    made = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
    borders = pc.subtract(column.offsets, column.offsets[0])
    mask = column.is_null() if column.null_count else None
    return made.from_arrays(borders, _media_bytes(column.flatten()), mask=mask)


def _paths_alone(column: Any) -> list[int]:
    """Rows of files that lie elsewhere."""
    alone = pc.and_(pc.is_null(_media_bytes(column)), pc.is_valid(pc.struct_field(column, "path")))
    rows: list[int] = np.flatnonzero(alone.to_numpy(zero_copy_only=False)).tolist()
    return rows


def _path_error(where: str, row: int, name: str) -> SourceError:
    return SourceError(
        f"{where} row {row}: field {name!r} holds no bytes, only a path; save the dataset with the files embedded "
        "(save_to_disk and to_parquet do so by default)"
    )


def _type_text(kind: Any) -> str | None:
    if is_media(kind):
        return "bytes"
    if pa.types.is_dictionary(kind):
        return _type_text(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _type_text(kind.storage_type)
    if _is_number(kind):
        return _number_name(kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "str"
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    ):
        return "bytes"
    shape, item = _fixed_shape(kind)
    if shape and _is_number(item):
        return f"{_number_name(item)}[{','.join(map(str, shape))}]"
    if _is_list(kind):
        return _list_text(kind)
    if _is_text(kind):
        return _logical_text(kind) or "str"
    return "json" if _is_json(kind) else None


def _logical_text(kind: Any) -> str | None:
    """The field type of dates, times and decimals, where there is one."""
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_decimal(kind):
        # Writers such as pandas take the digits of the largest value: the next file may have more.
        text = f"decimal[{max(kind.precision, 18)},{kind.scale}]"
    else:
        name = next(
            name for name in ("timestamp", "duration", "time") if getattr(pa.types, f"is_{name}")(kind)
        )
        text = f"{name}[{kind.unit}{f', {kind.tz}' if name == 'timestamp' and kind.tz else ''}]"
    return text if Logical.parse(text) is not None else None


def _list_text(kind: Any) -> str | None:
    shape, item = _fixed_shape(kind.value_type)
    if _is_number(item):
        return f"{_number_name(item)}[{','.join(['*', *map(str, shape)])}]"
    if _type_text(kind.value_type) == "bytes":
        return "bytes[*]"
    return "json" if _is_json(kind) else None


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: Any) -> bool:
    """Whether a value is no number, and its text says all of it."""
    return bool(pa.types.is_decimal(kind) or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind)))


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _number_name(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).name)


def _is_json(kind: Any) -> bool:
    """Whether a nested type holds only what JSON has, or text says."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_json(kind.storage_type)
    if pa.types.is_nested(kind):
        return all(_is_json(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _is_json(kind.value_type)
    return (
        _is_number(kind)
        or _is_text(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_null(kind)
    )


def _json_values(column: Any) -> list[Any]:
    """The rows of a column as JSON has them."""
    values: list[Any] = column.to_pylist()
    return [_as_json(value, column.type) for value in values]


def _as_json(value: Any, kind: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(kind, pa.BaseExtensionType):
        return _as_json(value, kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _as_json(value, kind.value_type)
    if pa.types.is_struct(kind):
        return {name: _as_json(one, kind.field(name).type) for name, one in value.items()}
    if pa.types.is_map(kind):
        pairs = [[_as_json(key, kind.key_type), _as_json(one, kind.item_type)] for key, one in value]
        has_names = all(isinstance(key, str) for key, _ in pairs) and len({key for key, _ in pairs}) == len(
            pairs
        )
        return dict(pairs) if has_names else pairs
    if pa.types.is_nested(kind):
        return [_as_json(one, kind.value_type) for one in value]
    if pa.types.is_interval(kind):  # of three numbers, none of which says the others
        return dict(zip(("months", "days", "nanoseconds"), value, strict=True))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    text: str = pa.array([value], kind).cast(pa.string())[0].as_py()
    return text


def _fixed_shape(kind: Any) -> tuple[tuple[int, ...], Any]:
    shape: list[int] = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    return tuple(shape), kind


def _plain(column: Any) -> Any:
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if not pa.types.is_dictionary(column.type):
        return column
    if pa.types.is_string_view(column.type.value_type):  # of polars; pyarrow cannot decode views
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.large_string()))
    return column.dictionary_decode()


def _null_rows(column: Any) -> list[int]:
    """Rows that hold a null at any depth."""
    rows = (
        set(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist())
        if column.null_count
        else set()
    )
    if (
        pa.types.is_nested(column.type)
        and not pa.types.is_struct(column.type)
        and not pa.types.is_map(column.type)
    ):
        inner = column.flatten()
        if _null_rows(inner):
            parents = pc.list_parent_indices(column).to_numpy()
            rows |= {int(parents[place]) for place in _null_rows(inner)}
    return sorted(rows)


def _null_error(where: str, row: int, name: str, kind: FieldType) -> SourceError:
    word = shell_word(name)
    return SourceError(
        f"{where} row {row}: field {name!r} is null, or holds one; give it a value, leave the row out "
        f"(--on-error skip), or pass --schema {word}={kind.required}? for rows without a value, or {word}=json for "
        "nulls inside of one"
    )


def _values(column: Any, kind: FieldType, where: str) -> Sequence[Any]:
    """One value per row; what stands in the place of a null does not matter."""
    if kind.kind == "json":
        return _json_values(column)
    if kind.kind == "array":
        found = _fixed_array(column, kind)
        if found is not None:
            rows: Sequence[Any] = found  # type: ignore[assignment]  # an array is a sequence of its rows
            return rows
    if kind.is_packed or kind.kind in ("array", "ragged"):
        return _lists(column, kind, where)
    if kind.kind == "str" and (pa.types.is_nested(column.type) or pa.types.is_interval(column.type)):
        return [json.dumps(value, ensure_ascii=False, sort_keys=True) for value in _json_values(column)]
    if kind.logical is not None and not pa.types.is_temporal(column.type):
        plain: list[Any] = column.to_pylist()  # decimals and texts, which the schema reads
        return plain
    target = {"str": pa.large_string(), "bytes": pa.large_binary()}.get(kind.kind)
    if target is None:
        target = pa.from_numpy_dtype(np.dtype(kind.dtype))
    try:
        if kind.logical is not None:
            column = column.cast(kind.logical.arrow_type)
        cast = column if column.type == target else _cast(column, target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{where}: {column.type} cannot be made {kind} ({error}); choose another type"
        ) from error
    if kind.kind == "scalar":
        filled = cast.fill_null(False if kind.dtype == "bool" else 0) if cast.null_count else cast
        numbers: Sequence[Any] = filled.to_numpy(zero_copy_only=False)
        return numbers
    texts: list[Any] = cast.to_pylist()
    return texts


def _cast(column: Any, target: Any) -> Any:
    if pa.types.is_temporal(column.type) and pa.types.is_integer(target):
        column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
    return column.cast(target)


def _fixed_array(column: Any, kind: FieldType) -> NDArray[Any] | None:
    shape, item = _fixed_shape(column.type)
    if shape != kind.shape or np.dtype(item.to_pandas_dtype()).name != kind.dtype or _null_rows(column):
        return None
    for _ in shape:
        column = column.flatten()
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False).reshape(-1, *shape)
    return values


def _lists(column: Any, kind: FieldType, where: str) -> list[Any]:
    """Lists of numbers as arrays: with one level of any size straight from the buffer, others through Python lists."""
    shape, item = _fixed_shape(column.type.value_type) if _is_list(column.type) else ((), None)
    if item is not None and _is_number(item) and not _null_rows(column):
        inner = column.values
        for _ in shape:
            inner = inner.flatten()
        numbers = inner.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        borders = column.offsets.to_numpy().tolist()
        parts = [numbers[start:stop] for start, stop in pairwise(borders)]
        return parts if shape or kind.kind != "array" else [_reshaped(part, kind) for part in parts]
    if not pa.types.is_nested(column.type):
        raise SchemaError(f"{where}: {column.type} cannot be made {kind}; choose another type")
    values: list[Any] = column.to_pylist()
    return values


def _reshaped(part: Any, kind: FieldType) -> Any:
    """The array in its shape where it has as many items; otherwise as it is: the schema then names the row."""
    return part.reshape(kind.shape) if part.size == np.prod(kind.shape) else part
