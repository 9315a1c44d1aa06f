"""Options of the commands that make versions: where copies of the root go, and what the commit waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from shardkit.errors import UsageError
from shardkit.storage import Repository
from shardkit.storage.policy import LocationRecord, Policy, read_table
from shardkit.storage.policy.opening import root_store
from shardkit.storage.replicating import Pace, place, replicate
from shardkit.storage.replicating.needed import live_versions, unknown_strata
from shardkit.storage.replicating.placing import Change
from shardkit.storage.replicating.protecting import encode_parity
from shardkit_tools.console import bytes_text, print_line

__all__ = [
    "CopiesOption",
    "CriticalOption",
    "LocationOption",
    "ModeOption",
    "ParityOption",
    "begin_copies",
    "finish_copies",
    "print_copies",
]

_PANEL = "Copies"

LocationOption = Annotated[
    list[str] | None,
    typer.Option(
        "--location",
        metavar="NAME=URL",
        rich_help_panel=_PANEL,
        help="Another place for copies: NAME=URL[,domain=…][,rank=…][,weight=…]; may be repeated.",
    ),
]

CopiesOption = Annotated[
    int | None,
    typer.Option(
        "--copies",
        min=1,
        metavar="N",
        rich_help_panel=_PANEL,
        help="In distinct failure domains, ROOT's among them.",
    ),
]

CriticalOption = Annotated[
    list[str] | None,
    typer.Option(
        "--critical",
        metavar="STRATUM=N",
        rich_help_panel=_PANEL,
        help="More copies of shards with this stratum; may be repeated.",
    ),
]

ParityOption = Annotated[
    str | None,
    typer.Option(
        "--parity",
        metavar="K+2|none",
        rich_help_panel=_PANEL,
        help="Sets of K shards with 2 parity objects, such as 8+2.",
    ),
]

ModeOption = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="sync|async|hybrid",
        rich_help_panel=_PANEL,
        help="What a commit waits for: all copies; none; those of metadata and critical strata.",
    ),
]
"""When a commit counts as done."""


def begin_copies(
    root: str,
    *,
    location: Sequence[str] | None,
    copies: int | None,
    critical: Sequence[str] | None,
    parity: str | None,
    mode: str | None,
    single_writer: bool = False,
    dry_run: bool = False,
) -> None:
    """Record what a command line says of copies, before anything is built; nothing where it says nothing.

    Raises:
        ConfigurationError, UsageError: it cannot be carried out.
        StoreError: a location cannot be written.
    """
    if all(one is None for one in (location, copies, critical, parity, mode)):
        return
    locations = tuple(LocationRecord.parse(text) for text in location or ())

    def policy(before: Policy) -> Policy:
        return before.changed(copies=copies, critical=critical, parity=parity, mode=mode)

    if dry_run:
        policy(Policy())
        return
    if any(one.name == "root" for one in locations):
        raise UsageError("--location root=…: the root is where ROOT is; give the others other names")
    repository = Repository.create(root, single_writer=single_writer)
    place(repository, Change(locations=locations, policy=policy), message="told by a build")


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
        encode_parity(repository, table, live_versions(repository), Pace())
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
