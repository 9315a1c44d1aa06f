"""`shardkit repair`: what is bad or missing is made good again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from shardkit.copies.documents import Lost, Unchecked
from shardkit.copies.repair import repair as repair_root
from shardkit.copies.repair_results import Repair
from shardkit.copies.scrub import Scrub
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
            "Where to look: attested: only what readers or scrubs found bad; list: and what is missing or has "
            "another size; stored: and what the store's own checksums say; read: every byte. Default: read, and "
            "attested with --from-run.",
        ),
    ] = None,
    from_run: Annotated[
        list[str] | None,
        option(
            "--from-run RUN",
            "Heal what the readers of this run met and had no right to heal; may be given again.",
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
    """Heal a dataset: bad or missing objects come again from another location, else from parity.

    Whatever is put in place was verified by its digest before. Log entries are healed from copies of the root.

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
    console.present(as_json, lambda: checked_document(done), lambda: _print(done), done.exit_code)


def checked_document(done: Repair | Scrub) -> dict[str, Any]:
    """For machines."""
    return {**console.plain(done), "verdict": done.verdict, "exit_code": done.exit_code}


def print_repair(done: Repair) -> None:
    """What was healed from where, and what could not be."""
    if done.healed:
        console.print_heading(f"Healed: {count_text(len(done.healed), 'copy', 'copies')}")
        console.print_table(
            ["location", "was", "from", ">bytes", "*object"],
            [
                (one.location, one.was, one.source, bytes_text(one.num_bytes), one.name)
                for one in done.healed[:_SHOWN]
            ],
        )
        console.print_more(len(done.healed) - _SHOWN)
    if done.lost:
        rows = sum(one.rows for one in done.lost)
        samples = f", {count_text(rows, 'sample')}" if rows else ""
        console.print_heading(f"Lost: {count_text(len(done.lost), 'object')}{samples}")
        for lost in done.lost[:_SHOWN]:
            _print_lost(lost)
        console.print_more(len(done.lost) - _SHOWN)
    print_unchecked(done.unchecked)


def print_unchecked(unchecked: list[Unchecked]) -> None:
    """What nothing is known of; what is said of many copies is said once."""
    if not unchecked:
        return
    console.print_heading("Could not check or heal")
    alike: dict[tuple[str, str], list[Unchecked]] = {}
    for one in unchecked:
        alike.setdefault((one.location, one.why.replace(one.name, "…") if one.name else one.why), []).append(
            one
        )
    for group in list(alike.values())[:_SHOWN]:
        first, others = group[0], len(group) - 1
        name = first.name or "all of it"
        console.print_line(
            f"{first.location}: {name}{f' and {count_text(others)} more' if others else ''}", "yellow"
        )
        console.print_facts([("because", short_ids(first.why))], indent=2)
    console.print_more(len(alike) - _SHOWN)


def _print_lost(lost: Lost) -> None:
    console.print_line(lost.name, "red")
    facts = [("because", short_ids(lost.why))]
    if lost.rows:
        facts.append(("lost", count_text(lost.rows, "sample")))
    facts.append(
        ("do", "put a copy back from a backup, build the same source again, or: shardkit remove --rows …")
    )
    console.print_facts(facts, indent=2)


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
