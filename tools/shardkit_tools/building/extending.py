"""`extend`: fields of a table, or of a function of each sample, become fields of a version (SPEC.md §6)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import shardkit
from shardkit.dataset import Dataset
from shardkit.dataset.about import SourcesObject, pack_sources
from shardkit.dataset.committing import Moved, move_refs, standing_refs
from shardkit.dataset.encoding import joined_batch, sample_batch
from shardkit.dataset.extending import extend_version
from shardkit.dataset.lookups import KEY, Entries, Hashes, hash_payloads
from shardkit.errors import SampleError, SchemaError, SourceError, UsageError
from shardkit.formats import FieldType, Schema, presence_of
from shardkit.formats.arrow_writing import arrow_schema, arrow_type, index_array
from shardkit.formats.block import payloads_of, stored_columns
from shardkit.manifest import Manifest
from shardkit.repository.log import parse_dataset_url
from shardkit.repository.repository import DEFAULT_REF, Repository
from shardkit.stores.file_operations import explained
from shardkit_tools.building.source_digests import check_unchanged, digest_file
from shardkit_tools.importers import ImportOptions
from shardkit_tools.importers.protocol import (
    DecodedRows,
    Importer,
    SourceFailure,
    decode,
    ignore_file,
)
from shardkit_tools.importers.source_kinds import open_source
from shardkit_tools.transforms.applied import AppliedFunction
from shardkit_tools.transforms.transformed import types_of

_FIRST_SAMPLES: Final = 100  # whose results decide the types of new fields
_SHOWN: Final = 3
_NO_FIELD: Final = Schema({"none": FieldType("json")})


@dataclass(frozen=True, slots=True)
class Extension:
    """The result of `extend`."""

    manifest: Manifest  # of the extended version
    fields: Schema  # the new fields
    samples: int
    unused: int  # rows of the table that no sample has the key of
    moved: Moved


def extend(
    url: str | os.PathLike[str],
    *,
    from_: str | os.PathLike[str] | None = None,
    on: str = KEY,
    apply: str | Callable[..., Any] | None = None,
    options: ImportOptions | None = None,
    output_schema: Mapping[str, str] | None = None,
    ref: str | None = None,
    message: str = "",
    author: str = "",
    scratch: str | os.PathLike[str] | None = None,
) -> Extension:
    """Commit a version with more fields, in new shards; existing shards are not written.

    The new fields are written to shards of their own, one for each shard of the version, with the same rows in the same
    blocks. Batches, samples and tables have old and new fields.

    Args:
        url: ``ROOT`` or ``ROOT@REF``.
        from_: a table in any form that `build` reads; all its columns except the joining one become fields.
        on: what joins samples and rows: ``key``, a field, or ``FIELD=COLUMN`` if the table calls it otherwise.
        apply: instead of a table, ``module:function``: from a sample to a dict of its new fields.
        options: types, chosen and renamed columns of the table.
        output_schema: field → type of what `apply` returns, instead of the inferred one.
        ref: the ref that moves to the new version; by default the one named in `url`.
        message: text for the log, like `author`.
        author: see `message`.
        scratch: folder for the table while it is joined, about as large as its columns; by default the system's.

    Raises:
        SourceError: Samples have no row in the table and a field is not optional, or several rows have one key.
        UsageError: The version has such a field already or is merged, or neither or both of `from_` and `apply` are
            given.
    """
    if (from_ is None) == (apply is None):
        raise UsageError("extend takes either a table (--from) or a function (--apply)")
    _check_options(
        {"--on": on != KEY,
         "--schema, --columns, --drop, --rename, --encoding or --quote": options not in (None, ImportOptions()),
         "--scratch": scratch is not None}
        if apply is not None else {"--output-schema": bool(output_schema)},
        other="--from" if apply is not None else "--apply",
    )  # fmt: skip
    root, named = parse_dataset_url(url)
    repository = Repository.open(root)
    moving = ref or named or DEFAULT_REF
    if ref is None and moving not in repository.refs:
        raise UsageError(
            f"{moving!r} is no ref that could be moved; say which ref the new version gets: --ref"
        )
    expected = standing_refs(repository, [moving])
    dataset = shardkit.open(url)
    if dataset.manifest.parts:
        names = ", ".join(name for name, _ in dataset.manifest.parts)
        raise UsageError(f"{os.fspath(url)} is merged; extend its parts ({names}), then merge them again")
    unused, sources = 0, None
    if apply is not None:
        applied = AppliedFields(dataset, AppliedFunction.find(apply), output_schema or {})
        note = {"fields": list(applied.schema), "apply": applied.function.describe()}
        manifest, schema = (
            extend_version(repository, dataset, applied, note=note, sources=None),
            applied.schema,
        )
    else:
        assert from_ is not None, "one of both is given"
        importer = open_source(os.fspath(from_), None, options)
        if scratch is not None and not os.path.isdir(scratch):
            raise UsageError(f"--scratch {os.fspath(scratch)}: no such folder; make it, or name another")
        with explained("make a scratch folder for the table", writing=True):
            made = tempfile.TemporaryDirectory(prefix="shardkit-extend-", dir=scratch)
        with made as folder:
            joined = JoinedTable(dataset, importer, on, Path(folder), os.fspath(from_))
            listed = SourcesObject(tuple(digest_file(file) for file in importer.files()), ())
            for file in importer.files():
                check_unchanged(file)
            sources = repository.put_object(pack_sources(listed), "sources").digest
            note = {"fields": list(joined.schema), "on": on, "source": importer.describe()}
            manifest = extend_version(repository, dataset, joined, note=note, sources=sources)
            schema, unused = joined.schema, joined.unused
    said = message or f"extended by {', '.join(schema)}"
    moved = move_refs(repository, {moving: manifest.id}, expected, message=said, author=author)
    return Extension(manifest, schema, len(dataset), unused, moved)


def _check_options(given: Mapping[str, bool], *, other: str) -> None:
    """Raise UsageError for options that would do nothing."""
    found = ", ".join(name for name, is_given in given.items() if is_given)
    if found:
        raise UsageError(f"{found}: expected only with {other}; leave it out")


class AppliedFields:
    """New fields that a function makes of each sample.

    Attributes:
        function: the function.
        schema: the new fields; types are inferred from the first samples.
    """

    def __init__(self, dataset: Dataset, function: AppliedFunction, given: Mapping[str, str]) -> None:
        self._dataset, self.function = dataset, function
        named = ((f"sample {dataset.key(n)!r}", sample) for n, sample in enumerate(dataset))
        first = islice(((where, self._one(sample, where)) for where, sample in named), _FIRST_SAMPLES)
        self.schema = types_of(first, _NO_FIELD, given)

    def _one(self, sample: Mapping[str, object], where: str) -> Mapping[str, object]:
        made = list(self.function(sample, where))
        if len(made) != 1:
            raise SampleError(
                f"{where}: {self.function.name} returned {len(made)} samples; expected a dict of new fields"
            )
        return made[0]

    def batch(self, shard: int, block: int, rows: NDArray[np.int64], first: int) -> Any:
        """See `NewFields.batch`."""
        found, index = self._dataset.reader.read(shard, block), self._dataset.reader.index(shard)
        start = int(index.block_start[block])
        encoded = []
        for row in rows.tolist():
            where = f"sample {index.original_key(start + row)!r}"
            encoded.append(self.schema.encode(self._one(found.sample(row), where), where=where))
        return sample_batch(self.schema, encoded)


class JoinedTable:
    """New fields from the rows of a table, joined by the key or a field of the samples.

    Columns wait uncompressed in a scratch file; memory holds 40 bytes for each row of the table and of the version.

    Attributes:
        schema: the new fields.
        unused: number of rows of the table that no sample has the key of.
    """

    def __init__(self, dataset: Dataset, importer: Importer, on: str, folder: Path, source: str) -> None:
        self._dataset, self._source = dataset, source
        self._field, _, column = on.partition("=") if on not in dataset.schema else (on, "", "")
        self._kind = FieldType("str") if self._field == KEY else self._kind_of(dataset.schema)
        self._column = self._column_of(importer.schema, column or self._field, is_given=bool(column))
        names = [name for name in importer.schema if name != self._column]
        if not names:
            raise SchemaError(f"{source}: it has no field except {self._column!r}; there is nothing to add")
        self.schema = Schema({name: importer.schema[name] for name in names})
        self._entries = self._read(importer, folder / "table.arrow")
        if not len(self._entries):
            raise SourceError(f"{source}: it has no rows; there is nothing to add")
        self._batches = _map_batches(folder / "table.arrow")
        self._places = self._join()

    def _kind_of(self, schema: Schema) -> FieldType:
        if self._field not in schema:
            raise UsageError(
                f"--on {self._field}: there is no such field; there are key, {', '.join(schema)}"
            )
        kind = schema[self._field].required
        if kind.kind not in ("scalar", "str", "bytes"):
            raise UsageError(f"--on {self._field}: it is {kind}; join by a number, a text, bytes or key")
        return kind

    def _column_of(self, schema: Schema, name: str, *, is_given: bool) -> str | None:
        """Return the column of the table that joins; None for its own keys."""
        if name in schema:
            return name
        if self._field == KEY and not is_given:
            return None
        raise UsageError(
            f"--on {self._field}: {self._source} has no column {name!r}; its columns are {', '.join(schema)}; give the "
            f"column that matches, such as --on {self._field}=COLUMN"
        )

    def _read(self, importer: Importer, file: Path) -> Entries:
        """Write the new columns to a scratch file, and return the hashes of the column that joins."""
        kinds = arrow_schema(self.schema, keys=False)
        hashes, counts = [np.empty((0, 2), np.uint64)], []
        writing = f"write the table to {file}"
        with explained(writing, writing=True):
            sink = pa.OSFile(os.fspath(file), "wb")
        with sink:
            with explained(writing, writing=True):
                writer = pa.ipc.new_file(sink, kinds)
            for found in _rows(importer):
                hashes.append(self._hashes_of(found))
                counts.append(len(found.batch))
                batch = found.batch.select(list(self.schema)).cast(kinds)
                with explained(writing, writing=True):
                    writer.write_batch(batch)
            absent = [(pa.nulls(1, field.type)) for field in kinds]
            with explained(writing, writing=True):
                if all(kind.optional for kind in self.schema.values()):
                    writer.write_batch(pa.RecordBatch.from_arrays(absent, schema=kinds))
                writer.close()
        numbers = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        rows = np.concatenate(
            [np.empty(0, np.uint32), *(np.arange(count, dtype=np.uint32) for count in counts)]
        )
        return Entries.sort(np.concatenate(hashes), numbers, rows)

    def _hashes_of(self, found: DecodedRows) -> Hashes:
        if self._column is None:
            texts = found.origin.keys
            if not texts or any(text is None for text in texts):
                raise SourceError(
                    f"{self._source}: its rows have no keys; name the column that holds them: --on key=COLUMN"
                )
            return hash_payloads([str(text).encode("utf-8", "surrogatepass") for text in texts])
        column = found.batch[self._column]
        if column.null_count:
            place = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            row = f"{found.origin.source_names[place]} row {found.origin.source_row[place]}"
            raise SourceError(
                f"{self._source}: {row}: {self._column} has no value, and joins the rows; leave it out"
            )
        try:
            same = column.cast(arrow_type(self._kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise SchemaError(
                f"{self._source}: column {self._column} ({column.type}) does not become {self._kind}, the type of "
                f"{self._field}: {error}"
            ) from None
        kinds = arrow_schema(one := Schema({"on": self._kind}), keys=False)
        (payloads,) = stored_columns(one, pa.RecordBatch.from_arrays([same], schema=kinds))
        return hash_payloads(payloads_of(payloads))

    def _join(self) -> list[NDArray[np.int64]]:
        """Return, for each shard, the entry of each selected row, or -1 for the row without values."""
        places, missing = [], []
        used = np.zeros(len(self._entries), np.bool_)
        for shard in range(len(self._dataset.table)):
            wanted, is_known = self._valued_hashes(shard)
            query, entry = self._entries.search(wanted)
            query, entry = query[is_known[query]], entry[is_known[query]]
            counts = np.bincount(query, minlength=len(wanted))
            if int(counts.max(initial=0)) > 1:
                key = self._name(shard, int(np.argmax(counts > 1)))
                raise SourceError(
                    f"{self._source}: several rows have the {self._field} of sample {key}; leave one"
                )
            if self._field == KEY:
                self._check_keys(shard, query, entry, used)
            missing += [(shard, int(place)) for place in np.flatnonzero(counts == 0)[:_SHOWN]]
            found = np.full(len(wanted), -1, np.int64)
            found[query] = entry
            used[entry] = True
            places.append(found)
        self.unused = len(used) - int(np.count_nonzero(used))
        required = [name for name, kind in self.schema.items() if not kind.optional]
        if missing and required:
            count = sum(int(np.count_nonzero(found < 0)) for found in places)
            shown = ", ".join(self._name(*place) for place in missing[:_SHOWN])
            raise SourceError(
                f"{self._source}: {count:,} of {len(self._dataset):,} samples have no row, such as {shown}; select the "
                f"samples that have a row first (shardkit select), or let values be missing: --schema "
                f"{required[0]}={self.schema[required[0]]}?"
            )
        return places

    def _check_keys(
        self, shard: int, query: NDArray[np.int64], entry: NDArray[np.int64], used: NDArray[np.bool_]
    ) -> None:
        """Raise SourceError if a row has the key of several samples: keys of adopted tars are unique in each only."""
        twice = used[entry]
        is_first = np.zeros(len(entry), np.bool_)
        is_first[np.unique(entry, return_index=True)[1]] = True
        twice |= ~is_first
        if twice.any():
            key = self._name(shard, int(query[np.argmax(twice)]))
            raise SourceError(
                f"{self._source}: several samples have the key {key}, and the table cannot tell them apart; join by a "
                "field: --on FIELD"
            )

    def _name(self, shard: int, place: int) -> str:
        return repr(
            self._dataset.reader.index(shard).original_key(
                int(self._dataset.rows.rows_of_shard(shard)[place])
            )
        )

    def _valued_hashes(self, shard: int) -> tuple[Hashes, NDArray[np.bool_]]:
        """Return the hashes of the selected rows of a shard, (n, 2), and a mask of the rows with a value, (n,)."""
        index, rows = self._dataset.reader.index(shard), self._dataset.rows.rows_of_shard(shard)
        if self._field == KEY:
            keys = (index.original_key(row) for row in rows.tolist())
            hashes = hash_payloads([key.encode("utf-8", "surrogatepass") for key in keys])
            return hashes, np.ones(len(rows), np.bool_)
        payloads: list[bytes] = []
        known = [np.empty(0, np.bool_)]
        columns = [
            name for name in (self._field, presence_of(self._field)) if name in self._dataset.schema.stored
        ]
        for block in range(index.blocks):
            read = self._dataset.reader.read(shard, block, keys=False, fields=columns)
            start = int(index.block_start[block])
            inside = rows[(rows >= start) & (rows < start + read.rows)] - start
            payloads += [read.column(self._field).payload(row) for row in inside.tolist()]
            known.append(read.present(self._field)[inside])  # a missing value has the payload of 0 or ""
        return hash_payloads(payloads), np.concatenate(known)

    def batch(self, shard: int, block: int, rows: NDArray[np.int64], first: int) -> Any:
        """See `NewFields.batch`."""
        places = self._places[shard][first : first + len(rows)]
        last = len(self._batches) - 1  # the batch of the row without values, if there is one
        numbers = np.where(places < 0, last, self._entries.shard[places])
        inside = np.where(places < 0, 0, self._entries.row[places])
        order = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        taken = [
            self._batches[int(numbers[some[0]])].take(index_array(inside[some]))
            for some in np.split(order, borders[1:])
        ]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return joined_batch(taken, arrow_schema(self.schema, keys=False)).take(index_array(back))


def _rows(importer: Importer) -> Iterator[DecodedRows]:
    for task in importer.tasks():
        for found in decode(importer, task, ignore_file):
            if isinstance(found, SourceFailure):
                raise found.error
            yield found


def _map_batches(file: Path) -> list[Any]:
    """Return the batches of a scratch file of this process as memory maps."""
    reader = pa.ipc.open_file(pa.memory_map(os.fspath(file)))
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]
