"""Where copies of objects lie. A location is known to a machine, never to a manifest."""

from __future__ import annotations

import dataclasses
import re
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.stores.store import Store

ROOT_NAME: Final = "root"
"""The location where the log is: it holds every object, and is the only one that is committed to."""

LOCATION_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


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
        check_location_name(self.name)
        if self.holds not in ("objects", "blocks"):
            raise ConfigurationError(
                f"location {self.name!r} holds {self.holds!r}: expected objects or blocks"
            )


def check_location_name(name: str) -> None:
    """Refuse what is no name of a location.

    Raises:
        ConfigurationError: it is none.
    """
    if LOCATION_NAME.fullmatch(name) is None:
        raise ConfigurationError(
            f"location name {name[:60]!r}: expected at most 40 of [a-z0-9_-], starting with a letter or digit"
        )


class BlockRequest(NamedTuple):
    """A block of a shard, and how to know it when it comes."""

    name: str
    """Of the shard's object in a root."""
    offset: int
    length: int
    sha256: bytes
    """Of the block's stored bytes: 32 bytes, from the verified index."""
    xxh3: int | None = None
    """The fast checksum of the same bytes, for copies on this machine; SHA-256 is used where it is None."""
    place: int = 0
    """`place_ids` of shard and block: what a plan knows of a block before any index is read."""
    shard: int = 0
    """Number of the shard in the dataset."""
    block: int = 0
    """Number of the block in the shard."""


def place_ids(shard_digests: NDArray[np.uint8], blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Numbers that tell blocks apart without their digests.

    Args:
        shard_digests: (n, 32), SHA-256 of the shards.
        blocks: (n,), block in the shard.

    Returns:
        (n,) uint64; 64 bits of a digest, moved on by the block, so that two blocks share one by bad luck only.
    """
    heads = np.ascontiguousarray(shard_digests[:, :8]).view("<u8").reshape(-1)
    numbers: NDArray[np.uint64] = heads + blocks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return numbers


def block_name(sha256: bytes) -> str:
    """Name of a block in a cache, and in what a neighbour serves: by digest, like an object's."""
    text = sha256.hex()
    return f"blocks/{text[:2]}/{text}"
