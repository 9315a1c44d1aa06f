"""`shardkit gc`: find and delete objects that no version needs."""

from __future__ import annotations

from typing import Annotated

from shardkit.copies.collecting import GRACE_S, HISTORY_S, Collection, collect
from shardkit.extras import shell_word
from shardkit.ranges import duration_text as short_duration
from shardkit.ranges import parse_duration
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit.stores.store import root_store
from shardkit_tools import console, options
from shardkit_tools.building.job import abandoned_jobs, remove_job
from shardkit_tools.console import count_text
from shardkit_tools.options import option


def gc(
    root: options.RootArgument,
    delete: Annotated[
        bool, option("--delete", "Mark the objects that are found, and delete those marked before.")
    ] = False,
    grace: Annotated[
        str, option("--grace AGE", "Time from marking an object to deleting it, such as 7d.")
    ] = short_duration(GRACE_S),
    history: Annotated[
        str, option("--history AGE", "Keep versions that a ref or tag named within this time.")
    ] = short_duration(HISTORY_S),
    as_json: options.JsonFlag = False,
) -> None:
    """Find objects that no version needs, in all locations; with --delete, mark them, and delete them after --grace.

    Objects stay that refs and tags need or needed within --history, parity, and objects of unfinished builds.
    With --delete, the other objects are marked, and those marked longer ago than --grace are deleted, together with
    the scratch folders of builds that began before that. Builds may run meanwhile: a commit that needs an object which
    is being deleted is refused, and the build can be run again. Nothing is deleted while the log of a copy differs.

    Example: shardkit gc data/cats --delete
    """
    with console.long_work() as status:
        repository, grace_s = (
            Repository.open(parse_dataset_url(root)[0]),
            int(parse_duration(grace, "--grace")),
        )
        store = root_store(repository.store)
        builds = abandoned_jobs(store, grace_s)
        for prefix in builds if delete else ():
            remove_job(store, prefix)
        done = collect(
            repository,
            delete=delete,
            grace_s=grace_s,
            history_s=int(parse_duration(history, "--history")),
            report=lambda gone, total: status.show(f"deleted {gone:,} of {count_text(total, 'object')}"),
        )
    if as_json:
        console.print_json(console.plain(done) | {"abandoned_builds": builds})
    else:
        _print(done, root, delete=delete, grace=grace)
        if builds:
            gone = "removed" if delete else "found"
            console.print_line(
                f"{gone} the scratch of {count_text(len(builds), 'build')} that nobody went on with", "dim"
            )


def _print(done: Collection, root: str, *, delete: bool, grace: str) -> None:
    console.print_line(root, "bold")
    console.print_document(done)
    if delete and (done.marked or done.waiting):
        console.print_line(f"what stays unneeded is deleted by a round {grace} after it was marked", "dim")
    elif done.garbage and not delete:
        console.print_line(
            f"nothing was changed; to mark and delete: shardkit gc {shell_word(root)} --delete", "dim"
        )
