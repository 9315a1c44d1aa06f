"""Whether a repository still holds what was written: the log, and every object that its versions name.

Results, not messages: each thing that is wrong is a `Finding`. Levels, each with all that the ones before it
see:

    list       every object exists and has its size
    attested   and somebody read it and found it good, within the policy's age
    stored     and the checksums that the store keeps are those of the names: no byte is fetched. Files of this machine
               keep none, and are read; a store behind a network that keeps none leaves it open (exit code 3)
    read       and every byte is what was written
    decode     and every sample decodes

The log, manifests and pages are read at every level; they are small, and nothing else can be found without
them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Literal

from shardkit.copies.policy import Policy, read_table
from shardkit.copies.policy.durations import duration_text
from shardkit.copies.policy.opening import own_name, root_store
from shardkit.copies.repairing import read_looks
from shardkit.dataset.object_checks import (
    Finding,
    ShardCheck,
    check_selections,
    failed,
    shard_checks,
    side_objects,
)
from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError, UsageError
from shardkit.exit_codes import ExitCode
from shardkit.formats.digest import sha256_digest
from shardkit.manifest import MAX_MANIFEST_BYTES, Manifest, ShardTable, check_against, unpack_page
from shardkit.reading.adopted import with_adopted
from shardkit.repository.dataset_url import parse_dataset_url
from shardkit.repository.identity import IDENTITY_NAME
from shardkit.repository.log import (
    LOG_PREFIX,
    MAX_ENTRY_BYTES,
    LogEntry,
    check_succession,
    entry_name,
    entry_number,
)
from shardkit.repository.part_locations import find_part
from shardkit.repository.repository import Repository
from shardkit.stores.objects import object_name
from shardkit.stores.store import Store
from shardkit.stores.utc import utc_text

__all__ = ["LEVELS", "Finding", "Level", "Verification", "verify"]

Level = Literal["list", "attested", "stored", "read", "decode"]
"""How deep to look; `LEVELS` from the least to the most."""

LEVELS: tuple[Level, ...] = ("list", "attested", "stored", "read", "decode")
"""Listed; vouched for by a scrub; the checksum that the store keeps; every byte; every sample decoded."""

_RESTORE_LOG = (
    "restore it from a copy of the root; without one, its objects are still named by the good entries"
)


@dataclass(frozen=True)
class Verification:
    """What `verify` saw.

    Attributes:
        url: of the repository.
        level: that was asked for.
        versions: name (ref or tag, or the id itself) → manifest id, of every version that was looked at.
        entries: log entries that were read.
        objects: number of manifests, pages, shards, indexes and selections that were looked at.
        shards_seen: of `shards` different ones, how many were looked at (all, without sampling).
        stored_bytes: bytes of the shards that were read.
        seed: of the sample of shards; the same seed picks the same ones again.
        damaged: what is not as it was written.
        unknown: what could not be looked at.
    """

    url: str
    level: Level
    versions: dict[str, str]
    entries: int
    objects: int
    shards: int
    shards_seen: int
    stored_bytes: int
    seed: str
    damaged: tuple[Finding, ...]
    unknown: tuple[Finding, ...]

    @property
    def exit_code(self) -> ExitCode:
        """Damage comes before what could not be looked at."""
        return ExitCode.DAMAGED if self.damaged else ExitCode.UNCHECKED if self.unknown else ExitCode.DONE


@dataclass
class _Survey:
    """What the metadata names, and what was wrong with it."""

    findings: list[Finding] = field(default_factory=list)
    entries: int = 0
    metadata: int = 0
    shards: dict[tuple[str, str], ShardCheck] = field(default_factory=dict)


def verify(
    url: str | os.PathLike[str],
    *,
    level: Level = "read",
    sample: Fraction | float | str = 1,
    seed: str | None = None,
    jobs: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Verification:
    """Verify a dataset where it lies. Nothing is written.

    Args:
        url: ``ROOT`` for all refs and tags, ``ROOT@REF`` for one version.
        level: how deep; see above.
        sample: which share of the shards is looked at, above 0, at most 1; all metadata always is.
        seed: of the sample; by default a new one each time, so that repeated samples see different shards.
        jobs: how many shards are read at once; by default one per processor.
        report: called with (shards done, shards in all).

    Raises:
        NotFoundError: there is no repository, or no such version.
        UsageError: an unknown level, or a share out of range.
    """
    share = Fraction(str(sample))
    if level not in LEVELS or not 0 < share <= 1:
        raise UsageError(
            f"level={level!r}, sample={sample}: expected one of {', '.join(LEVELS)} and a share in (0, 1]"
        )
    root, ref = parse_dataset_url(url)
    survey, seed = _Survey(), seed if seed is not None else secrets.token_hex(4)
    try:
        repository = Repository.open(root, read_only=True, alone=True)
    except (IntegrityError, FormatError) as error:
        survey.findings.append(failed(IDENTITY_NAME, "the identity of the repository", error))
        return _conclude(root, level, {}, survey, [], seed)
    head = _check_log(repository, survey)
    versions = _versions(repository, head, ref)
    seen: set[str] = set()
    for manifest in versions.values():
        _survey_manifest(repository, manifest, survey, seen)
    chosen = _choose(list(survey.shards.values()), share, seed)
    if level == "attested":
        survey.findings += _attested(repository, chosen)
    survey.findings += _check_shards(chosen, level, jobs or os.cpu_count() or 1, report)
    return _conclude(repository.url, level, versions, survey, chosen, seed)


def _is_read(check: ShardCheck, level: Level) -> bool:
    return level in ("read", "decode") or (level == "stored" and check.is_file)


def _conclude(
    url: str, level: Level, versions: dict[str, str], survey: _Survey, chosen: list[ShardCheck], seed: str
) -> Verification:
    unique = list(dict.fromkeys(survey.findings))
    return Verification(
        url=url,
        level=level,
        versions=versions,
        entries=survey.entries,
        objects=survey.metadata + 2 * len(chosen),
        shards=len(survey.shards),
        shards_seen=len(chosen),
        stored_bytes=sum(check.size for check in chosen if _is_read(check, level)),
        seed=seed,
        damaged=tuple(finding for finding in unique if finding.is_damage),
        unknown=tuple(finding for finding in unique if not finding.is_damage),
    )


def _check_log(repository: Repository, survey: _Survey) -> LogEntry | None:
    """Check every entry and the chain; the newest good entry."""
    store = repository.store
    numbers = sorted(n for n in map(entry_number, store.list_after(LOG_PREFIX)) if n is not None)
    newest: LogEntry | None = None
    earlier: tuple[LogEntry, bytes] | None = None
    for number in range(1, (numbers[-1] if numbers else 0) + 1):
        name = entry_name(number)
        try:
            data = store.get(name, max_bytes=MAX_ENTRY_BYTES)
            entry = LogEntry.from_bytes(data, name)
            _check_place(store, entry, number, repository.id, earlier)
        except ShardkitError as error:
            finding = failed(name, f"log entry {number}", error)
            survey.findings.append(
                Finding(name, finding.expected, finding.got, _RESTORE_LOG, is_damage=finding.is_damage)
            )
            earlier = None
            continue
        survey.entries += 1
        newest, earlier = entry, (entry, data)
    return newest


def _check_place(
    store: Store, entry: LogEntry, number: int, repository: str, earlier: tuple[LogEntry, bytes] | None
) -> None:
    if entry.n != number or entry.repository != repository:
        raise IntegrityError(f"it is entry {entry.n} of repository {entry.repository}")
    if earlier is not None:
        check_succession(*earlier, entry, entry_name(number))
    if number == 1 and entry.previous != sha256_digest(store.get(IDENTITY_NAME, max_bytes=MAX_ENTRY_BYTES)):
        raise IntegrityError(f"it follows another {IDENTITY_NAME}")


def _versions(repository: Repository, head: LogEntry | None, ref: str | None) -> dict[str, str]:
    names = {**head.tags, **head.refs} if head else {}
    if ref is None:
        return dict(sorted(names.items()))
    if ref.startswith("sha256:"):
        return {ref: ref}
    if ref not in names:
        shown = ", ".join(sorted(names)[:10]) or "none"
        raise NotFoundError(f"{repository.url} has no ref or tag {ref!r}; there are: {shown}")
    return {ref: names[ref]}


def _survey_manifest(repository: Repository, manifest_id: str, survey: _Survey, seen: set[str]) -> None:
    """Read a manifest and its pages, and add its shards to the survey."""
    if manifest_id in seen:
        return
    seen.add(manifest_id)
    survey.metadata += 1
    name = object_name(manifest_id, "manifest")
    try:
        manifest = Manifest.from_bytes(
            repository.get_object(manifest_id, "manifest", max_bytes=MAX_MANIFEST_BYTES)
        )
    except ShardkitError as error:
        survey.findings.append(failed(name, manifest_id, error))
        return
    for digest, kind, size in side_objects(manifest):
        survey.metadata += 1
        try:
            repository.get_object(digest, kind, size)
        except ShardkitError as error:
            survey.findings.append(failed(object_name(digest, kind), digest, error))
    for part_name, part in manifest.parts:
        try:
            holder = find_part(repository, part_name, part)
        except ShardkitError as error:
            name, expected = object_name(part, "manifest"), f"part {part_name!r} of {manifest_id}"
            action = "put the part back, or merge again with the place where it is now"
            survey.findings.append(Finding(name, expected, str(error), action, is_damage=False))
            continue
        _survey_manifest(holder, part, survey, seen)
    tables = list(_tables(repository, manifest, survey))
    for table in tables:
        for check in shard_checks(with_adopted(repository, manifest), manifest, table):
            survey.shards.setdefault((check.name, check.index_name), check)
        for findings in check_selections(repository, table):
            survey.metadata += 1
            survey.findings += findings
    if len(tables) == len(manifest.pages) and not manifest.parts:
        try:
            check_against(manifest, ShardTable.concatenate(tables))
        except ShardkitError as error:
            survey.findings.append(failed(name, "totals equal to those of its pages", error))


def _tables(repository: Repository, manifest: Manifest, survey: _Survey) -> Iterator[ShardTable]:
    for page in manifest.pages:
        survey.metadata += 1
        try:
            yield unpack_page(repository.get_object(page.digest, "page", page.size), page)
        except ShardkitError as error:
            survey.findings.append(failed(object_name(page.digest, "page"), page.digest, error))


def _choose(checks: list[ShardCheck], share: Fraction, seed: str) -> list[ShardCheck]:
    """The share of the shards whose names, hashed with the seed, come first."""
    wanted = ceil(len(checks) * share)
    if wanted == len(checks):
        return checks
    draws = {check.name: hashlib.sha256(f"{seed} {check.name}".encode()).digest() for check in checks}
    chosen = set(sorted(draws, key=draws.__getitem__)[:wanted])
    return [check for check in checks if check.name in chosen]


def _check_shards(
    checks: list[ShardCheck], level: Level, jobs: int, report: Callable[[int, int], None] | None
) -> list[Finding]:
    depth = {
        "list": ShardCheck.there,
        "attested": ShardCheck.there,
        "stored": ShardCheck.stored,
        "read": ShardCheck.read,
        "decode": ShardCheck.decode,
    }[level]
    found: list[Finding] = []
    with ThreadPoolExecutor(jobs, thread_name_prefix="shardkit-verify") as pool:
        for done, findings in enumerate(pool.map(depth, checks), 1):
            found += findings
            if report is not None:
                report(done, len(checks))
    return found


def _attested(repository: Repository, checks: list[ShardCheck]) -> list[Finding]:
    """What nobody has looked at within the policy's age, and what was bad when somebody did."""
    store = root_store(repository.store)
    looks = read_looks(store).get(own_name(store), {})
    if not looks:
        got = "none: no scrub has been recorded here"
        action = f"run: shardkit scrub {repository.url}"
        return [Finding("attest/", "records of scrubs", got, action, is_damage=False)]
    table = read_table(store, repository.id)
    age_s = (table.policy if table else Policy()).max_scrub_age_s
    border = utc_text(time.time() - age_s)
    found: list[Finding] = []
    for name in (name for check in checks for name in (check.name, check.index_name)):
        look = looks.get(name)
        if look is None or look.time < border:
            got = "never" if look is None else f"last at {look.time}"
            wanted = f"looked at within {duration_text(age_s)}"
            found.append(Finding(name, wanted, got, f"run: shardkit scrub {repository.url}", is_damage=False))
        elif look.is_bad:
            got = f"{look.result} at {look.time} ({look.by}, level {look.level})"
            found.append(Finding(name, "a good copy", got, f"run: shardkit repair {repository.url}"))
    return found
