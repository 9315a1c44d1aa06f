"""All benchmarks of `shardkit bench`, one after the other, at one scale; and on what machine they ran."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import shardkit
from shardkit.errors import ShardkitError, UsageError
from shardkit.plan import Population, make_plan
from shardkit_tools.benchmarks.reducing import reduce_contest
from shardkit_tools.benchmarks.results import FORMAT, Contest, Entry, Result, Round, hold, ratios_of, timed
from shardkit_tools.benchmarks.workloads import (
    WORKLOADS,
    Workload,
    open_limit,
    touch,
    write_rows,
)
from shardkit_tools.building.build_run import build
from shardkit_tools.installed import installed
from shardkit_tools.simulation.reading import spread_population


@contextlib.contextmanager
def read_contest(workload: Workload, scale: float, scratch: Path) -> Iterator[Contest]:
    """A contest over one workload; the loader is open while the context lasts."""
    write_rows(workload, scale, str(scratch / "rows"))
    write_dataset(workload, scale, scratch / "shardkit")
    rows, limit, epochs = workload.rows(scale), open_limit(workload, str(scratch / "rows")), itertools.count()
    ds = shardkit.open(scratch / "shardkit")
    with ds.loader(ds.plan(global_batch=workload.batch), tensors=False) as loader:
        yield Contest(
            f"read {workload.name}",
            {"rows": rows, "batch": workload.batch},
            [
                Entry(workload.limit, "limit", lambda: _epoch(rows, limit(next(epochs)))),
                Entry("shardkit", "shardkit", lambda: _epoch(rows, (b[workload.field] for b in loader))),
            ],
        )


def _epoch(rows: int, values: Iterable[Any]) -> Round:
    def work() -> None:
        for value in values:
            touch(value)

    return timed(rows, work)


def write_dataset(
    workload: Workload, scale: float, root: str | os.PathLike[str], **settings: Any
) -> shardkit.Dataset:
    """Write a workload: Arrow shards, tar for blobs, zstd for text; ``settings`` are those of `shardkit.create`."""
    kind = {"": "bytes", "str": "str"}.get(workload.dtype)
    kind = kind or f"{workload.dtype}[{','.join(map(str, workload.shape))}]"
    schema = {workload.field: kind} | ({"label": "int64"} if workload.label else {})
    form: Any = "arrow" if workload.shape or workload.compressed else "tar"
    with shardkit.create(root, schema, format=form, compression="zstd" if workload.compressed else "none",
                         **settings) as writer:  # fmt: skip
        for sample in workload.samples(scale):
            writer.add(sample)
    return shardkit.open(root)


TOKENS = 2048
_PIECE = 1 << 20
_FULL_MEGABYTES = 1600


def make_tokens(path: Path, megabytes: int) -> int:
    """Write an ``.npy`` of int32[2048] rows; returns its bytes of tokens."""
    rows = max(1, megabytes * 1_000_000 // (4 * TOKENS))
    array = np.lib.format.open_memmap(path, "w+", np.int32, (rows, TOKENS))
    for start in range(0, rows, 4096):
        random = np.random.default_rng(start)
        array[start : start + 4096] = random.integers(0, 50_000, (min(4096, rows - start), TOKENS))
    array.flush()
    return rows * 4 * TOKENS


def write_limit(path: Path, size: int) -> Round:
    """Write that many bytes with SHA-256 and XXH3, synced; bytes are the amount."""
    piece = np.random.default_rng(2).bytes(_PIECE)
    os.sync()  # what was written before is not on this bill

    def work() -> None:
        with path.open("wb") as stream:
            for first in range(0, size, _PIECE):
                part = memoryview(piece)[: size - first]
                stream.write(part)
                hashlib.sha256(part).digest()
                xxhash.xxh3_64_intdigest(part)
            stream.flush()
            os.fsync(stream.fileno())

    try:
        return timed(size, work)
    finally:
        path.unlink(missing_ok=True)


def build_round(source: Path, size: int, root: Path, form: str, jobs: int) -> Round:
    """Build a root and remove it again; bytes of the source are the amount."""
    os.sync()
    try:
        return timed(size, lambda: build(str(source), root, format=form, jobs=jobs))
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def build_contest(scale: float, scratch: Path) -> Iterator[Contest]:
    """Token rows of 8 KiB into arrow and tar shards, one process."""
    source = scratch / "tokens.npy"
    size = make_tokens(source, max(16, int(_FULL_MEGABYTES * scale)))

    def building(form: str) -> Callable[[], Round]:
        return lambda: build_round(source, size, scratch / f"root-{form}", form, 1)

    yield Contest(
        "build tokens",
        {"bytes": size},
        [
            Entry("write + SHA-256 + XXH3, synced", "limit", lambda: write_limit(scratch / "limit", size)),
            Entry("shardkit arrow", "shardkit", building("arrow")),
            Entry("shardkit tar", "shardkit", building("tar")),
        ],
    )


_ROWS, _BATCH, _SHARD_ROWS = 10**7, 4096, 5000


def resume(population: Population, batch: int, lanes: int) -> Round:
    """Plan, and draw the cells of a step at 90 % of the epoch for the first ``lanes`` lanes."""

    def work() -> None:
        plan = make_plan(population, global_batch=batch)
        step = int(plan.loop_steps * 0.9)
        plan.steps(step, step + 1, range(lanes))

    return timed(1, work)


@contextlib.contextmanager
def plan_contest(scale: float, _scratch: Path) -> Iterator[Contest]:
    """A rank (1 lane of 64) resumes at 90 % of an epoch.

    The limit is one uniform permutation of all rows, which a loader with a full shuffle makes at every start.
    """
    rows = max(100_000, int(_ROWS * scale))
    shards = max(20, rows // _SHARD_ROWS)
    population = spread_population(np.array([rows]), shards, block_rows=64)

    def permute() -> Round:
        return timed(1, lambda: np.random.default_rng(0).permutation(rows))

    entries = [
        Entry("numpy permutation", "limit", permute),
        Entry("shardkit", "shardkit", lambda: resume(population, _BATCH, 1)),
    ]
    yield Contest("plan resume", {"rows": rows, "batch": _BATCH}, entries)


PARTS = ("read", "build", "plan", "reduce")
"""Of the suite."""

SCALE = 0.02
"""Share of the stated sizes that `shardkit bench` works on by default."""

_ELEMENTS = (1 << 16, 1 << 20)
Told = Callable[[str], None]


def measure(
    parts: Sequence[str],
    *,
    scale: float = SCALE,
    repeats: int = 5,
    scratch: str | None = None,
    told: Told = lambda text: None,
) -> Result:
    """Run benchmarks."""
    found = Result(shardkit_bench=FORMAT, facts={
        **machine_facts(), "parts": list(parts), "scale": scale, "repeats": repeats,
        "load_before": round(os.getloadavg()[0], 1),
    }, ratios=[], failures={}, rates={})  # fmt: skip
    with _scratch(scratch) as folder:
        for name, making in _contests(parts, scale):
            told(f"{name}: making data")
            try:  # what cannot be measured here is noted, and the others go on
                with tempfile.TemporaryDirectory(dir=folder) as place, making(Path(place)) as contest:
                    held = hold(contest, repeats, told)
            except (ShardkitError, OSError) as error:
                found["failures"][name] = str(error)
                continue
            found["ratios"] += ratios_of(held)
            found["rates"][held.name] = {
                entry: [list(astuple(one)) for one in rounds] for entry, rounds in held.rounds.items()
            }
            found["failures"] |= {f"{held.name}: {entry}": text for entry, text in held.failures.items()}
    found["facts"]["load_after"] = round(os.getloadavg()[0], 1)
    return found


Making = Callable[[Path], AbstractContextManager[Contest]]


def _contests(parts: Sequence[str], scale: float) -> list[tuple[str, Making]]:
    """Names and contests; one begins when its context, made of a folder for its data, is entered."""
    found: dict[str, list[tuple[str, Making]]] = {
        "read": [
            (f"read {name}", partial(read_contest, workload, scale)) for name, workload in WORKLOADS.items()
        ],
        "build": [("build tokens", partial(build_contest, scale))],
        "plan": [("plan resume", partial(plan_contest, scale))],
        "reduce": [(f"reduce {elements:,}", partial(reduce_contest, elements)) for elements in _ELEMENTS],
    }
    return [contest for part in parts for contest in found[part]]


def _scratch(given: str | None) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="shardkit-bench-", dir=given)
    except OSError as error:
        raise UsageError(
            f"--scratch {given}: {error.strerror}; expected a folder on the disk to be measured"
        ) from None


_PACKAGES = ("shardkit", "torch", "torchvision", "numpy", "pyarrow", "zstandard", "pillow")


def machine_facts() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "processor": _processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": installed(_PACKAGES),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
