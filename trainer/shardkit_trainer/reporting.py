"""What a run shows: progress on a terminal or plain lines, metrics as JSON lines, TensorBoard where asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardkit.errors import MissingDependency

from .configuration import LogConfig
from .run_directory import Lines, RunDirectory

__all__ = ["Reporter", "Timeline", "measured_peak_flops"]


class Timeline:
    """Seconds of each stage of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time inside to ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class Reporter:
    """Rank 0's console and files; on other ranks every method does nothing."""

    def __init__(self, config: LogConfig, directory: RunDirectory, *, lead: bool, steps: int, unit: str):
        self._config, self._steps, self._unit, self._lead = config, steps, unit, lead
        self._metrics = Lines(directory.path / "metrics" / "train.jsonl") if lead else None
        self._board = _tensorboard(directory) if lead and config.tensorboard else None
        self._console = Console()
        self._progress: Progress | None = None
        if lead and sys.stdout.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                       TimeRemainingColumn())  # fmt: skip
            self._progress = Progress(*columns, console=self._console)
            self._bar = self._progress.add_task("", total=steps)
            self._progress.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """One finished step."""
        if self._metrics is None:
            return
        self._metrics.write(record)
        if self._board is not None:
            for name in ("loss", "gradient_norm", "learning_rate", "step_s", "data_s"):
                self._board.add_scalar(name, record[name], record["step"])
        done = int(record["step"]) + 1
        if done % self._config.every == 0 or done == self._steps or self._progress is not None:
            self._show(done, record)

    def _show(self, done: int, record: Mapping[str, Any]) -> None:
        rate = record["targets"] / max(record["step_s"], 1e-9)
        wait = 100.0 * record["data_s"] / max(record["step_s"], 1e-9)
        text = f"loss {record['loss']:.4f}"
        if "accuracy" in record:
            text += f"  accuracy {100 * record['accuracy']:.1f} %"
        text += (
            f"  norm {record['gradient_norm']:.2f}  rate {record['learning_rate']:.2e}"
            f"  {rate:,.0f} {self._unit}s/s  data wait {wait:.1f} %"
        )
        if self._progress is not None:
            self._progress.update(self._bar, completed=done, description=text)
        else:
            print(f"step {done}/{self._steps}  {text}", flush=True)

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self._lead:
            if self._progress is not None:
                self._console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """The result of an evaluation pass."""
        if self._metrics is not None:
            self._metrics.write({"evaluation": dict(record)})
        accuracy = f", accuracy {100 * record['accuracy']:.2f} %" if "accuracy" in record else ""
        self.say(f"evaluation after step {record['step']}: loss {record['loss']:.4f}{accuracy}"
                 f" over {record['samples']} samples")  # fmt: skip

    def close(self) -> None:
        """Stop the display, close the files."""
        if self._progress is not None:
            self._progress.stop()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
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


def measured_peak_flops(device: torch.device, precision: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product on this rank, the best of a few."""
    n = 4096 if device.type == "cuda" else 512
    a = torch.ones((n, n), device=device, dtype=precision)
    best = 0.0
    for _ in range(5):
        started = time.perf_counter()
        b = a @ a
        float(b[0, 0])  # waits for the device
        best = max(best, 2.0 * n**3 / (time.perf_counter() - started))
    return best
