"""`shardkit build`: a version of a dataset from files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Literal

from shardkit.errors import UsageError
from shardkit.ranges import split_names
from shardkit_tools import console, options
from shardkit_tools.copies import begin_copies, finish_copies, print_copies
from shardkit_tools.importers import IMPORTERS, ImportOptions, parse_field_types
from shardkit_tools.importers.protocol import parse_pairs
from shardkit_tools.options import ShardFormat, argument, option

_PACK = "a field and a length, such as tokens=2048"
_SOURCE = functools.partial(option, panel="Source")
_SAMPLES = functools.partial(option, panel="Samples")
_VERSION = functools.partial(option, panel="Version")


def build(
    source: Annotated[str, argument("SOURCE", "A file, a folder, a glob in quotes, or a URL.")],
    root: Annotated[str, argument("ROOT", "The dataset's folder; made if it is not there.")],
    from_: Annotated[
        str | None,
        _SOURCE("--from NAME", f"What SOURCE is, if it is not to be guessed: {', '.join(IMPORTERS)}."),
    ] = None,
    schema: Annotated[list[str] | None, options.SCHEMA] = None,
    columns: Annotated[
        str, _SOURCE("--columns FIELD,…", "Take these fields of the source and no others.")
    ] = "",
    drop: Annotated[
        list[str] | None, _SOURCE("--drop FIELD", "Leave a field of the source out; may be repeated.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        _SOURCE("--rename OLD=NEW", "Give a field of the source another name; may be repeated."),
    ] = None,
    flatten: Annotated[
        bool, _SOURCE("--flatten", "Members of structs and objects become fields, such as meta.author.name.")
    ] = False,
    dtype: Annotated[str, options.DTYPE] = "",
    row: Annotated[int, options.ROW] = 0,
    arrays: Annotated[
        Literal["", "rows", "files", "fields"],
        _SOURCE(
            "--arrays rows|files|fields",
            "Several .npy files are parts of one array, a sample each, or a field each.",
        ),
    ] = "",
    encoding: Annotated[str, options.ENCODING] = "",
    quote: Annotated[str, options.QUOTE] = "",
    keys: Annotated[
        str,
        _SOURCE(
            "--keys source|prefixed|none",
            "Of tars, and of tables with a column __key__: keys as they are, with the file's name before them, or "
            "generated; default: prefixed where the first keys of several tars are equal.",
        ),
    ] = "",
    check: Annotated[Literal["", "decode", "none"], options.CHECK] = "",
    follow_links: Annotated[bool, options.FOLLOW_LINKS] = False,
    per: Annotated[
        Literal["file", "line"],
        _SOURCE("--per file|line", "Make one sample of each text file or of each line."),
    ] = "file",
    classes: Annotated[bool | None, options.CLASSES] = None,
    split_folders: Annotated[bool | None, options.SPLIT_FOLDERS] = None,
    on_error: Annotated[Literal["raise", "skip"], options.ON_ERROR] = "raise",
    apply: Annotated[
        str | None,
        _SAMPLES(
            "--apply MODULE:FUNCTION",
            "Call a function that returns a sample, a list of them or None for each sample, such as text:clean.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        _SAMPLES("--tokenizer FILE", "Tokenise the text with a tokenizer.json, into the field tokens."),
    ] = None,
    text_field: Annotated[
        str | None, _SAMPLES("--text-field FIELD", "Field to tokenise, if several fields are text.")
    ] = None,
    eos: Annotated[
        str | None,
        _SAMPLES(
            "--eos TOKEN", "Token at the end of each document; none: no token; default: the tokenizer's own."
        ),
    ] = None,
    output_schema: Annotated[
        list[str] | None,
        _SAMPLES(
            "--output-schema FIELD=TYPE",
            "Type of a field that --apply or --tokenizer makes; may be repeated.",
        ),
    ] = None,
    unique: Annotated[
        str | None,
        _SAMPLES("--unique FIELD", "Keep only the first of the samples that are equal in this field."),
    ] = None,
    pack: Annotated[
        str | None,
        _SAMPLES(
            "--pack FIELD=LENGTH", "Put documents together into rows of this length, such as tokens=2048."
        ),
    ] = None,
    stratify: Annotated[list[str] | None, options.STRATIFY] = None,
    split: Annotated[str | None, options.SPLIT] = None,
    split_by: Annotated[str | None, options.SPLIT_BY] = None,
    format: Annotated[ShardFormat | None, options.FORMAT] = None,
    compression: Annotated[str | None, options.COMPRESSION] = None,
    shard_size: Annotated[str, options.SHARD_SIZE] = "256MiB",
    block_size: Annotated[str | None, options.BLOCK_SIZE] = None,
    seed: Annotated[int, options.SEED] = 0,
    shuffle: Annotated[bool, options.SHUFFLE] = True,
    ref: options.RefOption = "main",
    replace: options.ReplaceOption = False,
    single_writer: Annotated[
        bool,
        _VERSION(
            "--single-writer",
            "For a bucket without conditional writes: promise that nobody else writes this root.",
        ),
    ] = False,
    append: Annotated[
        bool,
        _VERSION("--append", "Add the samples after those of the ref, with the settings of its build."),
    ] = False,
    about: Annotated[Path | None, options.ABOUT] = None,
    lookup: Annotated[str, options.LOOKUP] = "",
    cost: Annotated[list[str] | None, options.COST] = None,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    location: options.LocationOption = None,
    copies: options.CopiesOption = None,
    critical: options.CriticalOption = None,
    parity: options.ParityOption = None,
    mode: options.ModeOption = None,
    jobs: options.JobsOption = None,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    scratch: options.ScratchOption = None,
    dry_run: options.DryRunOption = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Build a version of a dataset from files.

    The same files and settings give the same version id, whatever the number of jobs. After Ctrl-C or a
    crash the same command continues.

    Example: shardkit build photos/ data/cats --stratify label --split train=0.9,val=0.1
    """
    # --help needs none of it, and pyarrow takes long to import
    from shardkit_tools.building.build_run import build as build_dataset
    from shardkit_tools.version_report import document, print_result, progress_text

    settings = options.settings_for(build_dataset, locals()) | {
        "options": ImportOptions(
            field_types=parse_field_types(schema or []),
            per=per,
            classes=classes,
            split_folders=split_folders,
            skip_bad_rows=on_error == "skip",
            columns=tuple(filter(None, split_names(columns))) if columns else (),
            drop=tuple(drop or ()),
            rename=parse_pairs(rename or [], "--rename", "OLD=NEW, such as --rename 'First Name=first_name'"),
            flatten=flatten,
            dtype=dtype,
            row=row,
            arrays=arrays,
            encoding=encoding,
            quote=quote,
            keys=keys,
            check=check,
            follow_links=follow_links,
        ),
        "output_schema": parse_field_types(output_schema or [], "--output-schema"),
        "pack": _pack(pack),
        "split": split_shares(split),
        "cost": cost or (),
    }
    policy = {"copies": copies, "critical": critical, "parity": parity, "mode": mode}
    begin_copies(root, location, policy, single_writer=single_writer, dry_run=dry_run)
    with console.long_work() as status:
        result = build_dataset(**settings, progress=lambda now: status.show(progress_text(now)))
    lag = None if dry_run else finish_copies(root)
    if as_json:
        console.print_json(document(result, root, ref) | ({} if lag is None else {"lag_bytes": lag}))
    else:
        print_result(result, root, ref)
        print_copies(root, lag)


def _pack(text: str | None) -> dict[str, int] | None:
    if text is None:
        return None
    ((name, length),) = parse_pairs([text], "--pack", _PACK).items()
    if not length.isascii() or not length.isdigit():
        raise UsageError(f"--pack {text!r}: expected {_PACK}")
    return {name: int(length)}


def split_shares(text: str | None) -> dict[str, float | str] | None:
    """Parse ``train=0.9,val=0.1`` to split → share."""
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
