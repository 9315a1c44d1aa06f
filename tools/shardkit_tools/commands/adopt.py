"""`shardkit adopt`: WebDataset tars become a dataset where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from shardkit.errors import UsageError
from shardkit_tools import console, options
from shardkit_tools.adopting import Adoption
from shardkit_tools.adopting import adopt as adopt_tars
from shardkit_tools.build_report import print_strata, progress_text
from shardkit_tools.console import bytes_text, count_text, duration_text
from shardkit_tools.copies import begin_copies, finish_copies, print_copies
from shardkit_tools.importers.protocol import parse_field_types
from shardkit_tools.options import argument, option
from shardkit_tools.versions import moved_document, moved_facts


def adopt(
    tars: Annotated[
        list[str],
        argument(
            "TARS… ROOT",
            "Uncompressed WebDataset tars (files, folders, globs, URLs), and last where the dataset goes.",
        ),
    ],
    stratify: Annotated[
        list[str] | None,
        option(
            "--stratify FIELD", "Tell runs of rows of one value apart, of 8 rows and more; may be repeated."
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
    """Index and hash WebDataset tars where they lie; nothing of them is copied.

    Every block is verified whenever it is read, so a tar that changes later is noticed and named. What shardkit
    promises of data that it builds and cannot promise of adopted data is printed. After Ctrl-C or a crash the same
    command goes on; when tars have moved, adopt them again where they are now.

    Tars in S3, or behind any URL, stay there and are read from there; credentials come from the environment.

    Example: shardkit adopt s3://laion/{00000..00099}.tar data/laion --jobs 8
    """
    if len(tars) < 2:
        raise UsageError("adopt takes at least one tar, and the ROOT that the dataset goes to")
    *given, root = tars
    settings = options.settings_for(adopt_tars, locals() | {"tars": given})
    settings["field_types"] = parse_field_types(schema or [])
    begin_copies(root, location, {"copies": copies, "parity": parity, "mode": mode}, dry_run=dry_run)
    with console.long_work() as status:
        result = adopt_tars(**settings, progress=lambda now: status.show(progress_text(now, "adopting")))
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
        "samples": result.rows,
        "tars": result.tars,
        "stored_bytes": result.stored_bytes,
        "strata": dict(result.strata),
        "does_not_hold": dict(result.promises),
        "reused_tars": result.reused,
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
        ("fields", ", ".join(f"{name} {kind}" for name, kind in result.schema.items())),
        ("samples", count_text(result.rows) + strata),
        ("tars", f"{count_text(result.tars)} of {bytes_text(result.stored_bytes)}, where they lie"),
        ("read", f"{bytes_text(result.read_bytes)} in {duration_text(result.seconds)}, {rate}/s"),
    ]
    if manifest and result.commit is None:
        facts.append(("commit", "none: the same version was there already"))
    facts += moved_facts(result.moved)
    if result.reused:
        facts.append(("reused", f"{count_text(result.reused, 'tar')} of an interrupted run"))
    console.print_facts(facts)
    print_strata(result.strata, result.rows)
    console.print_heading("What does not hold for adopted data")
    console.print_facts(result.promises.items(), indent=2)
    if manifest:
        console.print_line(f"next: shardkit show {root}{'' if ref == 'main' else '@' + ref}", "dim")
