"""Samples of a version as Python values, as tables (SPEC.md §14), and as the population of a plan."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.sample_view import Sample, SampleList
from shardkit.errors import MissingDependency, PlanError, SampleIndexError, ShardkitError, UsageError
from shardkit.formats import Block, Schema
from shardkit.manifest import Manifest, ShardTable
from shardkit.plan import Population
from shardkit.plan.permutation import Feistel, derive
from shardkit.ranges import Range, names_of
from shardkit.reading.blocks import BlockReader, RowMap, VerifySetting
from shardkit.repository.versions import Version

_COUNT = Range(0, 2**40)
_COUNT_OF_BATCH = Range(1, 2**40)
_SEEDS = Range(0, 2**64 - 1)
_SAMPLE = 0x73616D706C65  # "sample": separates these draws from other uses of a seed


class Samples:
    """Base class of `Dataset`: a sequence of verified samples, and a table."""

    def __init__(self, version: Version, *, verify: VerifySetting = "auto") -> None:
        self.version = version
        self.manifest = version.manifest
        self.table = version.table
        self._verify: VerifySetting = verify

    @property
    def schema(self) -> Schema:
        """Field names and types."""
        return self.manifest.schema

    @cached_property
    def reader(self) -> BlockReader:
        """Reader of the version's blocks."""
        parts = self.version.parts
        own = BlockReader(
            self.table,
            [part.repository.store for part in parts],
            [part.first_shard for part in parts],
            [part.manifest.format for part in parts],
            self._verify,
        )
        if not self.version.added:
            return own
        from shardkit.reading.added_fields import (  # few versions have added fields
            AddedFields,
            ExtendedReader,
        )

        added = [
            AddedFields(one.manifest.schema, Samples(one, verify=self._verify).reader)
            for one in self.version.added
        ]
        return ExtendedReader(own, self.schema, added)

    @cached_property
    def rows(self) -> RowMap:
        """Map from sample numbers to shards and rows."""
        return RowMap(self.table, self.version.load_selection)

    def __len__(self) -> int:
        return self.manifest.selected

    # ---- Python values

    @overload
    def __getitem__(self, sample: int | np.integer[Any]) -> dict[str, Any]: ...

    @overload
    def __getitem__(
        self, sample: slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> list[dict[str, Any]]: ...

    def __getitem__(self, sample: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """Return a sample as a dict of Python values and new arrays; a list for a slice, list or array.

        Negative numbers count from the end. ``select(rows=…)`` returns a dataset instead and reads nothing.
        """
        if is_one(sample):
            shard, block, inside, _ = self._locate_one(sample)
            return Sample(self.reader.read(shard, block).sample(inside), self.manifest.classes)
        return self._several(numbers_of(sample, len(self), "ds[…]"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples in order; each block is read once and held until its last sample."""
        for block, rows in read_runs(self.reader, self.rows, all_numbers(len(self))):
            for row in rows.tolist():
                yield Sample(block.sample(row), self.manifest.classes)

    def __contains__(self, wanted: object) -> NoReturn:
        """Refuse: a number, a key or a sample could be meant, and two of these would read everything."""
        raise UsageError(
            f"{wanted!r:.60} in ds: say what is meant: `0 <= number < len(ds)` for a sample number, "
            "`shardkit find ROOT --field key=KEY` for a key, ds.select(where=…) for the value of a field"
        )

    def head(self, n: int = 5) -> list[dict[str, Any]]:
        """Return the first `n` samples, or all if there are fewer.

        Examples:
            >>> [int(sample["label"]) for sample in ds.head(3)]
            [0, 0, 0]
        """
        return self[: _COUNT.check("head: n", n)]

    def sample(self, n: int, seed: int = 0) -> list[dict[str, Any]]:
        """Return `n` different samples in random order: the same for the same version and seed."""
        if _COUNT.check("sample: n", n) > len(self):
            raise UsageError(
                f"ds.sample({n}): this dataset has {len(self)} samples; ask for at most that many"
            )
        key = derive(_SEEDS.check("sample: seed", seed), _SAMPLE)
        return self._several(Feistel(key, len(self))(np.arange(n, dtype=np.int64)))

    def key(self, sample: int) -> str:
        """Return the key of a sample as given by the source.

        Examples:
            >>> int(ds[0]["image"][0, 0]), ds.key(0)  # builds shuffle: digit 160 became the first
            (160, 'digit-160')
        """
        shard, _, _, row = self._locate_one(sample, "ds.key(…)")
        return self.reader.index(shard).original_key(row)

    def source(self, sample: int) -> tuple[str, int] | None:
        """Return the (source file, row in it) of a sample, if the build recorded it."""
        shard, _, _, row = self._locate_one(sample, "ds.source(…)")
        return self.reader.index(shard).source(row)

    def name_of(self, sample: int) -> str:
        """Return number, key and source of a sample as text; only the number if its index is unreadable."""
        try:
            key, source = self.key(sample), self.source(sample)
        except ShardkitError:
            return str(sample)
        return f"{sample} (key {key!r}{'' if source is None else f', row {source[1]} of {source[0]}'})"

    def _several(self, numbers: NDArray[np.int64]) -> SampleList:
        """Return samples in the order of `numbers`, each a separate dict; each block is read once."""
        order = np.argsort(numbers, kind="stable")
        found = SampleList([Sample({})] * len(numbers))
        places = iter(order.tolist())
        for block, rows in read_runs(self.reader, self.rows, [numbers[order]]):
            for row in rows.tolist():
                found[next(places)] = Sample(block.sample(row), self.manifest.classes)
        return found

    def _locate_one(self, sample: object, call: str = "ds[…]") -> tuple[int, int, int, int]:
        where = self.rows.locate(np.array([number_of(sample, len(self), call)]))
        shard, block = self.rows.shard_of_block(int(where.block[0]))
        return shard, block, int(where.row_in_block[0]), int(where.row[0])

    # ---- tables

    def iter_arrow(self, batch_rows: int = 1024, fields: Sequence[str] | None = None) -> Any:
        """Return all samples as a ``pyarrow.RecordBatchReader``; blocks are read and verified on demand.

        Fixed shapes are nested fixed-size lists, ragged fields large lists, json text. Only optional fields
        are nullable.
        """
        return self._stream(fields, _COUNT_OF_BATCH.check("iter_arrow: batch_rows", batch_rows))

    def _stream(self, fields: Sequence[str] | None, batch_rows: int | None) -> Any:
        """Return a ``pyarrow.RecordBatchReader``; without `batch_rows`, one batch per block."""
        if isinstance(fields, str):
            raise UsageError(f"fields={fields!r}: expected a list of field names, such as [{fields!r}]")
        schema = self.schema
        if fields is not None:
            fields = names_of(fields, "fields")
            for name in fields:
                schema.position(name)
            schema = Schema({name: schema[name] for name in fields})
        import pyarrow as pa  # slow to import, and only needed for tables

        from shardkit.formats.arrow_writing import arrow_schema, record_batch

        arrow = arrow_schema(schema, keys=False, packed=False)
        runs = read_runs(self.reader, self.rows, all_numbers(len(self)), list(schema.stored))
        batches = (record_batch(block, rows, schema, arrow) for block, rows in runs)
        return pa.RecordBatchReader.from_batches(
            arrow, batches if batch_rows is None else _rebatch(batches, batch_rows)
        )

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return an Arrow C stream: duckdb, polars and pyarrow read a dataset directly, block by block."""
        return self.iter_arrow().__arrow_c_stream__(requested_schema)

    def to_arrow(self, fields: Sequence[str] | None = None) -> Any:
        """Return all samples as a ``pyarrow.Table`` in memory, one chunk per block. See `iter_arrow`.

        Examples:
            >>> ds.to_arrow(["label"]).num_rows
            200
        """
        return self._stream(fields, None).read_all()

    def to_pandas(self, fields: Sequence[str] | None = None) -> Any:
        """Return all samples as a ``pandas.DataFrame``; see `iter_arrow`."""
        table_library("pandas", "to_pandas")
        return self.to_arrow(fields).to_pandas()

    def to_polars(self, fields: Sequence[str] | None = None) -> Any:
        """Return all samples as a ``polars.DataFrame``; see `iter_arrow`."""
        return table_library("polars", "to_polars").from_arrow(self.to_arrow(fields))


def is_one(wanted: object) -> bool:
    """Return True if an index asks for one sample, valid or not, rather than several."""
    if isinstance(wanted, slice | list | range | tuple):
        return False
    return not hasattr(wanted, "__array__") or np.ndim(wanted) == 0


def number_of(wanted: object, count: int, call: str) -> int:
    """Return a sample number as 0 to `count` - 1; negative numbers count from the end.

    Raises:
        UsageError: It is not an integer.
        SampleIndexError: It is out of range.
    """
    if _is_mask(wanted):  # older numpy and torch take a truth for the number 1
        raise _refusal(wanted, count, call)
    try:
        number = operator.index(wanted)  # type: ignore[arg-type]
    except TypeError:
        raise _refusal(wanted, count, call) from None
    if not -count <= number < count:
        raise SampleIndexError(f"sample {wanted} does not exist: this dataset has samples 0 to {count - 1}")
    return number + count if number < 0 else number


def numbers_of(wanted: Any, count: int, call: str) -> NDArray[np.int64]:
    """Return several sample numbers in the caller's order, (n,) int64; see `number_of`."""
    if isinstance(wanted, slice):
        try:
            return np.arange(*wanted.indices(count), dtype=np.int64)
        except (TypeError, ValueError):
            raise _refusal(wanted, count, call) from None
    if isinstance(wanted, range):
        ends = [number_of(one, count, call) for one in (wanted[0], wanted[-1])] if wanted else []
        wanted = np.arange(wanted.start, wanted.stop, wanted.step) if ends else np.empty(0, np.int64)
    if isinstance(wanted, list):
        if set(map(type, wanted)) == {int} and max(wanted) < 2**63 and min(wanted) >= -(2**63):
            wanted = np.array(wanted, dtype=np.int64)  # checked as a whole
        else:
            inner = call.replace("…", "[…]")
            return np.array([number_of(one, count, inner) for one in wanted], dtype=np.int64)
    if isinstance(wanted, tuple) or not hasattr(wanted, "__array__"):
        raise _refusal(wanted, count, call)
    array = np.asarray(wanted)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _refusal(wanted, count, call)
    if array.size:
        for end in (int(array.min()), int(array.max())):
            number_of(end, count, call)
    numbers = array.astype(np.int64)
    return np.where(numbers < 0, numbers + count, numbers)


def _refusal(wanted: object, count: int, call: str) -> UsageError:
    shown = f"{wanted!r:.60}".replace("\n", " ")
    if isinstance(wanted, str):
        advice = "a sample is known by its number; `shardkit find ROOT --field key=KEY` finds that of a key"
    elif isinstance(wanted, tuple):
        advice = "several samples are asked for by a list, such as ds[[3, 5, 8]]"
    elif _is_mask(wanted):
        advice = "True and False are no sample numbers; for a mask ask for np.flatnonzero(mask)"
    else:
        advice = "expected a sample number, a slice, or a list or array of sample numbers"
    return UsageError(f"{call.replace('…', shown)}: {advice}; this dataset has samples 0 to {count - 1}")


def _is_mask(wanted: object) -> bool:
    return isinstance(wanted, bool) or str(getattr(wanted, "dtype", "")).endswith("bool")


_NUMBERS_AT_ONCE = 1 << 16  # bounds memory when locating samples


def all_numbers(count: int) -> Iterator[NDArray[np.int64]]:
    """Yield the sample numbers 0 to `count` - 1, some at a time."""
    for start in range(0, count, _NUMBERS_AT_ONCE):
        yield np.arange(start, min(start + _NUMBERS_AT_ONCE, count), dtype=np.int64)


def numbers_in(dataset: Samples, other: Samples, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of samples of a dataset in another version: (n,) int64, -1 for samples that it lacks.

    A sample is identified by its shard and its row in it.
    """
    shards = {digest.tobytes(): number for number, digest in enumerate(other.table.digest)}
    first = np.concatenate(([0], np.cumsum(other.table.selected, dtype=np.int64)))
    where, found = dataset.rows.locate(samples), np.full(len(samples), -1, dtype=np.int64)
    for shard in np.unique(where.shard).tolist():
        there = shards.get(dataset.table.digest[shard].tobytes())
        if there is not None:
            here, rows = np.flatnonzero(where.shard == shard), other.rows.rows_of_shard(there)
            at = np.searchsorted(rows, where.row[here])
            is_there = np.append(rows, -1)[at] == where.row[here]
            found[here[is_there]] = first[there] + at[is_there]
    return found


def removed_samples(dataset: Samples, fewer: Samples) -> NDArray[np.int64]:
    """Return the samples of a dataset that another version of the same shards lacks: (n,) int64, ascending.

    Raises:
        PlanError: the other version has samples that `dataset` does not have, or has them in another order.
    """
    removed, kept = [np.empty(0, dtype=np.int64)], 0
    for numbers in all_numbers(len(dataset)):
        found = numbers_in(dataset, fewer, numbers)
        there = found[found >= 0]
        if not np.array_equal(there, np.arange(kept, kept + len(there))):
            break
        removed.append(numbers[found < 0])
        kept += len(there)
    if kept != len(fewer):
        raise PlanError(
            f"{fewer.manifest.id[:19]}… has {len(fewer) - kept} samples that {dataset.manifest.id[:19]}… does not "
            "have, or has them in another order; to change to other samples use plan.amend(manifest=…), which starts "
            "new epochs"
        )
    return np.concatenate(removed)


def read_runs(
    reader: BlockReader,
    row_map: RowMap,
    numbers: Iterable[NDArray[np.int64]],
    fields: Sequence[str] | None = None,
) -> Iterator[tuple[Block, NDArray[np.int64]]]:
    """Yield the samples of `numbers` as (verified block, rows in it), each block read once."""
    last, block = -1, None
    for some in numbers:
        where = row_map.locate(some)
        borders = (np.flatnonzero(np.diff(where.block)) + 1).tolist()
        for first, end in zip([0, *borders], [*borders, len(some)], strict=True):
            if first == end:
                continue
            number = int(where.block[first])
            if block is None or number != last:
                last, block = number, reader.read(*row_map.shard_of_block(number), keys=False, fields=fields)
            yield block, where.row_in_block[first:end]


def _rebatch(batches: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield the same rows in batches of `size`; a batch inside one block is a view of it."""
    waiting: list[Any] = []
    rows = 0
    for batch in batches:
        done = 0
        while done < batch.num_rows:
            part = batch.slice(done, size - rows)
            waiting.append(part)
            done, rows = done + part.num_rows, rows + part.num_rows
            if rows == size:
                yield _join(waiting)
                waiting, rows = [], 0
    if waiting:
        yield _join(waiting)


def _join(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    import pyarrow as pa

    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def table_library(name: str, call: str) -> Any:
    """Import and return a library that makes tables from Arrow tables.

    Raises:
        MissingDependency: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependency(
            f"ds.{call}() needs {name}; run: pip install {name}, or use ds.to_arrow()"
        ) from error


def population_of(manifest: Manifest, table: ShardTable) -> Population:
    """Return the selected rows of each segment and the number of them that a block holds.

    If only some rows of a shard are selected, `block_rows` shrinks in proportion, so that a window of the
    plan still covers about the same number of stored blocks.
    """
    rows = np.maximum(table.rows, 1)
    selected = table.selected
    block_rows = table.block_rows
    of_segment = np.maximum(block_rows[table.segment_shard], 1)
    # blocks restart at segments
    blocks = int((-(-table.segment_rows // of_segment)).sum())
    scaled = np.where(selected < rows, -(-block_rows * selected // rows), block_rows)
    return Population(
        identity=manifest.id,
        strata=tuple(stratum.name for stratum in manifest.strata),
        segment_shard=table.segment_shard,
        segment_stratum=table.segment_stratum,
        segment_rows=table.segment_selected,
        shard_block_rows=np.maximum(scaled, 1).astype(np.int32),
        shard_bytes=table.size,
        mean_block_bytes=int(table.raw_bytes.sum()) // max(1, blocks),
    )
