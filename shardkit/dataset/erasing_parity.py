"""The parity of erased rows: it goes before they do, and never while anything else lives by it."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.copies.facts import open_recorded
from shardkit.copies.placement import live_versions
from shardkit.dataset.erasure_journal import ErasureReport
from shardkit.errors import IntegrityError
from shardkit.reading.inventory import walk_versions
from shardkit.reading.parity.sets import SetRecord, sets_that_hold
from shardkit.repository.repository import Repository
from shardkit.stores.objects import check_object
from shardkit.stores.store import object_name, parse_object_name

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
    facts = open_recorded(repository)
    for record in records:
        members = (record.object_at(position).name for position in range(record.set.k + _MOST_LOST))
        lost = [
            name
            for name in members
            if not any(
                check_object(location.store, name, None, "stored").is_good
                for location in facts.stores.values()
            )
        ]
        needed = [name for name in lost if name in named]
        if needed and len(lost) <= _MOST_LOST:
            raise IntegrityError(
                f"{needed[0]} is good in no location of {repository.url} that answers, and can be made again from "
                f"parity that would go with the erased rows; run: shardkit repair {repository.url}, then shardkit "
                f"remove {repository.url} --resume"
            )
