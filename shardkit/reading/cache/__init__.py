"""The per-node cache: blocks on a local disk, shared by all processes, evicted by what the plan knows.

Blocks are verified when they enter and whenever they are read; a cache may be deleted at any time. Which block goes
is decided without files, from the steps at which live processes need it.
"""

from shardkit.reading.cache.block_cache import BlockCache
from shardkit.reading.cache.eviction import NEVER, FurthestFirst, Future, choose_victims, decide
from shardkit.reading.cache.serving import CacheServer, parse_bind
from shardkit.reading.cache.shared_blocks import SharedBlocks
from shardkit.reading.cache.supply import BlockFetcher

__all__ = [
    "NEVER",
    "BlockCache",
    "BlockFetcher",
    "CacheServer",
    "FurthestFirst",
    "Future",
    "SharedBlocks",
    "choose_victims",
    "decide",
    "parse_bind",
]
