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
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, cast

from shardkit.errors import NotFoundError, SourceError
from shardkit.formats.compression import ZstdError, new_decompressor
from shardkit_tools.importers.protocol import Source, SourceFile, SourceTask

_PACKED = (".gz", ".zst", ".xz")
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MiB; a file can ask for 4 GiB
_FRAME_PIECE = 4 << 10  # unpacks to some 128 MiB at most
_WILDCARDS = frozenset("*?[")
_TASK_BYTES = 64 << 20
_TASK_FILES = 4096
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")


def is_url(source: str) -> bool:
    """Whether a source is a URL and not a path."""
    return _URL.match(source) is not None


def file_suffix(name: str) -> str:
    """The last extension in lower case without its dot, or ""; that before it where the file is compressed."""
    base = name.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        base = base.removesuffix(packed)
    return base.rpartition(".")[2] if "." in base[1:] else ""


def check_suffixes(source: Source, suffixes: Iterable[str], what: str) -> None:
    """Check that every file has one of the suffixes.

    Raises:
        SourceError: names the first other file.
    """
    wanted = frozenset(suffixes)
    for file in source.files:
        if file_suffix(file.name) not in wanted:
            raise SourceError(
                f"{file.path}: not {what} (expected the extension .{' or .'.join(sorted(wanted))}); leave it out, "
                "give a glob that matches only the samples, or name another importer with --from"
            )


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
        source: a file, a folder (searched to any depth; names that start with a dot are left out), a glob, or any of
            them as a URL.
        skip: leave empty folders out.

    Raises:
        NotFoundError: nothing is there.
        SourceError: a folder without files, a link that leads out of the folder, or something that is not a file.
    """
    if is_url(source):
        from shardkit_tools.importers.remote_files import list_url

        found, is_single_file = list_url(source)
        return Source(source, _sorted(found), is_single_file)
    if os.path.isdir(source):
        empty: dict[str, str] | None = {} if skip else None
        files = _sorted(_walk(source, empty))
        if not files:
            raise SourceError(f"{source}: the folder holds no files; give a folder with samples in it")
        return Source(source, files, left_out=empty or {})
    if os.path.lexists(source):
        return Source(source, (_regular(source, os.path.basename(source)),), is_single_file=True)
    if _WILDCARDS.intersection(source):
        return Source(source, _sorted(_matches(source)))
    raise NotFoundError(f"{source}: no such file or folder; give a path, or a glob such as 'data/*.jsonl'")


def open_file(file: SourceFile) -> BinaryIO:
    """Open a file for reading, buffered and seekable.

    Raises:
        SourceError: it cannot be read, or its size is no longer the listed one.
    """
    if is_url(file.path):
        from shardkit_tools.importers.remote_files import open_url

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
            f"{file.path}: changed since it was listed ({file.size} bytes then, {found.st_size} now); build from a "
            "source that nobody writes to"
        )
    return descriptor


def read_file(file: SourceFile) -> bytes:
    """All bytes of a file; errors as for `open_file`."""
    try:
        if is_url(file.path):
            with open_file(file) as stream:
                data = stream.read()
        else:
            data = _read_local(_opened(file), file.size)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    if len(data) != file.size:
        raise SourceError(
            f"{file.path}: {file.size} bytes when listed, {len(data)} when read; it changed meanwhile"
        )
    return data


def _read_local(descriptor: int, size: int) -> bytes:
    """Without a stream: of small files that is most of what reading them costs."""
    pieces = []
    try:
        while size and (piece := os.read(descriptor, size)):
            pieces.append(piece)
            size -= len(piece)
    finally:
        os.close(descriptor)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_plain(file: SourceFile) -> BinaryIO:
    """Open a file, decompressed on the way (and not seekable) if it ends in ``.gz``, ``.tgz``, ``.zst`` or ``.xz``."""
    stream = open_file(file)
    if not is_compressed(file):
        return stream
    reader: gzip.GzipFile | Frames
    if file.name.lower().endswith(".zst"):
        reader = Frames(stream, new_decompressor)
    elif file.name.lower().endswith(".xz"):  # zeros may stand between its streams
        reader = Frames(stream, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY), b"\0")
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

    def __init__(self, inner: gzip.GzipFile | Frames, packed: BinaryIO, path: str) -> None:
        self._inner, self._packed, self._path = inner, packed, path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error, ZstdError, lzma.LZMAError) as error:
            raise SourceError(
                f"{self._path}: cannot be decompressed ({error}); fetch or write it again"
            ) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._packed.close()  # no decompressor closes what it reads from
        super().close()


class Frames:
    """Compressed frames one behind another, in bounded memory, which must not end within one.

    The stream reader of zstd takes such an end for the text's, and `lzma.LZMAFile` as much memory as a file asks for.
    """

    def __init__(self, packed: BinaryIO, new: Callable[[], Any], padding: bytes = b"") -> None:
        self._packed, self._new, self._padding = packed, new, padding
        self._decoder: Any = None  # None between frames
        self._rest = b""
        self._made = memoryview(b"")

    def read(self, size: int) -> bytes | memoryview:
        """Up to so many bytes; none at the end."""
        while not self._made:
            piece = self._rest or self._packed.read(_FRAME_PIECE)
            if not piece:
                if self._decoder is not None:
                    raise EOFError("the file ends before its last frame does")
                return b""
            self._rest = b""
            if self._decoder is None:
                piece = piece.lstrip(self._padding)
                if not piece:
                    continue
                self._decoder = self._new()
            self._made = memoryview(self._decoder.decompress(piece))
            if self._decoder.eof:
                self._rest, self._decoder = self._decoder.unused_data, None
        data, self._made = self._made[:size], self._made[size:]
        return data


def _sorted(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


def _walk(root: str, empty: dict[str, str] | None) -> Iterator[SourceFile]:
    """The files of a folder; empty folders are refused, or noted."""
    inside = os.path.realpath(root)
    pending = [""]
    while pending:
        below = pending.pop()
        folder = os.path.join(root, below)
        try:
            entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        except OSError as error:
            raise _unreadable(folder, error) from error
        if any(entry.name == "shardkit.json" for entry in entries):
            raise SourceError(
                f"{folder}: a dataset, whose shards are no samples; build from the files that it was made of, or keep "
                "it outside of the source"
            )
        if not entries and below:
            if empty is None:
                # a class folder whose files did not arrive would otherwise vanish from the dataset without a word
                raise SourceError(
                    f"{folder}: an empty folder; fill it, remove it, or leave it out: --on-error skip"
                )
            empty[f"{below}/"] = "what is empty"
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if entry.is_symlink():
                _check_link(entry.path, inside)
            if entry.is_dir(follow_symlinks=False):
                pending.append(name)
            elif entry.is_dir():
                raise SourceError(
                    f"{entry.path}: a link to a folder inside the source would give its files twice; remove the link"
                )
            else:
                yield _regular(entry.path, name)


def _check_link(path: str, inside: str) -> None:
    target = os.path.realpath(path)
    if os.path.commonpath([target, inside]) != inside:
        raise SourceError(
            f"{path}: a symbolic link out of the source (to {target}); copy the file into the source, or build from "
            "the folder that holds it"
        )


def _regular(path: str, name: str) -> SourceFile:
    try:
        name.encode()
        found = os.stat(path)
    except UnicodeEncodeError as error:
        raise SourceError(f"{path!r}: the file's name is not UTF-8; rename it") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise SourceError(
            f"{path}: neither a file nor a folder (a pipe, socket or device); remove it from the source"
        )
    return SourceFile(name, path, found.st_size, str(found.st_mtime_ns))


def _matches(pattern: str) -> Iterator[SourceFile]:
    """The files of a glob, named below the folder before its first wildcard."""
    parts = pattern.split("/")
    literal = parts[: next(n for n, part in enumerate(parts) if _WILDCARDS.intersection(part))]
    root = "/".join(literal) or ("/" if pattern.startswith("/") else ".")
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NotFoundError(f"{pattern}: no file matches the pattern; quote it, and check it with ls")
    inside = os.path.realpath(root)
    for path in found:
        if os.path.islink(path):
            _check_link(path, inside)
        yield _regular(path, os.path.relpath(path, root).replace(os.sep, "/"))


def _unreadable(path: str, error: OSError) -> SourceError:
    return SourceError(
        f"{path}: cannot be read ({error.strerror or error}); mend its permissions, or leave it out"
    )
