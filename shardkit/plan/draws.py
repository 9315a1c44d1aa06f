"""Integers drawn for one place in the grid: what augmentation draws from, the same on any rank, worker or resume."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

from .permutation import derive

__all__ = ["Place", "cell_key", "draw", "draws"]

_BITS = 64


class Place(NamedTuple):
    """Where a sample stands: what all that is drawn for it depends on."""

    seed: int
    step: int
    lane: int
    slot: int


@lru_cache(maxsize=256)
def _stream(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def cell_key(place: Place, name: str) -> int:
    """A 64-bit key that all places of a cell share."""
    return derive(place.seed, _stream(name), place.step, place.lane)


def draws(place: Place, name: str, count: int, *, first: int = 0) -> list[int]:
    """`count` integers below 2**64, uniform and independent: splitmix64 keyed by the place and the name.

    Each depends on its number alone, from `first` on, however many are taken.
    """
    key = derive(cell_key(place, name), place.slot)
    return [derive(key, number) for number in range(first, first + count)]


def draw(bits: int, below: int) -> int:
    """One of `draws` as a number from 0 to `below` − 1."""
    return (bits * below) >> _BITS
