"""`shardkit rebuild`: a version anew, in other strata, shards, blocks, format or compression."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from shardkit.storage import DEFAULT_REF
from shardkit_tools.build_report import document, print_result, progress_text
from shardkit_tools.building.rebuilding import label_again
from shardkit_tools.building.rebuilding import rebuild as rebuild_version
from shardkit_tools.commands.build import ShardFormat, split_shares
from shardkit_tools.console import JsonFlag, count_text, long_work, print_json, print_line, short_id
from shardkit_tools.versions import parse_url

__all__ = ["rebuild"]


def rebuild(
    root: Annotated[str, typer.Argument(metavar="ROOT[@REF]", help="The version whose samples are taken.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="ROOT", help="Where to; by default the same root.")
    ] = None,
    stratify: Annotated[
        list[str] | None,
        typer.Option("--stratify", metavar="FIELD", help="Other strata; may be repeated; '' for none."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME=SHARE,…", help="Splits are not taken over: give them again."),
    ] = None,
    split_by: Annotated[
        str | None,
        typer.Option("--split-by", metavar="FIELD", help="Keep samples of one value in one split."),
    ] = None,
    shard_format: Annotated[
        ShardFormat | None, typer.Option("--format", help="tar for media, arrow for numbers and text.")
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option("--compression", metavar="NAME[:LEVEL]", help="none, zstd, zstd:1…19; arrow also lz4."),
    ] = None,
    shard_size: Annotated[
        str | None, typer.Option("--shard-size", metavar="SIZE", help="Raw bytes per shard.")
    ] = None,
    block_size: Annotated[
        str | None, typer.Option("--block-size", metavar="SIZE", help="Raw bytes per block.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the shuffle.")] = None,
    shuffle: Annotated[
        bool | None, typer.Option("--shuffle/--no-shuffle", help="Mix the samples, or keep their order.")
    ] = None,
    about: Annotated[
        Path | None, typer.Option("--about", metavar="FILE", help="about.toml: licence, source, contact.")
    ] = None,
    lookup: Annotated[
        str | None,
        typer.Option("--lookup", metavar="FIELD,…", help="Such as key,url,image:sha256; '' for none."),
    ] = None,
    ref: Annotated[
        str | None,
        typer.Option(
            "--ref", metavar="NAME", help="The ref that is moved; default: the one named, or main of --to."
        ),
    ] = None,
    message: Annotated[str, typer.Option("--message", "-m", help="Why, for the log.")] = "",
    author: Annotated[str, typer.Option("--author", help="Who, for the log.")] = "",
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help="Processes.")] = None,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", metavar="FOLDER", help="Folder for encoded rows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count everything, write nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Build a version anew: what is not given stays as it is, samples and keys to the last byte.

    With --lookup and --about alone no shard is written. After Ctrl-C or a crash the same command goes on.

    Example: shardkit rebuild data/web --stratify lang --format arrow --compression zstd --ref by-lang
    """
    shards: dict[str, Any] = {
        "stratify": None if stratify is None else [axis for axis in stratify if axis],
        "split": split_shares(split),
        "split_by": split_by,
        "format": None if shard_format is None else shard_format.value,
        "compression": compression,
        "shard_size": shard_size,
        "block_size": block_size,
        "seed": seed,
        "shuffle": shuffle,
    }
    stays = to is None and all(setting is None for setting in shards.values())
    if stays and (about is not None or lookup is not None) and not dry_run:
        manifest, entry = label_again(
            root, about=about, lookup=lookup, ref=ref, message=message, author=author
        )
        if as_json:
            print_json({"root": parse_url(root)[0], "id": manifest.id, "commit": entry.n if entry else None})
        else:
            told = f"commit {entry.n}" if entry else "nothing has changed"
            samples = count_text(manifest.selected, "sample")
            print_line(f"{root}: {samples} in the same shards, {told}; {short_id(manifest.id)}")
        return
    with long_work() as status:
        result = rebuild_version(
            root,
            to,
            **shards,
            about=about,
            lookup=lookup,
            ref=ref,
            message=message,
            author=author,
            jobs=jobs or os.cpu_count() or 1,
            scratch=scratch,
            dry_run=dry_run,
            progress=lambda now: status.show(progress_text(now)),
        )
    place = to or parse_url(root)[0]
    named = ref or (parse_url(root)[1] if to is None else DEFAULT_REF)
    if as_json:
        print_json(document(result, place, named))
    else:
        print_result(result, place, named)
