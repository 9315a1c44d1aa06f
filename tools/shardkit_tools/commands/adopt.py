"""`shardkit adopt`: existing files become a dataset where they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardkit.errors import UsageError
from shardkit_tools import console, options
from shardkit_tools.adopting import Adoption
from shardkit_tools.adopting import adopt as adopt_files
from shardkit_tools.console import bytes_text, count_text, duration_text
from shardkit_tools.copies import begin_copies, finish_copies, print_copies
from shardkit_tools.importers import ImportOptions, parse_field_types
from shardkit_tools.importers.source_kinds import IMPORTERS
from shardkit_tools.options import argument, option
from shardkit_tools.version_report import moved_document, moved_facts, print_next, print_strata, progress_text


def adopt(
    context: typer.Context,
    source: Annotated[
        list[str],
        argument(
            "SOURCE… ROOT",
            "Files of one format (files, folders, globs, URLs), and last where the dataset goes.",
        ),
    ],
    from_: Annotated[
        str | None,
        option(
            "--from NAME", f"What SOURCE is, if it is not to be guessed: {', '.join(IMPORTERS)}.", "Source"
        ),
    ] = None,
    dtype: Annotated[str, options.DTYPE] = "",
    row: Annotated[int, options.ROW] = 0,
    quote: Annotated[str, options.QUOTE] = "",
    check: Annotated[Literal["", "decode", "none"], options.CHECK] = "",
    follow_links: Annotated[bool, options.FOLLOW_LINKS] = False,
    classes: Annotated[bool | None, options.CLASSES] = None,
    split_folders: Annotated[bool | None, options.SPLIT_FOLDERS] = None,
    on_error: Annotated[Literal["raise", "skip"], options.ON_ERROR] = "raise",
    stratify: Annotated[
        list[str] | None,
        option(
            "--stratify FIELD",
            "Balance batches by this field, if 8 or more rows of one value follow one another; may be repeated.",
        ),
    ] = None,
    schema: Annotated[list[str] | None, options.SCHEMA] = None,
    block_size: Annotated[str | None, options.BLOCK_SIZE] = None,
    ref: options.RefOption = "main",
    replace: options.ReplaceOption = False,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    location: options.LocationOption = None,
    copies: options.CopiesOption = None,
    parity: options.ParityOption = None,
    mode: options.ModeOption = None,
    jobs: options.JobsOption = None,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    scratch: Annotated[Path | None, option("--scratch FOLDER", "Folder for the journal.")] = None,
    dry_run: options.DryRunOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Index and hash files where they are; nothing of them is copied.

    These are folders of pictures, audio, video, text or other files, uncompressed WebDataset tars, NumPy arrays
    (.npy or uncompressed .npz, a sample per row), files of tokens (.bin, with --dtype and --row, or with an .idx file),
    Parquet and Arrow files, folders of save_to_disk, JSON lines, CSV, and MDS folders, uncompressed or with zstd. Every
    block is verified whenever it is read, so a file that changes later is noticed and named. Promises that hold for
    built data only are printed. After Ctrl-C or a crash the same command continues; when files have moved, adopt them
    again where they are now.

    Files in S3, or at any URL, stay there and are read from there; credentials come from the environment.

    Example: shardkit adopt s3://laion/{00000..00099}.tar data/laion --jobs 8
    """
    if len(source) < 2:
        raise UsageError("adopt takes at least one file, and the ROOT that the dataset goes to")
    *given, root = source
    reading = ImportOptions(
        field_types=parse_field_types(schema or []),
        dtype=dtype,
        row=row,
        quote=quote,
        check=check,
        follow_links=follow_links,
        classes=classes,
        split_folders=split_folders,
        skip_bad_rows=on_error == "skip",
    )
    settings = options.settings_for(adopt_files, locals() | {"sources": given, "options": reading})
    begin_copies(root, location, {"copies": copies, "parity": parity, "mode": mode}, dry_run=dry_run)
    with console.long_work() as status:
        result = adopt_files(**settings, progress=lambda now: status.show(progress_text(now, "adopting")))
    notes = tuple(options.advice_for(context.command, note) for note in result.notes)
    result = dataclasses.replace(result, notes=notes)
    lag = None if dry_run else finish_copies(root)
    if as_json:
        console.print_json(_document(result, root, ref) | ({} if lag is None else {"lag_bytes": lag}))
    else:
        _print(result, root, ref)
        print_copies(root, lag)


def _document(result: Adoption, root: str, ref: str) -> dict[str, Any]:
    return {
        "root": root,
        "ref": ref,
        "id": result.manifest.id if result.manifest else None,
        "commit": result.commit.n if result.commit else None,
        "moved": moved_document(result.moved),
        "schema": {name: str(kind) for name, kind in result.schema.items()},
        "classes": list(result.classes),
        "samples": result.rows,
        "skipped": len(result.skipped),
        "files": result.files,
        "stored_bytes": result.stored_bytes,
        "strata": dict(result.strata),
        "notes": list(result.notes),
        "does_not_hold": dict(result.promises),
        "reused_files": result.reused,
        "read_bytes": result.read_bytes,
        "seconds": round(result.seconds, 3),
    }


def _print(result: Adoption, root: str, ref: str) -> None:
    manifest = result.manifest
    console.print_line(
        f"{root}@{ref}" if manifest else f"would adopt into {root}@{ref}; nothing was written", "bold"
    )
    strata = f" in {count_text(len(result.strata))} strata" if len(result.strata) > 1 else ""
    rate = bytes_text(int(result.read_bytes / result.seconds)) if result.seconds else "–"
    facts = [("id", manifest.id)] if manifest else []
    facts += [
        ("fields", str(result.schema)),
        ("samples", count_text(result.rows) + strata),
        ("files", f"{count_text(result.files)} of {bytes_text(result.stored_bytes)}, where they are"),
        ("read", f"{bytes_text(result.read_bytes)} in {duration_text(result.seconds)}, {rate}/s"),
    ]
    if manifest and result.commit is None:
        facts.append(("commit", "none: the same version was there already"))
    facts += moved_facts(result.moved)
    if result.reused:
        facts.append(("reused", f"{count_text(result.reused, 'file')} of an interrupted run"))
    if result.skipped:
        facts.append(
            (
                "left out",
                f"{count_text(len(result.skipped), 'sample')} that cannot be read: {result.skipped[0]}",
            )
        )
    facts += [("note", note) for note in result.notes]
    console.print_facts(facts)
    labels = manifest.labels if manifest else {}
    print_strata({labels.get(name, name): rows for name, rows in result.strata.items()}, result.rows)
    console.print_heading("What does not hold for adopted data")
    console.print_facts(result.promises.items(), indent=2)
    if manifest:
        print_next(str(root), ref)
