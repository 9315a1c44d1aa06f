"""Settings of a loader, and where its rows come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.errors import ConfigurationError
from shardkit.formats import Schema
from shardkit.loader.decoders import Decoder
from shardkit.loader.rebalancing import Rebalancing
from shardkit.loader.row_work import OnError, Workers
from shardkit.loader.transforms import BatchTransform, SampleTransform
from shardkit.loader.watchdog import OnStall
from shardkit.ranges import Range
from shardkit.reading.blocks import BlockReader
from shardkit.reading.row_map import RowMap
from shardkit.telemetry import TelemetrySettings

__all__ = ["LoaderConfig", "Sources"]

_RANGES = {
    "memory": Range(1 << 20, 1 << 50), "cache_size": Range(0, 1 << 60), "threads": Range(1, 4096),
    "prefetch": Range(0, 10**6), "stride": Range(1, 10**6), "offset": Range(0, 10**6),
}  # fmt: skip
"""Of whole numbers that a loader is told."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where the rows come from: made by `Dataset.loader`."""

    manifest: str  # "sha256:…"
    schema: Schema
    rows: RowMap
    reader: BlockReader
    block_bytes: Callable[[int], int]  # upper bound of a block's raw bytes by dataset-wide number
    mean_block_bytes: int  # raw, of all blocks
    row_bytes: Callable[[Sequence[str]], int]  # typical bytes of these fields of a row
    fetch: Callable[[int], dict[str, Any]]  # one verified sample


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Settings of a loader; see `Dataset.loader` for their meaning."""

    rank: int | None = None
    world: int | None = None
    mesh: Any = None
    lanes: Sequence[int] | None = None
    fields: Sequence[str] | None = None
    by_cell: bool = False
    uneven: bool = False
    rebalance: Rebalancing | None = None
    memory: int | None = None  # of the rank; what its windows need where None
    threads: int | None = None
    prefetch: int | None = None
    tensors: bool | None = None
    decode: Mapping[str, str | Decoder] = field(default_factory=dict)
    transform: SampleTransform | None = None
    batch_transform: BatchTransform | None = None
    workers: Workers = "threads"
    on_error: OnError = "raise"
    stall_s: float = 60.0
    on_stall: OnStall | None = None
    run: Path | None = None
    cache: Path | None = None
    cache_size: int | None = None  # bytes; most of the disk's free room where None
    telemetry: TelemetrySettings | None = field(
        default_factory=TelemetrySettings
    )  # where there is a run directory
    stride: int = (
        1  # hand out every stride-th step from the offset-th on: how DataLoader workers share the steps
    )
    offset: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if (value := getattr(self, name)) is not None:
                allowed.check(name, value)
        Range(0, 604_800, above=True).check("stall_s", self.stall_s, float)
        if self.rebalance is not None:
            self._check_rebalance()
        for name, known in (
            ("workers", ("threads", "processes")),
            ("on_error", ("raise", "substitute", "mask")),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r}: {' or '.join(map(repr, known))} is expected"
                )

    def _check_rebalance(self) -> None:
        if not self.uneven:
            raise ConfigurationError(
                "rebalance moves lanes, so that ranks hold unequal numbers of samples: pass uneven=True and multiply "
                "the loss by batch.weight"
            )
        if self.lanes is not None or self.stride != 1:
            raise ConfigurationError(
                "rebalance deals the lanes itself, in one process per rank: leave out lanes= and stride="
            )
