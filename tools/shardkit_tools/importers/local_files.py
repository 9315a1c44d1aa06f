"""The files of a local folder or glob, with symbolic links followed or refused.

Links inside the source to its own files are always read. Other links are followed on request, or if the source
has no files except links: a snapshot in the cache of the Hugging Face hub, or a folder that was curated by links.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from shardkit.errors import NotFoundError, SourceError
from shardkit_tools.importers.protocol import SourceFile

WILDCARDS = frozenset("*?[")


class _Folder(NamedTuple):
    name: str  # relative to the source
    path: str
    above: tuple[str, ...]  # real paths of this folder and of those that it was reached through


def walk(
    root: str, empty: dict[str, str] | None, notes: list[str], *, follow_links: bool
) -> Iterator[SourceFile]:
    """Yield the files of a folder; empty folders are refused, or added to ``empty``."""
    inside = os.path.realpath(root)
    pending = [_Folder("", root, (inside,))]
    links: list[_Folder] = []  # linked files, and linked folders, which are last
    has_files = False
    follow: bool | None = None  # decided when the folders without links are listed
    while pending:
        folder = pending.pop()
        for entry in _entries(folder, empty):
            name = f"{folder.name}/{entry.name}" if folder.name else entry.name
            if entry.is_symlink():
                links.append(_Folder(name, entry.path, folder.above))
            elif entry.is_dir():
                pending.append(_Folder(name, entry.path, (*folder.above, os.path.realpath(entry.path))))
            else:
                has_files = True
                yield regular_file(entry.path, name)
        if not pending:
            follow = follow_links or not has_files if follow is None else follow
            files, folders = _resolve_links(links, inside, notes, follow=follow)
            links, pending = [], folders
            yield from files


def _entries(folder: _Folder, empty: dict[str, str] | None) -> list[os.DirEntry[str]]:
    try:
        entries = [entry for entry in os.scandir(folder.path) if not entry.name.startswith(".")]
    except OSError as error:
        raise unreadable(folder.path, error) from error
    if any(entry.name == "shardkit.json" for entry in entries):
        raise SourceError(
            f"{folder.path}: a dataset, whose shards are no samples; build from the files that it was made of, or keep "
            "it outside of the source"
        )
    if not entries and folder.name:
        if empty is None:
            # otherwise a class folder whose files are missing would disappear from the dataset silently
            raise SourceError(
                f"{folder.path}: an empty folder; fill it, remove it, or leave it out: --on-error skip"
            )
        empty[f"{folder.name}/"] = "what is empty"
    return entries


def _resolve_links(
    links: list[_Folder], inside: str, notes: list[str], *, follow: bool
) -> tuple[list[SourceFile], list[_Folder]]:
    """Return the files and the folders that links lead to."""
    files, folders, outside = [], [], []
    for link in links:
        target = os.path.realpath(link.path)
        is_outside = os.path.commonpath([target, inside]) != inside
        if is_outside:
            outside.append(f"{link.name} to {target}")
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
            files.append(regular_file(link.path, link.name))
        if is_outside and not follow:
            raise _out_of_source(link.path, target)
    if outside:
        notes.append(f"links out of the source were followed ({len(outside):,}): {outside[0]}")
    return files, folders


def _out_of_source(path: str, target: str) -> SourceError:
    return SourceError(
        f"{path}: a symbolic link out of the source (to {target}); pass --follow-links if it belongs to the source, "
        "or remove it"
    )


def regular_file(path: str, name: str) -> SourceFile:
    """Describe a file.

    Raises:
        SourceError: It is no regular file, cannot be read, or its name is not UTF-8.
    """
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


def matches(pattern: str, notes: list[str], *, follow_links: bool) -> Iterator[SourceFile]:
    """Yield the files of a glob, with names relative to the folder before its first wildcard."""
    parts = pattern.split("/")
    literal = parts[: next(n for n, part in enumerate(parts) if WILDCARDS.intersection(part))]
    root = "/".join(literal) or ("/" if pattern.startswith("/") else ".")
    found = [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NotFoundError(f"{pattern}: no file matches the pattern; quote it, and check it with ls")
    links = [path for path in found if os.path.islink(path)]
    files = [path for path in found if not os.path.islink(path)]
    for path in files:
        yield regular_file(path, _below(path, root))
    named = [_Folder(_below(path, root), path, ()) for path in links]
    yield from _resolve_links(named, os.path.realpath(root), notes, follow=follow_links or not files)[0]


def _below(path: str, root: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


def unreadable(path: str, error: OSError) -> SourceError:
    """Return the error for a file that cannot be read."""
    return SourceError(
        f"{path}: cannot be read ({error.strerror or error}); mend its permissions, or leave it out"
    )
