"""Run one reader: take commands from stdin, and answer each with one JSON line on stdout.

    python worker.py JOB       JOB: JSON of `processes.Job`

Commands: build; prepare (all before the first batch); first (the first batch); epoch MODE SECONDS. The peers'
environment has no shardkit, so this module imports only modules of this tree that do not import shardkit.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).parents[2])  # replaces this folder, whose modules would shadow others
from bench.reading.samples import MODES, find  # noqa: E402

warnings.filterwarnings("ignore")


def main() -> None:
    """Answer commands until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    session = Session(json.loads(sys.argv[1]))
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            answer = getattr(session, command)(*arguments)
        except Exception as error:  # noqa: BLE001  a reader that fails is a line of the result
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    os._exit(0)  # some readers' threads never end


class Session:
    """The commands of one reader."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.workload = job, find(job["workload"])
        self.module = importlib.import_module(f"bench.reading.readers.{job['reader']}")
        self.reader: Any = None
        self.cpu_s = 0.0

    def build(self) -> dict[str, Any]:
        """Write the reader's data."""
        shutil.rmtree(self.job["directory"], ignore_errors=True)
        started = time.perf_counter()
        self.module.build(self.workload, self.job["scale"], self.job["directory"])
        return {"seconds": time.perf_counter() - started}

    def prepare(self) -> dict[str, Any]:
        """Open the reader; return its facts."""
        self.reader = self.module.open_reader(
            self.workload,
            self.job["scale"],
            self.job["directory"],
            self.job["workers"],
            **self.job["settings"],
        )
        self.cpu_s = _cpu()
        return dict(getattr(self.reader, "facts", {}))

    def first(self) -> dict[str, Any]:
        """Read the first batch; return the seconds since the process was started, imports included."""
        self.prepare()
        MODES["touched"](next(iter(self.reader.epoch())))
        return {"seconds": time.perf_counter() - self.job["started"]}  # one clock for all processes

    def epoch(self, mode: str, seconds: str) -> dict[str, Any]:
        """Read every sample once, for at most `seconds`; CPU time counts from the end of the previous epoch."""
        look, limit, clock = MODES[mode], float(seconds), time.perf_counter
        count, waits = 0, []
        started = asked = clock()
        batches = iter(self.reader.epoch())
        for batch in batches:
            waits.append((got := clock()) - asked)
            count += look(batch)
            asked = clock()
            if got - started > limit:
                break
        else:
            asked = clock()
        elapsed = asked - started
        batch = None
        del batches  # ends workers, because their CPU time counts only afterwards
        cpu_s, self.cpu_s = -self.cpu_s, _cpu()
        between = sorted(waits[1:]) or waits  # the first wait is the start of the epoch
        return {
            "samples": count,
            "seconds": elapsed,
            "cpu_s": cpu_s + self.cpu_s,
            "whole": elapsed <= limit,
            "start_s": waits[0],
            "longest_s": between[-1],
            "p999_s": between[int(0.999 * (len(between) - 1))],
            "peak": _peak_bytes(),
        }


def _peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _cpu() -> float:
    """Return the CPU seconds of this process and of its ended and running children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return ended + sum(_ticks()) / os.sysconf("SC_CLK_TCK")


def _ticks() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            for child in path.read_text().split():
                fields = (
                    Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                )  # from field 3, proc(5)
                yield sum(map(int, fields[11:15]))  # the child and its own ended children
        except OSError:  # the process has ended
            continue


if __name__ == "__main__":
    main()
