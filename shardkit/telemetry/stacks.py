"""What every thread of this process is doing, written on request (SPEC.md §2). Code lines only, never values."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from shardkit.telemetry.recorder import telemetry_directory
from shardkit.telemetry.records import Record

__all__ = ["StackWriter", "request_stacks", "stacks_text"]


def stacks_text() -> str:
    """The stacks of all threads, as tracebacks print them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"process {os.getpid()} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n"]
    for ident, frame in sorted(sys._current_frames().items()):  # noqa: SLF001  documented for this very use
        lines = "".join(
            traceback.StackSummary.extract(traceback.walk_stack(frame), capture_locals=False).format()
        )
        parts.append(f"\nthread {names.get(ident, ident)} (innermost call first):\n{lines}")
    return "".join(parts)


def request_stacks(run: Path) -> float:
    """Ask every rank for its stacks; they come with its next record. Returns when that was asked."""
    path = telemetry_directory(run) / "stacks.request"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{time.time()}\n", encoding="ascii")
    return path.stat().st_mtime


class StackWriter:
    """A hook of the recorder: looks for requests, one `stat` each time.

    Args:
        run: directory.
        rank, worker: of this process.
    """

    def __init__(self, run: Path, rank: int, worker: int = 0) -> None:
        directory = telemetry_directory(run)
        more = f".worker-{worker:03d}" if worker else ""
        self._request, self._path = (
            directory / "stacks.request",
            directory / f"rank-{rank:05d}{more}.stacks.txt",
        )
        self._seen = self._requested()

    def __call__(self, record: Record) -> None:
        """Write the stacks if they were asked for since the last time."""
        asked = self._requested()
        if asked > self._seen:
            self._seen = asked
            self.write()

    def write(self) -> None:
        """Write them now, in place of older ones."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(stacks_text(), encoding="utf-8")
        temporary.replace(self._path)

    def _requested(self) -> float:
        try:
            return self._request.stat().st_mtime
        except OSError:
            return 0.0
