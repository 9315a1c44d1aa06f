"""What the loader hands out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batch", "to_tensors"]


class Batch(dict[str, Any]):
    """One rank's samples of one step (or one cell of it): a dict of fields, with "step" and "samples" among them.

    The arrays belong to whoever holds the batch: the loader never writes to them again.

    Attributes:
        step: the step, counted over the whole run.
        lane: the lane of a cell; −1 where several lanes are concatenated.
        samples: (n,) int64 sample numbers (selected rows in manifest order), in the order of the rows.
        slots: (n,) int64, lane · cell_size + slot of each row inside its cell; names the place in the grid.
        weight: factor for a rank's *mean* loss so that the average over ranks is the mean over the global batch;
            1.0 where all ranks hold equally many samples.
    """

    __slots__ = ("lane", "samples", "slots", "step", "weight")

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        step: int,
        lane: int,
        samples: NDArray[np.int64],
        slots: NDArray[np.int64],
        weight: float,
    ) -> None:
        super().__init__(fields)
        self.step = step
        self.lane = lane
        self.samples = samples
        self.slots = slots
        self.weight = weight
        self["step"] = step
        self["samples"] = samples

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: value for name, value in self.items() if name not in ("step", "samples")}
        return _rebuild, (fields, self.step, self.lane, self.samples, self.slots, self.weight)


def _rebuild(
    fields: dict[str, Any],
    step: int,
    lane: int,
    samples: NDArray[np.int64],
    slots: NDArray[np.int64],
    weight: float,
) -> Batch:
    return Batch(fields, step=step, lane=lane, samples=samples, slots=slots, weight=weight)


def to_tensors(batch: Batch) -> Batch:
    """Turn the arrays of a batch into torch tensors that share their memory; lists stay lists.

    torch is taken from the running program: the loader never imports it (`import shardkit` stays light).
    """
    torch = sys.modules["torch"]
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            batch[name] = torch.from_numpy(value)
        elif isinstance(value, tuple):
            batch[name] = tuple(torch.from_numpy(part) for part in value)
    return batch
