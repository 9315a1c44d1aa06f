"""Keyed permutations and random draws in integer arithmetic, identical on every CPU and in every release (SPEC.md §4).

``order(key, n)`` sorts the pairs (high 32 bits of splitmix64 output i under ``key``, i). Pairs are distinct,
so every sorting method gives the same result. ``Feistel`` permutes domains that are too large to sort, in O(1) per
value.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: the increment of splitmix64 (Steele, Lea, Flood 2014)."""

_MASK = (1 << 64) - 1
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U = np.uint64
_MIX_BITS = 32


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 in place; ``values`` must have at least one dimension."""
    values ^= values >> _U(30)
    values *= _U(_M1)
    values ^= values >> _U(27)
    values *= _U(_M2)
    values ^= values >> _U(31)
    return values


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _M1) & _MASK
    value = ((value ^ (value >> 27)) * _M2) & _MASK
    return value ^ (value >> 31)


def derive(key: int, *parts: int) -> int:
    """Derive a 64-bit key from ``key`` and ``parts``.

    Each part replaces the key by output number ``part`` of the splitmix64 stream that the key seeds.
    """
    for part in parts:
        key = _mix((key + GOLDEN * (part + 1)) & _MASK)
    return key


def derive_each(keys: NDArray[np.uint64] | int, parts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Apply `derive` with one part elementwise: uint64[n]."""
    start = np.asarray(keys & _MASK if isinstance(keys, int) else keys, dtype=np.uint64)
    values = parts.astype(np.uint64)
    values += _U(1)
    values *= _U(GOLDEN)
    values += start
    return mix64(values)


def order(key: int, n: int) -> NDArray[np.int64]:
    """Return the permutation of range(n) under ``key``, int64[n]; n must be below 2**32."""
    values = derive_each(key, np.arange(n, dtype=np.int64))
    values &= _U(0xFFFFFFFF00000000)
    values |= np.arange(n, dtype=np.uint64)
    values.sort()
    values &= _U(0xFFFFFFFF)
    return values.astype(np.int64)


def order_rows(keys: NDArray[np.uint64], n: int) -> NDArray[np.int64]:
    """Return `order` for many keys and one n: (len(keys), n) int64."""
    # one splitmix64 stream per row
    ramp = np.arange(1, n + 1, dtype=np.uint64)
    ramp *= _U(GOLDEN)
    values = mix64(keys[:, None] + ramp[None, :])
    values &= _U(0xFFFFFFFF00000000)
    values |= np.arange(n, dtype=np.uint64)[None, :]
    values.sort(axis=1)
    values &= _U(0xFFFFFFFF)
    return values.view(np.int64)


def grouped_order(keys: NDArray[np.uint64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Permute each of many groups under its key.

    Returns:
        int64[sum(sizes)]: for each group in turn, its permutation of range(size) plus the start of the group.
    """
    total = int(sizes.sum())
    if not total:
        return np.empty(0, dtype=np.int64)
    index_bits = int(sizes.max() - 1).bit_length()
    room = 64 - _MIX_BITS - index_bits
    starts = np.cumsum(sizes) - sizes
    if len(sizes) > 1 << room:  # too many groups for the bits next to mix and index
        parts = []
        for first in range(0, len(sizes), 1 << room):
            part = slice(first, first + (1 << room))
            parts.append(grouped_order(keys[part], sizes[part]) + starts[first])
        return np.concatenate(parts)
    group = np.arange(len(sizes), dtype=np.uint64)
    index = np.arange(total, dtype=np.uint64)
    within = index - np.repeat(starts.astype(np.uint64), sizes)

    values = mix64(np.repeat(keys, sizes) + (within + _U(1)) * _U(GOLDEN))
    values >>= _U(64 - _MIX_BITS)
    values <<= _U(index_bits)
    values |= within
    if len(sizes) > 1:
        values |= np.repeat(group << _U(_MIX_BITS + index_bits), sizes)
    values.sort()
    values &= _U((1 << index_bits) - 1)
    values += np.repeat(starts.astype(np.uint64), sizes)
    return values.view(np.int64)


class Feistel:
    """A keyed permutation of range(n) with O(1) evaluation and inverse.

    A balanced Feistel network of `ROUNDS` rounds over 2b bits with ``2**(2b) >= n``; values outside the
    range walk the cycle until they fall inside (Black and Rogaway 2002), fewer than four steps on average.
    The round function is splitmix64.
    """

    ROUNDS = 6

    def __init__(self, key: int | NDArray[np.uint64], n: int) -> None:
        """Take one key for all values, or an array with one key per value."""
        self.n = n
        self._half = max(1, ((max(1, n - 1)).bit_length() + 1) // 2)
        keys = np.array([key], dtype=np.uint64) if isinstance(key, int) else key
        self._keys = [derive_each(keys, np.full(len(keys), r, dtype=np.int64)) for r in range(self.ROUNDS)]

    def __call__(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the images of ``values``, int64."""
        return self._walk(values, inverse=False)

    def inverse(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the preimages of ``values``, int64."""
        return self._walk(values, inverse=True)

    def _walk(self, values: NDArray[np.int64], *, inverse: bool) -> NDArray[np.int64]:
        out = self._once(values.astype(np.uint64), self._keys, inverse=inverse)
        outside = np.flatnonzero(out >= _U(self.n))
        while len(outside):
            keys = [k if len(k) == 1 else k[outside] for k in self._keys]
            again = self._once(out[outside], keys, inverse=inverse)
            out[outside] = again
            outside = outside[again >= _U(self.n)]
        return out.astype(np.int64)

    def _once(
        self, values: NDArray[np.uint64], keys: list[NDArray[np.uint64]], *, inverse: bool
    ) -> NDArray[np.uint64]:
        bits, mask = _U(self._half), _U((1 << self._half) - 1)
        left, right = values >> bits, values & mask
        for key in reversed(keys) if inverse else keys:
            if inverse:
                left, right = right ^ (mix64(left * _U(GOLDEN) + key) & mask), left
            else:
                left, right = right, left ^ (mix64(right * _U(GOLDEN) + key) & mask)
        return (left << bits) | right


_BITS = 64


class Place(NamedTuple):
    """Position of a sample in a run; together with a name it keys every random draw made for the sample."""

    seed: int
    step: int
    lane: int
    slot: int


@lru_cache(maxsize=256)
def _stream(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def draws(place: Place, name: str, count: int, *, first: int = 0) -> list[int]:
    """Return ``count`` uniform, independent integers below 2**64: splitmix64 keyed by ``place`` and ``name``.

    The integers are numbered from ``first``. Each depends only on its number, not on ``count``.
    """
    key = derive(place.seed, _stream(name), place.step, place.lane, place.slot)
    return [derive(key, number) for number in range(first, first + count)]


def draw(bits: int, below: int) -> int:
    """Scale one integer of `draws` to 0 … ``below`` − 1."""
    return (bits * below) >> _BITS
