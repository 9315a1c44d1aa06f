"""Erasing rows: their bytes go from every version of a repository, and nothing else does (SPEC.md §10).

plan → shards and manifests without the rows → commit → delete. The plan is durable before anything changes, so that a
killed erasure is finished by the next call; every step may be done twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise

from shardkit.dataset.equal_rows import find_equal_rows
from shardkit.dataset.erasing_copies import delete_from_copies, delete_parity
from shardkit.dataset.erasure_journal import ErasurePlan, ErasureReport, Journal, unfinished
from shardkit.dataset.rewriting import Rewriter
from shardkit.dataset.store_survey import StoreSurvey
from shardkit.errors import (
    CommitConflict,
    FormatError,
    IntegrityError,
    NotFoundError,
    ShardkitError,
    UsageError,
)
from shardkit.manifest import ADOPTED, Manifest, merge
from shardkit.repository.part_locations import find_part
from shardkit.repository.repository import Repository
from shardkit.repository.versions import Version, put_manifest
from shardkit.stores.file_operations import FOLDER

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
    """Find every copy of some rows, and what cannot be reached from here; nothing is written.

    Raises:
        UsageError: too many rows for one call, or no sample of the version would be left.
        IntegrityError: a row that is to be found elsewhere too cannot be read.
    """
    samples = sum(map(len, rows.values()))
    if samples > _MAX_ROWS:
        raise UsageError(f"{samples} samples are to be erased; give at most {_MAX_ROWS} at a time")
    if samples >= version.manifest.selected:
        raise UsageError("no sample would be left of this version; delete the root, or drop the ref, instead")
    if ADOPTED in version.manifest.features:
        raise UsageError(
            f"version {version.manifest.id} has shards outside of this root ({ADOPTED}), "
            "which are never written: remove the samples here without erasing, and erase them where they lie"
        )
    shards, notes = find_equal_rows(repository, version, rows)
    notes += [*_scratch(repository), *_ELSEWHERE]
    return ErasurePlan(request, reason, author, shards, tuple(notes), samples)


def erase_rows(repository: Repository, plan: ErasurePlan) -> ErasureReport:
    """Carry out a plan, from wherever an earlier attempt was killed.

    Raises:
        CommitConflict: others commit to the same refs again and again.
        CommitUnknown, StoreError: the store failed; the same call goes on later.
    """
    journal = Journal(repository, plan)
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
            continue  # somebody else's new version: it is looked at in the next round
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
    """Finish whatever was begun; request → report."""
    return {plan.request: erase_rows(repository, plan) for plan in unfinished(repository)}


def _rewrite_all(
    repository: Repository, survey: StoreSurvey, rewriter: Rewriter, report: ErasureReport
) -> dict[str, Manifest | None]:
    """Old id → what replaces it, for every manifest that still holds a row; all of it is put."""
    touched: dict[str, Manifest] = {}
    for identity, manifest in survey.manifests.items():
        try:
            if not manifest.parts and rewriter.touches(survey.table(manifest)).any():
                touched[identity] = manifest
        except (NotFoundError, IntegrityError, FormatError) as error:
            _add(report.not_reached, f"version {identity} cannot be read ({error})"[:500])
    changed: dict[str, Manifest | None] = {}
    for identity in _parents_first(touched):
        parent = touched[identity].parent
        if parent in changed:  # new versions name each other as the old ones did
            after = changed[parent]
            parent = after.id if after is not None else None
        elif parent in report.versions:
            parent = report.versions[parent] or None
        try:
            changed[identity] = rewriter.rewrite(survey, touched[identity], parent)
        except NotFoundError as error:
            note = f"version {identity} was committed while rows were erased: {error}"
            _add(report.not_reached, note[:500])
    changed |= _merge_again(repository, survey, changed, report)
    return changed


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
    """Merged versions of this root that have a part which was replaced."""
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
            _add(report.not_reached, f"merged version {identity} could not be merged again ({error})"[:500])
            continue
        if new_merged is not None:
            put_manifest(repository, new_merged, [])
        merged[identity] = new_merged
    return merged


def _note(
    survey: StoreSurvey, rewriter: Rewriter, changed: Mapping[str, Manifest | None], report: ErasureReport
) -> None:
    """Add to the report what is about to be done."""
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
    report.rewritten = sum(bool(new.digest) for new in replaced)
    report.dropped = sum(not new.digest for new in replaced)


def _commit(repository: Repository, plan: ErasurePlan, report: ErasureReport) -> None:
    """Move refs off the old versions and withdraw tags, until none is left on them."""
    for _ in range(_ATTEMPTS):
        head = repository.head()
        refs = {name: old for name, old in (head.refs if head else {}).items() if old in report.versions}
        tags = {name: old for name, old in (head.tags if head else {}).items() if old in report.versions}
        if not refs and not tags:
            return
        new_refs = {name: report.versions[old] or None for name, old in refs.items()}
        repository.commit(
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
    """What was committed, as the log has it: whoever was killed after a commit could not note it."""
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
    """Delete what the old versions needed and no other version does."""
    if not report.objects:
        return
    survey = StoreSurvey(repository)
    live = survey.live(without=set(report.versions))
    delete_parity(repository, report, live)
    for name in report.objects:
        if name not in live:
            repository.store.delete(name)
    report.objects = sorted(set(report.objects) - live)
    delete_from_copies(repository, report.objects, live, report.not_reached)


def _scratch(repository: Repository) -> list[str]:
    """Folders of unfinished builds in a local root: they hold encoded rows."""
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
