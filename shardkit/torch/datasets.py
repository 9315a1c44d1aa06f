"""A plan as an `IterableDataset`, and the DataLoader that counts its epochs.

Worker w of W delivers steps k + w, k + w + W, …, which is the order of ``ds.loader`` for any W::

    data = shardkit.torch.dataset(ds, plan)
    loader = shardkit.torch.DataLoader(data, num_workers=4)
    for epoch in range(loader.epoch, epochs):
        for batch in loader: ...
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.fetch import _BaseDatasetFetcher

from shardkit.dataset import Dataset
from shardkit.errors import StateError, UsageError
from shardkit.loader import Batch, Loader, check_state
from shardkit.loader.states import STATE_VERSION, check_mapping, check_step, step_after
from shardkit.plan import Plan
from shardkit.ranges import shown
from shardkit.torch.batch_memory import BatchMemory

__all__ = ["DataLoader", "PlanDataset", "dataset"]

_REPEATED: Final = (
    "this loop repeats the batches of an earlier loop: torch's DataLoader does not tell a dataset how far its workers "
    "got. Use shardkit.torch.DataLoader(dataset, num_workers=…), which continues, or call dataset.set_epoch(epoch) "
    "before each loop"
)
_BATCHED: Final = (
    "a DataLoader with a batch size would collate whole batches of the plan into batches of batches. Write "
    "shardkit.torch.DataLoader(dataset, num_workers=…), or DataLoader(dataset, batch_size=None) with torch's own; "
    "return it from get_train_dataloader() of a Hugging Face Trainer"
)
_DISTRIBUTED: Final = (
    "accelerate would distribute this dataset to the ranks a second time, and part of the samples would be lost: each "
    "rank has its own lanes of the plan already. Write accelerator.prepare(shardkit.torch.DataLoader(dataset)), which "
    "is left as it is, or do not prepare the DataLoader"
)
_UNKNOWN: Final = (
    "torch's DataLoader does not tell how far its workers got: call dataset.state_dict(after=batch) with the batch "
    "that was trained on last, or use shardkit.torch.DataLoader and its state_dict()"
)
_POSITION, _TURN, _BEGUN = range(3)  # numbers in the memory that workers share


def dataset(ds: Dataset, plan: Plan, *, restart: bool = False, **settings: Any) -> PlanDataset:
    """Return `plan` over `ds` for `DataLoader`, or for torch's own with ``batch_size=None``.

    Args:
        ds: an open dataset. A spawned worker opens it again by its address.
        plan: made by ``ds.plan(…)``.
        restart: begin every loop at the start of its epoch, for validation.
        settings: as for ``ds.loader``, except stride, offset, run and share: workers read ahead of the trainer, so a
            worker cannot know what was consumed.

    Raises:
        UsageError: a setting does not apply to workers.
    """
    return PlanDataset(ds, plan, restart=restart, **settings)


class PlanDataset(IterableDataset[Batch]):
    """The steps of a plan, one epoch per loop; see `dataset`.

    The position is the step at which the next loop begins. `shardkit.torch.DataLoader`, and any loop without
    workers, advances it with each batch, so a loop after a ``break`` continues. torch's own
    DataLoader with workers does not say how far it got: call `set_epoch` before each loop.
    """

    def __init__(self, ds: Dataset, plan: Plan, *, restart: bool = False, **settings: Any) -> None:
        if not isinstance(ds, Dataset):
            raise UsageError(
                f"shardkit.torch.dataset takes an open dataset and a plan, got {shown(ds)}; open one first: "
                "shardkit.open(ROOT)"
            )
        for name in ("stride", "offset", "run", "share"):
            if name in settings:
                raise UsageError(f"{name}= is not for shardkit.torch.dataset; use ds.loader for it")
        self._ds, self._plan, self._restart = ds, plan, restart
        settings = {"tensors": True, "threads": 1, **settings}
        # Ranks compare their settings and get their lanes here: workers have no process group.
        with ds.loader(plan, **settings) as loader:
            self._rank, self._world, _ = loader.topology
            lanes = {} if loader.assignment is None else {"assignment": loader.assignment}
        self._settings = (
            settings | {"rank": self._rank, "world": self._world, "mesh": None, "store": None} | lanes
        )
        self._loader: Loader | None = None  # of all loops of one process with one stride
        self._loader_of = (0, 0)  # that process and stride
        self._batch_memory: BatchMemory | None = None  # of `DataLoader` and its workers
        self._position = 0
        self._turn = 0  # grows with each loop and move: an older loop has ended
        self._counted = -1  # the turn whose batches `DataLoader` counts
        self._worker_loops = 0  # begun in this worker process
        self._worker_steps = range(0)  # of the current loop that this worker has not delivered
        self._loaded_steps: range | None = None  # of a state that torchdata has loaded into this worker
        self._share()

    def _share(self) -> None:
        """Open memory in which this process reaches persistent workers."""
        self._owner = os.getpid()
        self._shared = torch.tensor([self._position, self._turn, -1]).share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        spawns = get_spawning_popen() is not None
        if spawns:
            _check_callers(self._world)
        return self.__dict__ | {"_loader": None, "_batch_memory": self._batch_memory if spawns else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        if not self._shared.is_shared():  # a copy in the same process
            self._share()

    def __repr__(self) -> str:
        return (
            f"<shardkit plan dataset, rank {self._rank} of {self._world}: {len(self):,} steps a loop, next begins at "
            f"step {self._position:,}; {self._plan} over {self._ds}>"
        )

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._plan.loop_steps

    def __getitem__(self, index: Any) -> Batch:
        """Raise UsageError: `Subset` and `random_split` ask for samples, and this dataset has steps."""
        raise UsageError(
            "the dataset of a plan has steps, not samples by number: give Subset, random_split and samplers the open "
            "dataset (shardkit.open), or choose samples with shardkit select and make a plan of them"
        )

    # ---- loops

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the position to the end of its epoch; in a worker, over the steps of that worker."""
        _check_callers(self._world)
        worker = get_worker_info()
        if worker is None:
            steps = self._begin_loop()
            return _Loop(self, self._read(steps), steps)
        self._worker_steps, repeats = self._begin_worker_loop(worker.id, worker.num_workers)
        batches = self._read(self._worker_steps)
        return _with_warning(batches) if repeats else batches

    def _begin_loop(self) -> range:
        """End the loop under way, and return the steps of the next one."""
        self._move(self._position)
        return self._next_steps()

    def _next_steps(self) -> range:
        first, stop = self._plan.epoch_bounds(self._position)
        return range(first if self._restart else self._position, stop)

    def _begin_worker_loop(self, worker: int, workers: int) -> tuple[range, bool]:
        """Return the steps of this worker, and whether another loop has begun there before."""
        self._worker_loops += 1
        if self._worker_loops > 1:  # the first loop begins where it did when the process was started
            self._position, self._turn, _ = self._shared.tolist()
        if self._loaded_steps is not None:
            steps, self._loaded_steps = self._loaded_steps, None
            if worker == 0 and self._position < steps.stop and not self._restart:
                # the next loop repeats these steps unless the position is set
                self._shared[_BEGUN] = self._turn
            return steps, False
        steps = self._next_steps()
        repeats = False
        if worker == 0 and not self._restart:
            parent = multiprocessing.parent_process()
            if parent is None or parent.pid != self._owner:
                raise UsageError(
                    "this dataset was made in another process, which cannot be asked where its loops begin: use "
                    "shardkit.torch.DataLoader, call dataset.set_epoch(epoch) before each loop, or make the dataset "
                    "in the process that iterates it"
                )
            repeats = int(self._shared[_BEGUN]) == self._turn
            self._shared[_BEGUN] = self._turn
        return steps[worker::workers], repeats

    def _read(self, steps: range) -> Iterator[Any]:
        if not steps:
            return
        # one loader for all loops of a process: the memory of its blocks is expensive to touch for the first time
        own = (os.getpid(), steps.step)
        if self._loader is None or self._loader_of != own:
            self._loader_of, self._loader = own, self._open_loader(steps.step)
        self._loader.seek(steps.start)
        for batch in self._loader:
            steps = self._worker_steps = steps[1:]
            yield batch

    def _open_loader(self, stride: int) -> Loader:
        loader = self._ds.loader(self._plan, **self._settings, stride=stride)
        loader.reads_on = False  # the next loop may begin elsewhere
        worker = get_worker_info()
        if worker is not None and self._batch_memory is not None:
            loader.allocate = self._batch_memory.use(worker.id)
        return loader

    def _move(self, step: int) -> None:
        """Begin the next loop at `step`; the loop under way ends."""
        if self._owner != os.getpid():  # a rank that was started with this dataset
            self._share()
        self._position, self._turn = step, self._turn + 1
        self._shared[_POSITION], self._shared[_TURN] = step, self._turn

    # ---- state

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next loop begins; after an epoch's last batch, the next one."""
        return self._plan.epoch_of(self._position)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of `epoch`, or where the position already is within it.

        Training loops and frameworks call this before each epoch.

        Raises:
            StateError: there is no such epoch.
        """
        step, epoch = 0, check_step("epoch", epoch)
        if self.epoch == epoch:
            step = self._position
        elif self._plan.parent is None:
            step = epoch * self._plan.loop_steps
        else:  # epochs of an amended plan differ in length
            for number in range(epoch):
                if step > self._plan.from_step:  # later ones have one length
                    step += (epoch - number) * self._plan.loop_steps
                    break
                step = self._plan.epoch_bounds(step)[1]
        self._move(check_step("step", step))

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run.

        Raises:
            StateError: there is no such step.
        """
        self._move(check_step("step", step))

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Return the state to continue after ``after``, by default at the position: JSON data of less than 1 KB.

        If workers of torch's own DataLoader have begun a loop, the position is unknown: a warning is issued, and the
        state cannot be loaded.
        """
        state = {"version": STATE_VERSION, "plan": self._plan.digest, "manifest": self._ds.manifest.id}
        if after is not None:
            return state | {"step": step_after(after)}
        worker = get_worker_info()
        if worker is not None:  # torchdata asks each worker for its own place
            steps = self._worker_steps
            own = {"until": steps.stop, "worker": worker.id, "workers": worker.num_workers}
            return state | {"step": steps.start} | own
        if self._counted != self._turn and int(self._shared[_BEGUN]) == self._turn and not self._restart:
            warnings.warn(_UNKNOWN, RuntimeWarning, stacklevel=2)
            return state | {"step": None}
        return state | {"step": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; see `shardkit.loader.Loader.load_state_dict`.

        Raises:
            StateError: the state belongs to another plan, manifest or number of workers.
        """
        check_mapping(state)
        if state.get("step", 0) is None:
            raise StateError(f"this state does not know its step: {_UNKNOWN}. To continue call seek(step)")
        step, workers = check_state(state, self._plan, self._ds.manifest.id), state.get("workers")
        worker = get_worker_info()
        if worker is not None and workers == worker.num_workers:
            self._loaded_steps = range(step, int(state["until"]), workers)
        elif workers is None and worker is None:
            self._move(step)
        else:
            raise StateError(
                f"this is the state of {workers or 'no'} DataLoader workers, and "
                f"{worker.num_workers if worker else 'none'} run here. Run as many, or take the state with "
                "state_dict(after=batch) or from shardkit.torch.DataLoader: it fits any number of workers"
            )


class DataLoader(TorchDataLoader[Any]):
    """torch's DataLoader over a `dataset`, with its position.

    It counts the batches that the trainer received: a loop after a ``break`` continues with the next batch, and
    `state_dict` is exact at any batch, for any number of workers now and after resuming. The position
    belongs to the dataset: a second DataLoader over the same dataset continues where the first one stopped.

    Args:
        dataset: made by `shardkit.torch.dataset`.
        settings: as for torch's DataLoader, except batch size, shuffling and samplers, which the plan decides.
    """

    dataset: PlanDataset
    # accelerate: prepare() leaves it as it is, and saves and loads its state
    _is_accelerate_prepared = True
    use_stateful_dataloader = True

    def __init__(self, dataset: PlanDataset, **settings: Any) -> None:
        if not isinstance(dataset, PlanDataset):
            raise UsageError(
                f"shardkit.torch.DataLoader takes the result of shardkit.torch.dataset(ds, plan), got {dataset!r}"
            )
        if settings.get("in_order") is False:
            raise UsageError("in_order=False is not for a plan, whose batches come in order: leave it out")
        for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            if settings.pop(name, None) not in (None, False):
                raise UsageError(f"{name}= is decided by the plan: pass it to ds.plan(…), or leave it out")
        super().__init__(dataset, batch_size=None, **settings)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate from the position to the end of its epoch."""
        data = self.dataset
        if self.num_workers == 0:
            batches = super().__iter__()  # begins the loop
            return _Loop(data, batches, data._next_steps())  # noqa: SLF001
        if self._iterator is not None and not all(
            one.is_alive() for one in getattr(self._iterator, "_workers", ())
        ):
            self._iterator = None  # a persistent worker was killed: new ones continue with the next batch
        steps = data._begin_loop()  # noqa: SLF001
        data._counted = data._turn  # noqa: SLF001
        starts_workers = not self.persistent_workers or self._iterator is None
        if starts_workers and hasattr(os, "memfd_create"):  # elsewhere torch copies each batch to new memory
            data._batch_memory = None  # noqa: SLF001
            with contextlib.suppress(OSError):  # a limit on sizes of files or addresses: as elsewhere
                data._batch_memory = BatchMemory(self.num_workers)  # noqa: SLF001
        return _Loop(data, super().__iter__(), steps)

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the next loop begins; after an epoch's last batch, the next one."""
        return self.dataset.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next loop at the start of `epoch`, or where the position already is within it."""
        self.dataset.set_epoch(epoch)

    def seek(self, step: int) -> None:
        """Begin the next loop at `step`, counted over the whole run."""
        self.dataset.seek(step)

    def state_dict(self, after: Batch | Sequence[Batch] | None = None) -> dict[str, Any]:
        """Return where to continue: after `after`, otherwise after the last batch that the trainer received."""
        return self.dataset.state_dict(after)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on any rank of any world, with any number of workers."""
        self.dataset.load_state_dict(state)


class _Loop(Iterator[Any]):
    """A loop of the training process: advances the position of its dataset with each batch."""

    def __init__(self, data: PlanDataset, batches: Iterator[Any], steps: range) -> None:
        self._data, self._batches, self._steps = data, batches, steps
        self._turn = data._turn  # noqa: SLF001

    def __next__(self) -> Any:
        data = self._data
        if self._steps and data._turn != self._turn:  # noqa: SLF001
            self._batches = iter(())  # ends its workers
            raise UsageError(
                f"this loop ended before step {self._steps.start}: another loop over this dataset has begun, or its "
                "position was set. A dataset has one loop at a time; for a second one make a second dataset"
            )
        if not self._steps:
            next(self._batches, None)  # workers end, or wait for the next loop
            raise StopIteration
        step = self._steps.start
        try:
            batch = next(self._batches)
        except BaseException:
            data._position = step  # noqa: SLF001  a `collate_fn` failed, and the trainer has no batch
            raise
        found = _step_of(batch, default=step)
        if found != step:
            raise StateError(
                f"a worker delivered step {found} where step {step} was due; begin the loop again"
            )
        self._steps = self._steps[1:]
        data._position = self._steps.start  # noqa: SLF001
        return batch


class _RepeatedBatch(Batch):
    """The first batch of a loop that repeats an earlier one; the training process warns when it arrives."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, super().__reduce__()


def _arrive(rebuild: Any, arguments: tuple[Any, ...]) -> Batch:
    batch: Batch = rebuild(*arguments)
    if get_worker_info() is not None:  # `default_convert` copies batches
        return _mark(batch)
    warnings.warn(_REPEATED, RuntimeWarning, stacklevel=2)
    return batch


def _mark(batch: Batch) -> Batch:
    marked = _RepeatedBatch(batch)
    for name in Batch.__slots__:
        setattr(marked, name, getattr(batch, name))
    return marked


def _with_warning(batches: Iterator[Any]) -> Iterator[Any]:
    """Mark the first batch, and warn in this worker too: a `collate_fn` may drop the mark."""
    warnings.warn(_REPEATED, RuntimeWarning, stacklevel=2)
    for number, batch in enumerate(batches):
        if number:
            yield batch
        else:
            yield _mark(batch) if isinstance(batch, Batch) else [_mark(batch[0]), *batch[1:]]


def _check_callers(world: int) -> None:
    """Refuse a caller that would batch the batches, or distribute them to the ranks again.

    A DataLoader tells its dataset nothing about its settings, so its fetcher is looked up on the stack.
    """
    frame = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, _BaseDatasetFetcher) and caller.auto_collation:
            raise UsageError(_BATCHED)
        kind = type(caller)
        is_sharding = kind.__name__ in ("IterableDatasetShard", "DataLoaderDispatcher")
        if world > 1 and is_sharding and kind.__module__.startswith("accelerate."):
            raise UsageError(_DISTRIBUTED)
        frame = frame.f_back  # type: ignore[assignment]


def _step_of(batch: Any, default: int = -1) -> int:
    """Return the step of a batch or a list of cells, or `default` for what a `collate_fn` has made of it."""
    first = batch[0] if isinstance(batch, list) and batch else batch
    return first.step if isinstance(first, Batch) else default
