"""What shardkit promises of the data that it builds and cannot promise of data that it adopts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Promise", "broken_promises"]


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise that does not hold.

    Attributes:
        name: stable, for programs.
        text: what is so instead, for people.
    """

    name: str
    text: str


def broken_promises(axes: Sequence[str], strata: int, largest_block: int, block_bytes: int) -> list[Promise]:
    """What to tell of an adopted version.

    Args:
        axes: of its strata.
        strata: how many there are.
        largest_block: bytes of its largest block.
        block_bytes: the target.
    """
    if axes:
        balance = (
            f"{strata} strata of {'/'.join(axes)} lie where the tars have them; a shard need not hold all of them, so "
            "batches are balanced over more shards than a build would need"
        )
    else:
        balance = "all samples are one stratum: batches are not balanced by any field"
    return [
        Promise("strata", balance),
        Promise(
            "order",
            "samples were not shuffled over all tars: they lie in the tars' order, so a plan mixes what its window of "
            "blocks holds; choose a larger window where neighbours are alike",
        ),
        Promise(
            "blocks",
            f"blocks are cut at samples as the tars have them: the largest has {largest_block} bytes, the target is "
            f"{block_bytes}; memory is budgeted by the largest",
        ),
        Promise(
            "keys", "keys are unique inside a tar only, and JSON and media stay byte for byte as they are"
        ),
        Promise(
            "custody",
            "the tars stay their owner's: shardkit notices every change when it reads, and names the tar, but nothing "
            "keeps them from being changed, moved or deleted; a change cannot be healed from the root",
        ),
        Promise(
            "erasure", "remove takes samples out of versions; --erase cannot take their bytes out of the tars"
        ),
    ]
