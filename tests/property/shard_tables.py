"""Shard tables of made-up shards, valid in every column: for tests that need a manifest and no samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from shardkit.formats import Schema
from shardkit.manifest import Manifest, Selection, ShardRecord, ShardTable, Stratum, compose, stratum_counts

__all__ = ["composed", "made_up_digest", "made_up_records", "made_up_table"]


def made_up_digest(*names: object) -> str:
    """A digest text that nothing has."""
    return f"sha256:{hashlib.sha256(repr(names).encode()).hexdigest()}"


def made_up_records(
    seed: int, shards: int, strata: int = 3, *, max_rows: int = 40, selected: bool = False
) -> tuple[list[ShardRecord], dict[str, Selection]]:
    """Shards of one to `strata` segments of 1 to `max_rows` rows each.

    Args:
        seed: Of all numbers.
        shards: How many.
        strata: Segments name strata 0 … strata - 1, ascending inside a shard.
        max_rows: Most rows of a segment.
        selected: Give about every second shard a selection of some of its rows.

    Returns:
        The records, and the selections by digest.
    """
    source = random.Random(seed)
    records: list[ShardRecord] = []
    selections: dict[str, Selection] = {}
    for shard in range(shards):
        segments = sorted(source.sample(range(strata), source.randint(1, strata)))
        rows = [source.randint(1, max_rows) for _ in segments]
        chosen: list[list[bool]] | None = None
        digest: str | None = None
        if selected and source.random() < 0.5:
            chosen = [[source.random() < 0.6 for _ in range(n)] for n in rows]
            chosen[0][0] = False  # a selection of all rows would be none
            selection = Selection.from_mask([bit for part in chosen for bit in part])
            digest = f"sha256:{hashlib.sha256(selection.to_bytes()).hexdigest()}"
            selections[digest] = selection
        raw = sum(rows) * 100
        records.append(
            ShardRecord(
                digest=made_up_digest("shard", seed, shard),
                size=source.randint(raw // 2 + 1, raw),
                index_digest=made_up_digest("index", seed, shard),
                index_size=source.randint(100, 10_000),
                block_rows=source.randint(1, 16),
                largest_block=source.randint(0, raw),
                raw_bytes=raw,
                segment_stratum=segments,
                segment_rows=rows,
                segment_selected=None if chosen is None else [sum(part) for part in chosen],
                selection_digest=digest,
            )
        )
    return records, selections


def made_up_table(seed: int, shards: int, strata: int = 3, *, selected: bool = False) -> ShardTable:
    """The table of `made_up_records`."""
    return ShardTable.from_records(made_up_records(seed, shards, strata, selected=selected)[0])


def composed(
    table: ShardTable,
    values: Sequence[tuple[str, ...]] = ((),),
    in_pool: Sequence[Stratum] = (),
    **fields: Any,
) -> tuple[Manifest, list[bytes]]:
    """The manifest of a table, and its pages; a stratum named ``*pool*`` is the pool."""
    rows, selected = stratum_counts(table, len(values))
    strata = [
        Stratum(of, int(rows[number]), int(selected[number]), pooled=of == ("*pool*",))
        for number, of in enumerate(values)
    ]
    named: dict[str, Any] = {
        "format": "tar",
        "compression": "none",
        "axes": (),
        "schema": Schema.parse({"x": "int64"}),
    }
    return compose(table, strata=(*strata, *in_pool), **(named | fields))
