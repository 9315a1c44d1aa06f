"""The files of a source: which there are, in one order, and their bytes.

A source is a file, a folder, a glob (``data/**/*.jsonl``) or a URL. Files are listed in the order of their names (by
code point, `/` as separator), so that the same source gives the same rows on every machine. Nothing outside
the source is read through a symlink inside it, nothing that is not a regular file is opened, and every error
names the file.
"""

from __future__ import annotations

import glob
import gzip
import io
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO, cast

import zstandard

from shardkit.errors import NotFoundError, SourceError
from shardkit_tools.importers.protocol import SourceFile, SourceTask
from shardkit_tools.importers.remote_files import is_url, list_url, open_url

__all__ = [
    "Source",
    "file_stem",
    "file_suffix",
    "group_files",
    "is_compressed",
    "list_source",
    "open_file",
    "open_plain",
    "read_file",
]

_PACKED = (".gz", ".zst", ".xz")
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MiB; a file can ask for 4 GiB
_WILDCARDS = frozenset("*?[")
_TASK_BYTES = 64 << 20
_TASK_FILES = 4096


@dataclass(frozen=True, slots=True)
class Source:
    """A listed source.

    Attributes:
        given: the source as the user typed it, for messages.
        files: sorted by name.
        is_single_file: the user named one file, not a folder or a glob.
        left_out: what was there and is no sample → why, where the user lets it be left out.
        notes: what a person may want to know of it; importers add to them.
    """

    given: str
    files: tuple[SourceFile, ...]
    is_single_file: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def keep(self, suffixes: Iterable[str], what: str) -> Source:
        """The same source, once it is sure that every file has one of the suffixes.

        Raises:
            SourceError: names the first other file.
        """
        wanted = frozenset(suffixes)
        for file in self.files:
            if file_suffix(file.name) not in wanted:
                raise SourceError(
                    f"{file.path}: not {what} (expected the extension .{' or .'.join(sorted(wanted))}); "
                    "leave it out, give a glob that matches only the samples, or name another importer with "
                    "--from"
                )
        return self


def file_suffix(name: str) -> str:
    """The last extension in lower case without its dot, or ""; that before it where the file is compressed."""
    base = name.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        base = base.removesuffix(packed)
    return base.rpartition(".")[2] if "." in base[1:] else ""


def is_compressed(file: SourceFile) -> bool:
    """Whether `open_plain` decompresses a file."""
    return file.name.lower().endswith((*_PACKED, ".tgz"))


def file_stem(name: str) -> str:
    """The name without its last extension: what a sample and its sidecars share."""
    head, slash, base = name.rpartition("/")
    return head + slash + (base.rpartition(".")[0] if "." in base[1:] else base)


def list_source(source: str, *, skip: bool = False) -> Source:
    """List a source.

    Args:
        skip: leave empty folders out.
        source: a file, a folder (searched to any depth; names that start with a dot are left out), a glob, or any of
            them as a URL.

    Raises:
        NotFoundError: nothing is there.
        SourceError: a folder without files, a link that leads out of the folder, or something that is not a
        file.
    """
    if is_url(source):
        found, is_single_file = list_url(source)
        return Source(source, tuple(sorted(found, key=_by_name)), is_single_file)
    if os.path.isdir(source):
        empty: dict[str, str] | None = {} if skip else None
        files = tuple(sorted(_walk(source, empty), key=_by_name))
        if not files:
            raise SourceError(f"{source}: the folder holds no files; give a folder with samples in it")
        return Source(source, files, left_out=empty or {})
    if os.path.lexists(source):
        return Source(source, (_regular(source, os.path.basename(source)),), is_single_file=True)
    if _WILDCARDS.intersection(source):
        return _from_glob(source)
    raise NotFoundError(f"{source}: no such file or folder; give a path, or a glob such as 'data/*.jsonl'")


def open_file(file: SourceFile) -> BinaryIO:
    """Open a file for reading, buffered and seekable.

    Raises:
        SourceError: it cannot be read, or its size is no longer the listed one.
    """
    if is_url(file.path):
        return open_url(file)
    return os.fdopen(_opened(file), "rb", buffering=1 << 18)


def _opened(file: SourceFile) -> int:
    """Descriptor of a local file that is as large as it was when it was listed."""
    try:
        # O_NONBLOCK: a name that has become a pipe since it was listed must not hang the build
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
        os.close(descriptor)
        raise SourceError(
            f"{file.path}: changed since it was listed ({file.size} bytes then, {found.st_size} now); build "
            "from a source that nobody writes to"
        )
    return descriptor


def read_file(file: SourceFile) -> bytes:
    """All bytes of a file; errors as for `open_file`."""
    if is_url(file.path):
        with open_url(file) as stream:
            try:
                data = stream.read()
            except OSError as error:
                raise _unreadable(file.path, error) from error
    else:
        data = _read_local(file)
    if len(data) != file.size:
        raise SourceError(
            f"{file.path}: {file.size} bytes when listed, {len(data)} when read; it changed meanwhile"
        )
    return data


def _read_local(file: SourceFile) -> bytes:
    """Without a stream: of small files that is most of what reading them costs."""
    descriptor = _opened(file)
    pieces = []
    left = file.size
    try:
        while left and (piece := os.read(descriptor, left)):
            pieces.append(piece)
            left -= len(piece)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    finally:
        os.close(descriptor)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_plain(file: SourceFile) -> BinaryIO:
    """Open a file, decompressed on the way (and not seekable) if it ends in ``.gz``, ``.tgz``, ``.zst`` or ``.xz``."""
    stream = open_file(file)
    if not is_compressed(file):
        return stream
    reader: gzip.GzipFile | zstandard.ZstdDecompressionReader | _XzReader
    if file.name.lower().endswith(".zst"):
        frames = cast(BinaryIO, _WholeFrames(stream))
        reader = zstandard.ZstdDecompressor().stream_reader(frames, read_across_frames=True)
    elif file.name.lower().endswith(".xz"):
        reader = _XzReader(stream)
    else:
        reader = gzip.GzipFile(fileobj=stream)
    return cast(BinaryIO, io.BufferedReader(_Guarded(reader, stream, file.path), 1 << 18))


def group_files(files: Iterable[SourceFile]) -> list[SourceTask]:
    """Tasks of whole files, in order, of about 64 MiB and at most 4,096 files each."""
    tasks: list[SourceTask] = []
    group: list[SourceFile] = []
    size = 0
    for file in files:
        if group and (size + file.size > _TASK_BYTES or len(group) == _TASK_FILES):
            tasks.append(SourceTask(group[0].name, tuple(group), size))
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        tasks.append(SourceTask(group[0].name, tuple(group), size))
    return tasks


class _Guarded(io.RawIOBase):
    """A decompressor whose errors name the file."""

    def __init__(
        self,
        inner: gzip.GzipFile | zstandard.ZstdDecompressionReader | _XzReader,
        packed: BinaryIO,
        path: str,
    ) -> None:
        self._inner = inner
        self._packed = packed
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error, zstandard.ZstdError, lzma.LZMAError) as error:
            raise SourceError(
                f"{self._path}: cannot be decompressed ({error}); fetch or write it again"
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._inner.close()
        self._packed.close()  # neither decompressor closes what it reads from
        super().close()


class _WholeFrames:
    """A file of zstd frames that must not end within one: the decompressor takes such an end for the text's.

    Source: RFC 8878, sections 3.1.1 (frames and blocks) and 3.1.2 (skippable frames).
    """

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._skip = 0  # bytes of the frame that tell nothing of its borders
        self._checksum = 0
        self._part = b""  # of the field that is read now
        self._wanted = 4
        self._read: Callable[[bytes], None] = self._magic

    def read(self, size: int = -1) -> bytes:
        """What the file has; raises EOFError where it ends too soon."""
        data = self._packed.read(size)
        if not data and size and (self._skip or self._part or self._read != self._magic):
            raise EOFError("the file ends before its zstd frame does")
        at = 0
        while at < len(data):
            passed = min(self._skip, len(data) - at)
            self._skip, at = self._skip - passed, at + passed
            more = data[at : at + self._wanted - len(self._part)] if not self._skip else b""
            self._part, at = self._part + more, at + len(more)
            if not self._skip and len(self._part) == self._wanted:
                field, self._part = self._part, b""
                self._read(field)
        return data

    def _expect(self, wanted: int, read: Callable[[bytes], None]) -> None:
        self._wanted, self._read = wanted, read

    def _magic(self, field: bytes) -> None:
        is_skippable = int.from_bytes(field, "little") & ~0xF == 0x184D2A50
        self._expect(4, self._skippable) if is_skippable else self._expect(1, self._header)

    def _skippable(self, field: bytes) -> None:
        self._skip = int.from_bytes(field, "little")
        self._expect(4, self._magic)

    def _header(self, field: bytes) -> None:
        flags = field[0]
        is_single = bool(flags & 0x20)
        self._checksum = 4 if flags & 0x04 else 0
        self._skip = (not is_single) + (0, 1, 2, 4)[flags & 3] + (int(is_single), 2, 4, 8)[flags >> 6]
        self._expect(3, self._block)

    def _block(self, field: bytes) -> None:
        header = int.from_bytes(field, "little")
        is_last, is_repeated = bool(header & 1), header >> 1 & 3 == 1
        self._skip = 1 if is_repeated else header >> 3
        if is_last:
            self._skip += self._checksum
            self._expect(4, self._magic)


class _XzReader:
    """xz streams one behind another, in bounded memory: `lzma.LZMAFile` takes what the file asks for."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._decoder = self._new()

    def _new(self) -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def read(self, size: int) -> bytes:
        """Up to so many bytes; none at the end."""
        while True:
            given = b""
            if self._decoder.eof:
                given = self._decoder.unused_data.lstrip(b"\0")  # zeros may stand between streams
                while not given and (piece := self._packed.read(1 << 18)):
                    given = piece.lstrip(b"\0")
                if not given:
                    return b""
                self._decoder = self._new()
            elif self._decoder.needs_input and not (given := self._packed.read(1 << 18)):
                raise EOFError("the file ends before its xz stream does")
            if data := self._decoder.decompress(given, size):
                return data

    def close(self) -> None:
        """Nothing is held but memory."""


def _by_name(file: SourceFile) -> str:
    return file.name


def _walk(root: str, empty: dict[str, str] | None) -> Iterator[SourceFile]:
    """The files of a folder; empty folders are refused, or noted."""
    inside = os.path.realpath(root)
    pending = [""]
    while pending:
        below = pending.pop()
        try:
            entries = list(os.scandir(os.path.join(root, below)))
        except OSError as error:
            raise _unreadable(os.path.join(root, below), error) from error
        entries = [entry for entry in entries if not entry.name.startswith(".")]
        if any(entry.name == "shardkit.json" for entry in entries):
            raise SourceError(
                f"{os.path.join(root, below)}: a dataset, whose shards are no samples; build from the files that it "
                "was made of, or keep it outside of the source"
            )
        if not entries and below and empty is not None:
            empty[f"{below}/"] = "what is empty"
        elif not entries and below:
            # a class folder whose files did not arrive would otherwise vanish from the dataset without a word
            raise SourceError(
                f"{os.path.join(root, below)}: an empty folder; fill it, remove it, or leave it out: --on-error skip"
            )
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_symlink():
                _check_link(entry.path, inside)
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
            elif entry.is_dir():
                raise SourceError(
                    f"{entry.path}: a link to a folder inside the source would give its files twice; remove "
                    "the link"
                )
            else:
                yield _regular(entry.path, name)


def _check_link(path: str, inside: str) -> None:
    target = os.path.realpath(path)
    if os.path.commonpath([target, inside]) != inside:
        raise SourceError(
            f"{path}: a symbolic link out of the source (to {target}); copy the file into the source, or "
            "build from the folder that holds it"
        )


def _regular(path: str, name: str) -> SourceFile:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SourceError(f"{path!r}: the file's name is not UTF-8; rename it") from error
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise SourceError(
            f"{path}: neither a file nor a folder (a pipe, socket or device); remove it from the source"
        )
    return SourceFile(name, path, found.st_size, str(found.st_mtime_ns))


def _from_glob(pattern: str) -> Source:
    literal = []
    for part in pattern.split("/"):
        if _WILDCARDS.intersection(part):
            break
        literal.append(part)
    root = "/".join(literal) or ("/" if pattern.startswith("/") else ".")
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NotFoundError(f"{pattern}: no file matches the pattern; quote it, and check it with ls")
    inside = os.path.realpath(root)
    files = []
    for path in found:
        if os.path.islink(path):
            _check_link(path, inside)
        files.append(_regular(path, os.path.relpath(path, root).replace(os.sep, "/")))
    return Source(pattern, tuple(sorted(files, key=_by_name)))


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"{path}: cannot be read ({error.strerror or error}); mend its permissions, or leave it out"
    )
