"""NumPy files: the rows along the first axis are the samples.

Several ``.npy`` files with equal numbers of rows give one field each; so do the arrays of an archive
(``.npz``), and the rows of several archives follow each other.

Headers are parsed by numpy's reader without pickling. Data is read by offset, so that a file of any size
needs memory for about a MiB of rows. Archives have a CRC of each array. It is checked before the first row is
returned, so an array is decompressed twice.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardkit.dataset.arrow_columns import index_array
from shardkit.dataset.encoding import RowOrigin
from shardkit.errors import SampleError, ShardkitError, SourceError
from shardkit.formats import FieldType
from shardkit.formats.arrow_writing import arrow_array, arrow_schema
from shardkit.formats.schema import encode_value
from shardkit_tools.importers.protocol import (
    DecodedRows,
    DecodedStream,
    FileImporter,
    FileObserver,
    ImportOptions,
    SampleStream,
    Source,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    ignore_file,
)
from shardkit_tools.importers.source_files import check_suffixes, file_stem, is_url, open_file

_TASK_BYTES = 64 << 20
_PIECE_ROWS = 1 << 14
_PIECE_BYTES = 8 << 20  # a run of scratch (`MIN_RUN_BYTES`), which then need not be joined from pieces


@dataclass(frozen=True)
class ArrayHeader:
    """Header of an array."""

    dtype: str
    shape: tuple[int, ...]
    columns_first: bool  # Fortran order: the bytes of a row are not contiguous
    offset: int  # first byte of the data

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def row_type(self) -> str:
        """Field type of a row."""
        return array_type(np.dtype(self.dtype), self.shape[1:])


def array_type(dtype: np.dtype[np.generic], shape: Sequence[int]) -> str:
    """Return the field type of an array, in native spelling (`>i4` and `<i4` are both int32)."""
    name = dtype.newbyteorder("=").name
    return f"{name}[{','.join(map(str, shape))}]" if shape else name


@dataclass
class Rows:
    """A reader of the rows of an array, in order."""

    header: ArrayHeader
    where: str  # name for messages
    read: Callable[[int], bytes]  # returns the next bytes of the data, fewer at its end
    whole: NDArray[np.generic] | None = None  # the array, if it need not be read
    at: int = 0  # next row

    def __post_init__(self) -> None:
        head = self.header
        if head.columns_first and self.whole is None:
            data = self._read(head.row_bytes * head.shape[0])
            self.whole = np.frombuffer(data, head.dtype).reshape(head.shape, order="F")

    def take(self, count: int) -> NDArray[np.generic]:
        """Return the next rows as a new array."""
        if self.whole is not None:  # the bytes of a row are not contiguous
            self.at += count
            return np.array(self.whole[self.at - count : self.at], order="C")
        data = self._read(count * self.header.row_bytes)
        return np.frombuffer(data, self.header.dtype).reshape(count, *self.header.shape[1:])

    def _read(self, length: int) -> bytes:
        data = self.read(length)
        if len(data) != length:
            raise SourceError(f"{self.where}: ends inside of its rows; write it again")
        return data


@dataclass(frozen=True, kw_only=True)
class RowsImporter(FileImporter):
    """Base class of importers that read the rows of arrays in order."""

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield rows about 8 MiB at a time."""
        for start, columns, file in self._columns(task):
            count = len(next(iter(columns.values())))
            bad: dict[int, SampleError] = {}
            arrays = [
                _conform(kind, columns[name], name, f"{file.path} row", start, bad)
                for name, kind in self.fields.items()
            ]
            for row, error in bad.items():
                yield SourceFailure(file.name, start + row, error)
            batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self.schema, keys=False))
            good = np.array([row for row in range(count) if row not in bad], np.int64)
            origin = RowOrigin([file.name] * len(good), start + good)
            yield DecodedRows(batch.take(index_array(good)) if bad else batch, origin)

    def _rows(self, task: SourceTask, seen: FileObserver) -> SampleStream:
        for start, columns, file in self._columns(task):
            for row in range(len(next(iter(columns.values())))):
                sample: dict[str, object] = {name: column[row] for name, column in columns.items()}
                yield SourceSample(sample, None, file.name, start + row)

    def _columns(self, task: SourceTask) -> Iterator[tuple[int, Mapping[str, NDArray[Any]], SourceFile]]:
        """Yield (first row, field → the next rows, file)."""
        file, rows, readers = self._open(task)
        with readers as fields:
            row_bytes = sum(one.header.row_bytes for one in fields.values())
            step = max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, row_bytes)))
            for start in range(rows.start, rows.stop, step):
                count = min(step, rows.stop - start)
                yield start, {field: one.take(count) for field, one in fields.items()}, file

    def _open(self, task: SourceTask) -> tuple[SourceFile, range, AbstractContextManager[Mapping[str, Rows]]]:
        """Return the file that names the rows, their numbers, and readers of the fields."""
        raise NotImplementedError


def _conform(
    kind: FieldType, values: NDArray[Any], name: str, where: str, start: int, bad: dict[int, SampleError]
) -> Any:
    """Return rows of an array in the Arrow type of a field; rows that do not fit are added to `bad`."""
    if values.dtype.kind == "b" and kind.dtype == "bool":
        values = values.view(np.uint8) != 0  # the view may hold bytes other than 0 and 1
    present = np.ones((len(values), 1), np.uint8) if kind.optional else None
    if kind.item_bytes is not None and values.dtype == kind.numpy_dtype and values.shape[1:] == kind.shape:
        octets = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), kind.item_bytes)
        return arrow_array(kind, octets, name, present)
    payloads = []
    for row, value in enumerate(values):
        try:
            payloads.append(encode_value(kind.required, value, f"{where} {start + row}", name))
        except SampleError as error:
            bad.setdefault(row, error)
            payloads.append(bytes(kind.item_bytes or 0))
    return arrow_array(kind, payloads, name, present)


@dataclass(frozen=True)
class ArrayFile:
    """A ``.npy`` file, or a member of an archive, whose rows become a field."""

    field: str
    file: SourceFile
    header: ArrayHeader
    member: str = ""  # name in the archive

    def range(self, start: int, stop: int) -> tuple[SourceFile, int, int]:
        """Return (file, start, stop) bytes of some rows; all data if rows are not contiguous."""
        head = self.header
        if head.columns_first:
            return self.file, head.offset, self.file.size
        return self.file, head.offset + start * head.row_bytes, head.offset + stop * head.row_bytes

    def rows(self, start: int, stack: ExitStack) -> Rows:
        """Return a reader of rows from ``start`` on; the file is open as long as the stack."""
        head = self.header
        stream = stack.enter_context(open_file(self.file))
        stream.seek(head.offset + (0 if head.columns_first else start * head.row_bytes))
        whole = None
        if head.columns_first and not is_url(self.file.path):
            whole = np.load(self.file.path, mmap_mode="r", allow_pickle=False)
        return Rows(head, self.file.path, stream.read, whole, start)

    def archived_rows(self, members: zipfile.ZipFile, stack: ExitStack) -> Rows:
        """Return a reader of a member's rows, open as long as the stack; its CRC is checked first."""
        where, size = f"{self.file.path}: {self.member}", members.getinfo(self.member).file_size
        with _named(self.file, self.member), members.open(self.member) as whole:
            while whole.read(_PIECE_BYTES):
                pass
        stream = stack.enter_context(members.open(self.member))
        if read_header(stream, where, size) != self.header:
            raise SourceError(f"{where}: changed since it was listed; build again when nothing writes it")

        def read(length: int) -> bytes:
            with _named(self.file, self.member):
                return stream.read(length)

        return Rows(self.header, where, read)


@dataclass(frozen=True, kw_only=True)
class NumpyImporter(RowsImporter):
    """NumPy arrays as a source."""

    name: ClassVar[str] = "npy"
    arrays: tuple[ArrayFile, ...]

    def ranges(self, task: SourceTask) -> Sequence[tuple[SourceFile, int, int]]:
        return [one.range(task.start, task.stop or 0) for one in self.arrays]

    def _open(self, task: SourceTask) -> tuple[SourceFile, range, AbstractContextManager[Mapping[str, Rows]]]:
        @contextmanager
        def readers() -> Iterator[Mapping[str, Rows]]:
            with ExitStack() as stack:
                yield {one.field: one.rows(task.start, stack) for one in self.arrays}

        return self.arrays[0].file, range(task.start, task.stop or 0), readers()


def open_numpy(source: Source, options: ImportOptions) -> NumpyImporter:
    """Read the headers of a source of ``.npy`` files.

    A single file gives the field ``value``; several give one field per file, named after it.
    """
    check_suffixes(source, ("npy",), "a NumPy array")
    single = len(source.files) == 1
    files: dict[str, SourceFile] = {}
    for file in source.files:
        field = "value" if single else file_stem(file.name)
        if field in files:
            raise SourceError(
                f"{file.path}: its field would be called {field!r}, as that of {files[field].name}; "
                "rename one of the files"
            )
        files[field] = file
    kept = tuple(_open_array(field, file) for field, file in files.items() if options.keeps(field))
    types = {array.field: array.header.row_type for array in kept}
    schema = options.schema(types, source.given, names=files)
    check_rows({array.file.path: array.header.shape[0] for array in kept}, "the files of a folder")
    taken = tuple(array.file for array in kept)
    rows, row_bytes = kept[0].header.shape[0], sum(array.header.row_bytes for array in kept)
    step = max(1, _TASK_BYTES // max(1, row_bytes))
    cut = tuple(
        SourceTask(f"rows {start}:{stop}", taken, (stop - start) * row_bytes, start, stop)
        for start in range(0, rows, step)
        for stop in [min(rows, start + step)]
    )
    return NumpyImporter(
        source=replace(source, files=taken), fields=schema, options=options, cut=cut, arrays=kept
    )


def _open_array(field: str, file: SourceFile) -> ArrayFile:
    with open_file(file) as stream:
        header = read_header(stream, file.path, file.size)
    return ArrayFile(field, file, header)


def check_rows(rows: Mapping[str, int], what: str) -> None:
    """Check that arrays have equal numbers of rows, and at least one.

    Raises:
        SourceError: The numbers differ or are 0.
    """
    (first, expected), *others = rows.items()
    for where, count in others:
        if count != expected:
            raise SourceError(
                f"{where}: {count} rows, but {first.rpartition('/')[2]} has {expected}; {what} are the fields of one "
                "sample, so they need equally many rows; choose some with --columns or leave out others with --drop"
            )
    if not expected:
        raise SourceError(f"{first}: the array has no rows; give an array with samples in it")


def read_header(stream: IO[bytes], where: str, size: int, *, has_rows: bool = True) -> ArrayHeader:
    """Read the header of an array of `size` bytes; the stream is then at its data.

    Raises:
        SourceError: The header is invalid, or dtype, shape or size is unsuitable.
    """
    start = stream.tell()
    try:
        version = npy_format.read_magic(stream)
        read = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(
            version
        )
        if read is None:  # 3.0 only adds UTF-8 field names
            raise ValueError(f"format version {version} is not 1.0 or 2.0")
        shape, columns_first, dtype = read(stream)
    except (ValueError, EOFError, TypeError, SyntaxError, OverflowError, RecursionError) as error:
        raise SourceError(
            f"{where}: not a readable .npy file ({error}); write it again with numpy.save"
        ) from error
    if dtype.hasobject:
        raise SourceError(
            f"{where}: an array of dtype {dtype} holds pickled Python objects, which are never loaded; save it with "
            "a plain dtype"
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise SourceError(
            f"{where}: an array of dtype {dtype}: only booleans, integers and floats up to 64 bits can be stored; "
            "convert it first"
        )
    if has_rows and not shape:
        raise SourceError(
            f"{where}: an array without axes has no rows; save it with the samples on the first axis"
        )
    offset = stream.tell() - start
    expected = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if expected != size:
        raise SourceError(
            f"{where}: {size} bytes, but its header ({dtype}{list(shape)}) asks for {expected}; it "
            "is cut short or damaged, write it again"
        )
    columns_first = bool(columns_first and len(shape) > 1)
    return ArrayHeader(dtype.str, tuple(int(n) for n in shape), columns_first, offset)


_DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError, ValueError
)  # fmt: skip
"""Exceptions of `zipfile` for damage, invalid offsets, unknown compression and encryption."""


@dataclass(frozen=True, kw_only=True)
class ArchiveImporter(RowsImporter):
    """NumPy archives as a source, each one task: compressed data is read from its start."""

    name: ClassVar[str] = "npz"
    archives: tuple[tuple[ArrayFile, ...], ...]
    """The imported arrays of each file."""

    def _open(self, task: SourceTask) -> tuple[SourceFile, range, AbstractContextManager[Mapping[str, Rows]]]:
        (file,) = task.files
        arrays = self.archives[self.source.files.index(file)]

        @contextmanager
        def readers() -> Iterator[Mapping[str, Rows]]:
            with _opened(file) as members, ExitStack() as stack:
                yield {one.field: one.archived_rows(members, stack) for one in arrays}

        return file, range(arrays[0].header.shape[0]), readers()


def open_archives(source: Source, options: ImportOptions) -> ArchiveImporter:
    """Read the headers of a source of ``.npz`` files."""
    check_suffixes(source, ("npz",), "a NumPy archive")
    archives = []
    names: dict[str, str] = {}
    for file in source.files:
        arrays, fields = _read_archive(file, options)
        names = names or fields
        archives.append(arrays)
        found, expected = ({one.field: one.header.row_type for one in some} for some in (arrays, archives[0]))
        if found != expected:
            raise SourceError(
                f"{file.path}: its arrays are {_told(found)}, those of {source.files[0].name} are {_told(expected)}; "
                "the archives of a source hold the same arrays; name one of them, or choose arrays with --columns"
            )
    types = {one.field: one.header.row_type for one in archives[0]}
    return ArchiveImporter(
        source=source,
        fields=options.schema(types, source.given, names=names),
        options=options,
        archives=tuple(archives),
    )


def _told(types: Mapping[str, str]) -> str:
    return ", ".join(f"{field} {kind}" for field, kind in types.items())


def _read_archive(file: SourceFile, options: ImportOptions) -> tuple[tuple[ArrayFile, ...], dict[str, str]]:
    """Return the imported arrays of an archive, and field → member name of all its arrays."""
    arrays = []
    with _opened(file) as members:
        fields = _fields(members, file)
        for field, member in fields.items():
            if options.keeps(field):
                with _named(file, member), members.open(member) as stream:
                    size = members.getinfo(member).file_size
                    header = read_header(stream, f"{file.path}: {member}", size)
                arrays.append(ArrayFile(field, file, header, member))
    if not arrays:
        options.schema({}, file.path, names=fields)  # raises an error that lists the fields
    check_rows(
        {f"{file.path}: {one.member}": one.header.shape[0] for one in arrays}, "the arrays of an archive"
    )
    return tuple(arrays), fields


def _fields(members: zipfile.ZipFile, file: SourceFile) -> dict[str, str]:
    """Return field → member name."""
    fields: dict[str, str] = {}
    for member in members.namelist():
        stem, dot, suffix = member.rpartition(".")
        if not dot or suffix != "npy" or not stem:
            raise SourceError(f"{file.path}: holds {member!r}, which is no array; write it with numpy.savez")
        if stem in fields:
            raise SourceError(f"{file.path}: holds {member!r} twice; write it again with numpy.savez")
        fields[stem] = member
    if not fields:
        raise SourceError(f"{file.path}: holds no array; write some with numpy.savez")
    return fields


@contextmanager
def _opened(file: SourceFile) -> Iterator[zipfile.ZipFile]:
    with open_file(file) as stream:
        with _named(file):
            members = zipfile.ZipFile(stream)
        with members:
            yield members


@contextmanager
def _named(file: SourceFile, member: str = "") -> Iterator[None]:
    """Raise exceptions of `zipfile` as an error that names the file."""
    try:
        yield
    except ShardkitError:
        raise
    except _DAMAGED as error:
        inside = f": {member}" if member else ""
        raise SourceError(
            f"{file.path}{inside}: not a readable .npz archive ({error}); write it again with numpy.savez"
        ) from error
