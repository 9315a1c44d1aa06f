"""Several locations that look like one store: reads go where good bytes are, changes go to the first."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shardkit.errors import (
    ConfigurationError,
    FormatError,
    IntegrityError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.reading.attestations import Attestation, Healer, ReadEvent, ReadEvents
from shardkit.reading.objects import ROOT_NAME, BlockRequest, Location, block_name
from shardkit.reading.read_path import ReadPath, ReadRequest, ReadSettings
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import ObjectStat, Parse, Store, StoreAround, check_name, parse_object_name
from shardkit.stores.waiting import RetryPolicy

_Result = TypeVar("_Result")

Buffer = Any


class Rebuilds(Protocol):
    """Rebuilds what no location has; None where that is not possible."""

    def __call__(self, request: BlockRequest, /) -> bytes | None: ...

    def whole(self, name: str, max_bytes: int) -> bytes | None: ...


class LocatedStore(StoreAround):
    """A reader of one root over all its locations: an immutable value that implements `shardkit.stores.store.Store`.

    Objects are verified here against the digest in their name, blocks against the one in the request. The log, the
    identity and other documents have no digest in their name: `read_checked` checks them, and asks another location
    only where the first has no good answer, which is counted as ``stale_log``. Listings and sizes come from the first
    location, from another only while it does not answer. May be pickled; what is known of the locations is per process.

    Args:
        locations: The first is the root itself, with the adopted tars that it knows of (`AdoptedStore`): the only one
            that is written to, but for healing.
        settings: Of reads.
        parity: Asked before giving up.

    Raises:
        ConfigurationError: A name occurs twice.
    """

    def __init__(
        self,
        locations: Sequence[Location],
        *,
        settings: ReadSettings | None = None,
        parity: Rebuilds | None = None,
    ) -> None:
        seen: dict[str, Location] = {}
        for one in locations:
            if one.name in seen:
                raise ConfigurationError(
                    f"location {one.name!r} is named twice: {seen[one.name].store.url} and {one.store.url}; "
                    "give each a name of its own"
                )
            seen[one.name] = one
        self.locations, self.settings, self.parity = tuple(locations), settings or ReadSettings(), parity
        self._processes = _Processes()

    def __repr__(self) -> str:
        return f"LocatedStore({', '.join(f'{one.name}={one.store.url}' for one in self.locations)})"

    def __getstate__(self) -> dict[str, Any]:
        return {"locations": self.locations, "settings": self.settings, "parity": self.parity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _processes=_Processes())

    def with_parity(self, parity: Rebuilds) -> LocatedStore:
        """The same locations with the parity of one version; threads, counters and listeners are those of both."""
        view = LocatedStore(self.locations, settings=self.settings, parity=parity)
        view._processes = self._processes
        return view

    @property
    def inner(self) -> Store:
        """The root: the first location's store."""
        return self.locations[0].store

    @property
    def read_events(self) -> ReadEvents:
        """Counters and events of this process."""
        return self.path.read_events

    @property
    def healer(self) -> Healer:
        """What attests and heals bad copies in this process."""
        return self._process()[1]

    @property
    def path(self) -> ReadPath:
        """How this process reads; what is tuned there is not known to others."""
        return self._process()[0]

    def _process(self) -> tuple[ReadPath, Healer]:
        """What this process knows; a forked child starts afresh: its parent's threads do not exist there."""
        running = self._processes.running
        found = running.get(os.getpid())
        if found is None:
            events = ReadEvents()
            healer = Healer(self.locations, events)
            once = [_asked_once(location, self.settings) for location in self.locations]
            path = ReadPath(once, settings=self.settings, read_events=events, bad_copy=healer.report)
            events.sink, healer.attest = self._processes.listeners
            found = running.setdefault(os.getpid(), (path, healer))
        return found

    def listen(
        self,
        *,
        events: Callable[[ReadEvent], None] | None = None,
        attest: Callable[[Attestation], None] | None = None,
    ) -> None:
        """Hand events and attestations of this process to a run, until another listens."""
        self._processes.listeners = events, attest
        path, healer = self._process()
        path.read_events.sink, healer.attest = events, attest

    # Reading

    def read_block(self, request: BlockRequest) -> Buffer:
        """A block's stored bytes, verified by SHA-256; see `ReadPath.fetch` for what it goes through."""
        rebuild = None if self.parity is None else functools.partial(self.parity, request)
        return self.path.fetch(wanted_block(request)._replace(rebuild=rebuild))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object; see `Store.get`. An object is verified against its name."""
        check_name(name)
        digest = _digest_in(name)
        if digest is None:
            return self._unverified(name, lambda store: store.get(name, max_bytes=max_bytes))

        def check(data: Buffer) -> bool:
            return f"sha256:{hashlib.sha256(data).hexdigest()}" == digest

        def read(location: Location) -> Buffer:
            return location.store.get(name, max_bytes=max_bytes)

        rebuild = None if self.parity is None else functools.partial(self.parity.whole, name, max_bytes)
        return bytes(
            self.path.fetch(ReadRequest(name, min(max_bytes, 2**20), read, check, name, rebuild=rebuild))
        )

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Part of an object, not verified: use `read_block` where a digest is known; see `Store.get_range`."""
        return self._unverified(name, lambda store: store.get_range(name, offset, length))

    def head(self, name: str) -> ObjectStat | None:
        return self._unverified(name, lambda store: store.head(name))

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Names in the root; see `Store.list_after`."""
        return iter(self._unverified(prefix, lambda store: list(store.list_after(prefix, after))))

    def read_checked(
        self, name: str, parse: Parse[_Result], *, max_bytes: int, is_optional: bool = False
    ) -> _Result:
        """See `shardkit.stores.store.read_checked`; the same order of events as for objects (SPEC.md, "The read path").

        Asked once more of the same place, then of the other locations, then an error says what each of them has.
        """
        where = f"{name} in {self.url}"
        if is_optional:
            try:
                return parse(self.path.root.store.get(name, max_bytes=max_bytes), where)
            except (IntegrityError, FormatError, StoreError):
                pass  # the read path asks again, and elsewhere
        refused: list[ShardkitError] = []
        elsewhere: list[str] = []

        def read(location: Location) -> Buffer:
            if location is not self.path.root:
                elsewhere.append(location.name)
            return location.store.get(name, max_bytes=max_bytes)

        def check(data: Buffer) -> bool:
            try:
                parse(bytes(data), where)
            except (IntegrityError, FormatError) as error:
                refused.append(error)
                return False
            return True

        check_name(name)
        request = ReadRequest(name, min(max_bytes, 2**14), read, check, name, root_first=True)
        try:
            data = bytes(self.path.fetch(request))
        except IntegrityError as error:
            if not refused:
                raise
            told = type(refused[0])(f"{refused[0]} (asked again, and everywhere: {error})")
            raise told from None
        if elsewhere:
            self.read_events.note("stale_log", elsewhere[-1], what=name)
        return parse(data, where)

    def _unverified(self, name: str, ask: Callable[[Store], _Result]) -> _Result:
        """Ask the root; while it does not answer, the other locations with whole objects."""
        try:
            return ask(self.inner)
        except StoreError:
            for location in self.locations[1:]:
                if location.holds == "objects":
                    try:
                        answer = ask(location.store)
                    except (StoreError, IntegrityError, LookupError):
                        continue
                    self.read_events.note("stale_log", location.name, what=name)
                    return answer
            raise


def wanted_block(request: BlockRequest) -> ReadRequest:
    """A block as the read path asks for it: by range where there are whole objects, else by its digest."""

    def read(location: Location) -> Buffer:
        if location.holds == "blocks":
            return location.store.get(block_name(request.sha256), max_bytes=request.length)
        return _read_range(location.store, request.name, request.offset, request.length)

    def check(data: Buffer) -> bool:
        return hashlib.sha256(data).digest() == request.sha256

    what = f"{request.name} bytes {request.offset} to {request.offset + request.length}"
    return ReadRequest(what, request.length, read, check, request.name, whole=False)


class _Processes:
    """What each process knows of the locations of one root, and who listens."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[ReadPath, Healer]] = {}
        self.listeners: tuple[Callable[[ReadEvent], None] | None, Callable[[Attestation], None] | None] = (
            None,
            None,
        )


def _asked_once(location: Location, settings: ReadSettings) -> Location:
    """The location with a client that repeats nothing: when and where to ask again is decided by the read path."""
    if not hasattr(location.store, "with_retry"):
        return location
    retry = RetryPolicy(deadline_s=0, attempt_s=settings.attempt_s)
    return dataclasses.replace(location, store=location.store.with_retry(retry))


def _read_range(store: Store, name: str, offset: int, length: int) -> Buffer:
    """A range, without a copy where the store can do without."""
    read: Callable[[str, int, int], Buffer] = getattr(store, "read_range", store.get_range)
    return read(name, offset, length)


def _digest_in(name: str) -> str | None:
    """The digest that an object is called by, None for other names."""
    try:
        return parse_object_name(name)[0]
    except FormatError:
        return None


Locations = Mapping[str, str] | Sequence[Location]
"""Name → URL, nearest first; or locations with all their properties."""


def locate(
    root: Store,
    others: Locations | None = None,
    *,
    settings: ReadSettings | None = None,
    heal: bool = False,
    name: str = ROOT_NAME,
) -> Store:
    """The store to read from: the root as it is where it is local and alone, else all locations as one.

    Args:
        root: The store of the root; asked first, unless a location has a rank below 0.
        others: Further copies.
        settings: Of reads.
        heal: Put good bytes over bad copies that are met, in the root too.
        name: Of the location that `root` is.
    """
    if isinstance(root, LocalStore) and not others:
        return root
    first = Location(name=name, store=root, domain=root.url, heal=heal)
    return LocatedStore([first, *given_locations(others, heal)], settings=settings)


def given_locations(locations: Locations | None, heal: bool) -> list[Location]:
    """What a caller gave, each opened; nothing is asked of them yet."""
    if isinstance(locations, Mapping):
        return [_by_url(name, url, i + 1, heal) for i, (name, url) in enumerate(locations.items())]
    return list(locations or ())


def _by_url(name: str, url: str, rank: int, heal: bool) -> Location:
    if "@sha256:" in url:
        raise UsageError(
            f"location {name!r}: expected the root alone, without a version; give the version to open"
        )
    return Location(name=name, store=open_store(url, read_only=not heal), domain=url, rank=rank, heal=heal)
