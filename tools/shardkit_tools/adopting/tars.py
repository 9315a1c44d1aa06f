"""Adopt tars in one pass: index, digest and runs of rows of one label (SPEC.md §2).

A tar is read in order from its first byte to its last, by the strict reader of the importers; nothing is
copied. Memory: one block, one sample, and the index.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from shardkit.errors import SourceError
from shardkit.formats import FieldType, Schema
from shardkit_tools.adopting.files import (
    BUILD_INSTEAD,
    MAX_UNEVEN,
    AdoptableFiles,
    AdoptTask,
    FilePass,
    LabelRuns,
    Report,
    ScannedFile,
    TooUnevenError,
    key_columns,
    label_text,
    smaller,
)
from shardkit_tools.adopting.located_rows import LocatedRows, locate_decimal, refuse_array
from shardkit_tools.importers.numpy_arrays import read_header
from shardkit_tools.importers.tar_members import members_and_damage
from shardkit_tools.importers.webdataset import TarSample, check_fields, tar_samples

_MAX_GAP_BYTES = (5 << 30) + (
    64 << 20
)  # the largest member that is read, or the padding after the end of a tar


@dataclass(frozen=True)
class Tars(AdoptableFiles):
    """WebDataset tars."""

    shard_format: ClassVar[str] = "tar"
    has_strata: ClassVar[bool] = True
    key_note: ClassVar[str] = (
        "keys are unique inside a tar only, and JSON and media stay byte for byte as they are"
    )

    def scan(self, task: AdoptTask, axes: Sequence[str], block_bytes: int, report: Report) -> ScannedFile:
        skip = self.importer.options.skip_bad_rows
        return _TarScan(task, self.schema, axes, block_bytes, report, skip).run()


class _TarRow(NamedTuple):
    """A sample: start offset, (offset, size) of each field's payload or member in the tar, and labels."""

    key: str
    start: int
    fields: list[tuple[int, int]]  # in the order of the schema; the offset of a missing value is -1
    labels: tuple[str, ...]


class _HeldStream:
    """A file that keeps the bytes read since the last cut."""

    def __init__(self, blocks: FilePass, report: Report, most_bytes: int) -> None:
        self._blocks = blocks
        self._report = report
        self._room = most_bytes  # bytes that may be read before the next cut
        self._held: deque[memoryview] = deque()
        self.position = 0

    def read(self, size: int = -1, /) -> bytes:
        data = self._blocks.read(size)
        self._held.append(memoryview(data))
        self.position += len(data)
        self._room -= len(data)
        if self._room < 0:
            where = self._blocks.task.file.path
            raise SourceError(f"{where}: too few members in too many bytes; write the tar again")
        if data:
            self._report(0, len(data))
        return data

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        parts = []
        self._room += size
        while size > 0:
            part = self._held.popleft()
            if len(part) > size:
                self._held.appendleft(part[size:])
                part = part[:size]
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


@dataclass
class _TarScan:
    """One pass over an uncompressed tar."""

    task: AdoptTask
    schema: Schema  # schema of every sample
    axes: Sequence[str]  # fields to stratify by
    block_bytes: int  # target size of a block
    report: Report  # called with (rows, bytes) read
    skip: bool = False  # leave samples out that cannot be read
    block_rows: int | None = None  # None: the number in the first `block_bytes`, once these are read

    def __post_init__(self) -> None:
        self.rows = self.position = 0
        self._keys: list[str] = []
        self._block: list[_TarRow] = []  # rows of the current block
        self._runs = LabelRuns(self.axes)
        self._block_start = 0
        self._path = self.task.file.path
        self._types = dict(self.schema)  # faster than a mapping of Python
        self._optional = {name for name, kind in self.schema.items() if kind.optional}
        # fields whose values are whole members
        self._whole = {name for name, kind in self.schema.items() if kind.is_opaque and not kind.is_packed}
        self._whole -= set(self.axes)
        self._located = LocatedRows(self.schema, self._path, dict.fromkeys(self._whole, False))
        self._failures: list[str] = []

    def run(self) -> ScannedFile:
        """Read the tar and describe it; if a block gets far too large, read again with smaller blocks."""
        try:
            return self._read()
        except TooUnevenError:
            self.report(len(self._block) - self.rows, -self.position)
            return replace(self, block_rows=smaller(self.block_rows or 1)).run()

    def _read(self) -> ScannedFile:
        with FilePass(task=self.task) as self._blocks:
            most_bytes = _MAX_GAP_BYTES + MAX_UNEVEN * self.block_bytes
            self._stream = _HeldStream(self._blocks, self.report, most_bytes)
            try:
                end = self._read_rows()
            finally:
                self.position = self._stream.position
            if not self.rows and not self._failures:
                raise SourceError(f"{self._path}: the tar holds no samples; leave it out")
            if self.rows:
                self._end_block(end)
            self._blocks.add_tail(self._stream.take(self._stream.position - end))
            self._blocks.add_rest(self.report)  # after damage
            if not self.rows:
                self._blocks.check()
                return ScannedFile("", None, (), failures=tuple(self._failures))
        columns = {"format": "tar"} | key_columns(self._keys) | self._located.columns()
        runs = self._runs.checked(self._path)
        scanned = self._blocks.scanned(self.schema, self.block_rows or self.rows, runs, **columns)
        return replace(scanned, failures=tuple(self._failures))

    # Rows

    def _read_rows(self) -> int:
        """Read to the end, or to damage if bad samples are left out; return the end of the last sample."""
        end = 0
        try:
            members = members_and_damage(self._stream, self._path, one_name=True, skip=self.skip)
            for sample in tar_samples(members, self._path):
                row = self._good_row(sample)
                if row is None:
                    continue
                end = [member.end for _, member in sample.members.values()][-1]
                if self.block_rows is None and row.start >= self.block_bytes:
                    self.block_rows = max(1, self.rows)  # depends only on the tar
                self._place(row)
        except SourceError as error:
            if not self.skip:
                raise
            self._failures.append(f"{error}; its samples are read up to byte {end}")
        return end

    def _good_row(self, sample: TarSample) -> _TarRow | None:
        """Return the row of a sample; None if it is left out."""
        if sample.is_torn and sample.members.keys() != self._types.keys():
            return None
        try:
            if sample.error is not None:
                raise sample.error
            row = self._row(sample)
            # a block of this tar has as many rows as any other, so a bad one is found before it is in a block
            for name, (offset, size) in zip(self._types, row.fields, strict=True) if self.skip else ():
                if offset < 0:
                    continue
                data, at = sample.members[name][1].data, sample.members[name][1].offset
                raw = np.frombuffer(data, np.uint8)
                self._located.check_value(raw, (offset - at, size), name, f"sample {sample.key!r}")
        except SourceError as error:
            if not self.skip:
                raise
            self._failures.append(str(error))
            return None
        self._keys.append(sample.key)
        return row

    def _row(self, sample: TarSample) -> _TarRow:
        if sample.members.keys() != self._types.keys():
            check_fields(sample.members, self.schema, f"{self._path} sample {sample.key!r}", self._optional)
        fields: dict[str, tuple[int, int]] = {}
        labels = {}
        for name, (extension, member) in sample.members.items():
            if name in self._whole:
                fields[name] = member.offset, len(member.data)
                continue
            where, kind = f"{self._path} member {member.name!r}", self._types[name]
            skipped, size, is_payload = _locate(kind, extension.rpartition(".")[2], member.data, where)
            if self._located.is_payload.setdefault(name, is_payload) != is_payload:
                raise SourceError(
                    f"{where}: the field {name!r} is .npy in some samples only; {BUILD_INSTEAD}"
                )
            fields[name] = (member.offset + skipped, size)
            if name in self.axes:
                value = _axis_value(kind, member.data[skipped : skipped + size], is_payload=is_payload)
                labels[name] = label_text(kind, value, where)
        if len(labels) < len(self.axes):
            lacking = next(axis for axis in self.axes if axis not in labels)
            raise SourceError(
                f"{self._path} sample {sample.key!r}: no value of {lacking}, which samples are stratified by; add it, "
                "or adopt without --stratify"
            )
        places = [fields.get(name, (-1, 0)) for name in self._types]
        start = next(member.start for _, member in sample.members.values())
        return _TarRow(sample.key, start, places, tuple(labels[axis] for axis in self.axes))

    def _place(self, row: _TarRow) -> None:
        if self._block and (len(self._block) == self.block_rows or not self._runs.continues(row.labels)):
            self._end_block(row.start)
        if len(self._block) > 1 and row.start - self._block_start > MAX_UNEVEN * self.block_bytes:
            raise TooUnevenError
        self._runs.add(row.labels)
        self._block.append(row)
        self.rows += 1

    # Blocks

    def _end_block(self, end: int) -> None:
        """Close the block, which extends from the end of the last one to `end`."""
        size = end - self._block_start
        data = self._stream.take(size)
        self._blocks.add(data, len(self._block))
        self.report(len(self._block), 0)
        fields = np.array([row.fields for row in self._block], np.int64)
        starts = fields[:, :, 0]
        fields[:, :, 0] = np.where(starts < 0, 0, starts - self._block_start)
        self._located.add(data, fields, lambda row: f"sample {self._block[row].key!r}")
        self._block_start = end
        self._block = []


def _locate(kind: FieldType, suffix: str, data: bytes, where: str) -> tuple[int, int, bool]:
    """Return (bytes to skip, size, is_payload) of the value inside a member."""
    if kind.is_packed:
        raise SourceError(f"{where}: {kind} cannot be read where it lies; {BUILD_INSTEAD}")
    if kind.is_opaque:
        return 0, len(data), False
    if suffix == "npy":
        header = read_header(io.BytesIO(data), where, len(data), has_rows=False)
        note = ", column by column (Fortran order)" * header.columns_first
        refuse_array(kind, header.dtype, header.shape, note, where)
        return header.offset, len(data) - header.offset, True
    if kind.kind != "scalar" or kind.numpy_dtype.kind == "f":
        raise SourceError(f"{where}: cannot be read as {kind} where it lies, only .npy can; {BUILD_INSTEAD}")
    return (*locate_decimal(data, where), False)


def _axis_value(kind: FieldType, data: bytes, *, is_payload: bool) -> int | str:
    if is_payload:
        return int(np.frombuffer(data, kind.numpy_dtype)[0])
    return int(data) if kind.is_whole else data[:1000].decode(errors="replace")
