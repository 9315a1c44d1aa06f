"""A plan as an ``IterableDataset``: for torch's DataLoader and torchdata's StatefulDataLoader.

Workers share the steps in turn, as DataLoader asks its workers in turn, so the stream is that of ``ds.loader`` for
any number of workers::

    data = shardkit.torch.dataset(ds, plan)
    for batch in DataLoader(data, batch_size=None, num_workers=4): ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

from torch.utils.data import IterableDataset, get_worker_info

from shardkit.dataset import Dataset
from shardkit.errors import StateError, UsageError
from shardkit.loader import Batch, Loader, check_state
from shardkit.loader.block_loading import SharedSlots
from shardkit.loader.live import STATE_VERSION, check_geometry
from shardkit.plan import Plan
from shardkit.reading.cache.shared_blocks import SharedBlocks

from .loop_log import Loop, LoopLog
from .sent_batches import Outbox, Sent, SentBatch

_SLOTS_OF_NEED: Final = 5  # quarters of the blocks that the windows need
_LARGEST_OF_MEAN: Final = 2  # blocks that are larger are not shared
_LEAST_SHARED: Final = 64 << 20  # bytes: small windows are left while a worker that is late still needs them


def dataset(ds: Dataset, plan: Plan, **settings: Any) -> PlanDataset:
    """`plan` over `ds` for a DataLoader with ``batch_size=None`` and any number of workers.

    Args:
        ds: an open dataset; travels to spawned workers as its address, never its bytes.
        plan: made by ``ds.plan(…)``.
        settings: those of ``ds.loader``, but for stride, offset, run and share: DataLoader runs ahead of the trainer,
            so what a worker reads is not what was consumed.
    """
    return PlanDataset(ds, plan, **settings)


class PlanDataset(IterableDataset[Batch]):
    """One epoch of a plan per loop, epoch after epoch; see `dataset`.

    Where a loop begins is decided in the training process when DataLoader starts its workers; what they do early or
    late changes nothing. A loop that is left early begins its epoch again: that it was not finished is known by the
    batches that have not arrived. Not known is which of those that have DataLoader has handed out, nor what a
    `collate_fn` made of them: a loop that is left within the last ``num_workers · prefetch_factor`` steps of an epoch
    may then count as finished. Where that matters, say where to go on with `load_state_dict` or `set_epoch`, before
    the loop begins.

    Without workers a second loop supersedes the first, as with ``ds.loader``.
    """

    def __init__(self, ds: Dataset, plan: Plan, **settings: Any) -> None:
        for name in ("stride", "offset", "run", "share"):
            if name in settings:
                raise UsageError(f"{name}= is not for shardkit.torch.dataset; use ds.loader for it")
        self._ds, self._plan = ds, plan
        settings = {"tensors": True, "threads": 1, **settings}
        # ranks are found, compared and dealt lanes here, for workers have no process group
        loader = ds.loader(plan, **settings)  # refuses impossible settings here and not in a worker
        loader.close()
        rank, world, _ = loader.topology
        dealt = {} if loader.assignment is None else {"assignment": loader.assignment}
        self._settings = settings | {"rank": rank, "world": world, "mesh": None, "store": None} | dealt
        self._log = LoopLog()
        self._own: tuple[int, int] | None = (
            None  # (step, end of its epoch) at which this process goes on alone
        )
        self._at: tuple[int, int] | None = None  # the same, of the loop under way
        self._latest: Loop | None = None  # that this process has begun
        self._shared = (
            SharedBlocks(max(_LEAST_SHARED, loader.memory_needed)) if SharedBlocks.is_possible() else None
        )
        self._slots = _slots_of(loader) if SharedSlots.is_possible() else None

    def __getstate__(self) -> dict[str, Any]:
        """What a process that is being started gets; a copy has loops of its own."""
        kept = self.__dict__ | {"_at": None, "_latest": None}
        if get_spawning_popen() is not None:
            return kept
        sizes = None if self._slots is None else (self._slots.slots, self._slots.slot_bytes)
        return kept | {
            "_log": self._log.where(),
            "_shared": self._shared and self._shared.size,
            "_slots": sizes,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        log, shared, slots = state["_log"], state["_shared"], state["_slots"]
        self.__dict__ |= state | {
            "_log": LoopLog(log) if isinstance(log, int) else log,
            "_shared": SharedBlocks(shared) if isinstance(shared, int) else shared,
            "_slots": SharedSlots(*slots) if isinstance(slots, tuple) else slots,
        }

    def __repr__(self) -> str:
        rank, world = self._settings["rank"], self._settings["world"]
        return (
            f"<shardkit plan dataset, rank {rank} of {world}: {len(self):,} steps a loop, "
            f"next begins at step {self._log.where():,}; {self._plan} over {self._ds}>"
        )

    def __len__(self) -> int:
        """Steps of one epoch."""
        return self._plan.loop_steps

    def __iter__(self) -> Iterator[Any]:
        """The steps of this worker, from where the loop begins to the end of the epoch."""
        worker, workers = _worker()
        loop = self._log.begin(worker if get_worker_info() is not None else None)
        check_geometry(self._plan, loop.start)
        stop = self._plan.epoch_bounds(loop.start)[1]
        first, parts = loop.start + worker, min(workers, stop - loop.start)
        if self._own is not None:
            (first, stop), parts = self._own, workers
        self._own, self._at, self._latest = None, (first, stop), loop
        steps = range(first, stop, workers)
        if worker >= parts:
            return iter(())
        if not steps:
            self._log.done(loop, worker, parts, stop, sends=False)
            return iter(())
        return _Part(loop, steps, self._hand_out(loop, steps, parts), self)

    def is_latest(self, loop: Loop) -> bool:
        """Whether this process has begun no other loop since."""
        return self._latest == loop

    def _hand_out(self, loop: Loop, steps: range, parts: int) -> Iterator[Any]:
        worker, workers = _worker()
        with self._ds.loader(self._plan, **self._settings, stride=workers) as loader:
            if get_worker_info() is not None:
                loader.allocate = Outbox(self._log.token).empty
                loader.shared, loader.slots = (self._shared, self._slots) if workers > 1 else (None, None)
            loader.reads_on = False  # it ends with this loop
            loader.seek(steps.start)
            for batch in loader:
                step = _step_of(batch)
                if step == steps[-1]:
                    self._log.done(loop, worker, parts, steps.stop, sends=True)
                self._at = step + workers, steps.stop
                if get_worker_info() is None:
                    yield batch
                else:
                    yield self._sent(batch, loop, worker, last=step == steps[-1])

    def _sent(self, batch: Batch | Sequence[Batch], loop: Loop, worker: int, *, last: bool) -> Any:
        if isinstance(batch, Batch):
            return SentBatch.of(batch, Sent(self._log.token, loop, worker, last))
        return [
            SentBatch.of(cell, Sent(self._log.token, loop, worker, last and cell is batch[-1]))
            for cell in batch
        ]

    # ---- state

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at an epoch; frameworks call this by name."""
        here, length = self._log.where(), self._plan.loop_steps
        if here // length != epoch:  # a resumed epoch goes on where it was
            self._log.move(epoch * length)

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Where to go on.

        In the training process, ``state_dict(after=batch)`` is exact for any number of workers; without `after` it is
        where the next loop begins. In a worker, where torchdata calls it, it is that worker's own place.
        """
        state = {"version": STATE_VERSION, "plan": self._plan.digest, "manifest": self._ds.manifest.id}
        if after is not None:
            return state | {"step": _step_of(after) + 1}
        if self._at is None:
            return state | {"step": self._log.where()}
        worker, workers = _worker()
        return state | {"step": self._at[0], "until": self._at[1], "worker": worker, "workers": workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; see `Loader.load_state_dict`.

        Raises:
            StateError: another plan or manifest, or a worker's state where another number of workers runs.
        """
        step = check_state(state, self._plan, self._ds.manifest.id)
        workers = state.get("workers")
        alone = (
            workers == 1 and get_worker_info() is None
        )  # it may start workers: they must not all go on there
        if workers is None or (alone and step < state["until"]):
            self._log.move(step)
            return
        if workers != _worker()[1]:
            raise StateError(
                f"this state is of one of {workers} workers, and {_worker()[1]} run here; take the state with "
                "dataset.state_dict(after=batch) in the training process: it fits any number of workers"
            )
        self._own = step, int(state["until"])


class _Part(Iterator[Any]):
    """One worker's steps of a loop; all of them where there are no workers."""

    def __init__(self, loop: Loop, steps: range, batches: Iterator[Any], data: PlanDataset) -> None:
        self._loop, self._left, self._batches, self._data = loop, steps, batches, data

    def __next__(self) -> Any:
        """The next batch."""
        if self._left and not self._data.is_latest(self._loop):
            raise UsageError(
                f"this loop ended before step {self._left[0]}: another loop over this dataset has begun. A dataset has "
                "one loop at a time; to look at a batch use ds.loader(plan).peek(), or a second dataset"
            )
        batch = next(self._batches)
        self._left = self._left[1:]
        return batch


def _slots_of(loader: Loader) -> SharedSlots:
    """Room for what one worker's windows need, and a part more: workers are not at the same step."""
    mean = max(1, loader.mean_block_bytes)
    return SharedSlots(8 + _SLOTS_OF_NEED * loader.memory_needed // (4 * mean), _LARGEST_OF_MEAN * mean)


def _worker() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _step_of(batch: Batch | Sequence[Batch]) -> int:
    return batch.step if isinstance(batch, Batch) else batch[0].step
