"""The part of an erasure that is outside of the root: copies in other locations."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.copies.facts import open_all
from shardkit.errors import FormatError, ShardkitError, StoreError
from shardkit.reading.located_store import root_store
from shardkit.reading.locations import ROOT_NAME
from shardkit.repository.location_table import read_table
from shardkit.repository.repository import Repository
from shardkit.stores.store import parse_object_name

_SHARDS = ("tar", "tar.zst", "arrow")


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
    facts = open_all(repository, table.others)
    problems = dict(facts.problems)
    for location, place in facts.stores.items():
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
