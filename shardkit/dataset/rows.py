"""The table of a version's rows: what the layout needs of each row, and where scratch has its payloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.layout import RowTable
from shardkit.formats import pack_columns, unpack_columns
from shardkit.manifest import ShardRecord

BATCH: Final = np.dtype([
    ("part", np.int32),  # number of the part
    ("offset", np.int64),  # in the part
    ("length", np.int64),  # bytes of the message
    ("check", np.uint64),  # XXH3-64 of the message
])  # fmt: skip
"""A record batch in scratch."""

_KIND: Final = "scratch-rows"
_MARK: Final = "mark_"
_COLUMNS: Final = ("identity", "stratum", "raw_bytes", "split", "generated")


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Location of each row's record: batch, and row in the batch."""

    batch: NDArray[np.int32]  # index into `batches`
    row: NDArray[np.int32]
    batches: NDArray[np.void]  # (m,) of `BATCH`

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Return the records of parts, one after the other; the parts are numbered in this order."""
        none = np.zeros(0, np.int32)
        before = np.cumsum([0, *(len(part.batches) for part in parts)])
        batch = [part.batch + np.int32(start) for part, start in zip(parts, before.tolist(), strict=False)]
        batches = np.concatenate([np.zeros(0, BATCH), *(part.batches for part in parts)])
        batches["part"] = np.repeat(np.arange(len(parts)), np.diff(before))
        return cls(
            np.concatenate([none, *batch]), np.concatenate([none, *(part.row for part in parts)]), batches
        )

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, places: slice | NDArray[np.int64]) -> Records:
        return Records(self.batch[places], self.row[places], self.batches)

    def only(self, places: NDArray[np.int64]) -> Records:
        """Return some of the records with only the batches that they need, to be sent to another process."""
        used, batch = np.unique(self.batch[places], return_inverse=True)
        batches = self.batches[used] if len(self.batches) else self.batches
        return Records(batch.astype(np.int32), self.row[places], batches)

    @property
    def identity(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        """Arrays that are equal only if the records hold the same bytes in the same order."""
        checks = self.batches["check"]
        return (checks[self.batch] if len(checks) else np.zeros(len(self), np.uint64)), self.row


def unwritten_records(rows: int) -> Records:
    """Return records of rows that are in no scratch file."""
    return Records(np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros(0, BATCH))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(RowTable):
    """One entry per row of one part in the order of adding, or of several parts concatenated."""

    strata: tuple[tuple[str, ...], ...]  # texts that `stratum` indexes; sorted and unique after joining
    split: NDArray[np.uint64]  # hash that decides the split; zeros if the identity decides
    generated: NDArray[np.bool_]  # True if the key is generated from the ordinal
    records: Records  # zeros if rows are only counted
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)  # further columns for a build

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of parts, one after the other; equal strata of several parts become one."""
        strata = tuple(sorted({values for part in parts for values in part.strata}))
        number = {values: index for index, values in enumerate(strata)}
        numbers = [np.array([number[values] for values in part.strata], np.int32) for part in parts]
        stratum = [of[part.stratum] for of, part in zip(numbers, parts, strict=True) if len(part)]
        names = dict.fromkeys(name for part in parts for name in part.marks)

        def joined(name: str, kind: Any, *shape: int) -> NDArray[Any]:
            return np.concatenate([np.zeros((0, *shape), kind), *(getattr(part, name) for part in parts)])

        return cls(
            identity=joined("identity", np.uint64, 2),
            stratum=np.concatenate([np.zeros(0, np.int32), *stratum]),
            raw_bytes=joined("raw_bytes", np.int64),
            strata=strata,
            split=joined("split", np.uint64),
            generated=joined("generated", np.bool_),
            records=Records.join([part.records for part in parts]),
            marks={name: np.concatenate([part.marks[name] for part in parts if len(part)]) for name in names},
        )

    def take(self, places: NDArray[np.int64]) -> Rows:
        """Return the rows at these positions, renumbered; strata without rows are dropped."""
        present, stratum = np.unique(self.stratum[places], return_inverse=True)
        return Rows(
            identity=self.identity[places],
            stratum=stratum.astype(np.int32),
            raw_bytes=self.raw_bytes[places],
            strata=tuple(self.strata[number] for number in present.tolist()),
            split=self.split[places],
            generated=self.generated[places],
            records=self.records[places],
            marks={name: column[places] for name, column in self.marks.items()},
        )

    def to_bytes(self, meta: Mapping[str, object]) -> bytes:
        """Return the rows of a part as a container, together with `meta`."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        columns |= {
            "generated": self.generated.view(np.uint8),
            "batches": self.records.batches.view(np.uint8),
        }
        columns |= {"batch": self.records.batch, "row": self.records.row}
        columns |= {_MARK + name: column for name, column in self.marks.items()}
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Rows, dict[str, Any]]:
        """Return the rows and the `meta` of `to_bytes`."""
        columns = unpack_columns(data, _KIND)
        arrays = columns.arrays
        rows = cls(
            **{name: arrays[name] for name in _COLUMNS if name != "generated"},
            generated=arrays["generated"].view(np.bool_),
            strata=tuple(tuple(values) for values in columns.meta["strata"]),
            records=Records(arrays["batch"], arrays["row"], arrays["batches"].view(BATCH)),
            marks={n.removeprefix(_MARK): column for n, column in arrays.items() if n.startswith(_MARK)},
        )
        return rows, columns.meta["part"]


class PublishedShard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A shard and its index, as objects; the manifest also needs their segments."""

    digest: str
    size: int
    index_digest: str
    index_size: int
    largest_block: int  # raw bytes
    raw_bytes: int

    def record(
        self,
        block_rows: int,
        segment_stratum: Sequence[int] | NDArray[np.int32],
        segment_rows: Sequence[int] | NDArray[np.int64],
    ) -> ShardRecord:
        """Return the entry of a manifest: the segments have these strata and numbers of rows, in row order."""
        return ShardRecord(
            **msgspec.structs.asdict(self),
            block_rows=block_rows,
            segment_stratum=segment_stratum,
            segment_rows=segment_rows,
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """Content of one shard; arrays have one entry per row, in row order."""

    number: int  # number of the shard among the new shards
    ordinal: NDArray[np.int64]
    records: Records
    stratum: NDArray[np.int32] | None  # own stratum of each row if the shard has pooled rows
    segment_stratum: NDArray[np.int32]  # numbers in `Rows`, one per segment, in row order
    segment_rows: NDArray[np.int64]
    block_rows: int  # rows per block
    row_bytes: NDArray[np.int64]  # size of each row in the shard, before compression

    @property
    def raw_bytes(self) -> int:
        """Size of all rows in bytes."""
        return int(self.row_bytes.sum())

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal only for shards with the same rows, segments and block size."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        for column in (self.ordinal, *self.records.identity, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def record(self, shard: PublishedShard) -> ShardRecord:
        """Return the entry of these rows in a manifest, with strata numbered as in `Rows`."""
        return shard.record(self.block_rows, self.segment_stratum, self.segment_rows)

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"
