"""Batches on their way from a worker process: arrays in shared memory, and a note to the log that they have arrived.

Rows are gathered into *slots*, nameless files in memory that worker and trainer both map; sent is where they lie, and
what arrives is views of the slots. Once nothing refers to them the trainer's process says so in the slot's first byte,
and the worker uses the slot again: memory is touched, and a descriptor sent, once per slot and not once per batch.
Nothing has a name, so nothing outlives the processes, however they end.
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

from .loop_log import Loop, find_log

_LEAST: Final = 16 << 10  # bytes; smaller arrays are sent with the rest
_HEAD: Final = 64  # bytes before the array; the first is 1 while the trainer may use it
_SPARE: Final = 4  # unused slots that a worker keeps


class Sent(NamedTuple):
    """By which worker, in which loop; `last`: it sends no more."""

    token: str
    loop: Loop
    worker: int
    last: bool


class SentBatch(Batch):
    """A batch that becomes a plain one where it arrives."""

    __slots__ = ("sent",)
    sent: Sent

    @classmethod
    def of(cls, batch: Batch, sent: Sent) -> SentBatch:
        """`batch`, which it shares its fields with."""
        made = cls(batch)
        for name in Batch.__slots__:
            setattr(made, name, getattr(batch, name))
        made.sent = sent
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.sent, *super().__reduce__())


def _arrive(sent: Sent, rebuild: Callable[..., Batch], arguments: tuple[Any, ...]) -> Batch:
    batch = rebuild(*arguments)
    if get_worker_info() is not None:
        return SentBatch.of(batch, sent)  # a copy that the worker's `collate_fn` makes
    log = find_log(sent.token)
    if log is not None:
        log.arrive(sent.loop, sent.worker, last=sent.last)
    return batch


class _Slot:
    """Shared memory for one array at a time."""

    def __init__(self, number: int, size: int, file: int) -> None:
        self.number, self.size = number, size
        self.memory = mmap.mmap(file, _HEAD + size)
        self.address = int(np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0]) + _HEAD

    def over(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
        """What `__array_interface__` says of an array that lies here."""
        return {"data": (self.address, False), "shape": shape, "typestr": dtype.str, "version": 3}


class _Held:
    """Base of an array in a slot, and alive as long as anything refers to it."""

    def __init__(self, slot: _Slot, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.slot = slot
        self.__array_interface__ = slot.over(shape, dtype)


class _Place(NamedTuple):
    """Where a value lies that was sent."""

    slot: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: Any  # of the slot, the first time
    is_tensor: bool


# ---- the worker's side


class Outbox:
    """The slots of one worker in one loop, used by its gather and by the thread that sends."""

    def __init__(self, token: str) -> None:
        self.name = uuid4().hex
        self._lock = threading.Lock()
        self._slots: dict[int, tuple[_Slot, Callable[[], _Held | None]]] = {}  # by address
        self._made = 0
        self._files: dict[int, Any] = {}  # of slots that the trainer does not have yet
        self._gone: list[int] = []
        _outboxes[token] = self

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Like `numpy.empty`, in a slot where that is worth it."""
        size = int(np.prod(shape)) * dtype.itemsize
        if size < _LEAST or dtype.hasobject or dtype.names:
            return np.empty(shape, dtype)
        with self._lock:
            slot = self._take(size)
            held = _Held(slot, shape, dtype)
            self._slots[slot.address] = slot, weakref.ref(held)
        return np.asarray(held)

    def _take(self, size: int) -> _Slot:
        free = [slot for slot, held in self._slots.values() if not slot.memory[0] and held() is None]
        fitting = [slot for slot in free if size <= slot.size <= 4 * size]
        for slot in free[:-_SPARE]:
            if slot not in fitting[-1:]:
                del self._slots[slot.address]
                self._gone.append(slot.number)
        return fitting[-1] if fitting else self._make(size)

    def _make(self, size: int) -> _Slot:
        size = -(-size * 9 // (8 * mmap.PAGESIZE)) * mmap.PAGESIZE  # batches of ragged rows differ a little
        file = os.memfd_create("shardkit-batch")
        try:
            os.ftruncate(file, _HEAD + size)
            slot = _Slot(self._made, size, file)
            self._files[slot.number] = DupFd(file)
        finally:
            os.close(file)
        self._made += 1
        return slot

    def sent(self, value: Any) -> Any:
        """What is sent for a value: where its arrays lie, from now on the trainer's."""
        if isinstance(value, tuple):
            return tuple(map(self.sent, value))
        array, is_tensor = value, isinstance(value, torch.Tensor)
        if is_tensor:
            try:
                array = value.numpy()
            except (
                RuntimeError,
                TypeError,
            ):  # no array: of another device, layout or type, or part of a graph
                return value
        if (
            type(array) is not np.ndarray
            or array.nbytes < _LEAST
            or array.dtype.hasobject
            or array.dtype.names
        ):
            return _Small(array) if is_tensor else value
        slot = self._slot_of(array)
        if slot is None:  # made by a transform, or sent before
            array, original = self.empty(array.shape, array.dtype), array
            np.copyto(array, original)
            slot = self._slot_of(array)
            assert slot is not None
        slot.memory[0] = 1
        return _Place(slot.number, array.shape, array.dtype, self._files.pop(slot.number, None), is_tensor)

    def _slot_of(self, array: NDArray[Any]) -> _Slot | None:
        with self._lock:
            known = self._slots.get(array.__array_interface__["data"][0])
        if known is None or known[1]() is None or not array.flags.c_contiguous or known[0].memory[0]:
            return None
        return known[0]

    def take_gone(self) -> list[int]:
        """Numbers of slots that are used no more, each once."""
        with self._lock:
            gone, self._gone = self._gone, []
        return gone


class _Small(NamedTuple):
    """A tensor that is sent with the rest."""

    array: NDArray[Any]


_outboxes: dict[str, Outbox] = {}  # of this worker, by the log's token


def _send(batch: SentBatch) -> tuple[Any, ...]:
    """What multiprocessing sends for a batch; copies and other picklers know nothing of slots."""
    outbox = _outboxes.get(batch.sent.token)
    if outbox is None:
        return batch.__reduce__()
    rebuild, (fields, *rest) = Batch.__reduce__(batch)
    fields = {name: outbox.sent(value) for name, value in fields.items()}
    return _receive, (batch.sent, outbox.name, outbox.take_gone(), rebuild, fields, rest)


ForkingPickler.register(SentBatch, _send)


# ---- the training process's side


class _Arrived(_Held):
    """Gives the slot back to the worker."""

    def __init__(self, slot: _Slot, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        super().__init__(slot, shape, dtype)
        self._forks = _forks

    def __del__(self) -> None:
        if (
            self._forks == _forks
        ):  # else another process may look at this array too: the slot is not used again
            self.slot.memory[0] = 0


class _Inbox(NamedTuple):
    """What is known of the slots of an outbox."""

    outbox: str
    slots: dict[int, _Slot]

    def found(self, value: Any) -> Any:
        """The value for which this was sent."""
        if isinstance(value, _Place):
            array = np.asarray(_Arrived(self._slot(value), value.shape, value.dtype))
            return torch.from_numpy(array) if value.is_tensor else array
        if isinstance(value, _Small):
            return torch.from_numpy(value.array)
        return tuple(map(self.found, value)) if isinstance(value, tuple) else value

    def _slot(self, place: _Place) -> _Slot:
        if place.file is not None:
            file = place.file.detach()
            try:
                self.slots[place.slot] = _Slot(place.slot, os.fstat(file).st_size - _HEAD, file)
            finally:
                os.close(file)
        return self.slots[place.slot]


_inboxes: dict[tuple[str, int], _Inbox] = {}  # by the log's token and the worker
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(before=_count_fork)


def _receive(
    sent: Sent,
    outbox: str,
    gone: list[int],
    rebuild: Callable[..., Batch],
    fields: dict[str, Any],
    rest: list[Any],
) -> Batch:
    inbox = _inboxes.get((sent.token, sent.worker))
    if inbox is None or inbox.outbox != outbox:
        for token, worker in list(_inboxes):
            if find_log(token) is None:  # nobody reads that dataset any more
                del _inboxes[token, worker]
        inbox = _inboxes[sent.token, sent.worker] = _Inbox(outbox, {})
    for number in gone:
        inbox.slots.pop(number, None)
    found = {name: inbox.found(value) for name, value in fields.items()}
    if sent.last:
        del _inboxes[sent.token, sent.worker]
    return _arrive(sent, rebuild, (found, *rest))
