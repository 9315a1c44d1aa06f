"""Files of tokens (``.bin``): they state neither dtype nor rows, so the user does. Their rows follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shardkit.errors import SourceError, UsageError
from shardkit_tools.importers.numpy_arrays import ArrayFile, ArrayHeader, NumpyImporter, tasks_of_parts
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import file_suffix, open_each, open_file
from shardkit_tools.importers.token_documents import TokenDocuments, open_documents

_TOKEN_TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@dataclass(frozen=True, kw_only=True)
class TokensImporter(NumpyImporter):
    """Files of tokens as a source: parts of one array."""

    name: ClassVar[str] = "tokens"

    def _settings(self) -> dict[str, object]:
        return {"dtype": self.options.dtype, "row": self.options.row}


# marks and size of a header: llm.c, dev/data/data_common.py
_LLM_C, _LLM_C_BYTES = (20240520, 20240801), 1024


def open_tokens(source: Source, options: ImportOptions) -> TokensImporter | TokenDocuments:
    """Divide files of tokens into rows of the field ``tokens``; tokens after the last full row are left out.

    With an index, a row is a document.
    """
    if any(file_suffix(file.name) == "idx" for file in source.files):
        return open_documents(source, options)
    source, opened = open_each(source, options, lambda file: _open_token_file(file, options))
    arrays = dict(zip(source.files, opened, strict=True))
    for array in arrays.values():
        tail = array.file.size - array.header.shape[0] * array.header.row_bytes
        if tail:
            source.notes.append(
                f"{array.file.name}: its last {tail} bytes do not fill a row and are left out"
            )
    first = arrays[source.files[0]]
    return TokensImporter(
        source=source,
        fields=options.schema({first.field: first.header.row_type}, source.given),
        options=options,
        cut=tasks_of_parts(arrays.values()),
        arrays=arrays,
    )


def _open_token_file(file: SourceFile, options: ImportOptions) -> ArrayFile:
    """Return a file of tokens as an array of full rows.

    Raises:
        UsageError: The options do not state type and row, or state no integer type.
        SourceError: The file has less than a row.
    """
    if not options.dtype or not options.row:
        raise UsageError(
            f"{file.path}: nothing says of which type its tokens are; state type and row, such as --dtype uint16 "
            "--row 2048"
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
    return ArrayFile("tokens", file, ArrayHeader(dtype.str, (rows, options.row), False, 0))
