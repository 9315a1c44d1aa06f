"""The locations of a root: their table and policy, the marks of copies, and how a root that lost its log is recognised.

Tables are ``locations/<20 digits>.json``, numbered from 1 without gaps, put if absent and never changed. The highest
number is valid. A table is not part of the log because it says nothing about the data. It never has a credential.
`shardkit.copies` decides which location an object belongs in (SPEC.md, "Locations and policy").
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from shardkit.credentials import refuse_credentials
from shardkit.documents import Document, decode, encode, sha256_digest, unseal, utc_text
from shardkit.errors import (
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    MissingDependency,
    NotFoundError,
    ShardkitError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.ranges import Range
from shardkit.reading.located_store import Locations, given_locations, locate
from shardkit.reading.objects import LOCATION_NAME, ROOT_NAME, Location, check_location_name
from shardkit.reading.read_path import ReadSettings
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG,
    MAX_IDENTITY_BYTES,
    Identity,
    NumberedDocument,
    Row,
    identity_in,
)
from shardkit.repository.policy import Policy
from shardkit.stores.local import check_vacant, open_store
from shardkit.stores.remote.addresses import parse_address
from shardkit.stores.remote.clients import endpoint_of
from shardkit.stores.store import Store, find_checked, root_store, scheme_of

_MAX_BYTES: Final = 2**20
_MOST: Final = 10**6
_MAX_LOCATIONS: Final = 64
_MAX_SIBLINGS: Final = 10_000
_DOMAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/ -]{0,199}")
_MAX_COPY_BYTES: Final = 16 * 2**10

COPY_NAME: Final = "shardkit-copy.json"
"""Mark of a copy, with its name. It prevents commits to the copy, and tells a copy from an empty mount point."""


@dataclass(frozen=True, slots=True)
class LocationRecord:
    """A location in a table."""

    name: str  # short unique name, used in attestations, events and tables
    url: str  # URL or absolute path of the copy; for ``root``, the root's URL when the table was written
    domain: str  # failure domain: locations of one domain fail together. The default is the location's name.
    rank: int = 1  # order of reads: the location with the lowest rank is read first
    # share of the objects, relative to the weights of other locations. A location of weight 0 gets no
    # objects, and its objects are moved to other locations.
    weight: int = 100

    def __post_init__(self) -> None:
        check_location_name(self.name)
        if _DOMAIN.fullmatch(self.domain) is None:
            raise ConfigurationError(
                f"location {self.name!r}: failure domain {self.domain[:60]!r}, expected at most 200 of "
                "[A-Za-z0-9._:/ -]"
            )
        Range(-1_000, 1_000).check(f"location {self.name!r}: rank", self.rank)
        Range(0, 10**6).check(f"location {self.name!r}: weight", self.weight)
        _check_url(self.name, self.url)

    @classmethod
    def parse(cls, text: str) -> LocationRecord:
        """Parse ``NAME=URL[,domain=…][,rank=…][,weight=…]``."""
        refuse_credentials(text, "--location")
        name, equals, rest = text.partition("=")
        url, *options = rest.split(",")
        if not equals or not url:
            raise ConfigurationError(
                f"--location {text[:200]!r}: expected NAME=URL, such as mirror=s3://bucket/cats,domain=aws"
            )
        given: dict[str, Any] = {}
        for option in options:
            key, sign, value = option.partition("=")
            if key not in ("domain", "rank", "weight") or not sign or key in given:
                raise ConfigurationError(
                    f"--location {name}: {option[:200]!r}, expected domain=…, rank=… or weight=…, each once"
                )
            given[key] = value if key == "domain" else _number(value, f"--location {name}: {key}")
        return cls(name, absolute_url(url), **{"domain": name, **given})


class LocationTable(NumberedDocument, frozen=True, kw_only=True, tag="shardkit-location-table/1"):
    """Locations and policy of a root. The `previous` of the first table is empty."""

    policy: Policy  # number of copies, parity and scrubs
    locations: tuple[LocationRecord, ...]  # all locations; the first is the root

    def __post_init__(self) -> None:
        names, urls = [one.name for one in self.locations], [one.url for one in self.locations]
        if not names or names[0] != ROOT_NAME:
            raise ConfigurationError(f"locations {names[:5]}: expected {ROOT_NAME!r} first")
        twice = [one for values in (names, urls) for one in sorted(set(values)) if values.count(one) > 1]
        if twice:
            raise ConfigurationError(
                f"location {twice[0]!r} is named twice; give each location one name and one place"
            )
        if len(names) > _MAX_LOCATIONS:
            raise ConfigurationError(f"{len(names)} locations, expected at most {_MAX_LOCATIONS}")
        domains = {one.domain for one in self.locations if one.weight or one.name == ROOT_NAME}
        if self.policy.most_copies > len(domains):
            raise ConfigurationError(
                f"{self.policy.most_copies} copies need as many failure domains, and there are {len(domains)} "
                f"({', '.join(sorted(domains))}); add locations: --location NAME=URL,domain=NAME"
            )

    @property
    def root(self) -> LocationRecord:
        """Location of the root, which gets the commits."""
        return self.locations[0]

    @property
    def others(self) -> tuple[LocationRecord, ...]:
        return self.locations[1:]

    def find(self, name: str) -> LocationRecord | None:
        return next((one for one in self.locations if one.name == name), None)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> LocationTable:
        """Parse and validate a table."""
        return unseal(cls, data, where, max_bytes=_MAX_BYTES)


TABLES: Final = Row("locations/", LocationTable.from_bytes, _MAX_BYTES)
"""Location tables. The folder also has the locations of parts and adopted files."""

SPARES: Final = Row("locations/spare/", LocationTable.from_bytes, _MAX_BYTES)
"""Second copy of each table, in the root only: without a table, the root's copies cannot be found."""


def read_table(store: Store, repository_id: str | None) -> LocationTable | None:
    """Return the newest table, None if the root has no table: then it is the only location.

    The highest number is found by looking up names, not by listing: the folder may have many other documents, and a
    root without a table costs one request.
    """
    number = _newest(store)
    return None if number == 0 else _read(store, number, repository_id)


def read_tables(store: Store, repository_id: str) -> list[LocationTable]:
    """Return all tables, newest first, with the chain verified."""
    found: list[LocationTable] = []
    for number in range(_newest(store), 0, -1):
        table = _read(store, number, repository_id)
        if found and found[-1].previous != sha256_digest(table.to_bytes()):
            raise IntegrityError(
                f"{TABLES.name(number)} in {store.url} is not the one that the next one follows; restore it from a "
                "copy of the root"
            )
        found.append(table)
    return found


def commit_table(
    store: Store,
    repository_id: str,
    base: LocationTable | None,
    policy: Policy,
    locations: Sequence[LocationRecord],
    *,
    message: str,
    author: str = "",
) -> LocationTable:
    """Commit a table with `policy` and `locations` after `base`; return `base` if they are equal.

    Raises:
        CommitConflict: Another process committed a table after `base`.
    """
    if base is not None and base.policy == policy and base.locations == tuple(locations):
        return base
    table = msgspec.structs.replace(
        draft_table(repository_id, base, policy, locations),
        previous=sha256_digest(base.to_bytes()) if base else "",
        txn=uuid.uuid4().hex,
        time=utc_text(),
        author=author,
        message=message,
    )
    LocationTable.from_bytes(table.to_bytes(), "these locations")  # do not write tables that readers reject
    what, then = f"locations of {store.url}", "run the same command again"
    if not TABLES.put(store, table, what=what, then=then):
        raise CommitConflict(
            f"locations of {store.url} were changed by somebody else meanwhile; look at them (shardkit place "
            f"{shell_word(store.url)}), then run the same command again"
        )
    # The table is committed. Repair and replicate put a missing spare.
    with contextlib.suppress(ShardkitError):
        store.put_new(SPARES.name(table.n), table.to_bytes())
    return table


def first_root(store: Store) -> LocationRecord:
    """Return the record of a root that has no table yet."""
    return LocationRecord(name=ROOT_NAME, url=absolute_url(store.url), domain=ROOT_NAME, rank=0)


def draft_table(
    repository_id: str, base: LocationTable | None, policy: Policy, locations: Sequence[LocationRecord]
) -> LocationTable:
    """Return a table after `base` for computing placements; it is not meant to be written."""
    return LocationTable(
        n=base.n + 1 if base else 1,
        repository=repository_id,
        previous="",
        txn="0" * 32,
        time="1970-01-01T00:00:00Z",
        author="",
        message="",
        policy=policy,
        locations=tuple(locations),
    )


def _newest(store: Store) -> int:
    """Return the number of the newest table, 0 if there is none, by galloping and binary search."""
    if store.head(TABLES.name(1)) is None:
        return 0
    low, step = 1, 1
    while low + step <= _MOST and store.head(TABLES.name(low + step)) is not None:
        low += step
        step *= 2
    while step > 1:
        step //= 2
        if store.head(TABLES.name(low + step)) is not None:
            low += step
    return low


def _read(store: Store, number: int, repository_id: str | None) -> LocationTable:
    try:
        return TABLES.read(store, number, repository_id)[0]
    except (IntegrityError, FormatError):
        with contextlib.suppress(ShardkitError):
            return SPARES.read(store, number, repository_id)[0]
        raise


def absolute_url(url: str) -> str:
    """Return a URL for a table: a local path becomes absolute."""
    return url if scheme_of(url) else os.path.abspath(url)


def local_path(url: str) -> str | None:
    """Return the path of a local folder, None for any other URL."""
    scheme = scheme_of(url)
    if scheme == "file":
        return "/" + unquote(url.partition("://")[2].partition("/")[2])
    return os.path.abspath(url) if scheme is None else None


def _check_url(name: str, url: str) -> None:
    refuse_credentials(url, f"location {name!r}")
    scheme = scheme_of(url)
    if scheme is None and not os.path.isabs(url):
        raise ConfigurationError(f"location {name!r} at {url[:200]!r}: expected a URL or an absolute path")
    if scheme in (None, "file"):
        return
    try:
        parse_address(url)
    except UsageError as error:
        raise UsageError(f"location {name!r}: {error}") from None
    if scheme in ("http", "https"):
        raise ConfigurationError(
            f"location {name!r}: a cache that is served holds blocks, not objects; give it to the reader "
            "(locations=), not to the root"
        )


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{what} {text[:40]!r}: expected a whole number") from None


class CopyMark(Document, frozen=True, tag="shardkit-copy/1"):
    """Content of ``shardkit-copy.json``: name of the location and id of the repository."""

    location: Annotated[str, Meta(pattern=rf"\A({LOCATION_NAME.pattern})\Z")]
    repository: Annotated[str, Meta(max_length=36)]

    def to_bytes(self) -> bytes:
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> CopyMark:
        return decode(cls, data, where, max_bytes=_MAX_COPY_BYTES)


def location_of(record: LocationRecord, *, heal: bool = False, writable: bool = False) -> Location:
    """Open a recorded location without sending a request to it."""
    store = open_store(record.url, read_only=not (heal or writable))
    return Location(name=record.name, store=store, domain=record.domain, rank=record.rank, heal=heal)


def read_mark(store: Store) -> CopyMark | None:
    """Return the mark of a copy, None if the store is not a copy."""
    return find_checked(store, COPY_NAME, CopyMark.from_bytes, max_bytes=_MAX_COPY_BYTES)


def own_name(store: Store) -> str:
    """Return the name of a store's location: the name in its mark, or ``root`` if it has no readable mark."""
    with contextlib.suppress(ShardkitError):
        mark = read_mark(store)
        return mark.location if mark else ROOT_NAME
    return ROOT_NAME


def is_prepared(store: Store, name: str, repository_id: str) -> bool:
    """Return True if a store is the expected copy, False if it has no mark, such as an empty mount point.

    Raises:
        IntegrityError: The store is another copy.
    """
    mark = read_mark(store)
    if mark is None:
        return False
    if mark != CopyMark(name, repository_id):
        raise IntegrityError(
            f"{store.url} is the copy {mark.location!r} of repository {mark.repository}, expected {name!r} of "
            f"{repository_id}; give this location another place"
        )
    return True


def prepare_copy(root: Store, copy: Store, name: str, repository_id: str) -> None:
    """Make a store a copy of a root by writing the mark of the location.

    Raises:
        UsageError: The store has another repository.
    """
    identity = root.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    try:
        found: bytes | None = copy.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
    except NotFoundError:
        found = None
    if found is not None and found != identity:
        raise UsageError(f"location {name!r}: {copy.url} holds another dataset; give it an empty place")
    if found is None:
        check_vacant(copy.url, "copy")
    mark = CopyMark(name, repository_id).to_bytes()
    if not copy.put_new(COPY_NAME, mark):
        is_prepared(copy, name, repository_id)
    if root.head(COPY_NAME) is not None:
        copy.delete(COPY_NAME)
        raise UsageError(f"location {name!r}: {copy.url} is the root itself; a copy needs a place of its own")
    if found is None:
        copy.put_new(IDENTITY_NAME, identity)


# ---- Roots that have lost their identity, their log or all of their objects, and reads from all locations


def _others(table: LocationTable | None, own: str, *, heal: bool = False) -> list[Location]:
    """Open the locations of a table other than `own`, without those whose client is not installed."""
    found: list[Location] = []
    for record in table.locations if table else ():
        if record.name != own:
            with contextlib.suppress(MissingDependency):
                found.append(location_of(record, heal=heal))
    return found


def identity_of_copies(store: Store, error: NotFoundError | IntegrityError, *, alone: bool) -> Identity:
    """Return the identity of a root whose own cannot be read because of `error`, from one of its copies.

    Raises:
        IntegrityError: The identity is damaged in all locations, or the root is lost.
        NotFoundError: There is no dataset.
    """
    with contextlib.suppress(ShardkitError):
        table = None if alone else read_table(store, None)
        for location in _others(table, ROOT_NAME):
            with contextlib.suppress(ShardkitError):
                found = identity_in(location.store)
                if table is not None and found.id == table.repository:
                    return found
    if isinstance(error, IntegrityError):
        raise error
    check_root_is_not_lost(store)
    scheme = scheme_of(store.url)
    endpoint = endpoint_of(scheme) if scheme else ""
    raise NotFoundError(
        f"no dataset at {store.url}{endpoint}: expected {IDENTITY_NAME} in it; check the path, or run: "
        f"shardkit build; if it was lost and has a copy, run: shardkit repair "
        f"{shell_word(store.url)} --location NAME=COPY"
    ) from None


def find_sibling_copies(root: Store) -> list[LocationRecord]:
    """Return the copies, in folders next to `root`, whose newest location table names it as their root.

    A root that lost everything has no table of its copies, but each copy has a table that names the root.
    """
    found: list[LocationRecord] = []
    if scheme_of(root.url):
        return found
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(root.url)) as siblings:
        for sibling in itertools.islice(siblings, _MAX_SIBLINGS):
            if sibling.path == root.url or not os.path.isfile(os.path.join(sibling.path, COPY_NAME)):
                continue
            with contextlib.suppress(ShardkitError):
                copy = open_store(sibling.path, read_only=True)
                mark = read_mark(copy)
                table = read_table(copy, mark.repository) if mark else None
                record = table.find(mark.location) if mark and table else None
                if table is not None and record is not None and table.root.url == root.url:
                    found.append(dataclasses.replace(record, url=sibling.path))
    return sorted(found, key=lambda one: one.name)


def check_root_is_not_lost(root: Store) -> None:
    """Raise IntegrityError if a root without an identity has copies next to it: it held their dataset."""
    copies = find_sibling_copies(root)
    if copies:
        raise IntegrityError(
            f"{root.url} has no {IDENTITY_NAME}, and {copies[0].url} is a copy of the dataset that was there: the root "
            f"is lost; run: shardkit repair {shell_word(root.url)}"
        )


def check_log_is_not_lost(root: Store, repository_id: str) -> None:
    """Raise IntegrityError if a root has no log and one of its copies has one."""
    others: list[Location] = []
    with contextlib.suppress(ShardkitError):
        others = _others(read_table(root, repository_id), own_name(root))
    others = others or [location_of(record) for record in find_sibling_copies(root)]
    for location in others:
        names: list[str] = []
        with contextlib.suppress(ShardkitError):
            names = list(location.store.list_after(LOG.prefix))
        if names:
            raise IntegrityError(
                f"the log of {root.url} is lost; {location.name} at {location.store.url} has {len(names)} entries of "
                f"it; run: shardkit repair {shell_word(root.url)}"
            )


def over_all(
    root: Store,
    repository_id: str,
    given: Locations | None,
    settings: ReadSettings | None,
    *,
    heal: bool,
    alone: bool,
) -> Store:
    """Return a store that reads from the given locations and, unless `alone`, the locations of the root's table.

    The table is not needed to read the data: if it is damaged, the reader only lacks the other copies.
    """
    store, recorded, name = root_store(root), list[Location](), ROOT_NAME
    with contextlib.suppress(ShardkitError):
        table = None if alone else read_table(root, repository_id)
        if table is not None:
            mark = read_mark(root)
            name = mark.location if mark else ROOT_NAME
            recorded = _others(table, name, heal=heal)
    others = given_locations(given, heal)
    taken = {name, store.url}.union(*((one.name, one.store.url) for one in others))
    others += [one for one in recorded if one.name not in taken and one.store.url not in taken]
    return locate(store, others, settings=settings, heal=heal, name=name)
