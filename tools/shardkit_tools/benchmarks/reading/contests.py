"""Reading, shuffled, every sample touched: the limit, shardkit and the peers, a process each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shardkit.errors import RunError
from shardkit_tools.benchmarks.reading.limits import limits, yardstick_of
from shardkit_tools.benchmarks.reading.readers import PEER_NAMES, Reader, build_data
from shardkit_tools.benchmarks.reading.workloads import Workload
from shardkit_tools.benchmarks.rounds import Contest, Entry, Round

__all__ = ["read_contest"]


@contextlib.contextmanager
def read_contest(
    workload: Workload, scale: float, scratch: Path, peers_python: str | None, told: Callable[[str], None]
) -> Iterator[Contest]:
    """A contest over one workload; its readers run while the context lasts.

    Args:
        workload: what is read.
        scale: share of its stated rows.
        scratch: the readers' data lie below it; the caller removes it.
        peers_python: interpreter that has the peers, or None.
        told: called with what is going on.
    """
    own = {"shardkit_reader": sys.executable}
    peers = dict.fromkeys(PEER_NAMES, peers_python) if peers_python is not None else {}
    told(f"read {workload.name}: making data")
    failed = build_data(
        workload,
        scale,
        scratch,
        {**own, **peers, "memmap": sys.executable},  # the limits read the memory map's file
        lambda line: None,
    )
    if "memmap" in failed:
        raise RunError(f"read {workload.name}: the samples could not be written: {failed['memmap']}")
    yardstick = yardstick_of(workload.name)
    limit = limits(workload, scale, str(scratch / "memmap"))[yardstick]

    def limit_round() -> Round:
        found = limit()
        return Round(found["samples"], found["seconds"], found["cpu_s"])

    with contextlib.ExitStack() as running:
        entries = [Entry(yardstick, "limit", limit_round)]
        failures: dict[str, str] = {}
        for name, python in {**own, **peers}.items():
            label = PEER_NAMES.get(name, "shardkit")
            told(f"read {workload.name}: {label} starts")
            if name in failed:
                failures[label] = failed[name]
            else:
                reader = running.enter_context(Reader(name, workload, scale, scratch, 0, python))
                opened = reader.ask("open")
                if "error" in opened:
                    failures[label] = opened["error"]
                entries.append(Entry(label, "peer" if name in PEER_NAMES else "shardkit", _epoch(reader)))
        yield Contest(
            f"read {workload.name}",
            {"rows": workload.rows(scale), "batch": workload.batch},
            entries,
            failures,
        )


def _epoch(reader: Reader) -> Callable[[], Round]:
    def run() -> Round:
        answer = reader.ask("epoch")
        if "error" in answer:
            raise RunError(str(answer["error"]))
        return Round(answer["samples"], answer["seconds"], answer["cpu_s"])

    return run
