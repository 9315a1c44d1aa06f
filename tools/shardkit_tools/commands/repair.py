"""`shardkit repair`: what is bad or missing is made good again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from shardkit.copies.documents import Unchecked
from shardkit.copies.repair import Repair
from shardkit.copies.repair import repair as repair_root
from shardkit.copies.scrub import Scrub
from shardkit.repository.location_table import LocationRecord
from shardkit.repository.log import parse_dataset_url
from shardkit_tools import console, options
from shardkit_tools.copies import copying, spread_checks
from shardkit_tools.options import option


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
    more = [LocationRecord.parse(text) for text in location or ()]
    with copying(engine, address, jobs, bandwidth, between) as (work, spread):
        done = repair_root(
            parse_dataset_url(root)[0],
            level=level or ("attested" if from_run else "read"),
            from_runs=tuple(from_run or ()),
            locations=more,
            pace=work.pace,
            jobs=jobs,
            check_all=spread_checks(spread),
            report=work.tell,
        )
    console.present(as_json, lambda: checked_document(done), lambda: _print(done), done.exit_code)


def checked_document(done: Repair | Scrub) -> dict[str, Any]:
    """For machines."""
    return {**console.plain(done), "verdict": done.verdict, "exit_code": done.exit_code}


def alike(unchecked: Iterable[Unchecked]) -> list[dict[str, Any]]:
    """What nothing is known of, for people: what is said of many copies is said once."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in unchecked:
        why = one.why.replace(one.name, "…") if one.name else one.why
        found.setdefault((one.location, why), {**one._asdict(), "copies": 0})["copies"] += 1
    return list(found.values())


def _print(done: Repair) -> None:
    console.print_document(checked_document(done) | {"unchecked": alike(done.unchecked)})
    if done.lost:
        console.print_line()
        console.print_line(
            "what is lost: put a copy back from a backup, build the same source again, or: shardkit remove --rows …"
        )
