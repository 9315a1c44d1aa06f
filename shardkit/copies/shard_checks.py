"""Check one shard and its index at a level, and return findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.extras import shell_word
from shardkit.formats import ShardIndex, read_block, verify_block
from shardkit.manifest import Manifest
from shardkit.reading.adopted import AdoptedStore, adopted_place, changed_files
from shardkit.reading.blocks import RESTORE_ADOPTED
from shardkit.reading.objects import Depth, check_object
from shardkit.stores.store import Store, parse_object_name, read_object

Level = Literal["list", "attested", "stored", "read", "decode"]
"""Depth of a check; see `LEVELS`."""


LEVELS: tuple[Level, ...] = ("list", "attested", "stored", "read", "decode")
"""Levels, each including the checks of the levels before it.

The object exists; a scrub attested it; the store's checksum matches; every byte is read; every sample is decoded.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One error found by a check, or one object that could not be checked."""

    name: str  # name of the object in its store
    expected: str  # value in the manifest, page or log
    got: str  # value found
    action: str  # the user's next step
    blocks: tuple[int, ...] = ()  # numbers of the damaged blocks of a shard, if they could be identified
    rows: int = 0  # number of lost samples; 0 for objects other than shards
    is_damage: bool = True  # False if the store did not answer, so that the state of the object is unknown


def finding_of(
    root: str,
    name: str,
    expected: str,
    problem: ShardkitError | str,
    *,
    action: str = "",
    blocks: tuple[int, ...] = (),
    rows: int = 0,
) -> Finding:
    """Return the finding of a problem: damage, or unknown if the store did not answer.

    `action` replaces the advice for damaged objects.
    """
    got = "nothing of that name" if isinstance(problem, NotFoundError) else str(problem)
    if not isinstance(problem, (str, NotFoundError, IntegrityError, FormatError)):
        return Finding(name, expected, got, "look at the disk, then verify again", is_damage=False)
    action = action or (
        f"run: shardkit repair {shell_word(root)}, which needs another copy or parity; otherwise build the same source "
        "again with the same options"
    )
    return Finding(name, expected, got, action, blocks, rows)


@dataclass(frozen=True, slots=True)
class ShardCheck:
    """One shard with its store and its entry in a page."""

    store: Store
    manifest: Manifest
    name: str
    size: int
    index_name: str
    index_size: int
    rows: int

    def is_read(self, level: Level) -> bool:
        """Return True if a check at this level reads every byte. At "stored", only local files are read."""
        return level in ("read", "decode") or (level == "stored" and self._is_file(self.name))

    def _is_file(self, name: str) -> bool:
        try:
            return self.store.local_path(name) is not None
        except ShardkitError:
            return False

    def check(self, level: Level) -> list[Finding]:
        """Check the shard and its index, and return the findings."""
        if not self.is_read(level):
            depth: Depth = "stored" if level == "stored" else "list"
            found = self._look(self.name, self.size, depth)
            if any(one.is_damage for one in found):
                found = self._changed_files(read=False) or found
            return found + self._look(self.index_name, self.index_size, depth)
        index, found = self._read_index()
        damage = self._read_shard(index)
        found += (self._changed_files(read=True) or damage) if damage else []
        return self._decode(index) if level == "decode" and not found and index is not None else found

    def _look(self, name: str, size: int, depth: Depth) -> list[Finding]:
        """Check the shard or its index; at depth "stored", only local files are read."""
        found = check_object(self.store, name, size, depth, may_read=self._is_file(name))
        if found.is_good:
            return []
        if found.result == "unreadable" and found.error is None:
            got = self.store.rewritten(name) if isinstance(self.store, AdoptedStore) else None
            got = got or f"{self.store.url} keeps no checksums of its objects"
            name = adopted_place(self.store, name) or name
            return [Finding(name, found.expected, got, "check with --level read", is_damage=False)]
        return [self._finding(found.expected, found.error or found.got, name)]

    def _finding(
        self,
        expected: str,
        problem: ShardkitError | str,
        name: str = "",
        blocks: tuple[int, ...] = (),
        rows: int = 0,
    ) -> Finding:
        """Return the finding of an object, by default the shard. An adopted file is named by its place."""
        name = name or self.name
        place = adopted_place(self.store, name)
        action = RESTORE_ADOPTED if place else ""
        return finding_of(
            self.store.url, place or name, expected, problem, action=action, blocks=blocks, rows=rows
        )

    def _changed_files(self, *, read: bool) -> list[Finding]:
        """Return a finding per changed file if the shard is a group of adopted files; otherwise []."""
        changed = changed_files(self.store, self.name, read=read)
        return [Finding(place, expected, got, RESTORE_ADOPTED, rows=1) for place, expected, got in changed]

    def _read_index(self) -> tuple[ShardIndex | None, list[Finding]]:
        digest, _ = parse_object_name(self.index_name)
        try:
            index = ShardIndex.from_bytes(read_object(self.store, digest, "index", self.index_size))
            facts = (index.rows, index.shard_size, index.format, index.compression)
            expected = (self.rows, self.size, self.manifest.format, self.manifest.compression)
            if facts != expected:
                raise FormatError(f"it describes another shard: {facts}, the page says {expected}")
        except ShardkitError as error:
            what = f"the index of {self.name}, {digest}"
            return None, [self._finding(what, error, self.index_name, rows=self.rows)]
        return index, []

    def _read_shard(self, index: ShardIndex | None) -> list[Finding]:
        found = check_object(self.store, self.name, self.size, "read")
        if found.is_good:
            return []
        damaged, rows = list[int](), self.rows
        if found.error is None and found.result != "missing" and index is not None:
            for block in range(index.blocks):
                try:
                    verify_block(self._stored_block(index, block), index, block, verify="strong")
                except ShardkitError:
                    damaged.append(block)
            rows = sum(_rows_of(index, block) for block in damaged)
        return [self._finding(found.expected, found.error or found.got, blocks=tuple(damaged), rows=rows)]

    def _stored_block(self, index: ShardIndex, block: int) -> bytes:
        offset, size = int(index.block_offset[block]), int(index.block_size[block])
        return self.store.get_range(self.name, offset, size)

    def _decode(self, index: ShardIndex) -> list[Finding]:
        """Decode every sample, and return a finding per block with a sample that does not decode."""
        found = []
        for block in range(index.blocks):
            row, rows = 0, _rows_of(index, block)
            try:
                decoded = read_block(self._stored_block(index, block), index, block, verify="strong")
                for row in range(rows):
                    decoded.sample(row)
            except ShardkitError as error:
                key = index.key(int(index.block_start[block]) + row)
                expected = f"samples that decode (block {block}, sample {key!r})"
                found.append(self._finding(expected, error, blocks=(block,), rows=rows))
        return found


def _rows_of(index: ShardIndex, block: int) -> int:
    return int(index.block_start[block + 1] - index.block_start[block])
