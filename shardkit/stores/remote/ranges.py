"""Which ranges of an object to ask for together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardkit.errors import UsageError


class Range(NamedTuple):
    """A run of bytes of an object."""

    offset: int
    length: int


class RangeGroup(NamedTuple):
    """Ranges that one request fetches."""

    span: Range
    """Covers all members and the gaps between them."""
    members: tuple[int, ...]
    """Positions in the list of ranges that was asked for."""


def coalesce(ranges: Sequence[Range], *, max_gap: int, max_joined: int) -> list[RangeGroup]:
    """Join ranges that lie near each other; empty ones are left out.

    Args:
        ranges: In any order; they may overlap.
        max_gap: The most bytes fetched for nothing between two neighbours.
        max_joined: The most bytes of a group of several ranges; a single longer range stays whole.

    Returns:
        Groups in the order of their offsets.
    """
    order = sorted((i for i, one in enumerate(ranges) if one.length), key=lambda i: ranges[i])
    groups: list[RangeGroup] = []
    for i in order:
        one = ranges[i]
        if groups:
            span, members = groups[-1]
            end = max(span.offset + span.length, one.offset + one.length)
            if one.offset - (span.offset + span.length) <= max_gap and end - span.offset <= max_joined:
                groups[-1] = RangeGroup(Range(span.offset, end - span.offset), (*members, i))
                continue
        groups.append(RangeGroup(one, (i,)))
    return groups


def check_ranges(name: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Refuse negative offsets and lengths.

    Raises:
        UsageError: Names the first such range.
    """
    for offset, length in ranges:
        if offset < 0 or length < 0:
            raise UsageError(
                f"{name}: range ({offset}, {length}): expected an offset and a length of 0 or more"
            )
