"""Find tars to adopt, and scan each in one pass: index, digest and runs of rows of one label (SPEC.md §2).

A tar is read in order from its first byte to its last, by the strict reader of the importers; nothing is
copied. Memory: one block, one sample, and the index.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import FormatError, IntegrityError, NotFoundError, SourceError, StoreError, UsageError
from shardkit.formats import FieldType, Schema, ShardIndex, Texts, fit_key, xxh3
from shardkit.formats.reading import tar_column
from shardkit.formats.schema import decode_json
from shardkit.stores.remote.addresses import split_url
from shardkit.stores.store import ObjectStat
from shardkit_tools.building.source_digests import check_unchanged
from shardkit_tools.importers.numpy_arrays import read_header
from shardkit_tools.importers.protocol import SourceFile
from shardkit_tools.importers.remote_files import foreign_store, stat_file
from shardkit_tools.importers.source_files import is_url, list_source, open_file
from shardkit_tools.importers.tar_members import Member, TarSample, read_members, tar_samples
from shardkit_tools.importers.webdataset import check_fields

BUILD_INSTEAD = "read it into shards of its own instead: shardkit build"
"""Advice for a tar that cannot be adopted."""

_PACKED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_PACKED_NAMES = (".gz", ".tgz", ".zst", ".bz2", ".xz", ".lz4")


def stat_tar(file: SourceFile) -> ObjectStat:
    """Return the current state of a tar; for a local one, only the size is filled in."""
    if is_url(file.path):
        return stat_file(file)
    check_unchanged(file)
    return ObjectStat(file.size, None)


def place_of(file: SourceFile) -> str:
    """Return the location that the root records: a URL, or a path without links."""
    return file.path if is_url(file.path) else os.path.realpath(file.path)


def find_tars(tars: Sequence[str | os.PathLike[str]]) -> list[SourceFile]:
    """Return all tars that paths, globs and URLs name, in this order.

    Raises:
        UsageError: A tar is named twice.
        SourceError: A tar is compressed or cannot be read.
        NotFoundError: There are no tars.
    """
    files: list[SourceFile] = []
    seen: set[str] = set()
    for given in tars:
        for file in _listed(os.fspath(given)):
            _check_kind(file)
            place = place_of(file)
            if place in seen:
                raise UsageError(f"{file.path}: named twice; name it once")
            seen.add(place)
            files.append(file)
    if not files:
        raise NotFoundError("no tars: name at least one")
    return files


def _listed(given: str) -> Iterator[SourceFile]:
    local = given[7:] if given.lower().startswith("file:///") else given
    for file in list_source(local).files:
        if is_url(file.path):
            split_url(file.path)  # refuses credentials: the URL is recorded
        yield file


def _check_kind(file: SourceFile) -> None:
    head = _first_bytes(file)
    packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if packed is not None or file.name.lower().endswith(_PACKED_NAMES):
        how = f" with {packed}" if packed else ""
        raise SourceError(
            f"{file.path}: compressed{how}, so samples cannot be read out of its middle; {BUILD_INSTEAD}"
        )


def _first_bytes(file: SourceFile) -> bytes:
    """Return the first eight bytes; from a URL, only these are requested."""
    if not is_url(file.path):
        with open_file(file) as stream:
            return stream.read(8)
    address, key = split_url(file.path)
    try:
        return foreign_store(address).get_range(key, 0, min(8, file.size))
    except (IntegrityError, NotFoundError, StoreError) as error:
        raise SourceError(f"{file.path}: cannot be read ({error}); check it, then try again") from error


_LARGEST = 64  # a block of more than this many times the target is too uneven: smaller blocks are tried
_MAX_GAP_BYTES = (5 << 30) + (
    64 << 20
)  # the largest member that is read, or the padding after the end of a tar
_MIN_RUN_ROWS = 8
_DIGITS = re.compile(rb"[ \t\r\n]*(?:\+?0*(0|[1-9][0-9]*)|(-[1-9][0-9]*))[ \t\r\n]*\Z")
_MAX_LABEL = 200

Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class ScannedTar:
    """Result of one pass."""

    digest: str  # `sha256:<hex>` of the whole tar
    index: ShardIndex  # its index
    # (values of the axes, rows) of each run of rows with equal values, in order
    runs: tuple[tuple[tuple[str, ...], int], ...]
    etag: str = ""  # ETag of these bytes in the tar's store; empty if there is none


class _TarRow(NamedTuple):
    """A sample: start offset, (offset, size) of each field's payload or member in the tar, and labels."""

    key: str
    start: int
    fields: dict[str, tuple[int, int]]
    labels: tuple[str, ...]


class _TooUneven(Exception):
    """A block is far larger than its target."""


class _HeldStream:
    """A file that keeps the bytes read since the last cut."""

    def __init__(self, file: BinaryIO, where: str, report: Report) -> None:
        self._file = file
        self._where = where
        self._report = report
        self._gap = 0
        self._held: deque[bytes] = deque()
        self.position = 0

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise SourceError(f"{self._where}: cannot be read ({error.strerror}); mend the disk") from error
        self._held.append(data)
        self.position += len(data)
        self._gap += len(data)
        if self._gap > _MAX_GAP_BYTES:
            raise SourceError(f"{self._where}: no member in {self._gap} bytes; write the tar again")
        if data:
            self._report(0, len(data))
        return data

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes; members begin and end at borders of reads, so no read is split."""
        parts = []
        while size > 0:
            parts.append(self._held.popleft())
            size -= len(parts[-1])
        if size:
            raise SourceError(f"{self._where}: a member begins inside another; write the tar again")
        return b"".join(parts)

    def met_member(self) -> None:
        self._gap = 0


@dataclass
class TarScan:
    """One pass over an uncompressed tar."""

    file: SourceFile
    schema: Schema  # schema of every sample
    axes: Sequence[str]  # fields to stratify by
    block_bytes: int  # target size of a block
    report: Report  # called with (rows, bytes) read
    block_rows: int | None = None  # None: the number in the first `block_bytes`, once these are read

    def __post_init__(self) -> None:
        self.rows = self.position = 0
        self._sha256 = hashlib.sha256()
        self._is_payload: dict[str, bool] = {}
        self._keys: list[str] = []
        self._block: list[_TarRow] = []  # rows of the current block
        self._runs: list[tuple[tuple[str, ...], int]] = []
        self._block_start = 0
        self._sizes: list[int] = []  # size of each block in bytes
        self._starts = [0]
        self._digests: list[tuple[int, bytes]] = []
        self._fields: list[list[tuple[int, int]]] = []

    def run(self) -> ScannedTar:
        """Read the tar and describe it; if a block gets far too large, read again with smaller blocks."""
        try:
            return self._read()
        except _TooUneven:
            self.report(-self.rows, -self.position)
            return replace(self, block_rows=max(1, (self.block_rows or 1) // 8)).run()

    def _read(self) -> ScannedTar:
        before = stat_tar(self.file)
        with open_file(self.file) as file:
            self._stream = _HeldStream(file, self.file.path, self.report)
            try:
                end = self._read_rows()
            finally:
                self.position = self._stream.position
        if stat_tar(self.file) != before or self._stream.position != before.size:
            raise SourceError(
                f"{self.file.path}: it was changed while it was read; adopt what nobody writes to"
            )
        if not self.rows:
            raise SourceError(f"{self.file.path}: the tar holds no samples; leave it out")
        self._cut(end)
        tail = self._stream.take(self._stream.position - end)
        self._sha256.update(tail)
        digest = self._sha256.hexdigest()
        if before.sha256 not in (None, digest):
            raise SourceError(
                f"{self.file.path}: its store says that it has sha256:{before.sha256}, and the bytes that came have "
                f"sha256:{digest}; try again, then look at the store"
            )
        self._check_runs()
        return ScannedTar(f"sha256:{digest}", self._index(tail), tuple(self._runs), before.etag)

    # Rows

    def _read_rows(self) -> int:
        """Read to the end and return the end of the last sample."""
        end = 0
        for sample in tar_samples(self._members(), self.file.path):
            members = [member for _, member in sample.members.values()]
            row = self._row(sample, members[0].start)
            end = members[-1].end
            if self.block_rows is None and row.start >= self.block_bytes:
                self.block_rows = max(1, self.rows)  # depends only on the tar
            self._place(row)
        return end

    def _members(self) -> Iterator[Member]:
        for member in read_members(self._stream, self.file.path, one_name=True):
            self._stream.met_member()
            yield member

    def _row(self, sample: TarSample, start: int) -> _TarRow:
        fields: dict[str, tuple[int, int]] = {}
        labels = {}
        for name, (extension, member) in sample.members.items():
            where = f"{self.file.path} member {member.name!r}"
            kind = self.schema.get(name)
            if kind is None:
                raise SourceError(
                    f"{where}: has the field {name!r}, which the first samples do not have; every sample must have "
                    f"the fields {', '.join(self.schema)}: remove it, or add it to all"
                )
            skipped, size, is_payload = _locate(kind, extension.rpartition(".")[2], member.data, where)
            if self._is_payload.setdefault(name, is_payload) != is_payload:
                raise SourceError(
                    f"{where}: the field {name!r} is .npy in some samples only; {BUILD_INSTEAD}"
                )
            fields[name] = (member.offset + skipped, size)
            if name in self.axes:
                labels[name] = _label(kind, member.data[skipped : skipped + size], is_payload, where)
        check_fields(fields, self.schema, f"{self.file.path} sample {sample.key!r}")
        self._keys.append(sample.key)
        return _TarRow(sample.key, start, fields, tuple(labels[axis] for axis in self.axes))

    def _place(self, row: _TarRow) -> None:
        is_new_run = not self._runs or self._runs[-1][0] != row.labels
        if self._block and (is_new_run or len(self._block) == self.block_rows):
            self._cut(row.start)
        if len(self._block) > 1 and row.start - self._block_start > _LARGEST * self.block_bytes:
            raise _TooUneven
        if is_new_run:
            self._runs.append((row.labels, 0))
        self._runs[-1] = (row.labels, self._runs[-1][1] + 1)
        self._block.append(row)
        self.rows += 1
        self.report(1, 0)

    # Blocks

    def _cut(self, end: int) -> None:
        """Close the block, which extends from the end of the last one to `end`."""
        size = end - self._block_start
        data = self._stream.take(size)
        self._sha256.update(data)
        self._digests.append((xxh3(data), hashlib.sha256(data).digest()))
        self._sizes.append(size)
        fields = [
            [(row.fields[name][0] - self._block_start, row.fields[name][1]) for name in self.schema]
            for row in self._block
        ]
        self._check_values(data, fields)
        self._fields += fields
        self._starts.append(self._starts[-1] + len(self._block))
        self._block_start = end
        self._block = []

    def _check_values(self, data: bytes, fields: list[list[tuple[int, int]]]) -> None:
        """Check that every value decodes, with the code that will read it."""
        raw = np.frombuffer(data, np.uint8)
        table = np.array(fields, np.int64).reshape(len(fields), len(self.schema), 2)
        for place, (name, kind) in enumerate(self.schema.items()):
            rows = range(0)
            try:
                self._check_column(raw, table[:, place], kind, name)
            except FormatError:
                rows = range(len(fields))  # one of these is bad
            for row in rows:
                try:
                    self._check_column(raw, table[row : row + 1, place], kind, name)
                except FormatError as error:
                    raise SourceError(
                        f"{self.file.path} sample {self._block[row].key!r}: {error}; mend it, or keep its bytes with "
                        f"--schema {name}=bytes"
                    ) from None

    def _check_column(
        self, raw: NDArray[np.uint8], table: NDArray[np.int64], kind: FieldType, name: str
    ) -> None:
        if kind.kind == "json":
            for start, size in table.tolist():
                decode_json(raw[start : start + size].data, name)
        elif kind.kind != "bytes":
            tar_column(raw, table[:, 0], table[:, 1], kind, name, is_payload=self._is_payload[name])

    # Results

    def _check_runs(self) -> None:
        if len(self._runs) > 1 and len(self._runs) * _MIN_RUN_ROWS > self.rows:
            raise SourceError(
                f"{self.file.path}: {len(self._runs)} runs of one {'/'.join(self.axes)} in {self.rows} samples; "
                f"adopted tars can be balanced only where runs have {_MIN_RUN_ROWS} samples and more: adopt without "
                f"--stratify, or {BUILD_INSTEAD}"
            )

    def _index(self, tail: bytes) -> ShardIndex:
        keys = [fit_key(original) for original in self._keys]
        rewritten = [row for row, key in enumerate(keys) if key != self._keys[row]]
        sizes = np.array(self._sizes, np.uint64)
        table = np.array(self._fields, np.uint64).reshape(self.rows, len(self.schema), 2)
        changed: dict[str, Any] = {}
        if rewritten:
            changed = {
                "original_rows": np.array(rewritten, np.int64),
                "original_texts": Texts.pack([self._keys[row] for row in rewritten]),
            }
        return ShardIndex(
            format="tar",
            compression="none",
            schema=self.schema,
            rows=self.rows,
            block_rows=self.block_rows or self.rows,
            shard_size=self.position,
            head_size=0,
            head_sha256=hashlib.sha256(b"").hexdigest(),
            tail_sha256=hashlib.sha256(tail).hexdigest(),
            block_offset=np.cumsum(sizes) - sizes,
            block_size=sizes,
            block_raw_size=sizes,
            block_start=np.array(self._starts, np.int64),
            block_xxh3=np.array([fast for fast, _ in self._digests], np.uint64),
            block_sha256=np.frombuffer(b"".join(strong for _, strong in self._digests), np.uint8).reshape(
                -1, 32
            ),
            key_texts=Texts.pack(keys),
            field_offset=table[:, :, 0].copy(),
            field_size=table[:, :, 1].copy(),
            field_is_payload=np.array([self._is_payload[name] for name in self.schema], np.uint8),
            **changed,
        )


def _locate(kind: FieldType, suffix: str, data: bytes, where: str) -> tuple[int, int, bool]:
    """Return (bytes to skip, size, is_payload) of the value inside a member."""
    if kind.is_packed:
        raise SourceError(f"{where}: {kind} cannot be read where it lies; {BUILD_INSTEAD}")
    if kind.is_opaque:
        return 0, len(data), False
    if suffix == "npy":
        header = read_header(io.BytesIO(data), where, len(data), has_rows=False)
        is_shaped = len(header.shape) == 1 if kind.kind == "ragged" else header.shape == kind.shape
        if header.dtype != kind.numpy_dtype.str or header.columns_first or not is_shaped:
            ragged = f", or give --schema with {kind.dtype}[*]" if kind.kind == "array" else ""
            raise SourceError(
                f"{where}: an array of dtype {header.dtype} and shape {header.shape}"
                f"{', column by column (Fortran order)' * header.columns_first}, expected {kind}; "
                f"{BUILD_INSTEAD}{ragged}"
            )
        return header.offset, len(data) - header.offset, True
    if kind.kind != "scalar" or kind.numpy_dtype.kind == "f":
        raise SourceError(f"{where}: cannot be read as {kind} where it lies, only .npy can; {BUILD_INSTEAD}")
    return (*_digits(data, where), False)


def _digits(data: bytes, where: str) -> tuple[int, int]:
    """Return (offset, size) of the decimal in a member, without space, plus sign and leading zeros."""
    match = _DIGITS.match(data[:200]) if len(data) <= 200 else None
    if match is None:
        raise SourceError(
            f"{where}: {data[:40]!r} is not an integer that can be read where it lies; {BUILD_INSTEAD}, or read it "
            "as text with --schema …=str"
        )
    begin, end = match.span(match.lastindex or 1)
    return begin, end - begin


def _label(kind: FieldType, data: bytes, is_payload: bool, where: str) -> str:
    """Return the value as the name of a stratum, as a build would write it."""
    text = (
        str(int(np.frombuffer(data, kind.numpy_dtype)[0]))
        if is_payload
        else data[:1000].decode(errors="replace")
    )
    if kind.dtype == "bool":
        text = "false" if text == "0" else "true"
    if not text or len(text) > _MAX_LABEL:
        raise SourceError(f"{where}: {len(text)} characters; a field to stratify by needs 1 to {_MAX_LABEL}")
    return text
