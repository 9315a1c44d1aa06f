"""`repair`: replace bad and missing copies from another copy, otherwise from parity (SPEC.md, "Repair").

Documents and the log are copied from the root to its copies. A damaged document of the root is taken from a copy, and
a root that has lost everything gets its documents from one. `encode_parity`, which `place` and `replicate` call as
well, makes missing parity set by set, so that it may be interrupted at any point.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from shardkit.copies.documents import HealedCopy, LostObject, UncheckedCopy
from shardkit.copies.placement import Copy
from shardkit.copies.walk import CheckSettings, CopyTask, CopyWalk, Repair, run_in_threads
from shardkit.documents import decode_plain
from shardkit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.reading.adopted import with_adopted_files
from shardkit.reading.adopted_places import MAX_GROUP_BYTES, FileGroup, group_name, location_name
from shardkit.reading.attestations import read_attestations
from shardkit.reading.inventory import (
    MAX_RECORD_BYTES,
    Inventory,
    parse_version_record,
    version_record,
    version_record_name,
    walk_versions,
)
from shardkit.reading.located_store import LocatedStore
from shardkit.reading.objects import DEPTHS, ROOT_NAME, CopyResult, check_object
from shardkit.reading.parity.rebuilding import encode_set
from shardkit.reading.parity.sets import ParitySet, SetRecord, read_record, sets_of
from shardkit.repository.locations import (
    SPARE_NAME,
    find_sibling_copies,
    location_of,
    mirror_log,
    read_mark,
    read_table,
    repository_id,
    spare_bytes,
)
from shardkit.repository.policy import LocationRecord, Parity
from shardkit.repository.repository import Repository
from shardkit.stores.local import LocalStore, check_vacant, open_store
from shardkit.stores.store import Store, parse_object_name, put_over, root_store
from shardkit.stores.waiting import RateLimiter


def repair(
    url: str,
    *,
    level: str = "read",
    from_runs: Sequence[str] = (),
    settings: CheckSettings | None = None,
) -> Repair:
    """Replace bad and missing copies. May be interrupted and called again at any time.

    The level "attested" checks only copies that were attested as bad, also in the run directories `from_runs`.

    Raises:
        UsageError: The level is unknown.
        NotFoundError: A run directory does not exist.
    """
    if level != "attested" and level not in DEPTHS:
        raise UsageError(f"level {level!r}: expected attested, {', '.join(DEPTHS)}")
    with healing_walk(url, "repair", level, settings) as walk:
        looks = read_attestations([walk.root, *map(_run_store, from_runs)])
        bad = list(walk.check_attested(looks))
        if level != "attested":
            known = {(one.location, one.name) for one in bad}
            copies = [one for one in walk.copies() if (one.location, one.name) not in known]
            bad += walk.find_bad(copies, lambda _: level)  # type: ignore[arg-type, return-value]
        replace_copies(walk, bad)
        finish(walk)
    return walk.done


def healing_walk(url: str, by: str, level: str, settings: CheckSettings | None) -> CopyWalk:
    """Return a walk that repairs. A root that has lost everything first gets the documents of one of its copies."""
    settings = settings or CheckSettings()
    return CopyWalk(url, by, level, settings, restored=restore_lost_root(open_store(url), settings.locations))


def _run_store(run: str) -> Store:
    """Open the directory of a run, which has the attestations of its readers."""
    if not os.path.isdir(run):
        raise NotFoundError(
            f"run directory {run} is not there; give the directory that the loader was given as run="
        )
    return LocalStore(run, read_only=True)


def replace_copies(walk: CopyWalk, bad: Iterable[Copy]) -> None:
    """Replace bad copies. Copies that cannot be replaced are added to `done.lost` or `done.unchecked`.

    Copies in other locations are used first, because each repaired copy helps to rebuild others from parity. Parity
    is tried repeatedly until no copy is repaired, because a rebuilt object may complete another set.
    """
    copies = [one for _, one in sorted({(one.location, one.name): one for one in bad}.items())]
    sources = tuple(walk.locations.values())
    tasks = (
        (number, CopyTask(one.name, sources, walk.locations[one.location], one.size, one.state == "wrong"))
        for number, one in enumerate(copies)
    )
    num_healed = 0

    def note_healed(one: Copy, source: str, num_bytes: int) -> None:
        nonlocal num_healed
        num_healed += 1
        walk.done.healed.append(HealedCopy(one.location, one.name, one.state, source, num_bytes))
        walk.records.add(one.location, one.name, "healed", "read")
        if walk.report is not None:
            walk.report("healed", num_healed, len(copies))

    failures: dict[Copy, _Failure] = {}
    for number, result in run_in_threads(tasks, walk.settings.jobs, walk.pace):
        if result.source:
            note_healed(copies[number], result.source, result.num_bytes)
        else:
            failures[copies[number]] = _no_copy(walk, result)
    left = sorted(failures)
    while True:
        parity: dict[Copy, _Failure] = {}
        for one in left:
            found = _from_parity(walk, one, left)
            if isinstance(found, int):
                note_healed(one, "parity", found)
            else:
                parity[one] = found
        if len(parity) == len(left):
            break
        left = list(parity)
    for one, failure in parity.items():
        why = f"{failures[one].why}, and {failure.why}"
        if not (failures[one].is_sure and failure.is_sure):
            why = f"it could not be healed: {why}"
            walk.done.unchecked.append(UncheckedCopy(one.location, one.name, why))
        elif all(lost.name != one.name for lost in walk.done.lost):
            walk.done.lost.append(LostObject(one.name, walk.rows.get(one.name, 0), why))


class _Failure(NamedTuple):
    """Why a copy could not be repaired from copies, or from parity."""

    why: str
    is_sure: bool
    """False if a location that did not answer may have good bytes, or the bad copy cannot be overwritten."""


def _no_copy(walk: CopyWalk, result: CopyResult) -> _Failure:
    if isinstance(result.problem, (StoreFullError, StoreReadOnlyError)):
        return _Failure(str(result.problem), is_sure=False)  # no source can help
    silent = [] if isinstance(result.problem, IntegrityError) else [str(result.problem)]
    silent += [f"{name} does not answer" for name in walk.absent]
    why = "; ".join(filter(None, [result.bad, *silent])) or "there is no other location"
    return _Failure(f"no other copy is good ({why})", is_sure=not silent)


def _from_parity(walk: CopyWalk, bad: Copy, left: Iterable[Copy]) -> int | _Failure:
    """Rebuild a copy from the other objects of its parity set, without those known to be bad. Return its size."""
    record = walk.record(parse_object_name(bad.name)[0])
    if record is None:
        return _Failure("it has no parity", is_sure=True)
    locations = walk.locations
    known = {
        (record.position(parse_object_name(one.name)[0]), locations[one.location].store.url) for one in left
    }
    try:
        return walk.rebuild(record, bad.name, locations[bad.location].store, known)
    except ShardkitError as error:
        return _Failure(str(error), is_sure=isinstance(error, IntegrityError))


def finish(walk: CopyWalk, *, with_logs: bool = True) -> None:
    """Repair the documents of parity, then all documents of the copies; to be called after the objects.

    With `with_logs`, the entries that a copy lacks are added to its log.
    """
    _repair_parity(walk)
    done, documents, root = walk.done, walk.documents, root_store(walk.root)
    done.healed += documents.heal_copies()
    for name, location in walk.locations.items():
        if name != ROOT_NAME:
            try:
                mirrored = mirror_documents(root, location.store)
                if with_logs and name in documents.copies:
                    mirror_log(root, location.store)
            except ShardkitError as error:
                done.unchecked.append(UncheckedCopy(name, "", str(error)))
            else:
                done.healed += [
                    HealedCopy(name, one, was, ROOT_NAME, 0) for one, was in mirrored if was == "wrong"
                ]
    done.lost += documents.lost
    done.unchecked += documents.unchecked


def _repair_parity(walk: CopyWalk) -> None:
    """Restore missing or damaged documents of parity sets, and encode and copy the sets whose parity is lost."""
    root, done = walk.root, walk.done
    lost = {one.name for one in done.lost}
    encoded: list[SetRecord] = []
    for one in {one.id: one for one in walk.sets.values()}.values():
        was = "missing"
        try:
            if read_record(root, one) is not None:
                continue
        except ShardkitError:  # damaged or not a regular file
            was = "wrong"
        record = walk.record(one.members[0].digest)
        if record is not None and record.set == one:
            data = record.to_bytes()
            root.replace(one.record_name, data)
            done.healed.append(HealedCopy(ROOT_NAME, one.record_name, was, "parity", len(data)))
            continue
        if was == "wrong":
            root.delete(one.record_name)  # damaged, and no good copy exists
        if not any(member.name in lost for member in one.members):
            try:
                encoded.append(encode_set(root, one, walk.stores, pace=walk.pace.take))
            except ShardkitError as error:
                why = f"it has no parity: {error}"
                done.unchecked.append(UncheckedCopy(ROOT_NAME, one.record_name, why))
    done.encoded += len(encoded)
    for new in encoded:
        replace_copies(walk, walk.find_bad(walk.need_parity(new), lambda _: "read"))


# ---- Documents of copies

_MAX_ERASURE_BYTES: Final = 2**28
_MAX_PLACE_BYTES: Final = 2**20

_MIRRORED: Final = ("locations/", "parity/", "erasures/")
"""Folders of small documents that copies get from the root."""


def mirror_documents(root: Store, copy: Store) -> list[tuple[str, str]]:
    """Copy the documents that a copy lacks or that differ. A damaged document of the root is restored from the copy.

    Returns:
        (name, "missing" or "wrong") of each document copied to the copy.
    """
    done: list[tuple[str, str]] = []
    for folder in _MIRRORED:
        held = set(copy.list_after(folder))
        for name in root.list_after(folder):
            data = _sound_bytes(root, name)
            if data is None:
                other = _steady_bytes(copy, name) if name in held else None
                # by now the root may answer again, or the document may be gone
                if other is not None and root.head(name) is not None and _sound_bytes(root, name) is None:
                    root.replace(name, other)
            elif name not in held:
                if copy.put_new(name, data):  # otherwise another process copies it
                    done.append((name, "missing"))
            elif data != _sound_bytes(copy, name):
                copy.replace(name, data)
                done.append((name, "wrong"))
    return done


def _sound_bytes(store: Store, name: str) -> bytes | None:
    """Return the bytes of a document that fits its name; None if it is damaged, missing or another document."""
    limit = _MAX_PLACE_BYTES
    if name.startswith("parity/"):
        limit = MAX_RECORD_BYTES
    elif name.startswith("erasures/"):
        limit = _MAX_ERASURE_BYTES
    elif _is_group(name):
        limit = MAX_GROUP_BYTES
    with contextlib.suppress(ShardkitError):
        data = store.get(name, max_bytes=limit)
        check_document(name, data)
        return data
    return None


def _steady_bytes(store: Store, name: str) -> bytes | None:
    """Return what `_sound_bytes` returns twice, None if that differs.

    Some of these documents have no digest of their own: a bit that flips on the way would be written to the root.
    """
    data = _sound_bytes(store, name)
    return data if data is not None and data == _sound_bytes(store, name) else None


def _is_group(name: str) -> bool:
    return name.startswith("locations/") and name.endswith(".files")


def check_document(name: str, data: bytes) -> None:
    """Raise FormatError if a document is damaged or belongs to another set, part or tar than its name says."""
    said = name
    if name.startswith("parity/sets/"):
        said = SetRecord.from_bytes(data, name).set.record_name
    elif name.startswith("parity/versions/"):
        said = version_record_name(parse_version_record(data, name)[0])
    elif _is_group(name):
        said = group_name(FileGroup.from_bytes(data, name).digest)
    elif name.startswith("locations/"):
        value = decode_plain(data, max_bytes=_MAX_PLACE_BYTES)
        table = value if isinstance(value, dict) else {}
        said = location_name(str(table.get("manifest", table.get("digest"))))
    else:
        decode_plain(data, max_bytes=_MAX_ERASURE_BYTES)
    if said != name:
        raise FormatError(f"{name} is the document of {said}")


def restore_lost_root(root: Store, more: Sequence[LocationRecord]) -> list[HealedCopy]:
    """Copy the documents of a copy to a root that has neither identity nor log, the table of locations last.

    The usual repair then restores the rest. If `more` is empty, copies are looked for in folders next to the root.
    """
    if repository_id(root):
        return []
    done: list[HealedCopy] = []
    for record in more or find_sibling_copies(root):
        with contextlib.suppress(NotFoundError, IntegrityError, FormatError):
            copy = location_of(record).store
            mark = read_mark(copy)
            table = read_table(copy, mark.repository) if mark else None
            if mark is None or table is None:
                continue
            check_vacant(root.url, "dataset")
            documents = (
                (name, _steady_bytes(copy, name)) for folder in _MIRRORED for name in copy.list_after(folder)
            )
            for name, data in (*documents, (SPARE_NAME, spare_bytes(mark.repository, table))):
                if data is not None and root.put_new(name, data):
                    done.append(HealedCopy(ROOT_NAME, name, "missing", record.name, len(data)))
            break
    return done


# ---- Missing parity


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
            f"run: shardkit repair {shell_word(self.url)}"
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
        versions: manifest ids. Versions that no location has whole are skipped.
        pace: rate limit of the reads.
    """
    done = Encoding(repository.url)
    if parity is None:
        return done
    reading = Repository.open(repository.url, read_only=True).store
    copies = [one.store for one in reading.locations[1:]] if isinstance(reading, LocatedStore) else []
    for inventory in walk_versions(repository.store, versions, lost={}):
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
