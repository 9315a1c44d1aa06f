"""One reader in a process of its own: told on stdin what to do, answers on stdout with one JSON line each.

    python worker.py JOB       JOB: JSON of `processes.Job`

Commands: build; prepare (all before the first batch); first (the first batch); epoch MODE SECONDS. The peers'
environment has no shardkit: of this tree it sees only modules that import nothing of it.
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

sys.path[0] = str(Path(__file__).parents[2])  # and not this folder, whose modules would hide others
from bench.reading.samples import MODES, find  # noqa: E402

warnings.filterwarnings("ignore")


def main() -> None:
    """Answer commands until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
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
    """The commands, over one reader."""

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
        """Open the reader; returns what it says of itself."""
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
        """Up to the first batch: seconds since the process was started, imports included."""
        self.prepare()
        MODES["touched"](next(iter(self.reader.epoch())))
        return {"seconds": time.perf_counter() - self.job["started"]}  # one clock for all processes

    def epoch(self, mode: str, seconds: str) -> dict[str, Any]:
        """Read every sample once, or what `seconds` allow; CPU time is counted from the end of the epoch before."""
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
        del batches  # ends workers, whose CPU time counts only then
        cpu_s, self.cpu_s = -self.cpu_s, _cpu()
        between = sorted(waits[1:]) or waits  # the first one is the start of the epoch
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
    """Most resident memory that this process has had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _cpu() -> float:
    """CPU seconds of this process, of its children that have ended, and of those that go on."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = sum(usage.ru_utime + usage.ru_stime for usage in used)
    return ended + sum(_ticks()) / os.sysconf("SC_CLK_TCK")


def _ticks() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        try:
            for child in path.read_text().split():
                fields = (
                    Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                )  # from the third, proc(5)
                yield sum(map(int, fields[11:15]))  # of the process, and of its own children that have ended
        except OSError:  # it has ended meanwhile
            continue


if __name__ == "__main__":
    main()
