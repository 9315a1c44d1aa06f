"""Blocks that hold nothing, for tests of the window that counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkit.loader.block_window import BlockSource
from shardkit.loader.gather import GatherColumns

__all__ = ["LoadedBlock", "block_source"]


class LoadedBlock(GatherColumns):
    """Stands for a block that was loaded: says which, how and when, and can be asked whether it is still there."""

    def __init__(self, block: int, copied: bool, loop: int = 0) -> None:
        self.block, self.copied, self.loop = block, copied, loop


def _load(blocks: Sequence[int], own_memory: bool) -> list[GatherColumns]:
    return [LoadedBlock(block, own_memory) for block in blocks]


def block_source(**chosen: Any) -> BlockSource:
    """Blocks of one byte, of this machine, no views of files, without room for copies; unless `chosen` otherwise."""
    facts: dict[str, Any] = {
        "load": _load,
        "size_of": lambda block: 1,
        "loaded_size_of": lambda block: 1,
        "near": lambda block: True,
        "mapped": lambda block: False,
        "room": lambda: 0,
        "forget": lambda block: None,
    }
    return BlockSource(**(facts | chosen))
