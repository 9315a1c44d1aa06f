"""Bad copies that readers meet: attested, and healed in the background where that is allowed."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from shardkit.errors import FormatError, ShardkitError
from shardkit.reading.attestations import Attestation
from shardkit.reading.copying import copy_object
from shardkit.reading.locations import Location
from shardkit.reading.read_events import ReadEvents
from shardkit.stores.store import parse_object_name

_QUEUED: Final = 10_000


class Healer:
    """Attests each bad copy once, and puts the good bytes over it, one object at a time.

    Args:
        locations: Where good copies may be.
        read_events: Where the outcome is counted.

    Attributes:
        attest: Gets each attestation instead of the location: for those without the right to write there.
    """

    def __init__(self, locations: Sequence[Location], read_events: ReadEvents) -> None:
        self.attest: Callable[[Attestation], None] | None = None
        self._locations = [location for location in locations if location.holds == "objects"]
        self._read_events = read_events
        self._lock = threading.Lock()
        self._seen: set[tuple[str, str]] = set()
        self._work: queue.Queue[tuple[Location, str]] = queue.Queue(_QUEUED)
        self._thread: threading.Thread | None = None

    def report(self, location: Location, name: str, result: str) -> None:
        """A reader met a bad copy of an object: "wrong" or "missing"."""
        with self._lock:
            if (location.name, name) in self._seen:
                return
            self._seen.add((location.name, name))
        try:
            self._record(location, name, result, level="block")
        except FormatError:
            return  # no object: nothing that a digest could heal
        if location.heal:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shardkit-heal", daemon=True)
                    self._thread.start()
            with contextlib.suppress(queue.Full):  # what is not healed now is met again
                self._work.put_nowait((location, name))

    def wait(self) -> None:
        """Until everything reported so far was dealt with."""
        self._work.join()

    def _run(self) -> None:
        while True:
            location, name = self._work.get()
            try:
                copy_object(name, self._locations, location, replace=True)
                self._read_events.note("healed", location.name, what=name)
                self._record(location, name, "healed", level="read")
            except ShardkitError as error:
                self._read_events.note("heal_failed", location.name, what=name, reason=str(error))
            finally:
                self._work.task_done()

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
