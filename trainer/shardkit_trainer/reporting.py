"""Reports of a run: console, metrics, TensorBoard, stage counters, and costs over restarts (SPEC.md §7)."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from torch.utils.flop_counter import FlopCounterMode

from shardkit.errors import MissingDependency
from shardkit.stores.file_operations import explained
from shardkit.telemetry.records import append_document, read_documents

from .configuration import LogConfig
from .distributed import World
from .run_directory import RunDirectory
from .tasks import Task

TAIL_BYTES = 1 << 16  # enough to contain the last record


class Cost:
    """Cost totals of a run, updated at every step.

    Totals continue from the last record of train.jsonl, so a killed process loses at most one step. All wall time of a
    rank counts, including start-up, evaluation and checkpoints.
    """

    def __init__(self, config: LogConfig, metrics: Path):
        self._config, self._since = config, time.monotonic()
        self.totals: dict[str, float] = {"rank_seconds": 0.0, "samples": 0, "bytes_moved": 0}
        last = last_record(metrics)
        self.taken = last.get("step")  # the last step before this start; None for a new run
        before = last.get("total", {})
        self.totals |= {name: before[name] for name in self.totals if name in before}
        self._bytes_seen = 0

    def step(self, samples: int, bytes_moved: int, ranks: int) -> dict[str, float]:
        """Add the cost since the last call to the totals; return its dollars and joules."""
        now = time.monotonic()
        seconds, self._since = (now - self._since) * ranks, now
        moved = (bytes_moved - self._bytes_seen) * ranks
        self._bytes_seen = bytes_moved
        for name, value in (("rank_seconds", seconds), ("samples", samples), ("bytes_moved", moved)):
            self.totals[name] = round(self.totals[name] + value, 6)
        return self._price(seconds)

    def run(self) -> dict[str, float]:
        """Return the totals, with dollars and joules if price and power are set."""
        return {**self.totals, **self._price(self.totals["rank_seconds"])}

    def _price(self, rank_seconds: float) -> dict[str, float]:
        priced = {}
        if self._config.price_per_hour:
            priced["dollars"] = round(self._config.price_per_hour * rank_seconds / 3600, 9)
        if self._config.watts:
            priced["joules"] = round(self._config.watts * rank_seconds, 6)
        return priced


def last_record(metrics: Path) -> dict[str, Any]:
    """Return the record of the latest step in train.jsonl, empty if there is none."""
    steps = (line for line in reversed(read_documents(metrics, TAIL_BYTES)) if "total" in line)
    return next(steps, {})  # records without "total" are evaluations


class Reporter:
    """Rank 0's console output, metrics and TensorBoard; on other ranks every method does nothing."""

    def __init__(self, config: LogConfig, directory: RunDirectory, lead: bool, steps: int, unit: str):
        self._config, self._steps, self._unit, self._lead = config, steps, unit, lead
        self._path = directory.path / "metrics" / "train.jsonl"
        self._board = _tensorboard(directory) if lead and config.tensorboard else None
        self._console = Console()
        self._progress: Progress | None = None
        if lead and sys.stdout.isatty():
            figures = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True))
            columns = TextColumn("step"), MofNCompleteColumn(), figures, TimeRemainingColumn()
            self._progress = Progress(*columns, console=self._console, expand=True)
            self._bar = self._progress.add_task("", total=steps)
            self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        if not self._lead:
            return
        self._append(record)
        if self._board is not None:
            for name in ("loss", "gradient_norm", "learning_rate", "step_s", "data_s", "flops_share"):
                self._board.add_scalar(name, record[name], record["step"])
        done = int(record["step"]) + 1
        if done % self._config.every == 0 or done == self._steps or self._progress is not None:
            self._show(done, record)

    def _append(self, record: Mapping[str, Any]) -> None:
        with explained(f"write metrics to {self._path}", writing=True):
            append_document(self._path, record)

    def _show(self, done: int, record: Mapping[str, Any]) -> None:
        rate = record["targets"] / max(record["step_s"], 1e-9)
        wait = 100.0 * record["data_s"] / max(record["step_s"], 1e-9)
        accuracy = f"  accuracy {100 * record['accuracy']:.1f} %" if "accuracy" in record else ""
        nothing = f"no valid {self._unit}: nothing was learned"
        loss = f"loss {record['loss']:.4f}" if record["targets"] else nothing
        text = f"{loss}{accuracy}  norm {record['gradient_norm']:.2f}"
        text += f"  rate {record['learning_rate']:.2e}  {rate:,.0f} {self._unit}s/s  data wait {wait:.1f} %"
        if self._progress is not None:
            self._progress.update(self._bar, completed=done, description=text)
        else:
            self.say(f"step {done}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        if self._lead:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        if self._lead:
            self._append({"evaluation": dict(record)})
        accuracy = f", accuracy {100 * record['accuracy']:.2f} %" if "accuracy" in record else ""
        loss = f"loss {record['loss']:.4f}" if record["targets"] else f"no valid {self._unit}"
        self.say(f"evaluation after step {record['step']}: {loss}{accuracy}"
                 f" over {record['samples']} samples")  # fmt: skip

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._board is not None:
            self._board.close()


def _tensorboard(directory: RunDirectory) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingDependency(
            "log.tensorboard = true needs tensorboard; run: pip install tensorboard"
        ) from error
    return SummaryWriter(str(directory.path / "metrics" / "tensorboard"))


class Efficiency:
    """Floating-point operations per sample of the model, and the peak rate of the device.

    Operations are counted once, in the forward pass of one sample; the backward pass is taken to need twice as many.
    """

    def __init__(self, config: LogConfig, task: Task, device: torch.device, precision: str):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            tensors = {name: tensor.to(device) for name, tensor in task.empty().tensors.items()}
            task.loss(task.model.to(device), tensors)
        self.flops_per_sample = 3 * counter.get_total_flops()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self.peak_flops = config.peak_flops or measured_peak_flops(device, dtype)

    def of_step(self, samples: int, seconds: float, ranks: int) -> dict[str, float]:
        """Return the operations per second of all ranks, and their share of the peak."""
        rate = self.flops_per_sample * samples / max(seconds, 1e-9)
        return {"flops_per_s": round(rate), "flops_share": round(rate / (self.peak_flops * ranks), 4)}


def profiler(config: LogConfig, directory: RunDirectory) -> torch.profiler.profile:
    """Return a `torch.profiler` for ``log.profile_steps`` steps; it writes a Chrome trace to metrics/trace.json."""
    path = directory.path / "metrics" / "trace.json"

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(path))

    steps = config.profile_steps
    window = torch.profiler.schedule(wait=config.profile_from, warmup=1, active=steps, repeat=1)
    return torch.profiler.profile(schedule=window, on_trace_ready=write)


def measured_peak_flops(device: torch.device, precision: torch.dtype) -> float:
    """Return the floating-point operations per second of a large matrix product on this rank, the best of five."""
    n = 4096 if device.type == "cuda" else 512
    a = torch.ones((n, n), device=device, dtype=precision)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        b = a @ a
        float(b[0, 0])  # waits for the device
        best = max(best, 2.0 * n**3 / (time.perf_counter() - started))
    return best


_STAGES = ("data", "prepare", "exchange", "compute", "reduce", "update", "checkpoint", "evaluation")


class StageMeter:
    """Times the stages of this rank's steps and adds them up.

    The world gets a heartbeat for stages in which other ranks may wait for this one.
    """

    def __init__(self, steps: int, world: World) -> None:
        self.seconds: dict[str, float] = {}  # of each stage of the current step
        self._world, self._between, self._since = world, "", 0.0
        self._seconds = dict.fromkeys(_STAGES, 0.0)
        self._numbers = {"steps": 0.0, "cells": 0.0, "steps_in_all": float(steps)}

    @contextmanager
    def stage(self, name: str, of_step: int | None = None) -> Iterator[None]:
        """Time a stage of a step; send a heartbeat if ``of_step`` gives the step."""
        if of_step is not None:
            self._world.report(of_step, name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def step(self, *, computed_s: float, cells: int, loss: float, moved_bytes: float) -> dict[str, float]:
        """Add up a finished step; return the seconds of its stages.

        The part of "compute" after ``computed_s`` was spent waiting for other ranks and counts as "reduce" in the sums.
        """
        seconds, taken, self.seconds = self._seconds, self.seconds, {}
        for name, value in taken.items():
            seconds[name] = seconds.get(name, 0.0) + value
        compute = taken.get("compute", 0.0)
        own = min(compute, max(0.0, computed_s - taken.get("prepare", 0.0)))
        seconds["compute"] -= compute - own
        seconds["reduce"] += compute - own
        numbers = self._numbers
        numbers["steps"] += 1
        numbers["cells"] += cells
        numbers["moved_bytes"] = moved_bytes
        numbers["loss"] = loss if math.isfinite(loss) else 0.0
        return taken

    @contextmanager
    def between_steps(self, stage: str) -> Iterator[None]:
        self._since, self._between = time.perf_counter(), stage
        try:
            yield
        finally:
            self._between = ""
            self._seconds[stage] += time.perf_counter() - self._since

    def numbers(self) -> dict[str, float]:
        found = {f"{name}_s": value for name, value in self._seconds.items()} | self._numbers
        between = self._between
        if between:  # an unfinished stage counts already: an evaluation may outlast a window of the rules
            found[f"{between}_s"] += time.perf_counter() - self._since
        return found

    def table(self) -> list[list[str]]:
        return [[self._between or self._world.stage]]
