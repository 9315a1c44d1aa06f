"""Where datasets lie: stores of immutable objects, and the log of commits that names versions.

`Store` is the one protocol for places that hold objects; files are read and written through `file_operations` alone,
objects are verified both ways, and a version exists once the commit log names it. What a root needs beyond one store
has a package of its own below this one. SPEC.md says the layout, the order of writes, and what is promised when.
"""

from shardkit.storage.adopted import AdoptedStore, adopted_place, put_adopted, with_adopted
from shardkit.storage.blocks import BlockReader
from shardkit.storage.catalog import Part, Version, load_manifest, load_selection, put_manifest, put_selection
from shardkit.storage.local import LocalStore
from shardkit.storage.locating import Locations, locate
from shardkit.storage.locations import find_part, put_location
from shardkit.storage.log import LogEntry
from shardkit.storage.machine_memory import available_memory
from shardkit.storage.objects import Descriptor, object_name, parse_object_name
from shardkit.storage.reading import LocatedStore, Location, ReadSettings
from shardkit.storage.repository import DEFAULT_REF, Repository
from shardkit.storage.row_map import RowMap
from shardkit.storage.store import ObjectStat, Stage, Store
from shardkit.storage.urls import open_store, parse_dataset_url

__all__ = [
    "DEFAULT_REF",
    "AdoptedStore",
    "BlockReader",
    "Descriptor",
    "LocalStore",
    "LocatedStore",
    "Location",
    "Locations",
    "LogEntry",
    "ObjectStat",
    "Part",
    "ReadSettings",
    "Repository",
    "RowMap",
    "Stage",
    "Store",
    "Version",
    "adopted_place",
    "available_memory",
    "find_part",
    "load_manifest",
    "load_selection",
    "locate",
    "object_name",
    "open_store",
    "parse_dataset_url",
    "parse_object_name",
    "put_adopted",
    "put_location",
    "put_manifest",
    "put_selection",
    "with_adopted",
]
