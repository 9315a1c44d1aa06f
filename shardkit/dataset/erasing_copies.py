"""What an erasure deletes beside objects of the root: parity that would give the rows back, other locations' copies."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.copies.holdings import Holdings
from shardkit.copies.placement import live_versions
from shardkit.dataset.erasure_journal import ErasureReport
from shardkit.errors import FormatError, IntegrityError, ShardkitError, StoreError
from shardkit.reading.inventory import walk_versions
from shardkit.reading.locations import ROOT_NAME
from shardkit.reading.parity.sets import SetRecord, sets_that_hold
from shardkit.repository.location_table import read_table
from shardkit.repository.repository import Repository
from shardkit.stores.objects import check_object
from shardkit.stores.store import object_name, parse_object_name, root_store

_SHARDS = ("tar", "tar.zst", "arrow")
_MOST_LOST = 2  # that a set gives back


def delete_parity(repository: Repository, report: ErasureReport, live: set[str]) -> None:
    """Delete the parity of every set that holds what is erased: it gives its members back (parity SPEC.md §6).

    Args:
        repository: open for writing.
        report: names of what is deleted; gets those of the parity.
        live: names of all objects that some version needs.

    Raises:
        IntegrityError: an object that a ref or tag needs is good nowhere, and this parity can still make it again.
    """
    store = repository.store
    if next(iter(store.list_after("parity/sets/")), None) is None and not any(
        name.endswith(".parity") for name in store.list_after("objects/")
    ):
        return
    gone = {parse_object_name(name)[0] for name in report.objects if name not in live}
    records = list(sets_that_hold(store, gone))
    versions = live_versions(repository) if records else []  # what no ref or tag names, nobody repairs
    named = {name for one in walk_versions(repository, versions) for name, _ in one.names()}
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
                f"parity that would go with the erased rows; run: shardkit repair {repository.url}, then shardkit "
                f"remove {repository.url} --resume"
            )


def delete_from_copies(
    repository: Repository, names: Sequence[str], live: set[str], not_reached: list[str]
) -> None:
    """Delete objects from every location of a root.

    Args:
        repository: open for writing.
        names: of objects that are deleted in the root.
        live: names of those that some version needs.
        not_reached: gets a note for what lies in a location and is named by nothing.

    Raises:
        StoreError: a location does not answer; the erasure goes on with the next call.
    """
    root = root_store(repository.store)
    table = read_table(root, repository.id)
    if table is None:
        return
    found = Holdings(repository, table.others)
    problems = dict(found.problems)
    for location, place in found.stores.items():
        if location == ROOT_NAME:
            continue
        try:
            held = set(place.store.list_after("objects/"))
            parity = sorted(
                {name for name in held if name.endswith(".parity")} | set(place.store.list_after("parity/"))
            )
            # A killed erasure may have forgotten which parity it took away; what the root lacks was taken away.
            for name in [*names, *(name for name in parity if root.head(name) is None)]:
                if name in held or name in parity:
                    place.store.delete(name)
            orphans = [name for name in held - live - set(names) if _may_hold_rows(name)]
        except ShardkitError as error:
            problems[location] = str(error)
            continue
        if orphans:
            note = f"{len(orphans)} objects in location {location} that no version names may hold the rows: shardkit gc"
            if note not in not_reached:
                not_reached.append(note)
    if problems:
        told = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise StoreError(
            f"{repository.url}: the rows are erased but for {len(problems)} locations ({told}); when they are back, "
            f"run: shardkit remove {repository.url} --resume; if they never will be: shardkit place {repository.url} "
            "--forget NAME, then --resume"
        )


def _may_hold_rows(name: str) -> bool:
    try:
        return parse_object_name(name)[1] in (*_SHARDS, "parity", "index")
    except FormatError:
        return False
