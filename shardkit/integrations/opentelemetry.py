"""Metrics of a loader or a run for OpenTelemetry, with the names that Prometheus gets.

Example::

    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())]))
    observe(loader)         # or observe("runs/a"), in any process that sees the run directory
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardkit.errors import MissingDependency
from shardkit.extras import install_command
from shardkit.loader import Loader
from shardkit.telemetry.records import NEWEST_BYTES, Record, read_run
from shardkit.telemetry.serving import METRICS, Metric, newest_records

__all__ = ["observe"]


def observe(source: Loader | str | os.PathLike[str], *, provider: Any = None) -> None:
    """Register observable counters and gauges, which the provider's readers poll.

    Attributes of each number are ``rank`` and ``worker``, and the label of the metric, such as ``stage``.

    Args:
        source: ``ds.loader(plan)``, whose rank is observed; or a run directory, whose ranks are all observed.
        provider: MeterProvider; by default the global one.

    Raises:
        MissingDependency: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise MissingDependency(
            f"observe needs opentelemetry-api; run: {install_command('opentelemetry')}"
        ) from error
    meter = metrics.get_meter("shardkit", meter_provider=provider)
    records = _Records(source)
    for metric in METRICS:
        register = meter.create_observable_gauge if metric.gauge else meter.create_observable_counter
        register(metric.name, [_callback(metric, records, metrics.Observation)], description=metric.help)


def _callback(metric: Metric, records: _Records, observation: Any) -> Callable[[Any], Iterator[Any]]:
    def observe_one(_options: Any) -> Iterator[Any]:
        for record in records.of_collection(metric.name):
            for label, value in metric.samples(record):
                attributes = {"rank": record.rank, "worker": record.worker}
                yield observation(value, attributes | ({metric.label: label} if metric.label else {}))

    return observe_one


class _Records:
    """Records of a source, read once per collection."""

    def __init__(self, source: Loader | str | os.PathLike[str]) -> None:
        self._source = source
        self._asked: set[str] = set()
        self._found: Sequence[Record] = ()

    def of_collection(self, name: str) -> Sequence[Record]:
        """Return the records for an instrument; an instrument that asks again begins the next collection."""
        if not self._asked or name in self._asked:
            self._asked.clear()
            if isinstance(self._source, Loader):
                self._found = [self._source.telemetry.read()]
            else:
                self._found = newest_records(read_run(Path(self._source), tail_bytes=NEWEST_BYTES))
        self._asked.add(name)
        return self._found
