"""Pack documents of any length into rows of a fixed length, between the passes, again as rows in scratch.

Documents of one stratum (and one split, with ``split_by``) are packed together, in groups of neighbours in
the source of at most `_GROUP_BYTES`. Groups depend only on the documents, so the rows do not depend on jobs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import CLASS_AXIS, EncodedRow
from shardkit.dataset.scratch import Rows, RowSpool
from shardkit.dataset.scratch_reading import Records, ScratchReader
from shardkit.errors import ConfigurationError
from shardkit.formats import RowBlock, Schema, raw_row_bytes
from shardkit.formats.block import payloads_of
from shardkit.formats.schema import BOUNDARIES
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import JobFolder
from shardkit_tools.building.passes import ITEMS, TaskFacts, TaskRows

_Piece: TypeAlias = tuple[int, int, int]  # (document, first item, items)
_Held: TypeAlias = tuple[RowBlock, Mapping[str, Sequence[bytes | memoryview]]]

_GROUP_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class PackSettings:
    """Settings of packing."""

    field: str  # the ragged field
    length: int  # items per row
    axes: tuple[str, ...]  # fields to stratify by
    documents: Schema  # schema of the documents
    rows: Schema  # schema of the packed rows: the field, the boundaries, and the fields to stratify by
    format: str  # format of the shards, for sizes

    @classmethod
    def of(cls, documents: Schema, field: str, length: int, axes: Sequence[str], format: str) -> PackSettings:
        """Return the settings for a dataset; ``field`` is ragged.

        Raises:
            ConfigurationError: The length or the name of a field is invalid.
        """
        if not 1 <= length < 2**31:
            raise ConfigurationError(f"--pack {field}={length}: expected a length from 1 to {2**31 - 1}")
        kept = ["label" if axis == CLASS_AXIS else axis for axis in axes]
        if BOUNDARIES in (field, *kept):
            raise ConfigurationError(
                f"--pack: the name {BOUNDARIES!r} is that of the document boundaries; give your field another one"
            )
        types = {field: f"{documents[field].dtype}[{length}]", BOUNDARIES: "int32[*]"}
        types |= {name: str(documents[name]) for name in kept}
        return cls(field, length, tuple(axes), documents, Schema.parse(types), format)

    def describe(self) -> dict[str, object]:
        """Return the entry in the recipe."""
        return {"field": self.field, "length": self.length}


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents for one process; arrays have one entry per document, grouped."""

    number: int  # number of this item
    group_start: NDArray[np.int64]  # (groups + 1,)
    ordinal: NDArray[np.int64]  # see `Rows`, also for records and split
    records: Records
    items: NDArray[np.int64]
    split: NDArray[np.uint64]
    identity: NDArray[np.uint64]  # (n, 2)
    stratum: tuple[tuple[str, ...], ...]  # stratum of each group
    raw_bytes: int  # size of all documents

    def __str__(self) -> str:
        return f"documents to pack, part {self.number}"

    @property
    def record_name(self) -> str:
        """Name of the record of the packed rows: a hash of the documents and their order."""
        digest = xxhash.xxh3_128(str(self.number).encode())
        for column in (self.ordinal, *self.records.identity, self.items, self.group_start):
            digest.update(np.ascontiguousarray(column).data)
        return f"packed-{digest.hexdigest()}.rows"


def cut_documents(rows: Rows, split: NDArray[np.int16] | None) -> Iterator[Documents]:
    """Yield documents by split, stratum and source order, `_GROUP_BYTES` or one document at a time."""
    kinds: list[NDArray[np.integer]] = [rows.stratum] if split is None else [split, rows.stratum]
    order = np.lexsort(kinds)  # stable: keeps source order
    is_first = np.zeros(len(order), dtype=np.bool_)
    is_first[:1] = True
    for kind in kinds:
        is_first[1:] |= kind[order[1:]] != kind[order[:-1]]
    firsts = np.flatnonzero(is_first)
    ends = np.cumsum(rows.raw_bytes[order])
    start = number = 0
    while start < len(order):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _GROUP_BYTES, side="right")))
        yield _item(rows, number, order[start:stop], firsts[(firsts > start) & (firsts < stop)] - start)
        start, number = stop, number + 1


def _item(rows: Rows, number: int, places: NDArray[np.int64], borders: NDArray[np.int64]) -> Documents:
    group_start = np.concatenate([[0], borders, [len(places)]]).astype(np.int64)
    return Documents(
        number=number,
        group_start=group_start,
        ordinal=places,
        records=rows.records.only(places),
        items=rows.marks[ITEMS][places].astype(np.int64),
        split=rows.split[places],
        identity=rows.identity[places],
        stratum=tuple(rows.strata[n] for n in rows.stratum[places[group_start[:-1]]].tolist()),
        raw_bytes=int(rows.raw_bytes[places].sum()),
    )


@dataclass
class PackWorker:
    """Packs documents; one per process."""

    settings: PackSettings  # settings of packing
    _: KW_ONLY
    seed: int | None  # seed of the shuffle, None to keep the order
    folder: JobFolder  # the job directory
    parts: Sequence[str]  # names of the scratch files of the documents
    run_bytes: int  # see `RowSpool`

    def __post_init__(self) -> None:
        settings = self.settings
        self._parts = self.folder.parts(self.parts)
        self._reader = ScratchReader(self._parts, settings.documents)
        self._item_bytes = settings.rows[settings.field].numpy_dtype.itemsize
        self._raw_bytes = functools.lru_cache(maxsize=4096)(
            functools.partial(raw_row_bytes, settings.format, settings.rows)
        )

    def close(self) -> None:
        self._parts.close()

    def work(self, item: Documents, report: Report) -> TaskRows:
        """Pack documents; in a job directory, also write the rows and their record."""
        part = self.folder.new_part("packed")
        spool = RowSpool(
            self.folder.path,
            part,
            self.settings.rows,
            seed=self.seed,
            run_bytes=self.run_bytes,
            always_file=bool(part),
        )
        try:
            documents = self._documents(item) if part else None
            for group, stratum in enumerate(item.stratum):
                first, last = int(item.group_start[group]), int(item.group_start[group + 1])
                for pieces in _rows(pack(item.items[first:last], self.settings.length), first):
                    lead, at, _ = pieces[0]
                    source, payloads, sizes = self._row(pieces, stratum, documents)
                    split, size = int(item.split[lead]) or None, self._raw_bytes(sizes)
                    row = EncodedRow(None, None, source, payloads, None, stratum, split, size)
                    spool.append(row, _identity(item.identity[lead], at))
            columns, kept = spool.finish()
            if kept is not None:
                kept.close()
        except BaseException:
            spool.drop()
            raise
        made = TaskRows(TaskFacts(item.number, part, self.folder.keep(part)), columns)
        if part:
            self.folder.put_record(item.record_name, made.to_bytes())
        report(len(columns), item.raw_bytes)
        return made

    def _documents(self, item: Documents) -> _Held:
        """Return documents in memory, and the payloads of each of their fields."""
        records = self._reader.read(item.records, item.ordinal)
        block = records.block(0, len(item.ordinal))
        columns = zip(self.settings.documents.stored, block.columns, strict=True)
        return block, {name: payloads_of(column) for name, column in columns}

    def _row(
        self, pieces: list[_Piece], stratum: tuple[str, ...], documents: _Held | None
    ) -> tuple[tuple[str, int] | None, tuple[bytes, ...], tuple[int, ...]]:
        """Return (source, payloads, payload sizes) of a row; without documents, only sizes."""
        settings = self.settings
        ends = np.cumsum([0, *(length for _, _, length in pieces)], dtype="<i4")
        if documents is None:
            # a stratify field of variable size is the text of the stratum
            kept = (
                len(stratum[settings.axes.index(name)].encode())
                if kind.item_bytes is None
                else kind.item_bytes
                for name, kind in list(settings.rows.items())[2:]
            )
            return None, (), (settings.length * self._item_bytes, ends.nbytes, *kept)
        lead, (block, held) = pieces[0][0], documents
        payloads = (
            self._join(pieces, held[settings.field]),
            ends.tobytes(),
            *(bytes(held[name][lead]) for name in list(settings.rows)[2:]),
        )
        source = None
        if block.source_id is not None and block.source_row is not None and block.source_id[lead] >= 0:
            source = block.source_names[int(block.source_id[lead])], int(block.source_row[lead])
        return source, payloads, tuple(map(len, payloads))

    def _join(self, pieces: list[_Piece], documents: Sequence[bytes | memoryview]) -> bytes:
        size = self._item_bytes
        data = b"".join(
            documents[document][start * size : (start + length) * size] for document, start, length in pieces
        )
        return data.ljust(self.settings.length * size, b"\0")


def _rows(packing: Packing, base: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of each row; documents are numbered from ``base``."""
    document = (base + packing.document).tolist()
    pieces = list(zip(document, packing.start.tolist(), packing.length.tolist(), strict=True))
    for first, last in itertools.pairwise(packing.row_start.tolist()):
        yield pieces[first:last]


def _identity(document: NDArray[np.uint64], start: int) -> tuple[int, int]:
    """Return the identity of a row, from its first piece."""
    high, low = document.tolist()
    return divmod(xxhash.xxh3_128_intdigest(b"packed %d %d %d" % (high, low, start)), 2**64)


# ---- Best-fit decreasing packing (Johnson et al., "Worst-case performance bounds for simple one-dimensional
# packing algorithms", 1974; for training data Ding et al., "Fewer Truncations Improve Language Modeling",
# 2024): documents are placed in order of decreasing length, each in the fullest row with enough space. Only a
# document longer than a row is cut, into full rows and a rest.


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Rows and their pieces of documents, in document order."""

    row_start: NDArray[np.int64]  # (rows + 1,); the pieces of row r are row_start[r] … row_start[r + 1]
    # document, start, length: (pieces,); a piece is items start … start + length of a document
    document: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_start) - 1


def pack(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """Pack documents; depends only on the lengths.

    Returns:
        Rows in the order of their first piece; every item is in exactly one row.
    """
    pieces = -(-lengths // capacity)
    document = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * capacity
    length = np.minimum(lengths[document] - start, capacity)
    row = _best_fit(length, capacity)
    # Rows are numbered by their first piece; a stable sort keeps pieces of a row in document order.
    _, first, inverse = np.unique(row, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    row = rank[inverse]
    order = np.argsort(row, kind="stable")
    counts = np.bincount(row, minlength=len(first))
    return Packing(
        row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        document=document[order],
        start=start[order],
        length=length[order],
    )


def _best_fit(length: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the row of each piece. Rows of equal room form a stack; bit r of ``rooms``: a row has room r."""
    row = np.empty(len(length), dtype=np.int64)
    stacks: dict[int, list[int]] = {}
    rooms = 0
    rows = 0
    order = np.argsort(-length, kind="stable")
    for piece, size in zip(order.tolist(), length[order].tolist(), strict=True):
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            stack = stacks[room]
            taken = stack.pop()
            if not stack:
                rooms ^= 1 << room
        else:
            room, taken = capacity, rows
            rows += 1
        row[piece] = taken
        left = room - size
        if left:
            stacks.setdefault(left, []).append(taken)
            rooms |= 1 << left
    return row
