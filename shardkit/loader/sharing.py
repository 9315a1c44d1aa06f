"""Sharing of caches between the nodes of a job: the server of this node's cache, and its peers (SPEC.md §9)."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardkit.errors import ConfigurationError
from shardkit.reading.cache.block_cache import MARKER, BlockCache
from shardkit.reading.cache.serving import CacheServer
from shardkit.telemetry.pages import parse_listen

__all__ = ["Holders", "find_address", "holders_of", "serve_cache"]

_ASKED: Final = 2  # nodes with most bytes of a lane; the nodes that work the lane are asked after them
_NO_LIMIT: Final = 1 << 62


def serve_cache(cache: Path, bind: tuple[str, int]) -> CacheServer:
    """Return a running server from which other nodes read this node's cache; create the cache if it is missing.

    Raises:
        StoreError: the server cannot listen on the address.
        UsageError: the cache is on a network file system.
    """
    if not os.path.isfile(cache / MARKER):
        BlockCache(cache, limit=_NO_LIMIT).close()
    server = CacheServer(cache, bind)
    server.start()
    return server


def find_address(share: bool | str, store: Any) -> tuple[str, int]:
    """Return the address to listen on.

    ``share=True`` takes the interface through which this machine reaches the process group's store, and port 0.

    Raises:
        ConfigurationError: the address is invalid, or the host of the process group is unknown or not reachable.
    """
    if isinstance(share, str):
        return parse_listen(share)
    while not hasattr(store, "host") and hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = (
        getattr(store, "host", None) or os.environ.get("MASTER_ADDR"),
        getattr(store, "port", None) or 9,
    )
    if not host:
        raise ConfigurationError(
            "share=True finds no host of the process group to reach its neighbours by: set MASTER_ADDR, or pass "
            'share="HOST:PORT", such as share="10.0.0.5:8450"'
        )
    try:
        kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(address)  # sends nothing; the system chooses the interface
            return str(way.getsockname()[0]), 0
    except OSError as error:
        raise ConfigurationError(
            f'share=True: {host} is not reached ({error.strerror}); pass share="HOST:PORT", an address of this machine'
        ) from error


class Holders(NamedTuple):
    """Caches of other nodes that this node may read.

    Attributes:
        urls: URLs of their servers.
        lanes: lane → indices into `urls` of the caches to ask for its blocks, in this order.
    """

    urls: Sequence[str]
    lanes: Sequence[Sequence[int]]


def holders_of(
    told: Sequence[Mapping[str, Any]], workers: Sequence[Collection[str]]
) -> tuple[dict[str, str], list[list[int]]]:
    """Return the caches to ask for the blocks of each lane.

    Args:
        told: messages of all ranks: node, address of its cache, and bytes of each lane.
        workers: lane → nodes that work it.

    Returns:
        Node → address for nodes that serve a cache, and for each lane the indices of these nodes, best first.
    """
    addresses = {one["node"]: one["cache"] for one in told if one["cache"]}
    number = {node: i for i, node in enumerate(addresses)}
    has: list[dict[int, int]] = [{} for _ in workers]
    for one in told:
        if one["node"] in number:
            for lane, size in zip(one["lanes"], one["bytes"], strict=True):
                has[lane][number[one["node"]]] = size
    lanes = []
    for those, nodes in zip(has, workers, strict=True):
        asked = [holder for _, holder in sorted((-size, holder) for holder, size in those.items())][:_ASKED]
        lanes.append(
            list(dict.fromkeys([*asked, *(number[node] for node in sorted(nodes) if node in number)]))
        )
    return addresses, lanes
