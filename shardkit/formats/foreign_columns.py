"""Convert Arrow columns of foreign files to field types: columns are cast, or encoded value by value.

Builds convert the columns of a source with this module, and blocks of adopted files are decoded with it. A column
with nulls is optional, and json stores nulls; other nulls are errors that name the row.
"""

from __future__ import annotations

import base64
import decimal
import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shardkit.errors import SchemaError, ShardkitError, SourceError
from shardkit.extras import shell_word

from .arrow_writing import arrow_array, arrow_item_type, arrow_type, index_array
from .block import JoinedPayloads, mask_of
from .cells import cell_value, typed_cells
from .sample_columns import encode_column
from .schema import KEY_FIELD, FieldType


class ForeignColumns:
    """The columns of a record batch, converted to field types, and the rows that do not fit."""

    def __init__(
        self, batch: Any, path: str, first_row: int, name_of: Callable[[int], str] | None = None
    ) -> None:
        self._batch, self._path, self._first_row, self._name_of = batch, path, first_row, name_of
        self.bad: dict[int, ShardkitError] = {}
        try:
            batch.validate(full=True)
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise self._damage_error(error) from error

    def _damage_error(self, error: Exception) -> SourceError:
        return SourceError(
            f"{self._path} from row {self._first_row} on: damaged ({error}); fetch or write it again"
        )

    def row_name(self, row: int) -> str:
        return self._name_of(row) if self._name_of else f"{self._path} row {self._first_row + row}"

    def _refuse(self, row: int, why: str) -> None:
        self.bad.setdefault(row, SourceError(f"{self.row_name(row)}: {why}"))

    def keys(self) -> list[str | None]:
        """Return the keys of the rows, or an empty list if the source has none."""
        if KEY_FIELD not in self._batch.schema.names:
            return []
        column = self.column(KEY_FIELD)
        keys: list[str | None] = column.cast(pa.large_string()).to_pylist()
        return keys

    def conform(self, name: str, kind: FieldType) -> Any:
        """Return a column in the Arrow type of its field."""
        column = self.column(name)
        column = self._media(column, kind, name)
        absent = self._check_nulls(column, kind, name)
        where = f"{self._path} from row {self._first_row} on, column {name!r}"
        try:
            array = _cast(column, kind, name, where)
        except (UnicodeDecodeError, pa.ArrowException) as error:
            raise self._damage_error(error) from error
        if array is None:
            return self._by_row(column, kind, name, absent, where)
        if kind.logical is not None:
            numbers, limits = array.view(arrow_item_type(kind)), index_array(kind.logical.limits)
            limits = limits.cast(numbers.type)
            is_outside = pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1]))
            for row in _true_rows(pc.and_kleene(is_outside, numbers.is_valid())):
                word = shell_word(name)
                why = f"field {name!r} is out of range of {kind}; fix it, or pass --schema {word}=int64"
                self._refuse(row, why)
        return array

    def column(self, name: str) -> Any:
        """Return a column; one that this table lacks is null in every row."""
        if name not in self._batch.schema.names:
            return pa.nulls(self._batch.num_rows)
        return plain_column(self._batch.column(self._batch.schema.get_field_index(name)))

    def _media(self, column: Any, kind: FieldType, name: str) -> Any:
        """Return a column of files as one of their bytes."""
        if kind.kind == "list" and is_list(column.type) and is_media(column.type.value_type):
            return _media_lists(column)
        if kind.kind != "bytes" or not is_media(column.type):
            return column
        alone = pc.and_(pc.is_null(media_bytes(column)), pc.is_valid(pc.struct_field(column, "path")))
        for row in _true_rows(alone):
            self._refuse(
                row,
                f"field {name!r} holds no bytes, only a path; save the dataset with the files embedded (save_to_disk "
                "and push_to_hub do so, to_parquet does not)",
            )
        return media_bytes(column)

    def _check_nulls(self, column: Any, kind: FieldType, name: str) -> set[int]:
        """Refuse rows with a null that cannot be stored; return rows without a value."""
        absent = set(_true_rows(column.is_null())) if column.null_count else set()
        if kind.kind == "json":
            return absent if kind.optional else set()
        is_nested = kind.is_packed or kind.kind in ("array", "ragged")
        for row in _null_rows(column) if is_nested else sorted(absent):
            if row not in absent or not kind.optional:
                word = shell_word(name)
                self._refuse(
                    row,
                    f"field {name!r} is null, or holds one; give it a value, leave the row out (--on-error skip), or "
                    f"pass --schema {word}={kind.required}? for rows without a value, or {word}=json for nulls inside "
                    "of one",
                )
        return absent

    def _by_row(self, column: Any, kind: FieldType, name: str, absent: set[int], where: str) -> Any:
        """Encode values one by one; rows that are bad already count as absent."""
        values: list[Any] = []
        is_text = is_string(column.type)
        for row, value in enumerate(column.to_pylist() if is_text else _values(column, kind, where)):
            is_absent = row in absent or row in self.bad
            try:
                if is_text and value is not None and not is_absent:
                    value = cell_value(value, kind, name, self.row_name(row))
            except SourceError as error:
                self.bad[row], is_absent = error, True
            values.append(None if is_absent else value)
        payloads = encode_column(kind, values, name, self.row_name, self.bad)
        present = [b"\0" if row in absent else b"\1" for row in range(len(column))] if kind.optional else None
        return arrow_array(kind, payloads, name, present)


def plain_column(column: Any) -> Any:
    """Return the storage of an extension column, and the values of a dictionary column."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        return _tensors(column)
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if not pa.types.is_dictionary(column.type):
        return column
    if pa.types.is_string_view(column.type.value_type):  # from polars; pyarrow cannot decode views
        column = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.large_string()))
    return column.dictionary_decode()


def _tensor_type(kind: Any) -> Any:
    """Return the nested fixed-size lists of tensors of one shape."""
    order = kind.permutation or range(len(kind.shape))
    nested = kind.value_type
    for axis in reversed(order):
        nested = pa.list_(nested, kind.shape[axis])
    return nested


def _tensors(column: Any) -> Any:
    """Return tensors of one shape as nested fixed-size lists, with their axes in logical order."""
    kind, storage = column.type, column.storage
    size = math.prod(kind.shape)
    values = storage.values[storage.offset * size : (storage.offset + len(storage)) * size]
    if kind.permutation:
        table = values.to_numpy(zero_copy_only=False).reshape(-1, *kind.shape)
        table = table.transpose(0, *(axis + 1 for axis in kind.permutation))
        values = pa.array(table.reshape(-1), values.type)
    sizes = [kind.shape[axis] for axis in kind.permutation or range(len(kind.shape))]
    for depth, one in reversed(list(enumerate(sizes))):
        mask = storage.is_null() if depth == 0 and storage.null_count else None
        values = pa.FixedSizeListArray.from_arrays(values, one, mask=mask)
    return values


def _true_rows(flags: Any) -> list[int]:
    rows: list[int] = np.flatnonzero(mask_of(flags)).tolist()
    return rows


def _null_rows(column: Any) -> list[int]:
    """Return rows that hold a null at any depth of lists."""
    rows = set(_true_rows(column.is_null())) if column.null_count else set()
    if (is_list(column.type) or pa.types.is_fixed_size_list(column.type)) and (
        inner := _null_rows(column.flatten())
    ):
        rows |= set(pc.list_parent_indices(column).to_numpy()[inner].tolist())
    return sorted(rows)


def media_bytes(column: Any) -> Any:
    """Return the bytes of a column of media structs."""
    return pc.struct_field(column, "bytes")


def _media_lists(column: Any) -> Any:
    """Return lists of files as lists of their bytes."""
    made = pa.LargeListArray if pa.types.is_large_list(column.type) else pa.ListArray
    borders = pc.subtract(column.offsets, column.offsets[0])
    mask = column.is_null() if column.null_count else None
    return made.from_arrays(borders, media_bytes(column.flatten()), mask=mask)


# ---- Values


def _cast(column: Any, kind: FieldType, name: str, where: str) -> Any:
    """Return a column in the Arrow type of a field, or None if values must be converted one by one."""
    is_decimal = kind.logical is not None and kind.logical.kind == "decimal"
    nested = pa.types.is_nested(column.type) or pa.types.is_interval(column.type)
    if kind.kind == "json" or kind.is_packed or is_decimal:
        return None
    if kind.kind == "str" and (nested or pa.types.is_decimal(column.type)):
        return None
    if kind.kind in ("array", "ragged"):
        return _fixed_array(column, kind, name) if kind.kind == "array" else _ragged_array(column, kind, name)
    if kind.logical is not None and not pa.types.is_temporal(column.type):
        return None  # texts, which the schema parses
    target = arrow_type(kind)
    if is_string(column.type) and is_number(target):
        return typed_cells(column, kind)
    if pa.types.is_boolean(target) and is_number(column.type) and column.type != target:
        return None  # pyarrow would make any number other than 0 true
    try:
        if kind.logical is None and pa.types.is_temporal(column.type) and pa.types.is_integer(target):
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        made = column if column.type == target else column.cast(target)
        return None if _overflows(column, made) else made
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if is_number(column.type) and is_number(target):
            return None  # encoded one by one: the schema names the rows that do not fit
        raise SchemaError(
            f"{where}: {column.type} cannot be made {kind} ({error}); choose another type: --schema "
            f"{shell_word(name)}=TYPE"
        ) from error


def _overflows(column: Any, made: Any) -> bool:
    """Return True if a cast has made a number infinite, which pyarrow does without an error."""
    if (
        not pa.types.is_floating(made.type)
        or made.type == column.type
        or not pa.types.is_floating(column.type)
    ):
        return False
    wide, narrow = (one.to_numpy(zero_copy_only=False) for one in (column, made))
    return bool((np.isinf(narrow) & ~np.isinf(wide)).any())


def _fixed_array(column: Any, kind: FieldType, name: str) -> Any:
    """Return rows of the shape and dtype of a field; None if they differ or hold a null."""
    shape, item = fixed_shape(column.type)
    if shape != kind.shape or not is_number(item) or _dtype_name(item) != kind.dtype or _null_rows(column):
        return None
    for _ in shape:
        column = column.flatten()
    values: NDArray[Any] = np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
    rows = len(values) // max(1, math.prod(shape))
    present = np.ones((rows, 1), np.uint8) if kind.optional else None
    return arrow_array(kind, values.view(np.uint8).reshape(rows, -1), name, present)


def _ragged_array(column: Any, kind: FieldType, name: str) -> Any:
    """Return lists of numbers of the dtype of a field; None if they differ or hold a null."""
    if not is_list(column.type) or _dtype_name(column.type.value_type) != kind.dtype:
        return None
    borders = column.offsets.to_numpy().astype(np.int64)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    inner = column.values[int(borders[0]) : int(borders[-1])]
    if inner.null_count or np.diff(borders)[~valid].any():
        return None
    values = np.ascontiguousarray(inner.to_numpy(zero_copy_only=False))
    payloads = JoinedPayloads(values.view(np.uint8), np.diff(borders) * values.dtype.itemsize)
    return arrow_array(kind, payloads, name, valid.view(np.uint8).reshape(-1, 1) if kind.optional else None)


def _dtype_name(kind: Any) -> str:
    return str(np.dtype(kind.to_pandas_dtype()).name) if is_number(kind) else ""


def _values(column: Any, kind: FieldType, where: str) -> Sequence[Any]:
    """Return one Python value per row, for `encode_value`."""
    if pa.types.is_null(column.type):
        return [None] * len(column)
    if kind.kind == "json":
        return _json_values(column)
    if kind.is_packed or kind.kind in ("array", "ragged"):
        return _lists(column, kind, where)
    if kind.kind == "str" and pa.types.is_decimal(column.type):
        return [_decimal_text(value) for value in column.to_pylist()]
    if kind.kind == "str":
        return [json.dumps(value, ensure_ascii=False, sort_keys=True) for value in _json_values(column)]
    plain: list[Any] = column.to_pylist()  # decimals and texts
    return plain


def _lists(column: Any, kind: FieldType, where: str) -> list[Any]:
    """Return lists of numbers as arrays: views of the buffer for one ragged level, otherwise Python lists."""
    shape, item = fixed_shape(column.type.value_type) if is_list(column.type) else ((), None)
    if item is not None and is_number(item) and not _null_rows(column):
        inner = column.values
        for _ in shape:
            inner = inner.flatten()
        numbers = inner.to_numpy(zero_copy_only=False).reshape(-1, *shape)
        parts = [numbers[start:stop] for start, stop in pairwise(column.offsets.to_numpy().tolist())]
        if shape or kind.kind != "array":
            return parts
        # an array of another size is kept: the schema then names the row
        size = np.prod(kind.shape)
        return [part.reshape(kind.shape) if part.size == size else part for part in parts]
    if not pa.types.is_nested(column.type):
        raise SchemaError(f"{where}: {column.type} cannot be made {kind}; choose another type")
    values: list[Any] = column.to_pylist()
    return values


def _json_values(column: Any) -> list[Any]:
    """Return the rows of a column as JSON values."""
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
    if pa.types.is_interval(kind):  # three numbers that cannot be converted to each other
        return dict(zip(("months", "days", "nanoseconds"), value, strict=True))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal):
        return _decimal_text(value)
    text: str = pa.array([value], kind).cast(pa.string())[0].as_py()
    return text


def _decimal_text(value: decimal.Decimal | None) -> str | None:
    """Return all digits of a decimal; pyarrow writes exponents, such as 1E-9."""
    return None if value is None else f"{value:f}"


# ---- Kinds of columns


def is_media(kind: Any) -> bool:
    """Return True if a column stores files as Hugging Face does: their bytes and original paths."""
    if not pa.types.is_struct(kind):
        return False
    found = {field.name: field.type for field in kind}
    return (
        found.keys() == {"bytes", "path"}
        and (
            pa.types.is_null(found["path"]) or is_string(held_type(found["path"]))
        )  # pandas: null if all are None
        and is_binary(held_type(found["bytes"]))
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


def held_type(kind: Any) -> Any:
    """Return the storage type of an extension, or the value type of a dictionary."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return _tensor_type(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return held_type(kind.storage_type)
    return held_type(kind.value_type) if pa.types.is_dictionary(kind) else kind


def is_string(kind: Any) -> bool:
    """Return True if values are texts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: Any) -> bool:
    """Return True if values are byte strings."""
    types = pa.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
                or types.is_binary_view(kind))  # fmt: skip
