"""P and Q of every set of a version, set by set, so that it can be interrupted at any point (SPEC.md §4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shardkit.errors import FormatError, IntegrityError, ShardkitError, UsageError
from shardkit.reading.inventory import take_inventory
from shardkit.reading.parity.galois import MAX_MEMBERS
from shardkit.reading.parity.sets import ParitySet, SetRecord, VersionRecord, read_record, sets_of
from shardkit.reading.parity.streaming import restore
from shardkit.repository.opening import open_locations
from shardkit.repository.repository import Repository
from shardkit.repository.versions import with_adopted
from shardkit.stores.store import Descriptor, Store, put_over


@dataclass
class Encoding:
    """What `encode_sets` did.

    Attributes:
        sets: of the version.
        encoded: by this call.
        kept: that were there.
        read_bytes: of members.
        parity_bytes: that were written.
        failed: set → why it has no parity: a member is lost, or a store did not answer.
    """

    sets: int = 0
    encoded: int = 0
    kept: int = 0
    read_bytes: int = 0
    parity_bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def encode_sets(
    repository: Repository,
    manifest_id: str,
    *,
    k: int = 8,
    pace: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Encoding:
    """Give a version parity. What is there already is kept, so a killed call is finished by the next.

    Args:
        repository: The root, open for writing.
        manifest_id: Of a version that lies in it and was not merged.
        k: Members of a set; 2 parity objects each.
        pace: Called with numbers of bytes read; may sleep.
        stopped: Asked between pieces; the call ends with KeyboardInterrupt.

    Raises:
        UsageError: The version was merged, or k is out of range.
        StoreError: The root or a target cannot be written.
    """
    if not 1 <= k <= MAX_MEMBERS:
        raise UsageError(f"k={k}: a parity set has 1 to {MAX_MEMBERS} members")
    inventory = take_inventory(repository, manifest_id)
    if inventory.manifest.parts:
        raise UsageError(f"version {manifest_id} was merged; give its parts parity, where they lie")
    root = repository.store
    adopting = with_adopted(repository, inventory.manifest).store  # tars that lie outside are members as well
    sources = [adopting, *_copies(repository)]
    put_over(root, VersionRecord(manifest_id, k).name, VersionRecord(manifest_id, k).to_bytes())
    chosen = sets_of(inventory, k, inventory.small(repository))
    done = Encoding(sets=len(chosen))
    with ThreadPoolExecutor(min(16, k + 2), thread_name_prefix="shardkit-parity") as pool:
        for one in chosen:
            if _is_encoded(root, one):
                done.kept += 1
            else:
                try:
                    encode_set(root, one, sources, pool=pool, pace=pace, stopped=stopped)
                except IntegrityError as error:
                    done.failed[one.id] = str(error)
                else:
                    done.encoded += 1
                    done.read_bytes += sum(member.size for member in one.members)
                    done.parity_bytes += 2 * one.parity_bytes
    return done


def encode_set(
    root: Store,
    one: ParitySet,
    stores: Sequence[Store],
    *,
    pool: ThreadPoolExecutor,
    pace: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> SetRecord:
    """P and Q of one set, then its document.

    Raises:
        IntegrityError: A member is in none of the stores.
        StoreError: The root cannot be written.
    """
    wanted: list[Descriptor | None] = [*one.members, None, None]
    made = restore(one, wanted, {one.k: root, one.k + 1: root}, stores, pool=pool, pace=pace, stopped=stopped)
    record = SetRecord(one, (made[0].descriptor.digest, made[1].descriptor.digest))
    put_over(root, one.record_name, record.to_bytes())
    return record


def _copies(repository: Repository) -> list[Store]:
    """Other locations of the root, as far as they can be opened."""
    try:
        return [one.store for one in open_locations(repository)[1:]]
    except ShardkitError:
        return []


def _is_encoded(root: Store, one: ParitySet) -> bool:
    """Whether the document of a set is there, and its parity objects with their sizes."""
    try:
        record = read_record(root, one)
    except FormatError:
        return False
    return record is not None and all(_is_held(root, record.object_at(one.k + row)) for row in (0, 1))


def _is_held(root: Store, wanted: Descriptor) -> bool:
    try:
        stat = root.head(wanted.name)
    except ShardkitError:
        return False
    return stat is not None and stat.size == wanted.size
