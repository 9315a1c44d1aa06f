"""Where datasets lie: stores of immutable objects, and the log of commits that names versions.

`Store` is the one protocol for places that hold objects; files are read and written through `file_operations` alone,
objects are verified both ways, and a version exists once the commit log names it. Inside, each idea has a package
of its own: `shardkit.repository`, `shardkit.reading` and `shardkit.copies` above `shardkit.stores`. This one only
gathers what programs use of them.
"""

from shardkit.reading.located_store import LocatedStore, Locations
from shardkit.reading.objects import Location
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.log import LogEntry, parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit.repository.versions import Version, load_manifest
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import Descriptor, ObjectStat, Stage, Store, object_name, parse_object_name

__all__ = [
    "DEFAULT_REF",
    "Descriptor",
    "LocalStore",
    "LocatedStore",
    "Location",
    "Locations",
    "LogEntry",
    "ObjectStat",
    "ReadSettings",
    "Repository",
    "Stage",
    "Store",
    "Version",
    "load_manifest",
    "object_name",
    "open_store",
    "parse_dataset_url",
    "parse_object_name",
]
