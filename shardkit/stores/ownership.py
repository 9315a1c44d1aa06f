"""Check whether another user of this machine can change a local file.

Access control lists are covered, because the group bits of a mode are the upper limit of what their entries grant.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat


class WriteAccess:
    """Checks many files, examining each folder once. The superuser does not count as another user."""

    def __init__(self) -> None:
        self._folders: dict[str, bool] = {}

    def others_can_write(self, path: str | os.PathLike[str]) -> bool:
        """Return True if another user can change the file at `path`, or put another file in its place.

        Also True if the file or one of its folders cannot be examined.
        """
        folder, name = os.path.split(os.path.abspath(path))
        try:
            return self._is_open_folder(folder) or _is_open(os.lstat(os.path.join(folder, name)))
        except OSError:
            return True

    def _is_open_folder(self, folder: str) -> bool:
        known = self._folders.get(folder)
        if known is None:
            known = self._folders[folder] = self._examine(folder)
        return known

    def _examine(self, folder: str) -> bool:
        found = os.lstat(folder)
        if stat.S_ISLNK(found.st_mode):
            if _is_foreign(found) or self._is_open_folder(os.path.dirname(folder)):
                return True
            return self._is_open_folder(os.path.realpath(folder))
        parent = os.path.dirname(folder)
        return _is_open(found) or (parent != folder and self._is_open_folder(parent))


def _is_open(found: os.stat_result) -> bool:
    """Return True if the mode of a file or folder lets others change it."""
    if _is_foreign(found):
        return True
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return False  # sticky: other users may add entries but cannot replace ours
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_gid, os.geteuid())


def _is_foreign(found: os.stat_result) -> bool:
    return found.st_uid not in (0, os.geteuid())


@functools.lru_cache(maxsize=64)
def _is_private_group(gid: int, uid: int) -> bool:
    """Return True if the group is the user's private one, as many systems create for each user."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
