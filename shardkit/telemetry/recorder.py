"""Writes a registry's records to the run directory, as its heartbeat, on a thread of its own (SPEC.md §2)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardkit.ranges import Range
from shardkit.telemetry.records import MAX_LINE_BYTES, Record
from shardkit.telemetry.registry import Telemetry

__all__ = ["Recorder", "TelemetrySettings", "record_path", "telemetry_directory"]


@dataclass(frozen=True, kw_only=True)
class TelemetrySettings:
    """How a run is watched.

    Attributes:
        interval_s: seconds between records.
        most_bytes: of one file; a rank keeps up to two.
        listen: ``host:port`` for /metrics and /healthz of this node, served by its first rank; None: nowhere.
        control: heed `RUN/control.toml`.
    """

    interval_s: float = 2.0
    most_bytes: int = 4 << 20
    listen: str | None = None
    control: bool = True

    def __post_init__(self) -> None:
        Range(0.01, 86_400).check("interval_s", self.interval_s, float)
        Range(MAX_LINE_BYTES, 1 << 40).check("most_bytes", self.most_bytes)


def telemetry_directory(run: Path) -> Path:
    """Where a run's records lie."""
    return run / "telemetry"


def record_path(run: Path, rank: int, worker: int = 0) -> Path:
    """The file of one rank (or one further worker of it)."""
    more = f".worker-{worker:03d}" if worker else ""
    return telemetry_directory(run) / f"rank-{rank:05d}{more}.jsonl"


class Recorder:
    """One thread that polls, writes and calls hooks; made where a run begins, closed where it ends.

    What goes wrong with a file or a hook stops that record only: nothing that watches may stop what is watched.

    Args:
        telemetry: polled.
        run: directory.
        settings: see there.
        hooks: called with each record after it is written.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        run: Path,
        settings: TelemetrySettings,
        hooks: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self._telemetry, self._settings, self._hooks = telemetry, settings, tuple(hooks)
        self._path = record_path(run, telemetry.rank, telemetry.worker)
        self._process = os.getpid()
        self._closing = threading.Event()
        self._write_lock = threading.RLock()  # its own thread may end it, by a collection of garbage
        self._failures = 0
        telemetry.add_source("recorder", lambda: {"failures": float(self._failures)})
        self._thread = threading.Thread(target=self._run, name="shardkit-telemetry", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file that grows."""
        return self._path

    def close(self) -> None:
        """Write the last record and join; may be called twice, and in a forked child does nothing."""
        if self._process != os.getpid() or self._closing.is_set():
            return
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._record("ended")

    def _run(self) -> None:
        self._record("running")
        while not self._closing.wait(self._settings.interval_s):
            record = self._record("running")
            for hook in self._hooks:
                if self._closing.is_set():
                    return
                try:
                    hook(record)
                except Exception:  # noqa: BLE001  a rule that fails must not end the heartbeat
                    self._failures += 1

    def _record(self, state: str) -> Record:
        record = self._telemetry.read(state=state, interval_s=self._settings.interval_s)
        try:
            with self._write_lock:
                self._append(record.to_line())
        except OSError:
            self._failures += 1  # a full disk stops the telemetry, not the training
        return record

    def _append(self, line: bytes) -> None:
        """One write; opened anew each time, because others may move or delete the file of a run."""
        if len(line) > MAX_LINE_BYTES:
            self._failures += 1
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a kill has torn the last one
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if size + len(line) > self._settings.most_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
