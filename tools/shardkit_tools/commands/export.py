"""`shardkit export`: a dataset in the words of other tools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, TextIO

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import about_of
from shardkit.dataset.croissant import croissant_document
from shardkit.dataset.expressions import split_names
from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.manifest import ADOPTED
from shardkit.ranges import parse_size
from shardkit.reading.inventory import take_inventory
from shardkit.storage import adopted_place, with_adopted
from shardkit_tools import console
from shardkit_tools.console import bytes_text, count_text
from shardkit_tools.exporting import Form, export_samples
from shardkit_tools.options import argument, option


def export(
    root: Annotated[str, argument("ROOT[@REF]", "The version to export.")],
    kind: Annotated[
        Literal[Form, "sha256sums", "urls", "croissant"],
        option(
            "--as FORM",
            "parquet, jsonl, webdataset, hf: the samples. sha256sums: for `sha256sum -c`; urls: the shards' "
            "paths; croissant: MLCommons JSON-LD.",
        ),
    ],
    out: Annotated[
        Path | None,
        option("--out -o PATH", "A new file; for samples a new folder, or one file such as cats.parquet."),
    ] = None,
    where: Annotated[
        str | None, option("--where CONDITION", "Only samples that fulfil it, such as '`First Name` < 5'.")
    ] = None,
    columns: Annotated[str | None, option("--columns FIELD,…", "Only these fields, in this order.")] = None,
    file_size: Annotated[
        str, option("--file-size SIZE", "Of samples: begin a new file after so many bytes.")
    ] = "256MiB",
    replace: Annotated[bool, option("--replace", "Write samples in the place of an earlier export.")] = False,
) -> None:
    """Hand a version to other tools.

    parquet, jsonl, webdataset and hf (a folder for datasets.load_from_disk) write the samples, each verified
    on the way; PATH appears when it is whole, and builds again as it is. sha256sums lists every object of the
    version, with paths as they are in ROOT, and adopted tars where they lie; urls lists the shards alone, in
    order; croissant is a description with licences, fields and the SHA-256 of every shard.

    Example: shardkit export data/cats --as parquet --where "label < 5" -o cats.parquet
    """
    dataset = shardkit.open(root)
    if kind != "sha256sums" and kind != "urls" and kind != "croissant":
        _export_samples(dataset, kind, out, where, columns, file_size, replace)
        return
    if where is not None or columns is not None or replace:
        raise UsageError(f"--where, --columns and --replace are for samples, and --as {kind} lists objects")
    lines = {"sha256sums": _sums, "urls": _urls, "croissant": _croissant}[kind](dataset)
    with contextlib.ExitStack() as stack:
        stream: TextIO = sys.stdout
        if out is not None:
            stream = stack.enter_context(io.TextIOWrapper(console.new_file(out), encoding="utf-8"))
        stream.writelines(f"{line}\n" for line in lines)


def _export_samples(
    dataset: Dataset,
    form: Form,
    out: Path | None,
    where: str | None,
    columns: str | None,
    file_size: str,
    replace: bool,
) -> None:
    if out is None:
        raise UsageError(f"--as {form} writes files; say where: --out PATH")
    view = dataset if where is None else dataset.select(where=where)
    schema = view.schema
    if columns is not None:
        names = split_names(columns)
        for name in names:
            view.schema.position(name)  # refuses what there is not
        schema = Schema({name: view.schema[name] for name in names})
    written = export_samples(
        view, form, out, schema=schema, file_bytes=parse_size(file_size), replace=replace
    )
    console.print_line(
        f"{out}: {count_text(written.samples, 'sample')} in {count_text(written.files, 'file')}, "
        f"{bytes_text(written.nbytes)}"
    )


def _sums(dataset: Dataset) -> Iterator[str]:
    """Every object of a version: roots, pages, selections, indexes, shards."""
    roots = [(dataset.repository, dataset.manifest.id)] if dataset.manifest.parts else []
    roots += [(part.repository, part.manifest.id) for part in dataset.version.parts]
    adopted = _adopted_places(dataset)
    inventories = (take_inventory(repository, version) for repository, version in roots)
    for name in dict.fromkeys(name for inventory in inventories for name, _ in inventory.names()):
        yield _sum_line(name.rpartition("/")[2].partition(".")[0], adopted.get(name, name))


def _sum_line(digits: str, path: str) -> str:
    """A line as sha256sum writes it, which escapes what would end it."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == path else chr(92)}{digits}  {escaped}"


def _adopted_places(dataset: Dataset) -> dict[str, str]:
    """Name of each adopted shard → path or URL of its tar."""
    places = {}
    for shard in range(len(dataset.table)):
        part = dataset.version.part_of(shard)
        if ADOPTED in part.manifest.features:
            name = dataset.reader.shard_name(shard)
            place = adopted_place(with_adopted(part.repository, part.manifest).store, name)
            if place is not None:
                places[name] = place if "://" in place else os.path.abspath(place)
    return places


def _croissant(dataset: Dataset) -> Iterator[str]:
    name = dataset.repository.url.rstrip("/").rpartition("/")[2]
    document = croissant_document(dataset.version, about_of(dataset.version), name=name)
    yield json.dumps(document, indent=2, ensure_ascii=False)


def _urls(dataset: Dataset) -> Iterator[str]:
    adopted = _adopted_places(dataset)
    for shard in range(len(dataset.table)):
        name = dataset.reader.shard_name(shard)
        yield adopted.get(name) or f"{dataset.version.part_of(shard).repository.url}/{name}"
