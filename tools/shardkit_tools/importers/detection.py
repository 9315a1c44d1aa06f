"""Which importer a source needs: by the extensions of its files, or by the name that the user gives."""

from __future__ import annotations

import importlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit_tools.importers.options import ImportOptions
from shardkit_tools.importers.protocol import FileImporter, Importer, Source
from shardkit_tools.importers.source_files import file_stem, file_suffix, list_source

IMPORTERS = {
    "folder": ("shardkit_tools.importers.folder", "open_folder"),
    "text": ("shardkit_tools.importers.text", "open_text"),
    "jsonl": ("shardkit_tools.importers.json_lines", "open_json_lines"),
    "npy": ("shardkit_tools.importers.numpy_rows", "open_numpy"),
    "npz": ("shardkit_tools.importers.numpy_archives", "open_archives"),
    "webdataset": ("shardkit_tools.importers.webdataset", "open_webdataset"),
    "parquet": ("shardkit_tools.importers.parquet", "open_parquet"),
    "arrow": ("shardkit_tools.importers.arrow", "open_arrow"),
    "csv": ("shardkit_tools.importers.csv", "open_csv"),
    "huggingface": ("shardkit_tools.importers.arrow", "open_huggingface"),
    "mds": ("shardkit_tools.importers.mds", "open_mds"),
}
"""Name for ``--from`` → module and function that open a source, imported then: some need pyarrow."""

MEDIA = {
    "image": ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pbm",
              "avif", "heic", "jp2", "jxl"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "mpg", "mpeg"),
}  # fmt: skip
"""Field → file extensions that are of its kind."""
SIDECARS = {"json": ("meta", "json"), "txt": ("text", "str")}
"""File extension of what describes a file of the same stem → its field and type."""

# Extensions that belong to one importer: files of records, never samples by themselves.
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
# What the samples of an importer may be, where more than files of its own extensions.
_KINDS_OF = {name: {name} for name in set(_RECORDS.values())}
_KINDS_OF |= {"jsonl": {"jsonl", "json"}, "text": {"text"}, "folder": {*MEDIA, "blob"}}


def open_source(source: str, kind: str | None = None, options: ImportOptions | None = None) -> Importer:
    """Open a source with the importer that fits it.

    Args:
        source: a file, a folder, a glob or a URL.
        kind: one of `IMPORTERS`; None: detected.
        options: what the user says about the source.

    Raises:
        NotFoundError: nothing is there.
        SourceError: the source cannot be read as that kind, or its kind cannot be told.
        SchemaError: a field cannot be stored under its name, or `options` type a field that is not there.
    """
    return find_source(source, kind, options or ImportOptions())[0]


def find_source(source: str, kind: str | None, options: ImportOptions) -> tuple[Importer, tuple[str, ...]]:
    """`open_source`, and what to say of files that were left out."""
    if kind is not None and kind not in IMPORTERS:
        raise UsageError(f"--from {kind!r}: no such importer; expected one of {', '.join(IMPORTERS)}")
    is_hub = source.startswith("hf://")
    if kind == "huggingface" and _HUB_NAME.fullmatch(source) and not os.path.exists(source):
        raise NotFoundError(
            f"{source}: no such folder; a dataset of the Hugging Face Hub is given as hf://datasets/{source}"
        )
    listed = list_source(source, skip=options.skip_bad_rows)
    if is_hub and kind == "huggingface" and not _index_of(listed):
        kind = None  # files as they were pushed, not a folder of `save_to_disk`
    if options.skip_bad_rows or is_hub:  # a repository of the hub has a card, a licence, a script
        listed = _without_strays(listed, kind)
    kind = kind or detect(listed)
    if options.flatten and kind not in _NESTED:
        raise UsageError(
            f"--flatten: {source} is read as {kind}, which has no structs; it is for {', '.join(_NESTED)}"
        )
    module, function = IMPORTERS[kind]
    importer: FileImporter = getattr(importlib.import_module(module), function)(listed, options)
    notes = (*_notes(listed.left_out), *listed.notes)
    return importer, notes


def _without_strays(source: Source, kind: str | None) -> Source:
    """A source without the files that are not of the kind that most are of; sidecars stay with their samples."""
    if source.is_single_file or kind in _WITH_AN_INDEX or (kind is None and _index_of(source)):
        return source
    kinds = {file.name: _kind_of(file.name) for file in source.files}
    wanted = _KINDS_OF.get(kind or "")
    counts = Counter(found for found in kinds.values() if wanted is None or found in wanted)
    # texts and documents lie beside samples, and are some only where there are no others; what nobody knows even less
    for is_sample in ({*MEDIA, *_RECORDS.values()}, {"text", "json"}, {"blob"}):
        among = Counter({found: n for found, n in counts.items() if found in is_sample})
        if among:
            break
    (most, count), *others = among.most_common() or [("", 0)]
    if not count or (others and others[0][1] == count):
        return source  # nobody can tell
    keep = {most} if wanted is None or kind == "folder" else wanted
    stems = {file_stem(name) for name, found in kinds.items() if found == most}
    kept, left_out = [], dict(source.left_out)
    for file in source.files:
        is_sidecar = most in MEDIA and file_suffix(file.name) in SIDECARS and file_stem(file.name) in stems
        if kinds[file.name] in keep or is_sidecar:
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
    """The importer that the extensions of a source's files call for.

    Raises:
        SourceError: the files call for several importers, or for none.
    """
    if index := _index_of(source):
        return index
    suffixes = {file_suffix(file.name): file for file in reversed(source.files)}
    records = {_RECORDS[suffix]: file for suffix, file in suffixes.items() if suffix in _RECORDS}
    others = [file for suffix, file in suffixes.items() if suffix not in _RECORDS]
    if suffixes.keys() == {"json"}:  # beside others it describes them; alone it is an array, or lines
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
    """The importer whose index is among the files."""
    names = {file.name for file in source.files}
    if (
        "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names
    ):  # what `save_to_disk` writes
        return "huggingface"
    bases = {name.rpartition("/")[2] for name in names}
    return "mds" if "index.json" in bases and any(".mds" in base for base in bases) else None


def media_of(suffix: str) -> str | None:
    """The field of `MEDIA` that files of an extension are of."""
    return next((field for field, known in MEDIA.items() if suffix in known), None)
