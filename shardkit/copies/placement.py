"""Which objects the versions of a root need, in which locations each belongs, and what those hold of them.

The places are drawn by weighted rendezvous hashing over SHA-256, in integers; pure. Every location draws a number for
an object from (name of the location, digest of the object); the object goes to those that drew best, one per failure
domain. So nothing has to be looked up or kept, and a location that comes or goes moves only what it draws or drew best
(Thaler and Ravishankar, 1998). With weights a draw u in (0, 1] counts as -log(u) / weight, smallest first: the
exponential race, in which a location wins in proportion to its weight.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardkit.errors import ConfigurationError, IntegrityError, ShardkitError
from shardkit.formats.canonical_json import parse_digest
from shardkit.manifest import Manifest
from shardkit.reading.adopted import AdoptedStore
from shardkit.reading.inventory import Inventory, walk_versions
from shardkit.reading.objects import ROOT_NAME, Location
from shardkit.reading.parity.sets import parity_names
from shardkit.repository.location_table import (
    LocationRecord,
    LocationTable,
    first_root,
    is_prepared,
    location_of,
    read_table,
)
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.stores.store import Store, parse_object_name, root_store

LARGE: Final = ("tar", "arrow", "parity")
"""Extensions of objects that are not metadata."""

ALWAYS_EVERYWHERE: Final = frozenset(
    {"manifest", "page", "index", "selection", "sources", "about", "lookup", "cost"}
)
"""Extensions of metadata: small, and without it no shard can be read or verified, so each location has all of it."""

_FRACTION_BITS: Final = 32
_SCALE_BITS: Final = 64


@dataclass(frozen=True, slots=True)
class Needed:
    """An object that a version needs.

    Attributes:
        name: of the object in a root.
        size: bytes; None where no page says.
        where: names of the locations that it belongs in, the root first.
        is_critical: whether a commit in hybrid mode waits for its copies: metadata, and shards with critical strata.
    """

    name: str
    size: int | None
    where: tuple[str, ...]
    is_critical: bool


def live_versions(repository: Repository) -> list[str]:
    """Manifest ids that a ref or a tag names, each once, and those of their parts that lie in this root."""
    head = repository.head()
    found = dict.fromkeys([*head.refs.values(), *head.tags.values()]) if head else {}
    return list(found)


def find_needed(
    repository: Repository,
    table: LocationTable,
    versions: Iterable[str],
    *,
    stores: Sequence[Store] | None = None,
) -> dict[str, Needed]:
    """Name → what is needed, of some versions, their parts in this root, and their parity."""
    found: dict[str, Needed] = {}
    for inventory in walk_versions(repository.store, versions):
        parity = parity_names(repository.store, inventory, stores=stores)
        add_needed(found, needed_of(table, inventory, parity))
    return found


def add_needed(found: dict[str, Needed], more: Iterable[Needed]) -> None:
    """Note what another version needs; one version may know a shard as critical, another not."""
    for one in more:
        if one.name not in found or len(found[one.name].where) < len(one.where):
            found[one.name] = one


def needed_of(table: LocationTable, inventory: Inventory, parity: Collection[str]) -> Iterator[Needed]:
    """What one version needs, `parity_names` included."""
    strata = _strata_of_shards(inventory) if table.policy.critical else {}
    sizes = dict(inventory.names())
    sizes |= dict.fromkeys(sorted(set(parity) - sizes.keys()))
    for name, size in sizes.items():
        if name.startswith("objects/"):
            digest, extension = parse_object_name(name)
            held = strata.get(digest, frozenset())
            where = placement(table.policy, table.locations, digest, extension, held)
            yield Needed(name, size, where, extension not in LARGE or table.policy.is_critical(held))


def unknown_strata(repository: Repository, names: Iterable[str]) -> dict[str, str]:
    """Names of critical strata that no version, nor part of one in this root, has → which there are, for a message.

    Empty while there is no version.
    """
    wanted, versions = list(names), live_versions(repository)
    if not wanted or not versions:
        return {}
    known: set[str] = set()
    for inventory in walk_versions(repository.store, versions):
        known.update(*_names_of_strata(inventory.manifest))
    return {name: _there_are(name, known) for name in wanted if name not in known}


def _there_are(name: str, known: Iterable[str]) -> str:
    """For a message: the stratum that was meant, or some of those that there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"there are {', '.join(map(repr, names[:10]))}{more}"


def _strata_of_shards(inventory: Inventory) -> dict[str, frozenset[str]]:
    """Digest of each shard → names of the strata of which it holds rows."""
    found: dict[str, frozenset[str]] = {}
    names = _names_of_strata(inventory.manifest)
    for table in inventory.tables:
        borders = table.segment_starts
        for shard in range(len(table)):
            numbers = np.unique(table.segment_stratum[borders[shard] : borders[shard + 1]])
            found[table.digest_text(shard)] = frozenset().union(*(names[i] for i in numbers.tolist()))
    return found


def _names_of_strata(manifest: Manifest) -> list[frozenset[str]]:
    """What each stratum may be called: by its name, and by that of its class; the pool by all that are in it."""
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
    """Names of the locations that an object belongs in, the root first, the others by how well they drew.

    Returns:
        As many as the policy asks for, in distinct failure domains; fewer where there are fewer domains. All of them
        for metadata.
    """
    if not locations:
        raise ConfigurationError("no location to place objects in; name the root first")
    root, others = locations[0], [one for one in locations[1:] if one.weight]
    if extension in ALWAYS_EVERYWHERE:
        return (root.name, *(one.name for one in others))
    copies = policy.copies_of(strata)
    return (root.name, *_drawn(digest, others, copies - 1, {root.domain}))


def _drawn(digest: str, locations: Iterable[LocationRecord], count: int, taken: set[str]) -> list[str]:
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
    """-log2(u) / weight in fixed point, smallest best; the whole hash settles what rounding made equal."""
    hashed = hashlib.sha256(
        b"shardkit-placement/1\0" + f"{location.name}\0{parse_digest(digest)}".encode()
    ).digest()
    u = int.from_bytes(hashed[:8], "big") + 1  # 1 … 2**64
    return (_minus_log2(u) << _SCALE_BITS) // location.weight, hashed


def _minus_log2(u: int) -> int:
    """-log2(u / 2**64) for 1 ≤ u ≤ 2**64, rounded up to 32 fractional bits: one bit per squaring of the mantissa."""
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


@dataclass(frozen=True, slots=True)
class Missing:
    """A copy that belongs in a location and is not there."""

    needed: Needed
    location: str
    size: int


@dataclass(slots=True)
class Holding:
    """One location: how it answers, what a call did there, and what it lacks.

    Attributes:
        name: of the location.
        url: where it is.
        domain: its failure domain.
        state: "ok"; "unreachable"; "unprepared": empty, or not mounted; "foreign": it is something else; "failed"
            where copies could not be put; "new" where nothing was done yet.
        problem: what it said, or "".
        copied: objects that this call copied to it. copied_bytes: their bytes.
        commits: log entries that this call copied to it.
        lag: objects that belong there and are not. lag_bytes: their bytes.
    """

    name: str
    url: str
    domain: str
    state: str = "ok"
    problem: str = ""
    copied: int = 0
    copied_bytes: int = 0
    commits: int = 0
    lag: int = 0
    lag_bytes: int = 0


class Holdings:
    """Locations, opened for writing; each has been seen to be what it should be, and nothing is listed yet.

    Args:
        repository: the root, opened in any way.
        records: by default those of the root's table, or the root alone where it has none.

    Attributes:
        root: its store.
        all: name → what is known of it.
        stores: name → location, of those that can be used: the others do not answer, or are not what they should be.
        held: name → names of the objects that it lists.
        missing: copies that are not there, of all locations, also of those that do not answer.
    """

    def __init__(self, repository: Repository, records: Sequence[LocationRecord] | None = None) -> None:
        self.root = root_store(repository.store)
        if records is None:
            table = read_table(self.root, repository.id)
            records = table.locations if table else (first_root(self.root),)
        self.all = {one.name: Holding(one.name, one.url, one.domain) for one in records}
        self.stores: dict[str, Location] = {}
        self.held: dict[str, set[str]] = {name: set() for name in self.all}
        self.missing: list[Missing] = []
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
            refill = f"shardkit place {repository.url} --refill {name}"
            why = f"{record.url} is empty, or its disk is not mounted; to fill it anew: {refill}"
            self._leave_out(name, "unprepared", why)
        except IntegrityError as error:
            self._leave_out(name, "foreign", str(error))
        except ShardkitError as error:
            self._leave_out(name, "unreachable", str(error))

    def _leave_out(self, name: str, state: str, problem: str) -> None:
        """Neither read nor write there any more."""
        self.stores.pop(name, None)
        self.all[name].state, self.all[name].problem = state, problem

    @property
    def problems(self) -> dict[str, str]:
        """Name → why, of those that cannot be used."""
        return {name: one.problem for name, one in self.all.items() if name not in self.stores}

    @property
    def lag_bytes(self) -> int:
        """Bytes of copies that are not there: what is below the policy."""
        return sum(one.size for one in self.missing)

    def sources(self, name: str) -> list[Location]:
        """Who lists an object, the root first."""
        return [one for one in self.stores.values() if name in self.held[one.name]]

    def fill(self, names: Collection[str] | None = None) -> None:
        """Find out what each location holds; one that does not answer is left out."""

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
        """What is missing now; and so what each location lacks."""
        self.missing = [one for one in self.missing if one.needed.name not in self.held[one.location]]
        for name, found in self.all.items():
            sizes = [one.size for one in self.missing if one.location == name]
            found.lag, found.lag_bytes = len(sizes), sum(sizes)


def look(
    repository: Repository, table: LocationTable, needed: Mapping[str, Needed], *, listing: bool = True
) -> Holdings:
    """List all locations and compare: the one place that tells how far copies are below the policy.

    What a location does not answer counts as missing there: a policy is met by copies that are known of.
    """
    found = Holdings(repository, table.locations)
    found.fill(None if listing else list(needed))
    adopting = AdoptedStore(found.root)  # adopted tars lie elsewhere and count as there
    for one in needed.values():
        lacking = [name for name in one.where if one.name not in found.held[name]]
        if ROOT_NAME in lacking and adopting.head(one.name) is not None:
            lacking.remove(ROOT_NAME)
        if lacking:
            stat = None if one.size is not None else repository.store.head(one.name)
            size = one.size if one.size is not None else stat.size if stat else 0
            found.missing += [Missing(one, name, size) for name in lacking]
    found.count_missing()
    return found
