"""A run on one rank: open, resume, take steps, evaluate and save.

A step is a function of (configuration, step), so a run that is killed and resumed on any number of ranks takes the same
steps. `RunData` and `CellsAhead`, which read the data, are at the end.
"""

from __future__ import annotations

import gc
import json
import math
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
from shardkit.dataset.run_plans import Versions
from shardkit.errors import ConfigurationError, RunError
from shardkit.function_names import load_named
from shardkit.ledger import ledger_head, recorded_plan, setting_differences
from shardkit.ledger.amendments import Amendment, abandoned_checkpoints, active_amendments, read_events
from shardkit.ledger.bindings import configured_plans
from shardkit.loader import Rebalancing
from shardkit.plan import FunctionMixer, Mixer, Plan
from shardkit.plan.mixers import find_mixer, mixer_text
from shardkit.repository.log import parse_dataset_url

from .amendments import AmendmentWatch
from .checkpoints import Checkpointer
from .configuration import Configuration, DataConfig
from .distributed import World, join_world, leave_world
from .reporting import Cost, Efficiency, Reporter, StageMeter, profiler
from .run_directory import OF_A_MACHINE, RunDirectory, SettingChange, check_changes, record_changes, software
from .signals import StopRequest, on_stop_signals
from .steps import Stepper, StepResult, evaluate
from .strategies import make_strategy
from .strategy import Strategy
from .tasks import Task, make_task


@dataclass
class Summary:
    """The result of a run.

    Attributes:
        step: number of steps taken in the whole run.
        finished: whether all steps were taken; otherwise a rank was asked to stop, and the state is saved.
        asked: whether this rank was asked to stop.
        loss: mean loss per valid target of the last step (nan if no step was taken).
        evaluation: results of the last evaluation.
        parameters_sha256: SHA-256 of all parameters and buffers in name order; exact mode only.
        bytes_held: bytes on this rank in the last step, by kind.
    """

    step: int
    finished: bool
    asked: bool = False
    loss: float = math.nan
    evaluation: dict[str, Any] = field(default_factory=dict)
    parameters_sha256: str = ""
    bytes_held: dict[str, int] = field(default_factory=dict)


def train(config: Configuration, *, allow_changes: Collection[str] = ()) -> Summary:
    """Run or resume ``config`` on this rank until it is finished or a signal asks a rank to stop.

    Raises:
        ConfigurationError: a setting is wrong, or changes the data or the model and is not in ``allow_changes``.
        RunError: another rank failed or differs, or the gradient stays non-finite.
    """
    stop = StopRequest()
    with on_stop_signals(stop.ask, ending=bool(stop.launcher)):
        world = join_world(config)
        run = _Run(config, world, stop, allow_changes)
        try:
            run.open()
            run.finish()
        except RuntimeError as error:
            # the exact type, since errors of memory and devices are subclasses
            if world.size > 1 and (type(error) is RuntimeError or isinstance(error, DistError)):
                raise world.failure(error) or error from error
            raise
        finally:
            run.close()
            leave_world(world)
    return run.summary


class _Run:
    """The parts of a run on one rank, made by `open` and released by `close`."""

    directory: RunDirectory
    reporter: Reporter
    profile: torch.profiler.profile | None
    strategy: Strategy
    stepper: Stepper
    checkpointer: Checkpointer
    loader: Any
    cells: CellsAhead

    def __init__(
        self, config: Configuration, world: World, stop: StopRequest, allow_changes: Collection[str]
    ):
        self.config, self.world, self.stop, self.allow_changes = config, world, stop, allow_changes
        self.step = 0
        self.summary = Summary(0, finished=False)
        self.data: RunData | None = None
        self.parts = ExitStack()
        self.frozen = False

    # --- the parts ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Make the parts and load the newest checkpoint."""
        config, world = self.config, self.world
        lead = world.rank == 0
        self.directory = directory = self.parts.enter_context(
            closing(RunDirectory(config.run.directory, lead=lead))
        )
        _check_same(config, world)
        changes: list[SettingChange] = check_changes(config, self.allow_changes) if lead else []
        self.data = data = RunData(config, world, directory)
        if lead:
            directory.begin(config.to_json(), data.manifest, data.plans[0].digest, data.parts)
            record_changes(directory, config, changes)
        self.steps = data.steps
        self.task: Task = make_task(config.model, data.dataset, config.run.seed)
        # before the model is wrapped and sharded, one process can run it alone
        self.efficiency = Efficiency(config.log, self.task, world.device, config.parallel.precision)
        self.strategy = make_strategy(self.task, config, world, max(plan.lanes for plan in data.plans))
        reporter = Reporter(config.log, directory, lead, self.steps, self.task.unit)
        self.reporter = self.parts.enter_context(closing(reporter))
        for remark in getattr(self.task, "remarks", ()):
            self.reporter.say(remark)
        if changes:
            self.reporter.say("settings differ from the start before: " + ", ".join(map(str, changes)))
        profiles = lead and config.log.profile_steps
        self.profile = self.parts.enter_context(profiler(config.log, directory)) if profiles else None
        self.meter = StageMeter(self.steps, world)
        self.stepper = Stepper(config, self.strategy, self.stop, self.meter, directory.event)
        self.checkpointer = Checkpointer(
            directory.store, world, config, self._checkpoint_event, data.abandoned_checkpoints
        )
        self._resume()
        self.watch = AmendmentWatch(directory.path, world, data.amendments)
        self.cost = Cost(config.log, directory.path / "metrics" / "train.jsonl")
        directory.event("start", step=self.step, steps=self.steps, ranks=world.size)

    def _checkpoint_event(self, kind: str, **details: Any) -> None:
        """Record an event, and print it if the run does not resume from its own newest checkpoint."""
        self.directory.event(kind, **details)
        if kind == "checkpoint-damaged":
            self.reporter.say(f"checkpoint {details['name']} is damaged and passed over: {details['error']}")
        elif kind == "checkpoint-replica":
            self.reporter.say(f"checkpoint {details['name']} is taken from {details['store']}")

    def _open_loader(self) -> None:
        """Open the loader of the next step's stage."""
        assert self.data is not None
        self.loader, self.cells, self.stage_end = self.data.open_loader(self.step, self.world)
        self.stepper.cell_size = self.loader.plan.cell_size
        self.loader.telemetry.add_source("trainer", self.meter.numbers)
        self.loader.telemetry.add_table("stage", self.meter.table)

    def close(self) -> None:
        if self.frozen:
            gc.unfreeze()
        if self.data is not None:
            self.data.close_loader()
        self.parts.close()

    def _resume(self) -> None:
        """Continue from the newest checkpoint, or from the beginning."""
        resume = self.config.checkpoint.resume
        meta = self.checkpointer.load_newest(self.strategy, self.steps) if resume else None
        self.step = meta["step"] if meta is not None else 0
        self._open_loader()
        if meta is None:
            return
        self.loader.load_state_dict(meta["loader"])
        self.strategy.after_load(meta["updates"])
        self.summary.step = self.checkpointer.last_saved_step = self.step
        self.stepper.loss_scale = meta["loss_scale"]
        ranks = f"{self.world.size} ranks (was {meta['ranks']})"
        self.reporter.say(f"resumed at step {self.step} of {self.steps} on {ranks}")
        if reason := self.strategy.inexact_after(meta["ranks"]):
            self.reporter.say(f"last bits may differ from an undisturbed run's: {reason}")

    # --- the run -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take all remaining steps, then save and evaluate."""
        if self.step >= self.steps:
            self.reporter.say(f"nothing is left to do: the run has {self.steps} steps, all of them taken")
        self._end(self._take_steps())

    def _take_steps(self) -> bool:
        """Take steps to the end or until a rank is asked to stop; return True if steps are left."""
        while self.step < self.steps:
            if self.step == self.stage_end:
                self._open_loader()
            started = time.perf_counter()
            with self.meter.stage("data", self.step):
                cells = self.cells.take()
            amendments = self.watch.look(self.step)
            result = self.stepper.take(self.step, self.steps, cells, self.cells.ask, amendments)
            self.step += 1
            if result.amendments != self.watch.number:
                self._amend(result.amendments)
            more = self.step < self.steps and not result.stop
            try:
                self.loader.computed(self.stepper.computed_s)
                if self.stepper.sample_losses is not None:
                    self.loader.note(cells, self.stepper.sample_losses)
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
                self.summary.asked = result.asked
                return self.step < self.steps
        return False

    def _amend(self, number: int) -> None:
        """Change the plans of steps that are not read yet to the plans of a list of amendments."""
        assert self.data is not None
        for one in self.watch.follow(number):
            self.reporter.say(f"amendment {one.number}: {one}")
        self.directory.event("amendments", step=self.step, active=[str(one) for one in self.watch.amendments])
        self.stage_end = self.data.amend(self.watch.amendments, self.step - 1)
        self.cells.end = self.stage_end

    def _freeze(self) -> None:
        """Freeze existing objects after the first step, so that full collections do not visit them."""
        if not self.frozen:
            gc.freeze()
            self.frozen = True

    def _end(self, stopped: bool) -> None:
        """Save and evaluate for the last time, and record the end."""
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
            self.reporter.say(
                f"stopped after step {self.step} and saved; the same command continues from there"
            )

    def _save(self, *, wait: bool = False) -> None:
        self.world.report(self.step, "checkpoint")
        self.strategy.settle()
        # the loader may have handed out the next step already
        loader = {**self.loader.state_dict(), "step": self.step}
        meta = {"step": self.step, "updates": self.strategy.optimizer.updates, "loader": loader,
                "loss_scale": self.stepper.loss_scale, "ranks": self.world.size, "plan": self.loader.plan.digest,
                "configuration": self.config.to_json(), "manifest": loader["manifest"]}  # fmt: skip
        if self.world.rank == 0:  # rank 0 writes the manifest; these steps were handed out on all ranks
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
        seconds = self.meter.step(
            computed_s=self.stepper.computed_s, cells=len(self.loader.lanes), loss=result.loss,
            moved_bytes=self.world.bytes_moved,
        )  # fmt: skip
        record = {
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


def _check_same(config: Configuration, world: World) -> None:
    """Refuse ranks that were started with other settings or software than rank 0; collective."""
    if world.size == 1:
        return
    names = ("shardkit", "torch", *(["cpu"] if config.parallel.exact != "off" else []))
    versions = {name: version for name, version in software().items() if name in names}
    first, *others = world.exchange({**config.to_json(), "software": versions})
    for rank, other in enumerate(others, 1):
        differing = [
            f"{key} = {theirs!r} (rank 0: {mine!r})"
            for key, mine, theirs in setting_differences(first, other)
            if key not in OF_A_MACHINE
        ]
        if differing:
            raise RunError(
                f"rank {rank} was started with {'; '.join(differing)}; start all machines with the same settings and"
                f" software; they may differ in {', '.join(sorted(OF_A_MACHINE))}"
            )


def _find_mixer(data: DataConfig) -> Mixer | None:
    if not data.mixer:
        return None
    text = mixer_text(data.mixer, data.mixer_every, data.mixer_arguments)
    found = find_mixer(text, data.mixer_every)
    if found is None:
        found = FunctionMixer(
            function=load_named("data.mixer =", data.mixer, "function"), every=data.mixer_every
        )
        if found.text != data.mixer:
            raise ConfigurationError(
                f"data.mixer = {data.mixer!r} is defined elsewhere: name it as {found.text!r}, a function of a module"
            )
    return found


class RunData:
    """The dataset of a run, at the version with which the run began, and its plans.

    Attributes:
        dataset: the open dataset.
        manifest: id of its manifest.
        parts: name → URL with version of each dataset, if several are opened as one.
        plans: one plan per stage and amendment; the first begins at step 0.
        steps: number of steps of the whole run.
        amendments: amendments in force.
        abandoned_checkpoints: names of checkpoints that an amendment abandoned.
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
        self._versions = Versions(self.dataset)
        events = [] if known is None else read_events(directory.path)
        self.abandoned_checkpoints = abandoned_checkpoints(events)
        if not world.rank:  # an amendment may be recorded while ranks start
            world.store.set("amendments-0", json.dumps([asdict(one) for one in active_amendments(events)]))
        self.amendments = [Amendment(**one) for one in json.loads(world.store.get("amendments-0"))]
        self._recorded: dict[str, Any] = recorded
        self.plans = self._plans()
        self._mixer = _find_mixer(data)
        first = self.plans[0]
        self.steps: int = config.run.steps or config.run.epochs * (first.steps_per_epoch or first.loop_steps)

    def _plans(self) -> list[Plan]:
        return configured_plans(
            self.dataset.plan,
            asdict(self._config.data),
            self._recorded,
            self.amendments,
            self._versions.amend,
        )

    def amend(self, amendments: list[Amendment], step: int) -> int:
        """Change to the plans of these amendments; return the end of the stage that contains ``step``."""
        self.amendments = amendments
        self.plans = self._plans()
        return self._stage(step)[1]

    def _stage(self, step: int) -> tuple[int, int]:
        """Return the number of the stage that contains a step, and the stage's end step."""
        begins = [0, *(plan.from_step for plan in self.plans[1:]), self.steps]
        number = min(bisect_right(begins, step), len(self.plans)) - 1
        return number, min(begins[number + 1], self.steps)

    def open_loader(self, step: int, world: World) -> tuple[Any, CellsAhead, int]:
        """Open the loader of the stage of ``step``; return it, its cells from ``step`` on, and the stage's end step."""
        self.close_loader()
        data, parallel, directory = self._config.data, self._config.parallel, self._directory.path
        number, end = self._stage(step)
        plan = self.plans[number]
        dataset: Any = self._versions.at(plan.population.identity)
        rebalance: Rebalancing | bool = False
        if parallel.rebalance:
            store = c10d.PrefixStore(f"rebalance-{number}", world.store)
            rebalance = Rebalancing(every=parallel.rebalance_every, store=store, timeout_s=parallel.timeout_s)
        try:
            self._loader = dataset.loader(
                plan, rank=world.rank, world=world.size, by_cell=True, uneven=True, run=str(directory),
                amendments=False,  # they are stages here
                mixer=self._mixer,
                assignment=parallel.assignment, rebalance=rebalance, telemetry=self._config.log.telemetry(),
                store=c10d.PrefixStore(f"loader-{number}", world.store) if world.size > 1 else None,
                cache=data.cache or None, cache_size=data.cache_size or None, share=data.share,
                **({"device": world.device, "device_prefetch": data.device_prefetch} if data.device_prefetch else {}),
            )  # fmt: skip
        except RunError as error:
            if isinstance(error.__cause__, DistError):  # a rank is missing: handle it as in a collective
                raise error.__cause__ from error
            raise
        self._loader.seek(step)
        # a decision of a mixer waits for other ranks in the store
        in_turn = parallel.rebalance or self._mixer is not None
        self._cells = CellsAhead(self._loader, step, end, in_turn=in_turn)
        return self._loader, self._cells, end

    def close_loader(self) -> None:
        """Close the open loader and its cells, if any."""
        if self._loader is not None:
            self._cells.close()
            self._loader.close()
            self._loader = None


class CellsAhead:
    """Reads the cells of steps ``step`` … ``end``−1, across epochs, one step ahead.

    Gathering and journaling a small step holds the interpreter for more than 1 % of the step. `ask` is called when
    torch begins to compute without the interpreter, so that a thread can use it meanwhile.

    Attributes:
        end: an amendment may lower it, before the last of the remaining steps is asked for.

    Args:
        loader: loader positioned at ``step``.
        in_turn: take cells only when they are needed: rebalancing needs the cost of a step before the next step, and
            while a mixer waits for other ranks in their store, torch must not need it.
    """

    def __init__(self, loader: Any, step: int, end: int, *, in_turn: bool):
        self._loader, self._asked, self.end, self._in_turn = loader, step, end, in_turn
        self._cells = self._follow(step)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cells-ahead")
        self._next: Future[Any] | None = None

    def _follow(self, step: int) -> Iterator[Any]:
        """Yield the cells of each step; open an epoch during the last step of the epoch before."""
        ahead = iter(self._loader)
        while True:
            epoch, ahead = ahead, None
            for cells in epoch:
                step += 1
                if step < self.end and step == self._loader.plan.epoch_bounds(step - 1)[1]:
                    ahead = iter(self._loader)
                yield cells
            ahead = ahead or iter(self._loader)

    def ask(self) -> None:
        """Begin to take the next step's cells in the thread, if there is a next step."""
        if self._next is None and self._asked < self.end and not self._in_turn:
            self._next = self._thread.submit(next, self._cells)

    def take(self) -> Any:
        """Return the next step's cells; wait for them."""
        self._asked += 1
        if self._next is None:
            return next(self._cells)
        cells, self._next = self._next.result(), None
        return cells

    def close(self) -> None:
        """Wait for the thread. Call this before the loader is closed."""
        self._thread.shutdown(cancel_futures=True)
