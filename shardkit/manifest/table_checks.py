"""Whether the columns of a shard table agree with each other; a few passes over them, no Python per shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError

if TYPE_CHECKING:
    from shardkit.manifest.shard_table import ShardTable

__all__ = ["MAX_VALUE", "check_table"]

MAX_VALUE: Final = 2**42
"""Largest size or count of one shard (4 TiB, 4·10¹² rows): sums over `MAX_SHARDS` shards stay below 2⁶³ only
where callers add in Python integers; sums over one page always do."""


def check_table(table: ShardTable) -> None:
    """Check shapes, ranges and sums.

    Raises:
        FormatError: The first contradiction found, with the number of the shard where there is one.
    """
    _check_shapes(table)
    for name, least in (
        ("size", 1), ("index_size", 1), ("rows", 1), ("selected", 0), ("block_rows", 1), ("largest_block", 0),
        ("raw_bytes", 0), ("segment_rows", 1), ("segment_selected", 0), ("segment_stratum", 0),
    ):  # fmt: skip
        _check_range(name, getattr(table, name), least)
    _check_segments(table)
    _first(table.selected > table.rows, "has more selected rows than rows")
    partial = table.selected < table.rows
    _first(
        partial != table.selection_digest.any(axis=1),
        "has a selection though all rows are selected, or none though not",
    )
    _first(table.largest_block > table.raw_bytes, "has a block larger than itself")


def _check_shapes(table: ShardTable) -> None:
    shards, segments = len(table.rows), len(table.segment_rows)
    for name in ("size", "index_size", "selected", "block_rows", "largest_block", "raw_bytes", "rows"):
        _check_shape(name, getattr(table, name), (shards,))
    for name in ("digest", "index_digest", "selection_digest"):
        _check_shape(name, getattr(table, name), (shards, 32))
    for name in ("segment_shard", "segment_stratum", "segment_selected", "segment_rows"):
        _check_shape(name, getattr(table, name), (segments,))


def _check_segments(table: ShardTable) -> None:
    shard, shards = table.segment_shard, len(table.rows)
    if len(shard) and (shard[0] < 0 or shard[-1] >= shards or np.any(shard[1:] < shard[:-1])):
        _refuse("its segments are not in shard order, or name shards that are not there")
    starts = np.searchsorted(shard, np.arange(shards + 1))
    for total, part in (("rows", "segment_rows"), ("selected", "segment_selected")):
        before = np.concatenate([[0], np.cumsum(getattr(table, part))])
        if len(before) > 1 and np.any(before[1:] < before[:-1]):
            _refuse(f"column {part} overflows 63 bits")
        sums = before[starts[1:]] - before[starts[:-1]]
        _first(sums != getattr(table, total), f"has {total} that are not the sum of its segments'")
    wrong = np.flatnonzero(table.segment_selected > table.segment_rows)
    if len(wrong):
        _refuse(f"shard {int(shard[wrong[0]])} has a segment with more selected rows than rows")


def _check_shape(name: str, column: NDArray[Any], shape: tuple[int, ...]) -> None:
    if column.shape != shape:
        _refuse(f"column {name} has shape {column.shape}, expected {shape}")


def _check_range(name: str, column: NDArray[Any], least: int) -> None:
    if len(column) and (int(column.min()) < least or int(column.max()) > MAX_VALUE):
        _refuse(
            f"column {name} holds {int(column.min())} … {int(column.max())}, expected {least} … {MAX_VALUE}"
        )


def _first(wrong: NDArray[np.bool_], what: str) -> None:
    found = np.flatnonzero(wrong)
    if len(found):
        _refuse(f"shard {int(found[0])} {what}")


def _refuse(why: str) -> NoReturn:
    raise FormatError(f"the shard table contradicts itself: {why}; do not trust it")
