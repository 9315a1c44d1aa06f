"""Reading what has no digest in its name: the identity, the log, tables, documents of parity.

The same order of events as for objects (SPEC.md, "The read path"): once more from the same place, then from the other
locations, then an error that says what each of them has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardkit.errors import FormatError, IntegrityError, ShardkitError, StoreError
from shardkit.reading.located_store import LocatedStore
from shardkit.repository.object_access import asked_twice
from shardkit.stores.store import Store

__all__ = ["read_checked"]

_Found = TypeVar("_Found")


def read_checked(
    store: Store,
    name: str,
    parse: Callable[[bytes, str], _Found],
    *,
    max_bytes: int,
    is_optional: bool = False,
) -> _Found:
    """A document of a root, as `parse` understands it.

    Args:
        store: where; one that reads over several locations asks the others too.
        name: of the document.
        parse: (bytes, how messages name them) → what they say; raises IntegrityError or FormatError where they are
            not what was written, and then another answer is asked for.
        max_bytes: longest document accepted.
        is_optional: the root's "not there" is an answer; without it, a document that the root lacks is lost, and
            looked for in the other locations.

    Raises:
        NotFoundError: no location has it.
        IntegrityError, FormatError: those that answered have something else under its name.
        StoreError: nothing good came in time.
    """
    while hasattr(store, "inner"):
        store = store.inner
    where = f"{name} in {store.url}"
    if not isinstance(store, LocatedStore):
        return asked_twice(lambda: parse(store.get(name, max_bytes=max_bytes), where))
    if is_optional:
        try:
            return parse(store.path.root.store.get(name, max_bytes=max_bytes), where)
        except (IntegrityError, FormatError, StoreError):
            pass  # the read path asks again, and elsewhere
    refused: list[ShardkitError] = []

    def check(data: bytes) -> bool:
        try:
            parse(data, where)
        except (IntegrityError, FormatError) as error:
            refused.append(error)
            return False
        return True

    try:
        data = store.get_document(name, check, max_bytes=max_bytes)
    except IntegrityError as error:
        if not refused:
            raise
        told = type(refused[0])(f"{refused[0]} (asked again, and everywhere: {error})")
        raise told from None
    return parse(data, where)
