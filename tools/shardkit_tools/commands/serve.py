"""`shardkit serve`: a node's cached blocks for its neighbours."""

from __future__ import annotations

import contextlib
from typing import Annotated

from shardkit.reading.cache.serving import CacheServer
from shardkit.telemetry.pages import parse_listen
from shardkit_tools import console
from shardkit_tools.options import argument, option


def serve(
    cache: Annotated[str, argument("CACHE", "The directory that loaders use as cache=.")],
    bind: Annotated[
        str,
        option(
            "--bind HOST:PORT",
            "Where to listen. Others can reach it only if another address than 127.0.0.1 is named here.",
        ),
    ] = "127.0.0.1:8450",
    connections: Annotated[int, option("--connections", "Requests at once; more are refused.", min=1)] = 64,
) -> None:
    """Share a cache with other nodes, read-only, until Ctrl-C.

    A neighbour adds it as a location: shardkit.open(ROOT, locations={"rack": "http://10.0.0.5:8450"}). It verifies
    every block by its digest, so it needs not trust this machine. Whoever can reach the address can read the blocks
    whose digests they know.

    Example: shardkit serve /var/tmp/shardkit --bind 10.0.0.5:8450
    """
    server = CacheServer(cache, parse_listen(bind), most_connections=connections)
    console.print_line(f"serving the blocks of {server.path} at {server.url}; Ctrl-C ends it")
    with contextlib.closing(server):
        server.serve()
