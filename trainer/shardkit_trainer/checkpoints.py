"""Saving and resuming a run through torch.distributed.checkpoint on shardkit's own store (SPEC.md §4)."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor

from shardkit.errors import FormatError, IntegrityError, NotFoundError, RunError
from shardkit.storage import Store
from shardkit.torch import (
    CheckpointReader,
    CheckpointWriter,
    checkpoint_names,
    prune_checkpoints,
    read_checkpoint_manifest,
)

from .distributed import World, is_collective_failure
from .replicas import Replicas
from .slices import FlatSlice
from .strategies import Strategy

__all__ = ["Checkpointer", "checkpoint_name"]

DAMAGE = (IntegrityError, FormatError, NotFoundError)


def checkpoint_name(step: int) -> str:
    """``step-000000000100``: names sort by step."""
    return f"step-{step:012d}"


class Checkpointer:
    """Writes checkpoints, one at a time, in the background where asked; keeps the newest k; resumes.

    Args:
        store: the run directory.
        keep: newest checkpoints that stay; 0 keeps all.
        asynchronous: `save` returns at once; a thread with a process group of its own copies what the next update will
            change (which waits for it), then writes.
        event: called with (kind, details) on rank 0's log.
        replicas: URLs of further stores that get a verified copy of each checkpoint, and are read where this one fails.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        *,
        keep: int,
        asynchronous: bool,
        timeout_s: float,
        event: Callable[..., None],
        replicas: Sequence[str] = (),
    ):
        self._store, self._world, self._keep, self._event = store, world, keep, event
        self._replicas = Replicas(replicas, event)
        self._asynchronous = asynchronous
        # its own group: collectives of two threads on one group would be matched in any order
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(600.0, timeout_s)))
        self._staged: dict[str, Tensor] = {}
        self._copied = threading.Event()
        self._copied.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._damaged: set[str] = set()
        self.last_saved_step = -1
        self.written_bytes = 0

    def save(self, step: int, strategy: Strategy, meta: Mapping[str, object], *, wait: bool = False) -> None:
        """Save the state after ``step`` steps; collective.

        Raises:
            RunError: this save, or the one before in the background, failed.
        """
        self.wait()
        self.last_saved_step = step
        if self._exists(step):
            return  # a step's state is a function of the step: it was saved before the ranks changed
        state = strategy.state()
        if self._asynchronous and not wait:
            steady = strategy.steady_until_update()
            # what a pass may change (buffers, what compression keeps) is copied here, the rest beside the next passes
            staged = {part: {n: self._stage(part, n, t) for n, t in tensors.items() if (part, n) not in steady}
                      for part, tensors in state.items()}  # fmt: skip
            rest = [
                (part, n, t)
                for part, tensors in state.items()
                for n, t in tensors.items()
                if (part, n) in steady
            ]
            self._copied.clear()
            strategy.before_update = self._copied.wait
            self._thread = threading.Thread(
                target=self._copy_and_write,
                args=(step, staged, rest, dict(meta), self._group),
                name="checkpoint",
                daemon=True,
            )
            self._thread.start()
        else:
            self._write(step, state, dict(meta), self._group)
            self.wait()

    def _exists(self, step: int) -> bool:
        name = checkpoint_name(step)
        found = self._world.rank == 0 and name not in self._damaged and name in checkpoint_names(self._store)
        return bool(self._world.gather_integers([int(found)])[0][0])

    def abandon(self, patience_s: float) -> None:
        """After the process group was destroyed: a save in the background ends, published or not; it may not go on.

        Raises:
            RunError: it does not end.
        """
        # Whoever has failed already lets go of the group, so that its sockets close and nobody waits for it.
        self._group, self._error = None, None
        gc.collect()
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                raise RunError(f"a checkpoint's writer does not end within {patience_s} s; restart the run")
        self._thread, self._error = None, None

    def wait(self) -> None:
        """Until the save in the background is published.

        Raises:
            RunError: it failed; earlier checkpoints are as they were.
            RuntimeError: as gloo raises it, where it failed because a rank is gone.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            first = _first(error)
            if is_collective_failure(first):
                raise RuntimeError(
                    str(first)
                ) from error  # a rank is gone: that is told, or survived, elsewhere
            raise RunError(f"checkpoint was not saved; the ones before it are intact: {first}") from error

    def _copy_and_write(
        self, step: int, staged: dict[str, dict[str, Tensor]], rest: list[tuple[str, str, Tensor]],
        meta: dict[str, object], group: Any,
    ) -> None:  # fmt: skip
        """Runs in the thread."""
        try:
            for part, name, tensor in rest:
                staged[part][name] = self._stage(part, name, tensor)
        except BaseException as error:  # noqa: BLE001 - raised again by `wait`
            self._error = error
            return
        finally:
            self._copied.set()
        self._write(step, staged, meta, group)

    def _stage(self, part: str, name: str, tensor: Tensor) -> Tensor:
        """A copy of this rank's part; the buffers are kept, since fresh pages cost more than the copy."""
        source, key = _owned_part(tensor), f"{part}.{name}"
        if key not in self._staged or self._staged[key].shape != source.shape:
            self._staged[key] = torch.empty_like(source, memory_format=torch.contiguous_format)
        with torch.no_grad():
            self._staged[key].copy_(source)
        return _with_part(tensor, self._staged[key])

    def _write(
        self, step: int, state: dict[str, dict[str, Tensor]], meta: dict[str, object], group: Any
    ) -> None:
        """Runs in the thread: write, then prune before any rank may begin the next save.

        ``group`` is this save's and is never looked up again: the ranks may have changed meanwhile.
        """
        name = checkpoint_name(step)
        started = time.monotonic()
        try:
            if name in self._damaged and self._world.rank == 0:
                self._store.delete(f"checkpoints/{name}.json")
            writer = CheckpointWriter(self._store, name, meta)
            save_state(state, storage_writer=writer, process_group=group)
            self.written_bytes = writer.written_bytes
            if self._world.rank == 0:
                self._damaged.discard(name)
                seconds = round(time.monotonic() - started, 4)
                self._event(
                    "checkpoint", step=step, name=name, seconds=seconds, new_bytes=writer.written_bytes
                )
                if self._keep:
                    prune_checkpoints(self._store, self._keep)
                self._replicas.copy(self._store, name, self._keep)
            dist.barrier(group)
        except BaseException as error:  # noqa: BLE001 - DCP's own error is no Exception; it is raised again by `wait`
            self._error = error

    def load_newest(self, strategy: Strategy) -> dict[str, Any] | None:
        """Load the newest checkpoint that is whole; collective.

        A damaged one is reported and the one before it is taken: training is a function of the step, so nothing but
        time is lost.

        Returns:
            The checkpoint's meta, None where there is no checkpoint.

        Raises:
            IntegrityError: there are checkpoints, and all of them are damaged.
            ShardkitError, RunError: the checkpoint is whole and does not fit this model.
        """
        failures: list[str] = []
        for name, place in self._agree_on_places():
            store = self._replicas.stores[place - 1] if place else self._store
            reader = CheckpointReader(store, name)
            try:
                state = strategy.loading_state(self._saved_tensors(store, name))
                load_state(state, storage_reader=reader, process_group=self._group)
            except CheckpointException as error:
                first = reader.failure or _first(error)
                # all ranks must go the same way: what one of them found damaged is damaged
                found = self._world.gather_integers([int(isinstance(first, DAMAGE))])
                if not any(row[0] for row in found):
                    raise RunError(
                        f"checkpoint {name} does not fit this model and strategy: {first}"
                    ) from error
                if not place:
                    self._damaged.add(name)
                failures.append(f"{name}: {first}")
                if self._world.rank == 0:
                    self._event("checkpoint-damaged", name=name, store=store.url, error=str(first))
                continue
            if place and self._world.rank == 0:
                self._event("checkpoint-replica", name=name, store=store.url)
            return reader.meta
        if failures:
            raise IntegrityError("every checkpoint is damaged; " + "; ".join(failures))
        return None

    def _saved_tensors(self, store: Store, name: str) -> dict[str, Any]:
        """The manifest's tensors; nothing where it is damaged, which the load itself then finds on all ranks."""
        try:
            tensors: dict[str, Any] = read_checkpoint_manifest(store, name)["tensors"]
        except DAMAGE:
            return {}
        return tensors

    def _agree_on_places(self) -> list[tuple[str, int]]:
        """(checkpoint, 0 for the run directory or the number of a replica), newest first; as rank 0 sees it."""
        if self._world.rank == 0:
            everywhere = [checkpoint_names(self._store), *self._replicas.names()]
            found = sorted(
                ((name, -place) for place, names in enumerate(everywhere) for name in names), reverse=True
            )
            self._world.store.set("checkpoints", json.dumps([(name, -place) for name, place in found]))
        dist.barrier(self._group)
        return [(name, place) for name, place in json.loads(self._world.store.get("checkpoints"))]


def _owned_part(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FlatSlice):
        return tensor.run
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _with_part(like: Tensor, part: Tensor) -> Tensor:
    """``like`` with its local content replaced by ``part``."""
    if isinstance(like, FlatSlice):
        return FlatSlice(part, like.shape, like.low)
    if isinstance(like, DTensor):
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return part


def _first(error: BaseException) -> BaseException:
    """The lowest rank's own error out of DCP's collection."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return failures[min(failures)][0] if failures else error
