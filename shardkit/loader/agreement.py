"""Check at the start that all ranks are about to read the same data.

Ranks exchange a few hundred bytes of canonical JSON through the process group's store. No collective is used, so the
check works with every backend and needs no device.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from shardkit.documents import decode_plain, encode
from shardkit.errors import RunError, StateError

__all__ = ["Exchange", "agree", "check_agreement"]

_MAX_BYTES = 1 << 20
_PATIENCE_S = 600.0
_QUIET_S = 10.0  # seconds until the ranks that have not answered are logged
_LOADERS_IN_ORDER = (
    "every rank must make its loaders in the same order, or pass rank= and world= to a loader of its own"
)
_log = logging.getLogger("shardkit.loader")
_numbers = itertools.count()


class Exchange:
    """Small messages between the ranks that start together, under one prefix of a torch store.

    Args:
        store: torch store that only these ranks use, or in which they make their loaders in the same order.
        rank: number of this rank among the participants.
        world: number of participants.
        prefix: prefix of all keys.
        patience_s: seconds to wait for the slowest rank; None for the timeout of the store.

    Attributes:
        store: the torch store.
    """

    def __init__(
        self, store: Any, rank: int, world: int, *, prefix: str = "", patience_s: float | None = None
    ) -> None:
        self.store, self._prefix = store, prefix
        self._patience_s: float = store.timeout.total_seconds() if patience_s is None else patience_s
        self.rank, self.world = rank, world
        self._waited_s = 0.0

    @classmethod
    def of_process_group(cls, subject: str = "loader", patience_s: float = _PATIENCE_S) -> Exchange | None:
        """Return an exchange between all ranks of torch's process group; None without a process group.

        All ranks must make their exchanges in the same order.
        """
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to it
        rank, world = distributed.get_rank(), distributed.get_world_size()
        prefix = f"shardkit/{subject}/{next(_numbers)}/"
        return cls(store, rank, world, patience_s=patience_s, prefix=prefix)

    def put(self, key: str, value: bytes) -> None:
        """Write a message.

        Raises:
            RunError: the connection to the store is lost.
        """
        with self._connect():
            self.store.set(self._prefix + key, value)

    def get(
        self, key: str, other: int, *, late: str = "has made no loader", advice: str = _LOADERS_IN_ORDER
    ) -> bytes:
        """Return the message that rank `other` writes under `key`; wait for it.

        Args:
            key: name of the message.
            other: rank that writes it.
            late: what the rank has not done if the wait is too long, for the error.
            advice: what ranks must do, for the error.

        Raises:
            RunError: the rank has not written it in time, or the connection to the store is lost.
        """
        with self._connect():
            try:
                self.store.wait([self._prefix + key], timedelta(seconds=self._patience_s - self._waited_s))
            except Exception as error:  # the stores of torch raise plain RuntimeErrors of several kinds
                if _is_lost(error):
                    raise
                raise RunError(
                    f"rank {self.rank}: rank {other} of {self.world} {late} after {self._patience_s:.0f} s; {advice}"
                ) from error
            return bytes(self.store.get(self._prefix + key))

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the messages under these keys without waiting; None if one has not been written.

        Raises:
            RunError: the connection to the store is lost.
        """
        names = [self._prefix + key for key in keys]
        with self._connect():
            if not self.store.check(names):
                return None
            if self.store.has_extended_api():
                return [bytes(value) for value in self.store.multi_get(names)]
            return [bytes(self.store.get(name)) for name in names]

    @contextlib.contextmanager
    def _connect(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_lost(error):
                raise
            raise RunError(
                f"rank {self.rank}: lost the connection to the store of the process group, because the process that "
                "holds it, usually rank 0, has ended; its own message says why"
            ) from error

    def say_who_is_late(self) -> None:
        """Wait for every rank's message for a while, then name the ranks that have sent none."""
        if self._patience_s <= _QUIET_S:
            return
        keys = [f"{self._prefix}{rank}" for rank in range(self.world)]
        # The stores of torch raise plain RuntimeErrors of several kinds; `get` meets a broken store again.
        with contextlib.suppress(Exception):
            self.store.wait(keys, timedelta(seconds=_QUIET_S))
            return
        self._waited_s = _QUIET_S
        with contextlib.suppress(Exception):
            late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            _log.warning(
                "rank %d has waited %.0f s for a loader on rank %s of %d: every rank makes its loaders in the same "
                "order. A loader for this rank alone takes rank=0, world=1: ds.loader(plan, rank=0, world=1)",
                self.rank, _QUIET_S, ", ".join(map(str, late)), self.world,
            )  # fmt: skip


def _is_lost(error: Exception) -> bool:
    """Return True for a lost connection, and False for a wait that took too long."""
    from torch.distributed import DistNetworkError  # the store comes from torch

    return isinstance(error, DistNetworkError)


def agree(
    exchange: Exchange, mine: Mapping[str, Any], *, lanes: int, shared: bool
) -> Sequence[Mapping[str, Any]]:
    """Compare the messages of all ranks and return them; every rank returns, or every rank raises.

    Args:
        exchange: connects the ranks.
        mine: message of this rank.
        lanes: number of lanes of the plan.
        shared: ranks may work the same lanes, because a device mesh has dimensions other than data-parallel ones.

    Raises:
        RunError: a rank has made no loader in time.
        StateError: ranks are about to read different data, or lanes are not distributed exactly once.
    """
    exchange.put(str(exchange.rank), encode(dict(mine)))
    exchange.say_who_is_late()
    found = [
        decode_plain(exchange.get(str(other), other), max_bytes=_MAX_BYTES) for other in range(exchange.world)
    ]
    check_agreement(found, lanes=lanes, shared=shared)
    return found


def check_agreement(found: Sequence[Mapping[str, Any]], *, lanes: int, shared: bool) -> None:
    """Raise StateError unless the messages agree and every lane is worked exactly once; see `agree`."""
    first = found[0]
    for rank, other in enumerate(found):
        differing = [name for name in sorted(first.keys() | other.keys())
                     if name not in ("lanes", "chosen") and first.get(name) != other.get(name)]  # fmt: skip
        if differing:
            details = "; ".join(
                f"{n} is {first.get(n)!r} on rank 0, {other.get(n)!r} on rank {rank}" for n in differing
            )
            raise StateError(
                f"rank {rank} is about to read other data than rank 0: {details}. Start all ranks with the same "
                "dataset version, plan settings and shardkit. Was a loader made on some ranks only? Loaders are "
                "compared in the order in which they are made; pass rank=0, world=1 to one that a rank has to itself"
            )
    holders: dict[int, int] = {}
    groups: dict[tuple[int, ...], int] = {}
    for rank, one in enumerate(found):
        own = tuple(one["lanes"])
        if shared and groups.setdefault(own, rank) != rank:
            continue
        for lane in own:
            if lane in holders:
                raise StateError(
                    f"lane {lane} is held by rank {holders[lane]} and by rank {rank}: deal each lane once"
                )
            holders[lane] = rank
    missing = [lane for lane in range(lanes) if lane not in holders]
    if missing:
        raise StateError(
            f"lane {missing[0]} is held by no rank ({len(missing)} such lanes): deal each lane once"
        )
