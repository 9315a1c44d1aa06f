"""Rows of optional fields that have no value: which they are, and what stands in their places in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError, SampleError
from shardkit.formats import Schema, presence_of

__all__ = ["MissingValues"]

_RAGGED = ("ragged", "varying")


class MissingValues:
    """Of one loader.

    Args:
        schema: the stored columns.
        fields: those that are gathered.
        fill: optional field → what its batches hold where there is no value.

    Raises:
        ConfigurationError: `fill` names a field that is not optional, or has a value that the field does not take.
    """

    def __init__(self, schema: Schema, fields: Sequence[str], fill: Mapping[str, Any]) -> None:
        self._kinds = {name: schema[name] for name in fields if schema[name].optional}
        self._fill: dict[str, Any] = {}
        for name, value in fill.items():
            kind = self._kinds.get(name)
            if kind is None or kind.kind in _RAGGED:
                able = [one for one, held in self._kinds.items() if held.kind not in _RAGGED]
                raise ConfigurationError(
                    f"fill: {name!r} is no optional field that is loaded and takes one; "
                    + (f"these are {', '.join(able)}" if able else "there is none")
                )
            one = Schema({name: kind.required})
            try:
                given = np.broadcast_to(np.asarray(value), kind.shape) if kind.kind == "array" else value
                self._fill[name] = one.decode(one.encode({name: given}, where="fill"))[name]
            except (SampleError, ValueError) as error:
                raise ConfigurationError(
                    f"fill={{{name!r}: {value!r:.80}}}: not of type {kind}: {error}"
                ) from None

    def split(self, columns: dict[str, Any]) -> tuple[dict[str, Any], dict[str, NDArray[np.bool_]]]:
        """Gathered columns as (fields with their fills, field → (n,) which rows have a value)."""
        if not self._kinds:
            return columns, {}
        valid = {name: columns.pop(presence_of(name)) for name in self._kinds}
        for name, mask in valid.items():
            if mask.all():
                continue
            column = columns[name]
            if isinstance(column, list):
                fill = self._fill.get(name)
                columns[name] = [value if has else fill for value, has in zip(column, mask, strict=True)]
            elif name in self._fill:
                column[~mask] = self._fill[name]
        return columns, valid

    def of_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """A sample as a row of gathered columns."""
        row = dict(sample)
        for name, kind in self._kinds.items():
            row[presence_of(name)] = row[name] is not None
            if row[name] is None:
                row[name] = self._fill.get(name)
                if row[name] is None and kind.kind == "varying" and kind.items is not None:
                    row[name] = np.zeros(kind.items.shape, kind.items.dtype)
                elif row[name] is None and kind.dtype:
                    row[name] = np.zeros(kind.shape or (0,), kind.dtype) if kind.kind != "scalar" else 0
        return row
