"""NumPy ``.npz`` archives: arrays by name, as `numpy.savez` and `numpy.savez_compressed` write them.

Each array is a field, the rows of their first axes are the samples; of several archives the rows follow each other.

Archives carry a CRC of each array. It is checked before the first row is handed out, so that an array is
decompressed twice; a range of rows is in memory at a time.
"""

from __future__ import annotations

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardkit.errors import ShardkitError, SourceError
from shardkit_tools.importers.numpy_rows import ArrayHeader, Rows, Take, check_rows, read_header, take_columns
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import (
    FileImporter,
    ReadMode,
    SampleStream,
    Source,
    SourceFile,
    SourceTask,
)
from shardkit_tools.importers.source_files import check_suffixes, open_file

_PIECE_BYTES = 1 << 20
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, OverflowError, RuntimeError, ValueError
)  # fmt: skip
"""What `zipfile` raises: damage, a place before the file's start, a compression that it lacks, a password."""


@dataclass(frozen=True)
class Archive:
    """A ``.npz`` file whose headers have been read.

    Attributes:
        members: field → name in the archive, of all arrays.
        arrays: field → header, of those that are taken.
    """

    file: SourceFile
    members: Mapping[str, str]
    arrays: Mapping[str, ArrayHeader]

    @property
    def num_rows(self) -> int:
        return next(iter(self.arrays.values())).shape[0]

    def rows(self, field: str, members: zipfile.ZipFile, stack: contextlib.ExitStack) -> Rows:
        """Those of an array; the archive is open as long as the stack."""
        member, array = self.members[field], self.arrays[field]
        where = f"{self.file.path}: {member}"
        stream = stack.enter_context(members.open(member))
        if read_header(stream, where, members.getinfo(member).file_size) != array:
            raise SourceError(f"{where}: changed since it was listed; build again when nothing writes it")

        def read(length: int) -> bytes:
            with _named(self.file, member):
                return stream.read(length)

        return Rows(array, where, read)


@dataclass(frozen=True, kw_only=True)
class ArchiveImporter(FileImporter):
    """Archives as a source."""

    name: ClassVar[str] = "npz"
    archives: tuple[Archive, ...]

    def tasks(self) -> Sequence[SourceTask]:
        """An archive each: what is compressed is read from its start."""
        return [
            SourceTask(one.file.name, (one.file,), one.file.size, 0, one.num_rows) for one in self.archives
        ]

    def _rows(self, task: SourceTask, mode: ReadMode) -> SampleStream:
        archive = next(one for one in self.archives if one.file.name == task.files[0].name)
        with _opened(archive.file) as members, contextlib.ExitStack() as stack:
            for field in archive.arrays:
                _check(members, archive.file, archive.members[field])
            fields: dict[str, Take] = {
                field: archive.rows(field, members, stack).take for field in archive.arrays
            }
            read = sum(array.row_bytes for array in archive.arrays.values())
            yield from take_columns(fields, range(archive.num_rows), read, archive.file.name)


def open_archives(source: Source, options: ImportOptions) -> ArchiveImporter:
    """Read the headers of a source of ``.npz`` files.

    Raises:
        SourceError: a file is damaged, holds objects or something else than arrays; its arrays differ in their numbers
            of rows; or files differ in their arrays.
    """
    check_suffixes(source, ("npz",), "a NumPy archive")
    archives = tuple(_read_archive(file, options) for file in source.files)
    first = archives[0]
    types = {field: array.row_type for field, array in first.arrays.items()}
    for archive in archives[1:]:
        found = {field: array.row_type for field, array in archive.arrays.items()}
        if found != types:
            raise SourceError(
                f"{archive.file.path}: its arrays are {_told(found)}, those of {first.file.name} are {_told(types)}; "
                "the archives of a source hold the same arrays; name one of them, or choose arrays with --columns"
            )
    return ArchiveImporter(
        source=source,
        fields=options.schema(types, source.given, names=first.members),
        options=options,
        archives=archives,
    )


def _told(types: Mapping[str, str]) -> str:
    return ", ".join(f"{field} {kind}" for field, kind in types.items())


def _read_archive(file: SourceFile, options: ImportOptions) -> Archive:
    arrays: dict[str, ArrayHeader] = {}
    with _opened(file) as members:
        fields = _fields(members, file)
        for field, member in fields.items():
            if options.keeps(field):
                with _named(file, member), members.open(member) as stream:
                    size = members.getinfo(member).file_size
                    arrays[field] = read_header(stream, f"{file.path}: {member}", size)
    if not arrays:
        options.schema({}, file.path, names=fields)  # says what the fields are
    check_rows(
        {f"{file.path}: {fields[field]}": array.shape[0] for field, array in arrays.items()},
        "the arrays of an archive",
    )
    return Archive(file, fields, arrays)


def _fields(members: zipfile.ZipFile, file: SourceFile) -> dict[str, str]:
    """Field → name of its member."""
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


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[zipfile.ZipFile]:
    with open_file(file) as stream:
        with _named(file):
            members = zipfile.ZipFile(stream)
        with members:
            yield members


@contextlib.contextmanager
def _named(file: SourceFile, member: str = "") -> Iterator[None]:
    """What `zipfile` raises as an error that names the file."""
    try:
        yield
    except ShardkitError:
        raise
    except _DAMAGED as error:
        inside = f": {member}" if member else ""
        raise SourceError(
            f"{file.path}{inside}: not a readable .npz archive ({error}); write it again with numpy.savez"
        ) from error


def _check(members: zipfile.ZipFile, file: SourceFile, member: str) -> None:
    """Read an array to its end, where its CRC is checked."""
    with _named(file, member), members.open(member) as stream:
        while stream.read(_PIECE_BYTES):
            pass
