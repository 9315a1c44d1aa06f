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
from shardkit_tools.importers.stray_names import DEBRIS, is_debris, refuse_table

WILDCARDS = frozenset("*?[")


class _Folder(NamedTuple):
    name: str  # relative to the source
    path: str
    above: tuple[str, ...]  # real paths of this folder and of those that it was reached through


def walk(
    root: str, left_out: dict[str, str], notes: list[str], *, skip: bool, follow_links: bool
) -> Iterator[SourceFile]:
    """Yield the files of a folder.

    Empty folders, and files that cannot be read, are refused, or with `skip` added to `left_out`.
    """
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
    refuse_table((f"{os.path.basename(folder.name)}/{entry.name}" for entry in found), folder.path)
    debris = {entry.name for entry in found if is_debris(entry.name)}
    left_out |= dict.fromkeys((os.path.join(folder.name, name) for name in debris), DEBRIS)
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
            files.append(link)
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


def matches(
    pattern: str, left_out: dict[str, str], notes: list[str], *, skip: bool, follow_links: bool
) -> Iterator[SourceFile]:
    """Yield the files of a glob, checked as by `walk`; names are relative to the folder before the first wildcard."""
    parts = pattern.split("/")
    literal: list[str] = []
    for part in parts[:-1]:
        # a folder may be called "v[1]"
        if WILDCARDS.intersection(part) and ("*" in part or not os.path.isdir("/".join([*literal, part]))):
            break
        literal.append(part)
    root = "/".join(literal) or ("/" if pattern.startswith("/") else ".")
    escaped = "/".join([*map(glob.escape, literal), *parts[len(literal) :]])
    found = [path for path in glob.glob(escaped, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise NotFoundError(f"{pattern}: no file matches the pattern; quote it, and check it with ls")
    named = [_Folder(_below(path, root), path, ()) for path in found]
    left_out |= {one.name: DEBRIS for one in named if is_debris(one.name)}
    named = [one for one in named if one.name not in left_out]
    links = [one for one in named if os.path.islink(one.path)]
    files = [one for one in named if not os.path.islink(one.path)]
    linked, _ = _resolve_links(links, os.path.realpath(root), notes, follow=follow_links or not files)
    for one in (*files, *linked):
        yield from _readable(one.path, one.name, left_out if skip else None)


def _below(path: str, root: str) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/")


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
