"""`shardkit build`: a version of a dataset from files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardkit.errors import UsageError
from shardkit_tools.build_report import document, print_result, progress_text
from shardkit_tools.building import build as build_dataset
from shardkit_tools.console import JsonFlag, long_work, print_json
from shardkit_tools.copies_options import (
    CopiesOption,
    CriticalOption,
    LocationOption,
    ModeOption,
    ParityOption,
    begin_copies,
    finish_copies,
    print_copies,
)
from shardkit_tools.engine_options import AddressOption, EngineName, EngineOption
from shardkit_tools.importers import IMPORTERS, ImportOptions, parse_field_types

__all__ = ["ShardFormat", "build", "split_shares"]


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
    split_folders: Annotated[
        bool | None,
        typer.Option(
            "--split-folders/--no-split-folders",
            rich_help_panel="Source",
            help="Whether the folders in SOURCE are splits, which become refs, with the classes in them; default: yes "
            "where they are named train, val, valid, validation, test or dev.",
        ),
    ] = None,
    apply: Annotated[
        str | None,
        typer.Option(
            "--apply",
            metavar="MODULE:FUNCTION",
            rich_help_panel="Samples",
            help="A function, sample → sample, list of samples or None, such as cleaning.text:normalise.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE",
            rich_help_panel="Samples",
            help="A tokenizer.json; the text becomes the field tokens.",
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field",
            metavar="FIELD",
            rich_help_panel="Samples",
            help="What to tokenise, where several fields are text.",
        ),
    ] = None,
    output_schema: Annotated[
        list[str] | None,
        typer.Option(
            "--output-schema",
            metavar="FIELD=TYPE",
            rich_help_panel="Samples",
            help="Type of a field that --apply or --tokenizer makes; may be repeated.",
        ),
    ] = None,
    unique: Annotated[
        str | None,
        typer.Option(
            "--unique",
            metavar="FIELD",
            rich_help_panel="Samples",
            help="Of samples that are equal in this field keep the first.",
        ),
    ] = None,
    pack: Annotated[
        str | None,
        typer.Option(
            "--pack",
            metavar="FIELD=LENGTH",
            rich_help_panel="Samples",
            help="Put documents together into rows of this length, such as tokens=2048.",
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
        str | None,
        typer.Option(
            "--block-size",
            metavar="SIZE",
            rich_help_panel="Shards",
            help="Raw bytes per block; by default those of the ref as it stands, else 256KiB.",
        ),
    ] = None,
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
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            rich_help_panel="Version",
            help="Even if the ref names samples of another schema, or was moved meanwhile.",
        ),
    ] = False,
    single_writer: Annotated[
        bool,
        typer.Option(
            "--single-writer",
            rich_help_panel="Version",
            help="For a bucket without conditional writes: promise that nobody else writes this root.",
        ),
    ] = False,
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            rich_help_panel="Version",
            help="Put the samples behind those that the ref holds; other settings as it was built.",
        ),
    ] = False,
    about: Annotated[
        Path | None,
        typer.Option(
            "--about",
            metavar="FILE",
            rich_help_panel="Version",
            help="about.toml: licence, source, contact; [stratum.NAME] where they differ.",
        ),
    ] = None,
    lookup: Annotated[
        str,
        typer.Option(
            "--lookup",
            metavar="FIELD,…",
            rich_help_panel="Version",
            help="Make samples findable, such as key,url,image:sha256.",
        ),
    ] = "",
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
    location: LocationOption = None,
    copies: CopiesOption = None,
    critical: CriticalOption = None,
    parity: ParityOption = None,
    mode: ModeOption = None,
    engine: EngineOption = EngineName.LOCAL,
    address: AddressOption = None,
    scratch: Annotated[
        Path | None,
        typer.Option(
            "--scratch",
            metavar="FOLDER",
            rich_help_panel="Running",
            help="Folder for about as many bytes as SOURCE has, which all workers see; default: in ROOT.",
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
    begin_copies(
        root,
        location=location,
        copies=copies,
        critical=critical,
        parity=parity,
        mode=mode,
        single_writer=single_writer,
        dry_run=dry_run,
    )
    with long_work() as status:
        result = build_dataset(
            source,
            root,
            from_=importer,
            options=ImportOptions(
                field_types=parse_field_types(schema or []),
                per=per.value,
                classes=classes,
                split_folders=split_folders,
                skip_bad_rows=on_error is OnError.SKIP,
            ),
            apply=apply,
            tokenizer=tokenizer,
            text_field=text_field,
            output_schema=parse_field_types(output_schema or [], "--output-schema"),
            unique=unique,
            pack=_pack(pack),
            stratify=stratify,
            format=shard_format.value,
            compression=compression,
            shard_size=shard_size,
            block_size=block_size,
            seed=seed,
            shuffle=shuffle,
            split=split_shares(split),
            split_by=split_by,
            append=append,
            single_writer=single_writer,
            about=about,
            lookup=lookup,
            ref=ref,
            replace=replace,
            message=message,
            author=author,
            jobs=jobs,
            engine=engine.value,
            address=address,
            scratch=scratch,
            on_error=on_error.value,
            dry_run=dry_run,
            progress=lambda now: status.show(progress_text(now)),
        )
    lag = None if dry_run else finish_copies(root)
    if as_json:
        print_json(document(result, root, ref) | ({} if lag is None else {"lag_bytes": lag}))
    else:
        print_result(result, root, ref)
        print_copies(root, lag)


def _pack(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    name, _, length = text.partition("=")
    if not name or not length.isascii() or not length.isdigit():
        raise UsageError(f"--pack {text!r}: expected a field and a length, such as tokens=2048")
    return {name: int(length)}


def split_shares(text: str | None) -> dict[str, float | str] | None:
    """The shares of ``train=0.9,val=0.1``.

    Raises:
        UsageError: it is not of that form.
    """
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
