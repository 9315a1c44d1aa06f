"""What checks and repairs of copies report."""

from __future__ import annotations

from typing import NamedTuple


class BadCopy(NamedTuple):
    """A copy that is to be repaired: "wrong" or "missing"."""

    location: str
    name: str
    was: str


class Healed(NamedTuple):
    """A copy that is good again, and the name of the location with the good one, or "parity"."""

    location: str
    name: str
    was: str
    source: str
    num_bytes: int


class Lost(NamedTuple):
    """An object of which no good bytes are left anywhere, and the samples lost with it: 0 for what is no shard."""

    name: str
    rows: int
    why: str


class Unchecked(NamedTuple):
    """A copy that could not be checked, or not be written."""

    location: str
    name: str
    why: str
