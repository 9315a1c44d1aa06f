"""Elastic training: killed at any step, resumed on any number of ranks, with the same batch in every step.

    python examples/guides/elastic_training.py

The state of a loader is a step number and a few digests; it fits any rank of any world size. This guide runs the same
60 steps four times in one process, with a small model, and shows that even its weights are equal to the last bit:

    undisturbed on 1 rank · 2 ranks, then 3, then 1 · 4 ranks of unequal shares · read ahead, then thrown away

A real run is one command. It starts torchrun's agent, which restarts ranks that were killed:

    shardkit train run.toml --nproc 8 --max-restarts 20
    shardkit train run.toml --nproc 3                                           # later, with fewer ranks

On several machines, the command forms one job that machines can join and leave during training:

    shardkit train run.toml --nproc 8 --nnodes 1:4 --rendezvous node-1:29400

In your own loop (examples/ddp.py, fsdp2.py, lightning_trainer.py, accelerate_loop.py and hf_trainer.py are complete
programs):

    loader = ds.loader(plan, run="runs/mine")             # rank and world from torchrun
    loader.load_state_dict(saved["loader"])               # from any rank of any world size
    for batch in loader:
        ...
        saved["loader"] = loader.state_dict(after=batch)  # exact even if the loader has read ahead

``shardkit plan`` shows which world sizes divide the lanes. Trainers that average over ranks (DDP) need equal shares.
The loader refuses unequal shares without ``uneven=True``; with it, multiply the loss by ``batch.weight``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shardkit as sk
from guide_shell import shardkit, workplace

STEPS, FEATURES, LANES = 60, 8, 12


def make_dataset() -> None:
    """Write 1,200 points of a linear function with noise, as float32 rows."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=FEATURES)
    with sk.create(
        "data/points", schema={"x": f"float32[{FEATURES}]", "y": "float32"}, format="arrow"
    ) as writer:
        for _ in range(1200):
            x = rng.normal(size=FEATURES).astype(np.float32)
            writer.add({"x": x, "y": float(x @ truth + rng.normal() / 10)})


def exact_gradient(
    weights: NDArray[np.float64], x: NDArray[np.float32], y: NDArray[np.float32]
) -> NDArray[np.int64]:
    """Return the cell's gradient in fixed point: integers have the same sum in any order, on any ranks."""
    error = x.astype(np.float64) @ weights - y
    return np.round(error @ x * 2.0**32).astype(np.int64)


def play(
    worlds: Sequence[tuple[int, int]], run: str, *, look_ahead: int = 0
) -> tuple[NDArray[np.float64], list[list[int]]]:
    """Train up to each (step, world) in turn; return the weights and the samples of every step.

    Ranks take turns in this process, and their gradients are summed.
    """
    dataset = sk.open("data/points")
    plan = dataset.plan(global_batch=48, lanes=LANES, seed=0)
    weights = np.zeros(FEATURES)
    batches: list[list[int]] = []
    state = None
    for until, world in worlds:
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(
                    dataset.loader(
                        plan, rank=r, world=world, by_cell=True, uneven=True, tensors=False, run=run
                    )
                )
                for r in range(world)
            ]
            if state is not None:
                for loader in ranks:
                    loader.load_state_dict(state)
            streams = [_forever(loader) for loader in ranks]
            while len(batches) < until:
                step = [next(stream) for stream in streams]
                cells = [cell for cells in step for cell in cells]
                total = sum(exact_gradient(weights, cell["x"], cell["y"]) for cell in cells)
                weights = weights - 0.05 * (total / 2.0**32) / sum(len(cell["y"]) for cell in cells)
                batches.append(sorted(number for cell in cells for number in cell["samples"].tolist()))
            state = ranks[0].state_dict(after=step[0])
            for stream in streams:
                for _ in range(look_ahead):  # read but not trained on: the state does not count these steps
                    next(stream)
    return weights, batches


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def main() -> None:
    with workplace(__doc__):
        make_dataset()
        shardkit("plan", "data/points", "--global-batch", 48, "--lanes", LANES)
        weights, batches = play([(STEPS, 1)], "runs/undisturbed")
        for name, worlds, ahead in (
            ("2 ranks, 3 ranks, 1 rank", [(17, 2), (41, 3), (STEPS, 1)], 0),
            ("5 ranks: 12 lanes do not divide", [(STEPS, 5)], 0),
            ("read ahead by 3 and thrown away", [(17, 2), (STEPS, 4)], 3),
        ):
            found, same = play(
                worlds, f"runs/{name.replace(' ', '-').replace(':', '').replace(',', '')}", look_ahead=ahead
            )
            assert same == batches, "every step is the same batch"
            assert found.tobytes() == weights.tobytes(), "and the weights are the same bits"
            print(f"{name}: the same {STEPS} batches, the same weights {found[:3].round(3)}…")


if __name__ == "__main__":
    main()
