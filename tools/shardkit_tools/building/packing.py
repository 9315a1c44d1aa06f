"""Pack documents of any length into rows of a fixed length, between the passes, again as rows in scratch.

Documents of one stratum (and one split, with ``split_by``) are packed together, in groups of neighbours in
the source of at most `_GROUP_BYTES`. Groups depend only on the documents, so the rows do not depend on jobs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardkit.dataset.encoding import CLASS_AXIS, spool_batch
from shardkit.dataset.rows import Records, Rows, unwritten_records
from shardkit.dataset.scratch import RowSpool, ScratchReader
from shardkit.errors import ConfigurationError
from shardkit.formats import Schema, raw_row_bytes
from shardkit.formats.block import JoinedPayloads, payloads_of
from shardkit.formats.schema import BOUNDARIES
from shardkit_tools.building.engines import Report
from shardkit_tools.building.job import JobFolder
from shardkit_tools.building.passes import ITEMS, TaskRows, spool_part

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

    @property
    def kept(self) -> list[str]:
        """Fields to stratify by, with the value of a row's first document."""
        return list(self.rows)[2:]

    @property
    def item_bytes(self) -> int:
        """Size of an item of the field."""
        return self.rows[self.field].numpy_dtype.itemsize

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
    open_spool: Callable[..., RowSpool]  # `RowSpool` with its settings
    folder: JobFolder  # the job directory
    parts: Sequence[str]  # names of the scratch files of the documents

    def __post_init__(self) -> None:
        self._parts = self.folder.parts(self.parts)
        self._reader = ScratchReader(self._parts, self.settings.documents)

    def close(self) -> None:
        self._parts.close()

    def work(self, item: Documents, report: Report) -> TaskRows:
        """Pack documents; in a job directory, also write the rows and their record."""

        def fill(spool: RowSpool) -> tuple[tuple[()], tuple[()]]:
            groups = itertools.pairwise(item.group_start.tolist())
            packings = [pack(item.items[first:last], self.settings.length) for first, last in groups]
            packing = Packing.join(packings, item.group_start)
            group = np.repeat(np.arange(len(packings), dtype=np.int32), [len(one) for one in packings])
            batch = self._batch(item, packing) if spool.folder else None
            spool.append(self._rows(item, packing, group), batch)
            return (), ()

        record = item.number, item.record_name
        made = spool_part(self.folder, "packed", self.settings.rows, self.open_spool, record, fill)
        report(len(made.columns), item.raw_bytes)
        return made

    def _rows(self, item: Documents, packing: Packing, group: NDArray[np.int32]) -> Rows:
        """Return the table of the packed rows; `group` is the group of each."""
        settings, lead = self.settings, packing.document[packing.row_start[:-1]]
        begin = packing.start[packing.row_start[:-1]].tolist()
        sizes: list[Any] = [settings.length * settings.item_bytes, 4 * (np.diff(packing.row_start) + 1)]
        for name in settings.kept:
            size: Any = settings.rows[name].item_bytes
            if size is None:  # a stratify field of variable size is the text of the stratum
                axis = settings.axes.index(name)
                size = np.array([len(values[axis].encode()) for values in item.stratum])[group]
            sizes.append(size)
        raw_bytes = np.asarray(raw_row_bytes(settings.format, settings.rows, sizes), np.int64)
        identity = [_identity(*of) for of in zip(item.identity[lead].tolist(), begin, strict=True)]
        return Rows(
            identity=np.array(identity, np.uint64).reshape(-1, 2),
            stratum=group,
            raw_bytes=np.ascontiguousarray(np.broadcast_to(raw_bytes, len(group))),
            strata=item.stratum,
            split=item.split[lead],
            generated=np.ones(len(group), np.bool_),
            records=unwritten_records(len(group)),
        )

    def _batch(self, item: Documents, packing: Packing) -> Any:
        """Return the record batch of the packed rows."""
        settings = self.settings
        block = self._reader.read(item.records, item.ordinal).block(0, len(item.ordinal))
        columns = zip(settings.documents.stored, block.columns, strict=True)
        held = {name: payloads_of(column) for name, column in columns}
        lead = packing.document[packing.row_start[:-1]].tolist()
        kept = [[held[name][document] for document in lead] for name in settings.kept]
        assert block.source_id is not None, "scratch has the source of every row"
        assert block.source_row is not None, "as above"
        source = block.source_id[lead]
        return spool_batch(
            settings.rows,
            [self._items(packing, held[settings.field]), packing.boundaries(), *kept],
            keys=(),
            originals=(),
            source_names=[block.source_names[number] if number >= 0 else "" for number in source.tolist()],
            source_rows=np.where(source >= 0, block.source_row[lead], -1),
        )

    def _items(self, packing: Packing, documents: Sequence[bytes | memoryview]) -> NDArray[np.uint8]:
        """Return the items of the packed rows, padded with zeros: uint8 (rows, bytes of a row)."""
        size = self.settings.item_bytes
        rows = np.zeros((len(packing), self.settings.length * size), np.uint8)
        flat = rows.reshape(-1).data
        row = np.repeat(np.arange(len(packing)), np.diff(packing.row_start))
        to = (row * self.settings.length + packing.place) * size
        begin, count = packing.start * size, packing.length * size
        for place, document, first, taken in zip(
            to.tolist(), packing.document.tolist(), begin.tolist(), count.tolist(), strict=True
        ):
            flat[place : place + taken] = documents[document][first : first + taken]
        return rows


def _identity(document: tuple[int, int], start: int) -> tuple[int, int]:
    """Return the identity of a row, from its first piece."""
    high, low = document
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

    @classmethod
    def join(cls, packings: Sequence[Packing], first: NDArray[np.int64]) -> Packing:
        """Return several packings as one; documents of each are numbered from an entry of `first`."""
        counts = np.concatenate([np.diff(one.row_start) for one in packings])
        numbered = [one.document + start for one, start in zip(packings, first.tolist(), strict=False)]
        return cls(
            row_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            document=np.concatenate(numbered),
            start=np.concatenate([one.start for one in packings]),
            length=np.concatenate([one.length for one in packings]),
        )

    def __len__(self) -> int:
        return len(self.row_start) - 1

    @property
    def place(self) -> NDArray[np.int64]:
        """(pieces,) items of the row before each piece."""
        before = np.cumsum(self.length) - self.length
        place: NDArray[np.int64] = before - np.repeat(before[self.row_start[:-1]], np.diff(self.row_start))
        return place

    def boundaries(self) -> JoinedPayloads:
        """Return 0 and the ends of the pieces of each row, as payloads of int32."""
        counts = np.diff(self.row_start)
        ends = np.zeros(len(self.document) + len(self), "<i4")
        row = np.repeat(np.arange(len(self)), counts)
        ends[np.arange(len(row)) + row + 1] = self.place + self.length
        return JoinedPayloads(ends.view(np.uint8), 4 * (counts + 1))


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
