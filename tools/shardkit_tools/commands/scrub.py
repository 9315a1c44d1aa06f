"""`shardkit scrub`: copies are looked at, longest waiting first."""

from __future__ import annotations

from typing import Annotated, Literal

from shardkit.copies.scrub import Scrub
from shardkit.copies.scrub import scrub as scrub_root
from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.ranges import parse_duration
from shardkit.repository.log import parse_dataset_url
from shardkit_tools import console, options
from shardkit_tools.commands.repair import print_repair, print_unchecked
from shardkit_tools.console import count_text
from shardkit_tools.copies import copying
from shardkit_tools.options import option

_SHOWN = 20


def scrub(
    root: options.RootArgument,
    time_box: Annotated[str | None, option("--time-box TIME", "Stop after this time, such as 10m.")] = None,
    older_than: Annotated[
        str | None,
        option("--older-than TIME", "Check only copies whose last check is older, such as 30d."),
    ] = None,
    level: Annotated[
        Literal["stored", "read"],
        option(
            "--level stored|read",
            "stored: compare the store's own checksums, which transfers no bytes, or read if it has none; "
            "read: read every byte.",
        ),
    ] = "stored",
    heal: Annotated[bool, option("--repair", "Heal bad copies at once.")] = False,
    only: Annotated[
        list[str] | None, option("--only NAME", "Check only this location; may be repeated.")
    ] = None,
    location: options.FurtherLocationOption = None,
    bandwidth: options.BandwidthOption = None,
    between: options.BetweenOption = None,
    jobs: options.ChecksOption = 4,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Check every copy that the policy asks for, in the order of their last checks, the oldest first.

    Results are kept in ROOT/attest, so a scrub that was stopped continues. `shardkit repair`
    heals bad copies.

    Exit codes: 0 clean or repaired, 3 could not check everything, 4 bad copies are left.

    Example: shardkit scrub data/cats --time-box 10m --older-than 30d --repair
    """
    older = None if older_than is None else int(parse_duration(older_than, "--older-than"))
    box = None if time_box is None else parse_duration(time_box, "--time-box")
    with copying(engine, address, jobs, bandwidth, between) as work:
        done = scrub_root(
            parse_dataset_url(root)[0],
            depth=level,
            older_than_s=older,
            time_box_s=box,
            only=tuple(only or ()),
            heal=heal,
            settings=work.checks(jobs, location),
        )
    console.present(as_json, lambda: done, lambda: _print(done, root), done.exit_code)


def _print(done: Scrub, root: str) -> None:
    locations = {
        name: vars(one)
        | {"bad": len(one.bad), "oldest": "just now" if one.oldest is None else one.oldest or "never"}
        for name, one in done.locations.items()
    }
    console.print_document({"locations": locations})
    bad = [(where, result, name) for where, one in done.locations.items() for name, result in one.bad.items()]
    heading = f"Bad: {count_text(len(bad), 'copy', 'copies')}"
    console.print_table(["location", "is", "*object"], bad, heading=heading, most=_SHOWN)
    for name, why in done.lost.items():
        console.print_line(f"{name}: {why}", "red")
    if done.repair is not None:
        print_repair(done.repair)
    else:
        print_unchecked(done.unchecked)
    if bad or done.lost or done.unchecked:
        console.print_line()
    rest = f"; {count_text(done.remaining)} due copies were not reached in time" if done.remaining else ""
    console.print_line(f"{done.url}: {done.verdict}{rest}", "bold")
    if done.exit_code == ExitCode.DAMAGED and done.repair is None:
        console.print_line(f"run: shardkit repair {shell_word(root)} --level attested")
