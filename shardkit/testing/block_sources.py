"""Blocks that hold nothing, for tests of the window that counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardkit.loader.block_window import BlockSource
from shardkit.loader.gather import GatherColumns

__all__ = ["LoadedBlock", "block_source"]


class LoadedBlock(GatherColumns):
    """Stands for a block that was loaded: says which, and can be asked whether it is still there."""

    def __init__(self, block: int) -> None:
        self.block = block


def _load(blocks: Sequence[int]) -> list[GatherColumns]:
    return [LoadedBlock(block) for block in blocks]


def block_source(**chosen: Any) -> BlockSource:
    """Blocks of one byte, of this machine, unless `chosen` otherwise."""
    facts: dict[str, Any] = {
        "load": _load,
        "size_of": lambda block: 1,
        "loaded_size_of": lambda block: 1,
        "near": lambda block: True,
    }
    return BlockSource(**(facts | chosen))
