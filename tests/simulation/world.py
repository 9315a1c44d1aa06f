"""Three buckets, one dataset in them, and what must hold of both whatever happens."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import shardkit
from shardkit.copies.place import PlacementChange, place
from shardkit.errors import ShardkitError
from shardkit.reading.inventory import walk_versions
from shardkit.reading.parity.sets import SetRecord
from shardkit.repository.log import IDENTITY_NAME, Identity
from shardkit.repository.policy import LocationRecord, Parity, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.remote.addresses import Address
from shardkit.stores.store import object_name, parse_object_name
from shardkit.testing.memory_store import MemoryStore
from tests.simulation.buckets import Bucket, BucketClient, Faults, Stored
from tests.simulation.disk_operations import DiskOperations
from tests.simulation.disks import Disk
from tests.simulation.scheduler import Scheduler
from tests.simulation.seams import simulated

__all__ = ["SCHEMA", "SETTINGS", "Snapshot", "Violated", "World", "add_rows", "check_rows", "make_template"]

SCHEMA: Final = {"n": "int64", "text": "str", "kind": "int64"}
SETTINGS: Final[dict[str, Any]] = {
    "format": "arrow",
    "stratify": "kind",
    "shard_size": 1600,
    "block_size": 200,
    "scratch": tempfile.gettempdir(),
}
"""Of every build. The scratch folder is there, and its files are on a simulated disk."""

_OBJECTS: Final = "objects/"
_LOG: Final = "log/"


class Violated(AssertionError):
    """An invariant does not hold."""


class Snapshot(NamedTuple):
    """What a seed starts from."""

    on_disk: bool
    """Whether the root is a folder, or a bucket."""
    objects: dict[str, dict[str, Stored]]
    archive: dict[str, bytes]
    promised: dict[str, frozenset[int]]
    rows: int


def text_of(number: int) -> str:
    """The text that a row must have."""
    return hashlib.sha256(b"row %d" % number).hexdigest() * (1 + number % 3)


def add_rows(writer: shardkit.Writer, numbers: Iterable[int]) -> None:
    """Put rows into a version; each proves itself."""
    for number in numbers:
        writer.add({"n": number, "text": text_of(number), "kind": number % 2}, key=f"row-{number}")


def check_rows(dataset: shardkit.Dataset) -> frozenset[int]:
    """Read every row of a version.

    Raises:
        Violated: one is not what was written.
    """
    found = []
    for row in dataset:
        if row["text"] != text_of(row["n"]) or row["kind"] != row["n"] % 2:
            raise Violated(f"a reader got a wrong row: {row}")
        found.append(row["n"])
    if len(set(found)) != len(found):
        raise Violated(f"a reader got a row twice: {sorted(found)}")
    return frozenset(found)


class World:
    """The buckets, seen by someone who sees everything at once.

    Attributes:
        buckets: by location.
        archive: every object that was ever there → its right bytes.
        acknowledged: number of a log entry → the transaction that was told to have made it.
        damaged: names of objects that rotted on the disk.
        rebuilt: names of those of them of which parity alone was left.
        erased: numbers of rows that nobody may find any more in the end.
        gone: those of them of which nothing was left.
        was_moved: whether locations were given other shares, so that some have more than is theirs.
        erasing: numbers of rows that somebody is about to erase, and never builds again.
        built_again: numbers of rows that nobody erases.
        promised: manifest → the numbers of its rows, as who made it knows them.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults, start: Snapshot) -> None:
        self.scheduler, self._faults = scheduler, faults
        self.buckets = {
            "root": Disk("root") if start.on_disk else Bucket("root", keeps_checksums=False),
            "east": Disk("east"),
            "west": Bucket("west", keeps_checksums=True),
        }
        self.cache = Disk("cache")
        self.disks = [self.cache, *(bucket for bucket in self.buckets.values() if isinstance(bucket, Disk))]
        self.urls = {
            name: bucket.path if isinstance(bucket, Disk) else f"s3://{name}"
            for name, bucket in self.buckets.items()
        }
        self.root = self.urls["root"]
        scratch = Disk("scratch", SETTINGS["scratch"], is_scratch=True)
        self.files = DiskOperations([*self.disks, scratch], scheduler, faults)
        self.archive: dict[str, bytes] = dict(start.archive)
        self.acknowledged: dict[int, str] = {}
        self.promised = dict(start.promised)
        self.damaged: set[str] = set()
        self.rebuilt: set[str] = set()
        self.erased: set[int] = set()
        self.was_moved = False
        self.gone: set[int] = set()
        self.erasing: set[int] = set()
        self.built_again: set[int] = set()
        self.next_row = start.rows
        self._needs: dict[str, frozenset[str]] = {}
        self._good: dict[tuple[str, str], tuple[Stored, bool]] = {}
        for bucket in self.buckets.values():
            bucket.load(start.objects.get(bucket.name, {}))
            bucket.changed = self._changed

    def open_client(self, address: Address) -> BucketClient:
        """A new connection."""
        return BucketClient(self.buckets[address.host], address, self.scheduler, self._faults)

    def take_rows(self, count: int) -> range:
        """Numbers that no other row has."""
        first = self.next_row
        self.next_row += count
        return range(first, self.next_row)

    def take_known_rows(self) -> list[int]:
        """Numbers of the rows of some version, as nobody erases them; often none."""
        rows = self.scheduler.random.choice(
            [*self.promised.values(), *(frozenset[int]() for _ in self.promised)]
        )
        if rows & self.erasing:
            return []
        self.built_again |= rows
        return sorted(rows)

    # ---- what everybody may rely on

    def head(self) -> dict[str, str]:
        """Ref or tag → manifest, by the newest entry of the root's log as it was written."""
        newest = max((name for name in self.archive if name.startswith(_LOG)), default=None)
        if newest is None:
            return {}
        entry = json.loads(self.archive[newest])
        return {**entry["refs"], **entry["tags"]}

    def needs(self, manifest: str) -> frozenset[str]:
        """Names of all objects that a version needs."""
        if manifest not in self._needs:
            store = MemoryStore()
            store.objects = self.archive
            identity = Identity.from_bytes(self.archive[IDENTITY_NAME], "the archive")
            repository = Repository(store, identity, read_only=True)
            try:
                found = {
                    name
                    for inventory in walk_versions(repository.store, [manifest])
                    for name, _ in inventory.names()
                }
            except ShardkitError as error:
                raise Violated(f"version {manifest} was committed and never was whole: {error}") from error
            self._needs[manifest] = frozenset(found)
        return self._needs[manifest]

    def needed(self) -> frozenset[str]:
        """Names of all objects that some ref or tag needs."""
        return frozenset().union(*map(self.needs, set(self.head().values())))

    def residue(self) -> list[str]:
        """Objects that no ref or tag needs, parity aside."""
        needed = self.needed()
        return [
            f"{bucket.name}/{name}"
            for bucket in self.buckets.values()
            for name in sorted(bucket.objects)
            if name.startswith(_OBJECTS) and name not in needed and not name.endswith(".parity")
        ]

    def is_good(self, bucket: Bucket, name: str) -> bool:
        """Whether a bucket holds the right bytes of an object."""
        stored = bucket.objects.get(name)
        if stored is None:
            return False
        known = self._good.get((bucket.name, name))
        if known is None or known[0] is not stored:
            known = self._good[bucket.name, name] = (stored, stored.data == self.archive.get(name))
        return known[1]

    def copies(self, name: str) -> list[str]:
        """Locations with the right bytes of an object."""
        return [bucket.name for bucket in self.buckets.values() if self.is_good(bucket, name)]

    def is_lost(self, name: str) -> bool:
        """Whether an object is good nowhere, and not for the time being."""
        return not self.copies(name) and name not in self.rebuilt

    def rebuildable(self) -> str | None:
        """An object that parity can make again, should all of its copies be lost; None where none is sure to be."""
        sets = [
            SetRecord.from_bytes(stored.data, name)
            for name, stored in sorted(self.buckets["root"].objects.items())
            if name.startswith("parity/sets/")
        ]
        if "v1" not in self.head() or self.rebuilt:  # a set may go with the last version that it belongs to
            return None
        of_v1 = self.needs(self.head()["v1"])
        whole = [
            members
            for record in sets
            if (members := [member.name for member in record.set.members])
            and of_v1.issuperset(members)
            and all(self.copies(name) for name in (*members, record.object_at(len(members)).name))
        ]
        if not whole:
            return None
        return self.scheduler.random.choice(self.scheduler.random.choice(whole))

    def acknowledge(self, number: int, txn: str) -> None:
        """Somebody was told that his commit is in the log."""
        self.acknowledged[number] = txn
        self.check_acknowledged()

    def acknowledge_version(self, manifest: str) -> None:
        """Somebody was told that his version was committed."""
        entries = (json.loads(data) for name, data in self.archive.items() if name.startswith(_LOG))
        found = next((entry for entry in entries if manifest in entry["refs"].values()), None)
        if found is None:
            raise Violated(f"version {manifest} was acknowledged and no entry of the log names it")
        self.acknowledge(found["n"], found["txn"])

    def acknowledge_erased(self, numbers: Iterable[int]) -> None:
        """Somebody was told that rows are erased."""
        self.erased.update(numbers)
        if not self.rows_left(self.erased):  # a version that was made meanwhile may hold them, until the end
            self.gone.update(self.erased)

    def check_acknowledged(self) -> None:
        """No acknowledged commit is lost."""
        for number, txn in self.acknowledged.items():
            data = self.archive.get(f"{_LOG}{number:020d}.json")
            if data is None or json.loads(data)["txn"] != txn:
                raise Violated(f"commit {txn} was acknowledged as entry {number} and is not in the log")

    def cut_power(self) -> None:
        """Every process dies, and the disk forgets what it was not asked to keep.

        Raises:
            Violated: something that a version needs is nowhere any more.
        """
        self.scheduler.kill_all()
        self.files.forget()
        for disk in self.disks:
            disk.cut_power(self.scheduler)
            for name in sorted(disk.objects):
                if (
                    name.startswith((_OBJECTS, _LOG))
                    and name not in self.damaged
                    and not self.is_good(disk, name)
                ):
                    raise Violated(f"after a power cut {name} is torn: its name was there before its bytes")
        for name in sorted(name for name in self.archive if name.startswith(_LOG)):
            if not self.copies(name):
                del self.archive[name]  # nobody was told of it, or:
        self.check_acknowledged()
        if left := self.rows_left(self.gone):
            raise Violated(f"after a power cut {left[0]} has rows again that were erased")
        lost = [name for name in sorted(self.needed()) if self.is_lost(name)]
        if lost:
            raise Violated(f"after a power cut {lost[0]} is nowhere, and a version needs it")

    # ---- changes

    def _changed(self, bucket: Bucket, name: str, before: Stored | None, after: Stored | None) -> None:
        if name.startswith(_OBJECTS):
            self._object_changed(bucket, name, before, after)
        elif name.startswith(_LOG):
            self._log_changed(bucket, name, after)
        elif (
            name == IDENTITY_NAME
            and after is not None
            and self.archive.setdefault(name, after.data) != after.data
        ):
            raise Violated(f"{bucket.name}: the identity was replaced by another")

    def _object_changed(self, bucket: Bucket, name: str, before: Stored | None, after: Stored | None) -> None:
        if after is not None:
            digest, _ = parse_object_name(name)
            if f"sha256:{after.sha256}" != digest:
                raise Violated(f"{bucket.name}: bytes were put under {name} that are not its own")
            self.archive[name] = after.data
            return
        was_good = before is not None and before.data == self.archive.get(name)
        if was_good and not self.copies(name) and name in self.needed():
            raise Violated(f"{bucket.name}: the last good copy of {name} was deleted, and a version needs it")

    def _log_changed(self, bucket: Bucket, name: str, after: Stored | None) -> None:
        if after is None:
            raise Violated(f"{bucket.name}: {name} was deleted")
        known = self.archive.get(name)
        if known is not None:
            if known != after.data:
                raise Violated(f"{bucket.name}: {name} became another entry")
            return
        if bucket.name != "root":
            raise Violated(f"{bucket.name}: {name} is not in the root's log")
        entry = json.loads(after.data)
        before = self.archive.get(f"{_LOG}{entry['n'] - 1:020d}.json" if entry["n"] > 1 else IDENTITY_NAME)
        if before is None or entry["previous"] != f"sha256:{hashlib.sha256(before).hexdigest()}":
            raise Violated(f"{name} does not follow the entry before it")
        if entry["n"] > 1:
            self._check_moves(json.loads(before), entry)
        self.archive[name] = after.data
        for manifest in sorted({*entry["refs"].values(), *entry["tags"].values()}):
            lost = [one for one in sorted(self.needs(manifest)) if self.is_lost(one)]
            if lost:
                raise Violated(f"{name} names {manifest}, of which {lost[0]} is nowhere")

    def _check_moves(self, before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> None:
        """Main follows what it was, unless it was built again or rows were erased: no update is lost."""
        for tag, version in before["tags"].items():
            if after["tags"].get(tag, version) != version:
                raise Violated(f"tag {tag} was {version} and is {after['tags'][tag]}")
        old, new = before["refs"].get("main"), after["refs"].get("main")
        if old is None or new is None or old == new:
            return
        manifest = json.loads(self.archive[object_name(new, "manifest")])
        parent = manifest.get("parent", old)
        if parent != old and "erased" not in manifest["build"]:
            raise Violated(f"main was {old}; its successor {new} follows {parent}: an update is lost")

    def rows_left(self, erased: Iterable[int]) -> list[str]:
        """Objects in which the text of an erased row still is."""
        texts = [text_of(number).encode() for number in erased]
        return [
            f"{bucket.name}/{name}"
            for bucket in self.buckets.values()
            for name, stored in bucket.objects.items()
            if name.startswith(_OBJECTS) and any(text in stored.data for text in texts)
        ]


def make_template(*, parity: bool, on_disk: bool) -> Snapshot:
    """The dataset that every seed starts from: shards, an append, a selection, a tag, two more locations."""
    scheduler = Scheduler(0)
    scheduler.is_calm = True
    world = World(scheduler, Faults(), Snapshot(on_disk, {}, {}, {}, 0))
    rows = world.take_rows(12)
    with simulated(scheduler, world.open_client, world.files):
        if (
            not on_disk
        ):  # put by hand: a new bucket is tried out by racing threads, which there are none of here
            world.buckets["root"].put(IDENTITY_NAME, Identity.new().to_bytes(), None, scheduler.now)
        with shardkit.create(world.root, SCHEMA, **SETTINGS) as one:
            add_rows(one, rows)
        repository = Repository.open(world.root)
        repository.commit({}, {"v1": one.manifest.id}, message="v1")
        world.promised[one.manifest.id] = frozenset(rows)
        locations = tuple(LocationRecord(name, world.urls[name], name) for name in ("east", "west"))
        policy = Policy(copies=2, parity=Parity(2) if parity else None, mode="async")
        place(repository, PlacementChange(locations=locations, policy=lambda _: policy))
    objects = {name: bucket.objects for name, bucket in world.buckets.items()}
    return Snapshot(on_disk, objects, world.archive, world.promised, world.next_row)
