"""NumPy files: the rows along the first axis are the samples.

Several ``.npy`` files are parts of one array (``--arrays rows``), a sample each (``files``), or a field each
(``fields``); without the option their names and shapes decide.

Headers are parsed by numpy's reader without pickling. Data is read by offset, so that a file of any size
needs memory for about a MiB of rows.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardkit.dataset.encoding import RowOrigin
from shardkit.errors import SampleError, SourceError
from shardkit.extras import shell_word
from shardkit.formats import FieldType
from shardkit.formats.arrow_writing import arrow_array, arrow_schema
from shardkit.formats.sample_columns import encode_column
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
from shardkit_tools.importers.source_files import (
    check_suffixes,
    file_stem,
    group_files,
    is_url,
    open_each,
    open_file,
    read_file,
)

VALUE = "value"
"""Field of the rows of a single array, of parts of one array, or of arrays that are samples."""
_DIGITS = re.compile(r"[0-9]+")
_MOST_PARTS = 64
_SMALL_ARRAY = 1 << 20  # more files than parts, smaller than this on average, are samples
_TASK_BYTES = 64 << 20
_PIECE_ROWS = 1 << 14
PIECE_BYTES = 8 << 20
"""Bytes read at once: a run of scratch (`MIN_RUN_BYTES`), which then need not be joined from pieces."""


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
    """Return the field type of an array, in native spelling (`>i4` and `<i4` are both int32); a size of 0 is free."""
    name = dtype.newbyteorder("=").name
    return f"{name}[{','.join(str(size or '*') for size in shape)}]" if shape else name


@dataclass(frozen=True)
class ArrayFile:
    """A file whose rows become a field."""

    field: str
    file: SourceFile
    header: ArrayHeader
    member: str = ""  # name in an archive

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file at the first byte of its rows."""
        with open_file(self.file) as stream:
            stream.seek(self.header.offset)
            yield stream

    def rows(self, starts: range) -> Iterator[NDArray[Any]]:
        """Yield the rows from each start to the next one, or to the stop, as new arrays."""
        head = self.header
        counts = [min(starts.step, starts.stop - start) for start in starts]
        with self.open() as stream:
            if head.columns_first:  # the bytes of a row are not contiguous
                whole = self._whole(stream)
                for start, count in zip(starts, counts, strict=True):
                    yield np.array(whole[start : start + count], order="C")
                return
            stream.seek(starts.start * head.row_bytes, io.SEEK_CUR)
            for count in counts:
                data = self._read(stream, count * head.row_bytes)
                yield np.frombuffer(data, head.dtype).reshape(count, *head.shape[1:])

    def _whole(self, stream: IO[bytes]) -> NDArray[Any]:
        head = self.header
        if not self.member and not is_url(self.file.path):
            mapped: NDArray[Any] = np.load(self.file.path, mmap_mode="r", allow_pickle=False)
            return mapped
        data = self._read(stream, head.row_bytes * head.shape[0])
        return np.frombuffer(data, head.dtype).reshape(head.shape, order="F")

    def _read(self, stream: IO[bytes], length: int) -> bytes:
        data = stream.read(length)
        if len(data) != length:
            raise SourceError(f"{self.file.path}: ends inside of its rows; write it again")
        return data


@dataclass(frozen=True, kw_only=True)
class NumpyImporter(FileImporter):
    """Arrays as a source: fields of the same rows, or parts of one array; also archives, and files of tokens."""

    name: str = "npy"
    arrays: Mapping[SourceFile, Sequence[ArrayFile]]
    """The imported arrays of each file."""

    def decode(self, task: SourceTask, seen: FileObserver = ignore_file) -> DecodedStream:
        """Yield rows about 8 MiB at a time; fields without an array have no value."""
        stored = arrow_schema(self.schema, keys=False)
        for start, columns, file in self._columns(task):
            count = len(next(iter(columns.values())))
            bad: dict[int, SampleError] = {}
            arrays = [
                _conform(kind, columns[name], name, f"{file.path} row", start, bad)
                if name in columns
                else pa.nulls(count, held.type)
                for (name, kind), held in zip(self.fields.items(), stored, strict=True)
            ]
            for row, error in bad.items():
                yield SourceFailure(file.name, start + row, error)
            batch = pa.RecordBatch.from_arrays(arrays, schema=stored)
            origin = RowOrigin([file.name] * count, np.arange(start, start + count))
            yield DecodedRows(batch, origin).without(bad)

    def _rows(self, task: SourceTask) -> SampleStream:
        for start, columns, file in self._columns(task):
            for row in range(len(next(iter(columns.values())))):
                sample: dict[str, object] = {name: column[row] for name, column in columns.items()}
                yield SourceSample(sample, None, file.name, start + row)

    def _columns(self, task: SourceTask) -> Iterator[tuple[int, Mapping[str, NDArray[Any]], SourceFile]]:
        """Yield (first row, field → the next rows, file that names the rows)."""
        arrays = [one for file in task.files for one in self.arrays[file]]
        row_bytes = sum(one.header.row_bytes for one in arrays)
        stop = arrays[0].header.shape[0] if task.stop is None else task.stop
        starts = range(task.start, stop, max(1, min(_PIECE_ROWS, PIECE_BYTES // max(1, row_bytes))))
        for start, *columns in zip(starts, *(one.rows(starts) for one in arrays), strict=True):
            yield start, {one.field: rows for one, rows in zip(arrays, columns, strict=True)}, task.files[0]

    def _settings(self) -> dict[str, object]:
        if self.options.dtype:
            return {"dtype": self.options.dtype, "row": self.options.row}
        is_parts = self.name == "npy" and len(self.arrays) > 1 and len(self.fields) == 1
        return {"arrays": "rows"} if is_parts else {}


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
    payloads = encode_column(kind.required, list(values), name, lambda row: f"{where} {start + row}", bad)
    return arrow_array(kind, payloads, name, present)


@dataclass(frozen=True, kw_only=True)
class ArraysImporter(FileImporter):
    """NumPy arrays as a source: a sample per file, under the file's name."""

    name: str = "npy"

    def _rows(self, task: SourceTask) -> SampleStream:
        for file in task.files:
            values = read_array(read_file(file), file.path)
            yield SourceSample({VALUE: values}, file_stem(file.name), file.name, 0)

    def _settings(self) -> dict[str, object]:
        return {"arrays": "files"}


def open_numpy(source: Source, options: ImportOptions) -> FileImporter:
    """Read the headers of a source of ``.npy`` files, and decide what the files are."""
    check_suffixes(source, ("npy",), "a NumPy array")
    if len(source.files) == 1 and options.arrays != "files":
        return _open_fields(source, options)
    if options.arrays == "fields" or (not options.arrays and (options.columns or options.drop)):
        return _open_fields(source, options)  # files that are left out are not read
    whole, is_rows = source, options.arrays == "rows"
    source, opened = open_each(source, options, lambda file: _header_of(file, has_rows=is_rows))
    headers = dict(zip(source.files, opened, strict=True))
    reading = options.arrays or _likely_reading(headers)
    if not options.arrays:
        folders = {file.name.rpartition("/")[0] for file in headers}
        if reading == "fields" and len(folders) > 1:  # classes or splits, more likely than fields
            raise SourceError(
                f"{source.given}: arrays of several names in {len(folders)} folders "
                f"({', '.join(sorted(folders)[:3])}): say what they are: --arrays rows, files or fields"
            )
        rows = sum(header.shape[0] for header in headers.values() if header.shape)
        several = f"{len(headers):,} arrays"
        told = {
            "rows": f"{several} are read as parts of one array of {rows:,} rows",
            "files": f"{several} are read as {len(headers):,} samples",
            "fields": f"{several} are read as {len(headers):,} fields of a sample",
        }
        source.notes.append(f"{told[reading]}; --arrays rows, files or fields decides otherwise")
    if reading == "fields":
        return _open_fields(
            whole, options
        )  # every field is needed, so a file that cannot be read is an error
    return (_open_parts if reading == "rows" else _open_samples)(source, options, headers)


def _header_of(file: SourceFile, *, has_rows: bool) -> ArrayHeader:
    with open_file(file) as stream:
        return read_header(stream, file.path, file.size, has_rows=has_rows)


def _likely_reading(headers: Mapping[SourceFile, ArrayHeader]) -> str:
    """Return what several arrays are: numbered files are parts or samples, files of other names are fields."""
    if len({_DIGITS.sub("0", file_stem(file.name)) for file in headers}) > 1:
        return "fields"
    kinds = {(header.dtype, header.shape[1:]) for header in headers.values()}
    if len(kinds) > 1 or not all(header.shape for header in headers.values()):
        return "files"
    mean = sum(file.size for file in headers) // len(headers)
    return "files" if len(headers) > _MOST_PARTS and mean < _SMALL_ARRAY else "rows"


def _open_parts(
    source: Source, options: ImportOptions, headers: Mapping[SourceFile, ArrayHeader]
) -> NumpyImporter:
    """Return files as parts of one array, in the order of the source."""
    first = next(iter(headers.values()))
    for file, header in headers.items():
        if header.row_type != first.row_type:
            raise SourceError(
                f"{file.path}: rows of {header.row_type}, but {source.files[0].name} has {first.row_type}; parts of "
                "one array have one type: build with --arrays files if each file is a sample, or with --arrays fields "
                "if each is a field"
            )
    arrays = {file: [ArrayFile(VALUE, file, header)] for file, header in headers.items()}
    cut = tasks_of_parts(arrays)
    if not cut:
        raise SourceError(f"{source.given}: the arrays have no rows; give arrays with samples in them")
    schema = options.schema({VALUE: first.row_type}, source.given)
    return NumpyImporter(source=source, fields=schema, options=options, cut=cut, arrays=arrays)


def _open_samples(
    source: Source, options: ImportOptions, headers: Mapping[SourceFile, ArrayHeader]
) -> ArraysImporter:
    """Return files as samples; sizes in which their shapes differ become free."""
    kind = ""
    for file, header in headers.items():
        own = array_type(np.dtype(header.dtype), header.shape)
        common = own if kind in ("", own) else common_array(kind, own)
        if common is None:
            raise SourceError(
                f"{file.path}: an array of {own}, but those before it are {kind}; samples need one dtype and number of "
                "axes: build them apart, or say --arrays rows or fields"
            )
        kind = common
    schema = options.schema({VALUE: kind}, source.given)
    return ArraysImporter(source=source, fields=schema, options=options, cut=tuple(group_files(source.files)))


def common_array(known: str, found: str) -> str | None:
    """Return the type of arrays of both types, free in sizes that differ, or None if there is none."""
    (dtype, _, sizes), (other, _, other_sizes) = (text.rstrip("]").partition("[") for text in (known, found))
    pairs = list(zip(sizes.split(","), other_sizes.split(","), strict=False))
    if dtype != other or not (sizes and other_sizes) or sizes.count(",") != other_sizes.count(","):
        return None
    return f"{dtype}[{','.join(a if a == b else '*' for a, b in pairs)}]"


def float_fields(fields: Mapping[str, FieldType], options: ImportOptions) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each field for which floats were inferred."""
    items = {name: kind.items or kind for name, kind in fields.items() if name not in options.field_types}
    return {name: kind.numpy_dtype for name, kind in items.items() if kind.numpy_dtype.kind == "f"}


def check_precision(array: object, dtype: np.dtype[Any], name: str, where: str) -> None:
    """Refuse an array of floats that the inferred dtype of its field would round."""
    if isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.itemsize > dtype.itemsize:
        wide = f"{shell_word(name)}={shell_word(array_type(array.dtype, array.shape))}"
        raise SourceError(
            f"{where}: field {name!r} is an array of {array.dtype.name}, and {dtype.name} was inferred from the "
            f"samples before it; make the arrays alike, or say the type, such as --schema {wide}"
        )


def _open_fields(source: Source, options: ImportOptions) -> NumpyImporter:
    """Return files as fields named after them; a single file is the field ``value``."""
    single = len(source.files) == 1
    files: dict[str, SourceFile] = {}
    for file in source.files:
        field = VALUE if single else file_stem(file.name)
        if field in files:
            raise SourceError(
                f"{file.path}: its field would be called {field!r}, as that of {files[field].name}; "
                "rename one of the files"
            )
        files[field] = file
    kept = tuple(
        ArrayFile(field, file, _header_of(file, has_rows=True))
        for field, file in files.items()
        if options.keeps(field)
    )
    types = {array.field: array.header.row_type for array in kept}
    schema = options.schema(types, source.given, names=files)
    check_rows({array.file.path: array.header.shape[0] for array in kept}, "the files of a folder")
    taken = tuple(array.file for array in kept)
    rows, row_bytes = kept[0].header.shape[0], sum(array.header.row_bytes for array in kept)
    cut = tuple(
        SourceTask(f"rows {start}:{stop}", taken, (stop - start) * row_bytes, start, stop)
        for start, stop in _row_ranges(rows, row_bytes)
    )
    return NumpyImporter(
        source=replace(source, files=taken),
        fields=schema,
        options=options,
        cut=cut,
        arrays={array.file: [array] for array in kept},
    )


def tasks_of_parts(arrays: Mapping[SourceFile, Sequence[ArrayFile]]) -> tuple[SourceTask, ...]:
    """Return the tasks of the parts of one array."""
    return tuple(
        SourceTask(
            f"{file.name} rows {start}:{stop}", (file,), (stop - start) * one.header.row_bytes, start, stop
        )
        for file, (one,) in arrays.items()
        for start, stop in _row_ranges(one.header.shape[0], one.header.row_bytes)
    )


def _row_ranges(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the rows of each task."""
    step = max(1, _TASK_BYTES // max(1, row_bytes))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def check_rows(rows: Mapping[str, int], what: str) -> None:
    """Check that arrays have equal numbers of rows, and at least one."""
    (first, expected), *others = rows.items()
    for where, count in others:
        if count != expected:
            raise SourceError(
                f"{where}: {count} rows, but {first.rpartition('/')[2]} has {expected}; {what} are the fields of one "
                "sample, so they need equally many rows; choose some with --columns or leave out others with --drop"
            )
    if not expected:
        raise SourceError(f"{first}: the array has no rows; give an array with samples in it")


def read_array(data: bytes, where: str) -> NDArray[Any]:
    """Return the array in the bytes of a ``.npy`` file; errors as for `read_header`."""
    header = read_header(io.BytesIO(data), where, len(data), has_rows=False)
    values = np.frombuffer(data, header.dtype, offset=header.offset)
    return values.reshape(header.shape, order="F" if header.columns_first else "C")


def read_header(stream: IO[bytes], where: str, size: int, *, has_rows: bool = True) -> ArrayHeader:
    """Read the header of an array of `size` bytes; the stream is then at its data."""
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
    offset = stream.tell() - start
    expected = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if expected != size:
        raise SourceError(
            f"{where}: {size} bytes, but its header ({dtype}{list(shape)}) asks for {expected}; "
            + ("it is cut short" if size < expected else "what follows the array would be lost")
            + ", write it again"
        )
    columns_first = bool(columns_first and len(shape) > 1)
    header = ArrayHeader(dtype.str, tuple(int(n) for n in shape), columns_first, offset)
    if has_rows and not shape:
        raise SourceError(
            f"{where}: an array without axes has no rows; save it with the samples on the first axis"
        )
    return header
