"""One reader in a process of its own: told on stdin what to do, answers on stdout with one JSON line each.

python worker.py READER WORKLOAD SCALE DIRECTORY WORKERS — commands: build, open, epoch [SECONDS], resume [SECONDS],
verified, unverified, end. An epoch is left after so many seconds; a position to resume from is sought no longer.
A reader is a module of the folder peers. The package around this file is loaded by its place, under another name: the
peers' environment has no shardkit, and must not see ours.
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()

import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
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


def load_package() -> None:
    """Make the folder of this file importable as `readers`."""
    folder = Path(__file__).parent
    spec = importlib.util.spec_from_file_location(
        "readers", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["readers"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    sys.path[:] = [path for path in sys.path if path != str(folder)]  # our `limits` must not hide another one


load_package()  # here and not in main: processes that a reader spawns import this file, and unpickle its classes


def main() -> None:
    """Answer commands until there are no more."""
    workloads = importlib.import_module("readers.workloads")
    name, workload_name, scale, directory, workers = sys.argv[1:]
    session = Session(name, workloads.find(workload_name), float(scale), directory, int(workers))
    session.touch = workloads.touch
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "end":
            break
        try:
            answer = getattr(session, command)(*map(float, arguments))
        except Exception as error:  # noqa: BLE001  a reader that fails is a line of the result
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        OUT.write(json.dumps(answer) + "\n")
        OUT.flush()
    os._exit(0)  # some readers' threads never end


class Session:
    """The commands, over one reader."""

    touch: Callable[[Any], int]

    def __init__(self, name: str, workload: Any, scale: float, directory: str, workers: int) -> None:
        self.name, self.workload, self.scale, self.directory, self.workers = (
            name,
            workload,
            scale,
            directory,
            workers,
        )
        self.reader: Any = None

    def build(self) -> dict[str, Any]:
        """Write the reader's data."""
        shutil.rmtree(self.directory, ignore_errors=True)
        started = time.perf_counter()
        self._module().build(self.workload, self.scale, self.directory)
        return {"seconds": time.perf_counter() - started}

    def open(self) -> dict[str, Any]:
        """Up to the first batch: how long it took since the process began, and past the import of torch."""
        module, torch_s = self._module(), 0.0
        if getattr(module, "TORCH", True) or self.workers:
            began = time.perf_counter()
            importlib.import_module("torch")
            torch_s = time.perf_counter() - began
        self.reader = module.open_reader(self.workload, self.scale, self.directory, self.workers)
        self.touch(next(iter(self.reader.epoch())))
        seconds = time.perf_counter() - STARTED
        return {"first_batch_s": seconds, "past_torch_s": seconds - torch_s}

    def epoch(self, seconds: float = math.inf) -> dict[str, Any]:
        """Read every sample once, or what `seconds` allow."""
        warm(self.directory)
        batches = iter(self.reader.epoch())
        cpu, started, count, elapsed = _cpu(), time.perf_counter(), 0, 0.0
        for batch in batches:
            count += self.touch(batch)
            elapsed = time.perf_counter() - started
            if elapsed > seconds:
                break
        whole = elapsed <= seconds
        if whole:
            elapsed = time.perf_counter() - started
        batch = None
        del batches  # ends workers, whose CPU time counts only then
        return {"samples": count, "seconds": elapsed, "cpu_s": _cpu() - cpu, "whole": whole,
                "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}  # fmt: skip

    def resume(self, seconds: float = math.inf) -> dict[str, Any]:
        """Half an epoch in: how long a reader takes from a position to the batch there; {} where it cannot."""
        if not hasattr(self.reader, "resume"):
            return {}
        walked: list[int] = []
        half = self.workload.rows(self.scale) // self.workload.batch // 2
        position = self.reader.position(_countdown(half, seconds, walked))
        started = time.perf_counter()
        self.touch(next(iter(self.reader.resume(position))))
        return {"seconds": time.perf_counter() - started, "at": 0.5 * len(walked) / half if walked else 0.5}

    def verified(self) -> dict[str, Any]:
        """Epochs from now on verify what they read; only for our own reader."""
        self.reader.verify(True)
        return {}

    def unverified(self) -> dict[str, Any]:
        """Epochs from now on do not."""
        self.reader.verify(False)
        return {}

    def _module(self) -> Any:
        return importlib.import_module(f"readers.peers.{self.name}")


def _countdown(steps: int, seconds: float, walked: list[int]) -> Iterator[int]:
    """`steps` numbers, fewer where `seconds` are over; `walked` gets each."""
    started = time.perf_counter()
    for step in range(steps):
        if time.perf_counter() - started > seconds:
            return
        walked.append(step)
        yield step


def _cpu() -> float:
    """CPU seconds of this process, of its children that have ended, and of those that go on."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return ended + sum(_ticks(os.getpid())) / os.sysconf("SC_CLK_TCK")


def _ticks(parent: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # from the third field on, proc(5)
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield sum(map(int, fields[11:15]))  # of the process, and of its own children that have ended


if __name__ == "__main__":
    main()
