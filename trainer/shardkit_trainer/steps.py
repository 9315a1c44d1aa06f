"""One optimizer step, and an evaluation pass that sees every sample exactly once on any world size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

import shardkit
from shardkit.errors import NotFoundError, PlanError, RunError
from shardkit.loader import Batch

from .configuration import Configuration
from .reporting import StageMeter
from .signals import StopRequest
from .strategy import LOSS_BITS, Strategy, learning_rate
from .tasks import Inputs, mix


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


@dataclass(frozen=True)
class StepResult:
    """The result of a step; all but ``asked`` is the same on every rank.

    Attributes:
        loss: mean loss per valid target; nan if there are no targets or a loss or the norm was not finite.
        right: number of right answers.
        targets, samples: valid targets and samples of the whole step.
        norm: norm of the gradient, before clipping.
        rate: learning rate.
        stop: whether any rank was asked to stop.
        asked: whether this rank was asked to stop.
        amendments: number of the list of amendments to apply next.
    """

    loss: float
    right: int
    targets: int
    samples: int
    norm: float
    rate: float
    stop: bool
    asked: bool
    amendments: int


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
