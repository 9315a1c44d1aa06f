"""`shardkit build`: a version of a dataset from files."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shardkit.errors import UsageError
from shardkit.manifest import Manifest
from shardkit_tools.building import BuildResult, Progress
from shardkit_tools.building import build as build_dataset
from shardkit_tools.console import (
    JsonFlag,
    StatusLine,
    bytes_text,
    clean,
    count_text,
    duration_text,
    print_facts,
    print_heading,
    print_json,
    print_line,
    print_table,
    share_text,
    short_id,
)
from shardkit_tools.importers import IMPORTERS, ImportOptions, parse_field_types

__all__ = ["build"]

_STRATA_SHOWN = 15
_VERBS = {"read": "reading", "write": "writing", "commit": "committing"}


class OnError(StrEnum):
    """What becomes of a row that cannot be read."""

    RAISE = "raise"
    SKIP = "skip"


class ShardFormat(StrEnum):
    """The format of shards."""

    TAR = "tar"
    ARROW = "arrow"


class Per(StrEnum):
    """What one sample of a text is."""

    FILE = "file"
    LINE = "line"


def build(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A file, a folder, a glob in quotes, or a URL.")
    ],
    root: Annotated[
        str, typer.Argument(metavar="ROOT", help="The dataset's folder; made if it is not there.")
    ],
    importer: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            rich_help_panel="Source",
            help=f"What SOURCE is, if it is not to be guessed: {', '.join(IMPORTERS)}.",
        ),
    ] = None,
    schema: Annotated[
        list[str] | None,
        typer.Option(
            "--schema",
            metavar="FIELD=TYPE",
            rich_help_panel="Source",
            help="FIELD=TYPE instead of the guessed type; may be repeated.",
        ),
    ] = None,
    per: Annotated[
        Per, typer.Option("--per", rich_help_panel="Source", help="Of text: one sample per file or per line.")
    ] = Per.FILE,
    classes: Annotated[
        bool | None,
        typer.Option(
            "--classes/--no-classes",
            rich_help_panel="Source",
            help="Whether the folders in SOURCE are classes.",
        ),
    ] = None,
    stratify: Annotated[
        list[str] | None,
        typer.Option(
            "--stratify",
            metavar="FIELD",
            rich_help_panel="Version",
            help="Balance batches by this field; may be repeated.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME=SHARE,…",
            rich_help_panel="Version",
            help="Refs and shares, such as train=0.9,val=0.1.",
        ),
    ] = None,
    split_by: Annotated[
        str | None,
        typer.Option(
            "--split-by",
            metavar="FIELD",
            rich_help_panel="Version",
            help="Keep samples of one value of this field in one split.",
        ),
    ] = None,
    shard_format: Annotated[
        ShardFormat,
        typer.Option("--format", rich_help_panel="Shards", help="tar for media, arrow for numbers and text."),
    ] = ShardFormat.TAR,
    compression: Annotated[
        str,
        typer.Option(
            "--compression",
            metavar="NAME[:LEVEL]",
            rich_help_panel="Shards",
            help="none, zstd, zstd:1…19; arrow also lz4.",
        ),
    ] = "none",
    shard_size: Annotated[
        str,
        typer.Option("--shard-size", metavar="SIZE", rich_help_panel="Shards", help="Raw bytes per shard."),
    ] = "256MiB",
    block_size: Annotated[
        str,
        typer.Option("--block-size", metavar="SIZE", rich_help_panel="Shards", help="Raw bytes per block."),
    ] = "1MiB",
    seed: Annotated[int, typer.Option("--seed", rich_help_panel="Shards", help="Of the shuffle.")] = 0,
    shuffle: Annotated[
        bool,
        typer.Option(
            "--shuffle/--no-shuffle",
            rich_help_panel="Shards",
            help="Mix the samples, or keep the source's order in a stratum.",
        ),
    ] = True,
    ref: Annotated[
        str,
        typer.Option(
            "--ref", metavar="NAME", rich_help_panel="Version", help="The ref that the version gets."
        ),
    ] = "main",
    message: Annotated[
        str, typer.Option("--message", "-m", rich_help_panel="Version", help="Why, for the log.")
    ] = "",
    author: Annotated[
        str, typer.Option("--author", rich_help_panel="Version", help="Who, for the log.")
    ] = "",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            metavar="N",
            rich_help_panel="Running",
            help="Processes; default: one per processor.",
        ),
    ] = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch",
            metavar="FOLDER",
            rich_help_panel="Running",
            help="Folder for about as many bytes as SOURCE has; default: in ROOT.",
        ),
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(
            "--on-error",
            rich_help_panel="Source",
            help="Stop at a row that cannot be read, or skip and list it.",
        ),
    ] = OnError.RAISE,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", rich_help_panel="Running", help="Read and count everything, write nothing."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Build a version of a dataset from files.

    The same files and settings give the same version id, whatever the number of jobs. After Ctrl-C or a
    crash the same command goes on where it stood.

    Example: shardkit build photos/ data/cats --stratify label --split train=0.9,val=0.1
    """
    status = StatusLine()
    try:
        result = build_dataset(
            source,
            root,
            from_=importer,
            options=ImportOptions(
                field_types=parse_field_types(schema or []),
                per=per.value,
                classes=classes,
                skip_bad_rows=on_error is OnError.SKIP,
            ),
            stratify=stratify,
            format=shard_format.value,
            compression=compression,
            shard_size=shard_size,
            block_size=block_size,
            seed=seed,
            shuffle=shuffle,
            split=_shares(split),
            split_by=split_by,
            ref=ref,
            message=message,
            author=author,
            jobs=jobs or os.cpu_count() or 1,
            scratch=scratch,
            on_error=on_error.value,
            dry_run=dry_run,
            progress=lambda now: status.show(_progress(now)),
        )
    except KeyboardInterrupt as interrupt:
        status.clear()
        typer.echo(f"shardkit: {str(interrupt) or 'interrupted'}", err=True)
        raise typer.Exit(130) from None
    finally:
        status.clear()
    if as_json:
        print_json(_document(result, root, ref))
    else:
        _print(result, root, ref)


def _shares(text: str | None) -> dict[str, float | str] | None:
    if text is None:
        return None
    shares: dict[str, float | str] = {}
    for pair in text.split(","):
        name, equals, share = pair.strip().partition("=")
        if not equals or name in shares:
            raise UsageError(
                f"--split {text!r}: expected names and shares, each name once, such as train=0.9,val=0.1"
            )
        shares[name] = share
    return shares


def _progress(now: Progress) -> str:
    if now.phase == "commit":
        return "committing …"
    left = f", {duration_text(now.seconds_left)} left" if now.seconds_left is not None else ""
    scratch = (
        f", scratch {bytes_text(now.scratch_bytes)}" if now.phase == "read" and now.scratch_bytes else ""
    )
    return (
        f"{_VERBS[now.phase]} {count_text(now.rows, 'sample')}, {bytes_text(now.done_bytes)} of "
        f"{bytes_text(now.total_bytes)} ({share_text(now.done_bytes, now.total_bytes)}), "
        f"{bytes_text(int(now.rate))}/s{left}{scratch}"
    )


def _document(result: BuildResult, root: str, ref: str) -> dict[str, Any]:
    return {
        "root": root,
        "ref": ref,
        "id": result.manifest.id if result.manifest else None,
        "commit": result.commit.n if result.commit else None,
        "samples": result.rows,
        "raw_bytes": result.raw_bytes,
        "stored_bytes": result.manifest.stored_bytes if result.manifest else None,
        "shards": result.shards,
        "strata": dict(result.strata),
        "pooled_strata": result.pooled,
        "splits": {
            name: {"id": manifest.id, "samples": manifest.selected}
            for name, manifest in result.splits.items()
        },
        "split_samples": dict(result.split_rows),
        "skipped": [
            {"source": row.source_name, "row": row.source_row, "error": row.message} for row in result.skipped
        ],
        "skipped_file": result.skipped_file,
        "source_bytes": result.source_bytes,
        "scratch_bytes": result.scratch_bytes,
        "reused_tasks": result.reused_tasks,
        "reused_shards": result.reused_shards,
        "seconds": round(result.seconds, 3),
    }


def _print(result: BuildResult, root: str, ref: str) -> None:
    manifest = result.manifest
    print_line(f"{root}@{ref}" if manifest else f"would build {root}@{ref}; nothing was written", "bold")
    strata = f" in {count_text(len(result.strata))} strata" if len(result.strata) > 1 else ""
    strata += f", {result.pooled} of them pooled: too rare for every shard" if result.pooled else ""
    rate = bytes_text(int(result.source_bytes / result.seconds)) if result.seconds else "–"
    facts = [("id", manifest.id)] if manifest else []
    facts += [
        *([("fields", _fields(manifest))] if manifest else []),
        ("samples", count_text(result.rows) + strata),
        (
            "size",
            bytes_text(manifest.stored_bytes)
            if manifest
            else f"{bytes_text(result.raw_bytes)} before compression",
        ),
        ("shards", count_text(result.shards)),
        ("read", f"{bytes_text(result.source_bytes)} in {duration_text(result.seconds)}, {rate}/s"),
    ]
    facts += [(f"split {name}", _split(result, name, rows)) for name, rows in result.split_rows.items()]
    if manifest and result.commit is None:
        facts.append(("commit", "none: the same version was there already"))
    if result.reused_tasks or result.reused_shards:
        facts.append(
            ("reused", f"{result.reused_tasks} tasks, {result.reused_shards} shards of an interrupted run")
        )
    print_facts(facts)
    if not manifest and len(result.strata) > 1:
        print_heading("Strata")
        largest = sorted(result.strata.items(), key=lambda item: (-item[1], item[0]))
        print_table(
            ["*stratum", ">samples", ">share"],
            [(clean(name), count_text(n), share_text(n, result.rows)) for name, n in largest[:_STRATA_SHOWN]],
        )
        if len(largest) > _STRATA_SHOWN:
            print_line(f"… and {count_text(len(largest) - _STRATA_SHOWN)} more")
    if result.skipped:
        print_heading(f"Skipped {count_text(len(result.skipped), 'row')}")
        for row in result.skipped[:5]:
            print_line(f"  {clean(row.message)}")
        if result.skipped_file:
            print_line(f"all of them: {result.skipped_file}")
    if manifest:
        print_line(f"next: shardkit show {root}{'' if ref == 'main' else '@' + ref}", "dim")


def _fields(manifest: Manifest) -> str:
    source = manifest.build.get("source", {})
    importer = f" (from {source['importer']})" if isinstance(source, dict) and "importer" in source else ""
    return ", ".join(f"{name} {kind}" for name, kind in manifest.schema.items()) + importer


def _split(result: BuildResult, name: str, rows: int) -> str:
    text = f"{count_text(rows)} samples, {share_text(rows, result.rows)}"
    return f"{text}, {short_id(result.splits[name].id)}" if name in result.splits else text
