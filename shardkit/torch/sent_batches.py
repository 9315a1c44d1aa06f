"""Batches on their way from a worker process: the process that gets one notes that it has arrived."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from shardkit.loader import Batch

from .loop_log import Loop, find_log

__all__ = ["Sent", "SentBatch"]


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
