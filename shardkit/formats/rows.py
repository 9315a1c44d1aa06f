"""One row on its way into a shard."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Row"]


class Row(NamedTuple):
    """A sample as the writer takes it.

    `payloads` are the canonical bytes of the fields in schema order (`Schema.encode`). `original_key` is the
    source's key where it had to be rewritten, `source` the (source name, row number in it), `stratum` an
    index into the manifest's strata, needed only where rare strata are pooled.
    """

    key: str
    payloads: tuple[bytes, ...]
    original_key: str | None = None
    source: tuple[str, int] | None = None
    stratum: int | None = None
