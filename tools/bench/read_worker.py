"""One reader in a process of its own: told on stdin what to do, answers on stdout with one JSON line each.

python read_worker.py READER WORKLOAD SCALE DIRECTORY WORKERS — commands: build, open, epoch, resume, end.
A reader is a module of read_peers with `build(workload, scale, directory)` and
`open_reader(workload, scale, directory, workers)`. What that returns has `epoch()`, an iterator over the main field of
each batch, and perhaps `resume()`, such an iterator from the middle of an epoch on.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

warnings.filterwarnings("ignore")
OUT = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libraries print goes to stderr


def warm(directory: str) -> None:
    """Read every file once, so that all readers start with a warm page cache."""
    buffer = bytearray(1 << 20)
    for path in Path(directory).rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def main() -> None:
    from bench.read_data import WORKLOADS, touch

    name, workload_name, scale, directory, workers = sys.argv[1:]
    workload, module = WORKLOADS[workload_name], None
    reader: Any = None
    for line in sys.stdin:
        command = line.strip()
        answer: dict[str, Any] = {}
        try:
            module = module or importlib.import_module(f"bench.read_peers.{name}")
            if command == "build":
                shutil.rmtree(directory, ignore_errors=True)
                started = time.perf_counter()
                module.build(workload, float(scale), directory)
                answer = {"seconds": time.perf_counter() - started}
            elif command == "open":
                begun = time.perf_counter()
                reader = module.open_reader(workload, float(scale), directory, int(workers))
                touch(next(iter(reader.epoch())))
                ended = time.perf_counter()
                answer = {"first_batch_s": ended - STARTED, "past_import_s": ended - begun}
            elif command == "epoch":
                warm(directory)
                cpu, started, count = _cpu(), time.perf_counter(), 0
                for batch in reader.epoch():
                    count += touch(batch)
                answer = {"samples": count, "seconds": time.perf_counter() - started, "cpu_s": _cpu() - cpu,
                          "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}  # fmt: skip
            elif command == "resume":
                resume = getattr(reader, "resume", None)
                if resume is not None:
                    started = time.perf_counter()
                    touch(next(iter(resume())))
                    answer = {"seconds": time.perf_counter() - started}
            elif command == "end":
                break
        except Exception as error:  # noqa: BLE001  a reader that fails is a line of the result
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()
    os._exit(0)  # some readers' threads never end


def _cpu() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
