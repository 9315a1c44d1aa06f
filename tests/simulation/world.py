"""Three buckets, one dataset in them, and what must hold of both whatever happens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Final, NamedTuple

import shardkit
from shardkit.errors import ShardkitError
from shardkit.storage import Repository
from shardkit.storage.identity import IDENTITY_NAME, Identity
from shardkit.storage.inventory import walk_versions
from shardkit.storage.objects import object_name, parse_object_name
from shardkit.storage.policy import LocationRecord, Parity, Policy
from shardkit.storage.remote.addresses import Address
from shardkit.storage.replicating.placing import Change, place
from shardkit.testing.memory_store import MemoryStore
from tests.simulation.buckets import Bucket, BucketClient, Faults, Stored
from tests.simulation.disks import Disk, DiskOperations
from tests.simulation.scheduler import Scheduler
from tests.simulation.seams import simulated

__all__ = ["ROOT", "URLS", "Violated", "World", "add_rows", "check_rows", "make_template"]

ROOT: Final = "s3://root"
URLS: Final = {"root": ROOT, "east": "/east", "west": "s3://west"}
SCHEMA: Final = {"n": "int64", "text": "str", "kind": "int64"}
_OBJECTS: Final = "objects/"
_LOG: Final = "log/"


class Violated(AssertionError):
    """An invariant does not hold."""


class Snapshot(NamedTuple):
    """What a seed starts from."""

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
    for sample in range(len(dataset)):
        row = dataset[sample]
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
        erased: numbers of rows that nobody may find any more.
        promised: manifest → the numbers of its rows, as who made it knows them.
    """

    def __init__(self, scheduler: Scheduler, faults: Faults, start: Snapshot | None = None) -> None:
        self.scheduler, self._faults = scheduler, faults
        self.disk = Disk("east")
        self.buckets = {
            "root": Bucket("root", keeps_checksums=False),
            "east": self.disk,
            "west": Bucket("west", keeps_checksums=True),
        }
        self.files = DiskOperations({"east": self.disk}, scheduler, faults)
        self.archive: dict[str, bytes] = dict(start.archive) if start else {}
        self.acknowledged: dict[int, str] = {}
        self.promised = dict(start.promised) if start else {}
        self.damaged: set[str] = set()
        self.erased: set[int] = set()
        self.next_row = start.rows if start else 0
        self._needs: dict[str, frozenset[str]] = {}
        self._good: dict[tuple[str, str], tuple[Stored, bool]] = {}
        for bucket in self.buckets.values():
            bucket.load(start.objects[bucket.name] if start else {})
            bucket.changed = self._changed
        scheduler.check = self.check_acknowledged

    def open_client(self, address: Address) -> BucketClient:
        """A new connection."""
        return BucketClient(self.buckets[address.host], address, self.scheduler, self._faults)

    def take_rows(self, count: int) -> range:
        """Numbers that no other row has."""
        first = self.next_row
        self.next_row += count
        return range(first, self.next_row)

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
                    for _, inventory in walk_versions(repository, [manifest])
                    for name, _ in inventory.names()
                }
            except ShardkitError as error:
                raise Violated(f"version {manifest} was committed and never was whole: {error}") from error
            self._needs[manifest] = frozenset(found)
        return self._needs[manifest]

    def needed(self) -> frozenset[str]:
        """Names of all objects that some ref or tag needs."""
        return frozenset().union(*map(self.needs, set(self.head().values())))

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

    def acknowledge(self, number: int, txn: str) -> None:
        """Somebody was told that his commit is in the log."""
        self.acknowledged[number] = txn
        self.check_acknowledged()

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
        self.disk.cut_power(self.scheduler)
        for name in sorted(self.disk.objects):
            if name.startswith(_OBJECTS) and name not in self.damaged and not self.is_good(self.disk, name):
                raise Violated(f"after a power cut {name} is torn: its name was there before its bytes")
        lost = [name for name in sorted(self.needed()) if not self.copies(name)]
        if lost:
            raise Violated(f"after a power cut {lost[0]} is nowhere, and a version needs it")

    # ---- changes

    def _changed(self, bucket: Bucket, name: str, before: Stored | None, after: Stored | None) -> None:
        if name.startswith(_OBJECTS):
            self._object_changed(bucket, name, before, after)
        elif name.startswith(_LOG):
            self._log_changed(bucket, name, after)
        elif name.startswith("locations/") and bucket.name == "root":
            if after is None or self.archive.setdefault(name, after.data) != after.data:
                raise Violated(f"root: {name} became another table")
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
        for manifest in {*entry["refs"].values(), *entry["tags"].values()}:
            lost = [one for one in sorted(self.needs(manifest)) if not self.copies(one)]
            if lost:
                raise Violated(f"{name} names {manifest}, of which {lost[0]} is nowhere")

    def _check_moves(self, before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> None:
        """Main follows what it was, unless it was built again or rows were erased: no update is lost."""
        old, new = before["refs"].get("main"), after["refs"].get("main")
        if old is None or new is None or old == new:
            return
        manifest = json.loads(self.archive[object_name(new, "manifest")])
        if manifest["parent"] not in (None, old) and "erased" not in manifest["build"]:
            raise Violated(
                f"main was {old}; its successor {new} follows {manifest['parent']}: an update is lost"
            )

    def rows_left(self, erased: Iterable[int]) -> list[str]:
        """Objects in which the text of an erased row still is."""
        texts = [text_of(number).encode() for number in erased]
        return [
            f"{bucket.name}/{name}"
            for bucket in self.buckets.values()
            for name, stored in bucket.objects.items()
            if name.startswith(_OBJECTS) and any(text in stored.data for text in texts)
        ]


def make_template(parity: bool) -> Snapshot:
    """The dataset that every seed starts from: shards, an append, a selection, a tag, two more locations."""
    scheduler = Scheduler(0)
    scheduler.is_calm = True
    world = World(scheduler, Faults())
    rows = world.take_rows(12)
    with simulated(scheduler, world.open_client, world.files):
        # put by hand: a new root is tried out by racing threads, which there are none of here
        world.buckets["root"].put(IDENTITY_NAME, Identity.new().to_bytes(), None, scheduler.now)
        with shardkit.create(
            ROOT, SCHEMA, format="arrow", stratify="kind", shard_size=800, block_size=200
        ) as one:
            add_rows(one, rows)
        repository = Repository.open(ROOT)
        repository.commit({}, {"v1": one.manifest.id}, message="v1")
        world.promised[one.manifest.id] = frozenset(rows)
        locations = tuple(LocationRecord(name, URLS[name], name) for name in ("east", "west"))
        policy = Policy(copies=2, parity=Parity(2) if parity else None, mode="async")
        place(repository, Change(locations=locations, policy=lambda _: policy))
    objects = {name: bucket.objects for name, bucket in world.buckets.items()}
    return Snapshot(objects, world.archive, world.promised, world.next_row)
