"""A plan as an ``IterableDataset``: for torch's DataLoader and torchdata's StatefulDataLoader.

Workers share the steps in turn, as DataLoader asks its workers in turn, so the stream is that of ``ds.loader`` for
any number of workers::

    data = shardkit.torch.dataset(ds, plan)
    for batch in DataLoader(data, batch_size=None, num_workers=4): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from shardkit.dataset import Dataset
from shardkit.errors import StateError, UsageError
from shardkit.loader import Batch, Topology, check_state, find_topology
from shardkit.loader.state import STATE_VERSION, check_geometry
from shardkit.plan import Plan

__all__ = ["PlanDataset", "dataset"]


def dataset(ds: Dataset, plan: Plan, **settings: Any) -> PlanDataset:
    """`plan` over `ds` for a DataLoader with ``batch_size=None`` and any number of workers.

    Args:
        ds: an open dataset; travels to spawned workers as its address, never its bytes.
        plan: made by ``ds.plan(…)``.
        settings: those of ``ds.loader``, but for stride, offset and run: DataLoader runs ahead of the trainer, so what
            a worker reads is not what was consumed.
    """
    return PlanDataset(ds, plan, **settings)


class PlanDataset(IterableDataset[Batch]):
    """One epoch of a plan per loop, epoch after epoch; see `dataset`.

    The cursor lies in shared memory, so that an epoch that worker processes finished is finished here too. DataLoader
    asks its workers ahead: a loop that is left among the last batches of an epoch may count as finished. Where that
    matters, say where to go on with `load_state_dict` or `set_epoch`.
    """

    def __init__(self, ds: Dataset, plan: Plan, **settings: Any) -> None:
        for name in ("stride", "offset", "run"):
            if name in settings:
                raise UsageError(f"{name}= is not for shardkit.torch.dataset; use ds.loader for it")
        topology: Topology = find_topology(
            settings.pop("rank", None), settings.pop("world", None), mesh=settings.pop("mesh", None)
        )  # here, for workers have no process group
        self._ds, self._plan = ds, plan
        self._settings = {
            "tensors": True,
            "threads": 1,
            **settings,
            "rank": topology.rank,
            "world": topology.world,
        }
        self._cursor = _shared_number()  # step at which the next loop begins
        self._own: tuple[int, int] | None = (
            None  # (step, end of its epoch) at which this process goes on alone
        )
        self._at: tuple[int, int] | None = None  # the same, of the loop under way
        ds.loader(plan, **self._settings).close()  # refuses impossible settings here and not in a worker

    def __len__(self) -> int:
        """Steps of one epoch."""
        return self._plan.loop_steps

    def __iter__(self) -> Iterator[Any]:
        """The steps of this worker, from the cursor to the end of the epoch."""
        worker, workers = _worker()
        start = int(self._cursor)
        check_geometry(self._plan, start)
        first, stop = self._own or (start + worker, self._plan.epoch_bounds(start)[1])
        self._own, self._at = None, (first, stop)
        return self._hand_out(first, stop, workers)

    def _hand_out(self, first: int, stop: int, workers: int) -> Iterator[Any]:
        if first < stop:
            with self._ds.loader(self._plan, **self._settings, stride=workers) as loader:
                loader.seek(first)
                for batch in loader:
                    self._at = (_step_of(batch) + workers, stop)
                    yield batch
        self._cursor.fill_(stop)

    # ---- state

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at an epoch; frameworks call this by name."""
        here, length = int(self._cursor), self._plan.loop_steps
        if here // length != epoch:  # a resumed epoch goes on where it was
            self._cursor.fill_(epoch * length)

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Where to go on.

        In the training process, ``state_dict(after=batch)`` is exact for any number of workers; without `after` it is
        where the next loop begins. In a worker, where torchdata calls it, it is that worker's own place.
        """
        state = {"version": STATE_VERSION, "plan": self._plan.digest, "manifest": self._ds.manifest.id}
        if after is not None:
            return state | {"step": _step_of(after) + 1}
        if self._at is None:
            return state | {"step": int(self._cursor)}
        worker, workers = _worker()
        return state | {"step": self._at[0], "until": self._at[1], "worker": worker, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; see `Loader.load_state_dict`.

        Raises:
            StateError: another plan or manifest, or a worker's state where another number of workers runs.
        """
        step = check_state(state, self._plan, self._ds.manifest.id)
        workers = state.get("workers")
        if workers is None:
            self._cursor.fill_(step)
            return
        if workers != _worker()[1]:
            raise StateError(
                f"this state is of one of {workers} workers, and {_worker()[1]} run here; take the state with "
                "dataset.state_dict(after=batch) in the training process: it fits any number of workers"
            )
        until = int(state["until"])
        self._own = (step, until)
        if step >= until:
            self._cursor.fill_(until)  # should this epoch be over for all, the next begins there


def _shared_number() -> torch.Tensor:
    """(1,) int64 zero in memory that worker processes share; unnamed, freed with its last holder."""
    number: torch.Tensor = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    return number


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _step_of(batch: Batch | Sequence[Batch]) -> int:
    return batch.step if isinstance(batch, Batch) else batch[0].step
