"""What the operating system's errors mean to someone who builds a dataset, and what to do next."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final

from shardkit.errors import ShardkitError, StoreError, StoreFullError, StoreReadOnlyError

__all__ = ["explained", "store_error"]

_FULL: Final = {
    errno.ENOSPC: "no room is left; make room, then run it again: what was published is kept",
    errno.EDQUOT: "the quota is used up; make room or raise it, then run it again: what was published is "
    "kept",
    errno.EFBIG: "the file would be larger than the limit of this process or file system; raise the limit "
    "(ulimit -f)",
}
_READ_ONLY: Final = {
    errno.EROFS: "the file system is mounted read-only; mount it for writing or choose another root",
    errno.EACCES: "permission denied; get the right to write there or choose another root",
    errno.EPERM: "not permitted; get the right to write there or choose another root",
}
_OTHER: Final = {
    errno.EIO: "the disk reports an input/output error; look at the system log, then run it again",
    errno.ELOOP: "it is a symbolic link, and links inside a store are not followed; put the file itself "
    "there",
    errno.EMFILE: "too many files are open in this process; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; close some",
    errno.ESTALE: "the network file system lost the file; mount it again, then run it again",
    errno.EACCES: "permission denied; get the right to read it",
    errno.ENAMETOOLONG: "the path is too long; use a root with a shorter path",
    errno.ENOTDIR: "a part of the path is not a directory; choose another root",
    errno.EMLINK: "the file system refuses a second name for a file; use a root on one that has hard links",
}
_NO_LINKS: Final = (
    "the file system has no hard links, which publishing needs; use a root on another file system"
)


def store_error(error: OSError, doing: str, *, writing: bool) -> StoreError:
    """The `StoreError` that says what an `OSError` means.

    Args:
        error: As the kernel reported it.
        doing: What was tried, with names: ``"write log/…1.json in /data/cats"``.
        writing: Whether it was a change: a missing permission then means a read-only store.
    """
    number = error.errno or 0
    if number in _FULL:
        return StoreFullError(f"cannot {doing}: {_FULL[number]}")
    if writing and error.filename2 is not None and number in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        return StoreError(f"cannot {doing}: {_NO_LINKS}")
    if writing and number in _READ_ONLY:
        return StoreReadOnlyError(f"cannot {doing}: {_READ_ONLY[number]}")
    meaning = (
        _OTHER.get(number)
        or f"{os.strerror(number) if number else error}; look at the disk, then run it again"
    )
    return StoreError(f"cannot {doing}: {meaning}")


@contextlib.contextmanager
def explained(doing: str, *, writing: bool = False) -> Iterator[None]:
    """Turn every `OSError` of the block into a `StoreError`; shardkit's own errors pass."""
    try:
        yield
    except ShardkitError:
        raise
    except OSError as error:
        raise store_error(error, doing, writing=writing) from error
