"""Encode samples by column: the payloads of `Schema.encode`, without a call for each value of a plain type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SampleError

from .block import PayloadColumn, payloads_of
from .json_values import encode_json
from .schema import FieldType, Schema, encode_value, presence_of
from .values import Unfit, convert_items

LARGEST_INT64: Final = 2**63 - 1
EXACT_INTEGER: Final = 2**53
"""Largest integer up to which float64 holds every one."""


def encode_rows(
    schema: Schema, rows: Sequence[Mapping[str, object]], name_of: Callable[[int], str]
) -> tuple[dict[str, PayloadColumn], dict[int, SampleError]]:
    """Encode samples.

    Args:
        schema: fields to encode; others of a sample are ignored.
        rows: samples; a missing field is None, and a value of a json field is as a parser of JSON returns it.
        name_of: returns the name of a row, for messages.

    Returns:
        Stored column → payloads, and the error of each row that does not fit: its payloads are to be left out.
    """
    columns: dict[str, PayloadColumn] = {}
    bad: dict[int, SampleError] = {}
    for name, kind in schema.items():
        values = [row.get(name) for row in rows]
        if kind.optional:
            is_present = [value is not None for value in values]
            columns[presence_of(name)] = np.array(is_present, np.uint8).reshape(-1, 1)
        columns[name] = encode_column(kind, values, name, name_of, bad)
    return {name: columns[name] for name in schema.stored}, bad


def encode_column(
    kind: FieldType,
    values: Sequence[object],
    name: str,
    name_of: Callable[[int], str],
    bad: dict[int, Any],
) -> PayloadColumn:
    """Return the payloads of a field; None is no value if it is optional. Errors are added to `bad` by row."""
    places = [row for row, value in enumerate(values) if value is not None] if kind.optional else []
    if kind.optional and len(places) < len(values):
        found: dict[int, Any] = {}
        present = encode_column(
            kind, [values[row] for row in places], name, lambda row: name_of(places[row]), found
        )
        for row, error in found.items():
            bad.setdefault(places[row], error)
        if isinstance(present, np.ndarray):
            spread = np.zeros((len(values), present.shape[1]), np.uint8)
            spread[places] = present
            return spread
        payloads = iter(payloads_of(present))
        return [b"" if value is None else next(payloads) for value in values]
    encoded = _plain_column(kind, values)
    if encoded is not None:
        return encoded
    made: list[bytes] = []
    for row, value in enumerate(values):
        try:
            made.append(encode_value(kind, value, name_of(row), name))
        except SampleError as error:
            bad.setdefault(row, error)
            made.append(bytes(kind.item_bytes or 0))
    if kind.item_bytes is None:
        return made
    return np.frombuffer(b"".join(made), np.uint8).reshape(len(made), kind.item_bytes)


def _plain_column(kind: FieldType, values: Sequence[Any]) -> PayloadColumn | None:
    """Return the payloads of values of one plain type that all fit, or None: then each is encoded by itself."""
    types = set(map(type, values))
    try:
        if kind.kind == "bytes" and types == {bytes}:
            return values
        if kind.kind == "str" and types == {str}:
            return [value.encode() for value in values]
        if kind.kind == "json":
            return [encode_json(value, is_parsed=True) for value in values]
        if kind.kind != "scalar" or kind.logical is not None:
            return None
        if kind.dtype == "bool":
            return np.array(values, np.uint8).reshape(-1, 1) if types == {bool} else None
        items = convert_items(kind.numpy_dtype, _numbers(values, types))
    except (Unfit, OverflowError, UnicodeEncodeError):
        return None
    return items.view(np.uint8).reshape(len(values), items.itemsize)


def _numbers(values: Sequence[Any], types: set[type]) -> NDArray[Any]:
    """Return Python numbers as an array; raise Unfit if numpy would change one."""
    if types == {float}:
        return np.array(values)
    if types == {int}:
        return np.array(values, np.uint64 if max(values) > LARGEST_INT64 else np.int64)
    if types == {int, float} and all(abs(value) <= EXACT_INTEGER for value in values if type(value) is int):
        return np.array(values, np.float64)
    raise Unfit("not numbers of one type")


def is_exact(integer: int) -> bool:
    """Return True if float64 holds an integer, of up to 64 bits."""
    return abs(integer) <= EXACT_INTEGER or (abs(integer) < 2**64 and int(float(integer)) == integer)
