"""Reading from several locations of which any may be slow, wrong, overloaded or gone.

Only bytes whose digest is right are handed on; which location gave them, and what went wrong, is told as counters and
events.
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
