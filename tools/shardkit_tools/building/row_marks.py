"""What pass 1 notes of every row beyond its size: the digest of one field, the number of items of another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.extents import Extent
from shardkit.errors import ConfigurationError
from shardkit.formats import Schema

_HIGH, _LOW = "unique_high", "unique_low"
ITEMS = "items"
"""Mark of a row: how many items its packed field has."""


@dataclass(frozen=True, slots=True)
class RowMarks:
    """Which marks a row gets.

    Attributes:
        unique: place in the schema of the field whose values are to be different, or None.
        packed: place of the ragged field whose items are counted, or None.
        item_bytes: of one of its items.
    """

    unique: int | None = None
    packed: int | None = None
    item_bytes: int = 1

    @classmethod
    def of(cls, schema: Schema, *, unique: str | None, packed: str | None) -> RowMarks:
        """The marks for these fields.

        Raises:
            ConfigurationError: there is no such field, or it is not ragged.
        """
        for option, name in (("--unique", unique), ("--pack", packed)):
            if name is not None and name not in schema:
                raise ConfigurationError(
                    f"{option} {name}: no such field; the fields are {', '.join(schema)}"
                )
            if name is not None and schema[name].optional:
                raise ConfigurationError(
                    f"{option} {name}: it is of type {schema[name]}: rows may have no value; give every row one, and "
                    f"pass --schema {name}={schema[name].required}"
                )
        if packed is not None and schema[packed].kind != "ragged":
            raise ConfigurationError(
                f"--pack {packed}: it is of type {schema[packed]}; expected rows of any length, such as int32[*]"
            )
        return cls(
            schema.stored.position(unique) if unique is not None else None,
            schema.stored.position(packed) if packed is not None else None,
            schema[packed].numpy_dtype.itemsize if packed is not None else 1,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the marks, in the order of `marks`."""
        return (
            *((_HIGH, _LOW) if self.unique is not None else ()),
            *((ITEMS,) if self.packed is not None else ()),
        )

    def marks(self, payloads: Sequence[bytes | Extent]) -> list[int]:
        """The marks of a row, whose marked payloads are here."""
        found: list[int] = []
        if self.unique is not None:
            payload = payloads[self.unique]
            assert isinstance(payload, bytes), "no payload is left in the source where rows are marked"
            # SHA-256, not XXH3: nobody can make two values that are taken for one another.
            digest = int.from_bytes(hashlib.sha256(payload).digest()[:16], "little")
            found += divmod(digest, 2**64)
        if self.packed is not None:
            payload = payloads[self.packed]
            assert isinstance(payload, bytes), "no payload is left in the source where rows are packed"
            found.append(len(payload) // self.item_bytes)
        return found


def first_of_equals(marks: Mapping[str, NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Places of the rows whose value no row before them has, rising.

    Args:
        marks: of the rows in source order; sorting takes another 8 bytes a row.
    """
    high, low = marks[_HIGH], marks[_LOW]
    order = np.lexsort((low, high))  # stable: of equal values the first in the source comes first
    if not len(order):
        return order.astype(np.int64)
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = (high[order[1:]] != high[order[:-1]]) | (low[order[1:]] != low[order[:-1]])
    places: NDArray[np.int64] = np.sort(order[is_new]).astype(np.int64)
    return places
