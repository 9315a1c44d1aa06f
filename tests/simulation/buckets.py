"""Buckets in memory, with everything that networks and disks do to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from shardkit.arrays import Buffer
from shardkit.stores.remote.addresses import Address
from shardkit.stores.remote.clients import ObjectProperties
from shardkit.stores.remote.failures import Failure, Kind
from tests.simulation.scheduler import Scheduler

__all__ = ["Bucket", "BucketClient", "Faults", "Stored"]


class Stored(NamedTuple):
    """An object as a bucket holds it."""

    data: bytes
    sha256: str
    """Of the bytes that were put: rot does not change it."""
    write_id: str | None
    put_at: float


class Faults(NamedTuple):
    """How often requests go wrong."""

    no_answer: float = 0.01
    """The request was not carried out, or it was and the answer is lost: half of them each."""
    unanswered_put: float = 0.04
    """The same of puts of new names, which decide races."""
    throttled: float = 0.01
    refused: float = 0.002
    torn_answer: float = 0.003
    """Fewer bytes than asked for."""
    wrong_answer: float = 0.003
    """One bit of the answer is another; what lies in the bucket is good."""
    stale_list: float = 0.01
    """A listing does not show what was put in the last seconds: network file systems do that."""
    duplicate: float = 0.004
    """A put is carried out a second time, later."""


class Bucket:
    """Objects of one location.

    Args:
        name: of the location.
        keeps_checksums: whether it tells the SHA-256 of what was put, as S3 does; such a store does not rot unseen.

    Attributes:
        objects: name → what lies there.
        is_down: no request is answered.
        is_full: no put is taken.
    """

    def __init__(self, name: str, *, keeps_checksums: bool) -> None:
        self.name, self.keeps_checksums = name, keeps_checksums
        self.objects: dict[str, Stored] = {}
        self.is_down = self.is_full = False
        self.changed: Callable[[Bucket, str, Stored | None, Stored | None], None] = lambda *_: None
        """Told of every change that a program makes: (bucket, name, before, after)."""

    def load(self, objects: dict[str, Stored]) -> None:
        """Begin with objects."""
        self.objects = dict(objects)

    def damage(self, name: str, data: bytes | None) -> None:
        """Other bytes lie under a name than were put there, or none."""
        if data is None:
            del self.objects[name]
        else:
            self.objects[name] = self.objects[name]._replace(data=data)

    def put(self, name: str, data: bytes, write_id: str | None, now: float) -> None:
        """What a put does."""
        before = self.objects.get(name)
        after = Stored(data, hashlib.sha256(data).hexdigest(), write_id, now)
        self.objects[name] = after
        self.changed(self, name, before, after)

    def delete(self, name: str) -> None:
        """What a delete does."""
        before = self.objects.pop(name, None)
        if before is not None:
            self.changed(self, name, before, None)


class BucketClient:
    """Requests of programs to one bucket below a prefix; implements `shardkit.stores.remote.clients.Client`."""

    def __init__(self, bucket: Bucket, address: Address, scheduler: Scheduler, faults: Faults) -> None:
        self._bucket, self._scheduler, self._faults = bucket, scheduler, faults
        self._late: list[Callable[[], None]] = []
        assert not address.path

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        """See `Client.get`."""
        self._begin(f"get {self._bucket.name}/{name}")
        found = self._find(name)
        data = found.data if len(found.data) <= max_bytes else b""
        return len(found.data), self._garbled(data)

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """See `Client.get_range`."""
        self._begin(f"get {self._bucket.name}/{name} {offset}+{length}")
        found = self._find(name)
        if offset >= len(found.data):
            raise Failure("range", "past the end")
        return self._garbled(found.data[offset : offset + length])

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        """See `Client.put`."""
        held = bytes(data)

        def carry_out() -> None:
            if self._bucket.is_full:
                raise Failure("refused", "HTTP 507")
            if write_id is not None and name in self._bucket.objects:
                raise Failure("exists", "HTTP 412")
            self._bucket.put(name, held, write_id, self._scheduler.now)

        no_answer = self._faults.no_answer if write_id is None else self._faults.unanswered_put
        self._change(f"put {self._bucket.name}/{name}", carry_out, no_answer)
        if write_id is not None and self._scheduler.happens(self._faults.duplicate):
            self._late.append(carry_out)

    def stat(self, name: str) -> ObjectProperties:
        """See `Client.stat`."""
        self._begin(f"head {self._bucket.name}/{name}")
        found = self._find(name)
        sha256 = found.sha256 if self._bucket.keeps_checksums else None
        return ObjectProperties(name, len(found.data), found.write_id, found.sha256, sha256)

    def list(self, prefix: str, after: str) -> Iterator[ObjectProperties]:
        """See `Client.list`."""
        self._begin(f"list {self._bucket.name}/{prefix}")
        stale = self._scheduler.happens(self._faults.stale_list)
        border = self._scheduler.now - 5.0
        names = sorted(
            name
            for name, one in self._bucket.objects.items()
            if name.startswith(prefix) and name > after and not (stale and one.put_at > border)
        )
        for place, name in enumerate(names):
            if place % 100 == 99:
                self._begin(f"list {self._bucket.name}/{prefix} on")
            if (one := self._bucket.objects.get(name)) is not None:
                yield ObjectProperties(name, len(one.data), etag=one.sha256)

    def delete(self, name: str) -> None:
        """See `Client.delete`."""
        what = f"delete {self._bucket.name}/{name}"
        self._change(what, lambda: self._bucket.delete(name), self._faults.no_answer)

    # ---- requests

    def _change(self, what: str, carry_out: Callable[[], None], no_answer: float) -> None:
        self._begin(what, no_answer)
        if self._scheduler.happens(no_answer / 2):
            carry_out()
            self._scheduler.trace.append("    carried out, the answer is lost")
            raise Failure("no-answer", "timed out")
        carry_out()

    def _begin(self, what: str, no_answer: float | None = None) -> None:
        self._scheduler.request(what)
        if self._late and self._scheduler.happens(0.3):
            late = self._late.pop()
            try:
                late()
                self._scheduler.trace.append("    an old put is carried out again")
            except Failure:
                pass
        if self._bucket.is_down:
            self._scheduler.now += 1.0
            raise Failure("no-answer", "no connection")
        kinds: tuple[tuple[float, Kind], ...] = (
            ((self._faults.no_answer if no_answer is None else no_answer) / 2, "no-answer"),
            (self._faults.throttled, "throttled"),
            (self._faults.refused, "refused"),
        )
        for probability, kind in kinds:
            if self._scheduler.happens(probability):
                self._scheduler.trace.append(f"    {kind}")
                raise Failure(kind, f"HTTP 5xx ({kind})")

    def _find(self, name: str) -> Stored:
        found = self._bucket.objects.get(name)
        if found is None:
            raise Failure("absent", "HTTP 404")
        return found

    def _garbled(self, data: bytes) -> bytes:
        if data and self._scheduler.happens(self._faults.torn_answer):
            self._scheduler.trace.append("    fewer bytes came")
            return data[: self._scheduler.random.randrange(len(data))]
        if data and self._scheduler.happens(self._faults.wrong_answer):
            self._scheduler.trace.append("    a bit of the answer was flipped")
            place = self._scheduler.random.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data
