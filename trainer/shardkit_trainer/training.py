"""A run: open, resume, step by step, evaluate, save; and go on with the ranks that are left.

Everything that a step does is a function of (configuration, step): a run that is killed and resumed, on any number of
ranks, takes the same steps.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

import shardkit
from shardkit.errors import NotFoundError
from shardkit.ledger import ledger_head
from shardkit.loader import Rebalancing
from shardkit.storage import parse_dataset_url

from .checkpoints import Checkpointer
from .configuration import Configuration
from .cost import Cost
from .distributed import World, is_collective_failure, join_world, leave_world
from .evaluation import evaluate
from .metering import StageMeter
from .reading import CellsAhead
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
        self.parts: dict[str, str] = {}
        self.paid_until = time.monotonic()  # what this process costs is accounted for up to here
        self.summary = Summary(0, finished=False)
        self.dataset: Any = None
        self.strategy: Strategy | None = None
        self.directory: RunDirectory | None = None
        self.loader: Any = None
        self.reporter: Any = None
        self.profiler: Any = None
        self.frozen = False

    # --- the parts ---------------------------------------------------------------------------------------------------

    def attach(self, world: World) -> None:
        """Make the parts of this rank of ``world``; take over the state of the ranks that have one, or resume."""
        config, self.world = self.config, world
        lead = world.rank == 0
        self.directory = RunDirectory(config.run.directory, lead=lead)
        if self.dataset is None:
            self._open_dataset()
        if lead:
            self.directory.begin(config.to_json(), manifest=self.dataset.manifest.id, plan=self.plans[0].digest,
                                 parts=self.parts)  # fmt: skip
        self.task: Task = make_task(config.model, self.dataset, config.run.seed)
        # before the model is wrapped and sharded: one process can still run it alone
        self.efficiency = Efficiency(config.log, self.task, world.device, config.parallel.precision)
        strategy = make_strategy(self.task, config, world, max(plan.lanes for plan in self.plans))
        self.cost = Cost(config.log, self.directory.path / "metrics" / "train.jsonl", self.paid_until)
        self.reporter = Reporter(config.log, self.directory, lead=lead, steps=self.steps, unit=self.task.unit)
        self.profiler = ProfilerWindow(config.log, self.directory, lead=lead)
        self.stepper = Stepper(
            config, world, self.task, strategy, steps=self.steps, stop=self.stop, event=self.directory.event
        )  # fmt: skip
        self.checkpointer = Checkpointer(
            self.directory.store, world, keep=config.checkpoint.keep, asynchronous=config.checkpoint.asynchronous,
            timeout_s=config.parallel.timeout_s, event=self.directory.event, replicas=config.checkpoint.replicas,
        )  # fmt: skip
        self.meter = StageMeter(self.steps, lambda: world.stage)
        self._take_over(self.strategy, strategy)
        self.strategy = strategy
        self.directory.event(
            "start", step=self.step, ranks=world.size, steps=self.steps, generation=world.generation
        )

    def _open_loader(self, step: int) -> None:
        """The loader of the stage that ``step`` belongs to."""
        world, parallel = self.world, self.config.parallel
        assert self.directory is not None
        self._close_loader()
        begins = [0, *(stage.from_step for stage in self.config.data.stages)]
        number = bisect_right(begins, step) - 1
        self.stage_end = min([*begins[number + 1 : number + 2], self.steps])
        rebalance: Rebalancing | bool = False
        if parallel.rebalance:
            # the store's keys hold the attempt or generation already
            store = c10d.PrefixStore(f"rebalance-{number}", world.store)
            rebalance = Rebalancing(every=parallel.rebalance_every, store=store, timeout_s=parallel.timeout_s)
        plan = self.plans[number]
        self.loader = self.dataset.loader(
            plan, rank=world.rank, world=world.size, by_cell=True, uneven=True, run=str(self.directory.path),
            rebalance=rebalance, telemetry=self.config.log.telemetry(),
            cache=self.config.data.cache or None, cache_size=self.config.data.cache_size or None,
        )  # fmt: skip
        self.loader.telemetry.add_source("trainer", self.meter.numbers)
        self.loader.telemetry.add_table("stage", self.meter.stage)
        self.stepper.cell_size = plan.cell_size
        self.loader.seek(step)
        self.cells = CellsAhead(self.loader, step, self.stage_end, in_turn=parallel.rebalance)

    def _close_loader(self) -> None:
        if self.loader is not None:
            self.cells.close()
            self.loader.close()
            self.loader = None

    def detach(self) -> None:
        """Let go of everything that belongs to the present ranks; the model's state stays."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False
        self._close_loader()
        for part in (self.profiler, self.reporter):
            if part is not None:
                part.close()
        self.profiler = self.reporter = None
        if self.directory is not None:
            self.directory.close()

    close = detach

    def _open_dataset(self) -> None:
        """The dataset at the version that the run began with: a ref is resolved once per run."""
        config, world = self.config, self.world
        assert self.directory is not None
        known = self.directory.manifest_of_run()
        if known is None and world.rank == 0:
            self.dataset = shardkit.open(
                dict(config.data.parts) or config.data.dataset, locations=config.data.locations
            )
        else:
            pinned = known or json.loads(world.store.get("versions"))
            where = pinned.get("parts")
            if not where:
                where = f"{parse_dataset_url(config.data.dataset)[0]}@{pinned['manifest']}"
            self.dataset = shardkit.open(where, locations=config.data.locations)
        if config.data.parts:
            self.parts = {part.name: f"{parse_dataset_url(config.data.parts[part.name])[0]}@{part.manifest.id}"
                          for part in self.dataset.version.parts}  # fmt: skip
        world.store.set("versions", json.dumps({"manifest": self.dataset.manifest.id, "parts": self.parts}))
        data = config.data
        chosen = {"lanes": data.lanes, "weights": data.weights, "window_blocks": data.window_blocks}
        settings: dict[str, Any] = {name: value for name, value in chosen.items() if value}
        plan = self.dataset.plan(global_batch=data.global_batch, seed=data.seed, **settings)
        self.plans = [plan]
        for stage in data.stages:
            batch, weights = stage.global_batch or None, stage.weights or None
            self.plans.append(
                self.plans[-1].amend(from_step=stage.from_step, global_batch=batch, weights=weights)
            )
        self.steps = config.run.steps or config.run.epochs * (plan.steps_per_epoch or plan.loop_steps)

    def _take_over(self, before: Strategy | None, strategy: Strategy) -> None:
        """From the rank that is furthest where replicas live on, else from the newest checkpoint."""
        found = carry_over(self.world, before, strategy, step=self.step if before is not None else -1)
        if found is not None:
            self.step = found
            self._open_loader(found)
            self.reporter.say(f"{self.world.size} ranks go on from step {found}, in process")
            return
        meta = self.checkpointer.load_newest(strategy) if self.config.checkpoint.resume else None
        self.step = meta["step"] if meta is not None else 0
        self._open_loader(self.step)
        if meta is not None:
            self.loader.load_state_dict(meta["loader"])
            strategy.after_load(meta["updates"])
            self.summary.step = self.step
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
            if self.step == self.stage_end:
                self._open_loader(self.step)
            while self.step < self.stage_end:
                timeline, started = Timeline(), time.perf_counter()
                self.world.report(self.step, "data")
                with timeline.stage("data"):
                    cells = self.cells.take()
                result = self.stepper.take(self.step, cells, timeline, self.cells.ask)
                self.loader.computed(self.stepper.computed_s)
                self._freeze()
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

    def _freeze(self) -> None:
        """After the first step: a full collection would look at what lives as long as the run, for many steps' time."""
        if not self.frozen:
            gc.freeze()
            self.frozen = True

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
            cost=self.cost.run(),
        )  # fmt: skip
        self.world.report(self.step, "end")
        if stopped:
            self.reporter.say(f"stopped by a signal after step {self.step}; saved; start again to go on")

    def _save(self, *, wait: bool = False) -> None:
        assert self.strategy is not None
        self.world.report(self.step, "checkpoint")
        self.strategy.settle()
        # the loader may have handed out the next step already
        loader = {**self.loader.state_dict(), "step": self.step}
        meta = {"step": self.step, "updates": self.strategy.optimizer.updates, "loader": loader,
                "loss_scale": self.stepper.loss_scale, "ranks": self.world.size, "plan": self.loader.plan.digest,
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
            with self.meter.between_steps("evaluation"):
                result = evaluate(self.config, self.world, self.task, self.strategy)
        except NotFoundError as error:
            raise NotFoundError(
                f"evaluation.dataset = {self.config.evaluation.dataset!r}: {error}"
            ) from error
        self.summary.evaluation = {"step": self.step, **result}
        self.reporter.evaluation(self.summary.evaluation)

    def _report(self, result: StepResult, timeline: Timeline, step_s: float) -> None:
        spent = self.cost.step(result.samples, self.world.bytes_moved, self.world.size)
        self.paid_until = self.cost.since
        self.meter.step(
            timeline, computed_s=self.stepper.computed_s, cells=len(self.loader.lanes), loss=result.loss,
            moved_bytes=self.world.bytes_moved,
        )  # fmt: skip
        record: dict[str, Any] = {
            "step": self.step - 1, "loss": result.loss, "gradient_norm": result.norm, "learning_rate": result.rate,
            "samples": result.samples, "targets": result.targets, "ranks": self.world.size, "step_s": round(step_s, 6),
            "bytes_moved": self.world.bytes_moved, **spent, "total": self.cost.run(), "cells": len(self.loader.lanes),
            **self.efficiency.of_step(result.samples, step_s, self.world.size),
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
