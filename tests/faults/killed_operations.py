"""File operations at a chosen one of which the process dies by SIGKILL: drills run them in children that they fork."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

from shardkit.stores.file_operations import FileOperations, Handle

__all__ = ["KilledOperations", "run_in_child"]

_CHANGES = ("create_file", "write", "link", "rename", "unlink", "make_directory")


class KilledOperations(FileOperations):
    """The real operations; nothing is synced, since what a power cut leaves is the business of `crash_states`.

    Args:
        at: At which change the process dies, from 1; 0 for none.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        """Changes so far."""

    def tick(self) -> None:
        """One more change."""
        self.count += 1
        if 0 < self.at <= self.count:  # threads may count at once
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(self, file: Handle) -> None:
        return

    def fsync_directory(self, directory: Handle) -> None:
        return


def _counted(name: str) -> Any:
    def counted(self: KilledOperations, *given: Any) -> Any:
        self.tick()
        return getattr(FileOperations, name)(self, *given)

    return counted


for _name in _CHANGES:
    setattr(KilledOperations, _name, _counted(_name))


def run_in_child(work: Callable[[], object]) -> int:
    """Call `work` in a forked child, so that the interpreter starts once for many kills.

    Returns:
        Its exit code; -9 where it was killed.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
