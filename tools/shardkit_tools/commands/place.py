"""`shardkit place`: where copies belong, and the bytes moved after that."""

from __future__ import annotations

import functools
from typing import Annotated, Any

from shardkit.copies.place import GRACE_S, PlacementChange, Placing, promote, undo
from shardkit.copies.place import place as place_root
from shardkit.errors import UsageError
from shardkit.extras import shell_word
from shardkit.ranges import duration_text as short_duration
from shardkit.ranges import parse_duration
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.policy import LocationRecord
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, duration_text
from shardkit_tools.copies import running
from shardkit_tools.options import option

_PLACEMENT = functools.partial(option, panel="Placement")
_RUNNING = functools.partial(option, panel="Running")


def place(
    root: options.RootArgument,
    location: options.LocationOption = None,
    empty: Annotated[
        list[str] | None, _PLACEMENT("--empty NAME", "Move everything away from this location.")
    ] = None,
    forget: Annotated[
        list[str] | None,
        _PLACEMENT(
            "--forget NAME", "This location is lost: make its copies elsewhere, and never look at it again."
        ),
    ] = None,
    refill: Annotated[
        list[str] | None,
        _PLACEMENT("--refill NAME", "The disk of this location was replaced: fill it again."),
    ] = None,
    copies: options.CopiesOption = None,
    critical: options.CriticalOption = None,
    parity: options.ParityOption = None,
    mode: options.ModeOption = None,
    max_scrub_age: Annotated[
        str | None,
        _PLACEMENT("--max-scrub-age AGE", "Age of the last check at which a copy is due for the next one."),
    ] = None,
    undone: Annotated[bool, _PLACEMENT("--undo", "Return to the placement before the newest one.")] = False,
    promoted: Annotated[
        bool, _PLACEMENT("--promote", "Make ROOT, a copy, the root, because its root is lost for good.")
    ] = False,
    grace: Annotated[
        str, _RUNNING("--grace AGE", "How long surplus copies stay, such as 7d, 12h.")
    ] = short_duration(GRACE_S),
    bandwidth: options.BandwidthOption = None,
    between: options.BetweenOption = None,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    dry_run: Annotated[bool, _RUNNING("--dry-run", "Only print what would be done.")] = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Say where copies of ROOT belong, and move them there.

    Copies are made and verified first, then the new placement is committed, and only after --grace are copies deleted
    that are not needed any more, each with proof that enough good ones are left. Without any option of Placement or
    Copies: show the placement, and delete what is due. After Ctrl-C or a crash the same command continues.

    Exit codes: 0 done, 3 a location did not get the log, as when the log of the root lost entries.

    Example: shardkit place data/cats --location mirror=s3://bucket/cats,domain=aws --copies 2
    """
    if promoted:
        promote(parse_dataset_url(root)[0], copies=copies, message=message, author=author)
        copies = None
    policy: dict[str, Any] = {
        "copies": copies,
        "critical": critical,
        "parity": parity,
        "mode": mode,
        "max_scrub_age": max_scrub_age,
    }
    repository = Repository.open(parse_dataset_url(root)[0])
    if undone and any(one is not None for one in (location, empty, forget, refill, *policy.values())):
        raise UsageError("--undo goes back to the placement before; it takes no other change")
    change = PlacementChange(
        locations=tuple(LocationRecord.parse(text) for text in location or ()),
        empty=tuple(empty or ()),
        forget=tuple(forget or ()),
        refill=tuple(refill or ()),
        policy=lambda before: before.changed(**policy),
    )
    seconds = int(parse_duration(grace, "--grace"))
    with running(bandwidth, between) as work:
        settings: dict[str, Any] = {
            "pace": work.pace,
            "dry_run": dry_run,
            "grace_s": seconds,
            "report": work.report,
            "author": author,
            **({"message": message} if message else {}),
        }
        placing = undo(repository, **settings) if undone else place_root(repository, change, **settings)
    page = functools.partial(_print, placing, root, dry_run=dry_run)
    console.present(as_json, lambda: _document(placing), page, placing.exit_code)


def _document(placing: Placing) -> dict[str, Any]:
    table = placing.table
    return {
        "table": table.n if table else 0,
        "committed": placing.committed,
        "policy": table.policy.to_table() if table else None,
        "locations": table.locations if table else [],
        "copies": placing.copies,
        "deleted": {"objects": placing.drops.objects, "bytes": placing.drops.bytes},
        "kept": placing.drops.kept,
        "surplus": placing.surplus,
        "due_in_s": placing.due_in_s,
    }


def _days(seconds: int) -> str:
    return duration_text(seconds) if seconds < 172_800 else f"{-(-seconds // 86_400)} days"


def _print(placing: Placing, root: str, *, dry_run: bool) -> None:
    table = placing.table
    if table is None:
        console.print_line(f"{root} has no copies; add a location: --location NAME=URL --copies 2")
        return
    said = (
        "would be committed"
        if dry_run and table is not placing.was
        else "committed"
        if placing.committed
        else "holds"
    )
    number = f" {table.n}" if table.n else ""  # of the log entry that set it
    console.print_line(f"{root}: placement{number} {said}", "bold")
    policy = table.policy.to_table()
    policy["critical"] = ", ".join(f"{one.stratum}={one.copies}" for one in table.policy.critical) or "none"
    console.print_facts([(name, str(value)) for name, value in policy.items()])
    console.print_document({"locations": placing.copies.locations})
    drops = placing.drops
    if drops.objects:
        console.print_line(
            f"deleted {count_text(drops.objects, 'object')}, {bytes_text(drops.bytes)}, not needed where they were"
        )
    if drops.kept:
        console.print_line(
            f"kept {count_text(len(drops.kept), 'object')} that would be deleted: too few good copies elsewhere; "
            f"run: shardkit replicate {shell_word(root)}",
            "yellow",
        )
    for problem in drops.problems[:5]:
        console.print_line(problem, "yellow")
    left = placing.surplus - len(drops.kept)
    if left > 0:
        when = f"in {_days(placing.due_in_s)}" if placing.due_in_s else "now"
        console.print_line(
            f"{count_text(left, 'object')} not needed where they are, to be deleted {when} or later: "
            f"shardkit place {shell_word(root)}; to go back: --undo"
        )
