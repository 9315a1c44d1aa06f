"""Good bytes of an object, from whichever location has them, made durable in another; so for what readers meet."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, StoreError
from shardkit.reading.attestations import Attestation
from shardkit.reading.health import ReadEvents
from shardkit.reading.locations import Location
from shardkit.stores.objects import PIECE_BYTES, publish
from shardkit.stores.store import MAX_OBJECT_BYTES, Stage, parse_object_name


def copy_object(
    name: str,
    sources: Sequence[Location],
    target: Location,
    *,
    replace: bool = False,
    pace: Callable[[int], None] | None = None,
    moved: Callable[[int], None] | None = None,
    bad_copy: Callable[[Location, str, str], None] | None = None,
) -> tuple[str, int]:
    """Make good bytes of an object durable in a location.

    Args:
        name: of the object.
        sources: asked in this order.
        target: open for writing; what lies there under the name is kept if it is good, replaced if not.
        replace: what lies there was read and is wrong: replaced whatever checksum the store keeps of it.
        pace: called with the number of bytes before they are read; may sleep.
        moved: told of bytes as they go.
        bad_copy: told of (source, name, "wrong" or "missing").

    Returns:
        (name of the source that was good, bytes of the object).

    Raises:
        IntegrityError: no source has good bytes.
        StoreError: no source answered, or the target failed.
    """
    digest, extension = parse_object_name(name)
    bad: dict[str, str] = {}
    silent: StoreError | None = None
    for source in sources:
        if source.name == target.name:
            continue
        with target.store.stage(extension) as stage:
            try:
                _fill(stage, source, name, pace, moved)
            except _TargetFailed as failed:
                raise failed.error from None
            except NotFoundError:
                bad[source.name] = "missing"
            except IntegrityError:
                bad[source.name] = "wrong"
            except ShardkitError as error:
                silent = error if isinstance(error, StoreError) else StoreError(str(error))
            else:
                if f"sha256:{stage.digest}" == digest:
                    if replace:
                        stage.publish(name, replace=True)
                    else:
                        publish(target.store, stage, extension)
                    return source.name, stage.size
                bad[source.name] = "wrong"
        if bad_copy is not None and source.name in bad:
            bad_copy(source, name, bad[source.name])
    if silent is not None:
        raise silent
    told = ", ".join(f"{where}: {what}" for where, what in bad.items()) or "none was asked"
    raise IntegrityError(f"{name}: no location has good bytes of it ({told}); run: shardkit repair")


class _TargetFailed(Exception):
    """A write failed, and not a read: no other source helps."""

    def __init__(self, error: ShardkitError) -> None:
        super().__init__(str(error))
        self.error = error


def _fill(
    stage: Stage,
    source: Location,
    name: str,
    pace: Callable[[int], None] | None,
    moved: Callable[[int], None] | None,
) -> None:
    stat = source.store.head(name)
    if stat is None:
        raise NotFoundError(f"{name} is not in {source.store.url}")
    if stat.size > MAX_OBJECT_BYTES:
        raise IntegrityError(f"{name} in {source.store.url}: {stat.size} bytes, no object is that large")
    for offset in range(0, stat.size, PIECE_BYTES):
        length = min(PIECE_BYTES, stat.size - offset)
        if pace is not None:
            pace(length)
        data = source.store.get_range(name, offset, length)
        try:
            stage.write(data)
        except StoreError as error:
            raise _TargetFailed(error) from None
        if moved is not None:
            moved(length)


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
