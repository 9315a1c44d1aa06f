"""What went other than planned, as JSON lines in the run directory (DESIGN §7.3)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from shardkit.errors import StoreError

__all__ = ["EventLog"]


class EventLog:
    """Appends to `events.jsonl`; made on the first event. One write per line, so that ranks may share the file."""

    def __init__(self, directory: Path | None, rank: int) -> None:
        self._directory, self._rank = directory, rank

    def record(self, kind: str, **details: object) -> None:
        """Append one event; nothing where the loader has no run directory.

        Raises:
            StoreError: the run directory cannot be written.
        """
        if self._directory is None:
            return
        line = {"time": round(time.time(), 3), "event": kind, "rank": self._rank, **details}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(self._directory / "events.jsonl", flags, 0o644)
            try:
                os.write(descriptor, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(
                f"events in {self._directory} cannot be written: {error.strerror}; make room and resume"
            ) from error
