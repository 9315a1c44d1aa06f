"""A run: open, resume, step by step, evaluate, save; and go on with the ranks that are left.

Everything that a step does is a function of (configuration, step): a run that is killed and resumed, on any number of
ranks, takes the same steps.
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
from shardkit.errors import NotFoundError
from shardkit.ledger import ledger_head
from shardkit.storage import parse_dataset_url

from .checkpoints import Checkpointer
from .configuration import Configuration
from .distributed import World, is_collective_failure, join_world, leave_world
from .evaluation import evaluate
from .recovery import carry_over
from .reporting import Efficiency, ProfilerWindow, Reporter, Timeline
from .run_directory import RunDirectory
from .steps import Regroup, Stepper, StepResult
from .strategies import Strategy, make_strategy
from .tasks import Task, make_task

__all__ = ["Summary", "parameters_sha256", "train"]


@dataclass
class Summary:
    """How a run ended.

    Attributes:
        step: steps of the whole run so far.
        finished: whether that is all of them; else a signal stopped it after a save.
        loss: mean loss per valid target of the last step (nan if none was taken).
        evaluation: results of the last evaluation pass.
        parameters_sha256: of all parameters in name order; exact mode only.
        bytes_held: per kind, on this rank, in the last step.
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
    with _stop_signals() as stop:
        run = _Run(config, stop)
        world = join_world(config)
        try:
            while True:
                try:
                    run.attach(world)
                    return run.finish()
                except Regroup:
                    pass
                except RuntimeError as error:
                    if not is_collective_failure(error):
                        raise
                    failure = world.describe_failure(error)
                    if not world.supervised:
                        raise failure from error
                # outside of the handlers: a live traceback would keep the old groups, and their sockets, open
                world = _next_world(config, world, run)
        finally:
            run.close()
            leave_world(world)


def _next_world(config: Configuration, world: World, run: _Run) -> World:
    """Leave a broken or outdated group; wait for the supervisor's next one."""
    run.detach()
    leave_world(world)
    run.checkpointer.abandon(config.parallel.timeout_s)
    return join_world(config, after=world.generation)


class _Run:
    """The parts of one run on one rank; those that depend on the ranks are made by `attach`."""

    def __init__(self, config: Configuration, stop: threading.Event):
        self.config, self.stop = config, stop
        self.step = 0
        self.samples = 0  # trained on since this process started, over all ranks
        self.summary = Summary(0, finished=False)
        self.dataset: Any = None
        self.strategy: Strategy | None = None
        self.directory: RunDirectory | None = None
        self.loader: Any = None

    # --- the parts ---------------------------------------------------------------------------------------------------

    def attach(self, world: World) -> None:
        """Make the parts of this rank of ``world``; take over the state of the ranks that have one, or resume."""
        config, self.world = self.config, world
        lead = world.rank == 0
        self.directory = RunDirectory(config.run.directory, lead=lead)
        if self.dataset is None:
            self._open_dataset()
        if lead:
            self.directory.begin(config.to_json(), manifest=self.dataset.manifest.id, plan=self.plan.digest)
        self.task: Task = make_task(config.model, self.dataset, config.run.seed)
        # before the model is wrapped and sharded: one process can still run it alone
        self.efficiency = Efficiency(config.log, self.task, world.device, config.parallel.precision)
        strategy = make_strategy(self.task, config, world, self.plan.lanes)
        self.reporter = Reporter(config.log, self.directory, lead=lead, steps=self.steps, unit=self.task.unit)
        self.profiler = ProfilerWindow(config.log, self.directory, lead=lead)
        self.stepper = Stepper(
            config, world, self.task, strategy, steps=self.steps, cell_size=self.plan.cell_size, stop=self.stop,
            event=self.directory.event,
        )  # fmt: skip
        self.checkpointer = Checkpointer(
            self.directory.store, world, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous,
            timeout_s=config.parallel.timeout_s, event=self.directory.event,
        )  # fmt: skip
        self.loader = self.dataset.loader(
            self.plan,
            rank=world.rank,
            world=world.size,
            by_cell=True,
            uneven=True,
            run=str(self.directory.path),
        )
        self._take_over(self.strategy, strategy)
        self.strategy = strategy
        self.directory.event(
            "start", step=self.step, ranks=world.size, steps=self.steps, generation=world.generation
        )

    def detach(self) -> None:
        """Let go of everything that belongs to the present ranks; the model's state stays."""
        if self.loader is not None:
            self.loader.close()
            self.profiler.close()
            self.reporter.close()
            self.loader = None
        if self.directory is not None:
            self.directory.close()

    close = detach

    def _open_dataset(self) -> None:
        """The dataset at the version that the run began with: a ref is resolved once per run."""
        config, world = self.config, self.world
        assert self.directory is not None
        if config.data.parts:
            self.dataset = shardkit.open(dict(config.data.parts))
        else:
            root, _ = parse_dataset_url(config.data.dataset)
            known = self.directory.manifest_of_run()
            if known is None and world.rank == 0:
                self.dataset = shardkit.open(config.data.dataset)
            else:
                manifest = known["manifest"] if known else world.store.get("manifest").decode()
                self.dataset = shardkit.open(f"{root}@{manifest}")
            world.store.set("manifest", self.dataset.manifest.id)
        data = config.data
        chosen = {"lanes": data.lanes, "weights": data.weights, "window_blocks": data.window_blocks}
        settings: dict[str, Any] = {name: value for name, value in chosen.items() if value}
        self.plan = self.dataset.plan(global_batch=data.global_batch, seed=data.seed, **settings)
        self.steps = config.run.steps or config.run.epochs * (
            self.plan.steps_per_epoch or self.plan.loop_steps
        )

    def _take_over(self, before: Strategy | None, strategy: Strategy) -> None:
        """From the rank that is furthest where replicas live on, else from the newest checkpoint."""
        found = carry_over(self.world, before, strategy, step=self.step if before is not None else -1)
        if found is not None:
            self.step = found
            self.loader.seek(found)
            self.reporter.say(f"{self.world.size} ranks go on from step {found}, in process")
            return
        meta = self.checkpointer.load_newest(strategy) if self.config.checkpoint.resume else None
        self.step = 0
        if meta is not None:
            self.loader.load_state_dict(meta["loader"])
            strategy.after_load(meta["updates"])
            self.step = self.summary.step = meta["step"]
            self.stepper.loss_scale = meta["loss_scale"]
            self.checkpointer.last_saved_step = self.step
            self.reporter.say(
                f"resumed at step {self.step} of {self.steps} on {self.world.size} ranks (was {meta['ranks']})"
            )

    # --- the run -----------------------------------------------------------------------------------------------------

    def finish(self) -> Summary:
        """Train to the end, or until a signal."""
        stopped = self._take_steps()
        self._end(stopped)
        return self.summary

    def _take_steps(self) -> bool:
        """Steps up to the end, or until any rank was asked to stop; True in that case."""
        while self.step < self.steps:
            cells_of_steps = iter(self.loader)
            while self.step < self.steps:
                timeline, started = Timeline(), time.perf_counter()
                self.world.report(self.step, "data")
                with timeline.stage("data"):
                    cells = next(cells_of_steps, None)
                if cells is None:
                    break  # the epoch is over
                result = self.stepper.take(self.step, cells, timeline)
                self.step += 1
                self.summary.loss, self.summary.bytes_held = result.loss, self.stepper.bytes_held
                more = self.step < self.steps and not result.stop
                if more and self.step % self.config.checkpoint.every == 0:
                    with timeline.stage("checkpoint"):
                        self._save()
                self._report(result, timeline, time.perf_counter() - started)
                if more and self.config.evaluation.every and self.step % self.config.evaluation.every == 0:
                    self._evaluate()
                if result.stop:
                    return self.step < self.steps
        return False

    def _end(self, stopped: bool) -> None:
        """The last save, evaluation, and the record of the end."""
        assert self.strategy is not None
        assert self.directory is not None
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
            samples=self.samples, bytes_moved=self.world.bytes_moved, **self.efficiency.of_run(self.world.size),
        )  # fmt: skip
        self.world.report(self.step, "end")
        if stopped:
            self.reporter.say(f"stopped by a signal after step {self.step}; saved; start again to go on")

    def _save(self, *, wait: bool = False) -> None:
        assert self.strategy is not None
        self.world.report(self.step, "checkpoint")
        self.strategy.settle()
        meta = {"step": self.step, "updates": self.strategy.optimizer.updates, "loader": self.loader.state_dict(),
                "loss_scale": self.stepper.loss_scale, "ranks": self.world.size, "plan": self.plan.digest,
                "configuration": self.config.to_json(), "manifest": self.dataset.manifest.id}  # fmt: skip
        if (
            self.world.rank == 0
        ):  # it writes the checkpoint's manifest, and every rank has been handed these steps
            assert self.directory is not None
            meta["ledger"] = ledger_head(self.directory.path, self.step)
        self.checkpointer.save(self.step, self.strategy, meta, wait=wait)

    def _evaluate(self) -> None:
        assert self.strategy is not None
        self.strategy.settle()
        try:
            result = evaluate(self.config, self.world, self.task, self.strategy)
        except NotFoundError as error:
            raise NotFoundError(
                f"evaluation.dataset = {self.config.evaluation.dataset!r}: {error}"
            ) from error
        self.summary.evaluation = {"step": self.step, **result}
        self.reporter.evaluation(self.summary.evaluation)

    def _report(self, result: StepResult, timeline: Timeline, step_s: float) -> None:
        self.samples += result.samples
        record: dict[str, Any] = {
            "step": self.step - 1, "loss": result.loss, "gradient_norm": result.norm, "learning_rate": result.rate,
            "samples": result.samples, "targets": result.targets, "ranks": self.world.size, "step_s": round(step_s, 6),
            "bytes_moved": self.world.bytes_moved, **self.efficiency.of_step(result.samples, step_s, self.world.size),
            **{f"{name}_s": round(seconds, 6) for name, seconds in timeline.seconds.items()},
        }  # fmt: skip
        if self.task.unit == "sample":
            record["accuracy"] = result.right / max(1, result.targets)
        self.reporter.step(record)
        self.profiler.step()


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
