"""`shardkit extend`: a version with more fields, in shards of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shardkit.ranges import split_names
from shardkit_tools import console, options
from shardkit_tools.building.extending import extend as extend_version
from shardkit_tools.importers import ImportOptions, parse_field_types
from shardkit_tools.importers.protocol import parse_pairs
from shardkit_tools.options import argument, option
from shardkit_tools.version_report import moved_document, parse_url


def extend(
    root: Annotated[str, argument("ROOT[@REF]", "The version to extend.")],
    from_: Annotated[
        str | None, option("--from SOURCE", "A table with the new fields, in any form that build reads.")
    ] = None,
    on: Annotated[
        str,
        option(
            "--on FIELD[=COLUMN]",
            "What samples and rows have in common: key, or a field; COLUMN of the table.",
        ),
    ] = "key",
    apply: Annotated[
        str | None,
        option(
            "--apply MODULE:FUNCTION",
            "Instead of a table: a function that returns a dict of new fields for a sample.",
        ),
    ] = None,
    schema: Annotated[list[str] | None, options.SCHEMA] = None,
    output_schema: Annotated[
        list[str] | None,
        option("--output-schema FIELD=TYPE", "Type of a field that --apply makes; may be repeated."),
    ] = None,
    columns: Annotated[
        str, option("--columns FIELD,…", "Take these columns of the table and no others.")
    ] = "",
    drop: Annotated[
        list[str] | None, option("--drop FIELD", "Leave a column of the table out; may be repeated.")
    ] = None,
    rename: Annotated[
        list[str] | None, option("--rename OLD=NEW", "Give a column another name; may be repeated.")
    ] = None,
    encoding: Annotated[str, options.ENCODING] = "",
    quote: Annotated[str, options.QUOTE] = "",
    ref: Annotated[
        str | None, option("--ref NAME", "The ref that the new version gets; default: the one named.")
    ] = None,
    scratch: Annotated[
        Path | None,
        option("--scratch FOLDER", "Folder for the table while it is joined; default: the system's."),
    ] = None,
    message: options.MessageOption = "",
    author: options.AuthorOption = "",
    as_json: options.JsonFlag = False,
) -> None:
    """Add fields to a version, in new shards; existing shards are not written.

    Samples without a row get no value if the field's type ends in ?, and are an error otherwise. verify, repair,
    replicate, gc and audits cover old and new shards.

    Example: shardkit extend data/web --from scores.parquet --on key
    """
    made = extend_version(
        root,
        from_=from_,
        on=on,
        apply=apply,
        options=ImportOptions(
            field_types=parse_field_types(schema or ()),
            columns=tuple(filter(None, split_names(columns))) if columns else (),
            drop=tuple(drop or ()),
            rename=parse_pairs(rename or (), "--rename", "OLD=NEW"),
            encoding=encoding,
            quote=quote,
        ),
        output_schema=parse_field_types(output_schema or (), "--output-schema"),
        ref=ref,
        message=message,
        author=author,
        scratch=scratch,
    )
    document = {
        "root": parse_url(root)[0],
        "id": made.manifest.id,
        "commit": made.moved.entry.n if made.moved.entry else None,
        "moved": moved_document(made.moved.refs),
        "samples": made.samples,
        "added": {name: str(kind) for name, kind in made.fields.items()},
        "unused_rows": made.unused,
    }
    console.present(as_json, lambda: document)
