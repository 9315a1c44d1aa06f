"""The files of a source: kinds by name, opening, reading, decompression, and tasks of whole files.

Only regular files are opened, and every error names the file.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import re
import stat
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Protocol, TypeVar, cast

from shardkit.errors import SourceError
from shardkit.formats.compression import ZstdError, new_decompressor
from shardkit_tools.importers.protocol import ImportOptions, Source, SourceFile, SourceTask

_PACKED = (".gz", ".zst", ".xz", ".bz2")
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MiB; a file can ask for 4 GiB
_AT_ONCE = 16 << 10  # bytes to decompress in one call, which damage loses
_GZIP = 16 + zlib.MAX_WBITS  # a frame has the header and the checksum of gzip
_FRAME_PIECE = 4 << 10  # decompresses to about 128 MiB at most
_TASK_BYTES = 64 << 20
_TASK_FILES = 4096
MEDIA = {
    "image": ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pbm",
              "avif", "heic", "heif", "jp2", "jxl", "jfif"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "mpg", "mpeg"),
}  # fmt: skip
"""Field → file extensions of its kind."""
SPLIT_NAMES = ("train", "val", "valid", "validation", "test", "dev")
"""Names, in any case, of top-level folders that are splits rather than classes."""
SIDECARS = {"json": ("meta", "json"), "txt": ("text", "str")}
"""Extension of a sidecar, which describes the file with the same stem → its field and type."""

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""Names of files that describe the files in and below their folder."""

_POINTER_BYTES = 1024  # pointers of Git LFS are smaller
_SHOWN = 3  # errors of files in a note
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")


_Opened = TypeVar("_Opened")
_Row = TypeVar("_Row")


def is_url(source: str) -> bool:
    """Return True if a source is a URL and not a path."""
    return _URL.match(source) is not None


def file_suffix(name: str) -> str:
    """Return the last extension in lower case without its dot, or ""; compression suffixes are ignored."""
    base = name.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        base = base.removesuffix(packed)
    return base.rpartition(".")[2] if "." in base[1:] else ""


def media_of(suffix: str) -> str | None:
    """Return the field of `MEDIA` for an extension, or None."""
    return next((field for field, known in MEDIA.items() if suffix in known), None)


def is_metadata(name: str) -> bool:
    """Return True if a file describes other files."""
    return name.rpartition("/")[2] in METADATA


def check_suffixes(source: Source, suffixes: Iterable[str], what: str) -> None:
    """Check that every file has one of the suffixes, or none has: then the user has named the importer."""
    wanted = frozenset(suffixes)
    others = [file for file in source.files if file_suffix(file.name) not in wanted]
    if 0 < len(others) < len(source.files):
        raise SourceError(
            f"{others[0].path}: not {what} (expected the extension .{' or .'.join(sorted(wanted))}); leave it out, "
            "give a glob that matches only the samples, or name another importer with --from"
        )


def is_compressed(file: SourceFile) -> bool:
    """Return True if `open_plain` decompresses a file."""
    return file.name.lower().endswith((*_PACKED, ".tgz"))


def file_stem(name: str) -> str:
    """Return the name without its last extension, which a sample and its sidecars share."""
    head, slash, base = name.rpartition("/")
    return head + slash + (base.rpartition(".")[0] if "." in base[1:] else base)


def regular_file(path: str, name: str) -> SourceFile:
    """Describe a file."""
    try:
        name.encode()
        found = os.stat(path)
    except UnicodeEncodeError as error:
        raise SourceError(f"{path!r}: the file's name is not UTF-8; rename it") from error
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise SourceError(
            f"{path}: neither a file nor a folder (a pipe, socket or device); remove it from the source"
        )
    return SourceFile(name, path, found.st_size, str(found.st_mtime_ns))


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the error for a file that cannot be read."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return SourceError(
            f"{path}: a symbolic link to {os.path.realpath(path)}, which does not exist; restore it, remove the link, "
            "or leave it out: --on-error skip"
        )
    return SourceError(
        f"{path}: cannot be read ({error.strerror or error}); fix its permissions, or leave it out"
    )


def open_file(file: SourceFile, *, for_digest: bool = False) -> BinaryIO:
    """Open a file for reading, buffered and seekable.

    Raises:
        SourceError: The file cannot be read, or its size has changed since it was listed; or, except `for_digest`, it
            is a pointer of Git LFS.
    """
    if is_url(file.path):
        from shardkit_tools.importers.remote_files import open_url

        return open_url(file)
    stream = io.BufferedReader(io.FileIO(_open_local(file)), 1 << 18)
    try:
        if file.size < _POINTER_BYTES and not for_digest:
            _refuse_pointer(file, stream.peek())
    except SourceError:
        stream.close()
        raise
    return cast(BinaryIO, stream)


def _refuse_pointer(file: SourceFile, data: bytes) -> None:
    """Raise SourceError for a file of Git LFS that was not fetched: a text that names the content."""
    if data.startswith(b"version https://git-lfs.github.com/spec/"):
        raise SourceError(
            f"{file.path}: a pointer of Git LFS, not the file itself; fetch it with git lfs pull in its repository"
        )


def _open_local(file: SourceFile) -> int:
    """Open a local file, check that its size is as listed, and return the descriptor."""
    try:
        # O_NONBLOCK: a name that has become a pipe since the listing must not hang the build
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(file.path, error) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
        os.close(descriptor)
        raise SourceError(
            f"{file.path}: changed since it was listed ({file.size} bytes then, {found.st_size} now); build from a "
            "source that nobody writes to"
        )
    return descriptor


def lacking_columns(source: Source, columns: Sequence[Collection[str]], options: ImportOptions) -> list[str]:
    """Return the imported columns that a file of a source lacks, and add notes on them; `columns` are of each file."""
    counts = Counter(name for names in columns for name in names)
    lacking = sorted(name for name, count in counts.items() if count < len(columns) and options.keeps(name))
    for name in lacking:
        first = next(
            file.name for file, names in zip(source.files, columns, strict=True) if name not in names
        )
        count = len(columns) - counts[name]
        source.notes.append(
            f"{name} is missing in {count:,} of {len(columns):,} files ({first}), whose rows have none"
        )
    return lacking


@dataclass
class LeftOut:
    """Rows that inference leaves out because they cannot be read, if the user allows it."""

    allowed: bool
    first: SourceError | None = None  # why the first row was left out

    def add(self, error: SourceError) -> None:
        """Leave out a row; raise its error if that is not allowed."""
        if not self.allowed:
            raise error
        self.first = self.first or error.with_traceback(None)  # a traceback would keep the rows in memory

    def before_damage(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        """Yield the rows of a file up to an error, after which the rest of the file is left out."""
        try:
            yield from rows
        except SourceError as error:
            self.add(error)

    def no_samples(self, given: str, why: str) -> SourceError:
        """Return the error for a source without samples: why the first row was left out, otherwise `why`."""
        return SourceError(
            f"{given}: {why}" if self.first is None else f"{given}: no sample can be read ({self.first})"
        )


def open_each(
    source: Source, options: ImportOptions, open_one: Callable[[SourceFile], _Opened]
) -> tuple[Source, list[_Opened]]:
    """Open every file of a source, for example to read its header.

    Returns:
        The source, with `skip_bad_rows` without the files that cannot be opened; and the result for each of its files.

    Raises:
        SourceError: A file cannot be opened; with `skip_bad_rows`, none can.
    """
    kept, opened, errors = [], [], []
    for file in source.files:
        try:
            opened.append(open_one(file))
        except SourceError as error:
            if not options.skip_bad_rows:
                raise
            errors.append(error)
        else:
            kept.append(file)
    if not errors:
        return source, opened
    if not kept:
        raise errors[0]
    shown = "; ".join(map(str, errors[:_SHOWN])) + "; …" * (len(errors) > _SHOWN)
    source.notes.append(f"left out what cannot be opened ({len(errors):,}): {shown}")
    return replace(source, files=tuple(kept)), opened


def name_files(what: str, names: Sequence[str]) -> str:
    """Return a note on files: what they are, their number and the first names."""
    return f"{what} ({len(names):,}): {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"


def read_file(file: SourceFile) -> bytes:
    """Return all bytes of a file; errors as for `open_file`."""
    try:
        if is_url(file.path):
            with open_file(file) as stream:
                data = stream.read()
        else:
            data = _read_local(_open_local(file), file.size)
        if file.size < _POINTER_BYTES:
            _refuse_pointer(file, data)
    except OSError as error:
        raise unreadable(file.path, error) from error
    if len(data) != file.size:
        raise SourceError(
            f"{file.path}: {file.size} bytes when listed, {len(data)} when read; it changed meanwhile"
        )
    return data


def _read_local(descriptor: int, size: int) -> bytes:
    """Read without a stream object, which would take most of the time for small files."""
    pieces = []
    try:
        while size and (piece := os.read(descriptor, size)):
            pieces.append(piece)
            size -= len(piece)
    finally:
        os.close(descriptor)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def text_of(data: bytes, where: str, advice: str) -> str:
    """Return bytes as text without a byte-order mark; raise SourceError with advice unless they are UTF-8."""
    try:
        return data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise SourceError(f"{where}: not UTF-8 ({byte}); {advice}") from error


def open_plain(file: SourceFile) -> BinaryIO:
    """Open a file; ``.gz``, ``.tgz``, ``.zst``, ``.xz`` and ``.bz2`` are decompressed, and not seekable."""
    stream = open_file(file)
    kind = file.name.lower().rpartition(".")[2]
    return open_packed(stream, kind, file.path) if is_compressed(file) else stream


def open_packed(packed: BinaryIO, kind: str, path: str) -> BinaryIO:
    """Open a compressed stream of kind ``zst``, ``xz``, ``bz2``, ``gz`` or ``tgz``; not seekable."""
    return cast(BinaryIO, io.BufferedReader(_Decompressed(packed, kind, path), 1 << 18))


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


_Item = TypeVar("_Item", bound=_Sized)


def in_groups(items: Iterable[_Item], most: int, most_bytes: int) -> Iterator[list[_Item]]:
    """Yield items in groups of at most `most`, in order; a group with more than `most_bytes` has one item."""
    group: list[_Item] = []
    size = 0
    for item in items:
        own = item.size  # a sum over many files
        if group and (size + own > most_bytes or len(group) == most):
            yield group
            group, size = [], 0
        group.append(item)
        size += own
    if group:
        yield group


def group_files(files: Iterable[SourceFile]) -> list[SourceTask]:
    """Return tasks of whole files, in order, of about 64 MiB and at most 4,096 files each."""
    return [
        SourceTask(group[0].name, tuple(group), sum(file.size for file in group))
        for group in in_groups(files, _TASK_FILES, _TASK_BYTES)
    ]


_DECOMPRESSORS: dict[str, tuple[Callable[[], Any], bytes]] = {
    "zst": (new_decompressor, b""),
    "xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY), b"\0"),
    "bz2": (bz2.BZ2Decompressor, b""),
    "gz": (lambda: zlib.decompressobj(_GZIP), b"\0"),
}
_DECOMPRESSORS["tgz"] = _DECOMPRESSORS["gz"]
"""Kind → decompressor of one frame, and bytes that may follow it."""


class _Decompressed(io.RawIOBase):
    """The content of concatenated compressed frames, read in bounded memory; errors name the file.

    The file must not end inside a frame. The stream reader of zstd treats such an end as the end of the data, and
    `lzma.LZMAFile` allocates any memory that a file asks for.
    """

    def __init__(self, packed: BinaryIO, kind: str, path: str) -> None:
        self._packed, self._path = packed, path
        self._new, self._padding = _DECOMPRESSORS[kind]
        self._skipped = b""  # padding is accepted after a frame, not before the first
        self._decoder: Any = None  # None between frames
        self._rest = b""
        self._made = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            while not self._made and (piece := self._rest or self._packed.read(_FRAME_PIECE)):
                self._decompress(piece)
            if not self._made and self._decoder is not None:
                raise EOFError("the file ends before its last frame does")
        except (OSError, EOFError, zlib.error, ZstdError, lzma.LZMAError) as error:
            raise SourceError(
                f"{self._path}: cannot be decompressed ({error}); fetch or write it again"
            ) from error
        size = min(len(buffer), len(self._made))
        buffer[:size], self._made = self._made[:size], self._made[size:]
        return size

    def _decompress(self, piece: bytes) -> None:
        self._rest = b""
        if self._decoder is None:
            piece = piece.lstrip(self._skipped)
            if not piece:
                return
            self._decoder = self._new()
        self._made = memoryview(self._decoder.decompress(piece))
        if self._decoder.eof:
            self._rest, self._decoder, self._skipped = self._decoder.unused_data, None, self._padding

    def close(self) -> None:
        self._packed.close()
        super().close()
