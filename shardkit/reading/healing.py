"""Bad copies that readers met: attested, and healed in the background where that is allowed.

An attestation says "this digest was good, bad or missing here then": soft state, append-only, in
``attest/<location>/<day>/<uuid>.json`` of a root, or of a run directory where the reader has no right to write the
root. Scrubs write the good ones, readers the bad ones; `repair --from-run` acts on them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import re
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Final

from shardkit.errors import FormatError, ShardkitError
from shardkit.formats.canonical_json import dumps
from shardkit.formats.digest import parse_digest
from shardkit.manifest.json_fields import TIME, read_document, utc_text
from shardkit.reading.copying import copy_object
from shardkit.reading.locations import Location
from shardkit.reading.read_events import ReadEvents
from shardkit.stores.store import parse_object_name

MAX_ATTESTATION_BYTES: Final = 16 * 2**10
"""Of one document of a reader."""

_FORMAT: Final = "shardkit-attestation/1"
WORD: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,39}")
"""A name of a location or of who looked."""

RESULT: Final = re.compile(r"good|wrong|missing|healed")

LEVEL: Final = re.compile(r"list|attested|stored|read|decode|block")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attestation:
    """One look at one copy."""

    location: str
    digest: str
    """``sha256:<hex>`` of the object."""
    extension: str
    result: str
    """"good", "wrong", "missing" or "healed"."""
    level: str
    """How closely it was checked: the levels of ``shardkit verify``, or "block" for one block of it."""
    by: str
    """What looked: "read", "scrub", "repair"."""
    time: str = dataclasses.field(default_factory=utc_text)
    """UTC, ``2026-11-20T19:00:00Z``."""

    def new_name(self) -> str:
        """A name that no other attestation has."""
        return f"attest/{self.location}/{self.time[:10]}/{uuid.uuid4().hex}.json"

    def to_bytes(self) -> bytes:
        return dumps({"format": _FORMAT, **dataclasses.asdict(self)})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Attestation:
        """Read and check.

        Raises:
            FormatError: Not an attestation.
        """
        names = [one.name for one in dataclasses.fields(cls)]
        fields = read_document(data, where, _FORMAT, names, MAX_ATTESTATION_BYTES)
        digest = fields.digest("digest")
        parse_digest(digest)
        return cls(
            location=fields.text("location", pattern=WORD),
            digest=digest,
            extension=fields.text("extension", pattern=WORD),
            result=fields.text("result", pattern=RESULT),
            level=fields.text("level", pattern=LEVEL),
            time=fields.text("time", pattern=TIME),
            by=fields.text("by", pattern=WORD),
        )


_QUEUED: Final = 10_000


class Healer:
    """Attests each bad copy once, and puts the good bytes over it, one object at a time.

    Args:
        locations: Where good copies may be.
        read_events: Where the outcome is counted.
        attest: Gets each attestation: writes it to the run directory, for those without write rights.
    """

    def __init__(
        self,
        locations: Sequence[Location],
        read_events: ReadEvents,
        attest: Callable[[Attestation], None] | None = None,
    ) -> None:
        self.attest = attest
        self._locations = [location for location in locations if location.holds == "objects"]
        self._read_events = read_events
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self._work: queue.Queue[tuple[Location, str] | None] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None

    def report(self, location: Location, name: str, result: str) -> None:
        """A reader met a bad copy.

        Args:
            location: Where.
            name: Of the object in a root.
            result: "wrong" or "missing".
        """
        with self._lock:
            if (location.name, name) in self._seen:
                return
            self._seen.add((location.name, name))
        try:
            self._record(location, name, result, level="block")
        except FormatError:
            return  # no object: nothing that a digest could heal
        if location.heal:
            self._start()
            with contextlib.suppress(queue.Full):  # what is not healed now is met again
                self._work.put_nowait((location, name))

    def wait(self) -> None:
        """Until everything reported so far was dealt with."""
        self._work.join()

    def close(self) -> None:
        """Finish the object at hand, drop the rest; may be called twice."""
        if self._thread is not None and self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._work.put_nowait(None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shardkit-heal", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            try:
                self._heal(*item)
            finally:
                self._work.task_done()
        self._work.task_done()

    def _heal(self, location: Location, name: str) -> None:
        try:
            copy_object(name, self._locations, location, replace=True)
            self._read_events.note("healed", location.name, what=name)
            self._record(location, name, "healed", level="read")
        except ShardkitError as error:
            self._read_events.note("heal_failed", location.name, what=name, reason=str(error))

    def _record(self, location: Location, name: str, result: str, *, level: str) -> None:
        digest, extension = parse_object_name(name)
        found = Attestation(
            location=location.name, digest=digest, extension=extension, result=result, level=level, by="read"
        )
        # attestations are soft state: a read does not fail for one
        with contextlib.suppress(ShardkitError, OSError):
            if self.attest is not None:
                self.attest(found)
            elif location.heal:
                location.store.put_new(found.new_name(), found.to_bytes())
