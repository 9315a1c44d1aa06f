"""Where datasets lie: stores of immutable objects, and the log of commits that names versions.

`Store` is the one protocol for places that hold objects; files are read and written through `file_operations` alone,
objects are verified both ways, and a version exists once the commit log names it. Inside, each idea has a
packages of its own: `shardkit.repository`, `shardkit.reading` and `shardkit.copies` above `shardkit.stores`. This one
only gathers their public names.
"""

from shardkit.reading.adopted import AdoptedStore, adopted_place, put_adopted
from shardkit.reading.blocks import BlockReader, RowMap
from shardkit.reading.located_store import LocatedStore, Locations, locate
from shardkit.reading.objects import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit.repository.versions import (
    Part,
    Version,
    find_part,
    load_manifest,
    load_selection,
    put_location,
    put_manifest,
    put_selection,
    with_adopted,
)
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.machine_memory import available_memory
from shardkit.stores.store import Descriptor, ObjectStat, Stage, Store, object_name, parse_object_name

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
