"""Values of cells: texts of tables as numbers, booleans, lists and JSON, by column or one by one."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardkit.errors import SourceError
from shardkit.extras import shell_word

from .arrow_writing import arrow_type, text_array
from .sample_columns import EXACT_INTEGER
from .schema import FieldType
from .strict_json import parse_json

MISSING: Final = frozenset(["NA", "N/A", "n/a", "#N/A", "NULL", "null", "None", "nan", "NaN", "<NA>", "\\N"])
"""Cells of optional numbers and booleans that mean no value, as pandas, R and databases write them."""
TRUTHS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
"""Cells of booleans."""
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_MAX_DIGITS: Final = 20
_TRUTH_CELLS: Final = tuple(
    text_array(cell for cell, value in TRUTHS.items() if value is truth) for truth in (True, False)
)


def cell_value(cell: str, kind: FieldType, name: str, where: str) -> object:
    """Return the value of a cell; dates, times and decimals stay texts, which the schema parses.

    Raises:
        SourceError: The cell does not have this type.
    """
    if kind.kind == "str" or kind.logical is not None:
        return cell
    if kind.kind == "bytes":
        return cell.encode()
    if kind.kind != "scalar":
        return parse_json(cell.encode(), f"{where}, field {name!r}")
    if kind.dtype == "bool" and cell in TRUTHS:
        return TRUTHS[cell]
    if kind.is_whole and kind.dtype != "bool" and _INTEGER.fullmatch(cell):
        return int(cell)
    if "float" in kind.dtype:
        with suppress(ValueError):
            number = float(cell)
            if abs(number) < EXACT_INTEGER or _is_same(cell, number, kind.dtype):
                return number
    shown = repr(cell) if len(cell) <= 40 else repr(cell[:37] + "…")
    raise SourceError(
        f"{where}: field {name!r} is {shown}, expected {kind.required}; fix the row, or pass --schema "
        f"{shell_word(name)}={'str' if cell and cell not in MISSING else f'{kind.required}?'}"
    )


def _is_same(cell: str, number: float, dtype: str) -> bool:
    """Return False if a number overflows, or is an integer that float64 would change."""
    if not math.isfinite(number):
        return "n" in cell.lower()  # nan, inf and infinity
    return dtype != "float64" or re.fullmatch(r"[+-]?[0-9]+", cell) is None or int(cell) == number


def typed_cells(texts: Any, kind: FieldType) -> Any:
    """Return texts as numbers or booleans in the Arrow type of a field, as `cell_value` converts each.

    Return None if pyarrow may convert one in another way, or cannot; nulls stay.
    """
    target = arrow_type(kind)
    try:
        texts = texts.cast(pa.large_string())
        if pa.types.is_boolean(target):
            is_true, is_false = (pc.is_in(texts, value_set=cells) for cells in _TRUTH_CELLS)
            if int(pc.sum(pc.or_(is_true, is_false)).as_py() or 0) + texts.null_count != len(texts):
                return None
            return (
                pc.if_else(texts.is_valid(), is_true, pa.nulls(1, pa.bool_())[0])
                if texts.null_count
                else is_true
            )
        if pa.types.is_integer(target):
            # pyarrow reads hexadecimal digits, and more digits than `cell_value`
            longest = pc.max(pc.binary_length(texts)).as_py() or 0
            if longest > _MAX_DIGITS or pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
                return None
            return texts.cast(target)
        if pc.any(pc.match_substring(texts, "(")).as_py():
            return None  # pyarrow reads nan(1) as a number
        wide = texts.cast(pa.float64())
        found = wide.drop_null()
        numbers = np.frombuffer(found.buffers()[1] or b"", np.float64, len(found), 8 * found.offset)
        with np.errstate(over="ignore"):
            narrow = numbers.astype(kind.numpy_dtype)
        is_plain = (np.abs(numbers) < EXACT_INTEGER) & np.isfinite(narrow)
        return wide.cast(target) if bool((is_plain | np.isnan(numbers)).all()) else None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def is_missing(cell: str, kind: FieldType) -> bool:
    """Return True if a cell of an optional field means no value: an empty one, or of numbers one of `MISSING`."""
    if not kind.optional or kind.kind != "scalar" or kind.logical is not None or cell not in MISSING:
        return kind.optional and not cell
    return not ("float" in kind.dtype and cell.lower() == "nan")


def without_missing(texts: Any, kind: FieldType) -> Any:
    """Return texts of a field, with null for each that `is_missing`."""
    missing = [cell for cell in ("", *MISSING) if is_missing(cell, kind)]
    where = pc.is_in(texts, value_set=text_array(missing))
    return (
        pc.if_else(where, pa.nulls(1, texts.type)[0], texts) if missing and pc.any(where).as_py() else texts
    )
