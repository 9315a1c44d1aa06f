"""What `replicate`, `place` and `build` print of copies."""

from __future__ import annotations

from shardkit.exit_codes import ExitCode
from shardkit.storage.replicating import Replication
from shardkit_tools.console import bytes_text, clean, count_text, print_line, print_table

__all__ = ["print_lag", "print_locations"]


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
