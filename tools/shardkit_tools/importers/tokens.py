"""Files of tokens (``.bin``): rows of a type and size that the user states, or documents that an index states.

Without an index, files are parts of one array. Two kinds of index (``.idx``) are read: ``MMIDIDX`` of Megatron Core
(`megatron/core/datasets/indexed_dataset.py`) and ``TNTIDX`` of fairseq and older Megatron. Both have version 1. A
sample is then a document, of any length.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import SourceError, UsageError
from shardkit_tools.importers.numpy_arrays import ArrayFile, ArrayHeader, NumpyImporter, tasks_of_parts
from shardkit_tools.importers.protocol import (
    FileImporter,
    ImportOptions,
    SampleStream,
    Source,
    SourceFile,
    SourceSample,
    SourceTask,
)
from shardkit_tools.importers.source_files import (
    check_suffixes,
    file_stem,
    file_suffix,
    open_each,
    open_file,
    read_file,
)

_TOKEN_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


# marks and size of a header: llm.c, dev/data/data_common.py
_LLM_C, _LLM_C_BYTES = (20240520, 20240801), 1024


def open_tokens(source: Source, options: ImportOptions) -> NumpyImporter | TokenDocuments:
    """Divide files of tokens into rows of the field ``tokens``; tokens after the last full row are left out.

    With an index, a row is a document.
    """
    if any(file_suffix(file.name) == "idx" for file in source.files):
        return open_documents(source, options)
    source, opened = open_each(source, options, lambda file: _open_token_file(file, options))
    for array in opened:
        tail = array.file.size - array.header.shape[0] * array.header.row_bytes
        if tail:
            source.notes.append(
                f"{array.file.name}: its last {tail} bytes do not fill a row and are left out"
            )
    arrays = {array.file: [array] for array in opened}
    first = opened[0]
    return NumpyImporter(
        name="tokens",
        source=source,
        fields=options.schema({first.field: first.header.row_type}, source.given),
        options=options,
        cut=tasks_of_parts(arrays),
        arrays=arrays,
    )


def _open_token_file(file: SourceFile, options: ImportOptions) -> ArrayFile:
    """Return a file of tokens as an array of full rows."""
    if not options.dtype or not options.row:
        raise UsageError(
            f"{file.path}: nothing says of which type its tokens are; state type and row, such as --dtype uint16 "
            f"--row 2048; if it has an index, give both files: '{file_stem(file.path)}.*'"
        )
    if options.dtype not in _TOKEN_TYPES or options.row < 1:
        raise UsageError(
            f"--dtype {options.dtype} --row {options.row}: expected one of {', '.join(_TOKEN_TYPES)}, and a row of 1 "
            "token or more"
        )
    dtype = np.dtype(options.dtype).newbyteorder("<")
    with open_file(file) as stream:
        head = np.frombuffer(stream.read(12).ljust(12, b"\0"), "<i4")
    if head[0] in _LLM_C and head[2] * dtype.itemsize == file.size - _LLM_C_BYTES:
        raise SourceError(
            f"{file.path}: it begins with a header of llm.c, whose {_LLM_C_BYTES} bytes are no tokens; cut it off: "
            f"tail -c +{_LLM_C_BYTES + 1} FILE"
        )
    if not file.size:
        raise SourceError(f"{file.path}: an empty file; write it again, or leave it out: --on-error skip")
    rows = file.size // (dtype.itemsize * options.row)
    if not rows:
        raise SourceError(
            f"{file.path}: {file.size} bytes, less than a row of {options.row} tokens of {options.dtype}; give a "
            "smaller --row"
        )
    return ArrayFile(_FIELD, file, ArrayHeader(dtype.str, (rows, options.row), False, 0))


# ---- Documents

_FIELD = "tokens"
_TASK_BYTES = 64 << 20
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}  # 6 and 7 are floats
_MEGATRON, _FAIRSEQ = b"MMIDIDX\0\0", b"TNTIDX\0\0"


class DocumentIndex(NamedTuple):
    """Where the documents of a file are."""

    dtype: str
    start: NDArray[np.int64]  # (documents,) first byte of each document
    length: NDArray[np.int64]  # (documents,) its number of tokens
    rest_bytes: int = 0  # bytes of the index after what is read

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(documents,) bytes of each document."""
        return self.length * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class TokenDocuments(FileImporter):
    """Token files with an index."""

    name: str = "tokens"
    pairs: tuple[tuple[SourceFile, SourceFile], ...]  # each file and its index
    rows: tuple[int, ...]  # documents of each file

    def _rows(self, task: SourceTask) -> SampleStream:
        file, index = task.files[0], read_index(*task.files)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        with open_file(file) as stream:
            for row in range(task.start, task.stop or 0):
                stream.seek(int(index.start[row]))
                data = stream.read(int(index.length[row]) * dtype.itemsize)
                yield SourceSample({_FIELD: np.frombuffer(data, dtype)}, None, file.name, row)


def open_documents(source: Source, options: ImportOptions) -> TokenDocuments:
    """Read the indexes of token files."""
    check_suffixes(source, ("bin", "idx"), "a file of tokens")
    if options.dtype or options.row:
        raise UsageError(
            f"{source.given}: --dtype and --row are for files of tokens without an index, and the .idx files state the "
            "type and the documents; leave the options out, or name only the .bin files"
        )
    # by path: files of several folders may have equal names
    bins = {file_stem(file.path): file for file in source.files if file_suffix(file.name) == "bin"}
    indexes = {file_stem(file.path): file for file in source.files if file_suffix(file.name) == "idx"}
    if not bins and not indexes:
        raise SourceError(
            f"{source.given}: no pairs of .bin and .idx; for files of tokens without an index, pass --dtype and --row"
        )
    if alone := sorted(bins.keys() ^ indexes.keys()):
        missing = "idx" if alone[0] in bins else "bin"
        raise SourceError(
            f"{source.given}: {alone[0]}.{missing} is not among the files; files with an index come in pairs of .bin "
            f"and .idx: give the folder, or a glob such as '{alone[0]}.*'"
        )
    pairs = tuple((file, indexes[stem]) for stem, file in bins.items())
    tasks: list[SourceTask] = []
    dtypes: dict[str, str] = {}
    rows: list[int] = []
    for file, index_file in pairs:
        index = read_index(file, index_file)
        dtypes[index.dtype] = index_file.name
        rows.append(len(index.length))
        rest = file.size - int(index.sizes.sum())
        if rest > 0:
            source.notes.append(
                f"{file.name}: {rest} bytes are in no document of its index, and are left out"
            )
        if index.rest_bytes:
            source.notes.append(
                f"{index_file.name}: its last {index.rest_bytes} bytes are left out; multimodal data has the modes of "
                "its sequences there"
            )
        sizes = np.cumsum(index.sizes)
        borders = np.searchsorted(sizes, np.arange(_TASK_BYTES, file.size, _TASK_BYTES)).tolist()
        starts = sorted({0, *borders})
        for start, stop in zip(starts, [*starts[1:], len(sizes)], strict=True):
            if stop > start:
                size = int(sizes[stop - 1] - (sizes[start - 1] if start else 0))
                tasks.append(SourceTask(f"{file.name}:{start}", (file, index_file), size, start, stop, start))
    if len(dtypes) > 1:
        shown = ", ".join(f"{dtype} ({name})" for dtype, name in dtypes.items())
        raise SourceError(f"{source.given}: indexes of several token types: {shown}; build each by itself")
    if not tasks:
        raise SourceError(f"{source.given}: the indexes list no documents; give files with some")
    types = {_FIELD: f"{next(iter(dtypes))}[*]"}
    fields = options.schema(types, source.given)
    return TokenDocuments(
        source=source, fields=fields, options=options, cut=tuple(tasks), pairs=pairs, rows=tuple(rows)
    )


@functools.lru_cache(maxsize=4)
def read_index(file: SourceFile, index_file: SourceFile) -> DocumentIndex:
    """Read an index, and check that its documents are in the file."""
    data = read_file(index_file)
    try:
        index = _megatron(data) if data.startswith(_MEGATRON) else _fairseq(data)
        ends = index.start + index.sizes
        if bool(((index.start < 0) | (ends < index.start) | (ends > file.size)).any()):
            raise ValueError(f"a document is outside of its {file.size} bytes")
    except (ValueError, KeyError, struct.error, OverflowError) as error:
        raise SourceError(
            f"{index_file.path}: not a readable index of {file.name} ({error}); write both again"
        ) from error
    return index


def _megatron(data: bytes) -> DocumentIndex:
    version, code, sequences, documents = struct.unpack_from("<QBQQ", data, len(_MEGATRON))
    if version != 1:
        raise ValueError(f"version {version}, expected 1")
    at = len(_MEGATRON) + struct.calcsize("<QBQQ")
    length, at = _numbers(data, at, sequences, "<i4")
    start, at = _numbers(data, at, sequences, "<i8")
    borders, at = _numbers(data, at, documents, "<i8")
    return _documents(_dtype(code), start, length, borders)._replace(rest_bytes=len(data) - at)


def _fairseq(data: bytes) -> DocumentIndex:
    if not data.startswith(_FAIRSEQ):
        raise ValueError("it begins with neither MMIDIDX nor TNTIDX")
    version, code, item_bytes, sequences, sizes, documents = struct.unpack_from("<6Q", data, len(_FAIRSEQ))
    dtype = _dtype(code)
    if version != 1 or item_bytes != np.dtype(dtype).itemsize or sizes != sequences:
        raise ValueError(f"version {version}, {item_bytes} bytes an item, {sizes} sizes of {sequences} rows")
    at = len(_FAIRSEQ) + struct.calcsize("<6Q")
    _, at = _numbers(data, at, sequences + 1, "<i8")
    start, at = _numbers(data, at, sequences + 1, "<i8")
    length, at = _numbers(data, at, sizes, "<i8")
    borders, _ = _numbers(data, at, documents, "<i8")
    return _documents(dtype, start[:-1] * item_bytes, length, borders)


def _dtype(code: int) -> str:
    if code not in _CODES:
        raise ValueError(f"the code {code} of its type is none of integers")
    return _CODES[code]


def _numbers(data: bytes, at: int, count: int, dtype: str) -> tuple[NDArray[Any], int]:
    stop = at + count * np.dtype(dtype).itemsize
    if stop > len(data):
        raise ValueError(f"{len(data)} bytes, where its header asks for {stop} or more")
    return np.frombuffer(data, dtype, count, at).astype(np.int64), stop


def _documents(
    dtype: str, start: NDArray[np.int64], length: NDArray[np.int64], borders: NDArray[np.int64]
) -> DocumentIndex:
    """Join the sequences of each document, which follow each other in the file."""
    if not len(borders) or borders[0] != 0 or borders[-1] != len(start) or (np.diff(borders) < 0).any():
        raise ValueError("the borders of its documents do not rise from 0 to the number of sequences")
    if (length < 0).any():
        raise ValueError("a sequence has a negative length")
    is_inner = np.ones(len(start), np.bool_)
    is_inner[borders[borders < len(start)]] = False  # first sequences of documents
    ends = start + length * np.dtype(dtype).itemsize
    if (is_inner[1:] & (ends[:-1] != start[1:])).any():
        raise ValueError("the sequences of a document do not follow each other")
    total = np.concatenate([[0], np.cumsum(length)])
    place = np.append(start, ends[-1:] if len(ends) else 0)  # empty documents at the end have no sequence
    return DocumentIndex(dtype, place[borders[:-1]], total[borders[1:]] - total[borders[:-1]])
