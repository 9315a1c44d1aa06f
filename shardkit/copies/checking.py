"""What checks and repairs of copies find."""

from __future__ import annotations

from typing import NamedTuple


class BadCopy(NamedTuple):
    """A copy that is to be repaired."""

    location: str
    name: str
    was: str
    """"wrong" or "missing"."""


class Healed(NamedTuple):
    """A copy that is good again."""

    location: str
    name: str
    was: str
    source: str
    """Name of the location with the good copy, or "parity"."""
    num_bytes: int


class Lost(NamedTuple):
    """An object of which no good bytes are left anywhere."""

    name: str
    rows: int
    """Samples lost with it; 0 for what is no shard."""
    why: str


class Unchecked(NamedTuple):
    """A copy that could not be checked, or not be written."""

    location: str
    name: str
    why: str
