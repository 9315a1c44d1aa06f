"""Save and resume a run through torch.distributed.checkpoint, in shardkit's own store and replicas (SPEC.md §4)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from shardkit.errors import FormatError, IntegrityError, NotFoundError, RunError, ShardkitError
from shardkit.stores.local import open_store
from shardkit.stores.store import Store
from shardkit.torch import (
    CheckpointReader,
    CheckpointWriter,
    FlatSlice,
    checkpoint_names,
    copy_checkpoint,
    prune_checkpoints,
)
from shardkit.torch.checkpoint_format import read_checkpoint_manifest

from .configuration import Configuration
from .distributed import World
from .strategies import Strategy, local_part

State = dict[str, dict[str, Tensor]]
StateEntry = tuple[str, str, Tensor]  # part of the state, name, tensor
DAMAGE = (IntegrityError, FormatError, NotFoundError)


def checkpoint_name(step: int) -> str:
    """Return the name of a step's checkpoint, such as ``step-000000000100``; names sort by step."""
    return f"step-{step:012d}"


class Checkpointer:
    """Writes checkpoints, one at a time, keeps the newest ones, and loads the newest one that is intact.

    With ``checkpoint.asynchronous``, `save` returns at once. A thread with its own process group copies the tensors
    that the next update changes, then writes; that update waits for the copy.

    Replicas are further stores: each gets a verified copy of every checkpoint, and is read if the run directory's
    checkpoint is damaged. A failing replica is recorded as an event and does not end the run. Checkpoints that an
    amendment of the plan abandoned are neither loaded nor kept.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        config: Configuration,
        event: Callable[..., None],
        abandoned: Collection[str] = (),
    ):
        self._store, self._world, self._event = store, world, event
        self._keep, self._asynchronous = config.checkpoint.keep, config.checkpoint.asynchronous
        self._replicas = [open_store(url) for url in config.checkpoint.replicas]
        timeout = timedelta(seconds=max(600.0, config.parallel.timeout_s))
        # a separate group: collectives of two threads on one group would be matched in any order
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._staged: dict[tuple[str, str], Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._damaged: set[str] = set()
        self._abandoned = set(abandoned)
        self._distrust = False  # after damage: saves verify existing objects before they refer to them
        self.last_saved_step = -1
        self.written_bytes = 0

    def save(self, step: int, strategy: Strategy, meta: Mapping[str, object], *, wait: bool = False) -> None:
        """Save the state after ``step`` steps; collective. With ``wait``, return after the checkpoint is published."""
        self.wait()
        self.last_saved_step = step
        if self._exists(step):
            return  # a step's state is a function of the step
        state = strategy.state()
        later: list[StateEntry] = []
        if self._asynchronous and not wait:
            # tensors that a pass changes (buffers, compression errors) are copied here, the rest during the next passes
            steady = strategy.steady_until_update()
            entries = [(part, n, tensor) for part, tensors in state.items() for n, tensor in tensors.items()]
            later = [entry for entry in entries if entry[:2] in steady]
            state = {part: {} for part in state}
            self._stage([entry for entry in entries if entry[:2] not in steady], state)
            self._copied.clear()
            strategy.before_update = self._copied.wait
        what = (step, state, later, dict(meta))
        self._thread = threading.Thread(target=self._write, args=what, name="checkpoint", daemon=True)
        self._thread.start()
        if wait or not self._asynchronous:
            self.wait()

    def _exists(self, step: int) -> bool:
        name = checkpoint_name(step)
        replaced = self._damaged | self._abandoned
        found = self._world.rank == 0 and name not in replaced and name in checkpoint_names(self._store)
        return bool(self._world.gather_integers([int(found)])[0][0])

    def wait(self) -> None:
        """Wait until the background save is published; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _stage(self, entries: Sequence[StateEntry], state: State) -> None:
        """Put copies of this rank's parts into ``state``; reuse their memory, since fresh pages cost more."""
        for part, name, tensor in entries:
            source = tensor.run if isinstance(tensor, FlatSlice) else local_part(tensor)
            key = (part, name)
            if key not in self._staged or self._staged[key].shape != source.shape:
                self._staged[key] = torch.empty_like(source, memory_format=torch.contiguous_format)
            with torch.no_grad():
                self._staged[key].copy_(source)
            state[part][name] = _with_part(tensor, self._staged[key])

    def _write(self, step: int, state: State, later: Sequence[StateEntry], meta: dict[str, object]) -> None:
        """Copy the tensors left, write, then prune before any rank begins the next save. Runs in the thread."""
        name, started = checkpoint_name(step), time.monotonic()
        try:
            try:
                self._stage(later, state)
            finally:
                self._copied.set()
            if name in self._damaged | self._abandoned and self._world.rank == 0:
                self._store.delete(f"checkpoints/{name}.json")
            writer = CheckpointWriter(self._store, name, meta, distrust=self._distrust)
            save_state(state, storage_writer=writer, process_group=self._group)
            self.written_bytes = writer.written_bytes
            if self._world.rank == 0:
                self._damaged.discard(name)
                self._abandoned.discard(name)
                seconds = round(time.monotonic() - started, 4)
                self._event("checkpoint", step=step, name=name, seconds=seconds, new_bytes=self.written_bytes)
                if self._keep:
                    prune_checkpoints(self._store, self._keep, drop=self._abandoned)
                self._copy_to_replicas(name)
            dist.barrier(self._group)
        except BaseException as error:  # noqa: BLE001 - DCP's own error is no Exception; `wait` raises what is kept
            first = _first(error)
            # the rank's main thread explains a failed collective, since it knows which rank is gone
            failed = isinstance(first, RuntimeError) and not isinstance(first, ShardkitError)
            told = f"checkpoint was not saved; the ones before it are intact: {first}"
            self._error = RuntimeError(str(first)) if failed else RunError(told)

    def _copy_to_replicas(self, name: str) -> None:
        for store in self._replicas:
            with self._tolerate(store, name=name):
                written = copy_checkpoint(self._store, store, name)
                if self._keep:
                    prune_checkpoints(store, self._keep, drop=self._abandoned)
                self._event("replica", name=name, store=store.url, new_bytes=written)

    @contextmanager
    def _tolerate(self, store: Store, **details: str) -> Iterator[None]:
        """Record an event if a replica fails."""
        try:
            yield
        except (ShardkitError, OSError) as error:
            self._event("replica-failed", store=store.url, error=str(error), **details)

    def load_newest(self, strategy: Strategy, last: int | None = None) -> dict[str, Any] | None:
        """Load the newest intact checkpoint, of at most step ``last``; collective.

        A damaged checkpoint is reported and the one before it is tried. The state is a function of the step, so only
        time is lost.

        Returns:
            The checkpoint's meta, or None if there is no checkpoint.

        Raises:
            IntegrityError: every checkpoint is damaged.
            RunError: the checkpoint does not fit model and strategy.
        """
        failures: list[str] = []
        for name, place in self._agree_on_places():
            if name in self._abandoned or (last is not None and name > checkpoint_name(last)):
                continue
            store = self._replicas[place - 1] if place else self._store
            meta, damage = self._load(strategy, store, name)
            if damage:
                self._damaged |= set() if place else {name}
                self._distrust |= not place
                failures.append(f"{name}: {damage}")
                self._event("checkpoint-damaged", name=name, store=store.url, error=damage)
                continue
            if place:
                self._event("checkpoint-replica", name=name, store=store.url)
            return meta
        if failures:
            raise IntegrityError("every checkpoint is damaged; " + "; ".join(failures))
        return None

    def _load(self, strategy: Strategy, store: Store, name: str) -> tuple[dict[str, Any], str]:
        """Load a checkpoint; return its meta and the damage that any rank found (empty if none)."""
        reader = CheckpointReader(store, name)
        saved: Mapping[str, Any] = {}
        first: BaseException | None = None
        try:
            # before torch reads it: torch prints a stack trace for any damage
            saved = read_checkpoint_manifest(store, name)["tensors"]
        except DAMAGE as error:
            first = error
        if damage := self._agree_on_damage(first):
            return {}, damage
        try:
            load_state(strategy.loading_state(saved), storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            first = reader.failure or _first(error)
            damage = self._agree_on_damage(first)
            if not damage:
                raise RunError(f"checkpoint {name} does not fit model and strategy: {first}") from error
            return {}, damage
        return reader.meta, ""

    def _agree_on_damage(self, found: BaseException | None) -> str:
        """Return the damage found by the lowest rank, empty if no rank found any; collective."""
        mine = {"damage": str(found) if isinstance(found, DAMAGE) else ""}
        texts = [one["damage"] for one in self._world.exchange(mine)]
        return next(filter(None, texts), "")

    def _agree_on_places(self) -> list[tuple[str, int]]:
        """Return rank 0's list of (checkpoint, 0 for the run directory or number of a replica), newest first."""
        found: list[tuple[str, int]] = []
        if self._world.rank == 0:
            found = [(name, 0) for name in checkpoint_names(self._store)]
            for place, store in enumerate(self._replicas, 1):
                with self._tolerate(store):
                    found += [(name, place) for name in checkpoint_names(store)]
            found.sort(key=lambda one: one[0], reverse=True)  # stable: the run directory before its replicas
        first, *_ = self._world.exchange({"found": found})
        return [(name, place) for name, place in first["found"]]


def _with_part(like: Tensor, part: Tensor) -> Tensor:
    """Return ``like`` with its local content replaced by ``part``."""
    if isinstance(like, FlatSlice):
        return FlatSlice(part, like.shape, like.low)
    if isinstance(like, DTensor):
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return part


def _first(error: BaseException) -> BaseException:
    """Return the lowest rank's error from DCP's collection of errors."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return failures[min(failures)][0] if failures else error


class CheckpointProbe:
    """Saves a state of 32 MiB repeatedly, to measure the cost."""

    def __init__(self, folder: str):
        self._folder, self._saves = folder, 0
        self._state = torch.arange(1 << 23, dtype=torch.float32)
        self._copy = torch.empty_like(self._state)

    def copy(self) -> int:
        """Copy the state as an asynchronous save does; return its size in bytes."""
        return self._copy.copy_(self._state).nbytes

    def write(self) -> int:
        """Write a hashed and durable checkpoint; return its size in bytes."""
        self._saves += 1
        self._state += 1  # equal bytes would not be written again
        writer = CheckpointWriter(self._folder, f"step-{self._saves}")
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # about running in one process
            save_state({"weights": self._state}, storage_writer=writer, no_dist=True)
        return self._state.nbytes
