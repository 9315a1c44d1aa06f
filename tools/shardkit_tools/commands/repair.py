"""`shardkit repair`: what is bad or missing is made good again."""

from __future__ import annotations

from typing import Annotated, Literal

from shardkit.copies.documents import LostObject, UncheckedCopy
from shardkit.copies.repair import repair as repair_root
from shardkit.copies.walk import Repair
from shardkit.repository.log import parse_dataset_url
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, short_ids
from shardkit_tools.copies import copying
from shardkit_tools.options import option

_SHOWN = 20


def repair(
    root: options.RootArgument,
    level: Annotated[
        Literal["attested", "list", "stored", "read"] | None,
        option(
            "--level attested|list|stored|read",
            "How to find bad copies. attested: those that readers or scrubs found; list: also those that are "
            "missing or have another size; stored: also those with a wrong checksum in the store; read: read every "
            "byte. Default: read, with --from-run attested.",
        ),
    ] = None,
    from_run: Annotated[
        list[str] | None,
        option(
            "--from-run RUN",
            "Heal the bad copies that readers of this run found; may be repeated.",
        ),
    ] = None,
    location: options.FurtherLocationOption = None,
    bandwidth: options.BandwidthOption = None,
    between: options.BetweenOption = None,
    jobs: options.ChecksOption = 4,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Heal a dataset: bad and missing objects are restored from another location, otherwise from parity.

    Each object is verified before it is put in place. Log entries are healed from copies of the root.

    Exit codes: 0 clean or repaired, 3 could not check or heal everything, 4 data lost.

    Example: shardkit repair data/cats --from-run runs/7
    """
    wanted = level or ("attested" if from_run else "read")
    with copying(engine, address, jobs, bandwidth, between) as work:
        done = repair_root(
            parse_dataset_url(root)[0],
            level=wanted,
            from_runs=tuple(from_run or ()),
            settings=work.checks(jobs, location),
        )
    console.present(as_json, lambda: done, lambda: _print(done), done.exit_code)


def print_repair(done: Repair) -> None:
    """Print the healed copies with the sources of their bytes, and the copies that could not be healed."""
    console.print_table(
        ["location", "was", "from", ">bytes", "*object"],
        [(one.location, one.was, one.source, bytes_text(one.num_bytes), one.name) for one in done.healed],
        heading=f"Healed: {count_text(len(done.healed), 'copy', 'copies')}",
        most=_SHOWN,
    )
    rows = sum(one.rows for one in done.lost)
    samples = f", {count_text(rows, 'sample')}" if rows else ""
    heading = f"Lost: {count_text(len(done.lost), 'object')}{samples}"
    console.print_findings(heading, map(_loss_facts, done.lost), "red")
    print_unchecked(done.unchecked)


def print_unchecked(unchecked: list[UncheckedCopy]) -> None:
    """Print the copies that could not be checked, with each reason once."""
    found = [
        (
            f"{one.location}: {one.name or 'all of it'}",
            [("because", short_ids(one.why.replace(one.name, "it") if one.name else one.why))],
        )
        for one in unchecked
    ]
    console.print_findings("Could not check or heal", found, "yellow", are_grouped=True)


def _loss_facts(lost: LostObject) -> tuple[str, console.Facts]:
    return lost.name, [
        ("because", short_ids(lost.why)),
        ("lost", count_text(lost.rows, "sample") if lost.rows else None),
        ("do", lost.action),
    ]


def _print(done: Repair) -> None:
    print_repair(done)
    if done.healed or done.lost or done.unchecked:
        console.print_line()
    console.print_line(f"{done.url}: {done.verdict} (level {done.level})", "bold")
    encoded = f", encoded {count_text(done.encoded, 'parity set')}" if done.encoded else ""
    read = f", {bytes_text(done.read_bytes)} read" if done.read_bytes else ""
    console.print_line(
        f"looked at {count_text(done.copies, 'copy', 'copies')} for {count_text(len(done.versions), 'version')}{read}; "
        f"healed {len(done.healed):,}, lost {len(done.lost):,}{encoded}"
    )
