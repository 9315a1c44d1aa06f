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
from torch.utils.flop_counter import FlopCounterMode

from shardkit.errors import MissingDependency

from .configuration import LogConfig
from .cost import last_record
from .run_directory import Lines, RunDirectory
from .tasks import Task

__all__ = ["Efficiency", "ProfilerWindow", "Reporter", "Timeline", "measured_peak_flops"]


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

    def __init__(self, config: LogConfig, directory: RunDirectory, lead: bool, steps: int, unit: str):
        self._config, self._steps, self._unit, self._lead = config, steps, unit, lead
        self._path = directory.path / "metrics" / "train.jsonl"
        self._metrics = Lines(self._path) if lead else None
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
            for name in ("loss", "gradient_norm", "learning_rate", "step_s", "data_s", "flops_share"):
                self._board.add_scalar(name, record[name], record["step"])
        done = int(record["step"]) + 1
        if done % self._config.every == 0 or done == self._steps or self._progress is not None:
            self._show(done, record)

    def catch_up(self, record: Mapping[str, Any]) -> None:
        """The latest step that was taken: whoever led may have died before it was written."""
        if self._metrics is not None and last_record(self._path).get("step") != record["step"]:
            self._metrics.write(record)

    def _show(self, done: int, record: Mapping[str, Any]) -> None:
        rate = record["targets"] / max(record["step_s"], 1e-9)
        wait = 100.0 * record["data_s"] / max(record["step_s"], 1e-9)
        accuracy = f"  accuracy {100 * record['accuracy']:.1f} %" if "accuracy" in record else ""
        loss = (
            f"loss {record['loss']:.4f}"
            if record["targets"]
            else f"no valid {self._unit}: nothing was learned"
        )
        text = f"{loss}{accuracy}  norm {record['gradient_norm']:.2f}"
        text += f"  rate {record['learning_rate']:.2e}  {rate:,.0f} {self._unit}s/s  data wait {wait:.1f} %"
        if self._progress is not None:
            self._progress.update(self._bar, completed=done, description=text)
        else:
            self.say(f"step {done}/{self._steps}  {text}")

    def say(self, text: str) -> None:
        """A line for the person who watches."""
        if self._lead:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def evaluation(self, record: Mapping[str, Any]) -> None:
        """The result of an evaluation pass."""
        if self._metrics is not None:
            self._metrics.write({"evaluation": dict(record)})
        accuracy = f", accuracy {100 * record['accuracy']:.2f} %" if "accuracy" in record else ""
        loss = f"loss {record['loss']:.4f}" if record["targets"] else f"no valid {self._unit}"
        self.say(f"evaluation after step {record['step']}: {loss}{accuracy}"
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
        install = "pip install 'shardkit[train]' tensorboard"
        raise MissingDependency(f"log.tensorboard = true needs tensorboard; run: {install}") from error
    return SummaryWriter(str(directory.path / "metrics" / "tensorboard"))


class Efficiency:
    """What the computation amounts to: the model's operations, and the machine's peak.

    Operations are counted once, on one sample's forward pass; the backward pass takes twice as many.
    """

    def __init__(self, config: LogConfig, task: Task, device: torch.device, precision: str):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            tensors = {name: tensor.to(device) for name, tensor in task.empty().tensors.items()}
            task.loss(task.model.to(device), tensors)
        self.flops_per_sample = 3 * counter.get_total_flops()
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        self.peak_flops = config.peak_flops or measured_peak_flops(device, dtype)

    def of_step(self, samples: int, seconds: float, ranks: int) -> dict[str, float]:
        """Operations per second of all ranks, and their share of the peak."""
        rate = self.flops_per_sample * samples / max(seconds, 1e-9)
        return {"flops_per_s": round(rate), "flops_share": round(rate / (self.peak_flops * ranks), 4)}


class ProfilerWindow:
    """`torch.profiler` over ``log.profile_steps`` steps of rank 0; the trace lies in metrics/ for a trace viewer."""

    def __init__(self, config: LogConfig, directory: RunDirectory, lead: bool):
        self._profile: torch.profiler.profile | None = None
        if lead and config.profile_steps:
            path = directory.path / "metrics" / "trace.json"

            def write(profile: torch.profiler.profile) -> None:
                profile.export_chrome_trace(str(path))

            wait, active = config.profile_from, config.profile_steps
            window = torch.profiler.schedule(wait=wait, warmup=1, active=active, repeat=1)
            self._profile = torch.profiler.profile(schedule=window, on_trace_ready=write)
            self._profile.start()

    def step(self) -> None:
        """One step is over."""
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        """Write what was recorded, if the window was reached."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


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
