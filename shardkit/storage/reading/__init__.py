"""Reading from several locations of which any may be slow, wrong, overloaded or gone.

::

    locations.py      a store with a name and a failure domain; what is asked of it
    health.py         response times, requests at once, circuit breaker, per location
    detours.py        counters and events
    read_path.py      failover, hedging, one re-fetch, pauses with jitter, deadlines
    located_store.py  several locations that look like one store
    documents.py      what has no digest in its name, by the same order of events
    attestations.py   what someone found when looking at a copy
    healing.py        good bytes over bad copies, in the background
"""

from shardkit.storage.reading.attestations import Attestation
from shardkit.storage.reading.detours import Detour, Detours
from shardkit.storage.reading.documents import asked_twice, read_checked
from shardkit.storage.reading.located_store import LocatedStore
from shardkit.storage.reading.locations import BlockRequest, Location, block_name, place_ids
from shardkit.storage.reading.read_path import ReadPath, ReadSettings, Want

__all__ = [
    "Attestation",
    "BlockRequest",
    "Detour",
    "Detours",
    "LocatedStore",
    "Location",
    "ReadPath",
    "ReadSettings",
    "Want",
    "asked_twice",
    "block_name",
    "place_ids",
    "read_checked",
]
