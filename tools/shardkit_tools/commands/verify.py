"""`shardkit verify`: whether every byte is still what was written."""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated

from shardkit.copies.shard_checks import Finding, Level
from shardkit.copies.verify import Verification
from shardkit.copies.verify import verify as verify_dataset
from shardkit.errors import UsageError
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, short_ids
from shardkit_tools.options import argument, option


def verify(
    root: Annotated[str, argument("ROOT[@REF]", "The versions that refs of ROOT name, or one version.")],
    level: Annotated[
        Level,
        option(
            "--level list|attested|stored|read|decode",
            "list: objects and sizes; attested: and recorded scrubs; stored: and the store's own checksums, "
            "local files are read; read: every byte; decode: and every sample.",
        ),
    ] = "read",
    sample: Annotated[
        str, option("--sample SHARE", "Look at a share of the shards, such as 5%; metadata is always whole.")
    ] = "100%",
    seed: Annotated[
        str | None,
        option("--seed TEXT", "With --sample: choose the same share as an earlier run with this seed."),
    ] = None,
    jobs: Annotated[
        int | None, option("--jobs -j N", "Shards read at once; default: one per processor.", min=1)
    ] = None,
    as_json: options.JsonFlag = False,
) -> None:
    """Verify a dataset: log, manifests, pages, selections, indexes and shards.

    Exit codes: 0 clean, 3 could not check, 4 damaged.

    Example: shardkit verify data/cats --level decode --sample 5%
    """
    with console.long_work() as status:
        result = verify_dataset(
            root,
            level=level,
            sample=parse_share(sample),
            seed=seed,
            jobs=jobs,
            report=lambda done, total: status.show(f"verified {done:,} of {count_text(total, 'shard')}"),
        )
    console.present(as_json, lambda: result, lambda: _print(result), result.exit_code)


def parse_share(text: str) -> Fraction:
    """A share such as 5% or 0.05."""
    try:
        share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise UsageError(f"--sample {text!r}: expected a share such as 5% or 0.05, above 0 and at most 100%")
    return share


def _print(result: Verification) -> None:
    damaged = f"Damaged: {count_text(len(result.damaged), 'object')}"
    console.print_findings(damaged, map(_finding, result.damaged), "red")
    unknown = f"Could not check: {count_text(len(result.unknown), 'object')}"
    console.print_findings(unknown, map(_finding, result.unknown), "yellow", are_grouped=True)
    if result.damaged or result.unknown:
        console.print_line()
    verdict = "damaged" if result.damaged else "could not check everything" if result.unknown else "clean"
    names = ", ".join(list(result.versions)[:8]) or "no versions"
    console.print_line(f"{result.url}: {verdict} ({names}; level {result.level})", "bold")
    shards = count_text(result.shards, "shard")
    if result.shards_seen < result.shards:
        shards = f"{result.shards_seen:,} of {shards} (--seed {result.seed} chooses the same again)"
    read = f", {bytes_text(result.stored_bytes)} of shards read" if result.stored_bytes else ""
    console.print_line(
        f"looked at {count_text(result.entries, 'commit')}, {count_text(result.objects, 'object')}, "
        f"{shards}{read}"
    )


def _finding(finding: Finding) -> tuple[str, console.Facts]:
    return finding.name, [
        ("expected", short_ids(finding.expected)),
        ("got", short_ids(finding.got)),
        ("blocks", console.value_text("blocks", finding.blocks) if finding.blocks else None),
        ("lost", count_text(finding.rows, "sample") if finding.rows else None),
        ("do", finding.action),
    ]
