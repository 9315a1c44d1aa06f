"""Which locations an object belongs in: weighted rendezvous hashing over SHA-256, in integers. Pure.

Every location draws a number for an object from (name of the location, digest of the object); the object goes to those
that drew best, one per failure domain. So nothing has to be looked up or kept, and a location that comes or goes moves
only what it draws or drew best (Thaler and Ravishankar, 1998). With weights a draw u in (0, 1] counts as
-log(u) / weight, smallest first: the exponential race, in which a location wins in proportion to its weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shardkit.copies.policy.policy import Policy
from shardkit.copies.policy.record import LocationRecord
from shardkit.errors import ConfigurationError
from shardkit.formats.digest import parse_digest

__all__ = ["ALWAYS_EVERYWHERE", "Placed", "placement"]

ALWAYS_EVERYWHERE: Final = frozenset({"manifest", "page", "index", "selection", "sources", "about", "lookup"})
"""Extensions of metadata: small, and without it no shard can be read or verified, so each location has all of it."""

_FRACTION_BITS: Final = 32
_SCALE_BITS: Final = 64


class Placed(NamedTuple):
    """An object, as far as its place depends on it."""

    digest: str
    """``sha256:<hex>``."""
    extension: str
    strata: frozenset[str] = frozenset()
    """Names of the strata of which a shard holds rows."""


def placement(policy: Policy, locations: Sequence[LocationRecord], placed: Placed) -> tuple[str, ...]:
    """Names of the locations that an object belongs in, the root first, the others by how well they drew.

    Args:
        policy: how many copies.
        locations: the first is the root, which holds everything.
        placed: the object.

    Returns:
        As many as the policy asks for, in distinct failure domains; fewer where there are fewer domains. All of them
        for metadata.

    Raises:
        ConfigurationError: there is no location.
    """
    if not locations:
        raise ConfigurationError("no location to place objects in; name the root first")
    root, others = locations[0], [one for one in locations[1:] if one.weight]
    if placed.extension in ALWAYS_EVERYWHERE:
        return (root.name, *(one.name for one in others))
    copies = policy.copies_of(placed.strata)
    return (root.name, *_drawn(placed.digest, others, copies - 1, {root.domain}))


def _drawn(digest: str, locations: Iterable[LocationRecord], count: int, taken: set[str]) -> list[str]:
    if count < 1:
        return []
    chosen: list[str] = []
    domains = set(taken)
    for one in sorted(locations, key=lambda one: _draw(digest, one)):
        if one.domain not in domains:
            chosen.append(one.name)
            domains.add(one.domain)
            if len(chosen) == count:
                break
    return chosen


def _draw(digest: str, location: LocationRecord) -> tuple[int, bytes]:
    """-log2(u) / weight in fixed point, smallest best; the whole hash settles what rounding made equal."""
    hashed = hashlib.sha256(
        b"shardkit-placement/1\0" + f"{location.name}\0{parse_digest(digest)}".encode()
    ).digest()
    u = int.from_bytes(hashed[:8], "big") + 1  # 1 … 2**64
    return (_minus_log2(u) << _SCALE_BITS) // location.weight, hashed


def _minus_log2(u: int) -> int:
    """-log2(u / 2**64) for 1 ≤ u ≤ 2**64, rounded up to 32 fractional bits: one bit per squaring of the mantissa."""
    exponent = u.bit_length() - 1
    mantissa = (u << 63) >> exponent  # [2**63, 2**64): 1.0 … 2.0
    log2 = exponent
    for _ in range(_FRACTION_BITS):
        mantissa = (mantissa * mantissa) >> 63
        log2 <<= 1
        if mantissa >> 64:
            mantissa >>= 1
            log2 |= 1
    return (64 << _FRACTION_BITS) - log2
