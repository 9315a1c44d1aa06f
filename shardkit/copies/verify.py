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

import dataclasses
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

from shardkit.copies.repair import log_conflicts
from shardkit.copies.shard_checks import LEVELS, Finding, Level, ShardCheck, failed_finding, finding_of
from shardkit.documents import sha256_digest, utc_text
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.manifest import Manifest, ShardTable, check_against
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
from shardkit.repository.locations import (
    SPARES,
    TABLES,
    LocationTable,
    own_name,
    read_table,
)
from shardkit.repository.log import (
    IDENTITY_NAME,
    LOG,
    MAX_IDENTITY_BYTES,
    LogEntry,
    check_succession,
    parse_dataset_url,
)
from shardkit.repository.policy import Policy
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
    work = _Verifier(root)
    try:
        repository = Repository.open(root, read_only=True, alone=True)
    except (IntegrityError, FormatError) as error:
        work.failed(IDENTITY_NAME, "the identity of the repository", error)
    else:
        root = work.root = repository.url
        work.check_documents(repository.store, repository.id)
        work.check_log(repository, ref)
        for manifest in work.versions.values():
            work.check_version(repository, manifest, level)
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
    """Checks of the log and the metadata, which collect findings and the shards to check."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.findings: list[Finding] = []
        self.versions: dict[str, str] = {}
        self.entries = self.metadata = 0
        self.shards: dict[tuple[str, str], ShardCheck] = {}
        self._seen: set[str] = set()

    def failed(self, name: str, expected: str, error: ShardkitError, *, rows: int = 0) -> None:
        self.findings.append(failed_finding(self.root, name, expected, error, rows=rows))

    def failed_document(self, name: str, expected: str, error: ShardkitError) -> None:
        """Add a finding of damage: a repair replaces a document that cannot be read, even a symbolic link."""
        got = "nothing of that name" if isinstance(error, NotFoundError) else str(error)
        self.findings.append(Finding(name, expected, got, f"run: shardkit repair {self.root}"))

    def check_log(self, repository: Repository, ref: str | None) -> None:
        """Check every entry and the chain, and set `versions` from the newest good entry."""
        store = repository.store
        numbers = sorted(n for n in map(LOG.number, store.list_after(LOG.prefix)) if n is not None)
        newest: LogEntry | None = None
        earlier: tuple[LogEntry, bytes] | None = None
        for number in range(1, (numbers[-1] if numbers else 0) + 1):
            name = LOG.name(number)
            try:
                entry, data = LOG.read(store, number, repository.id)
                if earlier is not None:
                    check_succession(*earlier, entry, name)
                if number == 1 and entry.previous != sha256_digest(
                    store.get(IDENTITY_NAME, max_bytes=MAX_IDENTITY_BYTES)
                ):
                    raise IntegrityError(f"it follows another {IDENTITY_NAME}")
            except ShardkitError as error:
                finding = failed_finding(self.root, name, f"log entry {number}", error)
                if finding.is_damage:
                    finding = dataclasses.replace(finding, action=f"run: shardkit repair {self.root}")
                self.findings.append(finding)
                earlier = None
                continue
            self.entries += 1
            newest, earlier = entry, (entry, data)
        names = {**newest.tags, **newest.refs} if newest else {}
        if ref is None:
            self.versions = dict(sorted(names.items()))
        elif ref.startswith("sha256:"):
            self.versions = {ref: ref}
        elif ref in names:
            self.versions = {ref: names[ref]}
        elif not self.findings:
            shown = ", ".join(sorted(names)[:10]) or "none"
            raise NotFoundError(f"{repository.url} has no ref or tag {ref!r}; there are: {shown}")

    def check_documents(self, store: Store, repository_id: str) -> None:
        """Check the location tables, and that no copy's log has an entry that the root lacks."""
        table: LocationTable | None = None
        rows = (TABLES, SPARES) if own_name(store) == ROOT_NAME else (TABLES,)
        listed = [n for row in rows for n in map(row.number, store.list_after(row.prefix)) if n is not None]
        for row in rows:
            for number in range(1, max(listed, default=0) + 1):
                try:
                    table = row.read(store, number, repository_id)[0]
                except ShardkitError as error:
                    self.failed_document(row.name(number), f"location table {number}", error)
        if table is None or own_name(store) != ROOT_NAME:
            return
        # an old copy, or one that does not answer, is no damage of the root
        for conflict in log_conflicts(store, table):
            action = f"run: shardkit repair {store.url}"
            self.findings.append(Finding(LOG.prefix, "the newest log of all copies", conflict, action))

    def check_parity(self, repository: Repository, inventory: Inventory, level: Level) -> None:
        """Check the documents of a version's parity sets, and the parity objects of this location."""
        store, version = repository.store, inventory.manifest.id
        try:
            k = None if inventory.manifest.parts else read_members(store, version)
            sets = [] if k is None else known_sets(store, inventory, k, [store])
        except ShardkitError as error:
            self.failed_document(version_record_name(version), "parity of a version", error)
            return
        is_root = own_name(store) == ROOT_NAME
        for one in sets:
            try:
                record = read_record(store, one)
                if record is None:
                    raise NotFoundError(one.record_name)
            except ShardkitError as error:
                self.failed_document(one.record_name, f"parity set {one.id}", error)
                continue
            for position in (one.k, one.k + 1):
                parity = record.object_at(position)
                if parity.name in self._seen or (not is_root and store.head(parity.name) is None):
                    continue
                self._seen.add(parity.name)
                self.metadata += 1
                depth: Depth = "list" if level in ("list", "attested") else "read"
                found = check_object(store, parity.name, parity.size, depth)
                if not found.is_good:
                    self.findings.append(finding_of(self.root, parity.name, found))

    def check_version(self, repository: Repository, manifest_id: str, level: Level) -> None:
        """Check the metadata of a version, its added fields and its parts, and collect their shards."""
        if manifest_id in self._seen:
            return
        self._seen.add(manifest_id)
        self.metadata += 1
        name = object_name(manifest_id, "manifest")
        try:
            inventory = take_inventory(repository.store, manifest_id, unreadable=self.failed)
        except ShardkitError as error:
            self.failed(name, manifest_id, error)
            return
        manifest = inventory.manifest
        self._check_sides(repository, manifest)
        for part_name, part in manifest.parts:
            try:
                holder = find_part(repository, part_name, part)
            except ShardkitError as error:
                where, expected = object_name(part, "manifest"), f"part {part_name!r} of {manifest_id}"
                action = "put the part back, or merge again with the place where it is now"
                self.findings.append(Finding(where, expected, str(error), action, is_damage=False))
            else:
                self.check_version(holder, part, level)
        for added in manifest.added:
            self.check_version(repository, added, level)
        store = with_adopted_files(repository.store, manifest)
        rows = zip(inventory.shards, inventory.indexes, inventory.shard_rows, strict=True)
        for found, index, count in rows:
            shard = ShardCheck(store, manifest, found.name, found.size, index.name, index.size, count)
            self.shards.setdefault((found.name, index.name), shard)
        for table in inventory.tables:
            self._check_selections(repository, table)
        self.check_parity(repository, inventory, level)
        if len(inventory.tables) == len(manifest.pages) and not manifest.parts:
            try:
                check_against(manifest, ShardTable.concatenate(inventory.tables))
            except ShardkitError as error:
                self.failed(name, "totals equal to those of its pages", error)

    def _check_sides(self, repository: Repository, manifest: Manifest) -> None:
        sides = list(side_objects(manifest))
        self.metadata += len(manifest.pages) + len(sides)
        for digest, kind, size in sides:
            try:
                repository.get_object(digest, kind, size)
            except ShardkitError as error:
                self.failed(object_name(digest, kind), digest, error)

    def _check_selections(self, repository: Repository, table: ShardTable) -> None:
        for shard in np.flatnonzero(table.has_selection).tolist():
            self.metadata += 1
            try:
                load_shard_selection(repository, table, shard)
            except ShardkitError as error:
                digest = table.selection_digest_text(shard) or ""
                rows = int(table.rows[shard])
                self.failed(object_name(digest, "selection"), digest, error, rows=rows)


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
        action = f"run: shardkit scrub {repository.url}"
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
            found.append(Finding(name, wanted, got, f"run: shardkit scrub {repository.url}", is_damage=False))
        elif look.is_bad:
            got = f"{look.result} at {look.time} ({look.by}, level {look.level})"
            found.append(Finding(name, "a good copy", got, f"run: shardkit repair {repository.url}"))
    return found
