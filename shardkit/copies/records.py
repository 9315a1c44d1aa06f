"""What checks and repairs of copies find; its records, append-only in ``attest/<location>/`` of a root (SPEC.md)."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from shardkit.errors import FormatError, IntegrityError, NotFoundError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest
from shardkit.manifest.json_fields import TIME, Fields, read_document, utc_text
from shardkit.reading.healing import LEVEL, MAX_ATTESTATION_BYTES, RESULT, WORD, Attestation
from shardkit.stores.store import EXTENSIONS, Store, object_name, parse_object_name

_FORMAT: Final = "shardkit-attestations/1"
_KEYS: Final = ("location", "level", "by", "results")
_MAX_RESULTS: Final = 4_096
_MAX_BYTES: Final = 2**20
_FLUSH_S: Final = 10.0
_FOLDER: Final = "attest/"

_WEIGHT: Final = {"good": 0, "wrong": 1, "missing": 1, "healed": 2}
"""Of two results of the same second the heavier one holds: a read that met bad bytes, then who healed them."""


class BadCopy(NamedTuple):
    """A copy that is to be repaired."""

    location: str
    name: str
    was: str
    """"wrong" or "missing"."""


class Healed(NamedTuple):
    """A copy that is good again."""

    location: str
    name: str
    was: str
    source: str
    """Name of the location with the good copy, or "parity"."""
    num_bytes: int


class Lost(NamedTuple):
    """An object of which no good bytes are left anywhere."""

    name: str
    rows: int
    """Samples lost with it; 0 for what is no shard."""
    why: str


class Unchecked(NamedTuple):
    """A copy that could not be checked, or not be written."""

    location: str
    name: str
    why: str


class Look(NamedTuple):
    """The latest that is known of a copy."""

    time: str
    """UTC, ``2026-11-20T19:00:00Z``."""
    result: str
    """"good", "wrong", "missing" or "healed"."""
    level: str
    by: str

    @property
    def is_bad(self) -> bool:
        """Whether the copy was wrong or missing when it was last checked."""
        return self.result in ("wrong", "missing")


class Records:
    """Collects results and appends them to a root, every few seconds and at the end.

    A killed process loses what it found since it last wrote: it looks there again.

    Args:
        store: of the root; None: nothing is kept.
        by: what looks: "scrub", "repair".
    """

    def __init__(self, store: Store | None, by: str) -> None:
        self._store, self._by = store, by
        self._waiting: dict[tuple[str, str], list[list[str]]] = {}
        self._written_at = time.monotonic()

    def add(self, location: str, name: str, result: str, level: str) -> None:
        """Note what was found of an object just now.

        Raises:
            StoreError: the root cannot be written.
        """
        if self._store is None:
            return
        digest, extension = parse_object_name(name)
        waiting = self._waiting.setdefault((location, level), [])
        waiting.append([digest, extension, result, utc_text()])
        if len(waiting) >= _MAX_RESULTS or time.monotonic() - self._written_at > _FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting, durably.

        Raises:
            StoreError: the root cannot be written.
        """
        for (location, level), results in sorted(self._waiting.items()):
            document = {
                "format": _FORMAT,
                "location": location,
                "level": level,
                "by": self._by,
                "results": results,
            }
            assert self._store is not None
            self._store.put_new(
                f"attest/{location}/{utc_text()[:10]}/{uuid.uuid4().hex}.json", dumps(document)
            )
        self._waiting.clear()
        self._written_at = time.monotonic()


def read_looks(store: Store) -> dict[str, dict[str, Look]]:
    """Location → object name → the latest look, from all documents of a root or run directory.

    Documents that are damaged, or of something else, are passed over: they are soft state, and nothing is believed
    because of them; a copy that one calls bad is checked again.

    Raises:
        StoreError: the store does not answer.
    """
    return _latest(_looks(store))


def merge_looks(looks: Iterable[Mapping[str, Mapping[str, Look]]]) -> dict[str, dict[str, Look]]:
    """The latest of several."""
    return _latest(
        (location, name, look)
        for one in looks
        for location, names in one.items()
        for name, look in names.items()
    )


def _looks(store: Store) -> Iterator[tuple[str, str, Look]]:
    for document in store.list_after(_FOLDER):
        if document.endswith(".json"):
            with contextlib.suppress(FormatError, IntegrityError, NotFoundError):
                yield from _parse(store.get(document, max_bytes=_MAX_BYTES), document)


def _latest(looks: Iterable[tuple[str, str, Look]]) -> dict[str, dict[str, Look]]:
    found: dict[str, dict[str, Look]] = {}
    for location, name, look in looks:
        held = found.setdefault(location, {})
        if name not in held or _order(look) > _order(held[name]):
            held[name] = look
    return found


def _order(look: Look) -> tuple[str, int]:
    return look.time, _WEIGHT[look.result]


def _parse(data: bytes, where: str) -> Iterator[tuple[str, str, Look]]:
    if len(data) <= MAX_ATTESTATION_BYTES:
        with contextlib.suppress(FormatError):
            one = Attestation.from_bytes(data, where)
            if one.extension in EXTENSIONS:
                look = Look(one.time, one.result, one.level, one.by)
                yield one.location, object_name(one.digest, one.extension), look
            return
    fields = read_document(data, where, _FORMAT, _KEYS, _MAX_BYTES)
    location = fields.text("location", pattern=WORD)
    level, by = fields.text("level", pattern=LEVEL), fields.text("by", pattern=WORD)
    for item in fields.items("results", maximum=_MAX_RESULTS):
        digest, extension, result, when = _row(fields, item)
        yield location, object_name(digest, extension), Look(when, result, level, by)


def _row(fields: Fields, item: object) -> tuple[str, str, str, str]:
    match item:
        case [str(digest), str(extension), str(result), str(when)]:
            if extension in EXTENSIONS and RESULT.fullmatch(result) and TIME.fullmatch(when):
                parse_digest(digest)
                return digest, extension, result, when
    return fields.refuse("has a result that is no [digest, extension, result, time]")
