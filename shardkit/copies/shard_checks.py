"""Check one shard and its index at a level, and return findings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shardkit.errors import FormatError, IntegrityError, NotFoundError, ShardkitError
from shardkit.formats import ShardIndex, read_block, verify_block
from shardkit.manifest import Manifest
from shardkit.reading.adopted import AdoptedStore, adopted_place, changed_files
from shardkit.reading.objects import CheckResult, Depth, check_object
from shardkit.stores.store import Store, parse_object_name, read_object

Level = Literal["list", "attested", "stored", "read", "decode"]
"""Depth of a check; see `LEVELS`."""


LEVELS: tuple[Level, ...] = ("list", "attested", "stored", "read", "decode")
"""Levels, each including the checks of the levels before it.

The object exists; a scrub attested it; the store's checksum matches; every byte is read; every sample is decoded.
"""


_RESTORE_ADOPTED = "put the file back as it was when it was adopted, or adopt it as it is now: shardkit adopt"


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
        if self.is_read(level):
            index, found = self._index()
            damaged = self._bytes(index)
            found += (self._changed_files(read=True) if damaged else []) or self._with_urls(damaged)
            if level == "decode" and not found and index is not None:
                found = self._with_urls(self._samples(index))
            return found
        if level == "stored":
            found = self._with_urls(self._check(self.name, None, "stored"))
            found += self._check(self.index_name, None, "stored")
            if found:
                return found
        found = self._check(self.name, self.size, "list")
        found = (self._changed_files(read=False) if found else []) or self._with_urls(found)
        return found + self._check(self.index_name, self.index_size, "list")

    def _check(self, name: str, size: int | None, depth: Depth) -> list[Finding]:
        found = check_object(self.store, name, size, depth, may_read=self._is_file(name))
        if found.is_good:
            return []
        if found.result == "unreadable" and found.error is None:
            got = self.store.rewritten(name) if isinstance(self.store, AdoptedStore) else None
            got = got or f"{self.store.url} keeps no checksums of its objects"
            return [Finding(name, found.expected, got, "check with --level read", is_damage=False)]
        return [
            finding_of(
                self.store.url,
                name,
                found if depth == "list" else found._replace(expected=parse_object_name(name)[0]),
            )
        ]

    def _changed_files(self, *, read: bool) -> list[Finding]:
        """Return a finding per changed file if the shard is a group of adopted files; otherwise []."""
        changed = changed_files(self.store, self.name, read=read)
        return [Finding(place, expected, got, _RESTORE_ADOPTED, rows=1) for place, expected, got in changed]

    def _with_urls(self, findings: list[Finding]) -> list[Finding]:
        """Return findings with the URL of an adopted file in place of the object's name."""
        place = adopted_place(self.store, self.name)
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
            index = ShardIndex.from_bytes(read_object(self.store, digest, "index", self.index_size))
            facts = (index.rows, index.shard_size, index.format, index.compression)
            expected = (self.rows, self.size, self.manifest.format, self.manifest.compression)
            if facts != expected:
                raise FormatError(f"it describes another shard: {facts}, the page says {expected}")
        except ShardkitError as error:
            expected_of = f"the index of {self.name}, {digest}"
            return None, [failed_finding(self.store.url, self.index_name, expected_of, error, rows=self.rows)]
        return index, []

    def _bytes(self, index: ShardIndex | None) -> list[Finding]:
        found = check_object(self.store, self.name, self.size, "read")
        if found.is_good:
            return []
        if found.error is not None or found.result == "missing" or index is None:
            return [finding_of(self.store.url, self.name, found, rows=self.rows)]
        damaged = []
        for block in range(index.blocks):
            try:
                verify_block(self._stored_block(index, block), index, block, verify="strong")
            except ShardkitError:
                damaged.append(block)
        rows = sum(int(index.block_start[b + 1] - index.block_start[b]) for b in damaged)
        return [finding_of(self.store.url, self.name, found, blocks=tuple(damaged), rows=rows)]

    def _stored_block(self, index: ShardIndex, block: int) -> bytes:
        offset, size = int(index.block_offset[block]), int(index.block_size[block])
        return self.store.get_range(self.name, offset, size)

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
                found.append(
                    failed_finding(self.store.url, self.name, expected, error, blocks=(block,), rows=rows)
                )
        return found


def restore_advice(root: str) -> str:
    """Return how damaged objects of a root are restored."""
    return (
        f"run: shardkit repair {root}, which needs another copy or parity; otherwise build the same source again with "
        "the same options"
    )


def finding_of(
    root: str, name: str, found: CheckResult, *, blocks: tuple[int, ...] = (), rows: int = 0
) -> Finding:
    """Return the finding of a check that was not good."""
    if found.error is not None:
        return failed_finding(root, name, found.expected, found.error, rows=rows)
    return Finding(name, found.expected, found.got, restore_advice(root), blocks, rows)


def failed_finding(
    root: str, name: str, expected: str, error: ShardkitError, *, blocks: tuple[int, ...] = (), rows: int = 0
) -> Finding:
    """Return the finding for an error: damage, or a store that does not answer."""
    if isinstance(error, NotFoundError):
        return Finding(name, expected, "nothing of that name", restore_advice(root), blocks, rows)
    if isinstance(error, (IntegrityError, FormatError)):
        return Finding(name, expected, str(error), restore_advice(root), blocks, rows)
    return Finding(name, expected, str(error), "look at the disk, then verify again", is_damage=False)
