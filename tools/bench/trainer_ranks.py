"""Measure one rank of a trainer benchmark; trainer.py launches this program once per world size.

torchrun … trainer_ranks.py RESULT CASE [ARGUMENT]; rank 0 writes RESULT as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from shardkit.stores.local import open_store
from shardkit_trainer import load_configuration
from shardkit_trainer.checkpoints import Checkpointer
from shardkit_trainer.distributed import World, join_world, leave_world
from shardkit_trainer.strategies import make_strategy
from shardkit_trainer.tasks import Inputs, make_task

SCHEMA = SimpleNamespace(schema={"text": SimpleNamespace(kind="str", dtype="", shape=())})
PAGE_BYTES = 4096


def make(world: World, cells: int, **overrides: Any) -> tuple[Any, Any]:
    """Make a GPT under a strategy; the caller gives ``model.width`` and further settings."""
    settings = {"run.directory": "unused", "data.dataset": "unused", "run.device": "cpu", **overrides}
    config = load_configuration(None, [f"{k}={v}" for k, v in settings.items()])
    task = make_task(config.model, SCHEMA, 0)
    return make_strategy(task, config, world, cells), task


def step(strategy: Any, task: Any, world: World, cells: list[Inputs], valid: int) -> None:
    """Run one step: forward, backward, reduce, clip, update."""
    counts = [row[0] for row in world.gather_integers([len(cells)])]
    passes = strategy.passes(cells, counts, cells[0].samples)
    for number, one in enumerate(passes):
        with strategy.accumulate(last=number == len(passes) - 1):
            losses, _ = task.loss(strategy.forward, one.tensors)
            torch.autograd.backward(losses.sum() * (strategy.loss_scale / valid))
        strategy.after_pass()
    strategy.scale_gradients(min(1.0, 1.0 / (strategy.reduce() + 1e-6)))


def cell(context: int, samples: int, seed: int) -> Inputs:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (samples, context + 1), generator=generator)
    tensors = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].contiguous()}
    return Inputs(tensors, samples * context, samples)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def memory(world: World, strategy_name: str, exact: str) -> dict[str, Any]:
    """Return the counted bytes by kind, and the growth of resident memory since before the model, after three steps."""
    before = resident()
    model = {"model.width": 512, "model.layers": 6, "model.heads": 8, "model.context": 32}
    strategy, task = make(
        world,
        4,
        **model,
        **{"parallel.strategy": strategy_name, "parallel.exact": exact, "parallel.pass_samples": 1},
    )
    shapes = strategy.shapes.values()
    copy = sum(4 * shape.numel() for shape in shapes)
    cells = [cell(32, 1, world.rank * 10 + n) for n in range(max(1, 4 // world.size))]
    for _ in range(3):
        step(strategy, task, world, cells, 128)
        held, peak = strategy.local_bytes(), resident()
        strategy.update(1e-4)
        strategy.clear()
    rows = world.gather_integers(
        [held["parameters"], held["gradients"], held["optimizer"], peak - before, resident() - before]
    )
    return {"copy": copy, "ranks": rows}


def exact(world: World, _strategy: str, _exact: str) -> dict[str, float]:
    """Return the milliseconds per step of 8 one-sample cells by kind of sum, as medians of interleaved rounds."""
    kinds = {
        "fp32": ("off", 32),
        "fp32, one cell a pass": ("off", 1),
        "fp64": ("fp64", 1),
        "int64": ("int64", 1),
    }
    model = {"model.width": 256, "model.layers": 5, "model.heads": 4, "model.context": 64}
    own = [cell(64, 1, n) for n in range(8) if n % world.size == world.rank]
    built = {}
    for name, (kind, samples) in kinds.items():
        built[name] = make(world, 8, **model, **{"parallel.exact": kind, "parallel.pass_samples": samples})
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(7):
        for name, (strategy, task) in built.items():
            world.gather_integers([0])
            started = time.perf_counter()
            step(strategy, task, world, own, 512)
            strategy.update(1e-4)
            strategy.clear()
            if round_:
                times[name].append(time.perf_counter() - started)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


class Frozen(nn.Module):
    """A model of ten matrices; a step changes one of them."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 256 * megabytes // 10, bias=False) for _ in range(10))


def save(world: World, megabytes: str, _exact: str) -> dict[str, Any]:
    """Measure how long background and synchronous saves block training, and the bytes of the next checkpoint."""
    model = Frozen(int(megabytes) // 3)
    task = SimpleNamespace(model=model, blocks=list)
    config = load_configuration(None, ["run.directory=x", "data.dataset=x", "run.device=cpu"])
    strategy = make_strategy(task, config, world, 1)
    tensors = [*model.parameters(), *(t for m in strategy.optimizer.moments().values() for t in m.values())]
    seconds: dict[str, list[float]] = {"synchronous": [], "copy": [], "save returns": [], "update waits": []}
    a = torch.ones(1500, 1500)

    def clock(name: str, work: Any) -> None:
        started = time.perf_counter()
        work()
        seconds[name].append(time.perf_counter() - started)

    with tempfile.TemporaryDirectory() as folder:
        config.checkpoint.keep = 2
        keeper = Checkpointer(open_store(Path(folder)), world, config, lambda *_a, **_k: None)
        buffers = [torch.empty_like(t) for t in tensors]
        for number in range(1, 13):
            with torch.no_grad():
                for tensor in tensors:
                    tensor.add_(1.0)
            if number % 2:
                clock("synchronous", lambda: keeper.save(number, strategy, {}, wait=True))  # noqa: B023
                clock("copy", lambda: [b.copy_(t) for b, t in zip(buffers, tensors, strict=True)])
            else:
                clock("save returns", lambda: keeper.save(number, strategy, {}))  # noqa: B023
                for _ in range(8):
                    a @ a  # the passes of the next step
                clock("update waits", strategy.before_update)
            keeper.wait()
        with torch.no_grad():
            next(iter(model.parameters())).add_(1.0)
        keeper.save(number + 1, strategy, {}, wait=True)
    return {
        "state_bytes": sum(t.nbytes for t in tensors), "one of thirty tensors changed": keeper.written_bytes,
        **{name: values[1:] for name, values in seconds.items()},
    }  # fmt: skip


def main() -> None:
    result, case, *arguments = sys.argv[1:]
    config = load_configuration(None, ["run.directory=x", "data.dataset=x", "run.device=cpu"])
    world = join_world(config)
    found = {"memory": memory, "exact": exact, "save": save}[case](world, *[*arguments, "", ""][:2])
    if world.rank == 0:
        Path(result).write_text(json.dumps(found))
    leave_world(world)


if __name__ == "__main__":
    main()
