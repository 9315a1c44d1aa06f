"""Directories of a local root: opened step by step so that no link is followed, made so that they last."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from shardkit.errors import StoreError
from shardkit.stores.file_operations import Handle, active

__all__ = ["FOLDER", "Directories", "check_regular", "exists"]

FOLDER: Final = "tmp"
"""Folder of a local root that holds temporaries; on the same file system as the objects, so that `link`
works."""


class Directories:
    """The directories of one root."""

    def __init__(self, root: str) -> None:
        self._root = root
        # Directories whose own entry is known to be durable, so that each is synced once per process.
        self._durable: set[str] = set()

    @property
    def root(self) -> str:
        """The absolute path of the root."""
        return self._root

    @contextlib.contextmanager
    def opened(self, components: Sequence[str]) -> Iterator[Handle]:
        """A folder of the root, open for the time of the block; FileNotFoundError where it does not exist."""
        folder = self._open(components)
        try:
            yield folder
        finally:
            active().close(folder)

    @contextlib.contextmanager
    def made(self, components: Sequence[str]) -> Iterator[Handle]:
        """A folder of the root, made where it is missing; its entry is durable."""
        folder = self._make(components)
        try:
            yield folder
        finally:
            active().close(folder)

    def _open(self, components: Sequence[str]) -> Handle:
        """Open a folder step by step, so that no link inside the root is followed."""
        folder = active().open_root(self._root)
        for component in components:
            folder = _step(folder, component)
        return folder

    def _make(self, components: Sequence[str]) -> Handle:
        """Open a folder, making what is missing; every entry on the way is durable when this returns.

        A directory that another process made a moment ago may not be durable yet, hence the sync of the
        parent of each one that this store has not met before. The temporaries' own folder needs none: losing
        it loses nothing.
        """
        operations = active()
        folder = self._make_root()
        path = ""
        for component in components:
            path = f"{path}/{component}"
            try:
                made = _make_directory(folder, component)
                if path != f"/{FOLDER}" and (made or path not in self._durable):
                    operations.fsync_directory(folder)
                    self._durable.add(path)
            except BaseException:
                operations.close(folder)
                raise
            folder = _step(folder, component)
        return folder

    def _make_root(self) -> Handle:
        try:
            return active().open_root(self._root)
        except FileNotFoundError:
            _make_durable_path(self._root)
            return active().open_root(self._root)


def exists(folder: Handle, name: str) -> bool:
    """Whether a regular file has this name.

    Raises:
        StoreError: Something else has it.
    """
    try:
        found = active().stat(folder, name)
    except FileNotFoundError:
        return False
    check_regular(found, folder.child(name))
    return True


def _step(folder: Handle, component: str) -> Handle:
    """Open a directory inside `folder` and close `folder`."""
    try:
        return active().open_directory(folder, component)
    except NotADirectoryError:
        _refuse_entry(folder, component)
    finally:
        active().close(folder)


def _refuse_entry(folder: Handle, component: str) -> NoReturn:
    path = folder.child(component)
    found = active().stat(folder, component)
    what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
    raise StoreError(
        f"{path} is {what}: links inside a store are not followed; put the directory itself there"
    )


def check_regular(found: os.stat_result, path: str) -> None:
    """Refuse links, directories, devices and pipes where an object should be."""
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        raise StoreError(f"{path} is {what}: expected a plain file; remove it and run: shardkit repair")


def _make_directory(parent: Handle, name: str) -> bool:
    try:
        active().make_directory(parent, name)
    except FileExistsError:
        return False
    return True


def _make_durable_path(path: str) -> None:
    """Make a directory and those above it, each durable in its parent."""
    parent = os.path.dirname(path)
    if parent != path and not os.path.isdir(parent):
        _make_durable_path(parent)
    with contextlib.suppress(FileExistsError):
        active().make_root(path)
    folder = active().open_root(parent)
    try:
        active().fsync_directory(folder)
    finally:
        active().close(folder)
