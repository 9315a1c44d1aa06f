"""Copies of batches to a device ahead of the trainer, from pinned memory on a separate stream (SPEC.md §10).

torch is imported only if a loader was given a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardkit.errors import ConfigurationError
from shardkit.loader.batch import Batch, StepBatches
from shardkit.loader.gather import Allocate
from shardkit.ranges import shown

__all__ = ["CudaStream", "DeviceFeed", "DeviceOutput", "find_device"]

Finish = Callable[[Any], Any]
"""Maps a tensor on the device to the tensor that the trainer gets, in new memory of that device."""


class CudaStream:
    """A stream of copies that run in parallel to the trainer's work."""

    def __init__(self, device: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        self._cuda, self._device, self._stream = cuda, device, cuda.Stream(device)

    def sending(self) -> AbstractContextManager[Any]:
        """Return a context in which operations run on this stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return context

    def sent(self) -> Any:
        """Return an event that occurs when all operations started so far are done."""
        return self._stream.record_event()

    def receive(self, event: Any, tensors: list[Any]) -> None:
        """Make the trainer's stream wait for the event, and keep the tensors' memory until that stream is done."""
        current = self._cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    def is_done(self, event: Any) -> bool:
        """Return True if the event has occurred."""
        return bool(event.query())


def find_device(asked: Any) -> Any:
    """Return the torch.device, with an index if it is a CUDA device.

    Raises:
        ConfigurationError: the device is neither a CUDA device that torch sees nor the CPU.
    """
    import torch

    device: Any
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"device={shown(asked)}: {str(error).splitlines()[0]}") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigurationError(f"device={asked!r}: 'cuda', 'cuda:N' or 'cpu' is expected")
    if not torch.cuda.is_available():
        raise ConfigurationError(
            f"device={asked!r}, and torch sees no CUDA device; leave device out, or pass 'cpu'"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigurationError(f"device={asked!r}: there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def _pinned_allocator() -> Allocate:
    """Return an allocator from torch's pool of pinned memory; a dropped batch returns its memory to the pool."""
    import torch

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory: NDArray[Any] = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory.view(dtype).reshape(shape)

    return allocate


@dataclass(frozen=True, kw_only=True)
class DeviceOutput:
    """Delivery of batches on a device."""

    device: Any  # torch device
    ahead: int  # maximum number of steps copied ahead
    finish: Mapping[str, Finish] = field(default_factory=dict)  # field → function applied to it on the device

    def allocate(self) -> Allocate:
        """Return the allocator of batches on the host."""
        return np.empty if self.device.type == "cpu" else _pinned_allocator()

    def feed(self, steps: Iterator[StepBatches], ready: Callable[[], int]) -> Iterator[StepBatches]:
        """Return the steps on the device; `ready` returns the number of steps available without waiting."""
        stream = None if self.device.type == "cpu" else CudaStream(self.device)
        return DeviceFeed(steps, ready, self.device, self.ahead, self.finish, stream)


class DeviceFeed(Iterator[StepBatches]):
    """Iterator over steps whose batches are on the device, ready for use on the caller's current stream.

    Up to `ahead` finished steps are being copied while the trainer works. Waits for the host only if no step is being
    copied. An error of the host is raised after the steps before it.

    Args:
        steps: steps on the host, in tensors.
        ready: returns the number of steps available without waiting.
        device: torch device.
        ahead: maximum number of steps copied ahead.
        finish: field → function applied to it on the device.
        stream: stream of the copies; None if the device is the host, so that nothing is copied.
    """

    def __init__(
        self,
        steps: Iterator[StepBatches],
        ready: Callable[[], int],
        device: Any,
        ahead: int,
        finish: Mapping[str, Finish],
        stream: CudaStream | None,
    ) -> None:
        self._steps, self._ready, self._device, self._ahead = steps, ready, device, ahead
        self._finish, self._stream = finish, stream
        self._sent: deque[tuple[StepBatches, Any]] = deque()
        self._held: deque[tuple[StepBatches, Any]] = deque()  # host memory that is still copied from
        self._error: Exception | None = None

    def __next__(self) -> StepBatches:
        while self._error is None and (not self._sent or (len(self._sent) <= self._ahead and self._ready())):
            try:
                one = next(self._steps)
            except Exception as error:  # noqa: BLE001  raised below, StopIteration too
                self._error = error
            else:
                self._sent.append(self._send(one))
        if not self._sent:
            assert self._error is not None
            raise self._error
        done, event = self._sent.popleft()
        if self._stream is not None:
            tensors = [
                tensor for batch in done.batches for value in batch.values() for tensor in _tensors(value)
            ]
            self._stream.receive(event, tensors)
            while self._held and self._stream.is_done(self._held[0][1]):
                self._held.popleft()
        return done

    def _send(self, one: StepBatches) -> tuple[StepBatches, Any]:
        if self._stream is None:
            return one._replace(batches=[self._finish_batch(batch) for batch in one.batches]), None
        with self._stream.sending():
            sent = one._replace(batches=[self._copy_batch(batch) for batch in one.batches])
        event = self._stream.sent()
        self._held.append((one, event))
        return sent, event

    def _copy_batch(self, batch: Batch) -> Batch:
        copy = batch.to(self._device, non_blocking=True)
        copy.samples = batch.samples  # the attribute stays on the host, where the loader reads it
        return self._finish_batch(copy)

    def _finish_batch(self, batch: Batch) -> Batch:
        for name, finish in self._finish.items():
            if name in batch:
                batch[name] = finish(batch[name])
        return batch


def _tensors(value: Any) -> list[Any]:
    parts = value if isinstance(value, tuple) else (value,)
    return [part for part in parts if hasattr(part, "record_stream")]
