"""`shardkit replicate`: copies, until the policy is met."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

from shardkit.copies.replicate import Replication, find_lag
from shardkit.copies.replicate import replicate as replicate_root
from shardkit.exit_codes import ExitCode
from shardkit.extras import shell_word
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import Repository
from shardkit_tools import console, options
from shardkit_tools.commands.repair import print_unchecked
from shardkit_tools.console import bytes_text
from shardkit_tools.copies import copying
from shardkit_tools.options import option


def replicate(
    root: options.RootArgument,
    bandwidth: options.BandwidthOption = None,
    between: options.BetweenOption = None,
    jobs: Annotated[int, option("--jobs -j N", "Objects copied at once.", min=1, max=64)] = 4,
    level: Annotated[
        Literal["list", "stored", "read"],
        option(
            "--level list|stored|read",
            "How existing copies are checked. list: by size only, for frequent calls; stored: by the store's own "
            "checksums, or by reading if it has none; read: every byte.",
        ),
    ] = "stored",
    dry_run: Annotated[bool, option("--dry-run", "Only list missing copies.")] = False,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Copy objects that are missing or damaged in a location, until the policy is met.

    Every copy is verified while it is made and has its name only then. After Ctrl-C or a crash the same command
    continues. The lag is the bytes of copies that the policy asks for and that are not there. Copies that
    are there are looked at first; wrong copies are replaced from a good copy, otherwise from parity.

    Exit codes: 0 the policy is met, 1 it is not and the same command continues, 3 a location does not answer or cannot
    be filled, 4 an object has no good copy anywhere; with --dry-run 5 the policy is not met.

    Example: shardkit replicate data/cats --bandwidth 200MB/s --between 22:00-06:00
    """
    repository = Repository.open(parse_dataset_url(root)[0])
    with copying(engine, address, jobs, bandwidth, between) as work:
        done = (
            find_lag(repository)
            if dry_run
            else replicate_root(
                repository,
                level=level,
                settings=work.checks(jobs),
                report=work.report,
            )
        )
    page = functools.partial(_print, done, root, dry_run=dry_run)
    console.present(as_json, lambda: done, page, done.exit_code)


def _print(done: Replication, root: str, *, dry_run: bool) -> None:
    console.print_document({"locations": done.locations})
    if dry_run:
        lag = f"{bytes_text(done.lag_before)} below policy, in {done.objects:,} missing copies"
    else:
        state = "the policy is met" if done.exit_code == ExitCode.DONE else "the policy is not met"
        lag = (
            f"{bytes_text(done.lag_before)} below policy before, {bytes_text(done.lag_after)} after: {state}"
        )
    console.print_line(f"lag: {lag}", "bold")
    if done.healed:
        console.print_line(f"healed {len(done.healed):,} that were damaged, or lost in the root")
    print_unchecked(done.unchecked)
    if done.lost:
        console.print_line(
            f"no good copy anywhere: {', '.join(done.lost[:3])}{' …' if len(done.lost) > 3 else ''}", "red"
        )
        console.print_line(f"run: shardkit repair {shell_word(root)}")
