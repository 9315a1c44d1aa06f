"""At the start all ranks say what they are about to read, and refuse with the difference (DESIGN §5).

One exchange of a few hundred bytes of canonical JSON through the process group's store: no collective, so it works
with every backend and needs no device.
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
_QUIET_S = 10.0  # after which ranks that are waited for are named
_log = logging.getLogger("shardkit.loader")
_numbers = itertools.count()


class Exchange:
    """A part of a torch store, in which the ranks that begin together say small things.

    Args:
        store: of torch; the ranks have it to themselves, or make their loaders in the same order. Its timeout is how
            long the slowest is waited for, unless `patience_s` says so.
        rank, world: of those that take part.
        prefix: of the part.

    Attributes:
        store: the same.
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
        """All ranks of torch's process group; None where there is none."""
        distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to it
        rank, world = distributed.get_rank(), distributed.get_world_size()
        return cls(store, rank, world, patience_s=_PATIENCE_S, prefix=f"shardkit/loader/{next(_numbers)}/")

    def put(self, key: str, value: bytes) -> None:
        """Say it."""
        self.store.set(self._prefix + key, value)

    def get(self, key: str, other: int) -> bytes:
        """What rank `other` says."""
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
    """Exchange and compare; returns what all ranks said on every rank, or raises on every rank."""
    exchange.put(str(exchange.rank), dumps(dict(mine)))
    exchange.say_who_is_late()
    found = [loads(exchange.get(str(other), other), _MAX_BYTES) for other in range(exchange.world)]
    check_agreement(found, lanes=lanes, shared=shared)
    return found


def check_agreement(found: Sequence[Mapping[str, Any]], *, lanes: int, shared: bool) -> None:
    """Compare what the ranks said, rank by rank."""
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
