"""Memory that a training process shares with the workers of its DataLoader (SPEC.md, "Batches in shared memory").

A worker gathers rows into *slots* of this memory and sends only their places. The training process makes arrays over
the slots, and a slot is free again when nothing refers to its arrays. Pages are therefore touched once per slot and
not once per batch, and no descriptor is sent. The memory has no name, so nothing remains however the processes end.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, Final, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from shardkit.loader import Batch

__all__ = ["BatchMemory"]

_LEAST: Final = 16 << 10  # bytes; smaller arrays are sent with the rest of the batch
_SLOTS: Final = 64  # per worker
_SLOT: Final = 64 << 20  # bytes of addresses; memory is only taken by pages that a batch has touched
_IN_WORKER, _IN_TRAINER = 0, 1  # flags of a slot: which process refers to it


class BatchMemory:
    """Slots for the arrays of batches of several workers; pickles only into a process that is being spawned."""

    def __init__(self, workers: int) -> None:
        self._workers, self._key = workers, uuid4().hex
        self._open(os.memfd_create("shardkit-batches"))
        _memories[self._key] = self

    def _open(self, file: int) -> None:
        weakref.finalize(self, os.close, file)
        self._file, self._lock = file, threading.Lock()
        flags = -(-2 * self._workers * _SLOTS // mmap.PAGESIZE) * mmap.PAGESIZE
        size = flags + self._workers * _SLOTS * _SLOT
        os.ftruncate(file, size)
        mapping = np.frombuffer(mmap.mmap(file, size), np.uint8)
        self.flags: NDArray[np.uint8] = mapping[: 2 * self._workers * _SLOTS].reshape(-1, 2)
        self.slots: NDArray[np.uint8] = mapping[flags:].reshape(-1, _SLOT)
        self._address: int = self.slots.__array_interface__["data"][0]

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self._workers, "key": self._key, "file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._workers, self._key = state["workers"], state["key"]
        self._open(state["file"].detach())

    def use(self, worker: int) -> Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]:
        """Return a function like `numpy.empty` that takes free slots of a worker; called in that worker."""
        global _of_worker
        _of_worker = self
        own = self.flags[worker * _SLOTS : (worker + 1) * _SLOTS]

        def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            if not _LEAST <= int(np.prod(shape)) * dtype.itemsize <= _SLOT or not _is_plain(dtype):
                return np.empty(shape, dtype)
            with self._lock:
                free = np.flatnonzero(~own.any(axis=1))
                if not len(free):  # the trainer keeps many batches
                    return np.empty(shape, dtype)
                own[free[0], _IN_WORKER] = 1
            return self._array(worker * _SLOTS + int(free[0]), _IN_WORKER, shape, dtype)

        return empty

    def _array(self, slot: int, flag: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.asarray(_Reference(self, slot, flag, shape, dtype))

    def send(self, value: Any) -> Any:
        """Return the message for a value of a batch. A slot of shared memory in it then belongs to the trainer."""
        if isinstance(value, tuple | list) and len(value) == 2:  # values and offsets of a ragged field
            parts = [self.send(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        array, is_tensor = value, isinstance(value, torch.Tensor)
        if is_tensor:
            if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
                return value
            if value.dtype == torch.bfloat16 or value.is_quantized:  # numpy has no such type
                return value
            array = value.numpy()
        if type(array) is not np.ndarray or not _is_plain(array.dtype) or not array.flags.c_contiguous:
            return value
        slot = (array.__array_interface__["data"][0] - self._address) // _SLOT
        starts = array.__array_interface__["data"][0] == self._address + slot * _SLOT
        if array.nbytes >= _LEAST and starts and 0 <= slot < len(self.slots):
            if self.flags[slot, _IN_TRAINER]:  # a second array over the same memory
                return value
            self.flags[slot, _IN_TRAINER] = 1
            return _Place(slot, array.shape, array.dtype, is_tensor)
        return _Small(array) if is_tensor and array.nbytes < _LEAST else value

    def receive(self, value: Any) -> Any:
        """Return the value of a batch from a message of `send`."""
        if isinstance(value, _Place):
            array = self._array(value.slot, _IN_TRAINER, value.shape, value.dtype)
            return torch.from_numpy(array) if value.is_tensor else array
        if isinstance(value, _Small):
            return torch.from_numpy(value.array)
        if isinstance(value, tuple | list) and len(value) == 2:
            parts = [self.receive(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        return value


class _Place(NamedTuple):
    slot: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_tensor: bool


class _Small(NamedTuple):
    """A tensor whose bytes are sent: passing a descriptor, as torch does, costs more."""

    array: NDArray[Any]


class _Reference:
    """Base of the arrays over a slot; clears one of its flags when the last of them is gone."""

    def __init__(
        self, memory: BatchMemory, slot: int, flag: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._memory, self._slot, self._flag, self._forks = memory, slot, flag, _forks
        address = memory.slots[slot].__array_interface__["data"]
        self.__array_interface__ = {"data": address, "shape": shape, "typestr": dtype.str, "version": 3}

    def __del__(self) -> None:
        if self._forks == _forks:  # otherwise a child may refer to the slot too: it is not used again
            self._memory.flags[self._slot, self._flag] = 0


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return not dtype.hasobject and dtype.names is None


def _reduce(batch: Batch) -> tuple[Any, ...]:
    """Pickle a batch for another process; a worker sends places of its slots."""
    if _of_worker is None or get_worker_info() is None:
        return batch.__reduce__()
    rebuild, (fields, *rest) = batch.__reduce__()
    sent = {name: _of_worker.send(value) for name, value in fields.items()}
    return _receive, (_of_worker._key, rebuild, sent, rest)  # noqa: SLF001


def _receive(key: str, rebuild: Callable[..., Batch], fields: dict[str, Any], rest: list[Any]) -> Batch:
    memory = _memories[key]
    return rebuild({name: memory.receive(value) for name, value in fields.items()}, *rest)


ForkingPickler.register(Batch, _reduce)
_of_worker: BatchMemory | None = None  # of the DataLoader whose worker this process is
_memories: weakref.WeakValueDictionary[str, BatchMemory] = weakref.WeakValueDictionary()
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)
