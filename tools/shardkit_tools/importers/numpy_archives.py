"""NumPy archives: the arrays of a ``.npz`` file are fields, and the rows of several archives follow each other.

Archives have a CRC of each array. It is checked before the first row is returned, so an array is decompressed twice.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, BinaryIO

from shardkit.errors import ShardkitError, SourceError
from shardkit_tools.importers.numpy_arrays import (
    PIECE_BYTES,
    ArrayFile,
    NumpyImporter,
    check_rows,
    read_header,
)
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import check_suffixes, open_each, open_file

_DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, OSError, OverflowError, RuntimeError, ValueError
)  # fmt: skip
"""Exceptions of `zipfile` for damage, invalid offsets, missing members, unknown compression and encryption."""
_LOCAL_HEADER_BYTES = 30  # before the name of a member


@dataclass(frozen=True, kw_only=True)
class ArchiveImporter(NumpyImporter):
    """NumPy archives as a source, each one task: compressed data is read from its start."""

    name: str = "npz"
    arrays: Mapping[SourceFile, Sequence[ArchiveMember]]


@dataclass(frozen=True)
class ArchiveMember(ArrayFile):
    """An array of an archive."""

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        with (
            _open_archive(self.file) as members,
            _naming(self.file, self.member),
            self.open_checked(members) as stream,
        ):
            yield stream

    def open_checked(self, members: zipfile.ZipFile) -> IO[bytes]:
        """Check the CRC of the array, and open it at its rows."""
        with members.open(self.member) as whole:
            while whole.read(PIECE_BYTES):
                pass
        stream, where = members.open(self.member), f"{self.file.path}: {self.member}"
        if read_header(stream, where, members.getinfo(self.member).file_size) != self.header:
            raise SourceError(f"{where}: changed since it was listed; build again when nothing writes it")
        return stream


def stored_spans(data: bytes, arrays: Sequence[ArchiveMember]) -> dict[str, tuple[int, int]] | None:
    """Return the (start, stop) of the rows of each field in the bytes of an archive, after a check of its CRCs.

    None if a member is compressed.
    """
    spans: dict[str, tuple[int, int]] = {}
    with _open_archive(arrays[0].file, io.BytesIO(data)) as members:
        for one in arrays:
            with _naming(one.file, one.member):
                member = members.getinfo(one.member)
                if member.compress_type != zipfile.ZIP_STORED:
                    return None
                one.open_checked(members).close()
                # the header before a member has a size of its own: APPNOTE.TXT, section 4.3.7
                sizes = struct.unpack_from("<HH", data, member.header_offset + _LOCAL_HEADER_BYTES - 4)
            start = member.header_offset + _LOCAL_HEADER_BYTES + sum(sizes) + one.header.offset
            spans[one.field] = start, start + one.header.shape[0] * one.header.row_bytes
    return spans


def open_archives(source: Source, options: ImportOptions) -> ArchiveImporter:
    """Read the headers of a source of ``.npz`` files."""
    check_suffixes(source, ("npz",), "a NumPy archive")
    source, read = open_each(source, options, lambda file: _read_archive(file, options))
    archives = {file: arrays for file, (arrays, _) in zip(source.files, read, strict=True)}
    names = read[0][1]
    types: dict[str, str] = {}
    for file, arrays in archives.items():
        found = {one.field: one.header.row_type for one in arrays}
        types = types or found
        if found != types:
            raise SourceError(
                f"{file.path}: its arrays are {_type_list(found)}, the arrays of {source.files[0].name} are "
                f"{_type_list(types)}; the archives of a source hold the same arrays; name one of them, or "
                "choose arrays with --columns"
            )
    return ArchiveImporter(
        source=source,
        fields=options.schema(types, source.given, names=names),
        options=options,
        arrays=archives,
    )


def _type_list(types: Mapping[str, str]) -> str:
    return ", ".join(f"{field} {kind}" for field, kind in types.items())


def _read_archive(
    file: SourceFile, options: ImportOptions
) -> tuple[tuple[ArchiveMember, ...], dict[str, str]]:
    """Return the imported arrays of an archive, and field → member name of all its arrays."""
    arrays = []
    with _open_archive(file) as members:
        fields = _fields(members, file)
        for field, member in fields.items():
            if options.keeps(field):
                with _naming(file, member), members.open(member) as stream:
                    size = members.getinfo(member).file_size
                    header = read_header(stream, f"{file.path}: {member}", size)
                arrays.append(ArchiveMember(field, file, header, member))
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
def _open_archive(file: SourceFile, opened: BinaryIO | None = None) -> Iterator[zipfile.ZipFile]:
    with opened or open_file(file) as stream:
        with _naming(file):
            members = zipfile.ZipFile(stream)
            if first := min((member.header_offset for member in members.infolist()), default=0):
                raise zipfile.BadZipFile(f"{first} bytes before it; several archives in one file?")
        with members:
            yield members


@contextmanager
def _naming(file: SourceFile, member: str = "") -> Iterator[None]:
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
