"""The per-node cache: blocks on a local disk, shared by all processes, evicted by what the plan knows.

::

    block_cache.py  fetch, verify, publish, evict
    catalogue.py    which blocks there are, as all processes see it
    future.py       when each block is needed next
    eviction.py     what a full cache drops, and what it does not take: the decision without files
    leases.py       what the other live processes will need
    filesystems.py  refuses network file systems
    supply.py       between a reader and the locations: the cache, and reading ahead by deadline
    serving.py      the blocks of a cache for neighbours, over HTTP
"""

from shardkit.storage.cache.block_cache import BlockCache
from shardkit.storage.cache.eviction import FurthestFirst, decide
from shardkit.storage.cache.future import NEVER, Future, choose_victims
from shardkit.storage.cache.serving import CacheServer, parse_bind
from shardkit.storage.cache.supply import Supply

__all__ = [
    "NEVER",
    "BlockCache",
    "CacheServer",
    "FurthestFirst",
    "Future",
    "Supply",
    "choose_victims",
    "decide",
    "parse_bind",
]
