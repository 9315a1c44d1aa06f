"""What commands say about copies: the policy that comes with a version, how far it is met, what each location has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.copies.pacing import RateLimiter
from shardkit.copies.place import Change, place
from shardkit.copies.placement import live_versions, unknown_strata
from shardkit.copies.replicate import Replication, encode_parity, replicate
from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit.reading.located_store import root_store
from shardkit.repository.location_table import LocationRecord
from shardkit.repository.policy import Policy
from shardkit.repository.repository import Repository
from shardkit.repository.table_commits import read_table
from shardkit_tools.console import bytes_text, clean, count_text, print_line, print_table

__all__ = ["begin_copies", "finish_copies", "print_copies", "print_lag", "print_locations"]


def begin_copies(
    root: str,
    location: Sequence[str] | None,
    wanted: Mapping[str, Any],
    *,
    single_writer: bool = False,
    dry_run: bool = False,
) -> None:
    """Record what a command line says of copies, before anything is built; nothing where it says nothing.

    Args:
        root: of the dataset.
        location: further places.
        wanted: see `Policy.changed`; None leaves a part as it is.
        single_writer: nobody else writes this root.
        dry_run: check only.

    Raises:
        ConfigurationError, UsageError: it cannot be carried out.
        StoreError: a location cannot be written.
    """
    if location is None and all(one is None for one in wanted.values()):
        return
    locations = tuple(LocationRecord.parse(text) for text in location or ())
    if dry_run:
        Policy().changed(**wanted)
        return
    if any(one.name == "root" for one in locations):
        raise UsageError("--location root=…: the root is where ROOT is; give the others other names")
    repository = Repository.create(root, single_writer=single_writer)
    place(
        repository,
        Change(locations=locations, policy=lambda before: before.changed(**wanted)),
        message="told by a build",
    )


def finish_copies(root: str) -> int | None:
    """After a commit: encode parity where it was not waited for; the bytes below policy, None without locations.

    Raises:
        StoreError: the root does not answer.
    """
    repository = Repository.open(root)
    table = read_table(repository.store, repository.id)
    if table is None:
        return None
    if table.policy.mode != "async":
        encode_parity(repository, table, live_versions(repository), RateLimiter())
    return replicate(repository, dry_run=True).lag_before


def print_copies(root: str, lag: int | None) -> None:
    """What is left to be copied, and critical strata that are in no version: nothing is protected by them."""
    if lag is None:
        return
    if lag:
        print_line(f"copies: {bytes_text(lag)} below policy; run: shardkit replicate {root}")
    else:
        print_line("copies: the policy is met")
    repository = Repository.open(root, read_only=True)
    table = read_table(root_store(repository.store), repository.id)
    for name, hint in (unknown_strata(repository, table) if table else {}).items():
        print_line(
            f"critical stratum {name!r} is in no version; {hint}; to name another: shardkit place {root} "
            "--critical NAME=N",
            "yellow",
        )


def print_locations(done: Replication) -> None:
    """A table of locations, and what they said."""
    print_table(
        [
            "location",
            "domain",
            "state",
            ">copied",
            ">bytes",
            ">commits",
            ">lacks",
            ">bytes lacking",
            "*where",
        ],
        [
            (
                one.name,
                clean(one.domain),
                one.state,
                count_text(one.copied),
                bytes_text(one.copied_bytes),
                count_text(one.commits),
                count_text(one.lag),
                bytes_text(one.lag_bytes),
                clean(one.url),
            )
            for one in done.locations
        ],
    )
    for one in done.locations:
        if one.problem:
            print_line(f"{one.name}: {clean(one.problem)}", "yellow")


def print_lag(done: Replication, *, dry_run: bool = False) -> None:
    """The lag before and after."""
    if dry_run:
        print_line(
            f"lag: {bytes_text(done.lag_before)} below policy, in {done.objects:,} missing copies",
            "bold",
        )
        return
    state = "the policy is met" if done.exit_code == ExitCode.DONE else "the policy is not met"
    print_line(
        f"lag: {bytes_text(done.lag_before)} below policy before, {bytes_text(done.lag_after)} after: {state}",
        "bold",
    )
