"""Check at the start that all ranks are about to read the same data.

Ranks exchange a few hundred bytes of canonical JSON through the process group's store. No collective is used, so the
check works with every backend and needs no device.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from shardkit.errors import RunError, StateError
from shardkit.formats.canonical_json import dumps, loads

__all__ = ["Exchange", "agree", "check_agreement"]

_MAX_BYTES = 1 << 20
_PATIENCE_S = 600.0
_QUIET_S = 10.0  # seconds until the ranks that have not answered are logged
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
    def of_process_group(cls) -> Exchange | None:
        """Return an exchange between all ranks of torch's process group; None without a process group."""
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to it
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return cls(store, rank, world, patience_s=_PATIENCE_S, prefix=f"shardkit/loader/{next(_numbers)}/")

    def put(self, key: str, value: bytes) -> None:
        """Write a message."""
        self.store.set(self._prefix + key, value)

    def get(self, key: str, other: int) -> bytes:
        """Return the message that rank `other` writes under `key`; wait for it.

        Raises:
            RunError: the rank has not written it in time.
        """
        try:
            self.store.wait([self._prefix + key], timedelta(seconds=self._patience_s - self._waited_s))
        except Exception as error:  # the stores of torch raise plain RuntimeErrors of several kinds
            raise RunError(
                f"rank {self.rank}: rank {other} of {self.world} has made no loader after "
                f"{self._patience_s:.0f} s; every rank must make its loaders in the same order, or pass rank= and "
                "world= to a loader of its own"
            ) from error
        return bytes(self.store.get(self._prefix + key))

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
    exchange.put(str(exchange.rank), dumps(dict(mine)))
    exchange.say_who_is_late()
    found = [loads(exchange.get(str(other), other), _MAX_BYTES) for other in range(exchange.world)]
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
