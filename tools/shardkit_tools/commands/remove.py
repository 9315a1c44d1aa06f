"""`shardkit remove`: versions without some samples; with `--erase` the bytes go too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import to_builtins

from shardkit.dataset.lookups import is_number
from shardkit.dataset.removing import Removal, erase, resume_erasures
from shardkit.dataset.removing import remove as remove_samples
from shardkit.dataset.rewriting import ErasureReport
from shardkit.errors import UsageError
from shardkit_tools import console, options
from shardkit_tools.console import bytes_text, count_text, short_id
from shardkit_tools.options import argument, option
from shardkit_tools.row_lists import AbsentOption, read_values, split_values
from shardkit_tools.version_report import parse_url


def remove(
    root: Annotated[str, argument("ROOT[@REF]", "ROOT: from every ref; ROOT@REF: from that ref alone.")],
    rows: Annotated[
        str | None, option("--rows N,…|FILE", "Sample numbers, or a file of them, one a line.")
    ] = None,
    keys: Annotated[str | None, option("--keys KEY,…|FILE", "Keys, or a file of them, one a line.")] = None,
    listed: Annotated[Path | None, option("--list FILE", "A file of keys, one a line.")] = None,
    reason: Annotated[str, option("--reason TEXT", "Reason, for the log.")] = "",
    author: options.AuthorOption = "",
    erase_bytes: Annotated[
        bool, option("--erase", "Erase the bytes from every version and tag of ROOT. This cannot be undone.")
    ] = False,
    resume: Annotated[
        bool, option("--resume", "Finish an erasure that was interrupted; takes no samples.")
    ] = False,
    allow_absent: AbsentOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Remove samples: a version without them; with --erase their bytes, everywhere in ROOT.

    Without --erase the samples stay readable in tags and old versions. With it, the shards that hold them are
    rewritten, look-ups, selections and refs follow, tags on them are withdrawn, and old objects are deleted; what
    this command cannot reach is listed. After an interruption the same command continues. Exit code 5: the dataset does
    not hold some of them, and nothing was removed.

    Example: shardkit remove data/web --list takedown.txt --reason "request 2026-117" --erase
    """
    if resume:
        if rows or keys or listed:
            raise UsageError("--resume finishes what was begun; it takes no samples")
        reports = resume_erasures(parse_url(root)[0])
        console.present(as_json, lambda: to_builtins(reports), lambda: _print_reports(reports))
        return
    if sum(option is not None for option in (rows, keys, listed)) != 1:
        raise UsageError("remove takes one of --rows, --keys and --list")
    if not reason.strip():
        raise UsageError("remove needs --reason TEXT: the log keeps it")
    given = _selection(rows, keys, listed) | {"allow_absent": allow_absent}
    if erase_bytes:
        report = erase(root, reason=reason, author=author, **given)
        console.present(as_json, lambda: to_builtins(report), lambda: _print_reports([report]))
    else:
        removal = remove_samples(root, reason=reason, author=author, **given)
        console.present(
            as_json, lambda: _document(removal), lambda: _print_removal(removal, parse_url(root)[0])
        )


def _selection(rows: str | None, keys: str | None, listed: Path | None) -> dict[str, Any]:
    text = str(rows or keys)
    named = listed or Path(text)
    is_file = listed is not None or named.is_file()
    values = read_values(named) if is_file else split_values(text, "--keys" if rows is None else "--rows")
    if rows is None:
        return {"keys": values}
    wrong = next((value for value in values if not is_number(value)), None)
    if wrong is not None:
        raise UsageError(
            f"--rows: {wrong[:40]!r} is no sample number; give numbers without leading zeros such as 17,203, or a file "
            "of them; keys are given with --keys"
        )
    return {"rows": [int(value) for value in values]}


def _document(removal: Removal) -> dict[str, Any]:
    refs = {name: {"id": new, "samples": gone} for name, (new, gone) in removal.refs.items()}
    return {"samples": removal.samples, "refs": refs, "still": list(removal.still), "commit": removal.commit}


def _print_removal(removal: Removal, root: str) -> None:
    samples = count_text(removal.samples, "sample")
    console.print_line(f"{root}: removed {samples}, commit {removal.commit}", "bold")
    console.print_table(
        ["ref", ">samples less", "id"],
        [(name, count_text(gone), short_id(new)) for name, (new, gone) in removal.refs.items()],
    )
    if removal.still:
        console.print_line(f"still in: {', '.join(removal.still)}")
    console.print_line("the bytes are still there: --erase removes them", "dim")


def _print_reports(reports: Sequence[ErasureReport]) -> None:
    if not reports:
        console.print_line("nothing to finish")
    for report in reports:
        _print_report(report)


def _print_report(report: ErasureReport) -> None:
    console.print_line(f"erased {count_text(report.samples, 'sample')}: {report.reason}", "bold")
    console.print_facts([
        ("rows", f"{count_text(report.rows)}, copies in other versions among them"),
        ("shards", f"{count_text(report.rewritten)} rewritten, {count_text(report.dropped)} left empty"),
        ("versions", f"{count_text(len(report.versions))} replaced"),
        ("deleted", f"{count_text(len(report.objects), 'object')}, {bytes_text(report.bytes)}"),
        ("commits", ", ".join(map(str, report.commits)) or "none"),
        ("erasure", f"{report.id} (its report stays below erasures/)"),
    ])  # fmt: skip
    gone = "dropped: no sample was left"
    refs = [(ref, short_id(new) if new else gone) for ref, new in report.refs.items()]
    console.print_table(["ref", "id"], refs, heading="Refs")
    tags = [
        (tag, short_id(old), short_id(report.versions.get(old, "")) or "nothing")
        for tag, old in report.tags.items()
    ]
    console.print_table(["tag", "named", "which is now"], tags, heading="Withdrawn tags")
    console.print_heading("Not reached")
    for text in report.not_reached:
        console.print_line(f"  {text}")
