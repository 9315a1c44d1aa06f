"""Taking copies away: only with proof, taken now, that enough good ones are left elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardkit.copies.policy import ROOT_NAME, LocationTable
from shardkit.copies.replicating.copying import PIECE_BYTES
from shardkit.copies.replicating.facts import Facts
from shardkit.copies.replicating.needed import Needed
from shardkit.copies.replicating.pacing import Pace
from shardkit.errors import ShardkitError
from shardkit.reading.locations import Location
from shardkit.stores.objects import parse_object_name

__all__ = ["Drops", "drop_surplus", "is_good_now", "surplus"]


@dataclass(slots=True)
class Drops:
    """What was taken away.

    Attributes:
        objects: copies deleted. bytes: their bytes.
        kept: surplus copies that stay because too few good ones were found elsewhere: (location, name).
        problems: what locations said.
    """

    objects: int = 0
    bytes: int = 0
    kept: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def surplus(facts: Facts, needed: Mapping[str, Needed]) -> list[tuple[str, str]]:
    """(location, object) of copies that belong to some version and not there; what nothing needs is for `gc`."""
    return [
        (location, name)
        for location in facts.stores
        if location != ROOT_NAME
        for name in sorted(facts.held[location])
        if name in needed and location not in needed[name].where
    ]


def drop_surplus(
    table: LocationTable,
    facts: Facts,
    needed: Mapping[str, Needed],
    copies: Iterable[tuple[str, str]],
    pace: Pace,
) -> Drops:
    """Delete surplus copies, each only if all copies that the policy asks for are there and good, now.

    "Good" is what the store's own checksum says, freshly asked, or a read of every byte. A listing proves nothing, nor
    does an old attestation.

    Raises:
        KeyboardInterrupt: the pace was stopped.
    """
    done = Drops()
    domains = {one.name: one.domain for one in table.locations}
    for location, name in copies:
        one = needed[name]
        good = {
            domains[other] for other in one.where if other != location and _is_good(facts, other, name, pace)
        }
        if len(good) < len({domains[other] for other in one.where}):
            done.kept.append((location, name))
            continue
        store = facts.stores[location].store
        try:
            stat = store.head(name)
            store.delete(name)
        except ShardkitError as error:
            done.problems.append(f"{location}: {error}")
            continue
        facts.held[location].discard(name)
        done.objects += 1
        done.bytes += stat.size if stat else 0
    return done


def _is_good(facts: Facts, location: str, name: str, pace: Pace) -> bool:
    return location in facts.stores and is_good_now(facts.stores[location], name, pace)


def is_good_now(location: Location, name: str, pace: Pace) -> bool:
    """Whether a location has the bytes that the name says: by the store's checksum, or by reading them all."""
    digest, _ = parse_object_name(name)
    try:
        stat = location.store.head(name)
        if stat is None:
            return False
        if stat.sha256 is not None:
            return f"sha256:{stat.sha256}" == digest
        hashed = hashlib.sha256()
        for offset in range(0, stat.size, PIECE_BYTES):
            length = min(PIECE_BYTES, stat.size - offset)
            pace.take(length)
            hashed.update(location.store.get_range(name, offset, length))
    except ShardkitError:
        return False
    return f"sha256:{hashed.hexdigest()}" == digest
