"""What went other than planned while blocks were read, as events of the ledger: few, however long an outage lasts."""

from __future__ import annotations

import threading
from typing import Final

from shardkit.ledger import Journal
from shardkit.reading.detours import Detour

__all__ = ["ReadEvents"]

_JOURNALED: Final = {
    "failovers": "failover",
    "mismatches": "mismatch",
    "missing": "missing",
    "rebuilt": "rebuild",
    "healed": "repair",
    "heal_failed": "repair_failed",
    "circuit_opened": "location_lost",
    "circuit_closed": "location_back",
}
_STEPS: Final = 64  # between two entries of one kind and location


class ReadEvents:
    """Counts detours by kind and location; `flush` journals the first at once, the following ones by the dozen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # detours come from the threads that read
        self._waiting: dict[tuple[str, str], tuple[int, str]] = {}  # count, the first object
        self._written: dict[tuple[str, str], int] = {}

    def note(self, detour: Detour) -> None:
        """Remember a detour."""
        kind = _JOURNALED.get(detour.kind)
        if kind is None:
            return
        key = (kind, detour.location)
        with self._lock:
            count, what = self._waiting.get(key, (0, str(detour.details.get("what", ""))))
            self._waiting[key] = (count + 1, what)

    def flush(self, step: int, journal: Journal, *, everything: bool = False) -> None:
        """Journal what waits and is due, as of `step`."""
        if not self._waiting:
            return
        with self._lock:
            due = [
                key
                for key in self._waiting
                if everything or step - self._written.get(key, step - _STEPS) >= _STEPS
            ]
            entries = [(key, self._waiting.pop(key)) for key in sorted(due)]
            self._written |= dict.fromkeys(due, step)
        for (kind, location), (count, what) in entries:
            journal.event(step, kind, location=location, count=count, what=what)
