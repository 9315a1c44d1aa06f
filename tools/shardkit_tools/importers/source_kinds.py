"""The importer for the files of a source: chosen by the user, or by extensions and indexes; other files are strays."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections import Counter
from dataclasses import replace

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.protocol import FileImporter, Importer, ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import (
    file_stem,
    file_suffix,
    list_source,
    name_files,
    read_file,
)

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

# Extensions of files of records, which are never samples themselves.
_RECORDS = dict.fromkeys(("jsonl", "ndjson"), "jsonl") | dict.fromkeys(("tar", "tgz"), "webdataset")
_RECORDS |= dict.fromkeys(("parquet", "pq"), "parquet") | dict.fromkeys(("arrow", "feather", "ipc"), "arrow")
_RECORDS |= {"csv": "csv", "tsv": "csv", "npy": "npy", "npz": "npz", "mds": "mds"}
_TEXTS = frozenset((
    "txt", "text", "md", "rst", "tex", "html", "htm", "xml", "log", "py", "pyi", "c", "h", "cc", "cpp", "hpp",
    "rs", "go", "java", "js", "ts", "sh", "sql", "r", "jl",
))  # fmt: skip


# Containers of samples in formats that are not read; a sample of each whole file is hardly meant.
_UNREAD = re.compile(
    "(?:tfrecords?|h5|hdf5|zip|7z|rar|lz4|tbz2?|lmdb|mdb|pt|pth|pkl|pickle|beton|zarr|orc|avro|xlsx?|sqlite|db"
    "|mat|rds|rdata|dta|safetensors)(?![a-z0-9])"
)
_MAX_INDEX_BYTES = 64 << 20  # of an MDS folder without its shards
_CHUNK = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.\w+)?\.bin$")
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


def find_source(
    source: str, kind: str | None, options: ImportOptions
) -> tuple[FileImporter, tuple[str, ...]]:
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
    listed = without_strays(listed, kind, options)
    kind = kind or ("tokens" if options.dtype or options.row else detect(listed))
    if options.flatten and kind not in _NESTED:
        raise UsageError(
            f"--flatten: {source} is read as {kind}, which has no structs; it is for {', '.join(_NESTED)}"
        )
    importer = open_listed(listed, kind, options)
    return importer, (*stray_notes(listed), *listed.notes)


def check_kind(kind: str) -> None:
    """Raise UsageError if there is no importer of this name."""
    if kind not in IMPORTERS:
        raise UsageError(f"--from {kind!r}: no such importer; expected one of {', '.join(IMPORTERS)}")


def open_listed(source: Source, kind: str, options: ImportOptions) -> FileImporter:
    """Open a listed source with one of `IMPORTERS`; errors as for `open_source`."""
    module, function = IMPORTERS[kind]
    importer: FileImporter = getattr(importlib.import_module(module), function)(source, options)
    return importer


def without_strays(source: Source, kind: str | None, options: ImportOptions) -> Source:
    """Return a source with only the most frequent kind of files, if bad rows are skipped, or it is on the hub.

    Sidecars stay with their samples. Repositories of the hub have cards, licences and scripts.
    """
    if not (options.skip_bad_rows or source.given.startswith("hf://")):
        return source
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


def stray_notes(source: Source) -> list[str]:
    """Return notes on the files that are left out, and on files without a byte."""
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(source.left_out.items()):
        reasons.setdefault(f"left out {why}", []).append(name)
    if empty := [file.name for file in source.files if not file.size]:
        reasons["files without a byte"] = empty
    if windows := [file.name for file in source.files if "\\" in file.name]:
        reasons["names with backslashes, as archives of Windows have, are in no folder"] = windows
    return [name_files(why, reasons[why]) for why in sorted(reasons)]


def detect(source: Source) -> str:
    """Return the importer for the extensions of a source's files.

    Raises:
        SourceError: The files need several importers, or none fits.
    """
    if index := _index_of(source):
        return index
    if chunk := next((file.path for file in source.files if _CHUNK.search(file.name)), None):
        raise SourceError(
            f"{chunk}: a chunk of LitData, which is not read; write the samples that litdata reads with "
            "shardkit.create, or keep each file as one sample of bytes with --from folder"
        )
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
        return "mds" if any(map(_is_mds_index, source.files)) else "jsonl"
    if len(records) == 1 and not others:
        return next(iter(records))
    if records:
        shown = sorted({*(file.name for file in records.values()), *(file.name for file in others)})
        raise SourceError(
            f"{source.given}: holds files of several kinds ({', '.join(shown[:3])}); give a glob that "
            "matches one kind, such as "
            f"'{source.given}/**/*.{file_suffix(next(iter(records.values())).name)}', or name an importer "
            "with --from; --on-error skip leaves out what is of the fewer"
            + "; a table of the files is read if it is called metadata.csv and has a column file_name"
            * any(map(media_of, suffixes))
        )
    for suffix, file in suffixes.items():
        if found := _UNREAD.match(suffix):
            raise SourceError(
                f"{file.path}: files of .{found.group()} are not read; convert them to tar, Parquet or .npy, write "
                "their samples with shardkit.create, or keep each as one sample of bytes with --from folder"
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


def _is_mds_index(file: SourceFile) -> bool:
    """Return True for the index of an MDS folder whose shards are not there."""
    if file.name.rpartition("/")[2] != "index.json" or file.size > _MAX_INDEX_BYTES:
        return False
    with contextlib.suppress(SourceError):  # reported when it is read
        index = parse_json(read_file(file), file.path)
        return isinstance(index, dict) and {"version", "shards"} <= index.keys()
    return False


def media_of(suffix: str) -> str | None:
    """Return the field of `MEDIA` for an extension, or None."""
    return next((field for field, known in MEDIA.items() if suffix in known), None)


def is_metadata(name: str) -> bool:
    """Return True if a file describes other files."""
    return name.rpartition("/")[2] in METADATA
