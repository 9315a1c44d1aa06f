"""What is kept in memory of every row in scratch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from shardkit.formats import pack_columns, unpack_columns

__all__ = ["RowColumns"]

_KIND = "scratch-rows"
_MARK = "mark_"


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """One entry per row of a part, in the order of adding.

    Attributes:
        strata: value texts of the strata of this part; ``stratum`` indexes them.
        identity_high, identity_low: uint64[n]. split: uint64[n], zeros where the identity decides.
        stratum: int32[n]. raw_bytes: int64[n].
        generated: uint8[n], 1 where the key is to be made from the ordinal.
        offset, length: int64[n], the record in the part. check: uint64[n], XXH3-64 of the record.
        marks: name → uint64[n], what else a build wants to know of every row.
    """

    strata: tuple[tuple[str, ...], ...]
    identity_high: NDArray[np.uint64]
    identity_low: NDArray[np.uint64]
    stratum: NDArray[np.int32]
    raw_bytes: NDArray[np.int64]
    split: NDArray[np.uint64]
    generated: NDArray[np.uint8]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    check: NDArray[np.uint64]
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stratum)

    def to_bytes(self, meta: dict[str, object]) -> bytes:
        """The columns as a container, with something to remember them by."""
        names = {one.name for one in fields(self)} - {"strata", "marks"}
        columns = {name: getattr(self, name) for name in sorted(names)}
        columns |= {_MARK + name: column for name, column in self.marks.items()}
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[RowColumns, dict[str, object]]:
        """What `to_bytes` was given.

        Raises:
            FormatError: the bytes are not of `to_bytes`.
        """
        columns = unpack_columns(data, _KIND)
        strata = tuple(tuple(values) for values in columns.meta["strata"])
        named = {name: array for name, array in columns.arrays.items() if not name.startswith(_MARK)}
        marks = {
            name.removeprefix(_MARK): columns.arrays[name] for name in columns.arrays.keys() - named.keys()
        }
        return cls(strata=strata, marks=marks, **named), columns.meta["part"]
