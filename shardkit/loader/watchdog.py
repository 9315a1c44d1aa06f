"""Says what a stalled step waits for: rank, step, lane, shard, stage."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import numpy as np

from shardkit.loader.resources import LoaderResources
from shardkit.loader.row_work import RowWork
from shardkit.loader.schedule import StepGroup
from shardkit.loader.settings import LoaderSetup

__all__ = ["Watchdog"]

_LOADS_BEFORE_ROOM: Final = 16
_LOADS_BEFORE_TELLING: Final = 256  # blocks; of fewer nothing can be said
_ROOM_OF_WINDOWS: Final = (
    1.5  # times what lanes mix at once: windows overlap where one ends and the next begins
)


class Watchdog:
    """Called by whichever thread has waited too long; costs nothing while nothing stalls.

    Args:
        setup, resources: of the loader.
        lanes: how many of them are loaded.
        work: knows which batch is being transformed.
    """

    def __init__(
        self, setup: LoaderSetup, resources: LoaderResources, lanes: int, work: RowWork | None
    ) -> None:
        self._setup, self._resources, self._lanes, self._work = setup, resources, lanes, work

    def stalled(self, waited: float, stage: str, group: StepGroup | None) -> None:
        """Report a wait of `waited` seconds in `stage` of `group`."""
        (rank, world, _), sources = self._setup.topology, self._setup.sources
        facts: dict[str, Any] = {"rank": rank, "world": world, "waited_s": round(waited, 1), "stage": stage}
        at = None if self._work is None else self._work.at
        loading = self._resources.window.longest_load()
        if at is not None:
            facts |= {"stage": "transform", "step": at[0], "sample": at[1]}
        elif loading is not None:
            block, seconds = loading
            shard, inside = sources.rows.shard_of_block(block)
            facts |= {"stage": "load", "shard": sources.reader.shard_name(shard), "block": inside,
                      "loading_s": round(seconds, 1)}  # fmt: skip
            facts |= self._needed_by(block, group)
        elif group is not None:
            facts["step"] = group.numbers[0]
        self._tell(facts)

    def over_memory(self, step: int, needed: int) -> None:
        """A step's blocks alone exceed the memory bound: said once, for it will not be the only one."""
        told, budget = self._resources.told, self._resources.memory
        if "over_memory" in told:
            return
        told.add("over_memory")
        self._setup.events.record("over_memory", step=step, needed_bytes=needed, memory_bytes=budget)
        warnings.warn(
            f"shardkit: the blocks of step {step} take {needed / 2**20:.1f} MiB, memory={budget / 2**20:.1f} MiB; they "
            "are loaded all the same. Give the loader more memory, the plan fewer lanes, or the dataset smaller blocks "
            "(shardkit rebuild --block-size)",
            RuntimeWarning,
            stacklevel=2,
        )

    def admitted(self) -> None:
        """Where a loop loads mostly blocks that it had already, it reads many times what it needs.

        Windows that nobody bounded get more room. Else it is said, once.
        """
        resources, settings = self._resources, self._setup.plan.settings
        window, told = resources.window, resources.told
        full, loads = settings.shuffle == "full", window.loop_loads
        again = window.loop_reloads if full else window.loop_soon_again
        if "rereading" in told or loads < _LOADS_BEFORE_ROOM or 2 * again < loads:
            return
        budget = window.budget
        if not full and resources.make_room(budget):
            window.count_anew()
            return
        if loads < _LOADS_BEFORE_TELLING:
            return
        told.add("rereading")
        self._setup.events.record("rereading", loads=loads, reloads=again, memory_bytes=budget)
        if full:
            advice = (
                'rows of all blocks are mixed with shuffle="full", so that only the whole dataset would do'
            )
        else:
            # more where there are many strata
            mixed = self._lanes * settings.window_blocks * window.mean_block()
            needed = max(2 * budget, _ROOM_OF_WINDOWS * mixed)
            advice = (
                f"{self._lanes} lanes mix rows of {settings.window_blocks} blocks each: give the loader "
                f"memory={_in_mib(needed)!r}, or the plan fewer lanes or a smaller window_blocks"
            )
        warnings.warn(
            f"shardkit: memory={_in_mib(budget)!r} is too little: of {loads} blocks that were read, {again} had been "
            f"read and dropped before in the same loop; {advice}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _needed_by(self, block: int, group: StepGroup | None) -> dict[str, Any]:
        rows = np.zeros(0, np.int64) if group is None else np.flatnonzero(group.block_of == block)
        if group is None or not len(rows):
            return {}
        first = int(rows[0])
        step = int(np.searchsorted(group.borders, first, side="right")) - 1
        return {"step": group.numbers[step], "lane": int(group.slots[first]) // self._setup.plan.cell_size}

    def _tell(self, facts: dict[str, Any]) -> None:
        self._setup.events.record("stall", **{name: value for name, value in facts.items() if name != "rank"})
        if self._setup.config.on_stall is not None:
            self._setup.config.on_stall(facts)
            return
        details = ", ".join(f"{name} {facts[name]}" for name in ("step", "lane", "sample", "shard", "block")
                            if name in facts)  # fmt: skip
        warnings.warn(
            f"shardkit: rank {facts['rank']} of {facts['world']} has waited {facts['waited_s']} s for a batch; stage "
            f"{facts['stage']}" + (f" ({details})" if details else ""),
            RuntimeWarning,
            stacklevel=2,
        )


def _in_mib(size: float) -> str:
    return f"{math.ceil(size / 2**20)}MiB"
