"""Watches a live run from inside one of its processes: records, stacks, anomalies, health."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from shardkit.errors import StoreError
from shardkit.telemetry.anomalies import AnomalyWatch
from shardkit.telemetry.recorder import EventLog, Recorder, StackWriter, Telemetry, TelemetrySettings
from shardkit.telemetry.records import Record
from shardkit.telemetry.serving import HealthServer

_BETWEEN_STACKS_S: Final = 60.0


class RunWatch:
    """What runs beside a loader in one process, on one thread that sleeps.

    Args:
        run: directory.
        telemetry: polled.
        settings: see there.
        events: of the run.
        more_hooks: such as the control file's.
    """

    def __init__(
        self,
        run: Path,
        telemetry: Telemetry,
        settings: TelemetrySettings,
        events: EventLog,
        more_hooks: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self._stacks = StackWriter(run, telemetry.rank, telemetry.worker)
        self._stalls, self._next_stacks = 0.0, 0.0
        hooks: list[Callable[[Record], None]] = [self._stacks, self._note_stalls]
        if telemetry.rank == 0 and telemetry.worker == 0:
            hooks.append(AnomalyWatch(run, events.record))
        hooks += more_hooks
        self._server: HealthServer | None = None
        if settings.listen is not None and telemetry.worker == 0 and os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                self._server = HealthServer(run, settings.listen)
            except StoreError as error:  # another run of this node has it: no reason to end the training
                events.record("health_not_served", reason=str(error))
        self._recorder = Recorder(telemetry, run, settings, hooks)

    @property
    def port(self) -> int | None:
        """Where /metrics and /healthz are served."""
        return None if self._server is None else self._server.port

    def _note_stalls(self, record: Record) -> None:
        """The watchdog has spoken since the last record: write what every thread is doing."""
        stalls, self._stalls = self._stalls, record.value("loader.stalls")
        if self._stalls > stalls and time.monotonic() >= self._next_stacks:
            self._next_stacks = time.monotonic() + _BETWEEN_STACKS_S
            self._stacks.write()

    def close(self) -> None:
        """Write the last record, stop; may be called twice."""
        self._recorder.close()
        server, self._server = self._server, None
        if server is not None:
            server.close()
