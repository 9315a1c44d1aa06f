"""NumPy ``.npy`` files: the rows of the first axis are the samples.

Several files with equally many rows are the fields of one sample.

The header is parsed by numpy's own reader with pickling off; the data is read by offset, so that a file of
any size takes the memory of one range of rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from shardkit.dataset.extents import ExtentColumn
from shardkit.errors import SourceError
from shardkit.formats import Schema
from shardkit_tools.importers.protocol import (
    ImportOptions,
    SampleColumns,
    SourceFailure,
    SourceFile,
    SourceSample,
    SourceTask,
    one_by_one,
)
from shardkit_tools.importers.remote_files import is_url
from shardkit_tools.importers.source_files import Source, file_stem, open_file

__all__ = ["ArrayHeader", "NumpyImporter", "check_rows", "open_numpy", "read_header"]

_TASK_BYTES = 64 << 20
_MIN_EXTENT_BYTES = 4096  # of a row; below it scratch costs less than a read for each
_PIECE_ROWS = 1 << 14
_PIECE_BYTES = 1 << 20  # stays in the cache of a processor between being read and being encoded


@dataclass(frozen=True)
class ArrayHeader:
    """What the header of an array says.

    Attributes:
        columns_first: Fortran order: a row is not one run of bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    columns_first: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape[1:], dtype=np.int64))

    @property
    def row_type(self) -> str:
        """The field type of a row, in native spelling (`>i4` and `<i4` are both int32)."""
        name = np.dtype(self.dtype).newbyteorder("=").name
        inner = self.shape[1:]
        return f"{name}[{','.join(map(str, inner))}]" if inner else name


@dataclass(frozen=True)
class ArrayFile(ArrayHeader):
    """A ``.npy`` file whose header has been read.

    Attributes:
        field: the field that its rows become.
        offset: first byte of the data.
    """

    file: SourceFile
    field: str
    offset: int

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        """Rows start … stop − 1 as a fresh array."""
        if self.columns_first:  # a row lies scattered over the file
            if is_url(self.file.path):
                with open_file(self.file) as stream:
                    whole: NDArray[np.generic] = npy_format.read_array(stream, allow_pickle=False)
            else:
                whole = np.load(self.file.path, mmap_mode="r", allow_pickle=False)
            return np.array(whole[start:stop], order="C")
        with open_file(self.file) as stream:
            stream.seek(self.offset + start * self.row_bytes)
            data = stream.read((stop - start) * self.row_bytes)
        if len(data) != (stop - start) * self.row_bytes:
            raise SourceError(
                f"{self.file.path} rows {start}:{stop}: the file ends inside them; write it again"
            )
        return np.frombuffer(data, np.dtype(self.dtype)).reshape(stop - start, *self.shape[1:])

    def extents(self, place: int, state: int, start: int, stop: int) -> ExtentColumn:
        """Where rows start … stop − 1 are; the file is the ``place``-th of its task."""
        offset = self.offset + self.row_bytes * np.arange(start, stop, dtype=np.int64)
        return ExtentColumn(place, offset, self.row_bytes, state)


@dataclass(frozen=True)
class NumpyImporter:
    """Arrays as a source; made by `open_numpy`."""

    arrays: tuple[ArrayFile, ...]
    schema: Schema
    classes: tuple[str, ...] = ()

    def files(self) -> Sequence[SourceFile]:
        return [array.file for array in self.arrays]

    def tasks(self) -> Sequence[SourceTask]:
        """Runs of rows of about 64 MiB."""
        row_bytes = sum(array.row_bytes for array in self.arrays)
        rows = self.arrays[0].shape[0]
        step = max(1, _TASK_BYTES // max(1, row_bytes))
        return [
            SourceTask(f"rows {start}:{stop}", tuple(self.files()), (stop - start) * row_bytes, start, stop)
            for start in range(0, rows, step)
            for stop in [min(rows, start + step)]
        ]

    def read(self, task: SourceTask) -> Iterator[SourceSample | SourceFailure]:
        """One sample per row."""
        return one_by_one(self.read_columns(task))

    def read_columns(self, task: SourceTask) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """Some MiB of rows at a time."""
        return self._columns(task, ())

    def bytes_in_place(self, task: SourceTask) -> int:
        stop = task.stop if task.stop is not None else self.arrays[0].shape[0]
        return sum(array.row_bytes for array in self.arrays if self._is_in_place(array)) * (stop - task.start)

    def read_extents(
        self, task: SourceTask, states: Sequence[int]
    ) -> Iterator[SampleColumns | SourceSample | SourceFailure]:
        """Many rows at a time; large ones that need no conversion stay where they are."""
        for array in self.arrays:
            if self._is_in_place(array):
                _read_ahead(array, task.start, task.stop)
        return self._columns(task, states)

    def _columns(self, task: SourceTask, states: Sequence[int]) -> Iterator[SampleColumns]:
        stop = task.stop if task.stop is not None else self.arrays[0].shape[0]
        name = self.arrays[0].file.name
        in_place = {array.field for array in self.arrays if states and self._is_in_place(array)}
        read = sum(array.row_bytes for array in self.arrays if array.field not in in_place)
        step = max(1, min(_PIECE_ROWS, _PIECE_BYTES // max(1, read)))
        for start in range(task.start, stop, step):
            end = min(stop, start + step)
            columns = {
                array.field: array.extents(place, states[place], start, end)
                if array.field in in_place
                else array.rows(start, end)
                for place, array in enumerate(self.arrays)
            }
            yield SampleColumns(columns, name, start)

    def _is_in_place(self, array: ArrayFile) -> bool:
        """Whether rows are large, and the canonical payloads as they stand; a bool might be neither 0 nor 1."""
        kind = self.schema[array.field]
        dtype = np.dtype(array.dtype)
        return (
            array.row_bytes >= _MIN_EXTENT_BYTES
            and not array.columns_first
            and dtype.kind != "b"
            and dtype == kind.numpy_dtype
            and kind.shape == array.shape[1:]
            and kind.kind in ("scalar", "array")
        )

    def describe(self) -> dict[str, object]:
        return {"importer": "npy"}


def _read_ahead(array: ArrayFile, start: int, stop: int | None) -> None:
    """Ask the system for rows of a local file that will be wanted in another order."""
    length = ((array.shape[0] if stop is None else stop) - start) * array.row_bytes
    if hasattr(os, "posix_fadvise"):
        with open_file(array.file) as stream:
            os.posix_fadvise(
                stream.fileno(), array.offset + start * array.row_bytes, length, os.POSIX_FADV_WILLNEED
            )


def open_numpy(source: Source, options: ImportOptions) -> NumpyImporter:
    """Read the headers of a source of ``.npy`` files.

    A single file gives the field ``value``; several give one field per file, named after it.

    Raises:
        SourceError: a file is damaged, holds objects, or has another number of rows than the others.
    """
    source.keep(("npy",), "a NumPy array")
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
    kept = tuple(_read_header(file, field) for field, file in files.items() if options.keeps(field))
    schema = options.schema({array.field: array.row_type for array in kept}, source.given, names=files)
    check_rows({array.file.path: array.shape[0] for array in kept}, "the files of a folder")
    return NumpyImporter(kept, schema)


def check_rows(rows: Mapping[str, int], what: str) -> None:
    """Arrays are the fields of one sample: where → how many rows are the same everywhere, and not none.

    Raises:
        SourceError: names the first array that has another number than the one before all, or none.
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


def read_header(stream: IO[bytes], where: str, size: int) -> ArrayHeader:
    """The header of an array of so many bytes; the stream is then at its data.

    Raises:
        SourceError: begins with `where`: it is damaged, or cannot be stored.
    """
    start = stream.tell()
    try:
        version = npy_format.read_magic(stream)
        read = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}.get(
            version
        )
        if read is None:  # 3.0 has field names in UTF-8 only
            raise ValueError(f"format version {version} is not 1.0 or 2.0")
        shape, columns_first, dtype = read(stream)
    except (ValueError, EOFError) as error:
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
    if not shape:
        raise SourceError(
            f"{where}: an array without axes has no rows; save it with the samples on the first axis"
        )
    expected = stream.tell() - start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if expected != size:
        raise SourceError(
            f"{where}: {size} bytes, but its header ({dtype}{list(shape)}) asks for {expected}; it "
            "is cut short or damaged, write it again"
        )
    return ArrayHeader(dtype.str, tuple(int(n) for n in shape), bool(columns_first and len(shape) > 1))


def _read_header(file: SourceFile, field: str) -> ArrayFile:
    with open_file(file) as stream:
        header = read_header(stream, file.path, file.size)
        return ArrayFile(
            header.dtype, header.shape, header.columns_first, file=file, field=field, offset=stream.tell()
        )
