"""Erase rows: remove their bytes from every version of a repository, and nothing else (SPEC.md §10).

plan → shards and manifests without the rows → commit → delete.
The plan is durable before anything changes, so that the next call finishes a killed erasure; every step is
idempotent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardkit.copies.collecting import Collector
from shardkit.copies.placement import Holdings
from shardkit.copies.replicate import commit
from shardkit.dataset.rewriting import ErasureJournal, ErasurePlan, ErasureReport, Rewriter, unfinished_plans
from shardkit.dataset.store_survey import ROW_KINDS, StoreSurvey, find_equal_rows
from shardkit.errors import (
    CommitConflict,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    StoreError,
    UsageError,
)
from shardkit.extras import shell_word
from shardkit.manifest import Manifest, merge
from shardkit.reading.inventory import walk_versions
from shardkit.reading.objects import ROOT_NAME, check_object
from shardkit.reading.parity.sets import SetRecord, sets_that_hold
from shardkit.repository.garbage import MAX_NAMES
from shardkit.repository.log import LogEntry
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, find_part, put_manifest
from shardkit.stores.file_operations import FOLDER
from shardkit.stores.store import object_name, parse_object_name

_ATTEMPTS = 20
_MAX_ROWS = 10**6

_ELSEWHERE = (
    "copies of this root that are no locations of it (caches, backups, snapshots): erase there, or let them expire",
    "merged datasets in other roots that name an erased version: merge again with the new one",
    "the sources that the rows were built from: leave them out there before the next build",
    "what the disk keeps of deleted files until it is overwritten",
)


def plan_erasure(
    repository: Repository,
    version: Version,
    rows: Mapping[int, list[int]],
    *,
    request: str,
    reason: str,
    author: str,
) -> ErasurePlan:
    """Find every copy of some rows, and list what the erasure cannot reach; nothing is written."""
    samples = sum(map(len, rows.values()))
    if samples > _MAX_ROWS:
        raise UsageError(f"{samples} samples are to be erased; give at most {_MAX_ROWS} at a time")
    if samples >= version.manifest.selected:
        raise UsageError("no sample would be left of this version; delete the root, or drop the ref, instead")
    if version.manifest.adopted:
        raise UsageError(
            f"version {version.manifest.id} has adopted shards, outside of this root, "
            "which are never written: remove the samples here without erasing, and erase them where they lie"
        )
    _refuse_added_fields(repository)
    shards, notes = find_equal_rows(repository, version, rows)
    notes += [*_scratch(repository), *_ELSEWHERE]
    return ErasurePlan(
        request=request, reason=reason, author=author, notes=tuple(notes), samples=samples,
        shards=tuple((*pair, rows) for pair, rows in sorted(shards.items())),
    )  # fmt: skip


def _refuse_added_fields(repository: Repository) -> None:
    """Refuse a root with added fields: their shards are aligned row by row, and an erasure drops rows."""
    extended = next((one.id for one in StoreSurvey(repository).manifests.values() if one.added), None)
    if extended is not None:
        raise UsageError(
            f"version {extended} of {repository.url} has fields in shards of their own, from which no row is erased: "
            "write such versions into one (shardkit rebuild), delete the old ones (shardkit gc --delete), then erase"
        )


def erase_rows(repository: Repository, plan: ErasurePlan) -> ErasureReport:
    """Carry out a plan; continues after an attempt that was killed."""
    journal = ErasureJournal(repository, plan)
    told = journal.report()
    if told is not None:
        journal.finish(told)
        return told
    journal.begin()
    shards, report = journal.read()
    rewriter = Rewriter(repository, plan, shards)
    for _ in range(_ATTEMPTS):
        survey = StoreSurvey(repository)
        changed = _rewrite_all(repository, survey, rewriter, report)
        if not changed:
            break
        _note(survey, rewriter, changed, report)
        journal.write(rewriter.shards, report)
        try:
            _commit(repository, plan, report)
        except CommitConflict:
            continue  # another writer's new version is examined in the next round
        _delete(repository, report)
    else:
        raise CommitConflict(
            f"{repository.url}: others commit again and again; run the same command once more"
        )
    _commit(repository, plan, report)
    _delete(repository, report)
    _read_log(repository, plan, report)
    journal.finish(report)
    return report


def finish_erasures(repository: Repository) -> dict[str, ErasureReport]:
    """Finish all erasures that were begun and return their reports by request."""
    return {plan.request: erase_rows(repository, plan) for plan in unfinished_plans(repository)}


def _rewrite_all(
    repository: Repository, survey: StoreSurvey, rewriter: Rewriter, report: ErasureReport
) -> dict[str, Manifest | None]:
    """Put successors of all manifests that hold any of the rows, and return old id → successor."""
    touched: dict[str, Manifest] = {}
    for identity, manifest in survey.manifests.items():
        try:
            if manifest.added:
                _add(
                    report.not_reached,
                    f"version {identity} was extended while rows were erased: rebuild it, then erase again",
                )
            elif not manifest.parts and rewriter.touches(survey.table(manifest)).any():
                touched[identity] = manifest
        except (NotFoundError, IntegrityError, FormatError) as error:
            _pass_over(survey, identity, error, report)
    changed: dict[str, Manifest | None] = {}
    for identity in _parents_first(touched):
        parent = touched[identity].parent
        if parent in changed:  # successors keep the parent relations of the old versions
            after = changed[parent]
            parent = after.id if after is not None else None
        elif parent in report.versions:
            parent = report.versions[parent] or None
        try:
            changed[identity] = rewriter.rewrite(survey, touched[identity], parent)
        except (NotFoundError, IntegrityError, FormatError) as error:
            _pass_over(survey, identity, error, report)
    changed |= _merge_again(repository, survey, changed, report)
    return changed


def _pass_over(survey: StoreSurvey, identity: str, error: ShardkitError, report: ErasureReport) -> None:
    """Note a version that cannot be read and that nothing names; a damaged version that is named must be repaired."""
    survey.pass_over(identity, error)
    _add(report.not_reached, f"version {identity} cannot be read ({error})"[:500])


def _parents_first(touched: Mapping[str, Manifest]) -> list[str]:
    order: dict[str, None] = {}
    for identity in sorted(touched):
        chain = [identity]
        while (parent := touched[chain[-1]].parent) in touched and parent not in order:
            chain.append(str(parent))
        order |= dict.fromkeys(reversed(chain))
    return list(order)


def _merge_again(
    repository: Repository, survey: StoreSurvey, changed: Mapping[str, Manifest | None], report: ErasureReport
) -> dict[str, Manifest | None]:
    """Merge again the versions of this root that have a replaced part, and return old id → successor."""
    merged: dict[str, Manifest | None] = {}
    for identity, manifest in survey.manifests.items():
        if not any(part in changed or part in report.versions for _, part in manifest.parts):
            continue
        parts: list[tuple[str, Manifest]] = []
        try:
            for name, part in manifest.parts:
                new_id = report.versions.get(part)
                new = changed[part] if part in changed else survey.manifests.get(new_id or part)
                if new is None and part not in changed and new_id != "":
                    new = Manifest.from_bytes(find_part(repository, name, part).get_object(part, "manifest"))
                parts += [(name, new)] if new is not None else []
            new_merged = merge(parts, build=manifest.build) if parts else None
        except ShardkitError as error:
            _pass_over(survey, identity, error, report)
            continue
        if new_merged is not None:
            put_manifest(repository, new_merged, [])
        merged[identity] = new_merged
    return merged


def _note(
    survey: StoreSurvey, rewriter: Rewriter, changed: Mapping[str, Manifest | None], report: ErasureReport
) -> None:
    """Add to the report the versions and objects that are about to be replaced."""
    report.versions |= {identity: new.id if new else "" for identity, new in changed.items()}
    live = StoreSurvey(rewriter.repository).live(without=set(report.versions))
    needed = {name for identity in changed for name in survey.references(survey.manifests[identity])}
    for name in sorted(needed - live - set(report.objects)):
        stat = rewriter.repository.store.head(name)
        report.bytes += stat.size if stat is not None else 0
        report.objects.append(name)
    for name in sorted(rewriter.empty_strata)[:100]:
        _add(report.not_reached, f"stratum {name!r} has no sample left; its name stays in the manifests")
    replaced = list(rewriter.shards.values())
    report.dropped = replaced.count(None)
    report.rewritten = len(replaced) - report.dropped


def _commit(repository: Repository, plan: ErasurePlan, report: ErasureReport) -> None:
    """Move refs from the old versions to their successors and withdraw tags, until none names an old one."""
    for _ in range(_ATTEMPTS):
        head = repository.head()
        refs = {name: old for name, old in head.refs.items() if old in report.versions}
        tags = {name: old for name, old in head.tags.items() if old in report.versions}
        if not refs and not tags:
            return
        new_refs = {name: report.versions[old] or None for name, old in refs.items()}
        commit(
            repository,
            new_refs,
            message=f"erased {report.rows} rows: {plan.reason[:9_000]} {_mark(plan)}",
            author=plan.author,
            expected=refs,
            withdraw=tags,
        )
    raise CommitConflict(
        f"{repository.url}: others name the erased versions again and again; run the command again"
    )


def _mark(plan: ErasurePlan) -> str:
    return f"[erasure {plan.id}]"


def _read_log(repository: Repository, plan: ErasurePlan, report: ErasureReport) -> None:
    """Add the commits to the report from the log: an attempt killed after a commit could not record it."""
    entries = repository.log()
    for entry, before in pairwise(entries):
        if not entry.message.endswith(_mark(plan)):
            continue
        report.refs |= {
            name: entry.refs.get(name, "") for name, old in before.refs.items() if entry.refs.get(name) != old
        }
        report.tags |= {tag: old for tag, old in before.tags.items() if tag not in entry.tags}
        report.commits.append(entry.n)


def _delete(repository: Repository, report: ErasureReport) -> None:
    """Delete objects that the old versions needed and no other version needs, in all locations.

    As for garbage, the log announces the deletion, so that no commit that was prepared before names one of them.
    """
    if not report.objects:
        return
    work = Collector(repository)
    work.finish_killed(None)  # of an erasure that was killed, or of a collection, which stops
    noted, live = sorted(report.objects), set[str]()

    def needed() -> set[str]:
        return StoreSurvey(repository).live(without=set(report.versions))

    delete_parity(repository, report, needed())
    for first in range(0, len(noted), MAX_NAMES):

        def going(_head: LogEntry, first: int = first) -> list[str]:
            live.clear()
            live.update(needed())
            return [name for name in noted[first : first + MAX_NAMES] if name not in live]

        work.collect(going)
    report.objects = sorted(set(report.objects) - live)
    delete_leftovers(work, live, report.not_reached)


def _scratch(repository: Repository) -> list[str]:
    """Return notes on folders of unfinished builds in a local root: they may hold encoded rows."""
    folder = os.path.join(repository.url, FOLDER)
    if "://" in repository.url or not os.path.isdir(folder):
        return []
    return [
        f"{FOLDER}/{name} in {repository.url}, scratch of an unfinished build, may hold the rows: finish that build or "
        "delete the folder"
        for name in sorted(os.listdir(folder))
        if name.startswith("build-")
    ]


def _add(texts: list[str], text: str) -> None:
    if text not in texts:
        texts.append(text)


_MOST_LOST = 2  # objects that a set can restore


def delete_parity(repository: Repository, report: ErasureReport, live: set[str]) -> None:
    """Delete the parity of every set with an erased member: parity could restore it (parity SPEC.md §6)."""
    store = repository.store
    if next(iter(store.list_after("parity/sets/")), None) is None and not any(
        name.endswith(".parity") for name in store.list_after("objects/")
    ):
        return
    gone = {parse_object_name(name)[0] for name in report.objects if name not in live}
    records = list(sets_that_hold(store, gone))
    # only live versions are repaired from parity
    versions = repository.versions if records else []
    named = {name for one in walk_versions(repository.store, versions) for name, _ in one.names()}
    if records:
        _check_others(repository, records, named)
    for record in records:
        for digest in record.parity:
            name = object_name(digest, "parity")
            store.delete(name)
            if name not in report.objects:
                report.objects.append(name)
        store.delete(record.set.record_name)


def _check_others(repository: Repository, records: Sequence[SetRecord], named: set[str]) -> None:
    found = Holdings(repository)
    for record in records:
        members = (record.object_at(position).name for position in range(record.set.k + _MOST_LOST))
        lost = [
            name
            for name in members
            if not any(
                check_object(location.store, name, None, "stored").is_good
                for location in found.stores.values()
            )
        ]
        needed = [name for name in lost if name in named]
        if needed and len(lost) <= _MOST_LOST:
            raise IntegrityError(
                f"{needed[0]} is good in no location of {repository.url} that answers, and can be made again from "
                f"parity that would go with the erased rows; run: "
                f"shardkit repair {shell_word(repository.url)}, then shardkit "
                f"remove {shell_word(repository.url)} --resume"
            )


def delete_leftovers(work: Collector, live: set[str], not_reached: list[str]) -> None:
    """Delete parity that the root lacks from all copies, and note other objects there that may hold the rows.

    Raises:
        StoreError: A location failed; the message says how to continue.
    """
    problems, url = dict(work.done.unreachable), work.store.url
    for name, location in work.found.stores.items():
        if name == ROOT_NAME or name in problems:
            continue
        store = location.store
        try:
            held = set(store.list_after("objects/"))
            # A killed erasure may not have recorded the parity that it deleted; parity that the root lacks
            # was deleted.
            parity = {one for one in held if one.endswith(".parity")} | set(store.list_after("parity/"))
            gone = [one for one in sorted(parity) if work.store.head(one) is None]
            for one in gone:
                store.delete(one)
            orphans = [one for one in held.difference(live, gone) if _may_hold_rows(one)]
        except ShardkitError as error:
            problems[name] = str(error)
            continue
        if orphans:
            text = f"{len(orphans)} objects in location {name} that no version names may hold the rows: shardkit gc"
            _add(not_reached, text)
    if problems:
        told = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise StoreError(
            f"{url}: the rows are erased but for {len(problems)} locations ({told}); when they are back, run: "
            f"shardkit remove {shell_word(url)} --resume; if they never will be: shardkit place {shell_word(url)} "
            "--forget NAME, then --resume"
        )


def _may_hold_rows(name: str) -> bool:
    try:
        return parse_object_name(name)[1] in (*ROW_KINDS, "parity")
    except FormatError:
        return False
