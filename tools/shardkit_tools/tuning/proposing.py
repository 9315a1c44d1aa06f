"""Derive settings from measurements, as pure functions (SPEC.md §2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
_MOST_ACCUMULATED = 64


@dataclass(frozen=True)
class Machine:
    """Measurements of this machine. Rates are in bytes per second."""

    sequential: float  # rate of sequential disk reads
    random: float  # rate of random disk reads by several threads
    random_bytes: int  # bytes per random read
    gather: Mapping[int, float]  # window in bytes → rate of a random gather in the window
    xxh3: float  # rate of XXH3 on one core
    memory_bytes: int  # memory of the machine


@dataclass(frozen=True)
class Ranges:
    """Measurements of range reads from a store."""

    single_s: Mapping[int, float]  # bytes of a request → median seconds of single requests
    rates: Mapping[tuple[int, int], float]  # (bytes of a request, concurrent requests) → bytes per second
    is_local: bool  # True if the root is a directory

    @property
    def best(self) -> float:
        return max(self.rates.values())

    @property
    def latency_s(self) -> float:
        """Seconds of a request without bytes."""
        return max(1e-6, fit_line(self.single_s)[0])

    @property
    def stream(self) -> float:
        """Bytes per second of one request after the first byte."""
        return 1 / max(1e-12, fit_line(self.single_s)[1])


@dataclass(frozen=True)
class Saving:
    """Measurements of saving a checkpoint, in bytes per second."""

    copy: float  # copying in memory, for which training waits
    write: float  # hashing and durable writing, in the background


@dataclass(frozen=True)
class Needs:
    """Description of the training job."""

    dataset_bytes: int  # stored bytes of the dataset
    lanes: int  # lanes per rank
    ranks: int  # ranks per machine
    nodes: int  # number of machines
    cell_s: float  # seconds of computation per cell
    gradient_bytes: int  # bytes summed by the all-reduce of a step


class Proposal(NamedTuple):
    """A proposed value of a setting."""

    value: int  # bytes, or a count
    why: str  # the measurement that supports it, one line


def propose(
    machine: Machine,
    ranges: Ranges | None,
    reducing: Mapping[int, float] | None,
    needs: Needs,
    saving: Saving | None = None,
) -> dict[str, Proposal]:
    """Return proposals by name of setting, for the settings that the measurements determine (SPEC.md §2).

    Args:
        machine: measurements of the machine.
        ranges: measurements of the store, if any.
        reducing: size in bytes → seconds of an all-reduce, if measured.
        needs: the training job.
        saving: measurements of saving a checkpoint, if any.
    """
    block = _block(machine, ranges)
    remote = ranges if ranges is not None and not ranges.is_local else None
    most_memory = machine.memory_bytes // 8 // max(1, needs.ranks)
    window = _window(machine, remote, block.value, needs, most_memory)
    found = {"block_size": block, "shard_size": _shard(block.value, needs), "window_blocks": window}
    ahead = 0
    if remote is not None:
        found["concurrency"] = concurrency = _concurrency(remote)
        rate = _rate(remote, block.value, concurrency.value)
        ahead = int(2 * remote.latency_s * rate)
        why = f"twice what arrives in {remote.latency_s * 1e3:.1f} ms, the latency, at {rate / 1e6:,.0f} MB/s"
        found["read_ahead"] = Proposal(ahead, why)
    opened = needs.lanes * window.value * block.value
    memory = int(min(most_memory, max(4 * ahead, 2 * opened, 256 * MIB)))
    why = f"open windows of a rank are {opened / MIB:,.0f} MiB; a rank may have {most_memory / MIB:,.0f} MiB"
    found["memory"] = Proposal(memory, why)
    if saving is not None:
        found["checkpoint_every"] = _checkpoint_every(saving, needs)
    return found if reducing is None else found | _reduction(reducing, needs)


def _rate(ranges: Ranges, block: int, concurrency: int) -> float:
    return min(ranges.best, concurrency * block / (ranges.latency_s + block / ranges.stream))


def _concurrency(ranges: Ranges) -> Proposal:
    by_count: dict[int, float] = {}
    for (_, count), rate in ranges.rates.items():
        by_count[count] = max(by_count.get(count, 0.0), rate)
    least = min(count for count, rate in by_count.items() if rate >= 0.9 * ranges.best)
    seen = ", ".join(f"{count}: {rate / 1e6:,.0f}" for count, rate in sorted(by_count.items()))
    return Proposal(least, f"MB/s by requests at a time: {seen}")


def _block(machine: Machine, ranges: Ranges | None) -> Proposal:
    sizes = [128 * KIB << i for i in range(7)]
    if ranges is not None and not ranges.is_local:
        count = _concurrency(ranges).value
        fit = [b for b in sizes if count * b / (ranges.latency_s + b / ranges.stream) >= 0.8 * ranges.best]
        each = f"{ranges.latency_s * 1e3:.1f} ms + {ranges.stream / 1e6:,.0f} MB/s each"
        why = f"{count} requests of {each} reach 0.8 of the {ranges.best / 1e6:,.0f} MB/s seen"
        return Proposal((fit or sizes[-1:])[0], why)
    seek = max(0.0, machine.random_bytes / machine.random - machine.random_bytes / machine.sequential)
    fit = [b for b in sizes if seek <= 0.1 * (b / machine.sequential + b / machine.xxh3)]
    why = f"a seek of {seek * 1e6:,.0f} µs is a tenth of reading it at {machine.sequential / 1e6:,.0f} MB/s, or less"
    return Proposal(max(256 * KIB, (fit or sizes[-1:])[0]), why)


def _shard(block: int, needs: Needs) -> Proposal:
    wanted = power_below(needs.dataset_bytes / (80 * needs.nodes))
    size = int(min(256 * MIB, max(wanted, 64 * block)))
    why = f"80 shards a node of {needs.dataset_bytes / 1e9:,.1f} GB; at least 64 blocks, at most 256 MiB"
    return Proposal(size, why)


def _window(machine: Machine, remote: Ranges | None, block: int, needs: Needs, most_memory: int) -> Proposal:
    if remote is not None:
        window, why = most_memory // 2, f"half of {most_memory / MIB:,.0f} MiB a rank for open windows"
    else:
        best = max(machine.gather.values())
        window = max(size for size, rate in machine.gather.items() if rate >= 0.8 * best)
        why = (f"gathers from {window / MIB:,.0f} MiB run at {machine.gather[window] / 1e9:.1f} GB/s, at most "
               f"{best / 1e9:.1f}")  # fmt: skip
    count = power_below(window / (needs.lanes * block))
    return Proposal(int(min(64, max(4, count))), f"{why}; {needs.lanes} lanes a rank")


def _reduction(reducing: Mapping[int, float], needs: Needs) -> dict[str, Proposal]:
    start, per_byte = fit_line(reducing)
    takes = max(0.0, start) + max(0.0, per_byte) * needs.gradient_bytes
    gradient = f"{needs.gradient_bytes / 1e6:,.0f} MB"
    said = f"an all-reduce of {gradient} takes {takes * 1e3:,.0f} ms, a cell {needs.cell_s * 1e3:.0f} ms"
    cells = 1
    while cells < _MOST_ACCUMULATED and takes > 0.1 * cells * needs.cell_s:
        cells *= 2
    every = 1
    while takes > 0.1 * every * cells * needs.cell_s and every < 1024:
        every *= 2
    enough = "accumulation is enough" if every == 1 else f"{said}: {cells} cells are not enough"
    return {
        "accumulation": Proposal(cells, f"{said}: a tenth of {cells} cells"),
        "sync_every": Proposal(every, enough),
    }


def _checkpoint_every(saving: Saving, needs: Needs) -> Proposal:
    size = 3 * needs.gradient_bytes  # parameters and two moments
    copy_s, write_s, step_s = size / saving.copy, size / saving.write, needs.lanes * needs.cell_s
    every = max(1, math.ceil(max(100 * copy_s, 2 * write_s) / max(step_s, 1e-9)))
    cost = f"a checkpoint of {size / 1e6:,.0f} MB is copied in {copy_s:.3f} s and written in {write_s:.2f} s"
    return Proposal(
        every, f"{cost}: copying is 1 % of the time at most, writing half of it; a step {step_s:.3f} s"
    )


def fit_line(points: Mapping[int, float]) -> tuple[float, float]:
    """Fit a line to (size, seconds) by least squares of relative errors. Return seconds at size 0 and per byte."""
    sizes, seconds = (np.array(list(column), np.float64) for column in (points, points.values()))
    if len(sizes) < 2:
        return 0.0, float(seconds[0] / sizes[0])
    slope, start = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    return float(start), float(slope)


def power_below(value: float) -> int:
    """Return the largest power of two at or below a value, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
