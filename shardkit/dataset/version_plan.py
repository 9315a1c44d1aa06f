"""From all rows of a version to the shards that it is to have: everything that is known before the first is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.about import check_strata
from shardkit.dataset.appending import Base
from shardkit.dataset.layout import Layout, lay_out
from shardkit.dataset.row_table import Rows, ShardRows, check_unique_keys, rows_of_shards
from shardkit.dataset.splits import split_of
from shardkit.dataset.version_settings import NewVersion
from shardkit.errors import ConfigurationError
from shardkit.manifest import POOL, Stratum


@dataclass(frozen=True, slots=True, eq=False)
class VersionPlan:
    """A version before its shards are written; made by `plan_version`."""

    version: NewVersion  # what it is to be
    base: Base | None  # the version that it is appended to
    rows: Rows  # all new ones
    layout: Layout  # of these rows
    numbers: StratumNumbers  # of their strata in the manifest
    split: NDArray[np.int16] | None  # of each row in ordinal order, -1 for none; None without splits

    def shards(self) -> Iterator[ShardRows]:
        """What each new shard holds, in shard order; made one at a time."""
        first = self.base.first_ordinal if self.base else 0
        return rows_of_shards(self.rows, self.layout, self.numbers.of_stratum, first)

    def split_rows(self) -> dict[str, int]:
        names = self.version.split.names if self.version.split else ()
        return {name: int(np.count_nonzero(self.split == number)) for number, name in enumerate(names)}

    def strata(self) -> tuple[Stratum, ...]:
        """Those of the manifest with their rows, those of the base added; all of the new ones are selected."""
        of_stratum, listed = self.numbers.of_stratum, self.numbers.listed
        total = [0] * len(listed)
        counts = np.bincount(self.rows.stratum, minlength=len(self.rows.strata)).tolist()
        for number, count in zip(of_stratum.tolist(), counts, strict=False):
            total[number] += count
            if listed[number].in_pool:
                total[of_stratum[-1]] += count
        return tuple(
            dataclasses.replace(stratum, rows=stratum.rows + new, selected=stratum.selected + new)
            for stratum, new in zip(listed, total, strict=True)
        )

    def rows_of(self, shard: int) -> NDArray[np.int64]:
        """Places in ``rows`` of the rows of a new shard."""
        return self.layout.rows[self.layout.shard_start[shard] : self.layout.shard_start[shard + 1]]


def plan_version(
    version: NewVersion, rows: Rows, base: Base | None, describe: Callable[[int, int], str]
) -> VersionPlan:
    """Check the rows against each other and those of the base, and lay them out.

    Args:
        version: what is to be made.
        rows: that are to be written.
        base: what it is appended to, or None.
        describe: names a row in messages, given its place in ``rows`` and the ordinal of the first of them.

    Raises:
        SampleError: two rows have the same key.
        ConfigurationError: strata, splits or ``about`` do not fit the rows.
        UsageError: a row that no shard can hold, or too many strata.
    """
    first = base.first_ordinal if base else 0
    before = base.manifest.strata if base else ()
    check_unique_keys(
        rows,
        lambda place: describe(place, first),
        first_ordinal=first,
        held=base.keys if base else None,
    )
    if version.about is not None:
        names = {Stratum(values, 0, 0).name for values in rows.strata}
        check_strata(version.about, names | {stratum.name for stratum in before if not stratum.pooled})
    split = _split_rows(version, rows, allow_empty=base is not None)
    known = {stratum.values: 1 if stratum.in_pool else -1 for stratum in before}
    pooling = np.array([known.get(values, 0) for values in rows.strata], dtype=np.int8)
    layout = lay_out(rows, len(rows.strata), version.settings, pooling)
    return VersionPlan(version, base, rows, layout, StratumNumbers(rows.strata, layout.pooled, before), split)


class StratumNumbers:
    """How the manifest numbers the strata.

    Those of the version that is appended to keep their numbers; then come the new ones with segments of their own, the
    pool where there is none yet, and the new ones in the pool.

    Attributes:
        listed: the strata in the manifest's order, with the rows of the base.
        of_stratum: int32[strata + 1], from the number in `Rows` (last: the pool) to that in the manifest.
    """

    def __init__(
        self,
        strata: Sequence[tuple[str, ...]],
        pooled: NDArray[np.bool_],
        before: Sequence[Stratum] = (),
    ) -> None:
        self.listed = list(before)
        number = {stratum.values: place for place, stratum in enumerate(before)}

        def add(values: tuple[str, ...], *, pool: bool = False, in_pool: bool = False) -> None:
            if values not in number:
                number[values] = len(self.listed)
                self.listed.append(Stratum(values, 0, 0, pooled=pool, in_pool=in_pool))

        for values, inside in zip(strata, pooled.tolist(), strict=True):
            if not inside:
                add(values)
        if pooled.any():
            add((POOL,), pool=True)
        for values, inside in zip(strata, pooled.tolist(), strict=True):
            if inside:
                add(values, in_pool=True)
        pool = number.get((POOL,), 0)
        self.of_stratum = np.array([*(number[values] for values in strata), pool], dtype=np.int32)


def _split_rows(version: NewVersion, rows: Rows, *, allow_empty: bool) -> NDArray[np.int16] | None:
    """int16[n], the split of each row in ordinal order; None without a split.

    Raises:
        ConfigurationError: a split would hold no row (unless `allow_empty`: what is appended may be few).
    """
    split = version.split
    if split is None:
        return None
    index = split_of(split, rows.identity, rows.split if split.is_noted else None)
    for number, name in enumerate(split.names):
        if not allow_empty and not split.folders and not (index == number).any():
            what = f"groups of equal {split.by!r}" if split.by else "rows"
            raise ConfigurationError(
                f"split {name!r} with the share {split.shares[number]} holds none of the {len(rows)} rows: "
                f"there are too few {what}; give it a larger share"
            )
    return index
