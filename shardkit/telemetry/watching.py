"""The rules of a live run, told as events: one when an anomaly is first found, one when it is over (SPEC.md §6)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from shardkit.telemetry.anomalies import Anomaly, find_anomalies
from shardkit.telemetry.reading import read_run
from shardkit.telemetry.records import Record

__all__ = ["AnomalyWatch"]

_LOOK_INTERVALS: Final = 5
_SHARE_OF_TIME: Final = 1 / 200
_TAIL_BYTES: Final = 64 << 10
_OWN_RECORDS: Final = 400
_MOST_TOLD: Final = 8  # of one kind at a time: a switch that fails stalls a thousand ranks


class AnomalyWatch:
    """A hook of rank 0's recorder.

    Args:
        run: directory, where the other ranks' records are.
        record_event: appends an event to the run.
        on_open: called with each newly found anomaly.
    """

    def __init__(
        self, run: Path, record_event: Callable[..., None], on_open: Callable[[Anomaly], None] | None = None
    ) -> None:
        self._run, self._record_event, self._on_open = run, record_event, on_open
        self._own: deque[Record] = deque(maxlen=_OWN_RECORDS)
        self._open: dict[tuple[str, int], tuple[Anomaly, float]] = {}
        self._looked = self._next_look = 0.0

    @property
    def open(self) -> list[Anomaly]:
        """What is found now."""
        return [anomaly for anomaly, _ in self._open.values()]

    def __call__(self, record: Record) -> None:
        """Keep the record; look, if it is time to."""
        self._own.append(record)
        started = time.monotonic()
        if started < self._next_look:
            return
        ranks: dict[int, Sequence[Record]] = dict(read_run(self._run, tail_bytes=_TAIL_BYTES).ranks)
        ranks[record.rank] = list(self._own)
        self.settle(find_anomalies(ranks, record.time), record.time)
        took = time.monotonic() - started
        self._next_look = started + max(_LOOK_INTERVALS * record.interval_s, took / _SHARE_OF_TIME)

    def settle(self, found: Sequence[Anomaly], now: float) -> None:
        """Tell what is new and what is over."""
        present = {anomaly.key: anomaly for anomaly in found}
        told: Counter[str] = Counter()
        for key, anomaly in present.items():
            if key not in self._open and told[anomaly.kind] < _MOST_TOLD:  # the others at the next look
                told[anomaly.kind] += 1
                self._open[key] = (anomaly, now)
                self._record_event("anomaly", **_details(anomaly))
                if self._on_open is not None:
                    self._on_open(anomaly)
        for key in [key for key in self._open if key not in present]:
            anomaly, since = self._open.pop(key)
            self._record_event(
                "anomaly_over", anomaly=anomaly.kind, rank=anomaly.rank, seconds=round(now - since, 1)
            )


def _details(anomaly: Anomaly) -> dict[str, Any]:
    details = anomaly.to_json()
    return {"anomaly": details.pop("kind"), **details}
