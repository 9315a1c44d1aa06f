"""Reads of versions whose fields are in several shards (manifest/SPEC.md §5): a block is joined column by column."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError
from shardkit.formats import Block, Schema, ShardIndex, Verify
from shardkit.formats.block import Column
from shardkit.reading.blocks import BlockReader, TakeMemory, fresh_memory

if TYPE_CHECKING:
    from shardkit.reading.cache.supply import BlockFetcher


class AddedFields(NamedTuple):
    """Fields of a version in shards of their own, and the reader of these shards."""

    schema: Schema
    reader: BlockReader


class ExtendedReader(BlockReader):
    """Reader of a version with added fields.

    Only the shards that hold a requested field are read, each block verified by its own index. Shards and rows are
    numbered as in the extended version; `index`, `request` and `located` are about its own shards, which `own` reads.
    """

    def __init__(self, own: BlockReader, schema: Schema, added: Sequence[AddedFields]) -> None:
        """Make a reader of a version with the fields of `schema`, of which `added` are in shards of their own."""
        self.own, self._schema, self.added = own, schema, list(added)
        self.__setstate__(own.__getstate__())
        self.stores = [*own.stores, *(store for one in added for store in one.reader.stores)]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in ("_schema", "added", "own")}

    @property
    def urls(self) -> list[str]:
        return self.own.urls

    @property
    def stored_bytes(self) -> int:
        return self.own.stored_bytes + sum(one.reader.stored_bytes for one in self.added)

    def index(self, shard: int) -> ShardIndex:
        return self.own.index(shard)

    def raw_size(self, shard: int, block: int) -> int:
        readers = [self.own, *(one.reader for one in self.added)]
        return sum(reader.raw_size(shard, block) for reader in readers)

    def known_sizes(self, shard: int) -> NDArray[np.integer[Any]] | None:
        known = [reader.known_sizes(shard) for reader in (self.own, *(one.reader for one in self.added))]
        found = [sizes.astype(np.int64) for sizes in known if sizes is not None]
        return np.sum(found, axis=0) if len(found) == len(known) else None

    def has_file(self, shard: int) -> bool:
        return self.own.has_file(shard) and all(one.reader.has_file(shard) for one in self.added)

    def verified_file(self, shard: int) -> tuple[str, int] | None:
        """Return None: a block is in several files."""
        return None

    def through(self, supply: BlockFetcher | None) -> ExtendedReader:
        reader = copy.copy(self)
        reader.supply = supply
        reader.own = self.own.through(supply)
        reader.added = [one._replace(reader=one.reader.through(supply)) for one in self.added]
        return reader

    def for_fields(self, fields: Sequence[str]) -> BlockReader:
        for schema, reader in self.added:
            if fields and all(name in schema.stored for name in fields):
                return reader
        return self if any(self._holder(name) is not None for name in fields) else self.own

    def _holder(self, name: str) -> AddedFields | None:
        """Return the added fields that a stored column belongs to; None if it is in the version's own shards."""
        return next((one for one in self.added if name in one.schema.stored), None)

    def read(
        self,
        shard: int,
        block: int,
        verify: Verify | None = None,
        *,
        keys: bool = True,
        fields: Sequence[str] | None = None,
        memory: TakeMemory = fresh_memory,
    ) -> Block:
        wanted = list(self._schema.stored) if fields is None else list(fields)
        columns: dict[AddedFields | None, list[str]] = {} if wanted else {None: []}
        for name in wanted:
            columns.setdefault(self._holder(name), []).append(name)
        blocks = {
            holder: (self.own if holder is None else holder.reader).read(
                shard, block, verify, keys=keys, fields=names, memory=memory
            )
            for holder, names in columns.items()
        }
        rows = {found.rows for found in blocks.values()}
        if len(rows) > 1:
            raise FormatError(
                f"shard {shard} block {block}: its fields are in blocks of {sorted(rows)} rows; do not trust it"
            )

        def load(name: str) -> Column:
            return blocks[self._holder(name)].column(name)

        return Block(self._schema, rows.pop(), sum(found.nbytes for found in blocks.values()), load)
