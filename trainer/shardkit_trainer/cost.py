"""What a run has cost so far, over restarts: rank-seconds, samples, bytes, dollars, joules (SPEC.md §7)."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.telemetry.reading import read_lines

from .configuration import LogConfig

__all__ = ["Cost", "last_record"]

TAIL_BYTES = 1 << 16  # the last record lies in it


class Cost:
    """Totals of a run, step by step. They go on from the last record of train.jsonl, so a killed process loses a step.

    A second of every rank is paid for, whatever it was spent on: start, evaluation and checkpoints included.

    Args:
        config: with price and power of one rank.
        metrics: train.jsonl, of this and earlier processes.
        started: time.monotonic() since which this process costs.
    """

    def __init__(self, config: LogConfig, metrics: Path, started: float):
        self._config, self.since = config, started
        self.totals: dict[str, float] = {"rank_seconds": 0.0, "samples": 0, "bytes_moved": 0}
        self.totals |= _last_totals(metrics)
        self._bytes_seen = 0

    def step(self, samples: int, bytes_moved: int, ranks: int) -> dict[str, float]:
        """Add what was spent since the last call; returns the step's own share of it.

        Args:
            samples: of the step, over all ranks.
            bytes_moved: by one rank since its process group was formed.
            ranks: that were paid for.
        """
        now = time.monotonic()
        seconds, self.since = (now - self.since) * ranks, now
        moved = (bytes_moved - self._bytes_seen) * ranks
        self._bytes_seen = bytes_moved
        for name, value in (("rank_seconds", seconds), ("samples", samples), ("bytes_moved", moved)):
            self.totals[name] = round(self.totals[name] + value, 6)
        return self._priced(seconds)

    def run(self) -> dict[str, float]:
        """Totals, with dollars and joules where a price and a power are known."""
        return {**self.totals, **self._priced(self.totals["rank_seconds"])}

    def _priced(self, rank_seconds: float) -> dict[str, float]:
        priced = {}
        if self._config.price_per_hour:
            priced["dollars"] = round(self._config.price_per_hour * rank_seconds / 3600, 9)
        if self._config.watts:
            priced["joules"] = round(self._config.watts * rank_seconds, 6)
        return priced


def last_record(metrics: Path) -> dict[str, Any]:
    """Of the latest step in train.jsonl; empty where there is none."""
    for line in reversed(read_lines(metrics, TAIL_BYTES)):
        with suppress(ValueError):
            record: dict[str, Any] = json.loads(line)
            if "total" in record:
                return record  # else an evaluation
    return {}


def _last_totals(metrics: Path) -> dict[str, float]:
    total = last_record(metrics).get("total", {})
    return {name: total[name] for name in ("rank_seconds", "samples", "bytes_moved") if name in total}
