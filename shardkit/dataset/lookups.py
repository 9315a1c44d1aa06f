"""Find rows by value without reading samples: sorted hash sidecars that the manifest names (SPEC.md §9)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardkit.dataset.costs import cut_pieces
from shardkit.errors import AbsentError, FormatError, NotFoundError, UsageError
from shardkit.formats import FieldType, Schema, VariableColumn, pack_columns, unpack_columns
from shardkit.manifest import Lookup, LookupPiece, ShardTable
from shardkit.ranges import names_of
from shardkit.reading.blocks import BlockReader
from shardkit.repository.repository import Repository

if TYPE_CHECKING:
    from shardkit.dataset.dataset import Dataset

KEY: Final = "key"
"""The look-up of sample keys, both the source's and the shard's."""

PIECE_ROWS: Final = 2**22
"""Most rows of a piece: some 100 MB, read whole by every look-up."""

NUMBER: Final = "number"
"""Field name for a list of sample numbers."""

_KIND: Final = "lookup"
_SHOWN: Final = 5
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_HASH_BYTES: Final = 16
_READERS: Final = 4
_SHA256: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_COLUMNS: Final = {"high": np.uint64, "low": np.uint64, "shard": np.uint32, "row": np.uint32}

Hashes = NDArray[np.uint64]
"""(n, 2), the first 16 bytes of SHA-256 as two big-endian words: high, low."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Content of a piece, sorted by (high, low, shard, row); (n,) each.

    `shard` counts from the first shard of the piece, `row` inside the shard.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]
    shard: NDArray[np.uint32]
    row: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.high)

    @classmethod
    def sort(cls, hashes: Hashes, shard: NDArray[np.uint32], row: NDArray[np.uint32]) -> Entries:
        """Return entries sorted."""
        order = np.lexsort((row, shard, hashes[:, 1], hashes[:, 0]))
        return cls(hashes[order, 0], hashes[order, 1], shard[order], row[order])

    def take(self, kept: NDArray[np.bool_], shard: NDArray[np.uint32], row: NDArray[np.uint32]) -> Entries:
        """Return the entries of `kept` under new (shard, row) numbers, which must keep their order."""
        return Entries(self.high[kept], self.low[kept], shard[kept], row[kept])

    def search(self, wanted: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (index into `wanted`, index into the entries) of every equal pair."""
        first = np.searchsorted(self.high, wanted[:, 0], side="left")
        counts = np.searchsorted(self.high, wanted[:, 0], side="right") - first
        query = np.repeat(np.arange(len(wanted)), counts)
        before = np.cumsum(counts) - counts
        entry = np.arange(len(query)) - before[query] + first[query]
        equal = self.low[entry] == wanted[query, 1]
        return query[equal].astype(np.int64), entry[equal].astype(np.int64)

    def to_bytes(self, field: str, shards: int) -> bytes:
        """Return the bytes of the look-up object: the same for the same entries."""
        meta = {"field": field, "shards": shards, "entries": len(self)}
        return pack_columns(_KIND, meta, {name: getattr(self, name) for name in _COLUMNS})

    @classmethod
    def from_bytes(cls, data: bytes, field: str, rows: NDArray[np.int64]) -> Entries:
        """Read an object whose digest has been checked; `rows` are the numbers of rows of its shards."""
        columns = unpack_columns(data, _KIND)
        arrays = columns.arrays
        count = len(arrays.get("high", ()))
        if columns.meta != {"field": field, "shards": len(rows), "entries": count}:
            raise FormatError(
                f"lookup of {field!r}: its header says {str(columns.meta)[:100]}, expected {len(rows)} shards and "
                f"{count} entries; do not trust it"
            )
        if list(arrays) != list(_COLUMNS) or any(
            arrays[name].dtype != dtype or arrays[name].shape != (count,) for name, dtype in _COLUMNS.items()
        ):
            raise FormatError(
                f"lookup of {field!r}: columns {list(arrays)[:6]} are not its own; do not trust it"
            )
        entries = cls(**arrays)
        if (entries.high[1:] < entries.high[:-1]).any():
            raise FormatError(f"lookup of {field!r} is not sorted; do not trust it")
        if count and (entries.shard.max() >= len(rows) or (entries.row >= rows[entries.shard]).any()):
            raise FormatError(f"lookup of {field!r} names a row that is not there; do not trust it")
        return entries


@dataclass(frozen=True, slots=True, eq=False)
class Matches:
    """Samples of a version with the wanted values; (n,) int64 each, sorted by value, then by sample."""

    # index into the wanted values; repeated if several samples have the value
    value: NDArray[np.int64]
    sample: NDArray[np.int64]  # number of the sample in the version
    shard: NDArray[np.int64]  # shard and row of the sample
    row: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ListedSamples:
    """The samples that a list names."""

    samples: NDArray[np.int64]  # (n,) ascending, each once
    absent: list[str]  # values without a sample
    field: str  # "key", "number" or the name of the field


def list_samples(dataset: Dataset, values: Sequence[str], field: str | None = None) -> ListedSamples:
    """Find the samples that a list names by key, by sample number, or by the value of a field.

    Without a field, values are keys; if all are sample numbers and none is a key, they are sample numbers. A
    list that names different samples as keys and as numbers is refused, and also a list of numbers that
    become keys with leading zeros.

    Args:
        dataset: the version to search.
        values: values as users write them.
        field: "key", "number", or a field as in ``image:sha256``.

    Raises:
        UsageError: The list is ambiguous, or a value is not a number or not a value of the field.
    """
    if field == NUMBER:
        return ListedSamples(*_by_number(dataset, values), field)
    if field is not None:
        return ListedSamples(*_by_field(dataset, field, values), field)
    keyed, without = _by_field(dataset, KEY, values)
    if not all(map(is_number, values)):
        return ListedSamples(keyed, without, KEY)
    numbered, outside = _by_number(dataset, values)
    widths = {len(key) for key in (dataset.key(0), dataset.key(len(dataset) - 1)) if key.isdecimal()}
    padded = [_by_field(dataset, KEY, [value.zfill(width) for value in values])[0] for width in widths]
    for keys in (keyed, *padded):
        if len(keys) and len(numbered) and not np.array_equal(keys, numbered):
            raise UsageError(
                f"values such as {values[0]!r} are keys of {len(keys)} samples, and numbers of {len(numbered)}, which "
                "are others; say what the list holds: --field key or --field number"
            )
    if len(keyed):
        return ListedSamples(keyed, without, KEY)
    return ListedSamples(numbered, outside, NUMBER)


def is_number(value: str) -> bool:
    """Return True if a text is a sample number: digits without leading zeros, signs or blanks."""
    return _NUMBER.fullmatch(value) is not None


def _by_number(dataset: Dataset, values: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    wrong = next((value for value in values if not is_number(value)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong[:40]!r} is not a sample number; expected 0 to {len(dataset) - 1}, without leading zeros; if it "
            "is a key, look its number up: shardkit find ROOT --field key=KEY"
        )
    numbers = [int(value) for value in values]
    inside = sorted({number for number in numbers if number < len(dataset)})
    absent = [value for value, number in zip(values, numbers, strict=True) if number >= len(dataset)]
    return np.array(inside, dtype=np.int64), absent


def _by_field(dataset: Dataset, field: str, values: Sequence[str]) -> tuple[NDArray[np.int64], list[str]]:
    name, hashes = hash_values(dataset.schema, field, values)
    matches = find_samples(dataset, name, hashes, scan=True)
    hit = set(matches.value.tolist())
    return np.unique(matches.sample), [value for place, value in enumerate(values) if place not in hit]


def check_absent(absent: Sequence[str], what: str) -> None:
    """Raise AbsentError if there are absent values."""
    if absent:
        shown = ", ".join(repr(value[:80]) for value in absent[:_SHOWN])
        raise AbsentError(
            f"{what} holds {len(absent)} values that the dataset does not have, such as {shown}; correct the list, or "
            "leave them out on purpose: --allow-absent"
        )


def parse_lookup(text: str | Sequence[str], schema: Schema) -> tuple[str, ...]:
    """Return the fields of ``"key,url,image:sha256"``, sorted.

    ``:sha256`` means that values will be given as SHA-256 of the field's bytes; the sidecar is the same.
    """
    return tuple(sorted({_parse_lookup(name, schema)[0] for name in names_of(text, "lookup")}))


def hash_values(schema: Schema, asked: str, texts: Sequence[str]) -> tuple[str, Hashes]:
    """Return the field of ``asked`` and the hashes of values as users write them."""
    field, by_digest = _parse_lookup(asked, schema)
    if by_digest:
        digests = [_digest(field, text) for text in texts]
    else:
        kind = None if field == KEY else schema[field]
        digests = [_hash(_payload(field, kind, text)) for text in texts]
    return field, _words(b"".join(digests))


def _parse_lookup(name: str, schema: Schema) -> tuple[str, bool]:
    """Return the field of ``key``, ``field`` or ``field:sha256``, and whether values are given as digests."""
    # a field name may contain colons
    field, colon, mode = (name, "", "") if name in schema or ":" not in name else name.rpartition(":")
    if colon and (mode != "sha256" or field == KEY):
        raise UsageError(f"lookup {name!r}: expected a field, field:sha256, or key")
    if field == KEY:
        return field, False
    if field not in schema:
        raise UsageError(f"there is no field {field!r} to look up; there are key, {', '.join(schema)}")
    kind = schema[field]
    if not colon and (kind.is_packed or kind.kind in ("bytes", "array", "ragged")):
        raise UsageError(
            f"field {field!r} is {kind}: nobody can type its value; look it up by its digest: {field}:sha256"
        )
    return field, bool(colon)


def put_lookups(
    repository: Repository,
    reader: BlockReader,
    table: ShardTable,
    fields: Sequence[str],
    before: Sequence[Lookup] = (),
) -> tuple[Lookup, ...]:
    """Write look-ups of the rows of a table as durable pieces, after the pieces of `before`, for a manifest to name.

    Shards are read back and verified block by block; for keys, only indexes are read.
    """
    lookups, held = [], {lookup.field: lookup.pieces for lookup in before}
    for field in sorted(fields):
        pieces = [*held.get(field, ())]
        for first, last in cut_pieces(table.rows, PIECE_ROWS):
            entries = _collect(reader, range(first, last), field)
            placed = repository.put_object(entries.to_bytes(field, last - first), "lookup")
            pieces.append(LookupPiece(placed.digest, placed.size, last - first, len(entries)))
        lookups.append(Lookup(field, tuple(pieces)))
    return tuple(lookups)


def find_samples(dataset: Dataset, field: str, wanted: Hashes, *, scan: bool = False) -> Matches:
    """Return the samples of a version whose field has one of the hashes.

    Raises:
        NotFoundError: The version has no look-up of the field, and `scan` is not set.
    """
    queries, shards, rows = [], [], []
    for first, entries in _entries(dataset, field, scan=scan):
        query, entry = entries.search(wanted)
        queries.append(query)
        shards.append(entries.shard[entry].astype(np.int64) + first)
        rows.append(entries.row[entry].astype(np.int64))
    empty = np.zeros(0, dtype=np.int64)
    query, shard, row = (np.concatenate([empty, *found]) for found in (queries, shards, rows))
    sample, held = _sample_numbers(dataset, shard, row)
    query, sample, shard, row = query[held], sample[held], shard[held], row[held]
    order = np.lexsort((sample, query))
    # A row may match twice: by the source's key and by the shard's key.
    twice = (np.diff(query[order], prepend=-1) == 0) & (np.diff(sample[order], prepend=-1) == 0)
    order = order[~twice]
    return Matches(query[order], sample[order], shard[order], row[order])


def _entries(dataset: Dataset, field: str, *, scan: bool) -> Iterator[tuple[int, Entries]]:
    """Yield (first shard, entries) of each piece, or of each shard of a part without the look-up."""
    for part in dataset.version.parts:
        manifest, first, repository = part.manifest, part.first_shard, part.repository
        lookup = next((lookup for lookup in manifest.lookups if lookup.field == field), None)
        if lookup is None:
            if not scan and field != KEY:
                known = ", ".join(lookup.field for lookup in manifest.lookups) or "none"
                raise NotFoundError(
                    f"there is no lookup of {field!r} (there are: {known}); run: shardkit rebuild ROOT --lookup "
                    f"{field}, or read all samples: --scan"
                )
            for shard in range(first, first + manifest.shards):
                yield shard, _collect(dataset.reader, [shard], field)
            continue
        for piece in lookup.pieces:
            rows = dataset.table.rows[first : first + piece.shards]
            data = repository.get_object(piece.digest, "lookup", piece.size)
            yield first, Entries.from_bytes(data, field, rows)
            first += piece.shards


def _sample_numbers(
    dataset: Dataset, shard: NDArray[np.int64], row: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the sample numbers of rows, and whether the version selects each of them."""
    table = dataset.table
    starts = np.cumsum(table.selected) - table.selected
    sample = starts[shard] + row
    held = np.ones(len(shard), dtype=np.bool_)
    for number in np.unique(shard[table.has_selection[shard]]).tolist():
        mine = np.flatnonzero(shard == number)
        selection = dataset.rows.selection(number)
        held[mine] = selection.mask()[row[mine]]
        sample[mine] = starts[number] + selection.rank(row[mine])
    return sample, held


def _collect(reader: BlockReader, shards: Sequence[int], field: str) -> Entries:
    """Return the hashes of all rows of some shards; shard numbers count from the first of them."""

    def one(shard: int) -> tuple[Hashes, NDArray[np.uint32]]:
        return _key_hashes(reader, shard) if field == KEY else _field_hashes(reader, shard, field)

    with ThreadPoolExecutor(_READERS, thread_name_prefix="shardkit-lookup") as pool:
        found = list(pool.map(one, shards))
    numbers = np.repeat(np.arange(len(found), dtype=np.uint32), [len(rows) for _, rows in found])
    hashes = np.concatenate([hashes for hashes, _ in found])
    return Entries.sort(hashes, numbers, np.concatenate([rows for _, rows in found]))


def _key_hashes(reader: BlockReader, shard: int) -> tuple[Hashes, NDArray[np.uint32]]:
    index = reader.index(shard)
    texts = index.keys()
    rows = np.arange(index.rows, dtype=np.uint32)
    if index.original_rows is not None and index.original_texts is not None:
        texts = texts + index.original_texts.to_list()
        rows = np.concatenate([rows, index.original_rows.astype(np.uint32)])
    return _words(b"".join(_hash(text.encode("utf-8", "surrogatepass")) for text in texts)), rows


def _field_hashes(reader: BlockReader, shard: int, field: str) -> tuple[Hashes, NDArray[np.uint32]]:
    index = reader.index(shard)
    digests: list[bytes] = []
    present = [np.empty(0, np.bool_)]
    for number in range(index.blocks):
        block = reader.read(shard, number)
        column = block.column(field)
        comparable = _sorted_json if block.schema[field].kind == "json" else bytes
        if isinstance(column, VariableColumn):
            view = np.ascontiguousarray(column.data).data
            borders = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
            digests += [_hash(comparable(view[start:end])) for start, end in borders]
        else:
            digests += [_hash(column.payload(row)) for row in range(block.rows)]
        present.append(block.present(field))
    rows = np.flatnonzero(np.concatenate(present)).astype(np.uint32)
    return _words(b"".join(digests))[rows], rows


def hash_payloads(payloads: Sequence[bytes | memoryview]) -> Hashes:
    """Return the hashes of canonical payloads, or of keys in UTF-8: (n, 2)."""
    return _words(b"".join(map(_hash, payloads)))


def _hash(payload: bytes | memoryview) -> bytes:
    return hashlib.sha256(payload).digest()[:_HASH_BYTES]


def _sorted_json(payload: bytes | memoryview) -> bytes:
    """Return a JSON value with sorted keys: objects are equal whatever the order of their keys."""
    text = bytes(payload)
    if b"{" not in text:
        return text
    return json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False, sort_keys=True).encode()


def _words(digests: bytes) -> Hashes:
    return np.frombuffer(digests, dtype=">u8").reshape(-1, 2).astype(np.uint64)


def _digest(field: str, text: str) -> bytes:
    match = _SHA256.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"{field}:sha256={text[:80]!r}: expected 64 hex digits, as sha256sum prints them")
    return bytes.fromhex(match[1])[:_HASH_BYTES]


def _payload(field: str, kind: FieldType | None, text: str) -> bytes:
    """Return the canonical bytes of a value as users write it."""
    if kind is None or kind.kind == "str":
        return text.encode("utf-8", "surrogatepass")
    try:
        value = json.loads(text) if kind.logical is None else text
    except ValueError:
        raise UsageError(f"{field}={text[:80]!r} is not {kind}; expected it as JSON has it") from None
    (payload,) = Schema.parse({field: kind.required}).encode({field: value}, where=f"value {text[:80]!r}")
    return _sorted_json(payload) if kind.kind == "json" else payload
