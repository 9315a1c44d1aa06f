"""Cases that run on every rank of one torchrun launch; results come back as JSON.

Run as ``[torchrun] trainer_ranks.py RESULT CASE…``, or forked by `become_rank`; each case is a function below.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.loader import Rebalancing
from shardkit.plan.assignment import Rules
from shardkit.stores.local import open_store
from shardkit.telemetry.records import read_documents
from shardkit.torch import CheckpointReader, CheckpointWriter
from shardkit_trainer.checkpoints import Checkpointer
from shardkit_trainer.configuration import Configuration, load_configuration
from shardkit_trainer.distributed import World, join_world, leave_world
from shardkit_trainer.strategies import make_strategy
from shardkit_trainer.tasks import Inputs, Task, make_task, mix

LANES, CELL, CONTEXT, VOCABULARY = 6, 2, 12, 40


class Cell(dict[str, Any]):
    """What the loader hands out, made by hand."""

    def __init__(self, fields: dict[str, Any], step: int, lane: int, slots: list[int]):
        super().__init__(fields)
        self.step, self.lane, self.slots, self.samples = step, lane, slots, slots


def cell(step: int, lane: int) -> Cell:
    """Sequences of very different lengths: many masked targets, some samples with none at all."""
    numbers = np.random.Generator(np.random.PCG64([step, lane]))
    lengths = [int(numbers.integers(0, CONTEXT + 6)) for _ in range(CELL)]
    blobs = [numbers.integers(0, VOCABULARY, n, dtype=np.uint8).tobytes() for n in lengths]
    return Cell({"blob": blobs}, step, lane, [lane * CELL + i for i in range(CELL)])


def configuration(**overrides: Any) -> Configuration:
    settings = {
        "run.directory": "unused", "data.dataset": "unused", "model.context": CONTEXT, "model.layers": 2,
        "model.width": 16, "model.heads": 2, "model.vocabulary": VOCABULARY, "parallel.pass_samples": 3,
        "run.device": "cpu", "parallel.timeout_s": 60.0, "optimizer.lr": 0.01, **overrides,
    }  # fmt: skip
    return load_configuration(
        None, [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
    )


SCHEMA = SimpleNamespace(schema={"blob": SimpleNamespace(kind="bytes", dtype="", shape=())})


def own_lanes(world: World) -> list[int]:
    """Very unequal: at 2 ranks 5 and 1, at 3 ranks 4, 1 and 1, at 4 ranks 4, 1, 1 and none."""
    first = LANES - (world.size - 1) if world.size < 4 else 4
    cuts = [0, first, *range(first + 1, LANES + 1)]
    cuts += [LANES] * (world.size + 1 - len(cuts))
    return list(range(cuts[world.rank], cuts[world.rank + 1]))


def lone_gradients(task: Task, cells: list[Inputs]) -> dict[str, torch.Tensor]:
    """One process, one pass, float64: what every strategy must come to."""
    model = task.model.double()
    valid = sum(c.valid for c in cells)
    tokens = torch.cat([c.tensors["tokens"] for c in cells])
    targets = torch.cat([c.tensors["targets"] for c in cells])
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100
    )
    torch.autograd.backward(loss / valid)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.float()
    return gradients


def step(
    strategy: Any,
    task: Any,
    world: World,
    number: int,
    lanes: list[int],
    rate: float | None,
    loss: bool = False,
) -> float:
    """One step as the training loop takes it; returns the gradient norm, or the loss of all ranks."""
    inputs = [task.prepare(cell(number, lane), 0) for lane in lanes]
    for lane, one in zip(lanes, inputs, strict=True):
        one.seed = mix(number, lane)
    rows = world.gather_integers([sum(i.valid for i in inputs), len(inputs)])
    valid = sum(row[0] for row in rows)
    passes = strategy.passes(inputs, [row[1] for row in rows], CELL)
    total = torch.zeros(1, dtype=torch.float64)
    for index, one in enumerate(passes):
        torch.manual_seed(one.seed)
        with strategy.accumulate(last=index == len(passes) - 1):
            losses, _ = task.loss(strategy.forward, one.tensors)
            value = losses.sum()
            (value * (strategy.loss_scale / valid)).backward()
        total += float(value.detach())
        strategy.after_pass()
    norm: float = strategy.reduce()
    if rate is not None:
        strategy.scale_gradients(min(1.0, 0.5 / (norm + 1e-6)))
        strategy.update(rate)
        strategy.clear()
    return float(world.all_reduce(total)) / valid if loss else norm


def whole_gradients(strategy: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in strategy.module.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def gradients(world: World) -> dict[str, Any]:
    """Largest relative error of any parameter's gradient, per strategy and mode."""
    errors = {}
    for strategy_name, exact in STRATEGIES:
        config = configuration(**{"parallel.strategy": strategy_name, "parallel.exact": exact})
        reference_task = make_task(config.model, SCHEMA, 7)
        reference = lone_gradients(
            reference_task, [reference_task.prepare(cell(3, lane), 0) for lane in range(LANES)]
        )
        task = make_task(config.model, SCHEMA, 7)
        strategy = make_strategy(task, config, world, LANES)
        norm = step(strategy, task, world, 3, own_lanes(world), None)
        found = whole_gradients(strategy)
        if strategy_name != "ddp" and exact != "off":
            found = sliced_gradients(strategy, world)
        worst = max(float((found[n].double() - g).norm() / g.norm()) for n, g in reference.items())
        true_norm = float(sum(g.square().sum() for g in reference.values()) ** 0.5)
        errors[f"{strategy_name}/{exact}"] = max(worst, abs(norm - true_norm) / true_norm)
    return errors


def hybrid(world: World) -> dict[str, Any]:
    """zero3 in pairs of ranks: the gradient's error, the share of the parameters held, and a checkpoint that loads."""
    settings = {"parallel.shard_ranks": 2}
    config = configuration()
    reference_task = make_task(config.model, SCHEMA, 7)
    reference = lone_gradients(reference_task, [reference_task.prepare(cell(3, n), 0) for n in range(LANES)])
    strategy, task = made(world, "zero3", "off", **settings)
    norm = step(strategy, task, world, 3, own_lanes(world), None)
    found = whole_gradients(strategy)
    worst = max(float((found[n].double() - g).norm() / g.norm()) for n, g in reference.items())
    true_norm = float(sum(g.square().sum() for g in reference.values()) ** 0.5)
    share = strategy.local_bytes()["parameters"] / sum(
        p.numel() * 4 for p in reference_task.model.parameters()
    )
    strategy.clear()
    checkpointer(world, "hybrid").save(1, strategy, {"updates": 0}, wait=True)
    plain, _ = made(world, "zero1", "off")
    assert checkpointer(world, "hybrid").load_newest(plain) is not None
    same = plain.parameters_sha256() == strategy.parameters_sha256()
    return {"error": max(worst, abs(norm - true_norm) / true_norm), "share": share, "same": same}


def sliced_gradients(strategy: Any, world: World) -> dict[str, torch.Tensor]:
    """Whole gradients out of the slices that exact mode keeps."""
    line = torch.zeros(strategy.layout.total)
    for owned, (index, low, high) in zip(strategy.optimizer.owned, strategy.cuts, strict=True):
        line[strategy.layout.offsets[index] + low : strategy.layout.offsets[index] + high] = owned.tensor.grad
    world.all_reduce(line)
    parts = zip(strategy.names, strategy.layout.offsets, strategy.layout.lengths, strict=True)
    return {name: line[o : o + n].view(strategy.shapes[name]) for name, o, n in parts}


SAVED = [("ddp", "off"), ("zero2", "off"), ("zero3", "off"), ("zero1", "int64")]
STRATEGIES = [
    ("ddp", "off"), ("zero1", "off"), ("zero2", "off"), ("zero3", "off"),
    ("ddp", "int64"), ("zero1", "int64"), ("zero2", "int64"), ("ddp", "fp64"),
]  # fmt: skip


# all into one strategy, and some into each other: their files have one form
LOADED = {
    ("ddp", "off"): SAVED, ("zero1", "off"): SAVED[:1], ("zero2", "off"): SAVED[2:3], ("zero3", "off"): SAVED[1:2],
    ("ddp", "int64"): SAVED[3:], ("zero1", "int64"): SAVED[2:], ("zero2", "int64"): SAVED[3:],
    ("ddp", "fp64"): SAVED[:1],
}  # fmt: skip


def lane_share(world: World, number: int) -> list[int]:
    """Lanes of this rank in a step: they move from step to step, as rebalancing would have it."""
    return [lane for lane in range(LANES) if (lane * (number + 1) // 2 + number) % world.size == world.rank]


def made(world: World, strategy_name: str, exact: str, **more: Any) -> tuple[Any, Any]:
    config = configuration(**{"parallel.strategy": strategy_name, "parallel.exact": exact, **more})
    task = make_task(config.model, SCHEMA, 7)
    return make_strategy(task, config, world, LANES), task


def exact_hashes(world: World) -> dict[str, str]:
    """SHA-256 of the parameters after four steps with dropout, clipping and moving lanes."""
    hashes = {}
    for strategy_name, exact in STRATEGIES:
        if exact != "off":
            strategy, task = made(world, strategy_name, exact, **{"model.dropout": 0.1})
            for number in range(4):
                step(strategy, task, world, number, lane_share(world, number), 0.01)
            hashes[f"{strategy_name}/{exact}"] = strategy.parameters_sha256()
    return hashes


def checkpointer(world: World, name: str, events: list[Any] | None = None, keep: int = 0) -> Checkpointer:
    def event(kind: str, **details: Any) -> None:
        if events is not None:
            events.append({"event": kind, **details})

    config = configuration(**{"checkpoint.keep": keep})
    return Checkpointer(open_store(Path(sys.argv[1]).parent / name), world, config, event)


def save(world: World) -> dict[str, Any]:
    """Each strategy: three steps, then a checkpoint under its own run directory."""
    for strategy_name, exact in SAVED:
        strategy, task = made(world, strategy_name, exact)
        for number in range(3):
            step(strategy, task, world, number, lane_share(world, number), 0.01)
        keeper = checkpointer(world, f"{strategy_name}-{exact}")
        keeper.save(3, strategy, {"updates": 3, "note": [1.5, None, {"a": "b"}]})
        # training goes on while the checkpoint is written: it must hold step 3 nevertheless
        step(strategy, task, world, 3, lane_share(world, 3), 0.01)
        keeper.wait()
    return {}


def load(world: World) -> dict[str, Any]:
    """Checkpoints into each strategy, one more step: distance to four steps without a stop, or bit-equality."""
    distances: dict[str, Any] = {}
    targets = list(LOADED) if world.size > 1 else [("ddp", "off"), ("zero3", "off"), ("zero2", "int64")]
    for target, exact in targets:
        straight, straight_task = made(world, target, exact)
        for number in range(4):
            step(straight, straight_task, world, number, lane_share(world, number), 0.01)
        whole = straight.whole_parameters()
        for source, source_exact in LOADED[target, exact]:
            strategy, task = made(world, target, exact)
            meta = checkpointer(world, f"{source}-{source_exact}").load_newest(strategy)
            assert meta == {"updates": 3, "note": [1.5, None, {"a": "b"}]}, meta
            strategy.after_load(meta["updates"])
            step(strategy, task, world, 3, lane_share(world, 3), 0.01)
            key = f"{source}/{source_exact} -> {target}/{exact}"
            if "int64" in exact and "int64" in source_exact:
                distances[key] = 0.0 if strategy.parameters_sha256() == straight.parameters_sha256() else 1.0
            else:
                found = strategy.whole_parameters()
                distances[key] = max(float((found[n] - whole[n]).abs().max()) for n in whole)
    return distances


def bytes_held(world: World) -> dict[str, Any]:
    """Bytes of this rank per strategy, between reduction and update, and those of a single copy."""
    held: dict[str, Any] = {}
    for strategy_name, exact in STRATEGIES[:4]:
        size = {
            "model.context": 64,
            "model.vocabulary": 256,
            "model.width": 64,
            "model.heads": 4,
            "model.layers": 2,
        }
        strategy, task = made(world, strategy_name, exact, **size)
        if strategy_name == "ddp":
            held["copy"] = sum(p.numel() * 4 for p in task.model.parameters())
        step(strategy, task, world, 0, own_lanes(world), None)
        held[strategy_name] = strategy.local_bytes()
    return held


REDUCTIONS: list[dict[str, Any]] = [
    {"parallel.reduction": "fp32"}, {"parallel.reduction": "bf16"}, {"parallel.reduction": "int8"},
    {"parallel.reduction": "powersgd", "parallel.rank": 2},
    {"parallel.reduction": "topk", "parallel.density": 0.1},
    {"parallel.reduction": "topk", "parallel.density": 0.1, "parallel.correction": 0.9, "optimizer.beta1": 0.0},
]  # fmt: skip


def reductions(world: World) -> list[dict[str, float]]:
    """Twenty-four steps with each: the last losses, and the bytes that went out."""
    found = []
    for settings in REDUCTIONS:
        # SGD: AdamW hides gradients that are wrong by a factor
        strategy, task = made(
            world, "ddp", "off", **{"optimizer.name": "sgd", "optimizer.beta1": 0.9, **settings}
        )
        before = world.bytes_moved
        for number in range(24):
            step(strategy, task, world, number % 4, lane_share(world, number), 1.0)
        moved = world.bytes_moved - before
        evaluation = [task.prepare(cell(number, lane), 0) for number in range(4) for lane in range(LANES)]
        total = sum(float(task.loss(task.model, one.tensors)[0].detach().sum()) for one in evaluation)
        whole = strategy.parameters_sha256()
        same = len({row[0] for row in world.gather_integers([int(whole[:15], 16)])}) == 1
        found.append({"loss": total / sum(one.valid for one in evaluation), "bytes": moved, "same": same})
    return found


def unsent(world: World) -> dict[str, float]:
    """What compression has not sent: saved by each rank, loaded by any number of ranks."""
    config = {"parallel.reduction": "topk", "parallel.density": 0.05, "optimizer.name": "sgd"}
    strategy, task = made(world, "ddp", "off", **config)
    for number in range(3):
        step(strategy, task, world, number, lane_share(world, number), 0.1)
    name = "unsent-of-2"
    if world.size == 2:
        checkpointer(world, name).save(3, strategy, {"updates": 3}, wait=True)
    fresh, _ = made(world, "ddp", "off", **config)
    keeper = checkpointer(world, name)
    assert keeper.load_newest(fresh) is not None
    fresh.after_load(3)
    # plain strategies load the same checkpoint and leave the rest aside
    assert keeper.load_newest(made(world, "zero2", "off", **{"optimizer.name": "sgd"})[0]) is not None
    line = fresh.compression._lines["error"].double()
    total = world.all_reduce(line.clone()) / world.size
    return {"size": float(total.norm()), "first": float(total[:64].sum())}


def own_seconds(world: World) -> dict[str, list[list[int]]]:
    """Microseconds of (its own computation, all of it) per rank; rank 1 sleeps for half a second before its pass."""
    found = {}
    for name in ("ddp", "zero2", "zero3"):
        strategy, task = made(world, name, "off", **{"parallel.rebalance": True})
        own, whole = [], []
        for number in range(3):
            inputs = [task.prepare(cell(number, lane), 0) for lane in lane_share(world, number)]
            world.gather_integers([0])
            started = time.perf_counter()
            for one in strategy.passes(inputs[:1], [1] * world.size, CELL):
                time.sleep(0.5 * (world.rank == 1))
                with strategy.accumulate(last=True):
                    losses, _ = task.loss(strategy.forward, one.tensors)
                    torch.autograd.backward(losses.sum())
            ended = time.perf_counter()
            own.append(round(1e6 * (strategy.computed_at() - started)))
            whole.append(round(1e6 * (ended - started)))
            strategy.reduce()
            strategy.clear()
        found[name] = world.gather_integers([min(own), max(whole)])
    return found


def local_steps(world: World) -> dict[str, Any]:
    """Four local steps between meetings: replicas differ, meet, are saved, go on."""
    settings = {"parallel.sync_every": 4, "parallel.outer_lr": 1.0, "parallel.outer_momentum": 0.0,
                "optimizer.name": "sgd", "optimizer.beta1": 0.0}  # fmt: skip
    strategy, task = made(world, "ddp", "off", **settings)
    same = []
    for number in range(8):
        inputs = [task.prepare(cell(number, lane), 0) for lane in lane_share(world, number)]
        own = sum(i.valid for i in inputs)
        for one in strategy.passes(inputs, [], CELL):
            losses, _ = task.loss(strategy.forward, one.tensors)
            torch.autograd.backward(losses.sum() / max(1, strategy.divisor(own, 0)))
        strategy.update(0.1)
        strategy.clear()
        rows = world.gather_integers([int(strategy.parameters_sha256()[:15], 16)])
        same.append(len({row[0] for row in rows}) == 1)
    checkpointer(world, f"local-{world.size}").save(8, strategy, {"updates": 8}, wait=True)
    other, _ = made(world, "ddp", "off", **settings)
    assert checkpointer(world, f"local-{world.size}").load_newest(other) is not None
    return {"same": same, "loaded": other.parameters_sha256() == strategy.parameters_sha256()}


def parts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """(model, optimizer) state as torch gives it, of any type."""
    return get_state_dict(model, optimizer)


def foreign_fsdp(world: World) -> dict[str, Any]:
    """A plain fully_shard program with torch's own state_dict functions: saved by two ranks, loaded by any number."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(2)
    for _ in range(2):
        torch.autograd.backward(model(torch.randn(8, 7)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    folder = Path(sys.argv[1]).parent / "fsdp"
    weights, moments = parts(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if world.size == 2:
        save_state(state, storage_writer=CheckpointWriter(folder, "step-2"))
    whole = {name: value.full_tensor().clone() for name, value in weights.items()}
    moment = moments["state"]["0.weight"]["exp_avg"].full_tensor().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.param_groups[0]["lr"] = 0.5
    weights, moments = parts(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    load_state(state, storage_reader=CheckpointReader(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = {name: value.full_tensor() for name, value in model.state_dict().items()}
    again = parts(model, optimizer)[1]["state"]["0.weight"]["exp_avg"].full_tensor()
    distance = max(float((found[n] - whole[n]).abs().max()) for n in whole)
    return {
        "weights": distance, "moments": float((again - moment).abs().max()), "lr": optimizer.param_groups[0]["lr"],
        "betas": list(optimizer.param_groups[0]["betas"]),
    }  # fmt: skip


def plain_loop(world: World) -> dict[str, Any]:
    """A loop of one's own on DDP with ``rebalance=`` and ``watch``: one rank's cells cost twice as much."""
    import_module("trainer_histogram").tell_cost(0.008 if world.rank == 1 else 0.004)
    root = Path(sys.argv[1]).parent / "plain-loop"
    if world.rank == 0:
        with shardkit.create(
            str(root), schema={"x": "float32[4]"}, shard_size="2KiB", block_size="512B"
        ) as writer:
            for number in range(720):
                writer.add({"x": np.full(4, number / 720, dtype=np.float32)})
    world.gather_integers([0])
    dataset = shardkit.open(str(root))
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    settings = Rebalancing(every=4, rules=Rules(lead=3, settle=8))
    loader = dataset.loader(
        dataset.plan(global_batch=18, lanes=9, seed=3),
        uneven=True,
        rebalance=settings,
        run=root.parent / "run",
    )
    loader.watch(model)
    seen, cells = [], []
    for batch in loader:
        cells.append(len(loader.lanes))
        seen += [int(s) for s in batch.samples]
        torch.autograd.backward(model(batch["x"]).mean() * batch.weight)
    stats = loader.stats()
    loader.close()
    rows = world.gather_integers([len(seen), len(set(seen)), cells[0], cells[-1], int(stats["moves"])])
    events = [line["event"] for line in read_documents(root.parent / "run" / "events.jsonl")]
    return {"ranks": rows, "events": events}


def become_rank(arguments: list[str]) -> None:
    """In a forked process."""
    sys.argv[1:] = arguments
    main()


def main() -> None:
    world = join_world(configuration())
    results = {}
    for name in sys.argv[2:]:
        results[name] = globals()[name](world)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    leave_world(world)


if __name__ == "__main__":
    main()
