"""What can be wrong with one object of a store, found without raising; `shardkit.dataset.verify` asks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats import ShardIndex, extension, read_block, verify_block
from shardkit.manifest import Manifest, ShardTable
from shardkit.reading.adopted import AdoptedStore, adopted_place
from shardkit.repository.catalog import load_selection
from shardkit.repository.repository import Repository
from shardkit.stores.objects import object_name, parse_object_name
from shardkit.stores.store import ObjectStat, Store

__all__ = [
    "Finding",
    "ShardCheck",
    "check_selections",
    "check_stored",
    "check_there",
    "failed",
    "shard_checks",
    "side_objects",
]

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or that could not be looked at.

    Attributes:
        name: of the object in its store.
        expected: what the manifest, page or log says.
        got: what was found instead.
        action: what to do next.
        blocks: damaged blocks of a shard, where they could be told apart.
        rows: samples of the shard that are lost with it; 0 for other objects.
        is_damage: False where the store did not answer: nothing is known about the object then.
    """

    name: str
    expected: str
    got: str
    action: str
    blocks: tuple[int, ...] = ()
    rows: int = 0
    is_damage: bool = True


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """What a page says of one shard, and where it lies."""

    repository: Repository
    name: str
    size: int
    index_name: str
    index_size: int
    rows: int
    format: str
    compression: str

    @property
    def is_file(self) -> bool:
        """Whether the shard lies on this machine."""
        try:
            return self.repository.store.local_path(self.name) is not None
        except ShardkitError:
            return False

    def there(self) -> list[Finding]:
        """Level list: the shard and its index exist with their sizes."""
        store = self.repository.store
        found = self._placed(check_there(store, self.name, self.size))
        return found + check_there(store, self.index_name, self.index_size)

    def stored(self) -> list[Finding]:
        """Level stored: the checksums that the store keeps are those of the names; files keep none, and are read."""
        if self.is_file:
            return self.read()
        found = self._placed(check_stored(self.repository, self.name))
        return found + check_stored(self.repository, self.index_name) or self.there()

    def read(self) -> list[Finding]:
        """Level read: every byte of the shard and its index is what was written."""
        index, found = self._index()
        return found + self._placed(self._bytes(index))

    def decode(self) -> list[Finding]:
        """Level decode: and every sample decodes."""
        index, found = self._index()
        found += self._placed(self._bytes(index))
        return found if found or index is None else self._placed(self._samples(index))

    def _placed(self, findings: list[Finding]) -> list[Finding]:
        """What was found of an adopted tar, by the name that its owner knows it by."""
        place = adopted_place(self.repository.store, self.name)
        if place is None:
            return findings
        return [
            dataclasses.replace(
                found, name=place, action=_RESTORE_ADOPTED if found.is_damage else found.action
            )
            for found in findings
        ]

    def _index(self) -> tuple[ShardIndex | None, list[Finding]]:
        digest, _ = parse_object_name(self.index_name)
        try:
            index = ShardIndex.from_bytes(self.repository.get_object(digest, "index", self.index_size))
            facts = (index.rows, index.shard_size, index.format, index.compression)
            expected = (self.rows, self.size, self.format, self.compression)
            if facts != expected:
                raise FormatError(f"it describes another shard: {facts}, the page says {expected}")
        except ShardkitError as error:
            return None, [
                failed(self.index_name, f"the index of {self.name}, {digest}", error, rows=self.rows)
            ]
        return index, []

    def _bytes(self, index: ShardIndex | None) -> list[Finding]:
        digest, _ = parse_object_name(self.name)
        store = self.repository.store
        try:
            wrong = check_there(store, self.name, self.size)
            got = wrong[0].got if wrong else _sha256(store, self.name, self.size)
            missing = bool(wrong) and store.head(self.name) is None
        except ShardkitError as error:
            return [failed(self.name, digest, error, rows=self.rows)]
        if got == digest:
            return []
        blocks = () if index is None or missing else self._damaged_blocks(index)
        rows = (
            int(sum(index.block_start[b + 1] - index.block_start[b] for b in blocks)) if index else self.rows
        )
        expected = wrong[0].expected if wrong else digest
        return [Finding(self.name, expected, got, _RESTORE, blocks, self.rows if missing else rows)]

    def _damaged_blocks(self, index: ShardIndex) -> tuple[int, ...]:
        damaged = []
        for block in range(index.blocks):
            try:
                verify_block(self._stored_block(index, block), index, block, verify="strong")
            except ShardkitError:
                damaged.append(block)
        return tuple(damaged)

    def _stored_block(self, index: ShardIndex, block: int) -> bytes:
        offset, size = int(index.block_offset[block]), int(index.block_size[block])
        return self.repository.store.get_range(self.name, offset, size)

    def _samples(self, index: ShardIndex) -> list[Finding]:
        found = []
        for block in range(index.blocks):
            rows = int(index.block_start[block + 1] - index.block_start[block])
            row = 0
            try:
                decoded = read_block(self._stored_block(index, block), index, block, verify="strong")
                for row in range(rows):
                    decoded.sample(row)
            except ShardkitError as error:
                key = index.key(int(index.block_start[block]) + row)
                expected = f"samples that decode (block {block}, sample {key!r})"
                found.append(failed(self.name, expected, error, blocks=(block,), rows=rows))
        return found


_RESTORE_ADOPTED = "put the tar back as it was when it was adopted, or adopt it as it is now: shardkit adopt"
_RESTORE = "run: shardkit repair (another copy, or parity), or build again: it rewrites objects whose bytes are wrong"


def shard_checks(repository: Repository, manifest: Manifest, table: ShardTable) -> Iterator[ShardCheck]:
    """The checks of every shard of a page."""
    suffix = extension(manifest.format, manifest.compression)
    for shard in range(len(table)):
        yield ShardCheck(
            repository,
            object_name(table.digest_text(shard), suffix),
            int(table.size[shard]),
            object_name(table.index_digest_text(shard), "index"),
            int(table.index_size[shard]),
            int(table.rows[shard]),
            manifest.format,
            manifest.compression,
        )


def side_objects(manifest: Manifest) -> Iterator[tuple[str, str, int | None]]:
    """(digest, extension, size where it is known) of what a manifest names beside its pages and shards."""
    if manifest.sources is not None:
        yield manifest.sources, "sources", None
    if manifest.about is not None:
        yield manifest.about, "about", None
    for lookup in manifest.lookups:
        for piece in lookup.pieces:
            yield piece.digest, "lookup", piece.size


def check_selections(repository: Repository, table: ShardTable) -> Iterator[list[Finding]]:
    """What is wrong with the selection of each shard of a page that has one."""
    for shard in np.flatnonzero(table.has_selection).tolist():
        digest = table.selection_digest_text(shard) or ""
        segments = slice(int(table.segment_starts[shard]), int(table.segment_starts[shard + 1]))
        try:
            selection = load_selection(repository, digest, int(table.rows[shard]))
            borders = np.concatenate([[0], np.cumsum(table.segment_rows[segments])])
            counts = np.diff(selection.rank(borders))
            if not np.array_equal(counts, table.segment_selected[segments]):
                said = table.segment_selected[segments].tolist()
                raise FormatError(f"it selects {counts.tolist()} rows of the segments, the page says {said}")
        except ShardkitError as error:
            yield [failed(object_name(digest, "selection"), digest, error, rows=int(table.rows[shard]))]
        else:
            yield []


def check_there(store: Store, name: str, size: int | None) -> list[Finding]:
    """Whether an object exists, and has its size where that is known."""
    expected = "the object" if size is None else f"{size} bytes"
    try:
        stat = store.head(name)
    except ShardkitError as error:
        return [failed(name, expected, error)]
    if stat is None:
        return [Finding(name, expected, "nothing of that name", _RESTORE)]
    if size is not None and stat.size != size:
        return [Finding(name, expected, f"{stat.size} bytes", _RESTORE)]
    return []


def check_stored(repository: Repository, name: str) -> list[Finding]:
    """Whether the checksum that the store keeps of an object is that of its name; a local file is read instead."""
    digest, _ = parse_object_name(name)
    store = repository.store
    try:
        stat = store.head(name)
        if stat is not None and stat.sha256 is None and store.local_path(name) is not None:
            stat = ObjectStat(stat.size, _sha256(store, name, stat.size).removeprefix("sha256:"))
    except ShardkitError as error:
        return [failed(name, digest, error)]
    if stat is None:
        return [Finding(name, digest, "nothing of that name", _RESTORE)]
    if stat.sha256 is None:
        got = store.rewritten(name) if isinstance(store, AdoptedStore) else None
        got = got or f"{repository.url} keeps no checksums of its objects"
        return [Finding(name, "a stored checksum", got, "check with --level read", is_damage=False)]
    return (
        []
        if f"sha256:{stat.sha256}" == digest
        else [Finding(name, digest, f"sha256:{stat.sha256}", _RESTORE)]
    )


def failed(
    name: str, expected: str, error: ShardkitError, *, blocks: tuple[int, ...] = (), rows: int = 0
) -> Finding:
    """The finding that an error amounts to: damage, or a store that does not answer."""
    if isinstance(error, NotFoundError):
        return Finding(name, expected, "nothing of that name", _RESTORE, blocks, rows)
    if isinstance(error, (IntegrityError, FormatError)):
        return Finding(name, expected, str(error), _RESTORE, blocks, rows)
    return Finding(name, expected, str(error), "look at the disk, then verify again", is_damage=False)


def _sha256(store: Store, name: str, size: int) -> str:
    digest = hashlib.sha256()
    for offset in range(0, size, _PIECE_BYTES):
        digest.update(store.get_range(name, offset, min(_PIECE_BYTES, size - offset)))
    return f"sha256:{digest.hexdigest()}"
