"""Objects that the versions of a root need, the locations that each belongs in, and the objects in each location.

Placement is weighted rendezvous hashing over SHA-256 in integers (Thaler and Ravishankar, 1998), a pure function. Every
location hashes (its name, digest of the object) to a draw u in (0, 1]. The object belongs in the locations with the
smallest -log(u) / weight, one per failure domain, so a location gets a share in proportion to its weight. No state is
kept, and adding or removing a location moves only the objects that it gets or had.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from shardkit.documents import parse_digest
from shardkit.errors import ConfigurationError, IntegrityError, ShardkitError
from shardkit.extras import shell_word
from shardkit.manifest import Manifest
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.inventory import Inventory, first_good, walk_versions
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.reading.parity.sets import parity_names
from shardkit.repository.locations import first_root, is_prepared, location_of, read_table
from shardkit.repository.policy import LocationRecord, LocationTable, Policy
from shardkit.repository.repository import Repository
from shardkit.stores.store import parse_object_name, root_store

LARGE: Final = ("tar", "arrow", "rows", "parity")
"""Extensions of objects other than metadata. Metadata is small, and needed to read any shard."""

_FRACTION_BITS: Final = 32
_SCALE_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class NeededObject:
    """An object that a version needs."""

    name: str  # name of the object in a store
    size: int | None  # size in bytes; None if no page has it
    where: tuple[str, ...]  # names of the locations that the object belongs in, the root first
    # True for metadata and shards with critical strata: a commit in hybrid mode waits for their copies
    is_critical: bool


class Copy(NamedTuple):
    """A copy of an object in a location that it belongs in."""

    location: str  # name of the location
    name: str  # name of the object
    size: int | None  # size in bytes; None if unknown
    state: str = ""  # result of its check, see `CheckResult`; "" before the check

    @property
    def is_bad(self) -> bool:
        return self.state in ("wrong", "missing")


def list_copies(needed: Mapping[str, NeededObject]) -> Iterator[Copy]:
    """Yield every copy that the policy asks for."""
    for one in needed.values():
        for location in one.where:
            yield Copy(location, one.name, one.size)


def find_needed(
    repository: Repository, table: LocationTable, versions: Iterable[str]
) -> dict[str, NeededObject]:
    """Return the objects that versions need, by name, with their parts in this root and their parity."""
    found: dict[str, NeededObject] = {}
    for inventory in walk_versions(repository.store, versions):
        add_needed(found, needed_of(table, inventory, parity_names(repository.store, inventory)))
    return found


def add_needed(found: dict[str, NeededObject], more: Iterable[NeededObject]) -> None:
    """Add objects to `found`. A shard may be critical in one version only; the entry with more locations is kept."""
    for one in more:
        if one.name not in found or len(found[one.name].where) < len(one.where):
            found[one.name] = one


def needed_of(table: LocationTable, inventory: Inventory, parity: Collection[str]) -> Iterator[NeededObject]:
    """Yield the objects that one version needs, including the parity objects named in `parity`."""
    strata = _strata_of_shards(inventory) if table.policy.critical else {}
    sizes = dict(inventory.names())
    sizes |= dict.fromkeys(sorted(set(parity) - sizes.keys()))
    for name, size in sizes.items():
        if name.startswith("objects/"):
            digest, extension = parse_object_name(name)
            held = strata.get(digest, frozenset())
            where = placement(table.policy, table.locations, digest, extension, held)
            yield NeededObject(name, size, where, extension not in LARGE or table.policy.is_critical(held))


def unknown_strata(repository: Repository, names: Iterable[str]) -> dict[str, str]:
    """Return the strata of `names` that no version or part in this root has, each with a hint for a message.

    The result is empty if there is no version.
    """
    wanted, versions = list(names), repository.versions
    if not wanted or not versions:
        return {}
    known: set[str] = set()
    for inventory in walk_versions(repository.store, versions):
        known.update(*_names_of_strata(inventory.manifest))
    return {name: _there_are(name, known) for name in wanted if name not in known}


def _there_are(name: str, known: Iterable[str]) -> str:
    """Return a hint for a message: the most similar stratum, or some of the known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"there are {', '.join(map(repr, names[:10]))}{more}"


def _strata_of_shards(inventory: Inventory) -> dict[str, frozenset[str]]:
    """Return the names of each shard's strata, by digest of the shard."""
    found: dict[str, frozenset[str]] = {}
    names = _names_of_strata(inventory.manifest)
    for table in inventory.tables:
        borders = table.segment_starts
        for shard in range(len(table)):
            numbers = np.unique(table.segment_stratum[borders[shard] : borders[shard + 1]])
            found[table.digest_text(shard)] = frozenset().union(*(names[i] for i in numbers.tolist()))
    return found


def _names_of_strata(manifest: Manifest) -> list[frozenset[str]]:
    """Return the names of each stratum: its own and its class name. The pool has the names of all its members."""
    found: list[frozenset[str]] = []
    for stratum in manifest.strata:
        names = {stratum.name}
        if "label" in manifest.axes and len(stratum.values) == len(manifest.axes):
            values = list(stratum.values)
            place = manifest.axes.index("label")
            if values[place].isdecimal() and int(values[place]) < len(manifest.classes):
                values[place] = manifest.classes[int(values[place])]
                names.add("/".join(values))
        found.append(frozenset(names))
    pooled = frozenset().union(
        *(names for names, one in zip(found, manifest.strata, strict=True) if one.in_pool)
    )
    return [
        names | pooled if one.pooled else names for names, one in zip(found, manifest.strata, strict=True)
    ]


def placement(
    policy: Policy,
    locations: Sequence[LocationRecord],
    digest: str,
    extension: str,
    strata: frozenset[str] = frozenset(),
) -> tuple[str, ...]:
    """Return the names of the locations that an object belongs in, the root first, then in the order of their draws.

    Returns:
        As many names as the policy has copies, in distinct failure domains, or fewer if there are fewer domains. For
        metadata, all locations with a weight.

    Raises:
        ConfigurationError: `locations` is empty.
    """
    if not locations:
        raise ConfigurationError("no location to place objects in; name the root first")
    root, others = locations[0], [one for one in locations[1:] if one.weight]
    if extension not in LARGE:
        return (root.name, *(one.name for one in others))
    copies = policy.copies_of(strata)
    return (root.name, *_draw_locations(digest, others, copies - 1, {root.domain}))


def _draw_locations(
    digest: str, locations: Iterable[LocationRecord], count: int, taken: set[str]
) -> list[str]:
    if count < 1:
        return []
    chosen: list[str] = []
    domains = set(taken)
    for one in sorted(locations, key=lambda one: _draw(digest, one)):
        if one.domain not in domains:
            chosen.append(one.name)
            domains.add(one.domain)
            if len(chosen) == count:
                break
    return chosen


def _draw(digest: str, location: LocationRecord) -> tuple[int, bytes]:
    """Return the draw of a location for an object; the location with the smallest draw wins.

    A draw is (-log2(u) / weight in fixed point, hash), with u in (0, 1] from the hash, which also decides ties.
    """
    hashed = hashlib.sha256(
        b"shardkit-placement/1\0" + f"{location.name}\0{parse_digest(digest)}".encode()
    ).digest()
    u = int.from_bytes(hashed[:8], "big") + 1  # 1 … 2**64
    return (_minus_log2(u) << _SCALE_BITS) // location.weight, hashed


def _minus_log2(u: int) -> int:
    """Return -log2(u / 2**64) for 1 ≤ u ≤ 2**64, rounded up to 32 fractional bits.

    Each squaring of the mantissa gives one bit.
    """
    exponent = u.bit_length() - 1
    mantissa = (u << 63) >> exponent  # [2**63, 2**64): 1.0 … 2.0
    log2 = exponent
    for _ in range(_FRACTION_BITS):
        mantissa = (mantissa * mantissa) >> 63
        log2 <<= 1
        if mantissa >> 64:
            mantissa >>= 1
            log2 |= 1
    return (64 << _FRACTION_BITS) - log2


_OBJECTS: Final = "objects/"
_QUESTIONS: Final = 16


@dataclass(slots=True)
class Holding:
    """State of one location, the copies made there by a call, and the copies that it lacks."""

    name: str  # name of the location
    url: str  # URL of the location
    domain: str  # failure domain
    # "ok"; "unreachable"; "unprepared": empty or not mounted; "foreign": another dataset; "failed": copies
    # could not be put; "new": not yet prepared, in a dry run
    state: str = "ok"
    problem: str = ""  # error message, or ""
    copied: int = 0  # number of objects copied to it
    copied_bytes: int = 0  # bytes of those objects
    commits: int = 0  # number of log entries copied to it
    lag: int = 0  # number of objects that belong there and are missing
    lag_bytes: int = 0  # bytes of those objects


class Holdings:
    """Locations opened for writing, after a check of their marks. Objects are not listed until `fill`.

    Args:
        repository: the root.
        records: locations; by default all locations of the root's table, or the root alone if it has no table.

    Attributes:
        root: store of the root.
        all: name → state, of all locations.
        stores: name → location, of the locations that answer and have the expected mark.
        held: location name → names of the objects that it lists.
        needed: name → needed object.
        missing: missing copies of all locations, including locations that do not answer.
    """

    def __init__(self, repository: Repository, records: Sequence[LocationRecord] | None = None) -> None:
        self.root = root_store(repository.store)
        if records is None:
            table = read_table(self.root, repository.id)
            records = table.locations if table else (first_root(self.root),)
        self.all = {one.name: Holding(one.name, one.url, one.domain) for one in records}
        self.stores: dict[str, Location] = {}
        self.held: dict[str, set[str]] = {name: set() for name in self.all}
        self.needed: Mapping[str, NeededObject] = {}
        self.missing: list[Copy] = []
        for record in records:
            self._open(repository, record)

    def _open(self, repository: Repository, record: LocationRecord) -> None:
        name = record.name
        if name == ROOT_NAME:
            self.stores[name] = Location(name=ROOT_NAME, store=self.root, domain=record.domain, heal=True)
            return
        try:
            location = location_of(record, writable=True)
            if is_prepared(location.store, name, repository.id):
                self.stores[name] = location
                return
            refill = f"shardkit place {shell_word(repository.url)} --refill {name}"
            why = f"{record.url} is empty, or its disk is not mounted; to fill it anew: {refill}"
            self._leave_out(name, "unprepared", why)
        except IntegrityError as error:
            self._leave_out(name, "foreign", str(error))
        except ShardkitError as error:
            self._leave_out(name, "unreachable", str(error))

    def _leave_out(self, name: str, state: str, problem: str) -> None:
        """Exclude a location from reads and writes."""
        self.stores.pop(name, None)
        self.all[name].state, self.all[name].problem = state, problem

    @property
    def problems(self) -> dict[str, str]:
        """Name → error message, of the locations that cannot be used."""
        return {name: one.problem for name, one in self.all.items() if name not in self.stores}

    @property
    def lag_bytes(self) -> int:
        """Bytes of the copies that the policy asks for and that are missing."""
        return sum(one.size or 0 for one in self.missing)

    def sources(self, name: str) -> list[Location]:
        """Return the locations that list an object, the root first."""
        return [one for one in self.stores.values() if name in self.held[one.name]]

    def size(self, name: str) -> int:
        """Return the size of an object in bytes, from a location that lists it; 0 if none answers."""
        stat = first_good([one.store for one in self.sources(name)], lambda store: store.head(name))
        return stat.size if stat else 0

    def fill(self, names: Collection[str] | None = None) -> None:
        """List the objects of each location, or look up only `names`. A copy that does not answer is left out.

        Raises:
            ShardkitError: The root does not answer.
        """

        def ask(location: Location) -> set[str] | ShardkitError:
            try:
                if names is None:
                    return set(location.store.list_after(_OBJECTS))
                with ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="shardkit-head") as pool:
                    stats = zip(names, pool.map(location.store.head, names), strict=True)
                    return {name for name, stat in stats if stat is not None}
            except ShardkitError as error:
                return error

        with ThreadPoolExecutor(max(1, len(self.stores)), thread_name_prefix="shardkit-list") as pool:
            answers = dict(zip(self.stores, pool.map(ask, self.stores.values()), strict=True))
        for name, answer in answers.items():
            if not isinstance(answer, ShardkitError):
                self.held[name] = answer
            elif name == ROOT_NAME:
                raise answer
            else:
                self._leave_out(name, "unreachable", str(answer))

    def count_missing(self) -> None:
        """Update `missing` and the lag of each location from `held`."""
        self.missing = [one for one in self.missing if one.name not in self.held[one.location]]
        for name, found in self.all.items():
            sizes = [one.size or 0 for one in self.missing if one.location == name]
            found.lag, found.lag_bytes = len(sizes), sum(sizes)


def look(
    repository: Repository, table: LocationTable, needed: Mapping[str, NeededObject], *, listing: bool = True
) -> Holdings:
    """List all locations and find the copies that are missing.

    If a location does not answer, all copies that belong there count as missing.

    Args:
        repository: the root.
        table: locations and policy.
        needed: objects by name, from `find_needed`.
        listing: list the locations; False: look up each needed object by name.
    """
    found = Holdings(repository, table.locations)
    found.needed = needed
    found.fill(None if listing else list(needed))
    adopting = AdoptedStore(found.root)  # adopted files count as copies in the root
    for one in list_copies(needed):
        if one.name in found.held[one.location]:
            continue
        if one.location == ROOT_NAME and adopting.head(one.name) is not None:
            continue
        size = found.size(one.name) if one.size is None else one.size
        found.missing.append(one._replace(size=size, state="missing"))
    found.count_missing()
    return found
