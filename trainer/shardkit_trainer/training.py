"""A run: open, resume, step by step, evaluate, save.

A step takes this rank's cells of the plan, sums their loss gradients over all ranks and divides by the step's count of
valid targets (DESIGN §3.3). Everything that a step does is a function of (configuration, step): a run that is killed
and resumed, on any number of ranks, takes the same steps.
"""

from __future__ import annotations

import hashlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import shardkit
from shardkit.errors import NotFoundError, RunError
from shardkit.storage import parse_dataset_url

from .checkpoints import Checkpointer
from .configuration import Configuration
from .distributed import World, join_world, leave_world
from .evaluation import evaluate
from .optimizers import learning_rate
from .reporting import Reporter, Timeline
from .run_directory import RunDirectory
from .strategies import Strategy, autocast, make_strategy
from .tasks import Inputs, Task, make_task, mix

__all__ = ["LOSS_BITS", "Summary", "train"]

LOSS_BITS = 20  # losses are summed as integers of this many fraction bits: the same sum in any order


@dataclass
class Summary:
    """How a run ended.

    Attributes:
        step: steps of the whole run so far.
        finished: whether that is all of them; else a signal stopped it after a save.
        loss: mean loss per valid target of the last step (nan if none was taken).
        evaluation: results of the last evaluation pass.
        parameters_sha256: of all parameters in name order; exact mode only.
        bytes_held: per kind, on this rank, after the last step.
    """

    step: int
    finished: bool
    loss: float = math.nan
    evaluation: dict[str, Any] = field(default_factory=dict)
    parameters_sha256: str = ""
    bytes_held: dict[str, int] = field(default_factory=dict)


def train(config: Configuration) -> Summary:
    """Run or resume ``config`` on this rank, until it is finished or a signal asks it to stop.

    Raises:
        RunError: a rank died or froze (named), or the gradients stay non-finite.
        ShardkitError: what data, checkpoints or configuration raise.
    """
    world = join_world(config)
    try:
        with _stop_signals() as stop:
            return _Run(config, world, stop).run()
    except RuntimeError as error:
        if isinstance(error, RunError) or not _is_collective_failure(error):
            raise
        raise world.describe_failure(error) from error
    finally:
        leave_world(world)


class _Run:
    """The parts of one run on one rank."""

    def __init__(self, config: Configuration, world: World, stop: threading.Event):
        self.config, self.world, self.stop = config, world, stop
        lead = world.rank == 0
        self.directory = RunDirectory(config.run.directory, lead=lead)
        self.dataset = self._open_dataset()
        settings: dict[str, Any] = {"global_batch": config.data.global_batch, "seed": config.data.seed}
        chosen = {
            "lanes": config.data.lanes,
            "weights": config.data.weights,
            "window_blocks": config.data.window_blocks,
        }
        self.plan = self.dataset.plan(**settings, **{name: value for name, value in chosen.items() if value})
        if lead:
            self.directory.begin(config.to_json(), manifest=self.dataset.manifest.id, plan=self.plan.digest)
        self.steps = config.run.steps or config.run.epochs * self.plan.steps_per_epoch
        self.task: Task = make_task(config.model, self.dataset, config.run.seed)
        self.strategy: Strategy = make_strategy(self.task, config, world, self.plan.lanes)
        self.reporter = Reporter(config.log, self.directory, lead=lead, steps=self.steps, unit=self.task.unit)
        self.checkpointer = Checkpointer(
            self.directory.store,
            world,
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
            timeout_s=config.parallel.timeout_s,
            event=self.directory.event,
        )
        self.loader = self.dataset.loader(
            self.plan,
            rank=world.rank,
            world=world.size,
            by_cell=True,
            uneven=True,
            run=str(self.directory.path),
        )
        self.step = 0
        self.skipped_in_a_row = 0
        self.loss_scale = 2.0**16 if config.parallel.precision == "fp16" else 1.0
        self.timeline = Timeline()
        self.summary = Summary(0, finished=False)

    def _open_dataset(self) -> Any:
        """The dataset at the version that the run began with: a ref is resolved once per run."""
        if self.config.data.parts:
            return shardkit.open(dict(self.config.data.parts))
        root, _ = parse_dataset_url(self.config.data.dataset)
        if self.world.rank == 0:
            known = self.directory.manifest_of_run()
            opened = shardkit.open(f"{root}@{known['manifest']}" if known else self.config.data.dataset)
            self.world.store.set("manifest", opened.manifest.id)
            return opened
        return shardkit.open(f"{root}@{self.world.store.get('manifest').decode()}")

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> Summary:
        """Resume, train, end."""
        try:
            self._resume()
            self.directory.event("start", step=self.step, ranks=self.world.size, steps=self.steps)
            stopped = self._take_steps()
            self._end(stopped)
            return self.summary
        finally:
            self.loader.close()
            self.reporter.close()
            self.directory.close()

    def _resume(self) -> None:
        meta = self.checkpointer.load_newest(self.strategy) if self.config.checkpoint.resume else None
        if meta is None:
            return
        self.loader.load_state_dict(meta["loader"])
        self.strategy.after_load(meta["updates"])
        self.step = self.summary.step = meta["step"]
        self.loss_scale = meta["loss_scale"]
        self.checkpointer.last_saved_step = self.step
        self.reporter.say(
            f"resumed at step {self.step} of {self.steps} on {self.world.size} ranks (was {meta['ranks']})"
        )

    def _take_steps(self) -> bool:
        """Steps up to the end, or until any rank was asked to stop; True in that case."""
        while self.step < self.steps:
            cells_of_steps = iter(self.loader)
            while self.step < self.steps:
                self.timeline = Timeline()
                started = time.perf_counter()
                self.world.report(self.step, "data")
                with self.timeline.stage("data"):
                    cells = next(cells_of_steps, None)
                if cells is None:
                    break  # the epoch is over
                record, stop = self._step(cells)
                if self.step % self.config.checkpoint.every == 0 and self.step < self.steps and not stop:
                    with self.timeline.stage("checkpoint"):
                        self._save()
                self._report(record, time.perf_counter() - started)
                every = self.config.evaluation.every
                if every and self.step % every == 0 and self.step < self.steps:
                    self._evaluate()
                if stop:
                    return self.step < self.steps
        return False

    def _end(self, stopped: bool) -> None:
        """The last save, evaluation, and the record of the end."""
        if self.checkpointer.last_saved_step != self.step:
            self._save(wait=True)
        self.checkpointer.wait()
        if not stopped and self.config.evaluation.dataset:
            self._evaluate()
        if self.config.parallel.exact != "off":
            self.summary.parameters_sha256 = parameters_sha256(self.strategy)
        self.summary.step, self.summary.finished = self.step, not stopped
        self.directory.event(
            "stop" if stopped else "end", step=self.step, loss=self.summary.loss,
            parameters_sha256=self.summary.parameters_sha256, bytes_held=self.summary.bytes_held,
        )  # fmt: skip
        self.world.report(self.step, "end")
        if stopped:
            self.reporter.say(f"stopped by a signal after step {self.step}; saved; start again to go on")

    # --- one step ----------------------------------------------------------------------------------------------------

    def _step(self, cells: list[Any]) -> tuple[dict[str, Any], bool]:
        """One optimizer step; returns its record, and whether any rank was asked to stop."""
        seed = self.config.run.seed
        with self.timeline.stage("prepare"):
            inputs = []
            for cell in cells:
                one = self.task.prepare(cell, seed)
                one.seed = mix(seed, cell.step, cell.lane)
                inputs.append(one)
        self.world.report(self.step, "exchange")
        with self.timeline.stage("exchange"):
            mine = (
                sum(i.valid for i in inputs),
                sum(i.samples for i in inputs),
                len(inputs),
                int(self.stop.is_set()),
            )
            rows = self.world.gather_integers(mine)
        valid, samples = sum(row[0] for row in rows), sum(row[1] for row in rows)
        self.world.report(self.step, "compute")
        with self.timeline.stage("compute"):
            passes = self.strategy.passes(inputs, [row[2] for row in rows], self.plan.cell_size)
            results = self._compute(passes, valid)
        self.world.report(self.step, "reduce")
        with self.timeline.stage("reduce"):
            norm = self.strategy.reduce() / self.loss_scale
            loss, right, bad = self.world.all_reduce(results).tolist()
        self.world.report(self.step, "step")
        rate = learning_rate(
            self.config.optimizer,
            self.config.schedule,
            step=self.step,
            steps=self.steps,
            global_batch=samples,
        )
        with self.timeline.stage("update"):
            self._update(norm, rate, finite=math.isfinite(norm) and not bad)
        self.summary.loss = loss / 2**LOSS_BITS / max(1, valid) if not bad else math.nan
        record = {"step": self.step, "loss": self.summary.loss, "gradient_norm": norm, "learning_rate": rate,
                  "samples": samples, "targets": valid, "ranks": self.world.size}  # fmt: skip
        if self.task.unit == "sample":
            record["accuracy"] = right / max(1, valid)
        self.step += 1
        return record, any(row[3] for row in rows)

    def _compute(self, passes: list[Inputs], valid: int) -> torch.Tensor:
        """Forward and backward of every pass; int64 [loss in fixed point, right answers, trouble]."""
        factor = self.strategy.loss_scale * self.loss_scale / max(1, valid)
        loss_sum, right, bad = 0, 0, 0
        for number, inputs in enumerate(passes):
            torch.manual_seed(inputs.seed)
            tensors = {name: tensor.to(self.world.device) for name, tensor in inputs.tensors.items()}
            with self.strategy.accumulate(last=number == len(passes) - 1):
                with autocast(self.config, self.world.device):
                    loss, correct = self.task.loss(self.strategy.forward, tensors)
                torch.autograd.backward(loss * factor)
            self.strategy.after_pass()
            value = float(loss.detach())
            if math.isfinite(value):
                loss_sum += round(value * 2**LOSS_BITS)
            else:
                bad = 1
            right += int(correct)
        bad |= int(self.strategy.overflowed())
        return torch.tensor([loss_sum, right, bad], dtype=torch.int64, device=self.world.device)

    def _update(self, norm: float, rate: float, *, finite: bool) -> None:
        """Clip and step, or leave the parameters alone where the gradient is not finite."""
        self.summary.bytes_held = self.strategy.local_bytes()
        if finite:
            clip = self.config.optimizer.clip
            factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            if factor != 1.0 or self.loss_scale != 1.0:
                self.strategy.scale_gradients(factor / self.loss_scale)
            self.strategy.update(rate)
            self.skipped_in_a_row = 0
        else:
            self._skip(norm)
        self.strategy.clear()

    def _skip(self, norm: float) -> None:
        self.skipped_in_a_row += 1
        allowed = self.config.optimizer.skip_nonfinite
        if self.config.parallel.precision == "fp16":
            # half precision overflows now and then by design: lower the scale and go on
            self.loss_scale, allowed = self.loss_scale / 2, max(allowed, 20)
        self.directory.event("nonfinite", step=self.step, norm=str(norm), loss_scale=self.loss_scale)
        if self.skipped_in_a_row > allowed:
            raise RunError(
                f"step {self.step}: the gradient is not finite (norm {norm}), {self.skipped_in_a_row} in a row;"
                f" optimizer.skip_nonfinite = {self.config.optimizer.skip_nonfinite}. Lower optimizer.lr, raise"
                " schedule.warmup, or look at this step's samples: shardkit plan … shows which"
            )

    # --- save, evaluate, report --------------------------------------------------------------------------------------

    def _save(self, *, wait: bool = False) -> None:
        self.world.report(self.step, "checkpoint")
        state = self.loader.state_dict()
        assert state["step"] == self.step, (state, self.step)
        meta = {"step": self.step, "updates": self.strategy.optimizer.updates, "loader": state,
                "loss_scale": self.loss_scale, "ranks": self.world.size, "configuration": self.config.to_json(),
                "manifest": self.dataset.manifest.id, "plan": self.plan.digest}  # fmt: skip
        self.checkpointer.save(self.step, self.strategy, meta, wait=wait)

    def _evaluate(self) -> None:
        try:
            result = evaluate(self.config, self.world, self.task, self.strategy)
        except NotFoundError as error:
            raise NotFoundError(
                f"evaluation.dataset = {self.config.evaluation.dataset!r}: {error}"
            ) from error
        self.summary.evaluation = {"step": self.step, **result}
        self.reporter.evaluation(self.summary.evaluation)

    def _report(self, record: dict[str, Any], step_s: float) -> None:
        record["step_s"] = round(step_s, 6)
        record |= {f"{name}_s": round(seconds, 6) for name, seconds in self.timeline.seconds.items()}
        record["bytes_moved"] = self.world.bytes_moved
        self.reporter.step(record)


def parameters_sha256(strategy: Strategy) -> str:
    """SHA-256 over the bytes of all parameters and buffers, in name order (collective)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(strategy.whole_parameters().items()):
        digest.update(name.encode() + b"\0")
        digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; a second SIGINT interrupts at once. Main thread only."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_collective_failure(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.distributed.DistError) or any(
        word in text for word in ("gloo", "nccl", "connection closed", "timed out", "connection reset")
    )
