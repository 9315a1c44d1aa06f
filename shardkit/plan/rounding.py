"""Exact integer sums and roundings that the plan's closed forms rest on.

Python integers: nothing overflows.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["divisors", "floor_sum", "golden_step", "muldiv", "ragged"]

_SAFE = 2**62


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """Sum of ``(a * i + b) // m`` over 0 <= i < n.

    In O(log m) steps (the Euclid-like reduction of lattice counts).
    """
    total = 0
    if a < 0:
        total -= n * (n - 1) // 2 * ((a % m - a) // m)
        a %= m
    if b < 0:
        total -= n * ((b % m - b) // m)
        b %= m
    while n:
        if a >= m:
            total += n * (n - 1) // 2 * (a // m)
            a %= m
        if b >= m:
            total += n * (b // m)
            b %= m
        last = a * n + b
        if last < m:
            break
        n, b = last // m, last % m
        m, a = a, m
    return total


def golden_step(n: int) -> int:
    """The step nearest to n / golden ratio that has no common factor with n.

    Its multiples spread evenly modulo n.
    """
    if n <= 2:
        return 1
    step = (math.isqrt(5 * n * n) - n) // 2
    while math.gcd(step, n) != 1:
        step += 1
    return step


def divisors(n: int) -> list[int]:
    """All divisors of n in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def muldiv(
    factor: NDArray[np.int64], other: NDArray[np.int64], offset: NDArray[np.int64] | int, divisor: int
) -> NDArray[np.int64]:
    """``(factor * other + offset) // divisor``, exact.

    Arrays broadcast; all values are >= 0 and the result fits int64. Products that might pass 2**62 are taken
    in Python integers.
    """
    bound = int(factor.max(initial=0)) * int(other.max(initial=0)) + int(np.max(offset, initial=0))
    if bound < _SAFE and divisor < _SAFE:
        small: NDArray[np.int64] = ((factor * other + offset) // divisor).astype(np.int64, copy=False)
        return small
    exact = factor.astype(object) * other.astype(object) + offset
    quotient: NDArray[np.int64] = (exact // divisor).astype(np.int64)
    return quotient


def ragged(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The concatenation of ``arange(start, start + length)`` over all pairs: int64[sum(lengths)]."""
    ends = np.cumsum(lengths)
    numbers: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    numbers += np.arange(len(numbers), dtype=np.int64)
    return numbers
