"""Forge bytes with a given XXH3-64: a second preimage of any block above 1 KiB, by changing six words.

Each of eight accumulators sums ``low * high + neighbour`` over the words of its lane. Changing the high halves of three
words so that the sum of products stays the same is a linear equation; of two such triples, one pair also keeps the
sum of words (a birthday search over 32 bits).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from math import gcd

import xxhash

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
)
_HIGH = 2**32
_LANE = 1
_TRIES = 1 << 17


def _key(stripe: int) -> int:
    key: int = struct.unpack_from("<Q", _SECRET, 8 * stripe + 8 * _LANE)[0]
    return key


def _triples(words: dict[int, int], stripes: list[int]) -> Iterator[tuple[int, dict[int, int]]]:
    """(change of the sum of high halves, new keyed high halves) that keep the sum of products of three words."""
    keyed = {n: words[n] ^ _key(n) for n in stripes}
    low = [keyed[n] % _HIGH for n in stripes]
    divisor = gcd(low[1], low[2])
    if divisor > 4:
        return
    inverse = pow(low[1] // divisor, -1, low[2] // divisor)
    total = sum(part * (keyed[n] >> 32) for part, n in zip(low, stripes, strict=True))
    draw = random.Random(0)
    for _ in range(6 * _TRIES):
        first = draw.randrange(_HIGH)
        rest = total - low[0] * first
        if rest < 0 or rest % divisor:
            continue
        second = rest // divisor * inverse % (low[2] // divisor)
        while second < _HIGH:
            third, remainder = divmod(rest - low[1] * second, low[2])
            if remainder == 0 and 0 <= third < _HIGH:
                new = dict(zip(stripes, (first, second, third), strict=True))
                change = sum((new[n] ^ (_key(n) >> 32)) - (words[n] >> 32) for n in stripes)
                yield change % _HIGH, new
            second += low[2] // divisor


def forge(data: bytes, begin: int = 0) -> bytes:
    """Return other bytes with the same XXH3-64; only bytes of the KiB at `begin`, a multiple of 1024, change."""
    places = {n: begin + 64 * n + 8 * _LANE for n in range(16)}
    words = {n: struct.unpack_from("<Q", data, place)[0] for n, place in places.items()}
    for seed in range(20):
        stripes = random.Random(seed).sample(range(16), 6)
        one: dict[int, dict[int, int]] = {}
        for change, new in _triples(words, stripes[:3]):
            one.setdefault(change, new)
            if len(one) >= _TRIES:
                break
        for change, new in _triples(words, stripes[3:]):
            match = one.get(-change % _HIGH)
            if match is None:
                continue
            forged = bytearray(data)
            for n, high in {**match, **new}.items():
                low = (words[n] ^ _key(n)) % _HIGH
                struct.pack_into("<Q", forged, places[n], (high << 32 | low) ^ _key(n))
            if bytes(forged) != data and xxhash.xxh3_64_digest(bytes(forged)) == xxhash.xxh3_64_digest(data):
                return bytes(forged)
    raise AssertionError("no forgery found")
