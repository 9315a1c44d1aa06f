"""The samples of a version, one, several or all of them, as Python values and as tables (SPEC.md §14)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.sample_numbers import is_one, number_of, numbers_of
from shardkit.dataset.tables import all_numbers, read_runs, stream_table, table_library
from shardkit.errors import UsageError
from shardkit.formats import Schema
from shardkit.plan.permutation import Feistel, derive
from shardkit.ranges import Range
from shardkit.reading.blocks import BlockReader
from shardkit.reading.row_map import RowMap

__all__ = ["Samples"]

_COUNT = Range(0, 2**40)
_COUNT_OF_BATCH = Range(1, 2**40)
_SEEDS = Range(0, 2**64 - 1)
_SAMPLE = 0x73616D706C65  # "sample": drawn apart from everything else that a seed decides


class Samples(ABC):
    """What a dataset is to a reader: a sequence of verified samples, and a table."""

    reader: BlockReader

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """Field names and types."""

    @property
    @abstractmethod
    def rows(self) -> RowMap:
        """Where each sample lies."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    # ---- as Python values

    @overload
    def __getitem__(self, sample: int | np.integer[Any]) -> dict[str, Any]: ...

    @overload
    def __getitem__(
        self, sample: slice | Sequence[int] | NDArray[np.integer[Any]]
    ) -> list[dict[str, Any]]: ...

    def __getitem__(self, sample: Any) -> dict[str, Any] | list[dict[str, Any]]:
        """A sample as a dict of Python values and fresh arrays; of a slice, list or array of numbers a list of them.

        Negative numbers count from the end. ``select(rows=…)`` gives a dataset instead, with nothing read.

        Raises:
            UsageError: neither a sample number nor several; says what to do.
            NotFoundError: no such sample. (An IndexError for loops would hide a wrong number.)
            IntegrityError: a block is damaged.
        """
        if is_one(sample):
            shard, block, inside, _ = self._locate_one(sample)
            return dict(self.reader.read(shard, block).sample(inside))
        return self._several(numbers_of(sample, len(self), "ds[…]"))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All samples in order, each block read once and held until its last sample."""
        for block, rows in read_runs(self.reader, self.rows, all_numbers(len(self))):
            for row in rows.tolist():
                yield dict(block.sample(row))

    def __contains__(self, wanted: object) -> NoReturn:
        """Refused: a number, a key and a sample could all be meant, and two of them would read everything.

        Raises:
            UsageError: always; says how to ask.
        """
        raise UsageError(
            f"{wanted!r:.60} in ds: say what is meant: `0 <= number < len(ds)` for a sample number, "
            "`shardkit find ROOT --field key=KEY` for a key, ds.select(where=…) for the value of a field"
        )

    def head(self, n: int = 5) -> list[dict[str, Any]]:
        """The first `n` samples, or all where there are fewer."""
        return self[: _COUNT.check("head: n", n)]

    def sample(self, n: int, seed: int = 0) -> list[dict[str, Any]]:
        """`n` different samples in random order: the same ones for the same version and seed, on every machine.

        Raises:
            UsageError: there are fewer than `n`.
        """
        if _COUNT.check("sample: n", n) > len(self):
            raise UsageError(
                f"ds.sample({n}): this dataset has {len(self)} samples; ask for at most that many"
            )
        key = derive(_SEEDS.check("sample: seed", seed), _SAMPLE)
        return self._several(Feistel(key, len(self))(np.arange(n, dtype=np.int64)))

    def key(self, sample: int) -> str:
        """The key of a sample as the source named it."""
        shard, _, _, row = self._locate_one(sample, "ds.key(…)")
        return self.reader.index(shard).original_key(row)

    def source(self, sample: int) -> tuple[str, int] | None:
        """(source file, row in it) that a sample was built from, where the build recorded it."""
        shard, _, _, row = self._locate_one(sample, "ds.source(…)")
        return self.reader.index(shard).source(row)

    def _several(self, numbers: NDArray[np.int64]) -> list[dict[str, Any]]:
        """Samples in the order of `numbers`, each a dict of its own, each block read once."""
        order = np.argsort(numbers, kind="stable")
        found: list[dict[str, Any]] = [{}] * len(numbers)
        places = iter(order.tolist())
        for block, rows in read_runs(self.reader, self.rows, [numbers[order]]):
            for row in rows.tolist():
                found[next(places)] = dict(block.sample(row))
        return found

    def _locate_one(self, sample: object, call: str = "ds[…]") -> tuple[int, int, int, int]:
        where = self.rows.locate(np.array([number_of(sample, len(self), call)]))
        shard, block = self.rows.shard_of_block(int(where.block[0]))
        return shard, block, int(where.row_in_block[0]), int(where.row[0])

    # ---- as tables

    def iter_arrow(self, batch_rows: int = 1024, fields: Sequence[str] | None = None) -> Any:
        """All samples as a ``pyarrow.RecordBatchReader``; blocks are read and verified as it is asked for more.

        Fixed shapes are nested fixed-size lists, ragged fields large lists, json its text. No column is nullable.

        Args:
            batch_rows: rows of each batch; the last one may have fewer.
            fields: only these, in this order; others need not even be decompressed.

        Raises:
            SchemaError: no such field.
            IntegrityError: from the reader, at the block that is damaged.
        """
        return stream_table(
            self.reader,
            self.rows,
            self.schema,
            fields,
            _COUNT_OF_BATCH.check("iter_arrow: batch_rows", batch_rows),
        )

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """The Arrow stream interface: duckdb, polars and pyarrow read a dataset as it is, block by block."""
        return self.iter_arrow().__arrow_c_stream__(requested_schema)

    def to_arrow(self, fields: Sequence[str] | None = None) -> Any:
        """All samples as a ``pyarrow.Table``, in memory; a chunk for each block. See `iter_arrow`."""
        return stream_table(self.reader, self.rows, self.schema, fields, None).read_all()

    def to_pandas(self, fields: Sequence[str] | None = None) -> Any:
        """All samples as a ``pandas.DataFrame``; see `iter_arrow`.

        Raises:
            MissingDependency: pandas is not installed.
        """
        table_library("pandas", "to_pandas")
        return self.to_arrow(fields).to_pandas()

    def to_polars(self, fields: Sequence[str] | None = None) -> Any:
        """All samples as a ``polars.DataFrame``; see `iter_arrow`.

        Raises:
            MissingDependency: polars is not installed.
        """
        return table_library("polars", "to_polars").from_arrow(self.to_arrow(fields))
