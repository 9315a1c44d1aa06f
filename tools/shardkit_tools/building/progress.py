"""How far a build is, for whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Progress", "ProgressCallback", "ProgressMeter"]

_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Progress:
    """A moment of a build.

    Attributes:
        phase: "read" (source to scratch), "pack" (documents to rows), "write" (scratch to shards), "commit".
        rows: rows done in this phase, those of an earlier, killed run included.
        done_bytes: bytes done in this phase: of the source while reading, of the rows while writing.
        total_bytes: bytes of this phase.
        seconds: since this phase began in this run.
        rate: bytes per second since then, work of earlier runs not counted.
        scratch_bytes: estimate of the scratch space that the build takes.
        reused: finished units (tasks or shards) of an earlier, killed run.
    """

    phase: Literal["read", "pack", "write", "commit"]
    rows: int
    done_bytes: int
    total_bytes: int
    seconds: float
    rate: float
    scratch_bytes: int
    reused: int

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None while there is none."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None


ProgressCallback = Callable[[Progress], None]
"""Is told how far a build is."""


class ProgressMeter:
    """Adds up what workers report and tells a callback, ten times a second at most."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._phase: Literal["read", "pack", "write", "commit"] = "read"
        self._scratch_bytes = 0
        self._begin("read", 0, 0, 0, 0)

    def begin(
        self,
        phase: Literal["read", "pack", "write", "commit"],
        *,
        total_bytes: int = 0,
        done_rows: int = 0,
        done_bytes: int = 0,
        reused: int = 0,
        scratch_bytes: int | None = None,
    ) -> None:
        """Start a phase, with what an earlier run has done of it."""
        if scratch_bytes is not None:
            self._scratch_bytes = scratch_bytes
        self._begin(phase, total_bytes, done_rows, done_bytes, reused)
        self._tell(force=True)

    def add(self, rows: int, size: int) -> None:
        """Work was done."""
        self._rows += rows
        self._done_bytes += size
        self._tell()

    def end(self) -> None:
        """The phase is over."""
        self._done_bytes = self._total_bytes
        self._tell(force=True)

    def _begin(
        self,
        phase: Literal["read", "pack", "write", "commit"],
        total_bytes: int,
        rows: int,
        done_bytes: int,
        reused: int,
    ) -> None:
        self._phase = phase
        self._total_bytes = total_bytes
        self._rows = rows
        self._done_bytes = self._before = done_bytes
        self._reused = reused
        self._started = time.monotonic()
        self._told = 0.0

    def _tell(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if self._callback is None or (not force and now - self._told < _INTERVAL_S):
            return
        self._told = now
        seconds = now - self._started
        self._callback(
            Progress(
                phase=self._phase,
                rows=self._rows,
                done_bytes=self._done_bytes,
                total_bytes=self._total_bytes,
                seconds=seconds,
                rate=(self._done_bytes - self._before) / seconds if seconds > 0 else 0.0,
                scratch_bytes=self._scratch_bytes,
                reused=self._reused,
            )
        )
