"""Per-step recovery with torchft: the quorum changes between two steps, and no process restarts.

    python examples/guides/quorums_of_torchft.py

``shardkit train`` restarts its ranks when machines join or leave (elastic_training.py). Programs with their own quorum,
such as torchft's Manager, change the ranks of a loader between two steps instead:

    manager = torchft.Manager(pg=…, load_state_dict=…, state_dict=…, min_replica_size=1)
    loader = ds.loader(plan, rank=0, world=1, uneven=True, run="runs/mine")
    while manager.current_step() < steps:
        batch = take_batch(manager, loader)               # below: new quorum, new rank, the same plan
        ...                                               # forward, backward, manager.allreduce(gradient)
        if manager.should_commit():                       # otherwise the step is taken again
            optimizer.step()

A replica that joins loads the state of any other replica; ``manager`` sends it along with the model. In this guide,
eight replicas join, leave and die in one process, with a stand-in for the manager's quorum, and every step has the
samples of the plan.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

import shardkit as sk
from guide_shell import workplace

STEPS, LANES = 24, 12
QUORUMS = {0: "ab", 5: "abc", 10: "ac", 14: "acde", 18: "cdefgh", 21: "h"}
"""First step → replicas in rank order. A replica dies in step 9, which is then taken again."""


class Quorum:
    """A stand-in for torchft's Manager; its methods have the same names and meanings."""

    def __init__(self, name: str, step: int) -> None:
        self._name, self._step, self._members = name, step, ""
        self._fails = step <= 9

    def start_quorum(self) -> None:
        """Agree on the replicas of the current step."""
        self._members = members_of(self._step)

    def participating_rank(self) -> int:
        return self._members.index(self._name)

    def num_participants(self) -> int:
        return len(self._members)

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        """Count the step, unless a replica has died in it."""
        if self._step == 9 and self._fails:
            self._fails = False
            return False
        self._step += 1
        return True


def members_of(step: int) -> str:
    return QUORUMS[max(first for first in QUORUMS if first <= step)]


def take_batch(manager: Any, loader: Any) -> Any:
    """Return this replica's share of the current step, with the rank and world of the quorum."""
    manager.start_quorum()
    rank, world = manager.participating_rank(), manager.num_participants()
    if (rank, world) != (loader.topology.rank, loader.topology.world):
        loader.resize(rank=rank, world=world)
    if loader.state_dict()["step"] != manager.current_step():
        loader.seek(manager.current_step())  # the step before was not committed
    return next(iter(loader))


def main() -> None:
    with workplace(__doc__):
        with sk.create("data/points", schema={"x": "float32[4]"}, format="arrow") as writer:
            for number in range(600):
                writer.add({"x": np.full(4, number, np.float32)})
        dataset = sk.open("data/points")
        plan = dataset.plan(global_batch=24, lanes=LANES, seed=0)
        replicas: dict[str, tuple[Quorum, Any]] = {}
        step = tries = 0
        while step < STEPS:
            for gone in replicas.keys() - set(members_of(step)):
                replicas.pop(gone)[1].close()
            for name in members_of(step):
                if name not in replicas:
                    loader = dataset.loader(
                        plan, rank=0, world=1, uneven=True, tensors=False, run="runs/quorums"
                    )
                    if replicas:
                        loader.load_state_dict(next(iter(replicas.values()))[1].state_dict())
                    replicas[name] = Quorum(name, step), loader
            batches = [take_batch(*replicas[name]) for name in members_of(step)]
            samples = sorted(number for batch in batches for number in batch.samples.tolist())
            assert samples == sorted(plan.step(step).ravel().tolist()), "every step is the plan's"
            committed = {manager.should_commit() for manager, _ in replicas.values()}
            step, tries = step + (committed == {True}), tries + 1
        for _, loader in replicas.values():
            loader.close()
        print(f"{STEPS} steps in {tries} tries with {len(QUORUMS)} quorums: every step is the plan's")
        if importlib.util.find_spec("torchft"):
            manager = importlib.import_module("torchft").Manager
            assert all(hasattr(manager, name) for name in vars(Quorum) if not name.startswith("_"))


if __name__ == "__main__":
    main()
