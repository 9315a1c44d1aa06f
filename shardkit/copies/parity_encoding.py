"""Encode the parity objects of versions, set by set, so that encoding may be interrupted at any point."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardkit.errors import FormatError, IntegrityError, NotFoundError, StoreError
from shardkit.reading.adopted import with_adopted_files
from shardkit.reading.inventory import Inventory, version_record, version_record_name, walk_versions
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import check_object
from shardkit.reading.parity.rebuilding import encode_set
from shardkit.reading.parity.sets import ParitySet, SetRecord, read_record, sets_of
from shardkit.repository.policy import Parity
from shardkit.repository.repository import Repository
from shardkit.stores.store import Store, put_over
from shardkit.stores.waiting import RateLimiter


@dataclass
class Encoding:
    """The result of `encode_parity`."""

    url: str  # URL of the root
    sets: int = 0  # number of parity sets of the versions
    encoded: list[SetRecord] = field(default_factory=list)  # sets that this call encoded
    # id of a set or version without parity → the reason: a member is lost, or a store did not answer
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def problem(self) -> str:
        """An error message, "" if all sets have parity."""
        if not self.failed:
            return ""
        name, why = next(iter(self.failed.items()))
        return (
            f"{len(self.failed)} parity sets of {self.url} could not be encoded, among them {name}: {why}; "
            f"run: shardkit repair {self.url}"
        )

    def check(self) -> None:
        """Raise StoreError if a set has no parity."""
        if self.failed:
            raise StoreError(self.problem)


def encode_parity(
    repository: Repository, parity: Parity | None, versions: Iterable[str], pace: RateLimiter | None = None
) -> Encoding:
    """Encode the missing parity of versions. Existing parity is kept, so the next call finishes a killed one.

    A merged version has no sets of its own. Its parts have sets, and parts in other roots are encoded there.

    Args:
        repository: the root.
        parity: size of the sets; None: encode nothing.
        versions: manifest ids. Versions without a manifest are skipped.
        pace: rate limit of the reads.
    """
    done = Encoding(repository.url)
    if parity is None:
        return done
    reading = Repository.open(repository.url, read_only=True).store
    copies = [one.store for one in reading.locations[1:]] if isinstance(reading, LocatedStore) else []
    for inventory in walk_versions(repository.store, versions, optional=True):
        if not inventory.manifest.parts:
            try:
                _encode(repository.store, copies, inventory, parity, pace or RateLimiter(), done)
            except (NotFoundError, IntegrityError) as error:
                # the sets depend on the sizes of all objects
                done.failed[inventory.manifest.id] = str(error)
    return done


def _encode(
    root: Store, copies: list[Store], inventory: Inventory, parity: Parity, pace: RateLimiter, done: Encoding
) -> None:
    version = inventory.manifest.id
    sources = [with_adopted_files(root, inventory.manifest), *copies]  # adopted files are members too
    put_over(root, version_record_name(version), version_record(version, parity.members))
    for one in sets_of(inventory, parity.members, inventory.small(root)):
        done.sets += 1
        if not _is_encoded(root, one):
            try:
                done.encoded.append(encode_set(root, one, sources, pace=pace.take))
            except IntegrityError as error:
                done.failed[one.id] = str(error)


def _is_encoded(root: Store, one: ParitySet) -> bool:
    """Return True if the document of a set exists, and its parity objects exist with their sizes."""
    try:
        record = read_record(root, one)
    except FormatError:
        return False
    objects = [] if record is None else [record.object_at(one.k), record.object_at(one.k + 1)]
    return record is not None and all(check_object(root, it.name, it.size, "list").is_good for it in objects)
