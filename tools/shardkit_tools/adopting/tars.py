"""Adopt tars in one pass: index, digest and runs of rows of one label (SPEC.md §2).

A tar is read in order from its first byte to its last, by the strict reader of the importers; nothing is
copied. Memory: one block, or 4 MiB of smaller ones, one sample, and the index.
"""

from __future__ import annotations

import io
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from shardkit_tools.adopting.located_rows import LocatedRows, Span, locate_decimal, refuse_array
from shardkit_tools.importers.numpy_arrays import read_header
from shardkit_tools.importers.tar_members import Member, members_and_damage
from shardkit_tools.importers.webdataset import TarSample, check_fields, tar_samples

_MAX_GAP_BYTES = (5 << 30) + (
    64 << 20
)  # the largest member that is read, or the padding after the end of a tar
_CHECKED_BYTES = 4 << 20  # blocks that are hashed, and whose values are checked, together
_DIGITS = 19  # a decimal with fewer fits 64 bits


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


class _Block(NamedTuple):
    start: int  # offset in the tar
    size: int
    samples: list[TarSample]


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

    def take(self, size: int) -> list[memoryview]:
        """Return the next `size` bytes, in one or several pieces."""
        parts = []
        self._room += size
        while size > 0:
            part = self._held.popleft()
            if len(part) > size:
                self._held.appendleft(part[size:])
                part = part[:size]
            parts.append(part)
            size -= len(part)
        return parts


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
        self.rows = 0
        self._keys: list[str] = []
        self._block: list[TarSample] = []  # samples of the current block
        self._labels: tuple[str, ...] = ()  # their values of the axes
        self._runs = LabelRuns(self.axes)
        self._ended: list[_Block] = []  # blocks whose values are not checked yet
        self._block_start = 0  # offset of the current block
        self._path = self.task.file.path
        self._types = dict(self.schema)  # faster than a mapping of Python
        self._optional = {name for name, kind in self.schema.items() if kind.optional}
        self._located = LocatedRows(self.schema, self._path)
        self._failures: list[str] = []

    def run(self) -> ScannedFile:
        """Read the tar and describe it; if a block gets far too large, read again with smaller blocks."""
        try:
            return self._read()
        except TooUnevenError:
            unchecked = sum(len(block.samples) for block in self._ended) + len(self._block)
            self.report(unchecked - self.rows, -self._stream.position)
            return replace(self, block_rows=smaller(self.block_rows or 1)).run()

    def _read(self) -> ScannedFile:
        with FilePass(task=self.task) as self._blocks:
            most_bytes = _MAX_GAP_BYTES + MAX_UNEVEN * self.block_bytes + _CHECKED_BYTES
            self._stream = _HeldStream(self._blocks, self.report, most_bytes)
            self._read_samples()
            if not self.rows and not self._failures:
                raise SourceError(f"{self._path}: the tar holds no samples; leave it out")
            if self.rows:
                self._end_block(self._end)
                if self._ended:
                    self._check_blocks()
            for data in self._stream.take(self._stream.position - self._block_start):
                self._blocks.add_tail(data)
            self._blocks.add_rest(self.report)  # after damage
            if not self.rows:
                self._blocks.check()
                return ScannedFile("", None, (), failures=tuple(self._failures))
        columns = {"format": "tar"} | key_columns(self._keys) | self._located.columns()
        runs = self._runs.checked(self._path)
        scanned = self._blocks.scanned(self.schema, self.block_rows or self.rows, runs, **columns)
        return replace(scanned, failures=tuple(self._failures))

    @property
    def _end(self) -> int:
        """Offset of the end of the last sample in the current block."""
        if not self._block:
            return 0
        return max(member.end for member in self._block[-1].members.values())

    def _read_samples(self) -> None:
        """Read to the end, or to damage if bad samples are left out."""
        members = members_and_damage(self._stream, self._path, one_name=True, skip=self.skip)
        try:
            for sample in tar_samples(members, self._path):
                self._add_sample(sample)
        except SourceError as error:
            if not self.skip:
                raise
            self._failures.append(f"{error}; its samples are read up to byte {self._end}")

    def _add_sample(self, sample: TarSample) -> None:
        labels = self._labels_of(sample)
        if labels is None:
            return
        start = next(iter(sample.members.values())).start
        if self.block_rows is None and start >= self.block_bytes:
            self.block_rows = max(1, self.rows)  # depends only on the tar
        held = len(self._block)
        if held and (held == self.block_rows or labels != self._labels):
            self._end_block(start)
        elif held > 1 and start - self._block_start > MAX_UNEVEN * self.block_bytes:
            raise TooUnevenError
        self._block.append(sample)
        self._keys.append(sample.key)
        self._labels = labels
        self.rows += 1

    def _labels_of(self, sample: TarSample) -> tuple[str, ...] | None:
        """Return the values of the axes; None if the sample is left out."""
        if sample.is_torn and sample.members.keys() != self._types.keys():
            return None
        try:
            if sample.error is not None:
                raise sample.error
            if sample.members.keys() != self._types.keys():
                check_fields(
                    sample.members, self.schema, f"{self._path} sample {sample.key!r}", self._optional
                )
            # a block of this tar has as many rows as any other, so a bad one is found before it is in a block
            for name, member in sample.members.items() if self.skip else ():
                self._located.check_value(
                    name, member.data, self._locate(name, member), f"sample {sample.key!r}"
                )
            return tuple([self._label(sample, axis) for axis in self.axes])
        except SourceError as error:
            if not self.skip:
                raise
            self._failures.append(str(error))
            return None

    def _label(self, sample: TarSample, axis: str) -> str:
        member, kind = sample.members.get(axis), self._types[axis]
        if member is None:
            raise SourceError(
                f"{self._path} sample {sample.key!r}: no value of {axis}, which samples are stratified by; add it, "
                "or adopt without --stratify"
            )
        skipped, size = self._locate(axis, member)
        value = _axis_value(
            kind, member.data[skipped : skipped + size], is_payload=self._located.is_payload[axis]
        )
        return label_text(kind, value, f"{self._path} member {member.name!r}")

    def _locate(self, name: str, member: Member) -> Span:
        """Return (bytes to skip, size) of the value inside a member."""
        kind, where = self._types[name], f"{self._path} member {member.name!r}"
        is_payload = not kind.is_opaque and member.name.lower().endswith(".npy")
        if self._located.is_payload.setdefault(name, is_payload) != is_payload:
            raise SourceError(f"{where}: the field {name!r} is .npy in some samples only; {BUILD_INSTEAD}")
        if kind.is_packed:
            raise SourceError(f"{where}: {kind} cannot be read where it lies; {BUILD_INSTEAD}")
        if kind.is_opaque:
            return _text_span(kind, member)
        if is_payload:
            header = read_header(io.BytesIO(member.data), where, member.size, has_rows=False)
            note = ", column by column (Fortran order)" * header.columns_first
            refuse_array(kind, header.dtype, header.shape, note, where)
            return header.offset, member.size - header.offset
        if not _is_number_text(kind):
            raise SourceError(
                f"{where}: cannot be read as {kind} where it lies, only .npy can; {BUILD_INSTEAD}"
            )
        return locate_decimal(member.data, where)

    def _end_block(self, end: int) -> None:
        """End the block of the last samples, which extends from the end of the block before to `end`."""
        self._runs.add(self._labels, len(self._block))
        self._ended.append(_Block(self._block_start, end - self._block_start, self._block))
        self._block_start, self._block = end, []
        if end - self._ended[0].start >= _CHECKED_BYTES:
            self._check_blocks()

    def _check_blocks(self) -> None:
        """Hash the blocks that have ended, and locate and check their values; numpy takes longer for each by itself."""
        blocks, self._ended = self._ended, []
        rows = [len(block.samples) for block in blocks]
        self._blocks.add_small([self._stream.take(block.size) for block in blocks], rows)
        samples = [sample for block in blocks for sample in block.samples]
        self.report(len(samples), 0)
        starts = np.repeat([block.start for block in blocks], rows)
        table = np.zeros((len(samples), len(self._types), 2), np.int64)  # offset 0: the value is missing
        for place, name in enumerate(self._types):
            owners = [row for row, sample in enumerate(samples) if name in sample.members]
            if owners:
                spans = self._checked_spans(name, [samples[row] for row in owners])
                spans[:, 0] -= starts[owners]
                table[owners, place] = spans
        self._located.add(table)

    def _checked_spans(self, name: str, samples: Sequence[TarSample]) -> NDArray[np.int64]:
        """Locate the values of a field in the tar, and check them: (samples, offset and size)."""
        kind, is_payload = self._types[name], self._located.is_payload
        members = [sample.members[name] for sample in samples]
        spans = np.array([(member.offset, member.size) for member in members], np.int64)
        if kind.kind == "bytes":
            return spans
        data = b"".join([member.data for member in members])
        own = np.stack([np.cumsum(spans[:, 1]) - spans[:, 1], spans[:, 1]], 1)  # the same spans in `data`
        odd = np.arange(len(members))  # members that are located one by one
        if kind.is_opaque or not (
            is_payload.get(name) or any(member.name.lower().endswith(".npy") for member in members)
        ):
            is_payload[name] = False
            odd = np.flatnonzero(~_are_whole(kind, np.frombuffer(data, np.uint8), *own.T))
        for place in odd.tolist():
            skipped, size = self._locate(name, members[place])
            for table in (spans, own):
                table[place] = table[place, 0] + skipped, size
        self._located.check(name, data, own, lambda row: f"sample {samples[row].key!r}")
        return spans


def _are_whole(
    kind: FieldType, octets: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which members are certainly values of a field from their first byte to their last."""
    whole: NDArray[np.bool_] = np.zeros(len(sizes), bool)
    if not len(octets):
        return whole
    first = octets[np.minimum(offsets, len(octets) - 1)]
    if kind.kind in ("str", "json"):
        whole = (first != BOM_UTF8[0]) | (sizes < len(BOM_UTF8))
    elif _is_number_text(kind):
        whole = (sizes > 0) & (sizes < _DIGITS) & ((first != ord("0")) | (sizes == 1))
        for place in range(min(int(sizes.max()), _DIGITS)):
            whole &= octets[np.minimum(offsets + place, offsets + sizes - 1)] - np.uint8(ord("0")) < 10
    return whole


def _is_number_text(kind: FieldType) -> bool:
    """Return True for integers, whose decimals adoption can read; "20240102" may be a date, not a number of days."""
    return kind.kind == "scalar" and kind.logical is None and kind.numpy_dtype.kind != "f"


def _text_span(kind: FieldType, member: Member) -> Span:
    """Locate bytes, or a text without its byte-order mark."""
    marked = kind.kind != "bytes" and member.buffer.startswith(
        BOM_UTF8, member.begin, member.begin + member.size
    )
    skipped = len(BOM_UTF8) * marked
    return skipped, member.size - skipped


def _axis_value(kind: FieldType, data: bytes, *, is_payload: bool) -> int | str:
    if is_payload:
        return int(np.frombuffer(data, kind.numpy_dtype)[0])
    return int(data) if kind.is_whole else data[:1000].decode(errors="replace")
