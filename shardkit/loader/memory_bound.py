"""How much memory a rank's windows need, and what a loader takes."""

from __future__ import annotations

from typing import Final

from shardkit.errors import ConfigurationError
from shardkit.loader.settings import LoaderConfig, Sources
from shardkit.plan import Plan

__all__ = ["memory_bound", "memory_needed"]

_AHEAD: Final = 0.25  # of the windows, for what comes next
_LEAST: Final = 1 << 20
_PAGE: Final = 4096
_WHOLE: Final = 2 << 30  # where rows of all blocks are mixed, and only the whole dataset would do


def memory_needed(plan: Plan, lanes: int, sources: Sources) -> int:
    """Bytes of the blocks that so many lanes mix rows of at a time, and a quarter more.

    With less the same blocks are read over and over. Nobody needs more than the whole dataset; with ``shuffle="full"``
    nothing less would do, and nothing is asked for.
    """
    blocks = sources.rows.blocks
    if plan.settings.shuffle != "full":
        blocks = min(blocks, lanes * plan.open_blocks)
    else:
        blocks = 0
    size = -(-max(1, sources.mean_block_bytes) // _PAGE) * _PAGE
    return max(_LEAST, int(blocks * size * (1 + _AHEAD)))


def memory_bound(config: LoaderConfig, plan: Plan, lanes: int, sources: Sources) -> int:
    """Bytes that the blocks of one process may take; `config.memory` is that of a rank, shared by its workers.

    Raises:
        ConfigurationError: less than the windows need.
    """
    needed = memory_needed(plan, lanes, sources)
    if config.memory is None:
        whole = min(_WHOLE, sources.rows.blocks * 2 * sources.mean_block_bytes)
        return max(needed, whole) if plan.settings.shuffle == "full" else needed
    bound = config.memory // config.stride
    if bound < needed:
        workers = f" for each of {config.stride} workers" if config.stride > 1 else ""
        raise ConfigurationError(
            f"memory={config.memory} is {bound} bytes{workers}; {lanes} lanes mix rows of {plan.open_blocks} blocks of "
            f"{sources.mean_block_bytes} bytes each and need {needed}{workers}: leave memory out, pass at least "
            f"{needed * config.stride}, or give the plan fewer lanes or a smaller window_blocks"
        )
    return bound
