"""Where datasets lie: stores of immutable objects, and the log of commits that names versions.

::

    store.py            the one protocol that every store implements
    local.py            a store in a directory: crash-safe publishing, no links followed
    temporaries.py      files still being written, and the sweep of those whose writer is dead
    file_operations.py  every system call on a store's files, in one place
    os_errors.py        what the operating system's errors mean and what to do next
    objects.py          content-addressed names
    object_access.py    putting and getting objects, verified both ways
    identity.py         shardkit.json
    adopted.py          where adopted tars lie, and a store that finds them there
    locations.py        where the parts of a merged dataset lie
    log.py              log entries and their chain
    commit_log.py       reading the log with its chain verified, appending to it
    changes.py          what a commit asks for, applied to a head
    repository.py       objects and commits below one root
    catalog.py          putting and loading versions: manifest, pages, selections
    row_map.py          where samples lie: sample number → shard, row, block
    blocks.py           verified blocks of a dataset
    machine_memory.py   how much memory is left, within the limits of containers and jobs
    urls.py             from what a user types to a store
    locating.py         from what a user says of locations to a store that reads over all of them
    remote/             stores beyond the local disk: buckets, fsspec URLs, the racing probe
    reading/            locations of which any may be slow, wrong or gone: failover, hedging, healing
    policy/             where copies shall lie, and where they are: recorded beside the log
    replicating/        copies until the policy is met; other places for them; what a commit waits for
    collecting/         objects that nothing names any more
    cache/              the per-node cache, reading ahead, serving neighbours

SPEC.md says the layout, the order of writes, and what is promised when.
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
