"""A store that reads from several locations and writes to the first."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shardkit.arrays import Buffer
from shardkit.errors import (
    ConfigurationError,
    FormatError,
    IntegrityError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.reading.attestations import Attestation, Healer, ReadEvent, ReadEvents
from shardkit.reading.objects import ROOT_NAME, BlockRequest, Location
from shardkit.reading.read_path import ReadPath, ReadRequest, ReadSettings
from shardkit.stores.local import LocalStore, open_store
from shardkit.stores.store import (
    ObjectStat,
    Parse,
    Store,
    StoreAround,
    add_advice,
    check_name,
    parse_object_name,
)
from shardkit.stores.waiting import RetryPolicy

_Result = TypeVar("_Result")


class Rebuilds(Protocol):
    """Rebuilds bytes that no location has; returns None if that is not possible."""

    def __call__(self, request: BlockRequest, /) -> bytes | None: ...

    def whole(self, name: str, max_bytes: int) -> bytes | None: ...


class LocatedStore(StoreAround):
    """Store of one root, read over all its locations; immutable, implements `shardkit.stores.store.Store`.

    Objects are verified against the digest in their name, blocks against the digest in the request. The log, the
    identity and other documents have no digest in their names: `read_checked` validates their content, and asks another
    location only if the first has no good answer (counted as ``stale_log``). Listings and sizes come from the first
    location, or from another one if it fails. Can be pickled; statistics of locations are kept per process.

    Args:
        locations: The first is the root, with its adopted files (`AdoptedStore`). Except for healing, only the root is
            written to.
        settings: Settings of reads.
        parity: Rebuilds bytes that no location has.

    Raises:
        ConfigurationError: Two locations have the same name.
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
        """Return a view with the parity of one version; threads, counters and listeners are shared."""
        view = LocatedStore(self.locations, settings=self.settings, parity=parity)
        view._processes = self._processes
        return view

    @property
    def inner(self) -> Store:
        """Store of the root, the first location."""
        return self.locations[0].store

    @property
    def read_events(self) -> ReadEvents:
        """Counters and events of this process."""
        return self.path.read_events

    @property
    def healer(self) -> Healer:
        """Healer of bad copies in this process."""
        return self._process()[1]

    @property
    def path(self) -> ReadPath:
        """Read path of this process; tuning it does not affect other processes."""
        return self._process()[0]

    def _process(self) -> tuple[ReadPath, Healer]:
        """Return the read path and healer of this process; a forked child needs new ones, as threads are not copied."""
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
        """Set the listeners for events and attestations of this process; replaces earlier listeners."""
        self._processes.listeners = events, attest
        path, healer = self._process()
        path.read_events.sink, healer.attest = events, attest

    # Reading

    def read_block(self, request: BlockRequest) -> Buffer:
        """Return a block's stored bytes, verified by SHA-256; see `ReadPath.fetch`."""
        rebuild = None if self.parity is None else functools.partial(self.parity, request)
        return self.path.fetch(wanted_block(request)._replace(rebuild=rebuild))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Return a whole object; see `Store.get`. Objects named by digest are verified against it."""
        check_name(name)
        digest = _digest_in(name)
        if digest is None:
            return self._ask_any(name, lambda store: store.get(name, max_bytes=max_bytes))

        def check(data: Buffer) -> bool:
            return f"sha256:{hashlib.sha256(data).hexdigest()}" == digest

        def read(location: Location) -> Buffer:
            return location.store.get(name, max_bytes=max_bytes)

        rebuild = None if self.parity is None else functools.partial(self.parity.whole, name, max_bytes)
        return bytes(
            self.path.fetch(ReadRequest(name, min(max_bytes, 2**20), read, check, name, rebuild=rebuild))
        )

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return part of an object, not verified; see `Store.get_range`. Use `read_block` if a digest is known."""
        return self._ask_any(name, lambda store: store.get_range(name, offset, length))

    def head(self, name: str) -> ObjectStat | None:
        return self._ask_any(name, lambda store: store.head(name))

    def list_after(self, prefix: str, after: str = "") -> Iterator[str]:
        """Iterate over names in the root; see `Store.list_after`."""
        return iter(self._ask_any(prefix, lambda store: list(store.list_after(prefix, after))))

    def read_checked(
        self, name: str, parse: Parse[_Result], *, max_bytes: int, is_optional: bool = False
    ) -> _Result:
        """Read and parse a document; see `shardkit.stores.store.read_checked`.

        As for objects (SPEC.md, "The read path"), the root is asked again after a wrong answer, then the other
        locations. The error lists the problem of each location.
        """
        where = f"{name} in {self.url}"
        if is_optional:
            try:
                return parse(self.path.root.store.get(name, max_bytes=max_bytes), where)
            except (IntegrityError, FormatError, StoreError):
                pass  # the read path asks again, then other locations
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
            told = f"{refused[0]} (asked again, and everywhere: {error})"
            raise add_advice(type(refused[0])(told), self.path.root.store) from None
        if elsewhere:
            self.read_events.note("stale_log", elsewhere[-1], what=name)
        return parse(data, where)

    def _ask_any(self, name: str, ask: Callable[[Store], _Result]) -> _Result:
        """Ask the root; if it fails, ask the other locations."""
        try:
            return ask(self.inner)
        except StoreError:
            for location in self.locations[1:]:
                try:
                    answer = ask(location.store)
                except (StoreError, IntegrityError, LookupError):
                    continue
                self.read_events.note("stale_log", location.name, what=name)
                return answer
            raise


def wanted_block(request: BlockRequest) -> ReadRequest:
    """Return the read request for a block."""

    def read(location: Location) -> Buffer:
        return _read_range(location.store, request.name, request.offset, request.length)

    def check(data: Buffer) -> bool:
        return hashlib.sha256(data).digest() == request.sha256

    what = f"{request.name} bytes {request.offset} to {request.offset + request.length}"
    return ReadRequest(what, request.length, read, check, request.name)


class _Processes:
    """Read paths and healers of one root by process id, and the listeners for their events."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[ReadPath, Healer]] = {}
        self.listeners: tuple[Callable[[ReadEvent], None] | None, Callable[[Attestation], None] | None] = (
            None,
            None,
        )


def _asked_once(location: Location, settings: ReadSettings) -> Location:
    """Return the location with a client that does not retry, because the read path decides on retries."""
    if not hasattr(location.store, "with_retry"):
        return location
    retry = RetryPolicy(deadline_s=0, attempt_s=settings.attempt_s)
    return dataclasses.replace(location, store=location.store.with_retry(retry))


def _read_range(store: Store, name: str, offset: int, length: int) -> Buffer:
    """Return a range of an object; without a copy if the store has `read_range`."""
    read: Callable[[str, int, int], Buffer] = getattr(store, "read_range", store.get_range)
    return read(name, offset, length)


def _digest_in(name: str) -> str | None:
    """Return the digest in an object's name, or None for other names."""
    try:
        return parse_object_name(name)[0]
    except FormatError:
        return None


Locations = Mapping[str, str] | Sequence[Location]
"""Mapping of name → URL, nearest first, or fully specified locations."""


def locate(
    root: Store,
    others: Locations | None = None,
    *,
    settings: ReadSettings | None = None,
    heal: bool = False,
    name: str = ROOT_NAME,
) -> Store:
    """Return the store to read from: `root` itself if it is local and the only location; otherwise a `LocatedStore`.

    The root, whose location is called `name`, is asked first, unless another location has a rank below 0. With `heal`,
    bad copies that readers meet are replaced, also in the root.
    """
    if isinstance(root, LocalStore) and not others:
        return root
    first = Location(name=name, store=root, domain=root.url, heal=heal)
    return LocatedStore([first, *given_locations(others, heal)], settings=settings)


def given_locations(locations: Locations | None, heal: bool) -> list[Location]:
    """Return the given locations with opened stores; no request is sent yet."""
    if isinstance(locations, Mapping):
        return [_by_url(name, url, i + 1, heal) for i, (name, url) in enumerate(locations.items())]
    return list(locations or ())


def _by_url(name: str, url: str, rank: int, heal: bool) -> Location:
    if "@sha256:" in url:
        raise UsageError(
            f"location {name!r}: expected the root alone, without a version; give the version to open"
        )
    return Location(name=name, store=open_store(url, read_only=not heal), domain=url, rank=rank, heal=heal)
