"""`shardkit find`: which samples have a value, from the look-ups alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.lookups import KEY, Matches, find_samples, hash_values
from shardkit.errors import UsageError
from shardkit.exit_codes import ExitCode
from shardkit.formats import Schema
from shardkit_tools import console, options
from shardkit_tools.options import option
from shardkit_tools.row_lists import read_values

_FIELD_HELP = (
    "url=https://…, key=cat-17 or image:sha256=HEX; may be repeated. Without a value: what --list holds."
)


def find(
    root: options.VersionArgument,
    field: Annotated[list[str] | None, option("--field FIELD[=VALUE]", _FIELD_HELP)] = None,
    listed: Annotated[
        Path | None, option("--list FILE", "A file of values, one a line; of keys without --field.")
    ] = None,
    scan: Annotated[bool, option("--scan", "Read all samples if the field has no look-up.")] = False,
    as_json: options.JsonFlag = False,
) -> None:
    """Find samples by key, by the value of a field, or by the SHA-256 of its bytes.

    Look-ups are made by build, create and rebuild (--lookup key,url,image:sha256); keys need none. Exit code 5:
    some values were not found.

    Example: shardkit find data/web --field url --list takedown.txt
    """
    dataset = shardkit.open(root)
    found: list[dict[str, Any]] = []
    missing: list[dict[str, str]] = []
    for name, values in _values_by_field(field or [], listed, dataset.schema).items():
        looked_up, hashes = hash_values(dataset.schema, name, values)
        matches = find_samples(dataset, looked_up, hashes, scan=scan)
        found += _rows(dataset, name, values, matches)
        hit = set(matches.value.tolist())
        missing += [{"field": name, "value": one} for place, one in enumerate(values) if place not in hit]
    sources = [one["source"] or {"name": "", "row": ""} for one in found]
    rows = [
        one | {"source": source["name"], "source_row": source["row"]}
        for one, source in zip(found, sources, strict=True)
    ]
    console.present(
        as_json,
        lambda: {"root": root, "found": found, "missing": missing},
        lambda: console.print_document({"found": rows, "missing": missing}),
        ExitCode.NO if missing else ExitCode.DONE,
    )


def _values_by_field(fields: list[str], listed: Path | None, schema: Schema) -> dict[str, list[str]]:
    """Field → values, in the order given."""
    asked: dict[str, list[str]] = {}
    bare = [pair for pair in fields if "=" not in pair or pair in schema]
    for pair in fields:
        if pair not in bare:
            ends = [place for place, sign in enumerate(pair) if sign == "="]
            end = next(
                (end for end in ends if pair[:end] in schema), ends[0]
            )  # a name may hold the sign itself
            asked.setdefault(pair[:end], []).append(pair[end + 1 :])
    if listed is None and (bare or not asked):
        raise UsageError("find needs values: --field FIELD=VALUE, or --field FIELD --list FILE")
    if len(bare) > 1:
        raise UsageError(f"find: --list holds values of one field, not of {' and '.join(bare)}")
    if listed is not None:
        name = bare[0] if bare else KEY
        is_json = name in schema and schema[name].kind == "json"
        asked.setdefault(name, []).extend(read_values(listed, quoted=is_json))
    return asked


def _rows(dataset: Dataset, name: str, values: list[str], matches: Matches) -> list[dict[str, Any]]:
    rows = []
    columns = (matches.value, matches.sample, matches.shard, matches.row)
    for value, sample, shard, row in zip(*(column.tolist() for column in columns), strict=True):
        index = dataset.reader.index(shard)
        source = dataset.reader.source(shard, row)
        place = None if source is None else {"name": source[0], "row": source[1]}
        key = index.original_key(row)
        rows.append({"field": name, "value": values[value], "sample": sample, "key": key, "source": place})
    return rows
