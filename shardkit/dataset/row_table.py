"""What is kept in memory of every row: columns of parts, joined, checked for duplicate keys, handed out by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import generated_key, key_identity
from shardkit.dataset.layout import Layout, RowTable
from shardkit.dataset.scratch_reading import ScratchReader
from shardkit.errors import SampleError
from shardkit.formats import pack_columns, unpack_columns

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


Strata = tuple[tuple[str, ...], ...]
Identities = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class AllRows:
    """One entry per row of the dataset, in ordinal order: the rows of part 0, of part 1, and so on.

    Attributes:
        strata: value texts of every stratum, sorted; ``table.stratum`` indexes them.
        table: what the layout needs.
        split: uint64[n], the hash that decides the split.
        generated: bool[n], whether the key is made from the ordinal.
        part: int32[n]; offset, length: int64[n]; check: uint64[n]: where the record is; the last three are
            empty where rows were counted only.
        marks: name → uint64[n], see `RowColumns`.
    """

    strata: Strata
    table: RowTable
    split: NDArray[np.uint64]
    generated: NDArray[np.bool_]
    part: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    check: NDArray[np.uint64]
    marks: Mapping[str, NDArray[np.uint64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.table)

    def take(self, places: NDArray[np.int64]) -> AllRows:
        """Some of the rows, whose places are their ordinals then; strata without rows go.

        Args:
            places: int64[m], rising.
        """
        present, stratum = np.unique(self.table.stratum[places], return_inverse=True)
        kept = len(self.offset) > 0
        return AllRows(
            strata=tuple(self.strata[number] for number in present.tolist()),
            table=RowTable(
                identity=self.table.identity[places],
                stratum=stratum.astype(np.int32),
                raw_bytes=self.table.raw_bytes[places],
            ),
            split=self.split[places],
            generated=self.generated[places],
            part=self.part[places],
            offset=self.offset[places] if kept else self.offset,
            length=self.length[places] if kept else self.length,
            check=self.check[places] if kept else self.check,
            marks={name: column[places] for name, column in self.marks.items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class ShardRows:
    """What one shard is to hold; arrays have one entry per row, in row order.

    Attributes:
        number: of the shard in the manifest.
        ordinal: int64. part: int32. offset, length: int64. check: uint64; see `AllRows`.
        stratum: int32 number of each row's own stratum where the shard has pooled rows, else None.
        segment_stratum: int32 and segment_rows: int64, one entry per segment, in row order.
        block_rows: rows per block. raw_bytes: of all rows.
    """

    number: int
    ordinal: NDArray[np.int64]
    part: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    check: NDArray[np.uint64]
    stratum: NDArray[np.int32] | None
    segment_stratum: NDArray[np.int32]
    segment_rows: NDArray[np.int64]
    block_rows: int
    raw_bytes: int

    def fingerprint(self) -> str:
        """32 hex digits that are equal only where the shard holds the same rows in the same way."""
        digest = xxhash.xxh3_128(f"{self.number} {self.block_rows}".encode())
        for column in (self.ordinal, self.check, self.length, self.segment_stratum, self.segment_rows):
            digest.update(np.ascontiguousarray(column).data)
        if self.stratum is not None:
            digest.update(np.ascontiguousarray(self.stratum).data)
        return digest.hexdigest()

    def __str__(self) -> str:
        return f"shard {self.number} ({len(self.ordinal)} rows)"


def join_parts(parts: Sequence[RowColumns]) -> AllRows:
    """Join the columns of parts; strata that several parts have are one."""
    strata = tuple(sorted({values for part in parts for values in part.strata}))
    number = {values: index for index, values in enumerate(strata)}
    stratum = [
        np.array([number[values] for values in part.strata], dtype=np.int32)[part.stratum]
        for part in parts
        if len(part)
    ]

    def joined(name: str, dtype: type) -> NDArray[np.generic]:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate([*arrays, np.zeros(0, dtype)]) if arrays else np.zeros(0, dtype)

    sizes = [len(part) for part in parts]
    identity = np.stack([joined("identity_high", np.uint64), joined("identity_low", np.uint64)], axis=1)
    return AllRows(
        strata=strata,
        table=RowTable(
            identity=identity.astype(np.uint64, copy=False),
            stratum=np.concatenate([*stratum, np.zeros(0, np.int32)]),
            raw_bytes=joined("raw_bytes", np.int64).astype(np.int64, copy=False),
        ),
        split=joined("split", np.uint64).astype(np.uint64, copy=False),
        generated=joined("generated", np.uint8).astype(np.bool_),
        part=np.repeat(np.arange(len(parts), dtype=np.int32), sizes),
        offset=joined("offset", np.int64).astype(np.int64, copy=False),
        length=joined("length", np.int64).astype(np.int64, copy=False),
        check=joined("check", np.uint64).astype(np.uint64, copy=False),
        marks={
            name: np.concatenate([part.marks[name] for part in parts])
            for name in (parts[0].marks if parts else ())
        },
    )


def check_unique_keys(
    rows: AllRows, describe: Callable[[int], str], *, first_ordinal: int = 0, held: Identities | None = None
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
    identity = rows.table.identity
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
    rows: AllRows, layout: Layout, manifest_stratum: NDArray[np.int32], first_ordinal: int = 0
) -> Iterator[ShardRows]:
    """What each shard holds, in shard order; made one at a time.

    Args:
        rows: of the whole dataset.
        layout: of these rows.
        manifest_stratum: int32[strata], the number of each stratum in the manifest.
        first_ordinal: of the first row.
    """
    for shard in range(layout.shards):
        first, last = int(layout.shard_start[shard]), int(layout.shard_start[shard + 1])
        ordinal = layout.rows[first:last]
        segments = layout.segments_of(shard)
        segment_stratum = layout.segment_stratum[segments]
        has_pool = bool((segment_stratum == len(layout.pooled)).any())
        yield ShardRows(
            number=shard,
            ordinal=first_ordinal + ordinal,
            part=rows.part[ordinal],
            offset=rows.offset[ordinal],
            length=rows.length[ordinal],
            check=rows.check[ordinal],
            stratum=manifest_stratum[rows.table.stratum[ordinal]] if has_pool else None,
            segment_stratum=segment_stratum,
            segment_rows=np.diff(layout.segment_start[segments.start : segments.stop + 1]),
            block_rows=int(layout.block_rows[shard]),
            raw_bytes=int(rows.table.raw_bytes[ordinal].sum()),
        )


def describe_row(rows: AllRows, reader: ScratchReader, place: int, first_ordinal: int = 0) -> str:
    """A row by key and source, for messages."""
    one = slice(place, place + 1)
    ordinal = first_ordinal + place
    records = reader.read(
        rows.part[one], rows.offset[one], rows.length[one], rows.check[one], np.array([ordinal])
    )
    block = records.block(0, 1, payloads=False)
    name = f"sample {dict(block.originals).get(0, block.keys[0])!r}"
    if not block.source_names or block.source_row is None:
        return f"{name} (number {ordinal})"
    return f"{name} ({block.source_names[0]} row {block.source_row[0]})"
