"""The rows of Arrow's record batches: all at once where every field is of a fixed size, else one by one.

A column that holds nulls is optional, and json holds them as they are; others are errors that name the row.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shardkit.errors import SchemaError, SourceError
from shardkit.formats import FieldType, presence_of
from shardkit_tools.importers.arrow_types import KEY, fixed_shape, is_list, is_media, is_number
from shardkit_tools.importers.protocol import (
    MIXED,
    SampleColumns,
    SampleStream,
    SourceFailure,
    SourceFile,
    SourceSample,
    shell_word,
)


def null_columns(batches: Iterable[Any]) -> set[str]:
    """Columns of record batches that hold a null, other than inside of a value."""
    return {
        name for batch in batches for name, column in zip(batch.schema.names, batch.columns, strict=True)
        if (_media_bytes(column) if is_media(column.type) else _plain(column)).null_count
    }  # fmt: skip


def read_batch(
    batch: Any, types: Mapping[str, FieldType], file: SourceFile, first_row: int, *, unchecked: bool
) -> SampleStream:
    """The rows of a record batch, at once where none has to be looked at; one with a null costs its own sample only."""
    if not batch.num_rows:
        return
    where = f"{file.path} from row {first_row} on"
    try:
        batch.validate(full=True)
        columns = None if KEY in batch.schema.names else _arrays(batch, types, where)
        if columns is not None:
            yield SampleColumns(columns, file.name, first_row)
            return
        rows = _Rows(file.path, first_row)
        read = rows.read_unchecked if unchecked else rows.read
        keyed = [*types.items(), *([(KEY, FieldType("str"))] if KEY in batch.schema.names else [])]
        values = {name: read(_column(batch, name), kind, name) for name, kind in keyed}
    except (UnicodeDecodeError, pa.ArrowException) as error:
        raise SourceError(f"{where}: damaged ({error}); fetch or write it again") from error
    keys = values.pop(KEY, None)
    for row in range(batch.num_rows):
        if row in rows.bad:
            yield SourceFailure(file.name, first_row + row, rows.bad[row])
            continue
        key = None if keys is None or keys[row] is None else str(keys[row])
        yield SourceSample({name: one[row] for name, one in values.items()}, key, file.name, first_row + row)


def _arrays(batch: Any, types: Mapping[str, FieldType], where: str) -> dict[str, NDArray[Any]] | None:
    """Field → array (rows, …), where every field is of a fixed size and nothing has to be looked at by row."""
    if any(kind.item_bytes is None for kind in types.values()):
        return None
    columns: dict[str, NDArray[Any]] = {}
    for name, kind in types.items():
        column = _column(batch, name)
        if kind.optional:
            columns[presence_of(name)] = column.is_valid().to_numpy(zero_copy_only=False)
            if column.null_count and kind.kind == "scalar" and is_number(column.type):
                column = pc.fill_null(column, pa.scalar(0).cast(column.type))
        found: NDArray[Any] | None = None
        if kind.logical is not None and pa.types.is_temporal(column.type):
            found = np.asarray(_values(column, kind, f"{where}, column {name!r}"))
        elif is_number(fixed_shape(column.type)[1]):
            found = _fixed_array(column, kind)
        if found is None:
            return None
        columns[name] = found
    return columns


class _Rows:
    """Values of columns, and the rows that hold a null where none can be stored."""

    def __init__(self, path: str, first_row: int) -> None:
        self._path, self._first_row = path, first_row
        self.bad: dict[int, SourceError] = {}

    def read(self, column: Any, kind: FieldType, name: str) -> Sequence[Any]:
        """One value per row."""
        if kind.kind == "bytes" and is_media(column.type):
            alone = pc.and_(pc.is_null(_media_bytes(column)), pc.is_valid(pc.struct_field(column, "path")))
            for row in _true_rows(alone):
                self._refuse(row, f"field {name!r} holds no bytes, only a path; save the dataset with the files "
                                  "embedded (save_to_disk and to_parquet do so by default)")  # fmt: skip
            column = _media_bytes(column)
        if kind.kind == "list" and is_list(column.type) and is_media(column.type.value_type):
            column = _media_lists(column)
        absent = set(_true_rows(column.is_null()))
        if kind.kind != "json":
            is_nested = kind.is_packed or kind.kind in ("array", "ragged")
            for row in _null_rows(column) if is_nested else sorted(absent):
                if row not in absent or not kind.optional:
                    word = shell_word(name)
                    self._refuse(row, f"field {name!r} is null, or holds one; give it a value, leave the row out "
                                      f"(--on-error skip), or pass --schema {word}={kind.required}? for rows without a "
                                      f"value, or {word}=json for nulls inside of one")  # fmt: skip
        values = _values(column, kind, f"{self._path} from row {self._first_row} on, column {name!r}")
        if absent and kind.optional:
            return [None if row in absent else value for row, value in enumerate(values)]
        return values

    def read_unchecked(self, column: Any, kind: FieldType, name: str) -> Sequence[Any]:
        """The same; what Arrow has where there is no value, or it does not fit the type."""
        held = _media_bytes(column) if kind.kind == "bytes" and is_media(column.type) else column
        try:
            values = column.to_pylist() if kind.kind == MIXED else _values(held, kind, "")
        except SchemaError:
            values = column.to_pylist()
        if absent := set(_true_rows(held.is_null())):
            own = column.to_pylist()
            return [own[row] if row in absent else value for row, value in enumerate(values)]
        return values

    def _refuse(self, row: int, why: str) -> None:
        self.bad.setdefault(row, SourceError(f"{self._path} row {self._first_row + row}: {why}"))


def _column(batch: Any, name: str) -> Any:
    return _plain(batch.column(batch.schema.get_field_index(name)))


def _plain(column: Any) -> Any:
    """What an extension stores, and a dictionary encodes."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if not pa.types.is_dictionary(column.type):
        return column
    if pa.types.is_string_view(column.type.value_type):  # of polars; pyarrow cannot decode views
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.large_string()))
    return column.dictionary_decode()


def _true_rows(flags: Any) -> list[int]:
    rows: list[int] = np.flatnonzero(flags.to_numpy(zero_copy_only=False)).tolist()
    return rows


def _null_rows(column: Any) -> list[int]:
    """Rows that hold a null at any depth of lists."""
    rows = set(_true_rows(column.is_null())) if column.null_count else set()
    if (is_list(column.type) or pa.types.is_fixed_size_list(column.type)) and (
        inner := _null_rows(column.flatten())
    ):
        rows |= set(pc.list_parent_indices(column).to_numpy()[inner].tolist())
    return sorted(rows)


def _media_bytes(column: Any) -> Any:
    return pc.struct_field(column, "bytes")


def _media_lists(column: Any) -> Any:
    """Lists of files as lists of their bytes."""
    made = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
    borders = pc.subtract(column.offsets, column.offsets[0])
    mask = column.is_null() if column.null_count else None
    return made.from_arrays(borders, _media_bytes(column.flatten()), mask=mask)


# ---- Values


def _values(column: Any, kind: FieldType, where: str) -> Sequence[Any]:
    """One value per row; what stands in the place of a null does not matter."""
    if kind.kind == "json":
        return _json_values(column)
    if kind.kind == "array" and (found := _fixed_array(column, kind)) is not None:
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
        if pa.types.is_temporal(column.type) and pa.types.is_integer(target):
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        cast = column if column.type == target else column.cast(target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"{where}: {column.type} cannot be made {kind} ({error}); choose another type"
        ) from error
    if kind.kind != "scalar":
        texts: list[Any] = cast.to_pylist()
        return texts
    filled = cast.fill_null(False if kind.dtype == "bool" else 0) if cast.null_count else cast
    numbers: Sequence[Any] = filled.to_numpy(zero_copy_only=False)
    return numbers


def _fixed_array(column: Any, kind: FieldType) -> NDArray[Any] | None:
    """Rows of the shape and dtype of a field; None where they are not, or hold a null."""
    shape, item = fixed_shape(column.type)
    if shape != kind.shape or np.dtype(item.to_pandas_dtype()).name != kind.dtype or _null_rows(column):
        return None
    for _ in shape:
        column = column.flatten()
    values: NDArray[Any] = column.to_numpy(zero_copy_only=False).reshape(-1, *shape)
    return values


def _lists(column: Any, kind: FieldType, where: str) -> list[Any]:
    """Lists of numbers as arrays: with one level of any size straight from the buffer, others through Python lists."""
    shape, item = fixed_shape(column.type.value_type) if is_list(column.type) else ((), None)
    if item is not None and is_number(item) and not _null_rows(column):
        inner = column.values
        for _ in shape:
            inner = inner.flatten()
        numbers = inner.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        parts = [numbers[start:stop] for start, stop in pairwise(column.offsets.to_numpy().tolist())]
        if shape or kind.kind != "array":
            return parts
        # what does not fit stays as it is: the schema then names the row
        size = np.prod(kind.shape)
        return [part.reshape(kind.shape) if part.size == size else part for part in parts]
    if not pa.types.is_nested(column.type):
        raise SchemaError(f"{where}: {column.type} cannot be made {kind}; choose another type")
    values: list[Any] = column.to_pylist()
    return values


def _json_values(column: Any) -> list[Any]:
    """The rows of a column as JSON has them."""
    return [_as_json(value, column.type) for value in column.to_pylist()]


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
        pairs = [(_as_json(key, kind.key_type), _as_json(one, kind.item_type)) for key, one in value]
        named = {key: one for key, one in pairs if isinstance(key, str)}
        return named if len(named) == len(pairs) else [list(pair) for pair in pairs]
    if pa.types.is_nested(kind):
        return [_as_json(one, kind.value_type) for one in value]
    if pa.types.is_interval(kind):  # of three numbers, none of which says the others
        return dict(zip(("months", "days", "nanoseconds"), value, strict=True))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    text: str = pa.array([value], kind).cast(pa.string())[0].as_py()
    return text
