"""The rows of all parts as one table: joined, checked for duplicate keys, and handed out shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.encoding import generated_key, key_identity
from shardkit.dataset.layout import Layout, RowTable
from shardkit.dataset.scratch import RowColumns
from shardkit.dataset.scratch_parts import Parts, read_rows
from shardkit.dataset.shard_writing import ShardRows
from shardkit.errors import SampleError

__all__ = ["AllRows", "check_unique_keys", "describe_row", "join_parts", "rows_of_shards"]

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


def describe_row(rows: AllRows, parts: Parts, ordinal: int, num_fields: int, first_ordinal: int = 0) -> str:
    """A row by key and source, for messages."""
    (row,) = read_rows(
        parts,
        rows.part[ordinal : ordinal + 1],
        rows.offset[ordinal : ordinal + 1],
        rows.length[ordinal : ordinal + 1],
        rows.check[ordinal : ordinal + 1],
        np.array([first_ordinal + ordinal]),
        num_fields,
    )
    name = f"sample {row.original_key or row.key!r}"
    return (
        f"{name} ({row.source[0]} row {row.source[1]})"
        if row.source
        else f"{name} (number {first_ordinal + ordinal})"
    )
