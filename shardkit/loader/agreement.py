"""At the start all ranks say what they are about to read, and refuse with the difference (DESIGN §5).

One exchange of a few hundred bytes of canonical JSON through the process group's store: no collective, so it works
with every backend and needs no device.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from shardkit.errors import RunError, StateError
from shardkit.formats.canonical_json import dumps, loads

__all__ = ["agree", "check_agreement"]

_MAX_BYTES = 1 << 20
_numbers = itertools.count()


def agree(
    rank: int, world: int, mine: Mapping[str, Any], *, lanes: int, shared: bool, timeout_s: float
) -> None:
    """Exchange and compare; returns on every rank or raises on every rank.

    All ranks must make their loaders in the same order; loaders whose rank and world were given as arguments do not
    take part.

    Args:
        rank: in the process group.
        world: of the process group.
        mine: plain values that must be equal on all ranks, but for "lanes", the own ones.
        lanes: of the plan; together the ranks must hold each once.
        shared: ranks with equal lanes are allowed (they share a data-parallel coordinate).
        timeout_s: how long to wait for the slowest rank.

    Raises:
        StateError: ranks differ; names rank and difference.
        RunError: a rank did not come.
    """
    distributed = sys.modules["torch"].distributed
    store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way to it
    prefix = f"shardkit/loader/{next(_numbers)}"
    store.set(f"{prefix}/{rank}", dumps(dict(mine)))
    found: list[Mapping[str, Any]] = []
    for other in range(world):
        try:
            store.wait([f"{prefix}/{other}"], timedelta(seconds=timeout_s))
        except Exception as error:  # the stores of torch raise plain RuntimeErrors of several kinds
            raise RunError(
                f"rank {rank}: rank {other} of {world} has made no loader after {timeout_s:.0f} s; every rank must "
                "make its loaders in the same order, or pass rank= and world= to a loader of its own"
            ) from error
        found.append(loads(bytes(store.get(f"{prefix}/{other}")), _MAX_BYTES))
    check_agreement(found, lanes=lanes, shared=shared)


def check_agreement(found: Sequence[Mapping[str, Any]], *, lanes: int, shared: bool) -> None:
    """Compare what the ranks said, rank by rank.

    Raises:
        StateError: two ranks differ in what must be equal, or lanes are held twice or by no rank.
    """
    first = found[0]
    for rank, other in enumerate(found):
        differing = [name for name in sorted(first.keys() | other.keys())
                     if name != "lanes" and first.get(name) != other.get(name)]  # fmt: skip
        if differing:
            details = "; ".join(
                f"{n} is {first.get(n)!r} on rank 0, {other.get(n)!r} on rank {rank}" for n in differing
            )
            raise StateError(
                f"rank {rank} is about to read other data than rank 0: {details}. Start all ranks with the same "
                "dataset version, plan settings and shardkit"
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
