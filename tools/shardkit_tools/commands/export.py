"""`shardkit export`: the samples of a version as files of other programs, or what it holds in the words of other tools.

Every sample comes from a verified block, and no more than some blocks are held at a time. Files get their names
when they are whole.

    parquet      a column per field, ``__key__`` before them; json as text; groups of rows of 8 MiB
    hf           the same as Arrow streams, bytes that are pictures as Image, labels with class names as ClassLabel
    jsonl        an object a line, arrays as lists; no bytes, no NaN; no keys
    webdataset   members by the conventions of webdataset (``key.jpg``, ``key.cls``, ``key.left.jpg``); names of fields
                 in lower case; dates, times and decimals as text, lists of texts as json
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import about_of
from shardkit.dataset.croissant import croissant_document
from shardkit.dataset.samples import all_numbers, read_runs
from shardkit.errors import SampleError, SchemaError, StoreError, UsageError
from shardkit.extras import shell_word
from shardkit.formats import Block, FieldType, Schema
from shardkit.formats.arrow_writing import arrow_schema, record_batch
from shardkit.formats.schema import KEY_FIELD
from shardkit.formats.tar_members import (
    TRAILER,
    member_extension,
    member_header,
    member_names,
    member_parts,
    padded,
    sniff_extension,
)
from shardkit.formats.values import logical_text
from shardkit.formats.writing import fit_key, max_key_bytes
from shardkit.ranges import parse_size, split_names
from shardkit.reading.adopted import adopted_place
from shardkit.reading.inventory import take_inventory
from shardkit.stores.file_operations import explained
from shardkit.stores.local import check_outside, is_url
from shardkit.stores.store import object_name
from shardkit_tools import console
from shardkit_tools.console import bytes_text, count_text
from shardkit_tools.importers.tar_members import FIELD_OF_EXTENSION
from shardkit_tools.options import argument, option

_GROUP_BYTES = 8 << 20
_GROUP_ROWS = 1 << 16
_PICTURES = frozenset(["jpg", "png", "gif", "tiff", "webp", "bmp"])
Form = Literal["parquet", "jsonl", "webdataset", "hf"]
_SUFFIXES: dict[Form, str] = {"parquet": ".parquet", "jsonl": ".jsonl", "webdataset": ".tar", "hf": ".arrow"}
_TOLD = {"jsonl": ("bool", "int64", "float64", "str"), "webdataset": ("int64", "str", "json", "bytes")}
"""Types that a build infers from files of a form; of other forms it infers all."""


class _Run(NamedTuple):
    """Samples of one verified block, and their keys."""

    block: Block
    rows: NDArray[np.int64]
    keys: list[str]


def export_samples(
    dataset: Dataset, form: Form, target: Path, *, schema: Schema, file_bytes: int, replace: bool = False
) -> tuple[int, int]:
    """Write all samples of a version or view to a folder of files, or to one file where `target` has its suffix.

    Returns:
        How many files were written, and their bytes.
    """
    _check_fields(form, schema)
    is_file = target.suffix == _SUFFIXES[form] and form != "hf"
    _check_target(target, form, replace=replace, is_file=is_file)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        with explained(f"write {target}", writing=True):
            staging.mkdir()
            features = _features(dataset, schema) if form == "hf" else {}
            names = _write_files(dataset, form, schema, staging, None if is_file else file_bytes, features)
            if form == "hf":
                _describe(staging, names, features, dataset.manifest.id)
            nbytes = sum(_sync(file) for file in staging.iterdir())
            made = staging / names[0] if is_file else staging
            if target.exists():
                target.rename(staging.parent / f"{staging.name}.old")
            made.rename(target)
    finally:
        for left in (staging, staging.parent / f"{staging.name}.old"):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink(missing_ok=True)
    return len(names), nbytes


def _check_target(target: Path, form: Form, *, replace: bool, is_file: bool) -> None:
    if not target.parent.is_dir():
        raise StoreError(f"{target}: the folder {target.parent} does not exist; make it first")
    if not os.path.lexists(target):
        return
    if not replace:
        raise StoreError(f"{target}: is there already; name a new place, or pass --replace")
    known = {"dataset_info.json", "state.json"} if form == "hf" else set()
    if is_file if target.is_file() else target.is_dir() and not is_file and all(
        name in known or (name.startswith("data-") and name.endswith(_SUFFIXES[form])) for name in os.listdir(target)
    ):  # fmt: skip
        return
    raise StoreError(
        f"{target}: holds more than an export as {form} wrote; remove it yourself, or name a new place"
    )


def _sync(file: Path) -> int:
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size


def _write_files(
    dataset: Dataset,
    form: Form,
    schema: Schema,
    folder: Path,
    file_bytes: int | None,
    features: Mapping[str, Any],
) -> list[str]:
    """Names of the files, at least one."""
    names: list[str] = []
    runs = _runs(dataset, schema)
    ahead = list(itertools.islice(runs, 1))

    def of_one_file(stream: BinaryIO) -> Iterator[_Run]:
        while ahead and (file_bytes is None or stream.tell() < max(1, file_bytes)):
            yield ahead.pop()
            ahead.extend(itertools.islice(runs, 1))

    while ahead or not names:
        names.append(f"data-{len(names):05d}{_SUFFIXES[form]}")
        with (folder / names[-1]).open("xb") as stream:
            if form == "jsonl":
                _write_lines(stream, schema, of_one_file(stream))
            elif form == "webdataset":
                _write_tar(stream, schema, of_one_file(stream))
            else:
                group_bytes = min(file_bytes or _GROUP_BYTES, _GROUP_BYTES)
                _write_tables(stream, schema, of_one_file(stream), features, group_bytes)
    return names


def _runs(dataset: Dataset, schema: Schema) -> Iterator[_Run]:
    keys = _keys(dataset)
    fields = list(schema.stored)
    for block, rows in read_runs(dataset.reader, dataset.rows, all_numbers(len(dataset)), fields):
        yield _Run(block, rows, list(itertools.islice(keys, len(rows))))


def _keys(dataset: Dataset) -> Iterator[str]:
    """Yield the keys of all samples, in order; in a merged version they begin with the name of their part."""
    is_merged = bool(dataset.manifest.parts)
    for numbers in all_numbers(len(dataset)):
        where = dataset.rows.locate(numbers)
        for shard, row in zip(where.shard.tolist(), where.row.tolist(), strict=True):
            key = dataset.reader.index(shard).original_key(row)
            yield f"{dataset.version.part_of(shard).name}/{key}" if is_merged else key


# ---- the forms


def _write_lines(stream: BinaryIO, schema: Schema, runs: Iterable[_Run]) -> None:
    """Write one JSON object a line. A missing value is null; in a json field, where null is a value, it is left out."""
    for run in runs:
        for row, key in zip(run.rows.tolist(), run.keys, strict=True):
            sample = schema.decode([run.block.column(name).payload(row) for name in schema.stored])
            plain = {
                name: value.tolist() if isinstance(value, np.ndarray) else logical_text(value) or value
                for name, value in sample.items()
                if run.block.present(name)[row] or schema[name].kind != "json"
            }
            try:
                text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
            except ValueError:
                raise _not_finite(schema, sample, key) from None
            stream.write(text.encode() + b"\n")


def _not_finite(schema: Schema, sample: Mapping[str, object], key: str) -> SampleError:
    name = next(
        name for name, kind in schema.items()
        if (kind.items or kind).dtype.startswith("float") and sample[name] is not None
        and not np.isfinite(sample[name]).all()  # type: ignore[call-overload]
    )  # fmt: skip
    return SampleError(
        f"sample {key!r}: field {name!r} ({schema[name]}) is NaN or infinite, which JSON does not have; "
        "export --as parquet, webdataset or hf"
    )


def _write_tar(stream: BinaryIO, schema: Schema, runs: Iterable[_Run]) -> None:
    """Write members that a build of the tar reads as the same fields: ``key.jpg``, or ``key.left.jpg``."""
    limit = max_key_bytes(schema, "tar")
    names = dict(zip(schema, member_names(schema), strict=True))
    fields = {name: Schema({name: kind.required}) for name, kind in schema.items()}
    for run in runs:
        columns = {name: (run.block.column(name), run.block.present(name)) for name in schema}
        for row, key in zip(run.rows.tolist(), run.keys, strict=True):
            if not any(present[row] for _, present in columns.values()):
                raise SampleError(
                    f"sample {key!r}: no field has a value, and a sample of a tar is its members; export --as parquet, "
                    "jsonl or hf"
                )
            kept = key if _is_tar_key(key, limit) else fit_key(key, limit)
            for name, (column, present) in columns.items():
                if present[row]:
                    _write_member(stream, f"{kept}.", names[name], fields[name], column.payload(row))
    stream.write(TRAILER)


_DIRECTORIES = re.compile(r"(?:[^./][^/]*/)*[^./]+")


def _is_tar_key(key: str, limit: int) -> bool:
    """Return True if readers of tars find this key again: no dot in its last part, and no way out."""
    fits = key.isprintable() and len(key.encode()) <= limit
    return fits and _DIRECTORIES.fullmatch(key) is not None


def _write_member(stream: BinaryIO, before: str, dotted: str, field: Schema, payload: bytes) -> None:
    """Write the member of the only field of a schema."""
    ((name, kind),) = field.items()
    if (
        kind.logical is not None or kind.kind == "list"
    ):  # shards hold numbers and packed items, which no reader knows
        value = field.decode([payload])[name]
        text = logical_text(value)
        extension, text = ("json", json.dumps(value, ensure_ascii=False)) if text is None else ("txt", text)
        parts: tuple[bytes, bytes | memoryview] = (b"", text.encode())
    else:
        extension, parts = member_extension(kind, payload), member_parts(kind, payload)
    suffix = extension if FIELD_OF_EXTENSION.get(extension) == name else f"{dotted}.{extension}"
    size = sum(map(len, parts))
    stream.write(member_header(f"{before}{suffix}".encode(), size))
    stream.writelines(parts)
    stream.write(bytes(padded(size) - size))


def _write_tables(
    stream: BinaryIO, schema: Schema, runs: Iterable[_Run], features: Mapping[str, Any], group_bytes: int
) -> None:
    """Rows as Arrow has them, some at a time: a group of rows of Parquet; with features a batch of an Arrow stream."""
    arrow, plain = (arrow_schema(schema, keys=keys, packed=False) for keys in (True, False))
    if features:
        arrow = _with_media(arrow, features)  # the schema in its metadata says which text is json
    held: list[Any] = []
    with pa.ipc.new_stream(stream, arrow) if features else pq.ParquetWriter(stream, arrow) as writer:

        def flush() -> None:
            if held:
                writer.write_table(pa.Table.from_batches(held, arrow).combine_chunks())
                held.clear()

        for run in runs:
            batch = record_batch(run.block, run.rows, schema, plain)
            arrays = [
                _files(array, field.type) if pa.types.is_struct(field.type) else array
                for array, field in zip(
                    [pa.array(run.keys, pa.large_string()), *batch.columns], arrow, strict=True
                )
            ]
            held.append(pa.RecordBatch.from_arrays(arrays, schema=arrow))
            if sum(one.nbytes for one in held) >= group_bytes or sum(map(len, held)) >= _GROUP_ROWS:
                flush()
        flush()


def _with_media(arrow: Any, features: Mapping[str, Any]) -> Any:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for place, field in enumerate(arrow):
        if features[field.name]["_type"] == "Image":
            arrow = arrow.set(place, field.with_type(kind))
    return arrow


def _files(column: Any, kind: Any) -> Any:
    """Bytes as Hugging Face keeps files."""
    paths = pa.nulls(len(column), pa.string())
    return pa.StructArray.from_arrays(
        [column.cast(pa.binary()), paths], fields=list(kind), mask=column.is_null()
    )


def _check_fields(form: Form, schema: Schema) -> None:
    for member, (name, kind) in zip(member_names(schema), schema.items(), strict=True):
        others = "parquet, jsonl or hf"
        if form == "jsonl" and "bytes" in (kind.kind, str(kind.items)):
            others = "parquet or hf" if kind.kind == "list" else "parquet, webdataset or hf"
            why = f"is {kind}, which JSON does not have"
        elif form == "webdataset" and kind.kind == "list" and str(kind.items) == "bytes":
            why, others = f"is {kind}, which members of tars do not have", "parquet or hf"
        elif form == "webdataset" and name != name.lower():
            why = f"({kind}): readers of WebDataset make names of members lower case"
        elif form == "webdataset" and "%-" in member:
            why = f"({kind}): too long for names of members, which hold 40 bytes of it"
        else:
            continue
        raise SchemaError(f"field {name!r} {why}; export --as {others}, or leave it out with --columns")


# ---- a Hugging Face folder


def _features(dataset: Dataset, schema: Schema) -> dict[str, Any]:
    """The types of the columns as ``datasets`` writes them; bytes that begin with pictures are pictures."""
    first = next(_runs(dataset, schema), None)
    features: dict[str, Any] = {KEY_FIELD: _feature(pa.large_string())}
    for field, (name, kind) in zip(
        arrow_schema(schema, keys=False, packed=False), schema.items(), strict=True
    ):
        features[name] = _feature(field.type)
        if name == "label" and kind.required == FieldType("scalar", "int64") and dataset.classes:
            features[name] = {"names": list(dataset.classes), "_type": "ClassLabel"}
        if kind.kind == "bytes" and first is not None:
            has_value, column = first.block.present(name), first.block.column(name)
            found = {sniff_extension(column.payload(row)) for row in first.rows.tolist() if has_value[row]}
            if found and found <= _PICTURES:
                features[name] = {"_type": "Image"}
    return features


def _feature(kind: Any) -> dict[str, Any]:
    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "Sequence"}
    if pa.types.is_large_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "LargeList"}
    text = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return {"dtype": text, "_type": "Value"}


def _describe(folder: Path, names: list[str], features: Mapping[str, Any], manifest: str) -> None:
    """Write the two documents that ``datasets.load_from_disk`` reads."""
    state: dict[str, Any] = dict.fromkeys(["_format_columns", "_format_type", "_split"]) | {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": manifest.removeprefix("sha256:")[:16],
        "_format_kwargs": {},
        "_output_all_columns": False,
    }
    for name, document in (("dataset_info.json", {"features": features}), ("state.json", state)):
        (folder / name).write_text(
            json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


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
        str | None,
        option("--where CONDITION", "Export only samples that fulfil it, such as '`First Name` < 5'."),
    ] = None,
    columns: Annotated[
        str | None, option("--columns FIELD,…", "Export only these fields, in this order.")
    ] = None,
    file_size: Annotated[str, option("--file-size SIZE", "Largest size of a file of samples.")] = "256MiB",
    replace: Annotated[bool, option("--replace", "Replace an earlier export of samples.")] = False,
) -> None:
    """Hand a version to other tools.

    parquet, jsonl, webdataset and hf (a folder for datasets.load_from_disk) write the samples, each verified
    on the way. PATH appears when it is whole; a build of it gives the same samples, with the --schema that is
    printed where the files do not tell all types. sha256sums lists every object of the version, with paths as
    they are in ROOT, and adopted files at their places; urls lists the shards alone, in order; croissant is a
    description with licences, fields and the SHA-256 of every shard.

    Example: shardkit export data/cats --as parquet --where "label < 5" -o cats.parquet
    """
    if out is not None:
        if is_url(out):
            raise StoreError(f"{out}: an export writes to a local folder; name one, and copy it from there")
        check_outside(out)
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
    names = list(view.schema) if columns is None else split_names(columns)
    for name in names:
        view.schema.position(name)  # refuses what there is not
    schema = Schema({name: view.schema[name] for name in names})
    files, nbytes = export_samples(
        view, form, out, schema=schema, file_bytes=parse_size(file_size), replace=replace
    )
    console.print_line(
        f"{out}: {count_text(len(view), 'sample')} in {count_text(files, 'file')}, {bytes_text(nbytes)}"
    )
    untold = [
        f"{name}={kind}" for name, kind in schema.items() if form in _TOLD and str(kind) not in _TOLD[form]
    ]
    if untold:
        words = " ".join(f"--schema {shell_word(one)}" for one in untold)
        console.print_line(f"{form} does not tell all types: build it with {words}", "dim")
    free = ", ".join(name for name, kind in schema.items() if kind.items and kind.items.shape.count(0) > 1)
    if free and form != "webdataset":
        console.print_line(f"{form} lists nothing of empty arrays: (0, 4) becomes (0, 0) in {free}", "dim")


def _sums(dataset: Dataset) -> Iterator[str]:
    """Every object of a version: roots, pages, selections, indexes, shards."""
    roots = [(dataset.repository, dataset.manifest.id)] if dataset.manifest.parts else []
    roots += [(part.repository, part.manifest.id) for part in dataset.version.parts]
    roots += [(dataset.repository, added.manifest.id) for added in dataset.version.added]
    adopted = _adopted_places(dataset)
    inventories = (take_inventory(repository.store, version) for repository, version in roots)
    for name in dict.fromkeys(name for inventory in inventories for name, _ in inventory.names()):
        yield _sum_line(name.rpartition("/")[2].partition(".")[0], adopted.get(name, name))


def _sum_line(digits: str, path: str) -> str:
    """Return a line in the format of sha256sum, which escapes backslashes and line ends."""
    escaped = path.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == path else chr(92)}{digits}  {escaped}"


def _adopted_places(dataset: Dataset) -> dict[str, str]:
    """Name of each adopted shard → path or URL of its tar."""
    places = {}
    for shard in range(len(dataset.table)):
        part = dataset.version.part_of(shard)
        if part.manifest.adopted:
            name = dataset.reader.shard_name(shard)
            place = adopted_place(part.repository.store, name)
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
    for added in dataset.version.added:
        names = (object_name(added.table.digest_text(shard), "arrow") for shard in range(len(added.table)))
        yield from (f"{dataset.repository.url}/{name}" for name in names)
