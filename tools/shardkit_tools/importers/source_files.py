"""The files of a source: list them in order, choose the importer, and open or read them.

A source is a file, a folder, a glob (``data/**/*.jsonl``) or a URL. Files are sorted by name (by code point,
`/` as separator), so that the same source gives the same rows on every machine. Only regular files are opened,
and every error names the file.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO, cast

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.formats.compression import ZstdError, new_decompressor
from shardkit_tools.importers.local_files import WILDCARDS, matches, regular_file, unreadable, walk
from shardkit_tools.importers.protocol import (
    FileImporter,
    Importer,
    ImportOptions,
    Source,
    SourceFile,
    SourceTask,
)

_PACKED = (".gz", ".zst", ".xz")
_XZ_MEMORY = 256 << 20  # `xz -9` needs 65 MiB; a file can ask for 4 GiB
_FRAME_PIECE = 4 << 10  # decompresses to about 128 MiB at most
_TASK_BYTES = 64 << 20
_TASK_FILES = 4096
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")


def is_url(source: str) -> bool:
    """Return True if a source is a URL and not a path."""
    return _URL.match(source) is not None


def file_suffix(name: str) -> str:
    """Return the last extension in lower case without its dot, or ""; compression suffixes are ignored."""
    base = name.rsplit("/", 1)[-1].lower()
    for packed in _PACKED:
        base = base.removesuffix(packed)
    return base.rpartition(".")[2] if "." in base[1:] else ""


def check_suffixes(source: Source, suffixes: Iterable[str], what: str) -> None:
    """Check that every file has one of the suffixes.

    Raises:
        SourceError: A file has another suffix.
    """
    wanted = frozenset(suffixes)
    for file in source.files:
        if file_suffix(file.name) not in wanted:
            raise SourceError(
                f"{file.path}: not {what} (expected the extension .{' or .'.join(sorted(wanted))}); leave it out, "
                "give a glob that matches only the samples, or name another importer with --from"
            )


def is_compressed(file: SourceFile) -> bool:
    """Return True if `open_plain` decompresses a file."""
    return file.name.lower().endswith((*_PACKED, ".tgz"))


def file_stem(name: str) -> str:
    """Return the name without its last extension, which a sample and its sidecars share."""
    head, slash, base = name.rpartition("/")
    return head + slash + (base.rpartition(".")[0] if "." in base[1:] else base)


def is_metadata(name: str) -> bool:
    """Return True if a file describes other files."""
    return name.rpartition("/")[2] in METADATA


def list_source(source: str, *, skip: bool = False, follow_links: bool = False) -> Source:
    """List the files of a source; with ``skip``, empty folders are left out instead of refused.

    Links out of a folder or a glob are followed with `follow_links`, or if it holds no files except links.

    Raises:
        NotFoundError: The source does not exist.
        SourceError: The source holds no files, or something that is not imported.
    """
    empty: dict[str, str] | None = {} if skip else None
    if is_url(source):
        from shardkit_tools.importers.remote_files import list_url

        found, is_single_file = list_url(source, empty)
        return Source(source, _sort(found), is_single_file, left_out=empty or {})
    if os.path.isdir(source):
        notes: list[str] = []
        files = _sort(walk(source, empty, notes, follow_links=follow_links))
        if not files:
            raise SourceError(f"{source}: the folder holds no files; give a folder with samples in it")
        return Source(source, files, left_out=empty or {}, notes=notes)
    if os.path.lexists(source):
        return Source(source, (regular_file(source, os.path.basename(source)),), is_single_file=True)
    if WILDCARDS.intersection(source):
        notes = []
        return Source(source, _sort(matches(source, notes, follow_links=follow_links)), notes=notes)
    raise NotFoundError(f"{source}: no such file or folder; give a path, or a glob such as 'data/*.jsonl'")


def open_file(file: SourceFile) -> BinaryIO:
    """Open a file for reading, buffered and seekable.

    Raises:
        SourceError: The file cannot be read, or its size has changed since it was listed.
    """
    if is_url(file.path):
        from shardkit_tools.importers.remote_files import open_url

        return open_url(file)
    return os.fdopen(_open_local(file), "rb", buffering=1 << 18)


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


def read_file(file: SourceFile) -> bytes:
    """Return all bytes of a file; errors as for `open_file`."""
    try:
        if is_url(file.path):
            with open_file(file) as stream:
                data = stream.read()
        else:
            data = _read_local(_open_local(file), file.size)
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
    """Return bytes as text; raise SourceError with advice unless they are UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is 0x{data[error.start]:02x}"
        raise SourceError(f"{where}: not UTF-8 ({byte}); {advice}") from error


def open_plain(file: SourceFile) -> BinaryIO:
    """Open a file; ``.gz``, ``.tgz``, ``.zst`` and ``.xz`` are decompressed, and not seekable."""
    stream = open_file(file)
    kind = file.name.lower().rpartition(".")[2]
    return open_packed(stream, kind, file.path) if is_compressed(file) else stream


def open_packed(packed: BinaryIO, kind: str, path: str) -> BinaryIO:
    """Open a compressed stream of kind ``zst``, ``xz``, ``bz2`` or ``gz``; not seekable."""
    reader: gzip.GzipFile | _Frames
    if kind == "zst":
        reader = _Frames(packed, new_decompressor)
    elif kind == "xz":  # zeros are allowed between its streams
        reader = _Frames(packed, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY), b"\0")
    elif kind == "bz2":
        reader = _Frames(packed, bz2.BZ2Decompressor)
    else:
        reader = gzip.GzipFile(fileobj=packed)
    return cast(BinaryIO, io.BufferedReader(_GuardedStream(reader, packed, path), 1 << 18))


def group_files(files: Iterable[SourceFile]) -> list[SourceTask]:
    """Return tasks of whole files, in order, of about 64 MiB and at most 4,096 files each."""
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


class _GuardedStream(io.RawIOBase):
    """A decompressor whose errors name the file."""

    def __init__(self, inner: gzip.GzipFile | _Frames, packed: BinaryIO, path: str) -> None:
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
        self._packed.close()  # decompressors do not close the file that they read
        super().close()


class _Frames:
    """Concatenated compressed frames, read in bounded memory; the file must not end inside a frame.

    The stream reader of zstd treats such an end as the end of the data, and `lzma.LZMAFile` allocates any
    memory that a file asks for.
    """

    def __init__(self, packed: BinaryIO, new: Callable[[], Any], padding: bytes = b"") -> None:
        self._packed, self._new, self._padding = packed, new, padding
        self._decoder: Any = None  # None between frames
        self._rest = b""
        self._made = memoryview(b"")

    def read(self, size: int) -> bytes | memoryview:
        """Return up to ``size`` bytes, or none at the end."""
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


def _sort(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


IMPORTERS = {
    "folder": ("shardkit_tools.importers.folder", "open_folder"),
    "text": ("shardkit_tools.importers.folder", "open_text"),
    "jsonl": ("shardkit_tools.importers.json_lines", "open_json_lines"),
    "npy": ("shardkit_tools.importers.numpy_arrays", "open_numpy"),
    "npz": ("shardkit_tools.importers.numpy_archives", "open_archives"),
    "tokens": ("shardkit_tools.importers.tokens", "open_tokens"),
    "webdataset": ("shardkit_tools.importers.webdataset", "open_webdataset"),
    "parquet": ("shardkit_tools.importers.tables", "open_parquet"),
    "arrow": ("shardkit_tools.importers.tables", "open_arrow"),
    "csv": ("shardkit_tools.importers.csv", "open_csv"),
    "huggingface": ("shardkit_tools.importers.tables", "open_huggingface"),
    "mds": ("shardkit_tools.importers.mds", "open_mds"),
}
"""Name for ``--from`` → module and function that open a source, imported on demand: some need pyarrow."""

MEDIA = {
    "image": ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pbm",
              "avif", "heic", "jp2", "jxl"),
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

# Extensions of files of records, which are never samples themselves.
_RECORDS = dict.fromkeys(("jsonl", "ndjson"), "jsonl") | dict.fromkeys(("tar", "tgz"), "webdataset")
_RECORDS |= dict.fromkeys(("parquet", "pq"), "parquet") | dict.fromkeys(("arrow", "feather", "ipc"), "arrow")
_RECORDS |= {"csv": "csv", "tsv": "csv", "npy": "npy", "npz": "npz", "mds": "mds"}
_TEXTS = frozenset((
    "txt", "text", "md", "rst", "tex", "html", "htm", "xml", "log", "py", "pyi", "c", "h", "cc", "cpp", "hpp",
    "rs", "go", "java", "js", "ts", "sh", "sql", "r", "jl",
))  # fmt: skip


_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NESTED = ("parquet", "arrow", "jsonl", "huggingface")
_WITH_AN_INDEX = ("huggingface", "mds")
# Kinds of files that an importer accepts as samples, beyond its own extensions.
_KINDS_OF = {name: {name} for name in set(_RECORDS.values())}
_KINDS_OF |= {"jsonl": {"jsonl", "json"}, "text": {"text"}, "folder": {*MEDIA, "blob"}}


def open_source(source: str, kind: str | None = None, options: ImportOptions | None = None) -> Importer:
    """Open a source with a suitable importer.

    Args:
        source: a file, a folder, a glob or a URL.
        kind: one of `IMPORTERS`; None: detected.
        options: options of the user.

    Raises:
        NotFoundError: The source does not exist.
        SourceError: The source cannot be read as this kind, or its kind cannot be detected.
        SchemaError: A field name cannot be stored, or `options` name an unknown field.
    """
    return find_source(source, kind, options or ImportOptions())[0]


def find_source(source: str, kind: str | None, options: ImportOptions) -> tuple[Importer, tuple[str, ...]]:
    """Do `open_source`, and also return notes on files that were left out."""
    if kind is not None:
        check_kind(kind)
    is_hub = source.startswith("hf://")
    if kind == "huggingface" and _HUB_NAME.fullmatch(source) and not os.path.exists(source):
        raise NotFoundError(
            f"{source}: no such folder; a dataset of the Hugging Face Hub is given as hf://datasets/{source}"
        )
    listed = list_source(source, skip=options.skip_bad_rows, follow_links=options.follow_links)
    if is_hub and kind == "huggingface" and not _index_of(listed):
        kind = None  # files as they were pushed, not a folder of `save_to_disk`
    if options.skip_bad_rows or is_hub:  # repositories of the hub have cards, licences and scripts
        listed = _without_strays(listed, kind)
    kind = kind or ("tokens" if options.dtype or options.row else detect(listed))
    if options.flatten and kind not in _NESTED:
        raise UsageError(
            f"--flatten: {source} is read as {kind}, which has no structs; it is for {', '.join(_NESTED)}"
        )
    importer = open_listed(listed, kind, options)
    notes = (*_notes(listed.left_out), *listed.notes)
    return importer, notes


def check_kind(kind: str) -> None:
    """Raise UsageError if there is no importer of this name."""
    if kind not in IMPORTERS:
        raise UsageError(f"--from {kind!r}: no such importer; expected one of {', '.join(IMPORTERS)}")


def open_listed(source: Source, kind: str, options: ImportOptions) -> FileImporter:
    """Open a listed source with one of `IMPORTERS`; errors as for `open_source`."""
    module, function = IMPORTERS[kind]
    importer: FileImporter = getattr(importlib.import_module(module), function)(source, options)
    return importer


def _without_strays(source: Source, kind: str | None) -> Source:
    """Return a source with only the most frequent kind of files; sidecars stay with their samples."""
    if source.is_single_file or kind in _WITH_AN_INDEX or (kind is None and _index_of(source)):
        return source
    kinds = {file.name: _kind_of(file.name) for file in source.files}
    wanted = _KINDS_OF.get(kind or "")
    counts = Counter(found for found in kinds.values() if wanted is None or found in wanted)
    # Media and records rank before texts and documents, which often accompany samples, and these before
    # unknown files.
    for is_sample in ({*MEDIA, *_RECORDS.values()}, {"text", "json"}, {"blob"}):
        among = Counter({found: n for found, n in counts.items() if found in is_sample})
        if among:
            break
    (most, count), *others = among.most_common() or [("", 0)]
    if not count or (others and others[0][1] == count):
        return source  # ambiguous
    keep = {most} if wanted is None or kind == "folder" else wanted
    stems = {file_stem(name) for name, found in kinds.items() if found == most}
    kept, left_out = [], dict(source.left_out)
    for file in source.files:
        is_sidecar = most in MEDIA and file_suffix(file.name) in SIDECARS and file_stem(file.name) in stems
        if kinds[file.name] in keep or is_sidecar or (most in MEDIA and is_metadata(file.name)):
            kept.append(file)
        else:
            left_out[file.name] = f"what is not {kind or most}"
    return replace(source, files=tuple(kept), left_out=left_out)


def _kind_of(name: str) -> str:
    suffix = file_suffix(name)
    return (
        media_of(suffix)
        or _RECORDS.get(suffix)
        or ("json" if suffix == "json" else "text" if suffix in _TEXTS else "blob")
    )


def _notes(left_out: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    for why in sorted(set(left_out.values())):
        names = sorted(name for name, reason in left_out.items() if reason == why)
        notes.append(
            f"left out {why} ({len(names):,}): {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
        )
    return tuple(notes)


def detect(source: Source) -> str:
    """Return the importer for the extensions of a source's files.

    Raises:
        SourceError: The files need several importers, or none fits.
    """
    if index := _index_of(source):
        return index
    suffixes = {file_suffix(file.name): file for file in reversed(source.files)}
    if any(map(media_of, suffixes)):
        suffixes = {suffix: file for suffix, file in suffixes.items() if not is_metadata(file.name)}
    if suffixes.keys() == {"bin", "idx"} or (
        suffixes.keys() == {"bin"}
        and {file_stem(file.name).lower() for file in source.files} <= set(SPLIT_NAMES)
    ):
        raise SourceError(
            f"{source.given}: these look like files of tokens, whose type and rows nothing says; state them, such as "
            "--dtype uint16 --row 2048, or pass --from tokens if each has an .idx, or "
            "keep each file as one sample of bytes with --from folder"
        )
    records = {_RECORDS[suffix]: file for suffix, file in suffixes.items() if suffix in _RECORDS}
    others = [file for suffix, file in suffixes.items() if suffix not in _RECORDS]
    # next to other files they are sidecars; alone they hold an array, or lines
    if suffixes.keys() == {"json"}:
        return "jsonl"
    if len(records) == 1 and not others:
        return next(iter(records))
    if records:
        shown = sorted({*(file.name for file in records.values()), *(file.name for file in others)})
        raise SourceError(
            f"{source.given}: holds files of several kinds ({', '.join(shown[:3])}); give a glob that "
            "matches one kind, such as "
            f"'{source.given}/**/*.{file_suffix(next(iter(records.values())).name)}', or name an importer "
            "with --from; --on-error skip leaves out what is of the fewer"
        )
    if suffixes.keys() <= _TEXTS:
        return "text"
    if source.is_single_file and not any(map(media_of, suffixes)):
        raise SourceError(
            f"{source.given}: its extension calls for no importer; name one with --from "
            f"({', '.join(IMPORTERS)})"
        )
    return "folder"


def _index_of(source: Source) -> str | None:
    """Return the importer whose index is among the files, or None."""
    names = {file.name for file in source.files}
    if (
        "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names
    ):  # written by `save_to_disk`
        return "huggingface"
    bases = {name.rpartition("/")[2] for name in names}
    return "mds" if "index.json" in bases and any(".mds" in base for base in bases) else None


def media_of(suffix: str) -> str | None:
    """Return the field of `MEDIA` for an extension, or None."""
    return next((field for field, known in MEDIA.items() if suffix in known), None)
