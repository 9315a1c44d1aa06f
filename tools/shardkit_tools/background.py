"""Background work on the command line: how fast, when, progress, and Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from shardkit.copies.replicating.pacing import Hours, Pace, parse_bandwidth
from shardkit_tools.console import StatusLine, bytes_text, count_text, duration_text

__all__ = ["Work", "running"]

_LINE_EVERY_S = 30.0


class Work:
    """What a command hands to the library; made by `running`."""

    def __init__(self, bandwidth: str | None, between: str | None) -> None:
        self._status = StatusLine()
        self._began = self._told = time.monotonic()
        self.pace = Pace(
            parse_bandwidth(bandwidth) if bandwidth else None,
            Hours.parse(between) if between else None,
            waiting=self._waiting,
        )

    def report(self, objects: int, all_objects: int, done_bytes: int, all_bytes: int) -> None:
        """Progress of copying: a line that is kept up to date on a terminal, one now and then elsewhere."""
        passed = time.monotonic() - self._began
        rate = f", {bytes_text(int(done_bytes / passed))}/s" if passed > 1 else ""
        self._say(
            f"copied {objects:,} of {count_text(all_objects, 'object')}, {bytes_text(done_bytes)} of "
            f"{bytes_text(all_bytes)}{rate}"
        )

    def tell(self, what: str, done: int, total: int) -> None:
        """Progress of looking at copies, likewise."""
        self._say(f"{what} {done:,} of {count_text(total)} {'copy' if total == 1 else 'copies'}")

    def clear(self) -> None:
        """Take the line away."""
        self._status.clear()

    def _waiting(self, seconds: int) -> None:
        self._say(f"waiting {duration_text(seconds)} for the hours of --between; Ctrl-C ends")

    def _say(self, text: str) -> None:
        self._status.show(text)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._told >= _LINE_EVERY_S:
            self._told = now
            sys.stderr.write(f"{text}\n")


@contextlib.contextmanager
def running(bandwidth: str | None = None, between: str | None = None) -> Iterator[Work]:
    """Work that can be seen and interrupted.

    Raises:
        KeyboardInterrupt: after Ctrl-C, and says how to go on.
    """
    work = Work(bandwidth, between)
    try:
        yield work
    except KeyboardInterrupt:
        work.pace.stop()
        work.clear()
        raise KeyboardInterrupt("interrupted; the same command goes on where it stood") from None
    finally:
        work.clear()
