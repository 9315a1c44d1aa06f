"""Encode the parity objects of a version, set by set, so that encoding may be interrupted at any point."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.reading.adopted import with_adopted_tars
from shardkit.reading.inventory import (
    MAX_MEMBERS,
    take_inventory,
    version_record,
    version_record_name,
    walk_versions,
)
from shardkit.reading.objects import check_object
from shardkit.reading.parity.rebuilding import encode_set
from shardkit.reading.parity.sets import ParitySet, read_record, sets_of
from shardkit.repository.location_table import LocationTable
from shardkit.repository.opening import open_locations
from shardkit.repository.repository import Repository
from shardkit.stores.store import Store, put_over
from shardkit.stores.waiting import RateLimiter


@dataclass
class Encoding:
    """The result of `encode_sets`.

    Attributes:
        sets: number of parity sets of the version.
        encoded: number of sets that this call encoded.
        kept: number of sets that had parity before.
        failed: id of a set without parity → the reason: a member is lost, or a store did not answer.
    """

    sets: int = 0
    encoded: int = 0
    kept: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def encode_sets(
    repository: Repository,
    manifest_id: str,
    *,
    k: int = 8,
    pace: Callable[[int], None] | None = None,
) -> Encoding:
    """Encode the parity sets of a version. Existing parity is kept, so the next call finishes a killed one.

    Args:
        repository: the root.
        manifest_id: id of the version.
        k: number of members of a set.
        pace: called with the number of bytes read in each round; may sleep.

    Raises:
        UsageError: `k` is out of range, or the version is merged.
    """
    if not 1 <= k <= MAX_MEMBERS:
        raise UsageError(f"k={k}: a parity set has 1 to {MAX_MEMBERS} members")
    inventory = take_inventory(repository.store, manifest_id)
    if inventory.manifest.parts:
        raise UsageError(f"version {manifest_id} was merged; give its parts parity, where they lie")
    root = repository.store
    adopting = with_adopted_tars(root, inventory.manifest)  # adopted tars are members too
    sources = [adopting, *_copies(repository)]
    put_over(root, version_record_name(manifest_id), version_record(manifest_id, k))
    chosen = sets_of(inventory, k, inventory.small(repository.store))
    done = Encoding(sets=len(chosen))
    for one in chosen:
        if _is_encoded(root, one):
            done.kept += 1
            continue
        try:
            encode_set(root, one, sources, pace=pace)
        except IntegrityError as error:
            done.failed[one.id] = str(error)
        else:
            done.encoded += 1
    return done


def _copies(repository: Repository) -> list[Store]:
    """Return the stores of the other locations that can be opened."""
    try:
        return [one.store for one in open_locations(repository.store, repository.id)[1:]]
    except ShardkitError:
        return []


def _is_encoded(root: Store, one: ParitySet) -> bool:
    """Return True if the document of a set exists, and its parity objects exist with their sizes."""
    try:
        record = read_record(root, one)
    except FormatError:
        return False
    objects = [] if record is None else [record.object_at(one.k), record.object_at(one.k + 1)]
    return record is not None and all(check_object(root, it.name, it.size, "list").is_good for it in objects)


def encode_parity(
    repository: Repository, table: LocationTable, versions: Iterable[str], pace: RateLimiter
) -> int:
    """Encode the missing parity of versions and return the number of sets encoded.

    A merged version has no sets of its own. Its parts have sets, and parts in other roots are encoded there.

    Raises:
        StoreError: A set could not be encoded.
    """
    if table.policy.parity is None:
        return 0
    encoded, k = 0, table.policy.parity.members
    failed: dict[str, str] = {}
    for inventory in walk_versions(repository.store, versions, optional=True):
        version = inventory.manifest.id
        if not inventory.manifest.parts:
            try:
                done = encode_sets(repository, version, k=k, pace=pace.take)
            except (
                NotFoundError,
                IntegrityError,
            ) as error:  # the sets depend on the sizes of all objects
                failed[version] = str(error)
            else:
                encoded += done.encoded
                failed |= done.failed
    if failed:
        name, why = next(iter(failed.items()))
        raise StoreError(
            f"{len(failed)} parity sets of {repository.url} could not be encoded, among them {name}: {why}; "
            f"run: shardkit repair {repository.url}"
        )
    return encoded
