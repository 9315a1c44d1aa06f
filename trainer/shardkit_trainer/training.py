"""A run: open, resume, step by step, evaluate, save; and go on with the ranks that are left.

Everything that a step does is a function of (configuration, step): a run that is killed and resumed, on any number of
ranks, takes the same steps. What it reads, `RunData` and `CellsAhead`, stands at the end.
"""

from __future__ import annotations

import gc
import json
import math
import signal
import threading
import time
from bisect import bisect_right
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed import distributed_c10d as c10d

import shardkit
from shardkit.errors import RunError
from shardkit.ledger import ledger_head, recorded_plan
from shardkit.ledger.bindings import configured_plans
from shardkit.loader import Rebalancing
from shardkit.repository.log import parse_dataset_url

from .agent import on_stop_signals
from .checkpoints import Checkpointer
from .configuration import Configuration
from .distributed import World, is_collective_failure, join_world, leave_world
from .recovery import Kept, Progress, carry_over, check_layout
from .reporting import Cost, Efficiency, Reporter, StageMeter, profiler
from .run_directory import JOB, Change, RunDirectory, check_changes, record_changes
from .steps import Regroup, Stepper, StepResult, evaluate
from .strategies import make_strategy
from .strategy import Strategy
from .supervisor import Left
from .tasks import Task, make_task


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


def train(config: Configuration, *, allow_changes: Collection[str] = ()) -> Summary:
    """Run or resume ``config`` on this rank, until it is finished or a signal asks it to stop."""
    stop = threading.Event()

    def ask(number: int, _frame: object) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt  # the second one
        stop.set()

    run = _Run(config, stop, allow_changes)
    with on_stop_signals(ask):
        world = join_world(config)
        try:
            while not run.taken_part_in(world):
                # outside of the handlers: a live traceback would keep the old groups, and their sockets, open
                world = _next_world(config, world, run)
        except Left:
            pass
        finally:
            run.close()
            leave_world(world)
    return run.summary


def _next_world(config: Configuration, world: World, run: _Run) -> World:
    """Leave a broken or outdated group; wait for the supervisor's next one.

    Its sockets close when nothing refers to it any more, and not before: a rank that waits in one of its collectives
    for this one, which has left because a third one died, is told by that alone.
    """
    run.close()
    leave_world(world)
    gc.collect()
    if run.checkpointer is not None:
        run.checkpointer.abandon(config.parallel.timeout_s)
    return join_world(config, after=world.generation)


class _Run:
    """The parts of one run on one rank; those that depend on the ranks are made by `attach`, let go by `close`."""

    world: World
    directory: RunDirectory
    reporter: Reporter
    profile: torch.profiler.profile | None
    strategy: Strategy
    stepper: Stepper
    loader: Any
    cells: CellsAhead

    def __init__(self, config: Configuration, stop: threading.Event, allow_changes: Collection[str]):
        self.config, self.stop, self.allow_changes = config, stop, allow_changes
        self.step = 0
        self.paid_until = time.monotonic()  # what this process costs is accounted for up to here
        self.summary = Summary(0, finished=False)
        self.data: RunData | None = None
        self.kept: Kept | None = None  # of the state, from the latest group that has come to take steps
        self.attached = self.handed_over = (
            False  # the latter: the state is in a checkpoint, for a group without those that leave
        )
        self.record: dict[str, Any] = {}
        self.checkpointer: Checkpointer | None = None
        self.parts = ExitStack()
        self.frozen = False

    def taken_part_in(self, world: World) -> bool:
        """Train with these ranks; whether that was to the end, or until the ranks have changed."""
        try:
            self.attach(world)
            self.finish()
            return True
        except Regroup:
            return False
        except RuntimeError as error:
            if not is_collective_failure(error):
                raise
            failure = world.describe_failure(error)
            if world.membership is None:
                raise failure from error
            return False

    # --- the parts ---------------------------------------------------------------------------------------------------

    def attach(self, world: World) -> None:
        """Make the parts of this rank of ``world``; take over the state of the ranks that have one, or resume."""
        config, self.world = self.config, world
        lead = world.rank == 0
        self.directory = directory = self.parts.enter_context(
            closing(RunDirectory(config.run.directory, lead=lead))
        )
        self.data = data = self.data or RunData(config, world, directory)
        changes: list[Change] = []
        if lead:
            changes = check_changes(config, self.allow_changes)
            directory.begin(config.to_json(), data.manifest, data.plans[0].digest, data.parts)
            record_changes(directory, config, changes)
            if (membership := world.membership) is not None:
                directory.store.replace(JOB, membership.store.get("job"))  # by which others find these ranks
                membership.store.set("lanes", str(min(plan.lanes for plan in data.plans)))
        self.steps = data.steps
        self.task: Task = make_task(config.model, data.dataset, config.run.seed)
        # before the model is wrapped and sharded: one process can still run it alone
        self.efficiency = Efficiency(config.log, self.task, world.device, config.parallel.precision)
        strategy = make_strategy(self.task, config, world, max(plan.lanes for plan in data.plans))
        reporter = Reporter(config.log, directory, lead, self.steps, self.task.unit)
        self.reporter = self.parts.enter_context(closing(reporter))
        if changes:
            self.reporter.say("settings differ from the start before: " + ", ".join(map(str, changes)))
        wanted = lead and config.log.profile_steps
        self.profile = self.parts.enter_context(profiler(config.log, directory)) if wanted else None
        self.meter = StageMeter(self.steps, world)
        self.stepper = Stepper(config, strategy, self.stop, self.meter, directory.event)
        self.checkpointer = Checkpointer(directory.store, world, config, self._tell)
        self._take_over(strategy)
        self.cost = Cost(config.log, directory.path / "metrics" / "train.jsonl", self.paid_until)
        self.strategy, self.attached, self.handed_over = strategy, True, False
        self.kept = None
        ranks = {"ranks": world.size, "generation": world.generation}
        directory.event("start", step=self.step, steps=self.steps, **ranks)

    def _tell(self, kind: str, **details: Any) -> None:
        """An event of checkpointing; on the console where it says why a run goes on from another one."""
        self.directory.event(kind, **details)
        if kind == "checkpoint-damaged":
            self.reporter.say(f"checkpoint {details['name']} is damaged and passed over: {details['error']}")
        elif kind == "checkpoint-replica":
            self.reporter.say(f"checkpoint {details['name']} is taken from {details['store']}")

    def _open_loader(self) -> None:
        """The loader of the stage that the next step belongs to."""
        assert self.data is not None
        self.loader, self.cells, self.stage_end = self.data.open_loader(self.step, self.world)
        self.stepper.cell_size = self.loader.plan.cell_size
        self.loader.telemetry.add_source("trainer", self.meter.numbers)
        self.loader.telemetry.add_table("stage", self.meter.table)

    def close(self) -> None:
        """Let go of everything that belongs to the present ranks; the state is kept."""
        if self.frozen:
            gc.unfreeze()
            self.frozen = False
        if self.data is not None:
            self.data.close_loader()
        self.parts.close()
        if self.attached:
            self.attached, stepper, updates = False, self.stepper, self.strategy.optimizer.updates
            if self.world.membership is not None:  # else no group follows
                progress = Progress(self.step, updates, stepper.loss_scale, stepper.skipped, self.record)
                self.kept = Kept.of(self.strategy, progress, held=not self.handed_over)
            del self.strategy, self.stepper, self.task, self.loader, self.cells, self.efficiency

    def _take_over(self, strategy: Strategy) -> None:
        """From the ranks that have a state together where it is whole, else from the newest checkpoint."""
        alone = self.world.membership is None  # there was no group before this one
        carried = None if alone else carry_over(self.world, self.kept, strategy)
        if carried is not None and (at := carried.progress) is not None:
            self.step, self.stepper.skipped, self.stepper.loss_scale = at.step, at.skipped, at.loss_scale
            self._open_loader()
            self.reporter.say(f"{self.world.size} ranks go on from step {self.step}, in process")
            if carried.unsent[0]:
                self.directory.event("unsent-lost", step=self.step, ranks=carried.unsent)
        else:
            at = None if carried is None else carried.furthest
            self._resume(strategy, at.step if at is not None else -1)
        if at is not None and at.record.get("step") == self.step - 1:
            self.reporter.catch_up(at.record)
        if self.world.size > 1:
            check_layout(self.world, strategy)

    def _resume(self, strategy: Strategy, reached: int) -> None:
        """From the newest checkpoint, or the beginning; ``reached``: steps that these ranks have taken, or −1."""
        assert self.checkpointer is not None
        steps, resume = self.steps, self.config.checkpoint.resume
        # a run that shall not resume has no part in what lies ahead of it
        last = steps if resume else reached
        meta = self.checkpointer.load_newest(strategy, last) if last >= 0 else None
        self.step = meta["step"] if meta is not None else 0
        self._open_loader()
        if meta is not None:
            self.loader.load_state_dict(meta["loader"])
            strategy.after_load(meta["updates"])
            self.summary.step = self.checkpointer.last_saved_step = self.step
            self.stepper.loss_scale = meta["loss_scale"]
            ranks = f"{self.world.size} ranks (was {meta['ranks']})"
            self.reporter.say(f"resumed at step {self.step} of {steps} on {ranks}")
            if reason := strategy.inexact_after(meta["ranks"]):
                self.reporter.say(f"last bits may differ from an undisturbed run's: {reason}")
        if reached > self.step:
            self.directory.event("rewind", step=self.step, reached=reached)
            self.reporter.say(
                f"the state after step {self.step} is gone with a rank: steps up to {reached} are retaken"
            )

    # --- the run -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        if self.step >= self.steps:
            self.reporter.say(f"nothing is left to do: the run has {self.steps} steps, all of them taken")
        try:
            self._end(self._take_steps())
        except Regroup as change:
            # all ranks of this group are here still
            self.strategy.settle()
            if change.leaving:
                self._save(wait=True)
                self.handed_over = True
            assert self.checkpointer is not None
            self.checkpointer.wait()
            raise

    def _take_steps(self) -> bool:
        """Steps up to the end, or until any rank was asked to stop; True in that case."""
        while self.step < self.steps:
            if self.step == self.stage_end:
                self._open_loader()
            started = time.perf_counter()
            with self.meter.stage("data", self.step):
                cells = self.cells.take()
            result = self.stepper.take(self.step, self.steps, cells, self.cells.ask)
            self.step += 1  # taken: whatever fails from here on must not take it again
            more = self.step < self.steps and not result.stop
            try:
                self.loader.computed(self.stepper.computed_s)
                self._freeze()
                self.summary.loss, self.summary.bytes_held = result.loss, self.stepper.bytes_held
                if more and self.step % self.config.checkpoint.every == 0:
                    with self.meter.stage("checkpoint"):
                        self._save()
            finally:
                self._report(result, time.perf_counter() - started)
            if more and self.config.evaluation.every and self.step % self.config.evaluation.every == 0:
                self._evaluate()
            if result.stop:
                return self.step < self.steps
            if result.change and more:
                raise Regroup(leaving=result.change == 2)
        return False

    def _freeze(self) -> None:
        """After the first step: a full collection would look at what lives as long as the run, for many steps' time."""
        if not self.frozen:
            gc.freeze()
            self.frozen = True

    def _end(self, stopped: bool) -> None:
        """The last save, evaluation, and the record of the end."""
        assert self.checkpointer is not None
        if self.checkpointer.last_saved_step != self.step:
            self._save(wait=True)
        self.checkpointer.wait()
        if not stopped and self.config.evaluation.dataset:
            self._evaluate()
        if self.config.parallel.exact != "off":
            self.summary.parameters_sha256 = self.strategy.parameters_sha256()
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
        assert self.checkpointer is not None
        assert self.data is not None
        self.world.report(self.step, "checkpoint")
        self.strategy.settle()
        # the loader may have handed out the next step already
        loader = {**self.loader.state_dict(), "step": self.step}
        meta = {"step": self.step, "updates": self.strategy.optimizer.updates, "loader": loader,
                "loss_scale": self.stepper.loss_scale, "ranks": self.world.size, "plan": self.loader.plan.digest,
                "configuration": self.config.to_json(), "manifest": self.data.manifest}  # fmt: skip
        if self.world.rank == 0:  # it writes the manifest; every rank has been handed these steps
            meta["ledger"] = ledger_head(self.directory.path, self.step)
        self.checkpointer.save(self.step, self.strategy, meta, wait=wait)

    def _evaluate(self) -> None:
        self.strategy.settle()
        with self.meter.between_steps("evaluation"):
            result = evaluate(self.config, self.strategy)
        self.summary.evaluation = {"step": self.step, **result}
        self.reporter.evaluation(self.summary.evaluation)

    def _report(self, result: StepResult, step_s: float) -> None:
        spent = self.cost.step(result.samples, self.world.bytes_moved, self.world.size)
        self.paid_until = self.cost.since
        seconds = self.meter.step(
            computed_s=self.stepper.computed_s, cells=len(self.loader.lanes), loss=result.loss,
            moved_bytes=self.world.bytes_moved,
        )  # fmt: skip
        self.record = record = {
            "step": self.step - 1, "loss": result.loss, "gradient_norm": result.norm, "learning_rate": result.rate,
            "samples": result.samples, "targets": result.targets, "ranks": self.world.size, "step_s": round(step_s, 6),
            "bytes_moved": self.world.bytes_moved, **spent, "total": self.cost.run(), "cells": len(self.loader.lanes),
            **self.efficiency.of_step(result.samples, step_s, self.world.size),
            **{f"{name}_s": round(value, 6) for name, value in seconds.items()},
        }  # fmt: skip
        if self.task.unit == "sample":
            record["accuracy"] = result.right / max(1, result.targets)
        self.reporter.step(record)
        if self.profile is not None:
            self.profile.step()


class RunData:
    """What a run reads: the dataset at the version that the run began with (a ref is resolved once), and its plans.

    Attributes:
        dataset, manifest: opened, and its id.
        parts: where several datasets are one: the URL of each, at its version.
        plans: of each stage; the first begins at step 0.
        steps: of the whole run.
    """

    def __init__(self, config: Configuration, world: World, directory: RunDirectory):
        self._config, self._directory = config, directory
        self._loader: Any = None
        data, known = config.data, directory.manifest_of_run()
        where: Any = dict(data.parts) or data.dataset
        if known is not None or world.rank:
            pinned = known or json.loads(world.store.get("versions"))
            where = pinned.get("parts") or f"{parse_dataset_url(data.dataset)[0]}@{pinned['manifest']}"
        self.dataset: Any = shardkit.open(where, locations=data.locations)
        self.manifest: str = self.dataset.manifest.id
        self.parts: dict[str, str] = {}
        if data.parts:
            self.parts = {part.name: f"{parse_dataset_url(data.parts[part.name])[0]}@{part.manifest.id}"
                          for part in self.dataset.version.parts}  # fmt: skip
        world.store.set("versions", json.dumps({"manifest": self.manifest, "parts": self.parts}))
        recorded = {} if known is None else recorded_plan(directory.path, known["plan"]) or {}
        self.plans = configured_plans(self.dataset.plan, asdict(data), recorded)
        first = self.plans[0]
        self.steps: int = config.run.steps or config.run.epochs * (first.steps_per_epoch or first.loop_steps)

    def open_loader(self, step: int, world: World) -> tuple[Any, CellsAhead, int]:
        """The loader of the stage that ``step`` belongs to, at that step, its cells, and the step that ends it."""
        self.close_loader()
        data, parallel, directory = self._config.data, self._config.parallel, self._directory.path
        begins = [0, *(stage.from_step for stage in data.stages), self.steps]
        number = min(bisect_right(begins, step), len(self.plans)) - 1
        rebalance: Rebalancing | bool = False
        if parallel.rebalance:
            # the store's keys hold the attempt or generation already
            store = c10d.PrefixStore(f"rebalance-{number}", world.store)
            rebalance = Rebalancing(every=parallel.rebalance_every, store=store, timeout_s=parallel.timeout_s)
        try:
            self._loader = self.dataset.loader(
                self.plans[number], rank=world.rank, world=world.size, by_cell=True, uneven=True, run=str(directory),
                assignment=parallel.assignment, rebalance=rebalance, telemetry=self._config.log.telemetry(),
                store=c10d.PrefixStore(f"loader-{number}", world.store) if world.size > 1 else None,
                cache=data.cache or None, cache_size=data.cache_size or None, share=data.share,
                **({"device": world.device, "device_prefetch": data.device_prefetch} if data.device_prefetch else {}),
            )  # fmt: skip
        except RunError as error:
            if isinstance(error.__cause__, DistError):  # a rank did not come: as where it misses a collective
                raise error.__cause__ from error
            raise
        self._loader.seek(step)
        end = min(begins[number + 1], self.steps)
        self._cells = CellsAhead(self._loader, step, end, in_turn=parallel.rebalance)
        return self._loader, self._cells, end

    def close_loader(self) -> None:
        """Close what `open_loader` gave; nothing where it is closed."""
        if self._loader is not None:
            self._cells.close()
            self._loader.close()
            self._loader = None


class CellsAhead:
    """The cells of steps ``step`` … ``end``−1, epoch after epoch, one step ahead.

    Gathering and journaling a small step takes the interpreter for longer than 1 % of it. `ask` is called when torch
    begins to compute without the interpreter, so that a thread has it meanwhile.

    Args:
        loader: at ``step``.
        in_turn: take cells only when they are needed: rebalancing is told what a step has cost before the next one.
    """

    def __init__(self, loader: Any, step: int, end: int, *, in_turn: bool):
        self._loader, self._asked, self._end, self._in_turn = loader, step, end, in_turn
        self._cells = self._follow(step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cells-ahead")
        self._next: Future[Any] | None = None

    def _follow(self, step: int) -> Iterator[Any]:
        """The loader begins to read an epoch while the last step of the one before is computed."""
        ahead = iter(self._loader)
        while True:
            epoch, ahead = ahead, None
            for cells in epoch:
                step += 1
                if step < self._end and step == self._loader.plan.epoch_bounds(step - 1)[1]:
                    ahead = iter(self._loader)
                yield cells
            ahead = ahead or iter(self._loader)

    def ask(self) -> None:
        """Begin to take the next step's cells, if there is a next step."""
        if self._next is None and self._asked < self._end and not self._in_turn:
            self._next = self._thread.submit(next, self._cells)

    def take(self) -> Any:
        """The next step's cells; waits for them."""
        self._asked += 1
        if self._next is None:
            return next(self._cells)
        cells, self._next = self._next.result(), None
        return cells

    def close(self) -> None:
        """Wait until nothing more is taken; to be called before the loader is closed."""
        self._thread.shutdown(cancel_futures=True)
