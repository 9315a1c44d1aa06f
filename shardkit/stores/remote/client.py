"""What an object store asks of the client below it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

Buffer = Any
"""Bytes, or whatever has them behind the buffer protocol."""

WRITE_ID: Final = "shardkitwrite"
"""Metadata key under which a put notes which call made the object; Azure takes letters, digits and _ only, and some
proxies drop headers with _."""


class Found(NamedTuple):
    """An object as a listing or a request shows it."""

    name: str
    size: int
    write_id: str | None = None
    etag: str = ""
    """Changes when the object does; empty where the store has none."""
    sha256: str | None = None
    """Hex digest that the store keeps of the whole object, None where it keeps none or the client cannot ask."""


class Client(Protocol):
    """One attempt of each request; raises `Failure`."""

    def get(self, name: str, max_bytes: int) -> tuple[int, Buffer]:
        """(size, bytes); the bytes are empty and unread where size > max_bytes."""

    def get_range(self, name: str, offset: int, length: int) -> Buffer:
        """At most `length` bytes from `offset`, fewer at the end."""

    def put(self, name: str, data: Buffer, *, write_id: str | None) -> None:
        """Put over whatever is there; if `write_id` is given, only where nothing is there."""

    def stat(self, name: str) -> Found:
        """Everything that the client can learn of an object without reading it."""

    def list(self, prefix: str, after: str) -> Iterator[Found]:
        """Objects below the folder `prefix` after the name `after`, in byte order of names."""

    def delete(self, name: str) -> None:
        """Remove; absent is fine."""
