"""`list_source` lists the files of a source in order, `detect` chooses their importer; `source_files.py` opens them.

A source is a file, a folder, a glob (``data/**/*.jsonl``) or a URL. Files are sorted by name (by code point, `/` as
separator) on every machine. The importer is chosen by the user, or by extensions and indexes; other files are strays.

Links inside the source to its own files are always read. Other links are followed on request, or if the source
has no files except links: a snapshot in the cache of the Hugging Face hub, or a folder that was curated by links.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import unquote

from shardkit.errors import NotFoundError, SourceError, UsageError
from shardkit.formats.strict_json import parse_json
from shardkit_tools.importers.protocol import FileImporter, ImportOptions, Source, SourceFile
from shardkit_tools.importers.source_files import (
    MEDIA,
    SIDECARS,
    SPLIT_NAMES,
    file_stem,
    file_suffix,
    is_metadata,
    is_url,
    media_of,
    name_files,
    read_file,
    regular_file,
    unreadable,
)

_WILDCARDS = frozenset("*?[")
_DEBRIS = "what other programs write next to samples"
"""Reason why a file is left out."""

# Markers and summaries of Spark, Hive and Databricks; thumbnails and settings of Windows; results cached by datasets
_DEBRIS_FILES = re.compile(
    r"_SUCCESS|_metadata|_common_metadata|_(?:committed|started)_\w+|Thumbs\.db|desktop\.ini|"
    r"cache-[0-9a-f]{16}\w*\.arrow"
)
_DEBRIS_FOLDERS = frozenset(
    ["__MACOSX", "_temporary", "lost+found", "$RECYCLE.BIN", "System Volume Information"]
)
_TABLE_LOGS = {
    re.compile(r"(?:^|/)_delta_log(?:/|$)"): "Delta Lake",
    re.compile(r"(?:^|/)\.hoodie(?:/|$)"): "Hudi",
    re.compile(r"(?:^|/)metadata/[^/]+\.metadata\.json$"): "Iceberg",
    re.compile(r"(?:^|/)_versions/[^/]+\.manifest$"): "Lance",
}

IMPORTERS = {
    "folder": ("shardkit_tools.importers.folder", "open_folder"),
    "text": ("shardkit_tools.importers.folder", "open_text"),
    "jsonl": ("shardkit_tools.importers.json_lines", "open_json_lines"),
    "npy": ("shardkit_tools.importers.numpy_arrays", "open_numpy"),
    "npz": ("shardkit_tools.importers.numpy_archives", "open_archives"),
    "tokens": ("shardkit_tools.importers.tokens", "open_tokens"),
    "webdataset": ("shardkit_tools.importers.webdataset", "open_webdataset"),
    "parquet": ("shardkit_tools.importers.tables", "open_parquet"),
    "arrow": ("shardkit_tools.importers.arrow_files", "open_arrow"),
    "csv": ("shardkit_tools.importers.csv", "open_csv"),
    "huggingface": ("shardkit_tools.importers.arrow_files", "open_huggingface"),
    "mds": ("shardkit_tools.importers.mds", "open_mds"),
}
"""Name for ``--from`` → module and function that open a source, imported on demand: some need pyarrow."""

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
_STREAMING = re.compile(r"\.mds|\.(json|[ctx]sv)\.meta$")  # shards of MDS; of JSON, CSV and the like
_WORD = re.compile(r"[^a-z]")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_NESTED = ("parquet", "arrow", "jsonl", "huggingface")
_WITH_AN_INDEX = ("huggingface", "mds")
# Kinds of files that an importer accepts as samples, beyond its own extensions.
_KINDS_OF = {name: {name} for name in set(_RECORDS.values())}
_KINDS_OF |= {"jsonl": {"jsonl", "json"}, "text": {"text"}, "folder": {*MEDIA, "blob"}}


def open_source(source: str, kind: str | None = None, options: ImportOptions | None = None) -> FileImporter:
    """Open a source with a suitable importer.

    Args:
        source: a file, a folder, a glob or a URL.
        kind: one of `IMPORTERS`; None: detected.
        options: options of the user.

    Raises:
        NotFoundError: The source does not exist.
        SourceError: The source cannot be read as this kind, or its kind cannot be detected.
        SchemaError: A field name cannot be stored, or `options` name an unknown field.
        UsageError: There is no such kind, or an option does not go with it.
    """
    options = options or ImportOptions()
    if kind == "huggingface" and _HUB_NAME.fullmatch(source) and not os.path.exists(source):
        raise NotFoundError(
            f"{source}: no such folder; a dataset of the Hugging Face Hub is given as hf://datasets/{source}"
        )
    listed = list_source(source, skip=options.skip_bad_rows, follow_links=options.follow_links)
    if source.startswith("hf://") and kind == "huggingface" and not _index_of(listed):
        kind = None  # files as they were pushed, not a folder of `save_to_disk`
    return open_listed(*choose_kind(listed, kind, options), options)


def choose_kind(source: Source, kind: str | None, options: ImportOptions) -> tuple[Source, str]:
    """Return a listed source without strays, and its kind; errors as for `open_source`."""
    if kind is not None and kind not in IMPORTERS:
        raise UsageError(f"--from {kind!r}: no such importer; expected one of {', '.join(IMPORTERS)}")
    source = _without_strays(source, kind, options)
    has_rows = bool(options.dtype or options.row)
    kind = kind or ("tokens" if has_rows else detect(source))
    if has_rows and kind != "tokens":
        raise UsageError(f"--dtype and --row are for files of tokens, not for {kind}; leave them out")
    if options.flatten and kind not in _NESTED:
        raise UsageError(
            f"--flatten: {source.given} is read as {kind}, which has no structs; it is for {', '.join(_NESTED)}"
        )
    return source, kind


def open_listed(source: Source, kind: str, options: ImportOptions) -> FileImporter:
    """Open a listed source, and add notes on its files; errors as for `open_source`."""
    source.notes[:0] = _notes_on_files(source)
    importer = open_as(source, kind, options)
    if kind not in ("folder", "text"):
        source.notes.extend(split_notes(file.name for file in importer.files()))
    return importer


def open_as(source: Source, kind: str, options: ImportOptions) -> FileImporter:
    """Open listed files with one of `IMPORTERS`."""
    module, function = IMPORTERS[kind]
    importer: FileImporter = getattr(importlib.import_module(module), function)(source, options)
    return importer


def split_notes(names: Iterable[str]) -> Iterator[str]:
    """Yield a note if files named as splits (train-00000-of-00002.parquet) become one version."""
    words = {_WORD.split(part.lower())[0] for name in names for part in (name, name.rpartition("/")[2])}
    found = [word for word in SPLIT_NAMES if word in words]
    if len(found) > 1:
        yield (
            f"files are named as the splits {', '.join(found)}, and became one version; to keep them apart build each "
            f"by itself, such as --ref {found[0]} from a glob of its files"
        )


def _without_strays(source: Source, kind: str | None, options: ImportOptions) -> Source:
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
    # Media and records rank before texts and documents, which often accompany samples, and these before unknown files.
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


def _notes_on_files(source: Source) -> list[str]:
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
    """Return the importer for the extensions of a source's files."""
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
    if "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names:  # of `save_to_disk`
        return "huggingface"
    bases = {name.rpartition("/")[2] for name in names}
    has_shards = any(map(_STREAMING.search, bases))
    return "mds" if "index.json" in bases and has_shards else None


def _is_mds_index(file: SourceFile) -> bool:
    """Return True for the index of an MDS folder whose shards are not there."""
    if file.name.rpartition("/")[2] != "index.json" or file.size > _MAX_INDEX_BYTES:
        return False
    with contextlib.suppress(SourceError):  # reported when it is read
        index = parse_json(read_file(file), file.path)
        return isinstance(index, dict) and {"version", "shards"} <= index.keys()
    return False


# ---- Files of a folder, a glob or a URL


def list_source(source: str, *, skip: bool = False, follow_links: bool = False) -> Source:
    """List the files of a source; with `skip`, empty folders and unreadable files are left out, not refused.

    Files that other programs write next to samples are always left out.

    Raises:
        NotFoundError: The source does not exist.
        SourceError: The source holds no files, or something that is not imported.
    """
    left_out: dict[str, str] = {}
    notes: list[str] = []
    source = unquote(source[7:]) if source.lower().startswith("file:///") else source
    if is_url(source):
        from shardkit_tools.importers.remote_files import list_url, pinned_url

        choose = functools.partial(_choose, source, left_out)
        listed, is_single_file = list_url(pinned_url(source), choose, left_out, skip=skip)
        return Source(source, _sort(listed), is_single_file, left_out=left_out)
    if os.path.isdir(source):
        found = _walk(source, left_out, notes, skip=skip, follow_links=follow_links)
    elif os.path.lexists(source):
        return Source(source, (regular_file(source, os.path.basename(source)),), is_single_file=True)
    elif _WILDCARDS.intersection(source):
        found = _matches(source, left_out, notes, skip=skip, follow_links=follow_links)
    else:
        raise NotFoundError(
            f"{source}: no such file or folder; give a path, or a glob such as 'data/*.jsonl'"
        )
    files = _sort(found)
    if not files and os.path.isdir(source):
        raise SourceError(f"{source}: the folder holds no files; give a folder with samples in it")
    if not files:
        name, why = min(left_out.items())
        raise SourceError(f"{source}: no file that matches is a sample ({name}: {why}); give another pattern")
    return Source(source, files, left_out=left_out, notes=notes)


def _sort(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


class _Folder(NamedTuple):
    name: str  # relative to the source
    path: str
    above: tuple[str, ...]  # real paths of this folder and of those that it was reached through


def _walk(
    root: str, left_out: dict[str, str], notes: list[str], *, skip: bool, follow_links: bool
) -> Iterator[SourceFile]:
    """Yield the files of a folder; empty folders and unreadable files are refused, or with `skip` left out."""
    inside = os.path.realpath(root)
    pending = [_Folder("", root, (inside,))]
    links: list[_Folder] = []  # linked files, and linked folders, which are last
    has_files = False
    follow: bool | None = None  # decided when the folders without links are listed
    while pending:
        folder = pending.pop()
        for entry in _entries(folder, left_out, skip=skip):
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if entry.is_symlink():
                links.append(_Folder(name, entry.path, folder.above))
            elif entry.is_dir():
                pending.append(_Folder(name, entry.path, (*folder.above, os.path.realpath(entry.path))))
            else:
                has_files = True
                yield from _readable(entry.path, name, left_out if skip else None)
        if not pending:
            follow = follow_links or not has_files if follow is None else follow
            files, folders = _resolve_links(links, inside, notes, follow=follow)
            links, pending = [], folders
            for link in files:
                yield from _readable(link.path, link.name, left_out if skip else None)


def _readable(path: str, name: str, left_out: dict[str, str] | None) -> Iterator[SourceFile]:
    """Yield a file; one that cannot be read is refused, or added to `left_out`."""
    try:
        yield regular_file(path, name)
    except SourceError:
        if left_out is None:
            raise
        left_out[name.encode(errors="backslashreplace").decode()] = "what cannot be read"


def _entries(folder: _Folder, left_out: dict[str, str], *, skip: bool) -> list[os.DirEntry[str]]:
    try:
        found = list(os.scandir(folder.path))
    except OSError as error:
        raise unreadable(folder.path, error) from error
    _refuse_table((f"{os.path.basename(folder.name)}/{entry.name}" for entry in found), folder.path)
    debris = {entry.name for entry in found if _is_debris(entry.name)}
    left_out |= dict.fromkeys((os.path.join(folder.name, name) for name in debris), _DEBRIS)
    entries = [entry for entry in found if entry.name not in debris and not entry.name.startswith(".")]
    if any(entry.name == "shardkit.json" for entry in entries):
        raise SourceError(
            f"{folder.path}: a dataset, whose shards are no samples; build from the files that it was made of, or keep "
            "it outside of the source"
        )
    if not entries and folder.name:
        if not skip:
            # otherwise a class folder whose files are missing would disappear from the dataset silently
            raise SourceError(
                f"{folder.path}: an empty folder; fill it, remove it, or leave it out: --on-error skip"
            )
        left_out[f"{folder.name}/"] = "what is empty"
    return entries


def _resolve_links(
    links: list[_Folder], inside: str, notes: list[str], *, follow: bool
) -> tuple[list[_Folder], list[_Folder]]:
    """Return the links to files and to folders."""
    files, folders = [], []
    followed: dict[str, list[str]] = {}  # remark → links
    for link in links:
        target = os.path.realpath(link.path)
        is_outside = os.path.commonpath([target, inside]) != inside
        if is_outside or not os.path.isdir(target):
            remark = "out of the source were followed" if is_outside else "inside the source count as files"
            followed.setdefault(remark, []).append(f"{link.name} to {target}")
        if os.path.isdir(target):
            if target in link.above:
                raise SourceError(f"{link.path}: a loop of symbolic links (to {target}); remove the link")
            if not follow and not is_outside:
                raise SourceError(
                    f"{link.path}: a link to a folder inside the source would give its files twice; remove the link, "
                    "or pass --follow-links"
                )
            folders.append(_Folder(link.name, link.path, (*link.above, target)))
        else:
            files.append(link)
        if is_outside and not follow:
            raise SourceError(
                f"{link.path}: a symbolic link out of the source (to {target}); pass --follow-links if it belongs to "
                "the source, or remove it"
            )
    notes += [f"links {remark} ({len(named):,}): {named[0]}" for remark, named in followed.items()]
    return files, folders


def _matches(
    pattern: str, left_out: dict[str, str], notes: list[str], *, skip: bool, follow_links: bool
) -> Iterator[SourceFile]:
    """Yield the files of a glob, checked as by `_walk`; names are relative to the folder before the first wildcard."""
    parts = pattern.split("/")
    literal: list[str] = []
    for part in parts[:-1]:
        # a folder may be called "v[1]"
        if _WILDCARDS.intersection(part) and ("*" in part or not os.path.isdir("/".join([*literal, part]))):
            break
        literal.append(part)
    root = "/".join(literal) or ("/" if pattern.startswith("/") else ".")
    escaped = "/".join([*map(glob.escape, literal), *parts[len(literal) :]])
    found = [path for path in glob.glob(escaped, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NotFoundError(f"{pattern}: no file matches the pattern; quote it, and check it with ls")
    named = [_Folder(os.path.relpath(path, root).replace(os.sep, "/"), path, ()) for path in found]
    left_out |= {one.name: _DEBRIS for one in named if _is_debris(one.name)}
    named = [one for one in named if one.name not in left_out]
    links = [one for one in named if os.path.islink(one.path)]
    files = [one for one in named if not os.path.islink(one.path)]
    linked, _ = _resolve_links(links, os.path.realpath(root), notes, follow=follow_links or not files)
    for one in (*files, *linked):
        yield from _readable(one.path, one.name, left_out if skip else None)


# ---- Files that are no samples: left by other programs, or parts of tables whose files are not all current


def _choose(given: str, left_out: dict[str, str], names: Iterable[str], is_folder: bool) -> list[str]:
    """Return the names of a folder or a glob that are not hidden or debris, which is added to `left_out`."""
    names = list(names)
    if is_folder:
        _refuse_table(names, given)
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    left_out |= {name: _DEBRIS for name in shown if _is_debris(name)}
    return [name for name in shown if name not in left_out]


def _is_debris(name: str) -> bool:
    """Return True for a path relative to the source that no program reads as a sample."""
    *folders, base = name.split("/")
    return (
        not _DEBRIS_FOLDERS.isdisjoint(folders)
        or base in _DEBRIS_FOLDERS
        or _DEBRIS_FILES.fullmatch(base) is not None
    )


def _refuse_table(names: Iterable[str], given: str) -> None:
    """Refuse the folder of a table with a log of its current files, because other files hold removed rows."""
    for name in names:
        for log, table in _TABLE_LOGS.items():
            if log.search(name):
                raise SourceError(
                    f"{given}: a {table} table ({name}), whose files may hold removed and replaced rows; write the "
                    "current rows to Parquet with a reader of such tables, or name the files with a glob to take all"
                )
