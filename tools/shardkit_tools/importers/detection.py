"""Which importer a source needs: by the extensions of its files, or by the name that the user gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable

from shardkit.errors import SourceError, UsageError
from shardkit_tools.importers.chosen_fields import ChosenFields
from shardkit_tools.importers.protocol import Importer, ImportOptions
from shardkit_tools.importers.source_files import Source, file_suffix, list_source

__all__ = ["IMPORTERS", "MEDIA", "detect", "open_source"]


def _imported(module: str, function: str) -> Callable[[Source, ImportOptions], Importer]:
    """What opens a source with the importer of a module, which is imported then: some need pyarrow."""

    def opened(source: Source, options: ImportOptions) -> Importer:
        importer: Importer = getattr(importlib.import_module(module), function)(source, options)
        return importer

    return opened


IMPORTERS = {
    "folder": _imported("shardkit_tools.importers.folder", "open_folder"),
    "text": _imported("shardkit_tools.importers.text", "open_text"),
    "jsonl": _imported("shardkit_tools.importers.json_lines", "open_json_lines"),
    "npy": _imported("shardkit_tools.importers.numpy_rows", "open_numpy"),
    "webdataset": _imported("shardkit_tools.importers.webdataset", "open_webdataset"),
    "parquet": _imported("shardkit_tools.importers.parquet", "open_parquet"),
    "arrow": _imported("shardkit_tools.importers.arrow", "open_arrow"),
    "csv": _imported("shardkit_tools.importers.csv", "open_csv"),
    "huggingface": _imported("shardkit_tools.importers.huggingface", "open_huggingface"),
    "mds": _imported("shardkit_tools.importers.mds", "open_mds"),
}
"""Name for ``--from`` → what opens the source."""

MEDIA = {
    "image": ("jpg", "jpeg", "png", "gif", "webp", "bmp", "tif", "tiff", "ppm", "pgm", "pbm",
              "avif", "heic", "jp2", "jxl"),
    "audio": ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"),
    "video": ("mp4", "mkv", "webm", "avi", "mov", "mpg", "mpeg"),
}  # fmt: skip
"""Field → file extensions that are of its kind."""

# Extensions that belong to one importer: files of records, never samples by themselves.
_RECORDS = dict.fromkeys(("jsonl", "ndjson"), "jsonl") | dict.fromkeys(("tar", "tgz"), "webdataset")
_RECORDS |= dict.fromkeys(("parquet", "pq"), "parquet") | dict.fromkeys(("arrow", "feather", "ipc"), "arrow")
# A .json file beside others describes them; where there is nothing else it is an array, or lines.
_RECORDS |= {"csv": "csv", "tsv": "csv", "npy": "npy", "mds": "mds"}
_TEXTS = frozenset((
    "txt", "text", "md", "rst", "tex", "html", "htm", "xml", "log", "py", "pyi", "c", "h", "cc", "cpp", "hpp",
    "rs", "go", "java", "js", "ts", "sh", "sql", "r", "jl",
))  # fmt: skip


def open_source(source: str, kind: str | None = None, options: ImportOptions | None = None) -> Importer:
    """Open a source with the importer that fits it.

    Args:
        source: a file, a folder or a glob.
        kind: one of `IMPORTERS`; None: detected.
        options: what the user says about the source.

    Raises:
        NotFoundError: nothing is there.
        SourceError: the source cannot be read as that kind, or its kind cannot be told.
        SchemaError: a field cannot be stored under its name, or `options` type a field that is not there.
    """
    if kind is not None and kind not in IMPORTERS:
        raise UsageError(f"--from {kind!r}: no such importer; expected one of {', '.join(IMPORTERS)}")
    listed, options = list_source(source), options or ImportOptions()
    importer = IMPORTERS[kind or detect(listed)](listed, options)
    return ChosenFields(importer, options) if options.chooses else importer


def detect(source: Source) -> str:
    """The importer that the extensions of a source's files call for.

    Raises:
        SourceError: the files call for several importers, or for none.
    """
    names = {file.name for file in source.files}
    if (
        "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names
    ):  # what `save_to_disk` writes
        return "huggingface"
    bases = {name.rpartition("/")[2] for name in names}
    if "index.json" in bases and any(".mds" in base for base in bases):
        return "mds"
    suffixes = {file_suffix(file.name): file for file in reversed(source.files)}
    records = {_RECORDS[suffix]: file for suffix, file in suffixes.items() if suffix in _RECORDS}
    others = [file for suffix, file in suffixes.items() if suffix not in _RECORDS]
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
            "with --from"
        )
    if suffixes.keys() <= _TEXTS:
        return "text"
    if source.is_single_file and not _is_media(suffixes):
        raise SourceError(
            f"{source.given}: its extension calls for no importer; name one with --from "
            f"({', '.join(IMPORTERS)})"
        )
    return "folder"


def _is_media(suffixes: Iterable[str]) -> bool:
    return any(suffix in known for suffix in suffixes for known in MEDIA.values())
