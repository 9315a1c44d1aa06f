"""Where copies of objects lie. A location is known to a machine, never to a manifest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from shardkit.errors import ConfigurationError
from shardkit.storage.store import Store

__all__ = ["BlockRequest", "Location", "block_name", "check_locations"]

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """A store with a name and a failure domain.

    Attributes:
        name: Short and unique on this machine: it stands in events, statistics and attestations.
        store: How to reach it.
        domain: What fails together: a machine, a rack, a bucket, a set of credentials. Copies count by domain.
        rank: Nearer ones are asked first; equal ones by how fast they answer.
        holds: "objects", a root with whole objects; or "blocks", a neighbour's cache, which has some blocks by digest
            and whose lack of one is nothing to report.
        heal: Whether bad or missing objects may be put there again from a good copy.
    """

    name: str
    store: Store
    domain: str = ""
    rank: int = 0
    holds: Literal["objects", "blocks"] = "objects"
    heal: bool = False

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise ConfigurationError(
                f"location name {self.name!r}: expected at most 40 of [a-z0-9_-], starting with a letter or digit"
            )
        if self.holds not in ("objects", "blocks"):
            raise ConfigurationError(
                f"location {self.name!r} holds {self.holds!r}: expected objects or blocks"
            )


class BlockRequest(NamedTuple):
    """A block of a shard, and how to know it when it comes."""

    name: str
    """Of the shard's object in a root."""
    offset: int
    length: int
    sha256: bytes
    """Of the block's stored bytes: 32 bytes, from the verified index."""


def block_name(sha256: bytes) -> str:
    """Name of a block in a cache, and in what a neighbour serves: by digest, like an object's."""
    text = sha256.hex()
    return f"blocks/{text[:2]}/{text}"


def check_locations(locations: Sequence[Location]) -> tuple[Location, ...]:
    """Refuse names that occur twice.

    Raises:
        ConfigurationError: Names the location.
    """
    seen: dict[str, Location] = {}
    for location in locations:
        if location.name in seen:
            raise ConfigurationError(
                f"location {location.name!r} is named twice: {seen[location.name].store.url} and {location.store.url}; "
                "give each a name of its own"
            )
        seen[location.name] = location
    return tuple(locations)
