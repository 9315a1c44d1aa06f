"""What is kept in memory of every row: columns of parts, joined, checked for duplicate keys, handed out by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import generated_key, key_identity
from shardkit.dataset.layout import Layout, RowTable
from shardkit.dataset.scratch_reading import Records, ScratchReader
from shardkit.errors import SampleError
from shardkit.formats import pack_columns, unpack_columns

_KIND = "scratch-rows"
_MARK = "mark_"
_RECORDS = ("offset", "length", "check")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rows(RowTable):
    """One entry per row: of a part in the order of adding, or of all parts, one behind the other."""

    strata: tuple[tuple[str, ...], ...]  # texts that `stratum` indexes; sorted where parts are joined
    split: NDArray[np.uint64]  # the hash that decides the split; zeros where the identity does
    generated: NDArray[np.bool_]  # whether the key is made from the ordinal
    records: Records  # zeros where rows are counted only
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)  # what else a build wants to know

    def take(self, places: NDArray[np.int64]) -> Rows:
        """Some of the rows, whose places are their ordinals then; strata without rows go."""
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

    def to_bytes(self, meta: dict[str, object]) -> bytes:
        """The columns of a part as a container, with something to remember them by."""
        columns = {
            "identity_high": self.identity[:, 0],
            "identity_low": self.identity[:, 1],
            **{name: getattr(self, name) for name in ("stratum", "raw_bytes", "split")},
            "generated": self.generated.view(np.uint8),
            **{name: getattr(self.records, name) for name in _RECORDS},
            **{_MARK + name: column for name, column in self.marks.items()},
        }
        strata = [list(values) for values in self.strata]
        return pack_columns(_KIND, {"strata": strata, "part": meta}, columns, compress=False)

    @classmethod
    def from_bytes(cls, data: bytes) -> tuple[Rows, dict[str, object]]:
        """What `to_bytes` was given.

        Raises:
            FormatError: the bytes are not of `to_bytes`.
        """
        columns = unpack_columns(data, _KIND)
        arrays = columns.arrays
        rows = cls(
            identity=np.stack([arrays["identity_high"], arrays["identity_low"]], axis=1),
            stratum=arrays["stratum"],
            raw_bytes=arrays["raw_bytes"],
            strata=tuple(tuple(values) for values in columns.meta["strata"]),
            split=arrays["split"],
            generated=arrays["generated"].view(np.bool_),
            records=Records.of_part(*(arrays[name] for name in _RECORDS)),
            marks={n.removeprefix(_MARK): column for n, column in arrays.items() if n.startswith(_MARK)},
        )
        return rows, columns.meta["part"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """What one shard is to hold; arrays have one entry per row, in row order."""

    number: int  # of the shard in the manifest
    ordinal: NDArray[np.int64]
    records: Records
    stratum: NDArray[np.int32] | None  # number of each row's own stratum where the shard has pooled rows
    segment_stratum: NDArray[np.int32]  # numbers in the manifest, one per segment, in row order
    segment_rows: NDArray[np.int64]
    block_rows: int  # rows per block
    raw_bytes: int  # of all rows

    def fingerprint(self) -> str:
        """32 hex digits that are equal only where the shard holds the same rows in the same way."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        records = self.records
        for column in (self.ordinal, records.check, records.length, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"


def join_parts(parts: Sequence[Rows]) -> Rows:
    """The rows of parts, one behind the other; strata that several parts have are one."""
    strata = tuple(sorted({values for part in parts for values in part.strata}))
    number = {values: index for index, values in enumerate(strata)}

    def joined(arrays: Iterable[NDArray[Any]], dtype: type, *shape: int) -> NDArray[Any]:
        return np.concatenate([*arrays, np.zeros((0, *shape), dtype)]).astype(dtype, copy=False)

    numbers = [np.array([number[values] for values in part.strata], np.int32) for part in parts]
    stratum = (of[part.stratum] for of, part in zip(numbers, parts, strict=True) if len(part))
    return Rows(
        identity=joined((part.identity for part in parts), np.uint64, 2),
        stratum=joined(stratum, np.int32),
        raw_bytes=joined((part.raw_bytes for part in parts), np.int64),
        strata=strata,
        split=joined((part.split for part in parts), np.uint64),
        generated=joined((part.generated for part in parts), np.bool_),
        records=Records(
            np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts]),
            joined((part.records.offset for part in parts), np.int64),
            joined((part.records.length for part in parts), np.int64),
            joined((part.records.check for part in parts), np.uint64),
        ),
        marks={
            name: np.concatenate([part.marks[name] for part in parts])
            for name in (parts[0].marks if parts else ())
        },
    )


def check_unique_keys(
    rows: Rows,
    describe: Callable[[int], str],
    *,
    first_ordinal: int = 0,
    held: NDArray[np.uint64] | None = None,
) -> None:
    """Refuse a key that two rows share, given or generated.

    Args:
        rows: all rows that are to be written.
        describe: names a row by key and source, given its place in ``rows``.
        first_ordinal: of the first row.
        held: uint64[m, 2], identities of the keys of the version that is appended to.

    Raises:
        SampleError: names the key and both rows.
    """
    identity = rows.identity
    before = 0 if held is None else len(held)
    if rows.generated.all() and not before:
        return  # ordinals differ
    if rows.generated.any():
        identity = identity.copy()
        for place in np.flatnonzero(rows.generated).tolist():
            identity[place] = key_identity(generated_key(first_ordinal + place))
    if held is not None:
        identity = np.concatenate([held, identity])
    high = np.sort(identity[:, 0])
    if not (high[1:] == high[:-1]).any():
        return
    order = np.lexsort((identity[:, 1], identity[:, 0]))  # stable: of equal keys the earlier row comes first
    ranked = identity[order]
    equal = np.flatnonzero((ranked[1:] == ranked[:-1]).all(axis=1))
    if len(equal):
        first = int(order[equal].min())
        second = int(order[equal[int(order[equal].argmin())] + 1])
        other = "a sample that is there already" if first < before else describe(first - before)
        raise SampleError(
            f"{describe(second - before)} has the key of {other}; keys are unique in a dataset: leave "
            "one out, give it another key, or give no keys"
        )


def rows_of_shards(
    rows: Rows, layout: Layout, manifest_stratum: NDArray[np.int32], first_ordinal: int = 0
) -> Iterator[ShardRows]:
    """What each shard holds, in shard order; made one at a time."""
    for shard in range(layout.shards):
        first, last = int(layout.shard_start[shard]), int(layout.shard_start[shard + 1])
        ordinal = layout.rows[first:last]
        segments = layout.segments_of(shard)
        segment_stratum = layout.segment_stratum[segments]
        has_pool = bool((segment_stratum == len(layout.pooled)).any())
        yield ShardRows(
            number=shard,
            ordinal=first_ordinal + ordinal,
            records=rows.records[ordinal],
            stratum=manifest_stratum[rows.stratum[ordinal]] if has_pool else None,
            segment_stratum=manifest_stratum[segment_stratum],
            segment_rows=np.diff(layout.segment_start[segments.start : segments.stop + 1]),
            block_rows=int(layout.block_rows[shard]),
            raw_bytes=int(rows.raw_bytes[ordinal].sum()),
        )


def describe_row(rows: Rows, reader: ScratchReader, place: int, first_ordinal: int = 0) -> str:
    """A row by key and source, for messages."""
    ordinal = first_ordinal + place
    held = reader.read(rows.records[place : place + 1], np.array([ordinal]))
    block = held.block(0, 1, payloads=False)
    name = f"sample {dict(block.originals).get(0, block.keys[0])!r}"
    if not block.source_names or block.source_row is None:
        return f"{name} (number {ordinal})"
    return f"{name} ({block.source_names[0]} row {block.source_row[0]})"
