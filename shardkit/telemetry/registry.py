"""The sources of one run in one process: named, polled when somebody reads (SPEC.md §1)."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from shardkit.telemetry.records import Record

__all__ = ["Source", "TableSource", "Telemetry"]

Source: TypeAlias = Callable[[], Mapping[str, float]]
"""Gives numbers when it is polled."""

TableSource: TypeAlias = Callable[[], Sequence[Sequence[Any]]]
"""Gives the rows of a short table when it is polled."""


class Telemetry:
    """A registry; it holds functions, no numbers, and starts nothing. Safe from many threads.

    Args:
        rank, world, worker: of this process.
        lanes: gives the lanes that the rank works now.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world: int = 1,
        worker: int = 0,
        lanes: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.rank, self.world, self.worker = rank, world, worker
        self.session = secrets.token_hex(6)
        self._lanes = lanes
        self._lock = threading.RLock()  # its own thread may end it, by a collection of garbage
        self._sources: dict[str, Source] = {"process": _process_numbers}
        self._tables: dict[str, TableSource] = {}
        self._errors = 0

    def add_source(self, name: str, read: Source) -> None:
        """Poll `read` for numbers named ``name.…`` from now on; takes the place of an earlier source of that name."""
        with self._lock:
            self._sources[name] = read

    def add_table(self, name: str, read: TableSource) -> None:
        """Poll `read` for at most 64 rows of texts and numbers."""
        with self._lock:
            self._tables[name] = read

    def remove_source(self, name: str) -> None:
        """Poll it no more; nothing where there is none."""
        with self._lock:
            self._sources.pop(name, None)
            self._tables.pop(name, None)

    def read(self, *, state: str = "running", interval_s: float = 2.0) -> Record:
        """Poll all sources now."""
        with self._lock:
            sources, tables = list(self._sources.items()), list(self._tables.items())
        values: dict[str, float] = {}
        for source, read in sources:
            for name, value in (self._polled(read) or {}).items():
                if math.isfinite(value):
                    values[f"{source}.{name}"] = float(value)
        rows = {name: self._polled(read_rows) or [] for name, read_rows in tables}
        values["telemetry.errors"] = float(self._errors)
        lanes = self._polled(self._lanes) if self._lanes is not None else ()
        return Record(
            time=time.time(), rank=self.rank, world=self.world, worker=self.worker, host=socket.gethostname()[:200],
            pid=os.getpid(), session=self.session, state=state, interval_s=interval_s, lanes=tuple(lanes or ()),
            values=values, tables=rows,
        )  # fmt: skip

    def _polled(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception:  # noqa: BLE001  whoever is watched must not be able to end the watch
            self._errors += 1
            return None


def _process_numbers() -> dict[str, float]:
    used = os.times()
    return {"cpu_s": used.user + used.system, "resident_bytes": float(_resident_bytes())}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0  # no /proc: not Linux
