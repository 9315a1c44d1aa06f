"""A run on one rank (`train`), one step of it (`Stepper`, SPEC.md §1), and its evaluation.

A step is a function of (configuration, step), so a run that is killed and resumed on any number of ranks takes the same
steps.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import DistError
from torch.distributed.fsdp import FSDPModule

import shardkit
from shardkit.errors import NotFoundError, PlanError, RunError
from shardkit.ledger import ledger_head
from shardkit.loader import Batch

from .checkpoints import Checkpointer
from .configuration import Configuration
from .data import CellsAhead, RunData
from .distributed import StopRequest, World, join_world, leave_world, on_stop_signals
from .optimizer import learning_rate
from .reporting import Cost, Efficiency, Reporter, StageMeter, profiler
from .run_directory import RunDirectory, SettingChange, check_changes, check_same, record_changes
from .strategies import LOSS_BITS, Strategy, make_strategy
from .tasks import Inputs, Task, make_task, mix


@dataclass
class Summary:
    """The result of a run."""

    step: int  # number of steps taken in the whole run
    finished: bool  # whether all steps were taken; otherwise a rank was asked to stop, and the state is saved
    asked: bool = False  # whether this rank was asked to stop
    loss: float = math.nan  # mean loss per valid target of the last step (nan if no step was taken)
    evaluation: dict[str, Any] = field(default_factory=dict)  # results of the last evaluation
    parameters_sha256: str = ""  # SHA-256 of all parameters and buffers in name order; exact mode only
    bytes_held: dict[str, int] = field(default_factory=dict)  # bytes on this rank in the last step, by kind


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
    data: RunData
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
        check_same(config, world)
        changes: list[SettingChange] = check_changes(config, self.allow_changes) if lead else []
        self.data = data = RunData(config, world, directory)
        self.parts.callback(data.close_loader)
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
        self.cost = Cost(config.log, directory.path / "metrics" / "train.jsonl")
        self._resume()
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
        self.loader, self.cells, self.stage_end = self.data.open_loader(self.step)
        self.stepper.cell_size = self.loader.plan.cell_size
        self.loader.telemetry.add_source("trainer", self.meter.numbers)
        self.loader.telemetry.add_table("stage", self.meter.table)

    def close(self) -> None:
        if self.frozen:
            gc.unfreeze()
        self.parts.close()

    def _resume(self) -> None:
        """Continue from the newest checkpoint, or from the beginning."""
        resume = self.config.checkpoint.resume
        meta = self.checkpointer.load_newest(self.strategy, self.steps) if resume else None
        self.step = meta["step"] if meta is not None else 0
        self._open_loader()
        if meta is None:
            if self.cost.taken is not None:
                self.reporter.say(
                    f"begins again at step 0: no checkpoint is {'left' if resume else 'used'}, and the run had taken "
                    f"step {self.cost.taken}"
                )
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
            amendments = self.data.look(self.step)
            result = self.stepper.take(self.step, self.steps, cells, self.cells.ask, amendments)
            self.step += 1
            if result.amendments != self.data.list_number:
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
        found, self.stage_end = self.data.amend(number, self.step - 1)
        for one in found:
            self.reporter.say(f"amendment {one.number}: {one}")
        self.directory.event("amendments", step=self.step, active=[str(one) for one in self.data.amendments])

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


# ---- one step


@dataclass(frozen=True)
class StepResult:
    """The result of a step; all but ``asked`` is the same on every rank."""

    # mean loss per valid target; nan if there are no targets or a loss or the norm was not finite
    loss: float
    right: int  # number of right answers
    # targets, samples: valid targets and samples of the whole step
    targets: int
    samples: int
    norm: float  # norm of the gradient, before clipping
    rate: float  # learning rate
    stop: bool  # whether any rank was asked to stop
    asked: bool  # whether this rank was asked to stop
    amendments: int  # number of the list of amendments to apply next


@dataclass
class Stepper:
    """Takes steps of one model on one rank."""

    _config: Configuration
    _strategy: Strategy
    _stop: StopRequest
    _meter: StageMeter
    _event: Callable[..., None]
    cell_size: int = 1  # samples of a full cell of the current plan
    skipped: int = 0  # latest steps in a row whose gradient was not finite
    loss_scale: float = 1.0  # factor on the loss in half precision; halved when gradients overflow
    bytes_held: dict[str, int] = field(default_factory=dict)  # by kind, in the last step
    sample_losses: Tensor | None = None  # (rows of this rank,) in the last step, with log.sample_losses
    computed_s: float = 0.0  # time of this rank's own work in the last step, without waits for other ranks

    def __post_init__(self) -> None:
        self._world = self._strategy.world
        if self._config.parallel.precision == "fp16":
            self.loss_scale = 2.0**16

    def take(
        self, step: int, steps: int, cells: list[Any], meanwhile: Callable[[], None], amendments: int
    ) -> StepResult:
        """Train on the cells of ``step`` of ``steps``; collective.

        ``meanwhile`` is called before the first backward, unless the ranks stop after this step. ``amendments`` is the
        number of the list of amendments that rank 0 asks to apply next.
        """
        meter = self._meter
        with meter.stage("prepare"):
            inputs = self._prepare(cells)
        with meter.stage("exchange", step):
            asked = self._stop.is_set()
            mine = (sum(i.valid for i in inputs), sum(i.samples for i in inputs), len(inputs))
            rows = self._world.gather_integers((*mine, int(asked), amendments))
        targets, samples, _, stop, _ = (sum(column) for column in zip(*rows, strict=True))
        with meter.stage("compute", step):
            started = time.perf_counter()
            passes = self._strategy.passes(inputs, [row[2] for row in rows], self.cell_size)
            divisor = self._strategy.divisor(mine[0], targets)
            results = self._compute(passes, divisor, None if stop else meanwhile)
            self.computed_s = meter.seconds["prepare"] + self._strategy.computed_at() - started
        with meter.stage("reduce", step):
            norm = self._strategy.reduce() / self.loss_scale
            results[2] += int(not math.isfinite(norm))
            loss, right, bad = self._world.all_reduce(results).tolist()
        config = self._config
        rate = learning_rate(config.optimizer, config.schedule, step=step, steps=steps, global_batch=samples)
        self._world.report(step, "step")
        with meter.stage("checkpoint"):
            self._strategy.before_update()  # waits for a checkpoint's copies, made during the passes
        with meter.stage("update"):
            self._update(step, norm, rate, finite=not bad)
        mean = math.nan if bad or not targets else loss / 2**LOSS_BITS / targets
        return StepResult(mean, right, targets, samples, norm, rate, bool(stop), asked, rows[0][-1])

    def _prepare(self, cells: list[Any]) -> list[Inputs]:
        seed = self._config.run.seed
        inputs = [self._strategy.task.prepare(cell, seed) for cell in cells]
        for one, cell in zip(inputs, cells, strict=True):
            one.seed = mix(seed, cell.step, cell.lane)
        return inputs

    def _compute(self, passes: list[Inputs], divisor: int, meanwhile: Callable[[], None] | None) -> Tensor:
        """Run forward and backward of every pass; return int64 [loss in fixed point, right answers, not finite]."""
        factor = self._strategy.loss_scale * self.loss_scale / max(1, divisor)
        loss_sum, right, bad, noted = 0, 0, 0, list[Tensor]()
        for number, inputs in enumerate(passes):
            torch.manual_seed(inputs.seed)
            with self._strategy.accumulate(last=number == len(passes) - 1):
                losses, correct = self._strategy.loss(inputs)
                loss = losses.sum()
                if self._config.log.sample_losses and inputs.samples:
                    noted.append(inputs.mean_losses(losses))
                if meanwhile is not None and not number:
                    meanwhile()
                torch.autograd.backward(loss * factor)
            self._strategy.after_pass()
            value = float(loss.detach())
            if math.isfinite(value):
                loss_sum += round(value * 2**LOSS_BITS)
            else:
                bad = 1
            right += int(correct)
        bad |= int(self._strategy.overflowed())
        self.sample_losses = torch.cat(noted) if noted else None
        return torch.tensor([loss_sum, right, bad], dtype=torch.int64, device=self._world.device)

    def _update(self, step: int, norm: float, rate: float, *, finite: bool) -> None:
        """Clip and step, or skip the update if the gradient is not finite."""
        self.bytes_held = self._strategy.local_bytes()
        if finite:
            clip = self._config.optimizer.clip
            factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            if factor != 1.0 or self.loss_scale != 1.0:
                self._strategy.scale_gradients(factor / self.loss_scale)
            self._strategy.update(rate)
            self.skipped = 0
        else:
            self._skip(step, norm)
        self._strategy.clear()

    def _skip(self, step: int, norm: float) -> None:
        self.skipped += 1
        allowed = self._config.optimizer.skip_nonfinite
        if self._config.parallel.precision == "fp16":
            # occasional overflow is expected in half precision: lower the scale and continue
            self.loss_scale, allowed = self.loss_scale / 2, max(allowed, 20)
        self._event("nonfinite", step=step, norm=str(norm), loss_scale=self.loss_scale)
        if self.skipped > allowed:
            raise RunError(
                f"step {step}: the gradient is not finite (norm {norm}), {self.skipped} in a row;"
                f" optimizer.skip_nonfinite = {self._config.optimizer.skip_nonfinite}. Lower optimizer.lr, raise"
                " schedule.warmup, or look at this step's samples: shardkit plan … shows which"
            )


# ---- evaluation


def evaluate(config: Configuration, strategy: Strategy) -> dict[str, Any]:
    """Return the mean loss per valid target, counts and accuracy over ``evaluation.dataset``; collective.

    The last step of the pass is short, so no sample is dropped or repeated. Sums are integers, so the result does not
    depend on how cells are distributed over ranks.
    """
    world = strategy.world
    order: dict[str, Any] = {"seed": 0, "remainder": "short", "shuffle": "none"}
    try:
        dataset = shardkit.open(config.evaluation.dataset)
        batch = min(config.evaluation.global_batch or config.data.global_batch, len(dataset))
        plan = dataset.plan(global_batch=batch, **order)
        if plan.lanes < world.size:
            plan = dataset.plan(global_batch=world.size, lanes=world.size, **order)
    except (NotFoundError, PlanError) as error:
        raise type(error)(f"evaluation.dataset = {config.evaluation.dataset!r}: {error}") from error
    totals = torch.zeros(4, dtype=torch.int64)  # loss in fixed point, right answers, valid targets, samples
    strategy.module.eval()
    loader = dataset.loader(plan, rank=world.rank, world=world.size, by_cell=True, uneven=True)
    with torch.no_grad(), loader:
        for cells in loader:
            totals += _one_step(cast("list[Batch]", cells), plan.cell_size, config.run.seed, strategy)
    strategy.module.train()
    for module in strategy.module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # only a backward pass would drop the gathered parameters
    loss, right, valid, samples = world.all_reduce(totals.to(world.device)).tolist()
    targets = max(1, valid)
    accuracy = {"accuracy": right / targets} if strategy.task.unit == "sample" else {}
    return {"loss": loss / 2**LOSS_BITS / targets, "targets": valid, "samples": samples, **accuracy}


def _one_step(cells: list[Batch], cell_size: int, seed: int, strategy: Strategy) -> torch.Tensor:
    inputs = [strategy.task.prepare(cell, seed) for cell in cells if len(cell.samples)]
    counts = [row[0] for row in strategy.world.gather_integers([len(inputs)])]
    totals = torch.zeros(4, dtype=torch.int64)
    for one in strategy.passes(inputs, counts, cell_size):
        losses, right = strategy.loss(one, evaluating=True)
        totals += torch.tensor(
            [round(float(losses.sum()) * 2**LOSS_BITS), int(right), one.valid, one.samples]
        )
    return totals
