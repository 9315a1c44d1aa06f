"""Reports of stalls; called by a thread that has waited too long for a step."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from shardkit.loader.gather import StepGroup
from shardkit.loader.settings import LoaderSetup

__all__ = ["report_stall"]


def report_stall(
    setup: LoaderSetup,
    waited: float,
    stage: str,
    group: StepGroup | None,
    *,
    at: tuple[int, int] | None,
    loading: tuple[int, float] | None,
) -> None:
    """Report a wait of `waited` seconds in a stage of the pipeline, while `group` is gathered or awaited.

    `at` is the step and the first sample that are being transformed; `loading` the block that has been loading longest,
    and for how many seconds.
    """
    (rank, world, _), sources = setup.topology, setup.sources
    facts: dict[str, Any] = {"rank": rank, "world": world, "waited_s": round(waited, 1), "stage": stage}
    if at is not None:
        facts |= {"stage": "transform", "step": at[0], "sample": at[1]}
    elif loading is not None:
        block, seconds = loading
        shard, inside = sources.rows.shard_of_block(block)
        facts |= {"stage": "load", "shard": sources.reader.shard_name(shard), "block": inside,
                  "loading_s": round(seconds, 1)}  # fmt: skip
        facts |= _needed_by(setup, block, group)
    elif group is not None:
        facts["step"] = group.numbers[0]
    _tell(setup, facts)


def _needed_by(setup: LoaderSetup, block: int, group: StepGroup | None) -> dict[str, Any]:
    rows = np.zeros(0, np.int64) if group is None else np.flatnonzero(group.block_of == block)
    if group is None or not len(rows):
        return {}
    first = int(rows[0])
    step = int(np.searchsorted(group.borders, first, side="right")) - 1
    return {"step": group.numbers[step], "lane": int(group.slots[first]) // setup.plan.cell_size}


def _tell(setup: LoaderSetup, facts: dict[str, Any]) -> None:
    setup.events.record("stall", **{name: value for name, value in facts.items() if name != "rank"})
    if setup.config.on_stall is not None:
        setup.config.on_stall(facts)
        return
    details = ", ".join(f"{name} {facts[name]}" for name in ("step", "lane", "sample", "shard", "block")
                        if name in facts)  # fmt: skip
    warnings.warn(
        f"shardkit: rank {facts['rank']} of {facts['world']} has waited {facts['waited_s']} s for a batch; stage "
        f"{facts['stage']}" + (f" ({details})" if details else ""),
        RuntimeWarning,
        stacklevel=2,
    )
