"""`verify`: check the log of a repository and every object that its versions name.

Each error is a `Finding`. Each level includes the checks of the levels before it:

    list       every object exists and has its size
    attested   a scrub found every object good within the policy's maximum age
    stored     the checksums that the store keeps match the names; no byte is fetched. Local files have no such
               checksums and are read. If a remote store keeps none, the object counts as not checked (exit code 3)
    read       every byte has the digest of the name
    decode     every sample decodes

The log, manifests and pages are read at every level: they are small, and all other objects are found through them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np

from shardkit.copies.shard_checks import LEVELS, Finding, Level, ShardCheck, finding_of
from shardkit.documents import sha256_digest, utc_text
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.manifest import ShardTable, check_against
from shardkit.ranges import duration_text
from shardkit.reading.adopted import with_adopted_files
from shardkit.reading.attestations import read_attestations
from shardkit.reading.inventory import (
    Inventory,
    read_members,
    side_objects,
    take_inventory,
    version_record_name,
)
from shardkit.reading.objects import ROOT_NAME, Depth, check_object
from shardkit.reading.parity.sets import known_sets, read_record
from shardkit.repository.locations import SPARE_NAME, log_conflicts, own_name, read_spare, read_table
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG_FOLDER,
    MAX_IDENTITY_BYTES,
    NO_COMMIT,
    LogEntry,
    check_succession,
    entry_name,
    entry_numbers,
    parse_dataset_url,
    read_entry,
)
from shardkit.repository.policy import LocationTable, Policy
from shardkit.repository.repository import Repository
from shardkit.repository.versions import find_part, load_shard_selection
from shardkit.stores.store import Store, object_name, root_store


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    url: str  # URL of the repository
    level: Level  # level of the checks
    versions: dict[str, str]  # name (ref, tag or manifest id) → manifest id, of the checked versions
    entries: int  # number of log entries read
    objects: int  # number of manifests, pages, shards, indexes and selections checked
    shards: int  # number of distinct shards of the versions
    shards_seen: int  # number of shards checked; smaller than `shards` if they were sampled
    stored_bytes: int  # bytes of the shards that were read
    seed: str  # seed of the sample of shards; the same seed selects the same shards
    damaged: tuple[Finding, ...]  # findings of damage
    unknown: tuple[Finding, ...]  # findings of objects that could not be checked

    @property
    def exit_code(self) -> ExitCode:
        """DAMAGED if anything is damaged, otherwise UNCHECKED if an object could not be checked."""
        return ExitCode.DAMAGED if self.damaged else ExitCode.UNCHECKED if self.unknown else ExitCode.DONE


def verify(
    url: str | os.PathLike[str],
    *,
    level: Level = "read",
    sample: Fraction | float | str = 1,
    seed: str | None = None,
    jobs: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Verification:
    """Verify a dataset without writing.

    Args:
        url: ``ROOT[@REF]``; without a ref, all refs and tags are verified.
        level: depth of the checks.
        sample: share of the shards to check, in (0, 1].
        seed: seed of the sample; random by default.
        jobs: number of threads.
        report: called with (shards done, shards).

    Raises:
        UsageError: The level or the share is not valid.
        NotFoundError: The repository or the ref does not exist.
    """
    share = Fraction(str(sample))
    if level not in LEVELS or not 0 < share <= 1:
        raise UsageError(
            f"level={level!r}, sample={sample}: expected one of {', '.join(LEVELS)} and a share in (0, 1]"
        )
    root, ref = parse_dataset_url(url)
    seed = secrets.token_hex(4) if seed is None else seed
    work = _Verifier(root, level)
    try:
        repository = Repository.open(root, read_only=True, alone=True)
    except (IntegrityError, FormatError) as error:
        work.add(IDENTITY_NAME, "the identity of the repository", error)
    else:
        root = work.root = repository.url
        work.check_documents(repository, ref)
        for manifest in work.versions.values():
            work.check_version(repository, manifest)
    shards = list(work.shards.values())
    chosen = _choose(shards, share, seed)
    if level == "attested" and chosen:
        work.findings += _attestation_findings(repository, chosen)
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1, thread_name_prefix="shardkit-verify") as pool:
        for done, found in enumerate(pool.map(lambda shard: shard.check(level), chosen), 1):
            work.findings += found
            if report is not None:
                report(done, len(chosen))
    unique = list(dict.fromkeys(work.findings))
    return Verification(
        url=root,
        level=level,
        versions=work.versions,
        entries=work.entries,
        objects=work.metadata + 2 * len(chosen),
        shards=len(shards),
        shards_seen=len(chosen),
        stored_bytes=sum(shard.size for shard in chosen if shard.is_read(level)),
        seed=seed,
        damaged=tuple(finding for finding in unique if finding.is_damage),
        unknown=tuple(finding for finding in unique if not finding.is_damage),
    )


class _Verifier:
    """Checks of the documents and the metadata, which collect findings and the shards to check."""

    def __init__(self, root: str, level: Level) -> None:
        self.root, self._level = root, level
        self.findings: list[Finding] = []
        self.versions: dict[str, str] = {}
        self.entries = self.metadata = 0
        self.shards: dict[tuple[str, str], ShardCheck] = {}
        self._seen: set[str] = set()

    def add(
        self, name: str, expected: str, problem: ShardkitError | str, *, action: str = "", rows: int = 0
    ) -> None:
        self.findings.append(finding_of(self.root, name, expected, problem, action=action, rows=rows))

    def _add_document(self, name: str, expected: str, problem: ShardkitError | str) -> None:
        self.add(name, expected, problem, action=f"run: shardkit repair {shell_word(self.root)}")

    def check_documents(self, repository: Repository, ref: str | None) -> None:
        """Check log and locations, and set `versions` from the newest good entry."""
        store = repository.store
        newest = self._check_log(store, repository.id)
        if newest is NO_COMMIT and any(one.endswith(".manifest") for one in store.list_after("objects/")):
            self.findings.append(
                Finding(
                    LOG_FOLDER, "an entry for a manifest that is stored", "no entry",
                    "restore log/ from a backup, unless a first build is about to commit", is_damage=False,
                )
            )  # fmt: skip
        if own_name(store) == ROOT_NAME:
            table = self._check_spare(store, repository.id, newest.locations) or newest.locations
            # an old copy, or one that does not answer, is no damage of the root
            for conflict in log_conflicts(store, table) if table else ():
                self._add_document(LOG_FOLDER, "the newest log of all copies", conflict)
        names = {**newest.tags, **newest.refs}
        if ref is None:
            self.versions = dict(sorted(names.items()))
        elif ref.startswith("sha256:"):
            self.versions = {ref: ref}
        elif ref in names:
            self.versions = {ref: names[ref]}
        elif not self.findings:
            shown = ", ".join(sorted(names)[:10]) or "none"
            raise NotFoundError(f"{repository.url} has no ref or tag {ref!r}; there are: {shown}")

    def _check_spare(
        self, store: Store, repository_id: str, table: LocationTable | None
    ) -> LocationTable | None:
        """Check the second copy of the table of locations, and return it."""
        try:
            spare = read_spare(store, repository_id)
            if spare is None and table is not None:
                raise NotFoundError(SPARE_NAME)
            if spare != table:
                raise IntegrityError("other locations")
        except ShardkitError as error:
            self._add_document(SPARE_NAME, "the locations of the newest log entry", error)
            return None
        return spare

    def _check_log(self, store: Store, repository_id: str) -> LogEntry:
        """Check every entry and the chain, and return the newest good entry."""
        newest = NO_COMMIT
        earlier: tuple[LogEntry, bytes] | None = None
        for number in range(1, max(entry_numbers(store), default=0) + 1):
            name = entry_name(number)
            try:
                entry, data = read_entry(store, number, repository_id)
                if earlier is not None:
                    check_succession(*earlier, entry, name)
                if number == 1 and entry.previous != sha256_digest(
                    store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
                ):
                    raise IntegrityError(f"it follows another {IDENTITY_NAME}")
            except ShardkitError as error:
                self._add_document(name, f"log entry {number}", error)
                earlier = None
            else:
                self.entries += 1
                newest, earlier = entry, (entry, data)
        return newest

    def check_version(self, repository: Repository, manifest_id: str) -> None:
        """Check the metadata of a version, its added fields and its parts, and collect their shards."""
        if manifest_id in self._seen:
            return
        self._seen.add(manifest_id)
        self.metadata += 1
        name = object_name(manifest_id, "manifest")
        try:
            inventory = take_inventory(repository.store, manifest_id, unreadable=self.add)
        except ShardkitError as error:
            self.add(name, manifest_id, error)
            return
        manifest = inventory.manifest
        self.metadata += len(manifest.pages)
        for digest, kind, size in side_objects(manifest):
            self._check_object(repository.store, object_name(digest, kind), size, "read")
        for part_name, part in manifest.parts:
            try:
                holder = find_part(repository, part_name, part)
            except ShardkitError as error:
                where, expected = object_name(part, "manifest"), f"part {part_name!r} of {manifest_id}"
                action = "put the part back, or merge again with the place where it is now"
                self.findings.append(Finding(where, expected, str(error), action, is_damage=False))
            else:
                self.check_version(holder, part)
        for added in manifest.added:
            self.check_version(repository, added)
        store = with_adopted_files(repository.store, manifest)
        rows = zip(inventory.shards, inventory.indexes, inventory.shard_rows, strict=True)
        for found, index, count in rows:
            shard = ShardCheck(store, manifest, found.name, found.size, index.name, index.size, count)
            self.shards.setdefault((found.name, index.name), shard)
        for table in inventory.tables:
            self._check_selections(repository, table)
        self._check_parity(repository.store, inventory)
        if len(inventory.tables) == len(manifest.pages) and not manifest.parts:
            try:
                check_against(manifest, ShardTable.concatenate(inventory.tables))
            except ShardkitError as error:
                self.add(name, "totals equal to those of its pages", error)

    def _check_object(self, store: Store, name: str, size: int | None, depth: Depth) -> None:
        """Check an object that is not a shard, once."""
        if name not in self._seen:
            self._seen.add(name)
            self.metadata += 1
            found = check_object(store, name, size, depth)
            if not found.is_good:
                self.add(name, found.expected, found.error or found.got)

    def _check_selections(self, repository: Repository, table: ShardTable) -> None:
        for shard in np.flatnonzero(table.has_selection).tolist():
            self.metadata += 1
            try:
                load_shard_selection(repository, table, shard)
            except ShardkitError as error:
                digest = table.selection_digest_text(shard) or ""
                rows = int(table.rows[shard])
                self.add(object_name(digest, "selection"), digest, error, rows=rows)

    def _check_parity(self, store: Store, inventory: Inventory) -> None:
        """Check the documents of a version's parity sets, and the parity objects of this location."""
        version = inventory.manifest.id
        try:
            k = None if inventory.manifest.parts else read_members(store, version)
            sets = [] if k is None else known_sets(store, inventory, k, [store])
        except ShardkitError as error:
            self._add_document(version_record_name(version), "parity of a version", error)
            return
        depth: Depth = "list" if self._level in ("list", "attested") else "read"
        for one in sets:
            try:
                record = read_record(store, one)
                if record is None:
                    raise NotFoundError(one.record_name)
            except ShardkitError as error:
                self._add_document(one.record_name, f"parity set {one.id}", error)
                continue
            for position in (one.k, one.k + 1):
                parity = record.object_at(position)
                if own_name(store) == ROOT_NAME or store.head(parity.name) is not None:
                    self._check_object(store, parity.name, parity.size, depth)


def _choose(shards: list[ShardCheck], share: Fraction, seed: str) -> list[ShardCheck]:
    """Return the share of the shards whose names, hashed with the seed, are smallest."""
    wanted = ceil(len(shards) * share)
    if wanted == len(shards):
        return shards
    draws = {one.name: hashlib.sha256(f"{seed} {one.name}".encode()).digest() for one in shards}
    chosen = set(sorted(draws, key=draws.__getitem__)[:wanted])
    return [one for one in shards if one.name in chosen]


def _attestation_findings(repository: Repository, shards: list[ShardCheck]) -> list[Finding]:
    """Return a finding for each object that was attested as bad, or not checked within the policy's maximum age."""
    store = root_store(repository.store)
    looks = read_attestations([store]).get(own_name(store), {})
    if not looks:
        got = "none: no scrub has been recorded here"
        action = f"run: shardkit scrub {shell_word(repository.url)}"
        return [Finding("attest/", "records of scrubs", got, action, is_damage=False)]
    table = read_table(store, repository.id)
    age_s = (table.policy if table else Policy()).max_scrub_age_s
    border = utc_text(time.time() - age_s)
    found: list[Finding] = []
    for name in (name for shard in shards for name in (shard.name, shard.index_name)):
        look = looks.get(name)
        if look is None or look.time < border:
            got = "never" if look is None else f"last at {look.time}"
            wanted = f"looked at within {duration_text(age_s)}"
            found.append(
                Finding(
                    name, wanted, got, f"run: shardkit scrub {shell_word(repository.url)}", is_damage=False
                )
            )
        elif look.is_bad:
            got = f"{look.result} at {look.time} ({look.by}, level {look.level})"
            found.append(
                Finding(name, "a good copy", got, f"run: shardkit repair {shell_word(repository.url)}")
            )
    return found
