"""Field types of what a function returns, from the first samples that it makes.

    bool, int, float, str, bytes    bool, int64, float64, str, bytes
    numpy scalar, array of one axis, of more axes    its dtype, dtype[*], dtype[shape]
    list of ints, of numbers        int64[*], float64[*]
    any other list, dict            json

A field that the source has too keeps its type where the values fit it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

import numpy as np

from shardkit.errors import SampleError, SchemaError, SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.options import MIXED

_EMPTY = "[]"  # an empty list: of whatever the others are


def types_of(
    samples: Iterable[tuple[str, Mapping[str, object]]],
    source: Schema,
    given: Mapping[str, str],
    *,
    skip: bool = False,
) -> Schema:
    """The schema that holds these samples.

    Args:
        samples: (where, sample); the first one fixes the fields and their order.
        source: fields that keep their type where they can.
        given: field → type that the user says.
        skip: values that do not fit those before them count for nothing; they are left out when they are read.

    Raises:
        SchemaError: values of a field have no common type; names both rows. Or ``given`` has other fields.
        SourceError: there are no samples.
    """
    rows = list(samples)
    if not rows:
        raise SourceError("no sample is left after --apply; change the function or the source")
    names = list(rows[0][1])
    for name in given:
        if name not in names:
            raise SchemaError(
                f"--output-schema names the field {name!r}, which the samples do not have; they have "
                f"{', '.join(names)}"
            )
    return Schema.parse(
        {
            name: given[name]
            if name in given
            else _field(name, [(where, row[name]) for where, row in rows if name in row], source, skip)
            for name in names
        }
    )


def _field(name: str, values: list[tuple[str, object]], source: Schema, skip: bool) -> str:
    if name in source and source[name].kind != MIXED and _fits(name, [v for _, v in values], source, skip):
        return str(source[name])
    kind, first = _EMPTY, ""
    some = [(where, value) for where, value in values if value is not None]
    for where, value in some:
        found = _type(name, value, where)
        common = _common(kind, found)
        if common is None and skip:
            continue
        if common is None:
            raise SchemaError(
                f"field {name!r} is {kind} in {first} and {found} in {where}; make them of one type, or say which "
                f"with --output-schema {name}=…"
            )
        if common != kind:
            kind, first = common, where
    return ("json" if kind == _EMPTY else kind) + "?" * (len(some) < len(values))


def _fits(name: str, values: list[object], source: Schema, skip: bool) -> bool:
    """Whether all values fit the type that the source's field has, or most where others are left out."""
    alone, fitting = Schema({"value": source[name]}), 0
    for value in values:
        try:
            alone.encode({"value": value}, where="")
            fitting += 1
        except SampleError:
            if not skip:
                return False
    return not skip or 2 * fitting > len(values)


def _type(name: str, value: object, where: str) -> str:
    match value:
        case bool():
            return "bool"
        case int():
            return "int64"
        case np.generic() | np.ndarray():
            return _array_type(np.asarray(value))
        case float():
            return "float64"
        case str():
            return "str"
        case bytes() | bytearray() | memoryview():
            return "bytes"
        case list() | tuple():
            return _list_type(value)
        case dict():
            return "json"
        case dt.date() | dt.time() | dt.timedelta():
            return _time_type(value)
    if hasattr(value, "__array__"):
        return _array_type(np.asarray(value))
    raise SchemaError(
        f"{where}: field {name!r} is a {type(value).__name__}, which has no field type; return numbers, text, "
        "bytes, lists, dicts, arrays, or None"
    )


def _time_type(value: dt.date | dt.time | dt.timedelta) -> str:
    if isinstance(value, dt.datetime):
        return "timestamp[us, UTC]" if value.tzinfo else "timestamp[us]"
    return {dt.date: "date", dt.time: "time[us]"}.get(type(value), "duration[us]")


def _array_type(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> str:
    if array.ndim == 0:
        return str(array.dtype)
    return f"{array.dtype}[{','.join(map(str, array.shape)) if array.ndim > 1 else '*'}]"


def _list_type(value: list[object] | tuple[object, ...]) -> str:
    if not value:
        return _EMPTY
    kinds = {type(item) for item in value}
    if kinds == {int}:
        return "int64[*]"
    return "float64[*]" if kinds <= {int, float} else "json"


def _common(a: str, b: str) -> str | None:
    if a == b or b == _EMPTY:
        return a if a != _EMPTY or b == _EMPTY else b
    if a == _EMPTY:
        return b
    for whole, fraction in (("int64", "float64"), ("int64[*]", "float64[*]")):
        if {a, b} == {whole, fraction}:
            return fraction
    if "json" in (a, b) and {a, b} <= {"json", "int64[*]", "float64[*]"}:
        return "json"
    return None
